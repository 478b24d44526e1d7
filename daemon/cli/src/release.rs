//! `blobd release`

use blobd_client::client::Client;
use blobd_client::protocol::error::ErrorBody;
use blobd_client::protocol::request::ReleaseParams;
use blobd_client::protocol::response::Released;
use clap::Args;

use super::Global;
use super::advice::Refused;
use super::connect::{client_error, connect, print_report};
use super::model_name::{ModelName, expand_among, names};
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
    /// A process, as `blobd ps` lists it, or a model, by name or by pattern
    #[arg(value_name = "PID|REF|PATTERN")]
    target: Target,
}

#[derive(Clone, Debug)]
enum Target {
    Process(i32),
    Model(ModelName),
}

impl std::str::FromStr for Target {
    type Err = Refused;

    fn from_str(text: &str) -> Result<Self, Refused> {
        let text = text.trim();
        if text.bytes().all(|byte| byte.is_ascii_digit()) {
            let pid = text.parse().ok().filter(|pid| *pid > 0);
            let refused = || Refused::new(&"not a process id: expected a number from 1 to 2147483647");
            return pid.map(Self::Process).ok_or_else(refused);
        }
        text.parse().map(Self::Model)
    }
}

pub(super) fn run(global: &Global, params: &Params) -> Result<(), ErrorBody> {
    let connected = connect(global)?;
    let client = &connected.client;
    let requests = match &params.target {
        Target::Process(pid) => vec![ReleaseParams { pid: Some(*pid), reference: None }],
        Target::Model(model) => of_models(client, model)?,
    };
    let mut released = Released { released: Vec::new() };
    for request in requests {
        released.released.extend(client.release(&request).map_err(client_error)?.released);
    }
    print_report(global, &released, |released| {
        let headings = ["ENDED LEASE OF", "PID", "USER", "COMMAND", "SINCE", "BYTES"];
        let mut table = Table::new(&headings, &[1, 5]);
        released.released.iter().for_each(|session| table.row(row(session)));
        table.render(terminal_width())
    })
}

/// A request for each model. A pattern is compared with the models that are open, which may have been removed.
fn of_models(client: &Client, model: &ModelName) -> Result<Vec<ReleaseParams>, ErrorBody> {
    let open = || {
        let sessions = client.sessions().map_err(client_error)?.sessions;
        Ok(names(sessions.iter().map(|session| session.model.as_str())))
    };
    let named = expand_among(std::slice::from_ref(model), open)?;
    let request = |reference| ReleaseParams { pid: None, reference: Some(reference) };
    named.into_iter().map(|named| named.reference.map(request)).collect()
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
