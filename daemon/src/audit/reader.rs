//! Reads the audit log: the latest records that match, and then those that are written.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, BufRead as _, BufReader, Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use blobd_client::protocol::audit::{AuditRecord, MAX_LINE_BYTES};

use super::directory::LogDirectory;
use super::filter::{Filter, time};

/// Records that are read at a time; with the longest lines they take 1 MiB.
const BATCH: usize = 64;

/// Bytes that one step of a reader that follows the log reads.
const MAX_STEP_BYTES: u64 = 4 << 20;

/// Reads the log for one request. Keeps the places of the records, not the records.
pub(crate) struct LogReader {
    directory: Arc<LogDirectory>,
    filter: Filter,
    /// Records that were found and are not read yet.
    found: VecDeque<Place>,
    /// Where the records begin that are not searched yet.
    end: (u64, u64),
    /// The file that was read last.
    open: Option<(u64, File)>,
    /// Lines that are no records.
    pub(crate) unreadable_lines: u64,
}

#[derive(Clone, Copy, Debug)]
struct Place {
    file: u64,
    offset: u64,
    length: usize,
}

impl LogReader {
    /// Finds the latest `limit` records that match. Reads the newest file first, and no more than it needs.
    pub(crate) fn find(directory: Arc<LogDirectory>, filter: Filter, limit: usize) -> io::Result<Self> {
        let numbers = directory.numbers()?;
        let last = numbers.last().copied().unwrap_or(1);
        let found = VecDeque::new();
        let mut reader = Self { directory, filter, found, end: (last, 0), open: None, unreadable_lines: 0 };
        for number in numbers.into_iter().rev() {
            let is_enough = reader.find_in(number, limit, number == last)?;
            if is_enough || reader.found.len() >= limit {
                break;
            }
        }
        Ok(reader)
    }

    /// Adds the records of one file before those that were found. Returns whether older files have none that match.
    fn find_in(&mut self, number: u64, limit: usize, is_last: bool) -> io::Result<bool> {
        let Some(file) = self.directory.read(number)? else { return Ok(false) };
        let room = limit.saturating_sub(self.found.len());
        let mut matching = VecDeque::new();
        let mut first = None;
        let mut lines = Lines::new(file, 0)?;
        while let Some(line) = lines.next_line()? {
            let Some(record) = self.parse(&line) else { continue };
            first = first.or_else(|| time(&record));
            if self.filter.matches(&record) {
                matching.push_back(Place { file: number, offset: line.offset, length: line.bytes.len() });
                if matching.len() > room {
                    matching.pop_front();
                }
            }
        }
        if is_last {
            self.end = (number, lines.offset);
        }
        matching.into_iter().rev().for_each(|place| self.found.push_front(place));
        Ok(self.filter.since().zip(first).is_some_and(|(since, first)| first < since))
    }

    fn parse(&mut self, line: &Line) -> Option<AuditRecord> {
        let record = AuditRecord::parse(&line.bytes);
        let is_empty = line.bytes.iter().all(u8::is_ascii_whitespace) && line.is_complete;
        self.unreadable_lines += u64::from(record.is_none() && !is_empty);
        record
    }

    /// The next of the records that were found; none at their end.
    pub(crate) fn next_found(&mut self) -> io::Result<Vec<AuditRecord>> {
        let mut records = Vec::new();
        while records.is_empty() && !self.found.is_empty() {
            for _ in 0..BATCH {
                let Some(place) = self.found.pop_front() else { break };
                records.extend(self.read(place)?);
            }
        }
        Ok(records)
    }

    /// `None` if the file was removed meanwhile.
    fn read(&mut self, place: Place) -> io::Result<Option<AuditRecord>> {
        if self.open.as_ref().is_none_or(|(number, _)| *number != place.file) {
            self.open = self.directory.read(place.file)?.map(|file| (place.file, file));
        }
        let Some((_, file)) = &self.open else { return Ok(None) };
        let mut line = vec![0; place.length];
        file.read_exact_at(&mut line, place.offset)?;
        Ok(AuditRecord::parse(&line))
    }

    /// The records that were written since the last call and match, and whether there may be more of them already.
    pub(crate) fn next_written(&mut self) -> io::Result<(Vec<AuditRecord>, bool)> {
        // Listed first: a file is complete when the next one exists.
        let following = self.directory.numbers()?.into_iter().find(|number| *number > self.end.0);
        let (number, start) = self.end;
        let mut records = Vec::new();
        if let Some(file) = self.directory.read(number)? {
            let mut lines = Lines::new(file, start)?;
            while let Some(line) = lines.next_line()? {
                let record = self.parse(&line);
                records.extend(record.filter(|record| self.filter.matches(record)));
                self.end.1 = lines.offset;
                if records.len() >= BATCH || lines.offset.saturating_sub(start) >= MAX_STEP_BYTES {
                    return Ok((records, true));
                }
            }
        }
        if let Some(next) = following {
            self.end = (next, 0);
        }
        Ok((records, following.is_some()))
    }
}

/// The lines of a file, up to the last line break.
struct Lines {
    file: BufReader<File>,
    /// Where the next line begins.
    offset: u64,
}

struct Line {
    offset: u64,
    /// With its line break. Not all of them if it is too long for a record.
    bytes: Vec<u8>,
    is_complete: bool,
}

impl Lines {
    fn new(mut file: File, offset: u64) -> io::Result<Self> {
        file.seek(SeekFrom::Start(offset))?;
        Ok(Self { file: BufReader::with_capacity(128 << 10, file), offset })
    }

    fn next_line(&mut self) -> io::Result<Option<Line>> {
        let (mut bytes, offset) = (Vec::new(), self.offset);
        let limit = u64::try_from(MAX_LINE_BYTES).unwrap_or(u64::MAX);
        let mut length = (&mut self.file).take(limit).read_until(b'\n', &mut bytes)? as u64;
        let is_complete = bytes.ends_with(b"\n");
        if !is_complete && length == limit {
            let Some(rest) = self.skip_line()? else { return Ok(None) };
            length = length.saturating_add(rest);
        } else if !is_complete {
            return Ok(None);
        }
        self.offset = self.offset.saturating_add(length);
        Ok(Some(Line { offset, bytes, is_complete }))
    }

    /// The length of the rest of a line; `None` if the file ends before its line break.
    fn skip_line(&mut self) -> io::Result<Option<u64>> {
        let mut skipped = 0_u64;
        loop {
            let buffered = self.file.fill_buf()?;
            if buffered.is_empty() {
                return Ok(None);
            }
            let end = buffered.iter().position(|byte| *byte == b'\n').map(|at| at + 1);
            let length = end.unwrap_or(buffered.len());
            self.file.consume(length);
            skipped = skipped.saturating_add(length as u64);
            if end.is_some() {
                return Ok(Some(skipped));
            }
        }
    }
}
