//! Crash states of a recorded disk: all writes of a working daemon are recorded; then hundreds of images that
//! a power cut could have left are made from the record, and each is mounted and checked.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use blobd_tests::daemon::TestDaemon;
use blobd_tests::temp_dirs::tmpfs_directory;

use crate::crash_image::{CrashState, Record};
use crate::durability::Durability;
use crate::file_system::{Kind, Mounted};
use crate::history::History;
use crate::invariants::CrashedStore;
use crate::random::Random;
use crate::recorder::Recorder;
use crate::report::Report;
use crate::samples::Samples;
use crate::workload::{Clock, Worker};
use crate::{Outcome, Setup, invariants};

/// The number of concurrent clients.
const WORKERS: usize = 2;
/// How often the daemon is started; after each run it is killed.
const RUNS: usize = 4;
/// The shortest run; the longest takes twice as long.
const RUN_TIME: Duration = Duration::from_millis(200);
/// The fewest changes in a run, which takes longer on a busy machine.
const CHANGES_PER_RUN: usize = 12;
/// One bug breaks many states; a few images are enough to find it.
const KEPT_IMAGES: usize = 3;

/// Records and checks every available file system in every mode of durability.
///
/// # Errors
/// When recording fails. A violation is not an error; it is reported.
pub(crate) fn run(setup: &Setup, report: &mut Report) -> Outcome<()> {
    for (kind, durability) in setup.combinations() {
        let part = format!("states on {kind}, {durability}");
        match kind.missing() {
            Some(reason) => report.skip(&part, &reason),
            None => check_combination(kind, durability, &part, setup, report)?,
        }
    }
    Ok(())
}

/// A record, and what its checks need.
struct Recorded {
    kind: Kind,
    record: Record,
    history: Arc<History>,
    samples: Arc<Samples>,
    config: PathBuf,
    /// Contains the sample files.
    folder: tempfile::TempDir,
}

fn check_combination(
    kind: Kind,
    durability: Durability,
    part: &str,
    setup: &Setup,
    report: &mut Report,
) -> Outcome<()> {
    let start = Instant::now();
    let recorded = record(kind, durability, part, setup.seed)?;
    println!(
        "{part}: {} writes and {} flushes recorded, {} changes acknowledged, {} requests of resumed pulls, in {:.0} s",
        recorded.record.len() - recorded.record.flush_count(),
        recorded.record.flush_count(),
        recorded.history.acknowledged_count(),
        recorded.samples.registry().resumed_count(),
        start.elapsed().as_secs_f64(),
    );
    let start = Instant::now();
    let found = check_states(&recorded, part, setup)?;
    for Violation { number, state, text } in found.iter() {
        report.violation(&format!("{part}, seed {}, state {number} ({state}): {text}", setup.seed));
    }
    for violation in found.iter().take(KEPT_IMAGES) {
        keep_image(&recorded, violation, part)?;
    }
    report.done(part, setup.states, found.len(), start.elapsed());
    Ok(())
}

/// A crash state that violates an invariant.
struct Violation {
    number: usize,
    state: CrashState,
    text: String,
}

/// Checks states on as many threads as there are processors, if several images of the file system can be
/// mounted. The states do not depend on the number of threads.
fn check_states(recorded: &Recorded, part: &str, setup: &Setup) -> Outcome<Vec<Violation>> {
    let next = AtomicUsize::new(0);
    let work = |folder: PathBuf| {
        let mut found = Vec::new();
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= setup.states {
                return found;
            }
            let state =
                recorded.record.crash_at_random(&mut Random::new(setup.seed, &format!("{part}, {number}")));
            if let Err(violation) = check_state(recorded, &state, &folder) {
                found.push(Violation { number, state, text: violation.to_string() });
            }
        }
    };
    let processors = thread::available_parallelism().map_or(1, usize::from);
    let threads = if recorded.kind.mounts_copies() { processors } else { 1 };
    let folders = (0..threads).map(|thread| recorded.folder.path().join(format!("checks-{thread}")));
    let folders: Vec<PathBuf> = folders.collect();
    folders.iter().try_for_each(fs::create_dir)?;
    let found = thread::scope(|scope| {
        let threads: Vec<_> = folders.into_iter().map(|folder| scope.spawn(|| work(folder))).collect();
        let joined = threads.into_iter().map(|thread| thread.join().map_err(|_panic| "a check panicked"));
        joined.collect::<Result<Vec<_>, _>>()
    })?;
    let mut found: Vec<_> = found.into_iter().flatten().collect();
    found.sort_by_key(|violation| violation.number);
    Ok(found)
}

/// Runs clients of a daemon whose store is on a recorded disk. Each run of the daemon has its own clients,
/// because changes of one name must not overlap.
fn record(kind: Kind, durability: Durability, part: &str, seed: u64) -> Outcome<Recorded> {
    let folder = tmpfs_directory();
    let (disk, mounted) = (folder.path().join("disk"), folder.path().join("mounted"));
    fs::create_dir(&disk)?;
    fs::create_dir(&mounted)?;
    let empty = folder.path().join("empty");
    kind.make(&empty)?;
    let base = fs::read(&empty)?;
    fs::remove_file(&empty)?;
    let (samples, config) = (Samples::new(folder.path())?, durability.write_config(folder.path())?);
    let history = Arc::new(History::default());
    let recorder = Arc::new(Recorder::mount(base.clone(), &disk)?);
    let file_system = Mounted::mount(kind, recorder.image(), &mounted)?;
    invariants::create_owned(&mounted.join("store"))?;
    let clock: Arc<Clock> = {
        let recorder = Arc::clone(&recorder);
        Arc::new(move || recorder.position())
    };
    let mut daemon = TestDaemon::start_at(&mounted.join("store"), Some(&config));
    for run in 0..RUNS {
        let mut random = Random::new(seed, &format!("{part}, run {run}"));
        let worker = |number| {
            let (number, random) = (run * WORKERS + number, random.fork(number));
            Worker::new(number, daemon.command(), &samples, &history, &clock, random)
        };
        let workers = (0..WORKERS).map(worker).collect();
        let is_long_enough = (RUN_TIME + RUN_TIME / 10 * u32::try_from(random.below(10))?, CHANGES_PER_RUN);
        work_until_killed(workers, &mut daemon, &history, is_long_enough)?;
        samples.own.iter().for_each(|own| samples.registry().clear_faults(own));
        daemon.restart();
    }
    let events = recorder.take_events();
    drop(daemon);
    file_system.unmount()?;
    Ok(Recorded { kind, record: Record::new(&base, events), history, samples, config, folder })
}

/// Runs all workers concurrently, and kills their daemon after the given time and number of changes. So the
/// record contains unfinished changes, and the next daemon starts from there.
fn work_until_killed(
    workers: Vec<Worker>,
    daemon: &mut TestDaemon,
    history: &History,
    (time, changes): (Duration, usize),
) -> Outcome<()> {
    let is_over = Arc::new(AtomicBool::new(false));
    let enough = history.acknowledged_count() + changes;
    let work = |worker: Worker| worker.work_until(&is_over);
    let threads: Vec<_> = workers.into_iter().map(work).collect();
    sleep(time);
    let is_working = || threads.iter().any(|thread| !thread.is_finished());
    while history.acknowledged_count() < enough && is_working() {
        sleep(Duration::from_millis(5));
    }
    is_over.store(true, Ordering::SeqCst);
    daemon.kill();
    for thread in threads {
        thread.join().map_err(|_panic| "a worker panicked")??;
    }
    Ok(())
}

/// Mounts the image of a crash state, which replays the journal, and checks the store on it.
fn check_state(recorded: &Recorded, state: &CrashState, folder: &Path) -> Outcome<()> {
    let (image, mounted) = (folder.join("image"), folder.join("mounted"));
    if !mounted.is_dir() {
        fs::create_dir(&mounted)?;
    }
    recorded.record.write_image(state, &image)?;
    let file_system = Mounted::mount(recorded.kind, &image, &mounted)?;
    let (root, samples) = (file_system.directory().join("store"), &recorded.samples);
    let store =
        CrashedStore { root: &root, config: &recorded.config, probe: &samples.probe, pulled: &samples.own };
    let checked = invariants::check(store, &recorded.history, state.crash as u64);
    file_system.unmount()?;
    checked.map(|_contents| ())
}

/// Keeps the image of a violation: the seed does not reproduce the scheduling of threads, and so not the
/// record.
fn keep_image(recorded: &Recorded, violation: &Violation, part: &str) -> Outcome<()> {
    let folder = Path::new("target/crash");
    fs::create_dir_all(folder)?;
    let name = format!("{}-{}.img", part.replace(", ", "-").replace(' ', "-"), violation.number);
    let path = folder.canonicalize()?.join(name);
    recorded.record.write_image(&violation.state, &path)?;
    println!("  the disk after this crash: mount -o loop {} DIR", path.display());
    Ok(())
}
