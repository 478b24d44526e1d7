//! The thread that writes the audit log.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use blobd_client::protocol::audit::AuditRecord;
use serde_json::json;

use super::directory::LogDirectory;
use super::{Rotation, Shared, Waiting, lock, now};

/// How long a written record may wait until it is durable. A crash of the process loses no written record; a power
/// cut loses those of this time.
const SYNC_INTERVAL: Duration = Duration::from_secs(1);
/// Records that are written by one call.
const MAX_BATCH_BYTES: usize = 256 << 10;

pub(super) struct Writer {
    directory: Arc<LogDirectory>,
    rotation: Rotation,
    shared: Arc<Shared>,
    /// `None` before the first record, and after an error: then it is opened again.
    current: Option<Current>,
    /// Dropped records that the log has a record of.
    reported: u64,
    has_failed_to_remove: bool,
    /// When the oldest record was written that is not durable yet.
    unsynced_since: Option<Instant>,
}

struct Current {
    number: u64,
    file: File,
    bytes: u64,
    /// Whether it ends within a line.
    is_torn: bool,
}

impl Writer {
    pub(super) fn new(directory: Arc<LogDirectory>, rotation: Rotation, shared: Arc<Shared>) -> Self {
        let (current, unsynced_since) = (None, None);
        Self {
            directory,
            rotation,
            shared,
            current,
            reported: 0,
            has_failed_to_remove: false,
            unsynced_since,
        }
    }

    /// Writes until all senders are gone.
    pub(super) fn run(mut self, waiting: &Receiver<Waiting>) {
        loop {
            let received = match self.unsynced_since {
                Some(since) => waiting.recv_timeout(SYNC_INTERVAL.saturating_sub(since.elapsed())),
                None => waiting.recv().map_err(RecvTimeoutError::from),
            };
            match received {
                Ok(first) => self.write(&batch(&self.shared, first, waiting)),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            if self.unsynced_since.is_some_and(|since| since.elapsed() >= SYNC_INTERVAL) {
                self.sync();
            }
        }
        if self.missing() > 0 {
            self.write(&[]);
        }
        self.sync();
    }

    /// The number of dropped records that the log does not mention yet.
    fn missing(&self) -> u64 {
        self.shared.dropped.load(Ordering::Relaxed).saturating_sub(self.reported)
    }

    fn write(&mut self, lines: &[Vec<u8>]) {
        let missing = self.missing();
        let notice = (missing > 0).then(|| dropped(missing));
        let all: Vec<&[u8]> = notice.iter().chain(lines).map(Vec::as_slice).collect();
        let (written, result) = self.append(&all);
        if written > 0 && notice.is_some() {
            self.reported = self.reported.saturating_add(missing);
        }
        let written = written.saturating_sub(usize::from(notice.is_some()));
        self.shared.add_dropped(lines.len().saturating_sub(written));
        self.note(result);
        self.unsynced_since.get_or_insert_with(Instant::now);
        self.shared.written.send_replace(());
    }

    /// Writes lines, and returns how many of them are complete.
    fn append(&mut self, lines: &[&[u8]]) -> (usize, io::Result<()>) {
        let bytes = lines.iter().map(|line| line.len()).sum::<usize>();
        let current = match self.current_for(bytes) {
            Ok(current) => current,
            Err(error) => return (0, Err(error)),
        };
        let (length, result) = current.append(&lines.concat());
        if result.is_err() {
            self.current = None;
        }
        let mut end = 0;
        let complete = lines.iter().take_while(|line| {
            end += line.len();
            end <= length
        });
        (complete.count(), result)
    }

    /// The file for so many more bytes: the next one if this one would become too large, or was removed.
    fn current_for(&mut self, bytes: usize) -> io::Result<&mut Current> {
        let current = match self.current.take() {
            Some(current) => current,
            None => {
                let last = Current::last(&self.directory)?;
                self.directory.sync()?;
                // The configuration may keep fewer files than before.
                self.remove_old();
                last
            }
        };
        let is_full =
            current.bytes > 0 && current.bytes.saturating_add(bytes as u64) > self.rotation.max_bytes;
        let is_removed = rustix::fs::fstat(&current.file)?.st_nlink == 0;
        if !is_full && !is_removed {
            return Ok(self.current.insert(current));
        }
        current.file.sync_data()?;
        let next = Current::open(&self.directory, current.number.saturating_add(1))?;
        self.directory.sync()?;
        self.current = Some(next);
        self.remove_old();
        self.current.as_mut().ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// Removes the oldest files. They stay if an administrator has made them append-only.
    fn remove_old(&mut self) {
        let removed = self.directory.numbers().and_then(|numbers| {
            let old = numbers.len().saturating_sub(self.rotation.keep);
            numbers.iter().take(old).try_for_each(|number| self.directory.remove(*number))
        });
        let has_failed = removed.is_err();
        if let Err(error) = removed
            && !self.has_failed_to_remove
        {
            tracing::warn!("audit log: {}: cannot remove old files: {error}", self.directory.path());
        }
        self.has_failed_to_remove = has_failed;
    }

    fn sync(&mut self) {
        self.unsynced_since = None;
        let Some(current) = &self.current else { return };
        if let Err(error) = current.file.sync_data() {
            self.note(Err(error));
        }
    }

    /// Logs the first of several failures, and their end.
    fn note(&self, result: io::Result<()>) {
        let mut failure = lock(&self.shared.failure);
        let path = self.directory.path();
        match (result, failure.is_some()) {
            (Err(error), was_failing) => {
                if !was_failing {
                    tracing::error!("audit log: {path}: cannot be written, records are dropped: {error}");
                }
                *failure = Some(error.to_string());
            }
            (Ok(()), true) => {
                let dropped = self.shared.dropped.load(Ordering::Relaxed);
                tracing::warn!("audit log: {path}: is written again; {dropped} records were dropped");
                *failure = None;
            }
            (Ok(()), false) => {}
        }
    }
}

/// The lines that are waiting.
fn batch(shared: &Shared, first: Waiting, waiting: &Receiver<Waiting>) -> Vec<Vec<u8>> {
    let taken = |record: Waiting| {
        shared.limited_waiting.fetch_sub(usize::from(record.is_limited), Ordering::Relaxed);
        record.line
    };
    let mut lines = vec![taken(first)];
    let mut bytes = lines.iter().map(Vec::len).sum::<usize>();
    while bytes < MAX_BATCH_BYTES
        && let Ok(record) = waiting.try_recv()
    {
        let line = taken(record);
        bytes = bytes.saturating_add(line.len());
        lines.push(line);
    }
    lines
}

fn dropped(records: u64) -> Vec<u8> {
    let record = AuditRecord {
        time: now(),
        uid: rustix::process::geteuid().as_raw(),
        verb: "audit".to_owned(),
        result: "dropped".to_owned(),
        details: [("records".to_owned(), json!(records))].into(),
        ..AuditRecord::default()
    };
    record.line()
}

impl Current {
    /// The file with the highest number, or the first one.
    fn last(directory: &LogDirectory) -> io::Result<Self> {
        let number = directory.numbers()?.last().copied().unwrap_or(1);
        Self::open(directory, number)
    }

    fn open(directory: &LogDirectory, number: u64) -> io::Result<Self> {
        let file = directory.append(number)?;
        let bytes = file.metadata()?.len();
        let mut last = [b'\n'];
        if bytes > 0
            && let Some(content) = directory.read(number)?
        {
            content.read_exact_at(&mut last, bytes - 1)?;
        }
        Ok(Self { number, file, bytes, is_torn: last != [b'\n'] })
    }

    /// Appends bytes, after a line break if the file ends within a line. Returns how many of them were written.
    fn append(&mut self, bytes: &[u8]) -> (usize, io::Result<()>) {
        if self.is_torn {
            if let Err(error) = self.file.write_all(b"\n") {
                return (0, Err(error));
            }
            self.bytes = self.bytes.saturating_add(1);
            self.is_torn = false;
        }
        let mut written = 0;
        while let Some(rest) = bytes.get(written..).filter(|rest| !rest.is_empty()) {
            match self.file.write(rest) {
                Ok(0) => return (written, Err(io::ErrorKind::WriteZero.into())),
                Ok(length) => written = written.saturating_add(length),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return (written, Err(error)),
            }
        }
        self.bytes = self.bytes.saturating_add(written as u64);
        (written, Ok(()))
    }
}
