//! Kills of `import --move`: client, daemon or both are killed at random moments, in every layout and mode of durability.

use std::time::Instant;

use blobd_tests::daemon::TestDaemon;
use blobd_tests::moves::{KilledMoves, Layout, Victim};
use blobd_tests::temp_dirs::{disk_directory, tmpfs_directory};

use crate::durability::Durability;
use crate::random::Random;
use crate::report::Report;
use crate::{Outcome, Setup};

/// Kills as many moves of each layout as the setup says, spread over the modes of durability.
///
/// # Errors
/// When a test cannot be run. A violation is not an error; it is reported.
pub(crate) fn run(setup: &Setup, report: &mut Report) -> Outcome<()> {
    for layout in setup.layouts() {
        for (number, durability) in setup.durabilities.iter().enumerate() {
            let kills = setup.kills.div_ceil(setup.durabilities.len());
            let kills = kills.min(setup.kills.saturating_sub(number * kills));
            kill_moves(layout, *durability, kills, setup.seed, report)?;
        }
    }
    Ok(())
}

fn kill_moves(
    layout: Layout,
    durability: Durability,
    kills: usize,
    seed: u64,
    report: &mut Report,
) -> Outcome<()> {
    let part = format!("moves of {}, {durability}", layout.name());
    let (folder, store) = (tmpfs_directory(), disk_directory());
    let config = durability.write_config(folder.path())?;
    let daemon = TestDaemon::start_at(&store.path().join("store"), Some(&config));
    let (start, mut violations) = (Instant::now(), 0);
    let mut moves = KilledMoves::new(layout, daemon)?;
    let mut random = Random::new(seed, &part);
    for kill in 0..kills {
        // Also a little after the time that the measured move took.
        let thousandths = u32::try_from(random.below(1100))?;
        let victim = *random.pick(&Victim::ALL);
        if let Err(violation) = moves.kill(thousandths, victim) {
            violations += 1;
            report.violation(&format!("{part}, seed {seed}, kill {kill} of {victim:?}: {violation}"));
            break;
        }
    }
    report.done(&part, kills, violations, start.elapsed());
    Ok(())
}
