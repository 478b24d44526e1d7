//! The witness: an ordinary user that sends requests at a modest rate and measures how long they take.
//!
//! Each verb has its own thread, so that one that hangs does not delay the others. A control measurement
//! sends a byte to another thread of the same process and back, without the daemon: if it becomes slower, the
//! cause is a busy machine, not the daemon.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{BufRead as _, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use blobd_client::Client;
use blobd_client::protocol::request::ImportParams;
use blobd_store_format::gguf::GgmlType;
use blobd_tests::model::ModelFile;
use rustix::process::{Signal, set_parent_process_death_signal};

use crate::environment::{MODEL, client};
use crate::role_process::RoleProcess;
use crate::timings::Timings;
use crate::{Outcome, WITNESS_UID};

/// The verbs that are measured and have bounds.
pub(crate) const VERBS: [&str; 4] = ["version", "ls", "open", "import"];
/// The control measurement, without the daemon.
pub(crate) const CONTROL: &str = "control";
/// The prefix of the names of imported models; a number follows.
pub(crate) const IMPORTED: &str = "witness/import-";

/// From the start of one call to the start of the next.
const PERIOD: Duration = Duration::from_millis(100);
/// The same for imports, which are rarer because each stores a model.
const IMPORT_PERIOD: Duration = Duration::from_millis(250);
/// From a call of one verb to the call of the next. Calls of different verbs do not begin at the same time: they would
/// delay each other, in the baseline more or less than during an attack.
const STAGGER: Duration = Duration::from_millis(20);
/// The time limit of a call.
const TIMEOUT: Duration = Duration::from_secs(30);

/// The durations measured in one phase, by verb.
pub(crate) type Measured = BTreeMap<String, Timings>;

/// A handle on the witness's process.
pub(crate) struct Witness {
    process: RoleProcess,
    phase: usize,
}

impl Witness {
    /// Starts the process. Calls before the first phase are not reported.
    ///
    /// # Errors
    /// When it cannot be started.
    pub(crate) fn start(socket: &Path, folder: &Path) -> Outcome<Self> {
        let role = [OsStr::new("witness"), socket.as_os_str(), folder.as_os_str()];
        Ok(Self { process: RoleProcess::start(WITNESS_UID, &role)?, phase: 0 })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Begins the next phase, to which calls that begin from now on belong. Returns its number.
    ///
    /// # Errors
    /// When the process has ended.
    pub(crate) fn begin_phase(&mut self) -> Outcome<usize> {
        self.phase += 1;
        self.process.send_line(&format!("phase {}", self.phase))?;
        Ok(self.phase)
    }

    /// Waits for the last calls of a phase that is over, and returns the phase's measurements.
    ///
    /// # Errors
    /// When the process has ended.
    pub(crate) fn report(&mut self, phase: usize) -> Outcome<Measured> {
        self.process.send_line(&format!("report {phase}"))?;
        Ok(serde_json::from_str(&self.process.read_line(TIMEOUT * 2)?)?)
    }
}

/// Measurements, shared by the threads.
#[derive(Debug, Default)]
struct Measurements {
    phase: AtomicUsize,
    /// By phase and verb.
    calls: Mutex<BTreeMap<usize, Measured>>,
    /// The phases of the calls in progress.
    unfinished: Mutex<Vec<usize>>,
}

/// Runs the witness in this process.
///
/// # Errors
/// When the parent process has ended or sends a malformed line.
pub(crate) fn run(socket: &Path, folder: PathBuf) -> Outcome<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    let measurements = Arc::<Measurements>::default();
    let client = client(socket, TIMEOUT);
    let model = MODEL.parse()?;
    let start = Instant::now();
    let each = |place| Schedule::new(start, place, PERIOD);
    let asked = client.clone();
    measurements.measure("version", each(0), move || asked.version().map(drop).map_err(Into::into));
    let asked = client.clone();
    measurements.measure("ls", each(1), move || asked.models().map(drop).map_err(Into::into));
    let asked = client.clone();
    measurements.measure("open", each(2), move || asked.open(&model).map(drop).map_err(Into::into));
    let mut imports = Imports { client, folder, number: 0 };
    let imported = Schedule::new(start, 4, IMPORT_PERIOD);
    measurements.measure_prepared("import", imported, move || imports.prepare());
    let (mut near, far) = UnixStream::pair()?;
    thread::spawn(move || echo(far));
    measurements.measure(CONTROL, each(3), move || {
        near.write_all(&[0])?;
        Ok(near.read_exact(&mut [0])?)
    });
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let (command, number) =
            line.split_once(' ').ok_or("expected a command and a number, found neither")?;
        match command {
            "phase" => measurements.phase.store(number.parse()?, Ordering::SeqCst),
            _ => println!("{}", serde_json::to_string(&measurements.report(number.parse()?))?),
        }
    }
    Ok(())
}

/// When calls of one verb begin: at fixed times. Times that pass during a call are skipped.
struct Schedule {
    next: Instant,
    period: Duration,
}

impl Schedule {
    /// The schedule of the verb at the given place among all.
    fn new(start: Instant, place: u32, period: Duration) -> Self {
        Self { next: start + STAGGER * place, period }
    }

    /// The time until the next call.
    fn wait_time(&mut self, now: Instant) -> Duration {
        while self.next < now {
            self.next += self.period;
        }
        let wait_time = self.next - now;
        self.next += self.period;
        wait_time
    }
}

impl Measurements {
    /// Repeats and measures a call.
    fn measure(
        self: &Arc<Self>,
        verb: &'static str,
        mut schedule: Schedule,
        mut call: impl FnMut() -> Outcome<()> + Send + 'static,
    ) {
        let measurements = Arc::clone(self);
        thread::spawn(move || {
            loop {
                thread::sleep(schedule.wait_time(Instant::now()));
                measurements.record(verb, &mut call);
            }
        });
    }

    /// Repeats and measures a call with a preparation, which is not measured.
    fn measure_prepared<C: FnMut() -> Outcome<()> + Send + 'static>(
        self: &Arc<Self>,
        verb: &'static str,
        mut schedule: Schedule,
        mut prepare: impl FnMut() -> Outcome<C> + Send + 'static,
    ) {
        let measurements = Arc::clone(self);
        thread::spawn(move || {
            loop {
                let prepared = prepare();
                thread::sleep(schedule.wait_time(Instant::now()));
                match prepared {
                    Ok(mut call) => measurements.record(verb, &mut call),
                    Err(error) => measurements.record(verb, &mut || Err(error.to_string().into())),
                }
            }
        });
    }

    fn record(&self, verb: &str, call: &mut impl FnMut() -> Outcome<()>) {
        let phase = self.phase.load(Ordering::SeqCst);
        lock(&self.unfinished).push(phase);
        let start = Instant::now();
        let outcome = call();
        let milliseconds = start.elapsed().as_secs_f64() * 1e3;
        let mut calls = lock(&self.calls);
        let timings = calls.entry(phase).or_default().entry(verb.to_owned()).or_default();
        timings.milliseconds.push(milliseconds);
        timings.errors.extend(outcome.err().map(|error| error.to_string()));
        drop(calls);
        let mut unfinished = lock(&self.unfinished);
        if let Some(place) = unfinished.iter().position(|other| *other == phase) {
            unfinished.swap_remove(place);
        }
    }

    /// The measurements of a phase that is over. Waits for calls that began in it.
    fn report(&self, phase: usize) -> Measured {
        let start = Instant::now();
        while lock(&self.unfinished).contains(&phase) && start.elapsed() < TIMEOUT + PERIOD {
            thread::sleep(Duration::from_millis(10));
        }
        let mut calls = lock(&self.calls);
        calls.retain(|other, _| *other >= phase);
        calls.remove(&phase).unwrap_or_default()
    }
}

fn echo(mut stream: UnixStream) {
    let mut byte = [0];
    while stream.read_exact(&mut byte).and_then(|()| stream.write_all(&byte)).is_ok() {}
}

/// Small models that share all tensors but one.
struct Imports {
    client: Client,
    folder: PathBuf,
    number: u64,
}

impl Imports {
    /// Writes a file and returns a function that imports it.
    fn prepare(&mut self) -> Outcome<impl FnMut() -> Outcome<()> + use<>> {
        self.number += 1;
        let number = self.number;
        let mut model = ModelFile::empty();
        model.add_noise(0, "token_embd.weight", GgmlType::F32, &[32, 64]);
        model.add_noise(number, "output.weight", GgmlType::F32, &[32, 16]);
        let path = self.folder.join("model.gguf");
        fs::write(&path, model.bytes())?;
        let file = File::open(&path)?;
        let name = Some(format!("{IMPORTED}{number}").parse()?);
        let params = ImportParams { name, ..ImportParams::new("model.gguf") };
        let client = self.client.clone();
        Ok(move || Ok(client.import(&params, &file, |_completed, _total| ()).map(drop)?))
    }
}

fn lock<T>(shared: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    // Every change is complete before anything could panic.
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_of_different_verbs_stay_apart_after_a_long_call() {
        let start = Instant::now();
        let at = |milliseconds| start + Duration::from_millis(milliseconds);
        let wait = |schedule: &mut Schedule, now: u64| schedule.wait_time(at(now)).as_millis();
        let [mut first, mut second] = [0, 1].map(|place| Schedule::new(start, place, PERIOD));
        assert_eq!([wait(&mut first, 0), wait(&mut second, 0)], [0, 20]);
        // Both calls end at the same time, after several periods.
        assert_eq!([wait(&mut first, 350), wait(&mut second, 350)], [50, 70]);
        assert_eq!([wait(&mut first, 401), wait(&mut second, 422)], [99, 98]);
    }
}
