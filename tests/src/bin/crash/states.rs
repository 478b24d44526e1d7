//! Crash states of recorded disks: what the store does is recorded write by write, then hundreds of
//! images are made of what a power cut could have left of it, and each is mounted and checked.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::places::fast_folder;

use crate::crash_image::{CrashState, Record};
use crate::file_system::{Kind, Mounted};
use crate::history::History;
use crate::random::Random;
use crate::recorder::Recorder;
use crate::report::Report;
use crate::workload::{Clock, Sample, Worker, write_sample, write_samples};
use crate::{Outcome, Setup, invariants};

/// How many clients work at a time.
const WORKERS: usize = 2;
/// How often the daemon is killed and started again in the course of it.
const LIVES: usize = 4;
/// The shortest time until then; the longest is twice that.
const LIFE: Duration = Duration::from_millis(150);
/// One broken step breaks many states; a few images show how.
const KEPT_IMAGES: usize = 3;

/// Records and checks every file system that can be had.
///
/// # Errors
/// When recording fails; a violation is no error but is reported.
pub(crate) fn run(setup: &Setup, report: &mut Report) -> Outcome<()> {
    for kind in [Kind::Ext4, Kind::Btrfs, Kind::Xfs] {
        match kind.lack() {
            Some(reason) => report.skip(&format!("states on {kind}"), &reason),
            None => check_file_system(kind, setup, report)?,
        }
    }
    Ok(())
}

/// What the checks of one file system share.
struct Recorded {
    kind: Kind,
    record: Record,
    history: Arc<History>,
    /// A model that was not imported.
    probe: Sample,
    /// Holds the samples.
    folder: tempfile::TempDir,
}

fn check_file_system(kind: Kind, setup: &Setup, report: &mut Report) -> Outcome<()> {
    let recorded = record(kind, setup.seed)?;
    println!(
        "states on {kind}: {} writes and {} flushes recorded, {} changes acknowledged",
        recorded.record.len() - recorded.record.flush_count(),
        recorded.record.flush_count(),
        recorded.history.acknowledged_count()
    );
    let start = Instant::now();
    let mut violations = 0;
    for number in 0..setup.states {
        let mut random = Random::new(setup.seed, &format!("{kind} state {number}"));
        let state = recorded.record.crash_at_random(&mut random);
        if let Err(violation) = check_state(&recorded, &state) {
            let seed = setup.seed;
            report
                .violation(&format!("states on {kind}, seed {seed}, state {number} ({state}): {violation}"));
            if violations < KEPT_IMAGES {
                keep_image(&recorded, &state, seed, number)?;
            }
            violations += 1;
        }
    }
    report.done(&format!("states on {kind}"), setup.states, violations, start.elapsed());
    Ok(())
}

/// Runs clients against a daemon whose store lies on a disk that is recorded. Each life of the
/// daemon has clients of its own, because a name has only one change at a time.
fn record(kind: Kind, seed: u64) -> Outcome<Recorded> {
    let folder = fast_folder();
    let (disk, mounted) = (folder.path().join("disk"), folder.path().join("mounted"));
    fs::create_dir(&disk)?;
    fs::create_dir(&mounted)?;
    let empty = folder.path().join("empty");
    kind.make(&empty)?;
    let base = fs::read(&empty)?;
    fs::remove_file(&empty)?;
    let samples = write_samples(folder.path())?;
    let probe = write_sample(folder.path(), "probe", &ModelFile::dense(9))?;
    let history = Arc::new(History::default());
    let recorder = Arc::new(Recorder::mount(base.clone(), &disk)?);
    let file_system = Mounted::mount(kind, recorder.image(), &mounted)?;
    let clock: Arc<Clock> = {
        let recorder = Arc::clone(&recorder);
        Arc::new(move || recorder.position())
    };
    let mut daemon = TestDaemon::start_at(&mounted.join("store"));
    for life in 0..LIVES {
        let mut random = Random::new(seed, &format!("{kind} life {life}"));
        let worker = |number| {
            let (number, random) = (life * WORKERS + number, random.fork(number));
            Worker::new(number, daemon.command(), &samples, &history, &clock, random)
        };
        let workers = (0..WORKERS).map(worker).collect();
        work_until_killed(workers, &mut daemon, LIFE + LIFE / 10 * u32::try_from(random.below(10))?)?;
        daemon.restart();
    }
    let events = recorder.take_events();
    drop(daemon);
    file_system.unmount()?;
    Ok(Recorded { kind, record: Record::new(&base, events), history, probe, folder })
}

/// Lets all workers work side by side until their daemon is killed. What it had not finished is
/// then in the record too, and the next daemon goes on from there.
fn work_until_killed(workers: Vec<Worker>, daemon: &mut TestDaemon, life: Duration) -> Outcome<()> {
    let is_over = Arc::new(AtomicBool::new(false));
    let work = |worker: Worker| worker.work_until(&is_over);
    let threads: Vec<_> = workers.into_iter().map(work).collect();
    sleep(life);
    is_over.store(true, Ordering::SeqCst);
    daemon.kill();
    for thread in threads {
        thread.join().map_err(|_panic| "a worker panicked")??;
    }
    Ok(())
}

/// Mounts what the crash left, which replays its journal, and checks the store on it.
fn check_state(recorded: &Recorded, state: &CrashState) -> Outcome<()> {
    let (image, mounted) = (recorded.folder.path().join("image"), recorded.folder.path().join("mounted"));
    recorded.record.write_image(state, &image)?;
    let file_system = Mounted::mount(recorded.kind, &image, &mounted)?;
    let root = file_system.directory().join("store");
    let checked = invariants::check(&root, &recorded.history, state.crash as u64, &recorded.probe);
    file_system.unmount()?;
    checked.map(|_contents| ())
}

/// Keeps the evidence: how threads and the kernel took turns is nothing that a seed repeats.
fn keep_image(recorded: &Recorded, state: &CrashState, seed: u64, number: usize) -> Outcome<()> {
    let folder = Path::new("target/crash");
    fs::create_dir_all(folder)?;
    let path = folder.canonicalize()?.join(format!("{}-seed-{seed}-state-{number}.img", recorded.kind));
    recorded.record.write_image(state, &path)?;
    println!("  the disk as that crash left it: mount -o loop {} DIR", path.display());
    Ok(())
}
