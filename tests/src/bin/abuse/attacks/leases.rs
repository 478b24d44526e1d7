//! As many leases as one user may have connections. The user and root must be answered all the same, and
//! root can end the leases.

use std::thread::sleep;
use std::time::{Duration, Instant};

use blobd_client::error::ClientError;
use blobd_client::protocol::request::{OpenParams, TensorSelection};
use blobd_client::protocol::response::SessionSummary;

use super::Begin;
use crate::Outcome;
use crate::arena::{Arena, MODEL};
use crate::bounds::Check;
use crate::ground::{Ground, Tally};
use crate::timings::float;

const NAME: &str = "leases";
const LEASES: usize = 1024;
/// The daemon keeps an eighth of a user's connections for other requests (docs/PROTOCOL.md).
const LEAST_HELD: u64 = 896;
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

/// Root ends the leases, by the process that holds them: the witness has the same model open.
pub(crate) fn administer(arena: &Arena) -> Vec<Check> {
    let milliseconds = match release(arena) {
        Ok(time) => milliseconds_of(time),
        Err(error) => {
            eprintln!("abuse: blobd release: {error}");
            f64::NAN
        }
    };
    vec![Check::at_most(NAME, "release by root", milliseconds, milliseconds_of(RELEASING), "ms")]
}

fn release(arena: &Arena) -> Outcome<Duration> {
    let client = arena.client(PATIENCE);
    let holder = || Ok::<_, ClientError>(client.sessions()?.sessions.into_iter().find(is_of_attacker));
    let waiting = Instant::now();
    let held =
        || client.sessions().map_or(0, |list| list.sessions.iter().filter(|one| is_of_attacker(one)).count());
    while (held() as u64) < LEAST_HELD && waiting.elapsed() < PATIENCE {
        sleep(Duration::from_millis(200));
    }
    let pid = holder()?.ok_or("the attacker holds no lease")?.pid.to_string();
    let start = Instant::now();
    let run = arena.daemon.command().run(["release", &pid]);
    if run.code != 0 {
        return Err(
            format!("exit code {}: {}", run.code, run.stderr.lines().next().unwrap_or_default()).into()
        );
    }
    while holder()?.is_some() && start.elapsed() < PATIENCE {
        sleep(Duration::from_millis(50));
    }
    Ok(start.elapsed())
}

fn is_of_attacker(session: &SessionSummary) -> bool {
    session.uid == crate::ATTACKER_UID
}

fn milliseconds_of(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
