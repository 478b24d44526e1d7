//! `blobd health`

use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use blobd_client::protocol::health::{Health, HealthStatus};
use blobd_store_format::text::printable;
use clap::Args;

use super::Global;
use super::connect::{client_error, connect_for_checks, load_settings, print_result, refuse_silent_socket};

/// Ask the daemon whether it works
#[derive(Debug, Args)]
#[command(
    after_help = "The exit code is 0 if the daemon works, even if it is degraded, 1 if it is failing, 3 if no
daemon is running, and 8 if the system's daemon is installed and does not answer. `blobd doctor`
says what to do.

Examples:
  blobd health
  blobd --quiet health                         only the exit code, for scripts and containers
  blobd health --strict                        exit code 1 if it is degraded, too
  blobd health --json | jq -r '.checks[] | select(.status != \"ok\").detail'"
)]
pub(super) struct Params {
    /// Fail if the daemon is degraded, too
    #[arg(long)]
    strict: bool,
}

pub(super) fn run(global: &Global, params: &Params) -> Result<(), ErrorBody> {
    refuse_silent_socket(global)?;
    let connected = connect_for_checks(global, &*load_settings(global)?)?;
    if connected.is_embedded() {
        let error = ErrorBody::new(ErrorCode::NotFound, "health: no daemon is running");
        return Err(error.with_hint("start it with `blobd serve` or `systemctl start blobd`"));
    }
    let health = connected.client.health().map_err(client_error)?;
    if !global.quiet || global.json {
        print_result(global, &health, render)?;
    }
    let worst = if params.strict { HealthStatus::Ok } else { HealthStatus::Degraded };
    if health.status <= worst { Ok(()) } else { Err(unhealthy(&health)) }
}

fn render(health: &Health) -> String {
    let mut text = format!("{}\n", health.status.name());
    for check in &health.checks {
        text += &format!(
            "  {:8} {:9} {}\n",
            printable(&check.name),
            check.status.name(),
            printable(&check.detail)
        );
    }
    text
}

fn unhealthy(health: &Health) -> ErrorBody {
    let worst = health.checks.iter().filter(|check| check.status == health.status);
    let reasons: Vec<_> = worst.map(|check| format!("{}: {}", check.name, check.detail)).collect();
    let message = format!("the daemon is {}: {}", health.status.name(), reasons.join("; "));
    ErrorBody::new(ErrorCode::Internal, message).with_hint("`blobd doctor` says what to do")
}
