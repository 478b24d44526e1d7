//! The audit log: one line of JSON for each request that changes the store, gives out descriptors or controls the
//! daemon, whether it succeeded or not, for each other request that is refused, and for what the daemon does by itself.
//!
//! Records go through a bounded queue to one thread, so no request waits for the disk. If the queue or the disk is
//! full, records are dropped; their number is logged, and is itself a record as soon as writing succeeds again. Each
//! [`Class`] has its own part of the queue and its own files. Records that a user can cause as often as it likes are
//! limited, and those that are left out are counted in a record.

mod class;
mod directory;
mod filter;
mod forward;
mod lifecycle;
mod lines;
mod rate;
mod reader;
mod rotation;
mod series;
mod writer;

use std::io;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::SystemTime;

use blobd_client::protocol::audit::AuditRecord;
use serde_json::{Value, json};
use tokio::sync::watch;
use tracing_mutex::stdsync::{Mutex, MutexGuard};

pub(crate) use self::class::{ByClass, Class};
pub(crate) use self::directory::LogDirectory;
pub(crate) use self::filter::Filter;
use self::forward::Forwarder;
pub(crate) use self::lifecycle::{LIFECYCLE_VERBS, reload_record, start_record, stop_record, switch};
use self::rate::{ChangeBudget, Omission, RateLimit};
pub(crate) use self::reader::{BATCH_MEMORY, Batch, Latest, LogReader};
pub(crate) use self::rotation::Rotation;
use self::rotation::{Contents, REMOVED};
use self::writer::Writer;
use crate::names::Names;

/// Records that may wait for the disk; with the longest lines they take 16 MiB.
const MAX_WAITING: usize = 1024;

/// Those of them that are of one class. Users can cause so many opens and attempts that the disk cannot follow; half of
/// the queue is for changes alone.
const fn max_waiting(class: Class) -> usize {
    match class {
        Class::Change => MAX_WAITING,
        Class::Open | Class::Attempt => MAX_WAITING / 4,
    }
}

/// The audit log of a daemon; off until it is started.
#[derive(Debug, Default)]
pub(crate) struct AuditLog {
    running: OnceLock<Running>,
}

#[derive(Debug)]
struct Running {
    directory: Arc<LogDirectory>,
    shared: Arc<Shared>,
    /// `None` after the stop.
    queue: Mutex<Option<SyncSender<Waiting>>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// A record in the queue.
#[derive(Debug)]
struct Waiting {
    line: Vec<u8>,
    class: Class,
}

/// What the writer and the senders share.
#[derive(Debug, Default)]
struct Shared {
    classes: ByClass<ClassState>,
    /// The number of the last record that was written.
    written: watch::Sender<u64>,
    changes: ChangeBudget,
    /// Records that could not be forwarded since the start.
    not_forwarded: AtomicU64,
    names: Names,
}

/// The state of one class.
#[derive(Debug, Default)]
struct ClassState {
    /// Records that could not be written since the start.
    dropped: AtomicU64,
    /// Records that were left out since the start, because their users caused too many.
    omitted: AtomicU64,
    /// Records in the queue.
    waiting: AtomicUsize,
    limit: RateLimit,
    /// The error of the last write, if it failed.
    failure: Mutex<Option<String>>,
}

impl Shared {
    fn new() -> Self {
        let names = Names::system();
        // What the daemon does without a request.
        names.name_of(rustix::process::geteuid().as_raw());
        Self { names, ..Self::default() }
    }

    fn add_dropped(&self, class: Class, records: usize) {
        let dropped = &self.classes.of(class).dropped;
        dropped.fetch_add(u64::try_from(records).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// The line of a record, with the time and the name of its user.
    fn line(&self, record: AuditRecord) -> Vec<u8> {
        AuditRecord { time: now(), user: self.names.known_name_of(record.uid), ..record }.line()
    }

    /// The records that say what was left out in intervals that have ended, or until now.
    fn omissions(&self, until_now: bool) -> Vec<Waiting> {
        let of_class = |class: Class| {
            let omissions = self.classes.of(class).limit.take_omissions(until_now);
            omissions.into_iter().map(move |omission| (class, omission))
        };
        let line = |(class, omission)| Waiting { line: self.line(omission_record(class, omission)), class };
        Class::ALL.into_iter().flat_map(of_class).map(line).collect()
    }

    fn has_omissions_to_come(&self) -> bool {
        self.classes.iter().any(|(_, state)| !state.limit.is_idle())
    }
}

/// Where the audit log is, and its limits.
#[derive(Debug)]
pub(crate) struct LogSettings {
    pub(crate) directory: LogDirectory,
    pub(crate) rotation: Rotation,
    /// Whether each record is also sent to systemd's journal.
    pub(crate) is_forwarded: bool,
}

/// The state of the audit log, for `doctor` and the metrics.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AuditStatus {
    /// Its directory; `None` if it is off.
    pub directory: Option<String>,
    /// Why records cannot be written now.
    pub failure: Option<String>,
    /// The number of records that were dropped since the start.
    pub(crate) dropped: ByClass<u64>,
    /// The number of records that were left out since the start, because their users caused too many.
    pub(crate) omitted: ByClass<u64>,
    /// The number of records that could not be sent to the journal since the start.
    pub(crate) not_forwarded: u64,
}

impl AuditStatus {
    /// The number of records of all classes that were dropped.
    pub(crate) fn all_dropped(&self) -> u64 {
        self.dropped.iter().map(|(_, dropped)| *dropped).fold(0, u64::saturating_add)
    }
}

impl AuditLog {
    /// Starts the thread that writes. The files are opened with the first record.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub(crate) fn start(&self, settings: LogSettings) -> io::Result<()> {
        let LogSettings { directory, rotation, is_forwarded } = settings;
        let (directory, shared) = (Arc::new(directory), Arc::new(Shared::new()));
        let forwarder = is_forwarded.then(Forwarder::new).transpose()?;
        let writer = Writer::new(Arc::clone(&directory), rotation, forwarder, Arc::clone(&shared));
        let (queue, waiting) = std::sync::mpsc::sync_channel(MAX_WAITING);
        let thread =
            std::thread::Builder::new().name("audit".to_owned()).spawn(move || writer.run(&waiting))?;
        let (queue, thread) = (Mutex::new(Some(queue)), Mutex::new(Some(thread)));
        // Only the first start has an effect: a daemon has one log.
        let _ = self.running.set(Running { directory, shared, queue, thread });
        Ok(())
    }

    /// Opens the current file of changes, to find out whether it can be written. Blocks.
    pub(crate) fn check(&self) -> io::Result<()> {
        let Some(Running { directory, .. }) = self.running.get() else { return Ok(()) };
        let failed = |error| io::Error::other(format!("{}: {error}", directory.path()));
        let last = directory.numbers(Class::Change).map_err(failed)?.last().copied().unwrap_or(1);
        directory.append(Class::Change, last).map(drop).map_err(failed)
    }

    /// Writes what is waiting, makes it durable, and ends. Blocks.
    pub(crate) fn stop(&self) {
        let Some(running) = self.running.get() else { return };
        drop(lock(&running.queue).take());
        if let Some(Err(_panic)) = lock(&running.thread).take().map(JoinHandle::join) {
            tracing::error!("audit log: its thread has panicked; records since then are lost");
        }
    }

    /// Adds the record of what the daemon does by itself. Never blocks.
    pub(crate) fn record(&self, record: AuditRecord) {
        let Some(running) = self.running.get() else { return };
        running.send(Waiting { line: running.shared.line(record), class: Class::Change });
    }

    /// Adds a record. Of those that its user may cause as often as it likes, too many are left out and counted. All
    /// changes are recorded, but those of a user who makes very many are in the files of attempts, where they do not
    /// displace the changes of others. Never blocks.
    pub(crate) fn record_as(&self, class: Class, record: AuditRecord) {
        let Some(running) = self.running.get() else { return };
        let (uid, kind) = (record.uid, kind(class, &record));
        let line = running.shared.line(record);
        let state = running.shared.classes.of(class);
        match class {
            Class::Change if running.shared.changes.admit(uid, line.len()) => {
                running.send(Waiting { line, class });
            }
            Class::Change => running.send(Waiting { line, class: Class::Attempt }),
            Class::Open | Class::Attempt if state.limit.admit(uid, &kind, line.len()) => {
                running.send(Waiting { line, class });
            }
            Class::Open | Class::Attempt => drop(state.omitted.fetch_add(1, Ordering::Relaxed)),
        }
    }

    /// What the log consists of; `None` if it is off.
    pub(crate) fn directory(&self) -> Option<Arc<LogDirectory>> {
        self.running.get().map(|running| Arc::clone(&running.directory))
    }

    /// The number of the last record, when records are written; `None` if the log is off.
    pub(crate) fn written(&self) -> Option<watch::Receiver<u64>> {
        self.running.get().map(|running| running.shared.written.subscribe())
    }

    pub(crate) fn status(&self) -> AuditStatus {
        let Some(Running { directory, shared, .. }) = self.running.get() else {
            return AuditStatus::default();
        };
        let count = |counter: fn(&ClassState) -> &AtomicU64| {
            ByClass::new(|class| counter(shared.classes.of(class)).load(Ordering::Relaxed))
        };
        AuditStatus {
            directory: Some(directory.path().to_owned()),
            failure: shared.classes.iter().find_map(|(_, state)| lock(&state.failure).clone()),
            dropped: count(|state| &state.dropped),
            omitted: count(|state| &state.omitted),
            not_forwarded: shared.not_forwarded.load(Ordering::Relaxed),
        }
    }
}

impl Running {
    fn send(&self, record: Waiting) {
        let class = record.class;
        // Counted within the lock, so that it is never more than the queue has.
        let queue = lock(&self.queue);
        let waiting = &self.shared.classes.of(class).waiting;
        let has_room = waiting.load(Ordering::Relaxed) < max_waiting(class);
        if has_room {
            waiting.fetch_add(1, Ordering::Relaxed);
        }
        let is_sent = has_room && queue.as_ref().is_some_and(|queue| queue.try_send(record).is_ok());
        if has_room && !is_sent {
            waiting.fetch_sub(1, Ordering::Relaxed);
        }
        if !is_sent {
            self.shared.add_dropped(class, 1);
        }
    }
}

/// The kind under which an omitted record is counted: the model that was opened, or the verb and its result. Names in
/// failed requests do not make a kind, because clients choose them.
fn kind(class: Class, record: &AuditRecord) -> String {
    match class {
        Class::Open => record.model.clone().unwrap_or_default(),
        Class::Change | Class::Attempt => format!("{} {}", record.verb, record.result),
    }
}

/// Says how many records of a user were left out, and what they were about.
fn omission_record(class: Class, omission: Omission) -> AuditRecord {
    /// The most entries of the list.
    const MAX_LISTED: usize = 50;
    let Omission { uid, records, kinds } = omission;
    let list = if class == Class::Open { "models" } else { "requests" };
    let listed = kinds.into_iter().take(MAX_LISTED).map(|(kind, records)| (kind, json!(records)));
    let whose = uid.is_none().then(|| ("of", json!("users that are not counted one by one")));
    let details = [
        ("records", json!(records)),
        ("class", json!(class.name())),
        (list, Value::Object(listed.collect())),
    ];
    notice(uid, "omitted", details.into_iter().chain(whose))
}

/// Says what was in a file that was removed because the log would have become too large.
fn removal_record(class: Class, contents: Contents) -> AuditRecord {
    let Contents { records, first, last, users } = contents;
    let users = users.into_iter().map(|(user, records)| (user, json!(records)));
    let details = [
        ("records", json!(records)),
        ("class", json!(class.name())),
        ("first", json!(first)),
        ("last", json!(last)),
        ("users", Value::Object(users.collect())),
    ];
    notice(None, REMOVED, details)
}

/// A record about the log itself.
fn notice(
    uid: Option<u32>,
    result: &str,
    details: impl IntoIterator<Item = (&'static str, Value)>,
) -> AuditRecord {
    AuditRecord {
        uid: uid.unwrap_or_else(|| rustix::process::geteuid().as_raw()),
        verb: "audit".to_owned(),
        result: result.to_owned(),
        details: details.into_iter().map(|(name, value)| (name.to_owned(), value)).collect(),
        ..AuditRecord::default()
    }
}

/// RFC 3339 with milliseconds.
fn now() -> String {
    humantime::format_rfc3339_millis(SystemTime::now()).to_string()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Each change is complete before anything can panic.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
