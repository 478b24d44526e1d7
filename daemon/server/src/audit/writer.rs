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

use super::class::{ByClass, Class};
use super::directory::{LogDirectory, LogFile};
use super::forward::Forwarder;
use super::rotation::Contents;
use super::series::last_seq;
use super::{LogEvent, Rotation, Shared, Waiting, notice, removal_record};
use crate::locks::lock;

/// How long a written record may wait until it is durable. A crash of the process loses no written record; a power
/// cut loses those of this time.
const SYNC_INTERVAL: Duration = Duration::from_secs(1);
/// How often omitted records are reported.
const OMISSIONS_INTERVAL: Duration = Duration::from_secs(2);
const MAX_BATCH_BYTES: usize = 256 << 10;

pub(super) struct Writer {
    directory: Arc<LogDirectory>,
    rotation: Rotation,
    forwarder: Option<Forwarder>,
    shared: Arc<Shared>,
    series: ByClass<Series>,
    /// The number of the last record; `None` until the files were read.
    last_seq: Option<u64>,
    has_failed_to_remove: bool,
    /// The contents of removed files, whose records were not written yet.
    removed: Vec<(Class, Contents)>,
    /// The time of the oldest record that is not durable yet.
    unsynced_since: Option<Instant>,
    omissions_written: Instant,
}

#[derive(Default)]
struct Series {
    /// `None` before the first record, and after an error: then it is opened again.
    current: Option<Current>,
    /// Dropped records that the log already mentions.
    reported: u64,
}

struct Current {
    number: u64,
    file: File,
    bytes: u64,
    /// Whether it ends within a line.
    is_torn: bool,
}

impl Writer {
    pub(super) fn new(
        directory: Arc<LogDirectory>,
        rotation: Rotation,
        forwarder: Option<Forwarder>,
        shared: Arc<Shared>,
    ) -> Self {
        Self {
            directory,
            rotation,
            forwarder,
            shared,
            series: ByClass::default(),
            last_seq: None,
            has_failed_to_remove: false,
            removed: Vec::new(),
            unsynced_since: None,
            omissions_written: Instant::now(),
        }
    }

    /// Writes until all senders are gone.
    pub(super) fn run(mut self, waiting: &Receiver<Waiting>) {
        loop {
            let received = match self.next_work() {
                Some(timeout) => waiting.recv_timeout(timeout),
                None => waiting.recv().map_err(RecvTimeoutError::from),
            };
            match received {
                Ok(first) => self.write(batch(&self.shared, first, waiting)),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            if self.omissions_written.elapsed() >= OMISSIONS_INTERVAL {
                self.write_omissions(false);
            }
            if self.unsynced_since.is_some_and(|since| since.elapsed() >= SYNC_INTERVAL) {
                self.sync();
            }
        }
        self.write_omissions(true);
        if Class::ALL.iter().any(|class| self.missing(*class) > 0) {
            self.write(Vec::new());
        }
        self.sync();
    }

    /// The time until there is work although no record arrives.
    fn next_work(&self) -> Option<Duration> {
        let sync = self.unsynced_since.map(|since| SYNC_INTERVAL.saturating_sub(since.elapsed()));
        // A user is counted before its first record is sent, so none is forgotten by a writer that sleeps.
        let omissions = self
            .shared
            .has_omissions_to_come()
            .then(|| OMISSIONS_INTERVAL.saturating_sub(self.omissions_written.elapsed()));
        sync.into_iter().chain(omissions).min()
    }

    fn write_omissions(&mut self, until_now: bool) {
        self.omissions_written = Instant::now();
        let omissions = self.shared.omissions(until_now);
        if !omissions.is_empty() {
            self.write(omissions);
        }
    }

    /// The record has the class of the removed file: no class takes space from another.
    fn write_removals(&mut self) {
        let removed = std::mem::take(&mut self.removed);
        let record =
            |(class, contents)| Waiting { line: self.shared.line(removal_record(class, contents)), class };
        let records: Vec<Waiting> = removed.into_iter().map(record).collect();
        if !records.is_empty() {
            self.write(records);
        }
    }

    fn missing(&self, class: Class) -> u64 {
        let dropped = self.shared.classes.get(class).dropped.load(Ordering::Relaxed);
        dropped.saturating_sub(self.series.get(class).reported)
    }

    /// Writes records, and before them how many were dropped.
    fn write(&mut self, records: Vec<Waiting>) {
        let missing = ByClass::new(|class| self.missing(class));
        let notices = missing.iter().filter(|(_, records)| **records > 0).map(|(class, records)| {
            let line = self.shared.line(dropped(class, *records));
            Waiting { line, class }
        });
        let all: Vec<Waiting> = notices.chain(records).collect();
        let is_numbered = self.find_last_seq();
        let mut lines = ByClass::<Vec<Vec<u8>>>::default();
        for Waiting { line, class } in all {
            // Lines keep the order of the queue, in which readers merge the classes.
            let line = self.numbered(line);
            self.forward(&line);
            lines.get_mut(class).push(line);
        }
        for (class, lines) in lines.iter().filter(|(_, lines)| !lines.is_empty()) {
            let (written, result) = match &is_numbered {
                Ok(()) => self.append(class, lines),
                Err(error) => (0, Err(io::Error::new(error.kind(), error.to_string()))),
            };
            self.note_written(class, lines.len(), written, *missing.get(class));
            self.note(class, result);
        }
        self.shared.written.send_replace(self.last_seq.unwrap_or_default());
        self.unsynced_since.get_or_insert_with(Instant::now);
        self.write_removals();
    }

    /// Reads the number of the last record, if it is not known.
    fn find_last_seq(&mut self) -> io::Result<()> {
        if self.last_seq.is_none() {
            let last =
                |last: u64, class: Class| Ok::<_, io::Error>(last.max(last_seq(&self.directory, class)?));
            self.last_seq = Some(Class::ALL.into_iter().try_fold(0, last)?);
        }
        Ok(())
    }

    fn numbered(&mut self, line: Vec<u8>) -> Vec<u8> {
        let Some(last) = &mut self.last_seq else { return line };
        *last = last.saturating_add(1);
        AuditRecord::numbered(&line, *last)
    }

    /// `missing` is the number in the first line if that line is a notice.
    fn note_written(&mut self, class: Class, lines: usize, written: usize, missing: u64) {
        let has_notice = missing > 0;
        if has_notice && written > 0 {
            let reported = &mut self.series.get_mut(class).reported;
            *reported = reported.saturating_add(missing);
        }
        let notice = usize::from(has_notice);
        let records = lines.saturating_sub(notice);
        self.shared.add_dropped(class, records.saturating_sub(written.saturating_sub(notice)));
    }

    /// Before the line is written: a full disk does not keep it from the journal.
    fn forward(&mut self, line: &[u8]) {
        if self.forwarder.as_mut().is_some_and(|forwarder| !forwarder.send(line)) {
            self.shared.not_forwarded.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn append(&mut self, class: Class, lines: &[Vec<u8>]) -> (usize, io::Result<()>) {
        let (mut rest, mut complete) = (lines, 0);
        while let Some(first) = rest.first() {
            let max_bytes = self.rotation.file_bytes();
            let current = match self.current_for(class, first.len() as u64) {
                Ok(current) => current,
                Err(error) => return (complete, Err(error)),
            };
            let mut end = current.bytes;
            let fits = rest.iter().take_while(|line| {
                end = end.saturating_add(line.len() as u64);
                end <= max_bytes
            });
            let (part, others) = rest.split_at(fits.count().max(1));
            let (written, result) = current.append_lines(part);
            complete += written;
            if result.is_err() {
                self.series.get_mut(class).current = None;
                return (complete, result);
            }
            rest = others;
        }
        (complete, Ok(()))
    }

    /// The file for this many more bytes: the next one if the current one would become too large, or was removed.
    fn current_for(&mut self, class: Class, bytes: u64) -> io::Result<&mut Current> {
        let current = match self.series.get_mut(class).current.take() {
            Some(current) => current,
            None => {
                let last = Current::last(&self.directory, class)?;
                self.directory.sync()?;
                // The configuration may allow less than before.
                self.remove_old();
                last
            }
        };
        let is_full = current.bytes > 0 && current.bytes.saturating_add(bytes) > self.rotation.file_bytes();
        let is_removed = rustix::fs::fstat(&current.file)?.st_nlink == 0;
        if !is_full && !is_removed {
            return Ok(self.series.get_mut(class).current.insert(current));
        }
        current.file.sync_data()?;
        let next = Current::open(&self.directory, class, current.number.saturating_add(1))?;
        self.directory.sync()?;
        self.remove_old();
        Ok(self.series.get_mut(class).current.insert(next))
    }

    /// Removes the oldest files. They stay if an administrator has made them append-only.
    fn remove_old(&mut self) {
        let removals = &mut self.removed;
        let remove = |files: Vec<LogFile>| {
            let old = self.rotation.to_remove(&files);
            old.into_iter().try_for_each(|file| {
                let contents = Contents::read(&self.directory, file);
                self.directory.remove(file)?;
                removals.extend(contents.map(|contents| (file.class, contents)));
                Ok(())
            })
        };
        let removed = self.directory.files().and_then(remove);
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
        for class in Class::ALL {
            let Some(current) = &self.series.get(class).current else { continue };
            if let Err(error) = current.file.sync_data() {
                self.note(class, Err(error));
            }
        }
    }

    fn note(&self, class: Class, result: io::Result<()>) {
        let state = self.shared.classes.get(class);
        let mut failure = lock(&state.failure);
        let (path, class) = (self.directory.path(), class.name());
        match (result, failure.is_some()) {
            (Err(error), was_failing) => {
                if !was_failing {
                    tracing::error!(
                        "audit log: {path}: {class} cannot be written, records are dropped: {error}"
                    );
                }
                *failure = Some(error.to_string());
            }
            (Ok(()), true) => {
                let dropped = state.dropped.load(Ordering::Relaxed);
                tracing::warn!("audit log: {path}: {class} are written again; dropped records: {dropped}");
                *failure = None;
            }
            (Ok(()), false) => {}
        }
    }
}

fn batch(shared: &Shared, first: Waiting, waiting: &Receiver<Waiting>) -> Vec<Waiting> {
    let mut bytes = first.line.len();
    let mut records = vec![first];
    while bytes < MAX_BATCH_BYTES
        && let Ok(record) = waiting.try_recv()
    {
        bytes = bytes.saturating_add(record.line.len());
        records.push(record);
    }
    for record in &records {
        shared.classes.get(record.class).waiting.fetch_sub(1, Ordering::Relaxed);
    }
    records
}

fn dropped(class: Class, records: u64) -> AuditRecord {
    notice(None, LogEvent::Dropped, [("records", json!(records)), ("class", json!(class.name()))])
}

impl Current {
    /// The file with the highest number, or the first one.
    fn last(directory: &LogDirectory, class: Class) -> io::Result<Self> {
        let number = directory.numbers(class)?.last().copied().unwrap_or(1);
        Self::open(directory, class, number)
    }

    fn open(directory: &LogDirectory, class: Class, number: u64) -> io::Result<Self> {
        let file = directory.append(class, number)?;
        let bytes = file.metadata()?.len();
        let mut last = [b'\n'];
        if bytes > 0
            && let Some(content) = directory.read(class, number)?
        {
            content.read_exact_at(&mut last, bytes - 1)?;
        }
        Ok(Self { number, file, bytes, is_torn: last != [b'\n'] })
    }

    /// Appends lines, and returns how many of them are complete.
    fn append_lines(&mut self, lines: &[Vec<u8>]) -> (usize, io::Result<()>) {
        let (length, result) = self.append(&lines.concat());
        let mut end = 0;
        let complete = lines.iter().take_while(|line| {
            end += line.len();
            end <= length
        });
        (complete.count(), result)
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
