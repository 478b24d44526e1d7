//! The records of one class, from the end of its files to the beginning, or forward from any place.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

use blobd_client::protocol::audit::AuditRecord;

use super::class::Class;
use super::directory::LogDirectory;
use super::filter::{Filter, time};
use super::lines::{Line, Lines, LinesBackward, Position};

/// A file's number, and where a line begins in it.
pub(super) type LogPosition = (u64, Position);

pub(super) struct Reading<'r> {
    pub(super) directory: &'r LogDirectory,
    pub(super) filter: &'r Filter,
    /// The number of the last record that is read: later ones may have been written to some files only.
    pub(super) up_to: u64,
    /// The number of lines that are not records.
    pub(super) unreadable_lines: u64,
}

impl Reading<'_> {
    fn parse(&mut self, line: &Line) -> Option<AuditRecord> {
        let record = line.record();
        self.unreadable_lines += u64::from(record.is_none() && line.is_expected_to_be_record());
        record
    }

    fn is_later(&self, record: Option<&AuditRecord>) -> bool {
        record.is_some_and(|record| seq(record) > self.up_to)
    }
}

/// The order of records. Those of earlier versions have no number, and come before the others in their files.
pub(super) fn seq(record: &AuditRecord) -> u64 {
    record.seq.unwrap_or_default()
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Found {
    pub(super) seq: u64,
    pub(super) place: LogPosition,
}

pub(super) enum SearchError {
    NotWanted,
    Io(io::Error),
}

impl From<io::Error> for SearchError {
    /// The standard library repeats calls that a signal interrupts, so only an unwanted search fails in this way.
    fn from(error: io::Error) -> Self {
        if error.kind() == io::ErrorKind::Interrupted { Self::NotWanted } else { Self::Io(error) }
    }
}

pub(super) struct Backward {
    class: Class,
    /// The files that were not read yet, the oldest first.
    numbers: Vec<u64>,
    file: Option<(u64, LinesBackward)>,
    /// The time of the oldest record that was read in this file.
    oldest: Option<std::time::SystemTime>,
    /// The end of the records that are searched; `None` until the last file is open.
    end: Option<LogPosition>,
    last_number: u64,
}

impl Backward {
    pub(super) fn new(directory: &LogDirectory, class: Class) -> io::Result<Self> {
        let numbers = directory.numbers(class)?;
        let last_number = numbers.last().copied().unwrap_or(1);
        Ok(Self { class, numbers, file: None, oldest: None, end: None, last_number })
    }

    pub(super) fn end(&self) -> LogPosition {
        self.end.unwrap_or((self.last_number, Position::default()))
    }

    pub(super) fn next_match(
        &mut self,
        reading: &mut Reading<'_>,
        is_wanted: &dyn Fn() -> bool,
    ) -> Result<Option<Found>, SearchError> {
        loop {
            let Some((number, lines)) = &mut self.file else {
                if !self.open_older(reading.directory, is_wanted)? {
                    return Ok(None);
                }
                continue;
            };
            if !is_wanted() {
                return Err(SearchError::NotWanted);
            }
            let Some(line) = lines.next_line(is_wanted)? else {
                self.end_file(reading.filter);
                continue;
            };
            let record = reading.parse(&line);
            let place = (*number, line.offset.into());
            if reading.is_later(record.as_ref()) {
                self.end = Some(place);
                continue;
            }
            self.oldest = record.as_ref().and_then(time).or(self.oldest);
            if let Some(record) = record.filter(|record| reading.filter.matches(record)) {
                return Ok(Some(Found { seq: seq(&record), place }));
            }
        }
    }

    fn open_older(&mut self, directory: &LogDirectory, is_wanted: &dyn Fn() -> bool) -> io::Result<bool> {
        while let Some(number) = self.numbers.pop() {
            if let Some(file) = directory.read(self.class, number)? {
                let lines = LinesBackward::new(file, is_wanted)?;
                self.end.get_or_insert((number, lines.end.into()));
                self.file = Some((number, lines));
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Skips the older files if they end before the first time that is searched.
    fn end_file(&mut self, filter: &Filter) {
        self.file = None;
        // The clock may have been changed within a file.
        if filter.since().zip(self.oldest.take()).is_some_and(|(since, oldest)| oldest < since) {
            self.numbers.clear();
        }
    }
}

pub(super) struct Forward {
    class: Class,
    /// The first records that were not taken yet.
    pub(super) place: LogPosition,
    end: Option<LogPosition>,
    file: Option<OpenFile>,
    head: Option<Head>,
    is_exhausted: bool,
}

struct OpenFile {
    lines: Lines,
    /// The number of the next file. It was listed before this one was opened: a file is complete when the next one
    /// exists.
    following: Option<u64>,
}

pub(super) struct Head {
    pub(super) record: AuditRecord,
    /// The length of its line.
    pub(super) bytes: u64,
    after: Position,
}

impl Forward {
    pub(super) const fn new(class: Class, place: LogPosition, end: Option<LogPosition>) -> Self {
        Self { class, place, end, file: None, head: None, is_exhausted: false }
    }

    /// `None` if there is none, or if it was not found yet.
    pub(super) fn next_seq(&self) -> Option<u64> {
        self.head.as_ref().map(|head| seq(&head.record))
    }

    pub(super) const fn is_ready(&self) -> bool {
        self.head.is_some() || self.is_exhausted
    }

    pub(super) fn take(&mut self) -> Option<Head> {
        let head = self.head.take()?;
        self.place.1 = head.after;
        Some(head)
    }

    /// Finds the next record that matches, and takes the bytes that it reads from `budget`. It is not ready afterwards
    /// if the budget is too small.
    pub(super) fn find_next(&mut self, reading: &mut Reading<'_>, budget: &mut u64) -> io::Result<()> {
        while !self.is_ready() && *budget > 0 {
            if self.end.is_some_and(|end| self.place >= end) {
                self.is_exhausted = true;
                return Ok(());
            }
            let Some(OpenFile { lines, following }) = &mut self.file else {
                self.open_file(reading.directory)?;
                continue;
            };
            let before = lines.next;
            let Some(line) = lines.next_line()? else {
                let following = *following;
                self.leave_file(following);
                continue;
            };
            let after = lines.next;
            let bytes = after.offset.saturating_sub(line.offset);
            *budget = budget.saturating_sub(bytes.max(1));
            let record = reading.parse(&line);
            if reading.is_later(record.as_ref()) {
                self.is_exhausted = true;
                return Ok(());
            }
            self.place.1 = before;
            match record.filter(|record| reading.filter.matches(record)) {
                Some(record) => self.head = Some(Head { record, bytes, after }),
                None => self.place.1 = after,
            }
        }
        Ok(())
    }

    fn open_file(&mut self, directory: &LogDirectory) -> io::Result<()> {
        let (number, next) = self.place;
        let following = directory.numbers(self.class)?.into_iter().find(|other| *other > number);
        match directory.read(self.class, number)? {
            Some(file) => self.file = Some(OpenFile { lines: Lines::new(file, next)?, following }),
            None => self.leave_file(following),
        }
        Ok(())
    }

    fn leave_file(&mut self, following: Option<u64>) {
        self.file = None;
        match following {
            Some(number) => self.place = (number, Position::default()),
            None => self.is_exhausted = true,
        }
    }
}

/// The number of the last record of a class; 0 if there is none.
pub(super) fn last_seq(directory: &LogDirectory, class: Class) -> io::Result<u64> {
    Ok(last_record(directory, class)?.as_ref().map_or(0, seq))
}

/// The last record of a class. Reads the ends of the last two files: the last one may be empty.
pub(super) fn last_record(directory: &LogDirectory, class: Class) -> io::Result<Option<AuditRecord>> {
    for number in directory.numbers(class)?.into_iter().rev().take(2) {
        let Some(file) = directory.read(class, number)? else { continue };
        let end = tail(&file)?;
        let record = end.split(|byte| *byte == b'\n').rev().find_map(AuditRecord::parse);
        if record.is_some() {
            return Ok(record);
        }
    }
    Ok(None)
}

/// It has many records, unless a crash has left other bytes there.
fn tail(file: &File) -> io::Result<Vec<u8>> {
    const TAIL_BYTES: u64 = 1 << 20;
    let length = file.metadata()?.len();
    let start = length.saturating_sub(TAIL_BYTES);
    let mut bytes = vec![0; usize::try_from(length - start).unwrap_or_default()];
    file.read_exact_at(&mut bytes, start)?;
    Ok(bytes)
}
