//! The last step: SIGTERM during slow pulls and imports that hang.

use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::Outcome;
use crate::attacker::Attacker;
use crate::attacks;
use crate::bounds::{Check, STOP_BOUND};
use crate::environment::Environment;
use crate::report::Report;

/// The name of this step for `--only`.
pub(crate) const NAME: &str = "stop";

/// The attacks that are running when the daemon gets SIGTERM.
const RUNNING_ATTACKS: [&str; 2] = ["crawl", "tarpits"];

/// Time for these attacks to take effect.
const LEAD_TIME: Duration = Duration::from_secs(4);

/// Stops the daemon.
///
/// # Errors
/// When an attack cannot be started.
pub(crate) fn run(environment: &mut Environment, may_mount: bool, report: &mut Report) -> Outcome<()> {
    report.progress("stop: SIGTERM during slow pulls and imports that hang");
    let mut attackers = Vec::new();
    for attack in RUNNING_ATTACKS.into_iter().filter_map(attacks::find) {
        let mut attacker = Attacker::start(attack, environment, may_mount)?;
        attacker.begin()?;
        attackers.push(attacker);
    }
    sleep(LEAD_TIME);
    let start = Instant::now();
    let has_ended = environment.daemon.stop_within(STOP_BOUND * 2).is_some();
    let seconds = if has_ended { start.elapsed().as_secs_f64() } else { f64::NAN };
    report.add([Check::at_most(NAME, "end after SIGTERM", seconds, STOP_BOUND.as_secs_f64(), "s")]);
    // A daemon that is still running may hang in a read that cannot be killed: this answers the read.
    drop(attackers);
    Ok(())
}
