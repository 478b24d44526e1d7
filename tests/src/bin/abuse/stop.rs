//! The end: SIGTERM while pulls crawl and imports hang.

use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::Outcome;
use crate::arena::Arena;
use crate::attacker::Attacker;
use crate::bounds::{Check, STOPPING};
use crate::hanging_files::HangingFiles;
use crate::report::Report;

/// How it is asked for.
pub(crate) const NAME: &str = "stop";

/// Who is still there when the daemon is told to end.
const STILL_THERE: [&str; 2] = ["crawl", "tarpits"];

/// Until what hangs hangs.
const HANGING: Duration = Duration::from_secs(4);

/// Stops the daemon.
///
/// # Errors
/// When the machine does not do its part.
pub(crate) fn run(
    arena: &mut Arena,
    hanging_files: Option<&HangingFiles>,
    report: &mut Report,
) -> Outcome<()> {
    report.progress("stop: SIGTERM while pulls crawl and imports hang");
    let mut attackers = Vec::new();
    hanging_files.into_iter().for_each(HangingFiles::hang);
    for name in STILL_THERE {
        let file = hanging_files.map(HangingFiles::new_path);
        let mut attacker = Attacker::start(name, arena, file.as_deref())?;
        attacker.wait_until_ready()?;
        attacker.begin()?;
        attackers.push(attacker);
    }
    sleep(HANGING);
    let start = Instant::now();
    let has_ended = arena.daemon.stop_within(STOPPING * 2).is_some();
    let seconds = if has_ended { start.elapsed().as_secs_f64() } else { f64::NAN };
    report.add([Check::at_most(NAME, "end after SIGTERM", seconds, STOPPING.as_secs_f64(), "s")]);
    // Before the daemon is waited for: a read that cannot be killed would keep it.
    if let Some(file) = hanging_files {
        file.release();
    }
    drop(attackers);
    Ok(())
}
