//! Power cuts of a real daemon under load: the file system loses all data that it has not written yet, and
//! the daemon is killed.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle, sleep};
use std::time::{Duration, Instant};

use blobd_tests::daemon::TestDaemon;
use blobd_tests::temp_dirs::tmpfs_directory;

use crate::durability::Durability;
use crate::file_system::{Kind, Mounted};
use crate::history::{Contents, History};
use crate::invariants::CrashedStore;
use crate::power_cut::cut_power;
use crate::random::Random;
use crate::report::Report;
use crate::samples::Samples;
use crate::workload::{Clock, Worker};
use crate::{Outcome, Setup, invariants};

/// The number of clients that change the store. Each runs one command at a time, as a process.
const WORKERS: usize = 3;
/// The longest time from the start to the power cut.
const LONGEST_LOAD_MS: usize = 400;

/// Cuts the power on every available file system in every mode of durability. btrfs has no ioctl for it.
///
/// # Errors
/// When a test cannot be run. A violation is not an error; it is reported.
pub(crate) fn run(setup: &Setup, report: &mut Report) -> Outcome<()> {
    for (kind, durability) in setup.combinations().filter(|(kind, _)| *kind != Kind::Btrfs) {
        let part = format!("shutdown on {kind}, {durability}");
        match kind.missing() {
            Some(reason) => report.skip(&part, &reason),
            None => check_file_system(kind, durability, &part, setup, report)?,
        }
    }
    Ok(())
}

fn check_file_system(
    kind: Kind,
    durability: Durability,
    part: &str,
    setup: &Setup,
    report: &mut Report,
) -> Outcome<()> {
    let folder = tmpfs_directory();
    let (image, mounted) = (folder.path().join("image"), folder.path().join("mounted"));
    fs::create_dir(&mounted)?;
    kind.make(&image)?;
    let (samples, config) = (Samples::new(folder.path())?, durability.write_config(folder.path())?);
    let root = mounted.join("store");
    let file_system = Mounted::mount(kind, &image, &mounted)?;
    invariants::create_owned(&root)?;
    file_system.unmount()?;
    let store = CrashedStore { root: &root, config: &config, probe: &samples.probe, pulled: &samples.own };
    let start = Instant::now();
    let (mut contents, mut acknowledged_count, mut cut_count) = (Contents::new(), 0, 0);
    let mut violations = 0;
    for cycle in 0..setup.cycles {
        let random = Random::new(setup.seed, &format!("{part}, cycle {cycle}"));
        let history = Arc::new(History::of(&contents));
        load_and_cut(&Mounted::mount(kind, &image, &mounted)?, &config, &samples, &history, random)?;
        samples.own.iter().for_each(|own| samples.registry().clear_faults(own));
        acknowledged_count += history.acknowledged_count() - contents.len();
        cut_count += 1;
        let file_system = Mounted::mount(kind, &image, &mounted)?;
        match invariants::check(store, &history, u64::MAX) {
            Ok(found) => contents = found,
            Err(violation) => {
                violations += 1;
                let seed = setup.seed;
                report.violation(&format!("{part}, seed {seed}, cycle {cycle}: {violation}"));
                break;
            }
        }
        file_system.unmount()?;
    }
    println!("{part}: {acknowledged_count} changes acknowledged in total");
    report.done(part, cut_count, violations, start.elapsed());
    Ok(())
}

/// Loads a daemon with clients and cuts the power at a random moment.
fn load_and_cut(
    file_system: &Mounted,
    config: &Path,
    samples: &Arc<Samples>,
    history: &Arc<History>,
    mut random: Random,
) -> Outcome<()> {
    let mut daemon = TestDaemon::start_at(&file_system.directory().join("store"), Some(config));
    let is_down = Arc::new(AtomicBool::new(false));
    let clock = clock();
    let worker =
        |number: usize, random| Worker::new(number, daemon.command(), samples, history, &clock, random);
    let mut threads = Vec::new();
    for number in 0..WORKERS {
        let random = random.fork(number);
        threads.push(worker(number, random).work_until(&is_down));
    }
    let reader = worker(0, random.fork(WORKERS));
    threads.push(read_until(&is_down, reader));
    sleep(Duration::from_millis(u64::try_from(random.below(LONGEST_LOAD_MS))?));
    is_down.store(true, Ordering::SeqCst);
    let cut = cut(file_system.directory(), &mut random);
    daemon.kill();
    for thread in threads {
        thread.join().map_err(|_panic| "a client panicked")??;
    }
    cut
}

/// The daemon keeps running for a moment, as after a disk failure: it must not acknowledge changes that are
/// not durable.
fn cut(directory: &Path, random: &mut Random) -> Outcome<()> {
    cut_power(directory)?;
    sleep(Duration::from_millis(u64::try_from(random.below(30))?));
    Ok(())
}

fn read_until(is_down: &Arc<AtomicBool>, mut worker: Worker) -> JoinHandle<Result<(), String>> {
    let is_down = Arc::clone(is_down);
    thread::spawn(move || {
        while !is_down.load(Ordering::SeqCst) {
            worker.read();
        }
        Ok(())
    })
}

/// Counts up. Every response in the history came before the check, whose time is `u64::MAX`.
fn clock() -> Arc<Clock> {
    let ticks = AtomicU64::new(1);
    Arc::new(move || ticks.fetch_add(1, Ordering::SeqCst))
}
