//! The last step: SIGTERM while pulls crawl and imports hang.

use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::Outcome;
use crate::arena::Arena;
use crate::attacker::Attacker;
use crate::attacks;
use crate::bounds::{Check, STOPPING};
use crate::report::Report;

/// Its name for `--only`.
pub(crate) const NAME: &str = "stop";

/// The attacks that go on when the daemon is told to end.
const STILL_THERE: [&str; 2] = ["crawl", "tarpits"];

/// Time for these attacks to take effect.
const HANGING: Duration = Duration::from_secs(4);

/// Stops the daemon.
///
/// # Errors
/// When the machine does not do its part.
pub(crate) fn run(arena: &mut Arena, may_mount: bool, report: &mut Report) -> Outcome<()> {
    report.progress("stop: SIGTERM while pulls crawl and imports hang");
    let mut attackers = Vec::new();
    for attack in STILL_THERE.into_iter().filter_map(attacks::find) {
        let mut attacker = Attacker::start(attack, arena, may_mount)?;
        attacker.wait_until_ready()?;
        attacker.begin()?;
        attackers.push(attacker);
    }
    sleep(HANGING);
    let start = Instant::now();
    let has_ended = arena.daemon.stop_within(STOPPING * 2).is_some();
    let seconds = if has_ended { start.elapsed().as_secs_f64() } else { f64::NAN };
    report.add([Check::at_most(NAME, "end after SIGTERM", seconds, STOPPING.as_secs_f64(), "s")]);
    // A read that cannot be killed would keep a daemon that is still there.
    drop(attackers);
    Ok(())
}
