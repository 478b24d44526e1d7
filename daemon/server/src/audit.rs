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
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::SystemTime;

use blobd_client::protocol::audit::AuditRecord;
use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use serde_json::{Value, json};
use tokio::sync::watch;
use tracing_mutex::stdsync::Mutex;

pub(crate) use self::class::{ByClass, Class};
pub(crate) use self::directory::LogDirectory;
pub(crate) use self::filter::Filter;
use self::forward::Forwarder;
pub(crate) use self::lifecycle::{LIFECYCLE_VERBS, reload_record, start_record, stop_record, switch};
use self::rate::{ChangeBudget, Omission, RateLimit};
pub(crate) use self::reader::{BATCH_MEMORY, Batch, Latest, LogReader};
use self::rotation::Contents;
pub(crate) use self::rotation::Rotation;
use self::writer::Writer;
use crate::locks::lock;
use crate::names::Names;

/// Records that may wait for the disk; with the longest lines they take 16 MiB.
const MAX_WAITING: usize = 1024;

/// The share of one class. Users can cause opens and attempts faster than the disk can write them; half of the queue is
/// for changes alone.
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
    /// Where the configuration names its directory, in a command without a daemon. A daemon with such a configuration does
    /// not start unless the log can be written.
    required_at: OnceLock<String>,
}

#[derive(Debug)]
struct Running {
    directory: Arc<LogDirectory>,
    shared: Arc<Shared>,
    /// `None` after the stop.
    queue: Mutex<Option<SyncSender<Waiting>>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug)]
struct Waiting {
    line: Vec<u8>,
    class: Class,
}

#[derive(Debug, Default)]
struct Shared {
    classes: ByClass<ClassState>,
    written: watch::Sender<u64>,
    changes: ChangeBudget,
    not_forwarded: AtomicU64,
    names: Names,
}

#[derive(Debug, Default)]
struct ClassState {
    dropped: AtomicU64,
    /// Records that were left out because their users caused too many.
    omitted: AtomicU64,
    waiting: AtomicUsize,
    limit: RateLimit,
    failure: Mutex<Option<String>>,
}

impl Shared {
    fn new() -> Self {
        let names = Names::system();
        // The daemon's own user, for records without a request.
        names.name_of(rustix::process::geteuid().as_raw());
        Self { names, ..Self::default() }
    }

    fn add_dropped(&self, class: Class, records: usize) {
        let dropped = &self.classes.get(class).dropped;
        dropped.fetch_add(u64::try_from(records).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// The line of a record, with the time and the name of its user.
    fn line(&self, record: AuditRecord) -> Vec<u8> {
        AuditRecord { time: now(), user: self.names.known_name_of(record.uid), ..record }.line()
    }

    /// Records of what was left out in intervals that have ended, or until now.
    fn omissions(&self, until_now: bool) -> Vec<Waiting> {
        let of_class = |class: Class| {
            let omissions = self.classes.get(class).limit.take_omissions(until_now);
            omissions.into_iter().map(move |omission| (class, omission))
        };
        let line = |(class, omission)| Waiting { line: self.line(omission_record(class, omission)), class };
        Class::ALL.into_iter().flat_map(of_class).map(line).collect()
    }

    fn has_omissions_to_come(&self) -> bool {
        self.classes.iter().any(|(_, state)| !state.limit.is_idle())
    }
}

#[derive(Debug)]
pub(crate) struct LogSettings {
    pub(crate) directory: LogDirectory,
    pub(crate) rotation: Rotation,
    /// Whether each record is also sent to systemd's journal.
    pub(crate) is_forwarded: bool,
}

/// The state of the audit log, for `doctor` and the metrics. Counts are since the start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AuditStatus {
    /// Its directory; `None` if it is off.
    pub directory: Option<String>,
    /// Why records cannot be written now.
    pub failure: Option<String>,
    pub(crate) dropped: ByClass<u64>,
    pub(crate) omitted: ByClass<u64>,
    pub(crate) not_forwarded: u64,
}

impl AuditStatus {
    pub(crate) fn all_dropped(&self) -> u64 {
        self.dropped.iter().map(|(_, dropped)| *dropped).fold(0, u64::saturating_add)
    }
}

impl AuditLog {
    /// Starts the thread that writes. The files are opened with the first record.
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

    /// Whether the current file of changes can be written, for an administrator who has named its directory. `place` is
    /// where in the configuration. Blocks.
    pub(crate) fn check(&self, place: &str) -> Result<(), ErrorBody> {
        let Some(Running { directory, .. }) = self.running.get() else { return Ok(()) };
        directory.check().map_err(|error| unusable(place, directory, &error))
    }

    /// From now on, what has to be recorded is refused while the log cannot be written.
    pub(crate) fn require(&self, place: String) {
        let _ = self.required_at.set(place);
    }

    /// Whether a request that has to be recorded may be done. Blocks.
    pub(crate) fn check_required(&self) -> Result<(), ErrorBody> {
        self.required_at.get().map_or(Ok(()), |place| self.check(place))
    }

    pub(crate) fn is_required(&self) -> bool {
        self.required_at.get().is_some()
    }

    /// Writes the waiting records, makes them durable, and ends. Blocks.
    pub(crate) fn stop(&self) {
        let Some(running) = self.running.get() else { return };
        drop(lock(&running.queue).take());
        if let Some(Err(_panic)) = lock(&running.thread).take().map(JoinHandle::join) {
            tracing::error!("audit log: its thread has panicked; records since then are lost");
        }
    }

    /// Adds a record of the daemon's own work. Never blocks.
    pub(crate) fn record(&self, record: AuditRecord) {
        let Some(running) = self.running.get() else { return };
        running.send(Waiting { line: running.shared.line(record), class: Class::Change });
    }

    /// Adds a record of a request. Records that a user can cause at will are left out and counted if there are too
    /// many. All changes are recorded, but those of a user with very many changes go to the files of attempts, where
    /// they do not displace the changes of others. Never blocks.
    pub(crate) fn record_as(&self, class: Class, record: AuditRecord) {
        let Some(running) = self.running.get() else { return };
        let (uid, kind) = (record.uid, kind(class, &record));
        let line = running.shared.line(record);
        let state = running.shared.classes.get(class);
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

    /// The files of the log; `None` if it is off.
    pub(crate) fn directory(&self) -> Option<Arc<LogDirectory>> {
        self.running.get().map(|running| Arc::clone(&running.directory))
    }

    /// The number of the last record, when records are written; `None` if the log is off.
    pub(crate) fn written(&self) -> Option<watch::Receiver<u64>> {
        self.running.get().map(|running| running.shared.written.subscribe())
    }

    /// The state, for `doctor`: a log to which nothing was written yet is tried. Blocks.
    pub(crate) fn checked_status(&self) -> AuditStatus {
        let status = self.status();
        let tried = || self.running.get()?.directory.check_present().err().map(|error| error.to_string());
        let failure = status.failure.clone().or_else(tried);
        AuditStatus { failure, ..status }
    }

    pub(crate) fn status(&self) -> AuditStatus {
        let Some(Running { directory, shared, .. }) = self.running.get() else {
            return AuditStatus::default();
        };
        let count = |counter: fn(&ClassState) -> &AtomicU64| {
            ByClass::new(|class| counter(shared.classes.get(class)).load(Ordering::Relaxed))
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
        let waiting = &self.shared.classes.get(class).waiting;
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

/// A directory of the log that cannot be used, and which the configuration names at `place`.
fn unusable(place: &str, directory: &LogDirectory, error: &io::Error) -> ErrorBody {
    let code = match error.kind() {
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => ErrorCode::Denied,
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => ErrorCode::InvalidRequest,
        _ => ErrorCode::Internal,
    };
    ErrorBody::new(code, format!("{place}: {}: {error}", directory.path()))
        .with_hint("create it for the daemon's user alone, or set audit.enabled = false")
}

/// The kind under which an omitted record is counted: the model that was opened, or the verb and its result. Names in
/// failed requests do not make a kind, because clients choose them.
fn kind(class: Class, record: &AuditRecord) -> String {
    match class {
        Class::Open => record.model.clone().unwrap_or_default(),
        Class::Change | Class::Attempt => format!("{} {}", record.verb, record.result),
    }
}

/// What a record of the verb `audit` says about the log itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LogEvent {
    On,
    Off,
    /// Records could not be written.
    Dropped,
    /// Records were left out because a user caused too many.
    Omitted,
    /// A file was removed because the log would have become too large.
    Removed,
}

impl LogEvent {
    pub(crate) const ALL: [Self; 5] = [Self::On, Self::Off, Self::Dropped, Self::Omitted, Self::Removed];

    /// The result of the record.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::On => "on",
            Self::Off => "off",
            Self::Dropped => "dropped",
            Self::Omitted => "omitted",
            Self::Removed => "removed",
        }
    }
}

/// Says how many records of a user were left out, and about what.
fn omission_record(class: Class, omission: Omission) -> AuditRecord {
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
    notice(uid, LogEvent::Omitted, details.into_iter().chain(whose))
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
    notice(None, LogEvent::Removed, details)
}

/// A record about the log itself.
fn notice(
    uid: Option<u32>,
    event: LogEvent,
    details: impl IntoIterator<Item = (&'static str, Value)>,
) -> AuditRecord {
    AuditRecord {
        uid: uid.unwrap_or_else(|| rustix::process::geteuid().as_raw()),
        verb: "audit".to_owned(),
        result: event.name().to_owned(),
        details: details.into_iter().map(|(name, value)| (name.to_owned(), value)).collect(),
        ..AuditRecord::default()
    }
}

fn now() -> String {
    humantime::format_rfc3339_millis(SystemTime::now()).to_string()
}

#[cfg(test)]
mod tests;
