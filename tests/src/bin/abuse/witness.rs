//! The user who must not notice: asks the daemon at a modest rate and measures how long that takes.
//!
//! Each verb has a thread of its own, so that one that hangs does not hide the others. Beside them runs a
//! control that sends a byte to a thread of the same process and back: what it takes longer than usual is
//! the machine's doing and not the daemon's.

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

use crate::actor::Actor;
use crate::arena::{MODEL, client};
use crate::timings::Timings;
use crate::{Outcome, WITNESS_UID};

/// What is measured and judged.
pub(crate) const VERBS: [&str; 4] = ["version", "ls", "open", "import"];
/// What is measured for comparison.
pub(crate) const CONTROL: &str = "control";
/// How the names of imported models begin; a number follows.
pub(crate) const IMPORTED: &str = "witness/import-";

/// From the start of one call to the start of the next.
const PERIOD: Duration = Duration::from_millis(100);
/// The same of imports, which leave something behind.
const IMPORT_PERIOD: Duration = Duration::from_millis(250);
/// After this a call has failed.
const PATIENCE: Duration = Duration::from_secs(30);

/// The times of a phase by verb.
pub(crate) type Measured = BTreeMap<String, Timings>;

/// The witness as this program sees it.
pub(crate) struct Witness {
    actor: Actor,
    phase: usize,
}

impl Witness {
    /// Starts the process. What it measures before the first phase counts for nothing.
    ///
    /// # Errors
    /// When it cannot be started.
    pub(crate) fn start(socket: &Path, folder: &Path) -> Outcome<Self> {
        let words = [OsStr::new("witness"), socket.as_os_str(), folder.as_os_str()];
        Ok(Self { actor: Actor::start(WITNESS_UID, &words)?, phase: 0 })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.actor.pid()
    }

    /// Calls that begin from now on belong to the next phase; its number.
    ///
    /// # Errors
    /// When the process is gone.
    pub(crate) fn begin_phase(&mut self) -> Outcome<usize> {
        self.phase += 1;
        self.actor.tell(&format!("phase {}", self.phase))?;
        Ok(self.phase)
    }

    /// Waits for the calls of a phase that is over; what they took.
    ///
    /// # Errors
    /// When the process is gone.
    pub(crate) fn report(&mut self, phase: usize) -> Outcome<Measured> {
        self.actor.tell(&format!("report {phase}"))?;
        Ok(serde_json::from_str(&self.actor.line(PATIENCE * 2)?)?)
    }
}

/// What the threads share.
#[derive(Debug, Default)]
struct Notes {
    phase: AtomicUsize,
    /// By phase and verb. A call that has begun is noted as one that is not over.
    calls: Mutex<BTreeMap<usize, Measured>>,
    unfinished: Mutex<Vec<usize>>,
}

/// The role.
///
/// # Errors
/// When the daemon is gone, or the process that started this one.
pub(crate) fn play(socket: &Path, folder: PathBuf) -> Outcome<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    let notes = Arc::<Notes>::default();
    let client = client(socket, PATIENCE);
    let model = MODEL.parse()?;
    let asked = client.clone();
    notes.measure("version", PERIOD, move || asked.version().map(drop).map_err(Into::into));
    let asked = client.clone();
    notes.measure("ls", PERIOD, move || asked.models().map(drop).map_err(Into::into));
    let asked = client.clone();
    notes.measure("open", PERIOD, move || asked.open(&model).map(drop).map_err(Into::into));
    let mut imports = Imports { client, folder, number: 0 };
    notes.prepared("import", IMPORT_PERIOD, move || imports.prepare());
    let (mut near, far) = UnixStream::pair()?;
    thread::spawn(move || echo(far));
    notes.measure(CONTROL, PERIOD, move || {
        near.write_all(&[0])?;
        Ok(near.read_exact(&mut [0])?)
    });
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let (word, number) = line.split_once(' ').ok_or("a word and a number expected")?;
        match word {
            "phase" => notes.phase.store(number.parse()?, Ordering::SeqCst),
            _ => println!("{}", serde_json::to_string(&notes.report(number.parse()?))?),
        }
    }
    Ok(())
}

impl Notes {
    /// Measures a call over and over.
    fn measure(
        self: &Arc<Self>,
        verb: &'static str,
        period: Duration,
        mut call: impl FnMut() -> Outcome<()> + Send + 'static,
    ) {
        let notes = Arc::clone(self);
        thread::spawn(move || {
            loop {
                let start = Instant::now();
                notes.note(verb, &mut call);
                thread::sleep(period.saturating_sub(start.elapsed()));
            }
        });
    }

    /// The same for a call that takes preparations which do not count.
    fn prepared<C: FnMut() -> Outcome<()> + Send + 'static>(
        self: &Arc<Self>,
        verb: &'static str,
        period: Duration,
        mut prepare: impl FnMut() -> Outcome<C> + Send + 'static,
    ) {
        let notes = Arc::clone(self);
        thread::spawn(move || {
            loop {
                let start = Instant::now();
                match prepare() {
                    Ok(mut call) => notes.note(verb, &mut call),
                    Err(error) => notes.note(verb, &mut || Err(error.to_string().into())),
                }
                thread::sleep(period.saturating_sub(start.elapsed()));
            }
        });
    }

    fn note(&self, verb: &str, call: &mut impl FnMut() -> Outcome<()>) {
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

    /// What a phase that is over has measured. Waits for calls that began in it.
    fn report(&self, phase: usize) -> Measured {
        let start = Instant::now();
        while lock(&self.unfinished).contains(&phase) && start.elapsed() < PATIENCE + PERIOD {
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
    /// Writes a file; what is returned imports it.
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
        let params = ImportParams { file_name: "model.gguf".to_owned(), name };
        let client = self.client.clone();
        Ok(move || Ok(client.import(&params, &file, |_completed, _total| ()).map(drop)?))
    }
}

fn lock<T>(shared: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    // Every change is complete before anything could panic.
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}
