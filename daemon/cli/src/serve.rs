//! The daemon: `blobd serve`, `blobd health` and `blobd limit`; and `blobd demo`, which runs one

use std::io;

use blobd_cli_common::Global;
use blobd_cli_common::colour::{Paint, Tone};
use blobd_cli_common::connect::{
    client_error, connect, connect_for_checks, load_settings, print_result, refuse_silent_socket,
};
use blobd_cli_common::output::printable;
use blobd_client::protocol::request::LimitParams;
use blobd_client::protocol::upkeep::{Health, HealthStatus};
use blobd_store_format::size;
use clap::Args;

use crate::{ErrorBody, ErrorCode};

/// Run the daemon
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  blobd serve
  blobd serve --root /srv/models --socket /run/blobd/blobd.sock
  BLOBD_LOG=debug blobd serve                      log more
  BLOBD_LOG=warn,blobd_registry=debug blobd serve  log more of the registries and less of the rest

The log goes to standard error. BLOBD_LOG, or else RUST_LOG, is LEVEL or TARGET=LEVEL, or
several of them separated by commas. Levels: off, error, warn, info, debug, trace.
Targets: blobd, blobd_store, blobd_registry. BLOBD_LOG_FORMAT is text, json or journal.

As a service of systemd, it ends with exit code 78 if the configuration or the store must be
corrected before a start can succeed.")]
pub(super) struct Params {}

pub(super) fn serve(global: &Global) -> Result<(), ErrorBody> {
    (global.server.serve)(&global.paths)
}

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
pub(super) struct HealthArgs {
    /// Fail if the daemon is degraded, too
    #[arg(long)]
    strict: bool,
}

pub(super) fn health(global: &Global, args: &HealthArgs) -> Result<(), ErrorBody> {
    refuse_silent_socket(global)?;
    let connected = connect_for_checks(global, &*load_settings(global)?)?;
    connected.require_daemon("health")?;
    let health = connected.client.health().map_err(client_error)?;
    if !global.quiet || global.json {
        let paint = Paint::of(&io::stdout());
        print_result(global, &health, |health| render_health(health, paint))?;
    }
    let worst = if args.strict { HealthStatus::Ok } else { HealthStatus::Degraded };
    if health.status <= worst { Ok(()) } else { Err(unhealthy(&health)) }
}

fn render_health(health: &Health, paint: Paint) -> String {
    let shown = |status: HealthStatus, text: &str| {
        let tone = match status {
            HealthStatus::Ok => Tone::Good,
            HealthStatus::Degraded => Tone::Warning,
            _ => Tone::Bad,
        };
        paint.text(tone, text)
    };
    let mut text = format!("{}\n", shown(health.status, health.status.name()));
    for check in &health.checks {
        let (name, detail) = (printable(&check.name), printable(&check.detail));
        let status = shown(check.status, &format!("{:9}", check.status.name()));
        text += &format!("  {name:8} {status} {detail}\n");
    }
    text
}

fn unhealthy(health: &Health) -> ErrorBody {
    let worst = health.checks.iter().filter(|check| check.status == health.status);
    let reasons: Vec<_> = worst.map(|check| format!("{}: {}", check.name, check.detail)).collect();
    let message = format!("the daemon is {}: {}", health.status.name(), reasons.join("; "));
    ErrorBody::new(ErrorCode::Internal, message).with_hint("`blobd doctor` says what to do")
}

/// Show or set the rate limit of all pulls and pushes of the daemon together
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  blobd limit                                  show the limit
  blobd limit 20MB                             20 MB per second; applies to running ones at once
  blobd limit off                              no limit

The limit lasts until the daemon stops. It starts with limit_rate under [transfer] in the
configuration. `--limit-rate` of `pull`, `push` and `transfer` limits a single one.")]
pub(super) struct LimitArgs {
    /// Bytes per second, such as 20MB, or off; if omitted, the limit is shown
    #[arg(value_name = "RATE", value_parser = parse_rate)]
    rate: Option<Rate>,
}

#[derive(Clone, Copy, Debug)]
struct Rate(Option<u64>);

fn parse_rate(text: &str) -> Result<Rate, String> {
    let is_off = matches!(text, "off" | "none");
    if is_off { Ok(Rate(None)) } else { size::parse_rate(text).map(|bytes| Rate(Some(bytes))) }
}

pub(super) fn limit(global: &Global, args: &LimitArgs) -> Result<(), ErrorBody> {
    let connected = connect(global)?;
    let limit = match args.rate {
        None => connected.client.limit(),
        Some(Rate(bytes_per_second)) => {
            // A command that serves the store, such as a pull, has transfers to limit, too.
            if connected.is_embedded() {
                connected.require_daemon("limit").map_err(|error| {
                    let hint = "start it with `blobd serve`, limit one pull with `blobd pull --limit-rate`, or set \
                                limit_rate under [transfer] in the configuration";
                    error.with_hint(hint)
                })?;
            }
            connected.client.set_limit(&LimitParams { bytes_per_second })
        }
    };
    let limit = limit.map_err(client_error)?;
    print_result(global, &limit, |limit| match limit.bytes_per_second {
        None => "no limit\n".to_owned(),
        Some(rate) => size::exact_rate(rate) + "\n",
    })
}

/// Show pull, import, sharing, export and removal with generated models, without a network
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  blobd demo                                   needs no network and leaves nothing behind
  blobd demo --json | jq .saved_bytes          only the figures")]
pub(super) struct DemoArgs {}

pub(super) fn demo(global: &Global) -> Result<(), ErrorBody> {
    (global.server.demo)(global.json)
}
