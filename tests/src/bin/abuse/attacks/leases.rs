//! As many leases as one user may have connections. The user and root must be answered all the same, and
//! root can end the leases.

use std::thread::sleep;
use std::time::{Duration, Instant};

use blobd_client::protocol::request::{OpenParams, TensorSelection};

use super::Begin;
use crate::Outcome;
use crate::arena::{Arena, MODEL};
use crate::attacker::{Ground, Tally};
use crate::bounds::{Check, float};

const NAME: &str = "leases";
const LEASES: usize = 1024;
/// The daemon may keep some connections for other things, but it must not solve this by having few.
const LEAST_HELD: u64 = 900;
/// How long the attacker's own questions may take.
const ANSWERING: Duration = Duration::from_secs(2);
/// How long ending the leases may take, the command included.
const RELEASING: Duration = Duration::from_secs(5);
/// How long this waits for the sessions to end.
const PATIENCE: Duration = Duration::from_secs(10);

pub(crate) fn prepare(ground: &Ground) -> Outcome<Begin> {
    let ground = ground.clone();
    Ok(Box::new(move || {
        let (client, mut params) = (ground.client(), OpenParams::new(MODEL.parse()?));
        // Few descriptors: this is about connections.
        params.tensors = TensorSelection::None;
        let hold = |_| client.open_with(&params).inspect_err(|_refused| ground.count("refused")).ok();
        let held: Vec<_> = (0..LEASES).filter_map(hold).collect();
        ground.note("held", held.len() as u64);
        let ask = |what: &str, ask: &dyn Fn() -> bool| {
            let start = Instant::now();
            if ask() {
                ground.note(what, u64::try_from(start.elapsed().as_millis()).unwrap_or(u64::MAX));
            }
        };
        ask("ps", &|| ground.client().sessions().is_ok());
        ask("ls", &|| ground.client().models().is_ok());
        ask("doctor", &|| ground.client().doctor().is_ok());
        // They end with the process.
        std::mem::forget(held);
        Ok(())
    }))
}

/// What the attacker could ask itself.
pub(crate) fn judge(tally: &Tally) -> Vec<Check> {
    let answered = |verb: &str| {
        let milliseconds = tally.get(verb).map_or(f64::NAN, |milliseconds| float(*milliseconds));
        Check::at_most(
            NAME,
            &format!("{verb} of who holds them"),
            milliseconds,
            milliseconds_of(ANSWERING),
            "ms",
        )
    };
    let missing = LEAST_HELD.saturating_sub(tally.get("held").copied().unwrap_or_default());
    let held = Check::at_most(NAME, "leases that are missing", float(missing), 0.0, "leases");
    ["ps", "ls", "doctor"].map(answered).into_iter().chain([held]).collect()
}

/// Root ends the leases.
pub(crate) fn administer(arena: &Arena) -> Outcome<Vec<Check>> {
    let start = Instant::now();
    let run = arena.daemon.command().run(["release", MODEL]);
    let client = arena.client(PATIENCE);
    let of_attacker = || client.sessions().map(|list| count_of_attacker(&list));
    while run.code == 0 && of_attacker().is_ok_and(|count| count > 0) && start.elapsed() < PATIENCE {
        sleep(Duration::from_millis(50));
    }
    let milliseconds = if run.code == 0 { milliseconds_of(start.elapsed()) } else { f64::NAN };
    if run.code != 0 {
        eprintln!(
            "abuse: blobd release: exit code {}: {}",
            run.code,
            run.stderr.lines().next().unwrap_or("")
        );
    }
    Ok(vec![Check::at_most(NAME, "release by root", milliseconds, milliseconds_of(RELEASING), "ms")])
}

fn count_of_attacker(list: &blobd_client::protocol::response::SessionList) -> usize {
    list.sessions.iter().filter(|session| session.uid == crate::ATTACKER_UID).count()
}

fn milliseconds_of(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
