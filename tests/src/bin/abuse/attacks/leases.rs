//! As many leases as one user may have connections. The requests of this user and of root must still be
//! served, and root can end the leases.

use std::thread::sleep;
use std::time::{Duration, Instant};

use blobd_client::error::ClientError;
use blobd_client::protocol::request::{OpenParams, TensorSelection};
use blobd_client::protocol::response::SessionSummary;

use super::Begin;
use crate::Outcome;
use crate::bounds::Check;
use crate::context::{AttackContext, Counts};
use crate::environment::{Environment, MODEL};
use crate::timings::float;

const NAME: &str = "leases";
const LEASES: usize = 1024;
/// The daemon keeps an eighth of a user's connections for other requests (docs/PROTOCOL.md).
const MIN_HELD: u64 = 896;
/// How long the attacker's own requests may take.
const REQUEST_BOUND: Duration = Duration::from_secs(2);
/// How long `blobd release` may take until the leases have ended.
const RELEASE_BOUND: Duration = Duration::from_secs(5);
/// The time limit for all leases to begin, and for all to end.
const TIMEOUT: Duration = Duration::from_secs(10);

pub(crate) fn prepare(context: &AttackContext) -> Outcome<Begin> {
    let context = context.clone();
    Ok(Box::new(move || {
        let (client, mut params) = (context.client(), OpenParams::new(MODEL.parse()?));
        // Without descriptors: the attack is on connections.
        params.tensors = TensorSelection::None;
        let hold = |_| client.open_with(&params).inspect_err(|_refused| context.count("refused")).ok();
        let held: Vec<_> = (0..LEASES).filter_map(hold).collect();
        context.set("held", held.len() as u64);
        let measure = |what: &str, request: &dyn Fn() -> bool| {
            let start = Instant::now();
            if request() {
                context.set(what, u64::try_from(start.elapsed().as_millis()).unwrap_or(u64::MAX));
            }
        };
        measure("ps", &|| context.client().sessions().is_ok());
        measure("ls", &|| context.client().models().is_ok());
        measure("doctor", &|| context.client().doctor().is_ok());
        // The leases end with the process.
        std::mem::forget(held);
        Ok(())
    }))
}

/// Checks the attacker's own requests and the number of its leases.
pub(crate) fn check_counts(counts: &Counts) -> Vec<Check> {
    let request = |verb: &str| {
        let milliseconds = counts.get(verb).map_or(f64::NAN, |milliseconds| float(*milliseconds));
        Check::at_most(
            NAME,
            &format!("{verb} of the holder"),
            milliseconds,
            milliseconds_of(REQUEST_BOUND),
            "ms",
        )
    };
    let missing = MIN_HELD.saturating_sub(counts.get("held").copied().unwrap_or_default());
    let held = Check::at_most(NAME, "leases that are missing", float(missing), 0.0, "leases");
    ["ps", "ls", "doctor"].map(request).into_iter().chain([held]).collect()
}

/// Ends the leases as root. They are named by process, not by model, since the witness has the same model
/// open.
pub(crate) fn administer(environment: &Environment) -> Vec<Check> {
    let milliseconds = match release(environment) {
        Ok(time) => milliseconds_of(time),
        Err(error) => {
            eprintln!("abuse: blobd release: {error}");
            f64::NAN
        }
    };
    vec![Check::at_most(NAME, "release by root", milliseconds, milliseconds_of(RELEASE_BOUND), "ms")]
}

fn release(environment: &Environment) -> Outcome<Duration> {
    let client = environment.client(TIMEOUT);
    let holder = || Ok::<_, ClientError>(client.sessions()?.sessions.into_iter().find(is_of_attacker));
    let waiting = Instant::now();
    let held =
        || client.sessions().map_or(0, |list| list.sessions.iter().filter(|one| is_of_attacker(one)).count());
    while (held() as u64) < MIN_HELD && waiting.elapsed() < TIMEOUT {
        sleep(Duration::from_millis(200));
    }
    let pid = holder()?.ok_or("the attacker holds no lease")?.pid.to_string();
    let start = Instant::now();
    let run = environment.daemon.command().run(["release", &pid]);
    if run.code != 0 {
        return Err(
            format!("exit code {}: {}", run.code, run.stderr.lines().next().unwrap_or_default()).into()
        );
    }
    while holder()?.is_some() && start.elapsed() < TIMEOUT {
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
