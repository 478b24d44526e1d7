//! `blobd doctor`
//!
//! The checks of the command itself work without a daemon, without a store and with a wrong configuration file. Those
//! of the process that has the store open follow.

use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use blobd_client::protocol::upkeep::{CheckStatus, DoctorReport};
use clap::Args;

use self::connection::Reached;
use super::Global;
use super::connect::{client_error, load_settings};
use crate::output::{print, print_json, terminal_width};

mod connection;
mod files;
mod registries;
mod report;
mod user;

/// Check the set-up, and say how to fix what is wrong
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  blobd doctor                                 exit code 1 if a check fails
  blobd doctor --registries                    also contact the registries of the stored models
  blobd doctor --json | jq '.checks[] | select(.status != \"ok\")'

It prints what is wrong, why that matters, and the command that fixes it. It changes nothing and
creates no store. Without --registries it contacts no other machine.")]
pub(super) struct Params {
    /// Also ask the registries of the stored models, and those in the configuration, for a manifest
    #[arg(long)]
    registries: bool,
}

pub(super) fn run(global: &Global, params: &Params) -> Result<(), ErrorBody> {
    let report = check_all(global, params);
    match global.json {
        true => print_json(&report)?,
        // Lines with commands must stay whole, so that they can be copied.
        false => print(&report::render(&report, terminal_width()))?,
    }
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

fn check_all(global: &Global, params: &Params) -> DoctorReport {
    let loaded = load_settings(global);
    let mut checks = vec![files::configuration(global, loaded.as_ref().err())];
    // With a wrong file, the defaults say at least something about the rest.
    let settings = loaded.unwrap_or_else(|_reported| global.server.default_settings());
    checks.extend([files::credentials(&*settings), user::environment(global), user::locked_memory()]);
    checks.push(user::service());
    let Reached { connected, check } = connection::reach(global, &*settings);
    checks.push(check);
    if let Some(connected) = connected {
        match connected.client.doctor().map_err(client_error) {
            Ok(report) => checks.extend(report.checks),
            Err(error) => checks.push(connection::failed("store", &error)),
        }
        if params.registries {
            checks.extend(registries::check(&connected.client, &*settings));
        }
    }
    DoctorReport { checks }
}
