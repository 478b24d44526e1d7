//! `blobd release`

use blobd_client::protocol::error::ErrorBody;
use blobd_client::protocol::request::ReleaseParams;
use blobd_store_format::reference::{Reference, ReferenceError};
use clap::Args;

use super::Global;
use super::connect::report;
use super::ps::row;
use crate::output::{Table, terminal_width};

/// End the leases of a process, or all leases of a model
#[derive(Debug, Args)]
#[command(
    after_help = "A program keeps its maps when its lease ends, and they stay valid; but the model may then be
removed. Ending leases of other users' processes requires administrator rights. A number means a
process: write NAME:latest for a model whose name is a number.

Examples:
  blobd ps                             list processes and the models that they have open
  blobd release 4711                   end the leases of process 4711
  blobd release llama3:8b              end all leases of a model
  blobd release 4711 --json | jq '.released[].model'"
)]
pub(super) struct Params {
    /// A process, as `blobd ps` lists it, or a model
    #[arg(value_name = "PID|REF")]
    target: Target,
}

#[derive(Clone, Debug)]
enum Target {
    Process(i32),
    Model(Reference),
}

impl std::str::FromStr for Target {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.bytes().all(|byte| byte.is_ascii_digit()) {
            let pid = text.parse().ok().filter(|pid| *pid > 0);
            return pid
                .map(Self::Process)
                .ok_or_else(|| "not a process id; a number from 1 to 2147483647 expected".to_owned());
        }
        text.parse().map(Self::Model).map_err(|error: ReferenceError| error.to_string())
    }
}

pub(super) fn run(global: &Global, params: &Params) -> Result<(), ErrorBody> {
    let request = match &params.target {
        Target::Process(pid) => ReleaseParams { pid: Some(*pid), reference: None },
        Target::Model(model) => ReleaseParams { pid: None, reference: Some(model.clone()) },
    };
    report(
        global,
        |client| client.release(&request),
        |released| {
            let headings = ["ENDED LEASE OF", "PID", "USER", "COMMAND", "SINCE", "BYTES"];
            let mut table = Table::new(&headings, &[1, 5]);
            released.released.iter().for_each(|session| table.row(row(session)));
            table.render(terminal_width())
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn number_is_a_process_and_anything_else_a_model() {
        assert!(matches!("4711".parse(), Ok(Target::Process(4711))));
        assert!(matches!("4711:latest".parse(), Ok(Target::Model(_))));
        assert!(matches!("llama3".parse(), Ok(Target::Model(_))));
        for text in ["0", "99999999999", "../x", ""] {
            assert!(text.parse::<Target>().is_err(), "{text:?}");
        }
    }
}
