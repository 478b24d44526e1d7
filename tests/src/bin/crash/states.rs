//! Crash states of recorded disks: what the store does is recorded write by write, then hundreds of
//! images are made of what a power cut could have left of it, and each is mounted and checked.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use blobd_tests::daemon::TestDaemon;
use blobd_tests::places::fast_folder;

use crate::crash_image::{CrashState, Record};
use crate::durability::Durability;
use crate::file_system::{Kind, Mounted};
use crate::history::History;
use crate::invariants::Subject;
use crate::random::Random;
use crate::recorder::Recorder;
use crate::report::Report;
use crate::stock::Stock;
use crate::workload::{Clock, Worker};
use crate::{Outcome, Setup, invariants};

/// How many clients work at a time.
const WORKERS: usize = 2;
/// How often the daemon is killed and started again in the course of it.
const LIVES: usize = 4;
/// The shortest time until then; the longest is twice that.
const LIFE: Duration = Duration::from_millis(200);
/// The fewest changes until then: on a busy machine it takes longer.
const CHANGES_PER_LIFE: usize = 12;
/// One broken step breaks many states; a few images show how.
const KEPT_IMAGES: usize = 3;

/// Records and checks every file system that can be had, with every durability.
///
/// # Errors
/// When recording fails; a violation is no error but is reported.
pub(crate) fn run(setup: &Setup, report: &mut Report) -> Outcome<()> {
    for (kind, durability) in setup.cells() {
        let part = format!("states on {kind}, {durability}");
        match kind.lack() {
            Some(reason) => report.skip(&part, &reason),
            None => check_cell(kind, durability, &part, setup, report)?,
        }
    }
    Ok(())
}

/// What the checks of one record share.
struct Recorded {
    kind: Kind,
    record: Record,
    history: Arc<History>,
    stock: Arc<Stock>,
    config: PathBuf,
    /// Holds the samples.
    folder: tempfile::TempDir,
}

fn check_cell(
    kind: Kind,
    durability: Durability,
    part: &str,
    setup: &Setup,
    report: &mut Report,
) -> Outcome<()> {
    let start = Instant::now();
    let recorded = record(kind, durability, part, setup.seed)?;
    println!(
        "{part}: {} writes and {} flushes recorded, {} changes acknowledged, {} pulls begun again, in {:.0} s",
        recorded.record.len() - recorded.record.flush_count(),
        recorded.record.flush_count(),
        recorded.history.acknowledged_count(),
        recorded.stock.shelf().resumed_count(),
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

/// A state in which something is wrong.
struct Violation {
    number: usize,
    state: CrashState,
    text: String,
}

/// Checks states on as many threads as there are processors, if the file system allows it. Which states they are does not depend on
/// that.
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

/// Runs clients against a daemon whose store lies on a disk that is recorded. Each life of the
/// daemon has clients of its own, because a name has only one change at a time.
fn record(kind: Kind, durability: Durability, part: &str, seed: u64) -> Outcome<Recorded> {
    let folder = fast_folder();
    let (disk, mounted) = (folder.path().join("disk"), folder.path().join("mounted"));
    fs::create_dir(&disk)?;
    fs::create_dir(&mounted)?;
    let empty = folder.path().join("empty");
    kind.make(&empty)?;
    let base = fs::read(&empty)?;
    fs::remove_file(&empty)?;
    let (stock, config) = (Stock::new(folder.path())?, durability.write_config(folder.path())?);
    let history = Arc::new(History::default());
    let recorder = Arc::new(Recorder::mount(base.clone(), &disk)?);
    let file_system = Mounted::mount(kind, recorder.image(), &mounted)?;
    let clock: Arc<Clock> = {
        let recorder = Arc::clone(&recorder);
        Arc::new(move || recorder.position())
    };
    let mut daemon = TestDaemon::start_at(&mounted.join("store"), Some(&config));
    for life in 0..LIVES {
        let mut random = Random::new(seed, &format!("{part}, life {life}"));
        let worker = |number| {
            let (number, random) = (life * WORKERS + number, random.fork(number));
            Worker::new(number, daemon.command(), &stock, &history, &clock, random)
        };
        let workers = (0..WORKERS).map(worker).collect();
        let is_long_enough = (LIFE + LIFE / 10 * u32::try_from(random.below(10))?, CHANGES_PER_LIFE);
        work_until_killed(workers, &mut daemon, &history, is_long_enough)?;
        stock.own.iter().for_each(|own| stock.shelf().mend(own));
        daemon.restart();
    }
    let events = recorder.take_events();
    drop(daemon);
    file_system.unmount()?;
    Ok(Recorded { kind, record: Record::new(&base, events), history, stock, config, folder })
}

/// Lets all workers work side by side until their daemon is killed: after that time and so many
/// changes. What it had not finished is then in the record too, and the next daemon goes on from there.
fn work_until_killed(
    workers: Vec<Worker>,
    daemon: &mut TestDaemon,
    history: &History,
    (life, changes): (Duration, usize),
) -> Outcome<()> {
    let is_over = Arc::new(AtomicBool::new(false));
    let enough = history.acknowledged_count() + changes;
    let work = |worker: Worker| worker.work_until(&is_over);
    let threads: Vec<_> = workers.into_iter().map(work).collect();
    sleep(life);
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

/// Mounts what the crash left, which replays its journal, and checks the store on it.
fn check_state(recorded: &Recorded, state: &CrashState, folder: &Path) -> Outcome<()> {
    let (image, mounted) = (folder.join("image"), folder.join("mounted"));
    if !mounted.is_dir() {
        fs::create_dir(&mounted)?;
    }
    recorded.record.write_image(state, &image)?;
    let file_system = Mounted::mount(recorded.kind, &image, &mounted)?;
    let (root, stock) = (file_system.directory().join("store"), &recorded.stock);
    let subject = Subject { root: &root, config: &recorded.config, probe: &stock.probe, pulled: &stock.own };
    let checked = invariants::check(subject, &recorded.history, state.crash as u64);
    file_system.unmount()?;
    checked.map(|_contents| ())
}

/// Keeps the evidence: how threads and the kernel took turns is nothing that a seed repeats.
fn keep_image(recorded: &Recorded, violation: &Violation, part: &str) -> Outcome<()> {
    let folder = Path::new("target/crash");
    fs::create_dir_all(folder)?;
    let name = format!("{}-{}.img", part.replace(", ", "-").replace(' ', "-"), violation.number);
    let path = folder.canonicalize()?.join(name);
    recorded.record.write_image(&violation.state, &path)?;
    println!("  the disk as that crash left it: mount -o loop {} DIR", path.display());
    Ok(())
}
