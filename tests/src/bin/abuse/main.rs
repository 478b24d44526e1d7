//! Attacks a daemon as one user or several while another user works with it: `just abuse`.
//!
//! The daemon, the attackers and the witness run under three uids. Each attack ([`attacks`]) is a process
//! of its own that exhausts one resource: memory, threads, descriptors, permits, the log. The witness
//! measures how long its own requests take, first while the attackers are idle, then during each attack.
//! [`bounds`] lists what must hold. `docs/SECURITY.md` describes the program and its results.

use std::error::Error;
use std::ffi::OsString;
use std::process::ExitCode;
use std::time::Duration;

mod attacker;
mod attacks;
mod bounds;
mod cleanup;
mod context;
mod environment;
mod monitor;
mod report;
mod requirements;
mod role_process;
mod scenario;
mod stop;
mod timings;
mod witness;

use report::Report;

pub(crate) type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

/// The user that the daemon runs as.
pub(crate) const DAEMON_UID: u32 = 64_101;
/// The user that attacks.
pub(crate) const ATTACKER_UID: u32 = 64_102;
/// The users who attack together, the first of them also alone.
pub(crate) const CROWD: [u32; 8] = [ATTACKER_UID, 64_104, 64_105, 64_106, 64_107, 64_108, 64_109, 64_110];
/// The user whose requests must stay fast.
pub(crate) const WITNESS_UID: u32 = 64_103;

/// Command-line options.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    /// The total time of all attacks.
    duration: Duration,
    /// The one attack to run; all if absent.
    only: Option<String>,
    /// Whether to print one JSON document instead of a table.
    is_json: bool,
}

const USAGE: &str = "--seconds N, --only NAME or --json";

fn main() -> ExitCode {
    let outcome = match std::env::args_os().nth(1) {
        Some(role) if role == "--role" => run_role(std::env::args_os().skip(2)),
        _ => Setup::from_args(std::env::args().skip(1)).and_then(|setup| run(&setup)),
    };
    outcome.unwrap_or_else(|error| {
        eprintln!("abuse: {error}");
        ExitCode::FAILURE
    })
}

fn run(setup: &Setup) -> Outcome<ExitCode> {
    if let Some(reason) = requirements::missing() {
        println!("abuse: skipped: {reason}");
        return Ok(ExitCode::SUCCESS);
    }
    // Comes first because it restarts this program in a private mount namespace if possible.
    let no_mounts = requirements::private_mounts();
    let mut report = Report::new(setup);
    if let Some(reason) = &no_mounts {
        report.skip("imports of files that hang", reason);
    }
    scenario::run(setup, no_mounts.is_none(), &mut report)?;
    report.print();
    Ok(if report.all_hold() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The entry point of the processes that this program starts.
fn run_role(mut arguments: impl Iterator<Item = OsString>) -> Outcome<ExitCode> {
    let mut next = || arguments.next().ok_or("--role: arguments are missing");
    match next()?.to_str() {
        Some("witness") => witness::run(next()?.as_ref(), next()?.into())?,
        Some("attacker") => {
            let name = next()?.into_string().map_err(|name| format!("{name:?}: no such attack"))?;
            attacker::run(&name, next()?.into(), next()?.as_ref(), arguments.map(Into::into).collect())?;
        }
        other => return Err(format!("--role: expected witness or attacker, found {other:?}").into()),
    }
    Ok(ExitCode::SUCCESS)
}

impl Setup {
    fn from_args(arguments: impl Iterator<Item = String>) -> Outcome<Self> {
        let mut setup = Self { duration: Duration::from_secs(120), only: None, is_json: false };
        // `--seconds=7` and `--seconds 7` are the same.
        let mut words =
            arguments.flat_map(|argument| argument.splitn(2, '=').map(str::to_owned).collect::<Vec<_>>());
        while let Some(word) = words.next() {
            let mut value = || words.next().ok_or_else(|| format!("{word}: expected a value, found none"));
            match word.as_str() {
                "--seconds" => setup.duration = Duration::from_secs(value()?.parse()?),
                "--only" => setup.only = Some(scenario::checked_name(value()?)?),
                "--json" => setup.is_json = true,
                _ => return Err(format!("{word}: unknown option: expected {USAGE}").into()),
            }
        }
        Ok(setup)
    }
}
