//! `blobd doctor`

use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use blobd_client::protocol::upkeep::{CheckStatus, DoctorReport};
use clap::Args;

use super::Global;
use super::connect::{client_error, connect, print_result};
use crate::output::{Table, printable, terminal_width};

/// Check the set-up, and say how to fix what is wrong
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  blobd doctor                                 exit code 1 if a check fails
  blobd doctor --json | jq '.checks[] | select(.status != \"ok\")'")]
pub(super) struct Params {}

pub(super) fn run(global: &Global, _params: &Params) -> Result<(), ErrorBody> {
    let report = connect(global)?.client.doctor().map_err(client_error)?;
    print_result(global, &report, render)?;
    let failures: Vec<&str> = report
        .checks
        .iter()
        .filter(|check| check.status == CheckStatus::Failure)
        .map(|check| check.name.as_str())
        .collect();
    if failures.is_empty() {
        return Ok(());
    }
    Err(ErrorBody::new(ErrorCode::Internal, format!("doctor: checks failed: {}", failures.join(", "))))
}

fn render(report: &DoctorReport) -> String {
    let mut table = Table::new(&["CHECK", "STATUS", "FOUND"], &[]);
    for check in &report.checks {
        let status = match check.status {
            CheckStatus::Ok => "ok",
            CheckStatus::Warning => "warning",
            CheckStatus::Failure => "FAILURE",
        };
        table.row([check.name.clone(), status.to_owned(), check.detail.clone()]);
    }
    let mut text = table.render(terminal_width());
    for check in &report.checks {
        if let Some(hint) = &check.hint {
            text.push_str(&format!("{}: {}\n", check.name, printable(hint)));
        }
    }
    text
}
