//! Reads the audit log: the latest records that match, and then those that are written.

use std::io;
use std::sync::Arc;

use blobd_client::protocol::audit::AuditRecord;

use super::directory::LogDirectory;
use super::filter::{Filter, time};
use super::lines::{Line, Lines, LinesBackward, Position};

/// Records that are read at a time.
const BATCH_RECORDS: usize = 64;
/// Bytes of the lines of these records, except for the last one.
const BATCH_BYTES: u64 = 64 << 10;
/// Bytes that one step reads, of records that do not match too.
const MAX_STEP_BYTES: u64 = 4 << 20;

/// The memory that the records of one batch take at most: texts, and lists of short ones.
pub(crate) const BATCH_MEMORY: usize = 512 << 10;

/// A file's number, and an offset in it.
type Place = (u64, u64);

/// A file's number, and where its next line begins.
type Next = (u64, Position);

/// Reads the log for one request. Keeps only places, so that a client that waits takes no memory.
#[derive(Debug)]
pub(crate) struct LogReader {
    directory: Arc<LogDirectory>,
    filter: Filter,
    /// Where the records begin that were not read yet.
    next: Next,
    /// Where the records end that existed when the reader was made.
    end: Place,
    /// Lines that are no records.
    pub(crate) unreadable_lines: u64,
}

/// Some records.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    pub(crate) records: Vec<AuditRecord>,
    /// Whether there may be more already. A batch without records is not always the last one.
    pub(crate) may_have_more: bool,
}

impl LogReader {
    /// Finds the latest `limit` records that match. Reads from the end of the log, and no more than it needs. Returns
    /// `None` as soon as `is_wanted` does not hold any more.
    pub(crate) fn find(
        directory: Arc<LogDirectory>,
        filter: Filter,
        limit: usize,
        is_wanted: &dyn Fn() -> bool,
    ) -> io::Result<Option<Self>> {
        let numbers = directory.numbers()?;
        let end = (numbers.last().copied().unwrap_or(1), 0);
        let mut reader = Self { directory, filter, next: (end.0, end.1.into()), end, unreadable_lines: 0 };
        let mut search = Search { left: limit, first: None, is_wanted };
        for number in numbers.into_iter().rev() {
            let Some(may_have_older) = reader.find_in(number, &mut search)? else { return Ok(None) };
            if !may_have_older {
                break;
            }
        }
        let (number, offset) = search.first.unwrap_or(reader.end);
        reader.next = (number, offset.into());
        Ok(Some(reader))
    }

    /// Searches one file from its end. Returns whether older files can have more that is looked for; `None` if nobody
    /// wants it any more.
    fn find_in(&mut self, number: u64, search: &mut Search<'_>) -> io::Result<Option<bool>> {
        match self.find_in_file(number, search) {
            // The standard library repeats reads that a signal interrupts.
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(None),
            found => found.map(Some),
        }
    }

    /// As [`Self::find_in`]; fails with [`io::ErrorKind::Interrupted`] if nobody wants it any more.
    fn find_in_file(&mut self, number: u64, search: &mut Search<'_>) -> io::Result<bool> {
        let Some(file) = self.directory.read(number)? else { return Ok(true) };
        let mut lines = LinesBackward::new(file, search.is_wanted)?;
        if number == self.end.0 {
            self.end.1 = lines.end;
        }
        let mut oldest = None;
        while search.left > 0 {
            if !(search.is_wanted)() {
                return Err(io::ErrorKind::Interrupted.into());
            }
            let Some(line) = lines.next_line()? else {
                let since = self.filter.since();
                // The clock may have been changed within a file.
                return Ok(since.zip(oldest).is_none_or(|(since, oldest)| oldest >= since));
            };
            let record = self.parse(&line);
            oldest = record.as_ref().and_then(time).or(oldest);
            if record.is_some_and(|record| self.filter.matches(&record)) {
                search.first = Some((number, line.offset));
                search.left = search.left.saturating_sub(1);
            }
        }
        Ok(false)
    }

    fn parse(&mut self, line: &Line) -> Option<AuditRecord> {
        let record = line.record();
        self.unreadable_lines += u64::from(record.is_none() && line.is_expected_to_be_record());
        record
    }

    /// From now on reads only the records of this user.
    pub(crate) const fn restrict_to(&mut self, uid: u32) {
        self.filter.restrict_to(uid);
    }

    /// The next of the records that were found.
    pub(crate) fn next_found(&mut self) -> io::Result<Batch> {
        if (self.next.0, self.next.1.offset) >= self.end {
            return Ok(Batch::default());
        }
        let unreadable_lines = self.unreadable_lines;
        let last = if self.next.0 == self.end.0 { self.end.1 } else { u64::MAX };
        let batch = self.read(last);
        // They were counted when the records were found.
        self.unreadable_lines = unreadable_lines;
        batch
    }

    /// The next of the records that were written since.
    pub(crate) fn next_written(&mut self) -> io::Result<Batch> {
        self.read(u64::MAX)
    }

    /// Reads from the next record on, at most up to this offset of its file.
    fn read(&mut self, end: u64) -> io::Result<Batch> {
        // Listed first: a file is complete when the next one exists.
        let following = self.directory.numbers()?.into_iter().find(|number| *number > self.next.0);
        let (number, start) = self.next;
        let (mut records, mut bytes) = (Vec::new(), 0);
        if let Some(file) = self.directory.read(number)? {
            let mut lines = Lines::new(file, start)?;
            while lines.next.offset < end
                && let Some(line) = lines.next_line()?
            {
                let record = self.parse(&line).filter(|record| self.filter.matches(record));
                bytes += if record.is_some() { lines.next.offset.saturating_sub(line.offset) } else { 0 };
                records.extend(record);
                self.next.1 = lines.next;
                let is_batch = records.len() >= BATCH_RECORDS || bytes >= BATCH_BYTES;
                if is_batch || lines.next.offset.saturating_sub(start.offset) >= MAX_STEP_BYTES {
                    return Ok(Batch { records, may_have_more: true });
                }
            }
        }
        if self.next.1.offset >= end {
            // What follows in this file was written later.
            return Ok(Batch { records, may_have_more: false });
        }
        if let Some(next) = following {
            self.next = (next, Position::default());
        }
        Ok(Batch { records, may_have_more: following.is_some() })
    }
}

/// The state of a search for the latest records.
struct Search<'w> {
    /// How many more are looked for.
    left: usize,
    /// The first of those that were found.
    first: Option<Place>,
    is_wanted: &'w dyn Fn() -> bool,
}
