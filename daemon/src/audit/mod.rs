//! The audit log: one line of JSON for each request that changes the store, gives out descriptors or controls the
//! daemon, whether it succeeded or not, for each other request that is refused, and for what the daemon does by itself.
//!
//! Records go through a bounded queue to one thread, so no request waits for the disk. If the queue or the disk is
//! full, records are dropped; their number is logged, and is itself a record as soon as writing succeeds again. Records
//! of what changes nothing are limited, so that they leave room for the others.

mod directory;
mod filter;
mod lines;
mod rate;
mod reader;
mod writer;

use std::io;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::SystemTime;

use blobd_client::protocol::audit::AuditRecord;
use serde_json::json;
use tokio::sync::watch;
use tracing_mutex::stdsync::{Mutex, MutexGuard};

pub(crate) use self::directory::LogDirectory;
pub(crate) use self::filter::Filter;
use self::rate::{Admission, RateLimit};
pub(crate) use self::reader::{BATCH_MEMORY, Batch, LogReader};
use self::writer::Writer;
use crate::names::Names;

/// When files of the log are replaced and removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rotation {
    /// A file that would become larger is followed by the next one.
    pub(crate) max_bytes: u64,
    /// How many files are kept, including the current one.
    pub(crate) keep: usize,
}

/// Records that may wait for the disk; with the longest lines they take 16 MiB.
const MAX_WAITING: usize = 1024;
/// Those of them that changed nothing. Users can cause so many that the disk cannot follow; the rest of the queue is
/// for changes.
const MAX_LIMITED_WAITING: usize = MAX_WAITING / 2;

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
    limit: RateLimit,
    names: Names,
}

/// A record in the queue.
#[derive(Debug)]
struct Waiting {
    line: Vec<u8>,
    /// Whether it changed nothing.
    is_limited: bool,
}

/// What the writer reports.
#[derive(Debug)]
struct Shared {
    /// Records that could not be written since the start.
    dropped: AtomicU64,
    /// Records in the queue that changed nothing.
    limited_waiting: AtomicUsize,
    /// Changes when records were written.
    written: watch::Sender<()>,
    /// The error of the last write, if it failed.
    failure: Mutex<Option<String>>,
}

impl Shared {
    fn add_dropped(&self, records: usize) {
        self.dropped.fetch_add(u64::try_from(records).unwrap_or(u64::MAX), Ordering::Relaxed);
    }
}

/// The state of the audit log, for `doctor`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AuditStatus {
    /// Its directory; `None` if it is off.
    pub directory: Option<String>,
    /// Why records cannot be written now.
    pub failure: Option<String>,
    /// The number of records that were dropped since the start.
    pub dropped: u64,
}

impl AuditLog {
    /// Starts the thread that writes. The files are opened with the first record.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub(crate) fn start(&self, directory: LogDirectory, rotation: Rotation) -> io::Result<()> {
        let directory = Arc::new(directory);
        let shared = Arc::new(Shared {
            dropped: AtomicU64::new(0),
            limited_waiting: AtomicUsize::new(0),
            written: watch::Sender::new(()),
            failure: Mutex::default(),
        });
        let writer = Writer::new(Arc::clone(&directory), rotation, Arc::clone(&shared));
        let (queue, waiting) = std::sync::mpsc::sync_channel(MAX_WAITING);
        let thread =
            std::thread::Builder::new().name("audit".to_owned()).spawn(move || writer.run(&waiting))?;
        let (queue, thread) = (Mutex::new(Some(queue)), Mutex::new(Some(thread)));
        let (limit, names) = (RateLimit::default(), Names::system());
        // Of what the daemon does by itself.
        names.name_of(rustix::process::geteuid().as_raw());
        // Only the first start has an effect: a daemon has one log.
        let _ = self.running.set(Running { directory, shared, queue, thread, limit, names });
        Ok(())
    }

    /// Opens the current file, to find out whether it can be written. Blocks.
    pub(crate) fn check(&self) -> io::Result<()> {
        let Some(Running { directory, .. }) = self.running.get() else { return Ok(()) };
        let failed = |error| io::Error::other(format!("{}: {error}", directory.path()));
        let last = directory.numbers().map_err(failed)?.last().copied().unwrap_or(1);
        directory.append(last).map(drop).map_err(failed)
    }

    /// Writes what is waiting, makes it durable, and ends. Blocks.
    pub(crate) fn stop(&self) {
        let Some(running) = self.running.get() else { return };
        drop(lock(&running.queue).take());
        if let Some(Err(_panic)) = lock(&running.thread).take().map(JoinHandle::join) {
            tracing::error!("audit log: its thread has panicked; records since then are lost");
        }
    }

    /// Adds the record of a change, with the time and the name of its user. Never blocks.
    pub(crate) fn record(&self, record: AuditRecord) {
        let Some(running) = self.running.get() else { return };
        running.send(Waiting { line: running.line(record), is_limited: false });
    }

    /// The same for what changed nothing, which its user may repeat as often as it likes: too many are omitted.
    pub(crate) fn record_limited(&self, record: AuditRecord) {
        let Some(running) = self.running.get() else { return };
        let uid = record.uid;
        let line = running.line(record);
        let Admission::Admitted { omitted } = running.limit.admit(uid, line.len()) else { return };
        if omitted > 0 {
            running.send(Waiting { line: running.line(omission(uid, omitted)), is_limited: true });
        }
        running.send(Waiting { line, is_limited: true });
    }

    /// What the log consists of; `None` if it is off.
    pub(crate) fn directory(&self) -> Option<Arc<LogDirectory>> {
        self.running.get().map(|running| Arc::clone(&running.directory))
    }

    /// Changes when records are written; `None` if the log is off.
    pub(crate) fn written(&self) -> Option<watch::Receiver<()>> {
        self.running.get().map(|running| running.shared.written.subscribe())
    }

    pub(crate) fn status(&self) -> AuditStatus {
        let Some(Running { directory, shared, .. }) = self.running.get() else {
            return AuditStatus::default();
        };
        AuditStatus {
            directory: Some(directory.path().to_owned()),
            failure: lock(&shared.failure).clone(),
            dropped: shared.dropped.load(Ordering::Relaxed),
        }
    }
}

impl Running {
    fn line(&self, record: AuditRecord) -> Vec<u8> {
        AuditRecord { time: now(), user: self.names.known_name_of(record.uid), ..record }.line()
    }

    fn send(&self, record: Waiting) {
        let is_limited = record.is_limited;
        // Counted within the lock, so that it is never more than the queue has.
        let queue = lock(&self.queue);
        let waiting = &self.shared.limited_waiting;
        let has_room = !is_limited || waiting.load(Ordering::Relaxed) < MAX_LIMITED_WAITING;
        if has_room && is_limited {
            waiting.fetch_add(1, Ordering::Relaxed);
        }
        let is_sent = has_room && queue.as_ref().is_some_and(|queue| queue.try_send(record).is_ok());
        if has_room && is_limited && !is_sent {
            waiting.fetch_sub(1, Ordering::Relaxed);
        }
        if !is_sent {
            self.shared.add_dropped(1);
        }
    }
}

/// Says how many records of a user were omitted.
fn omission(uid: u32, records: u64) -> AuditRecord {
    AuditRecord {
        uid,
        verb: "audit".to_owned(),
        result: "omitted".to_owned(),
        details: [("records".to_owned(), json!(records))].into(),
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
