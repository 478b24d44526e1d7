//! Reads the audit log: first the latest records that match, then those that are written later. The records of all
//! classes are merged in the order in which they were written.

use std::io;
use std::sync::Arc;

use blobd_client::protocol::audit::AuditRecord;

use super::class::{ByClass, Class};
use super::directory::LogDirectory;
use super::filter::Filter;
use super::series::{Backward, Forward, Found, LogPosition, Reading, SearchError};

const BATCH_RECORDS: usize = 64;
/// Bytes of the lines of one batch, except for the last one.
const BATCH_BYTES: u64 = 64 << 10;
/// Bytes that one step reads, including records that do not match.
const MAX_STEP_BYTES: u64 = 4 << 20;

/// The most memory of one batch: texts, and lists of short ones.
pub(crate) const BATCH_MEMORY: usize = 512 << 10;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Latest {
    /// The most records.
    pub(crate) limit: u64,
    /// The most earlier records that are counted if they match.
    pub(crate) count_earlier: u64,
    /// The number of the last record.
    pub(crate) up_to: u64,
}

/// Keeps only places, so that a client that waits needs no memory.
#[derive(Debug)]
pub(crate) struct LogReader {
    directory: Arc<LogDirectory>,
    filter: Filter,
    /// The first records that were not read yet.
    next: ByClass<LogPosition>,
    /// The end of the records that existed when the reader was made.
    end: ByClass<LogPosition>,
    /// The number of lines that are not records.
    pub(crate) unreadable_lines: u64,
    /// Earlier records that match too.
    pub(crate) earlier_records: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Batch {
    pub(crate) records: Vec<AuditRecord>,
    /// Whether there may be more already. A batch without records is not always the last one.
    pub(crate) may_have_more: bool,
}

impl LogReader {
    /// Finds the latest records that match, from the end of the log, and reads no more than it needs. Returns `None` as
    /// soon as `is_wanted` is false.
    pub(crate) fn find(
        directory: Arc<LogDirectory>,
        filter: Filter,
        latest: Latest,
        is_wanted: &dyn Fn() -> bool,
    ) -> io::Result<Option<Self>> {
        let mut reading =
            Reading { directory: &directory, filter: &filter, up_to: latest.up_to, unreadable_lines: 0 };
        let (next, end, earlier_records) = match search(&mut reading, latest, is_wanted) {
            Ok(found) => found,
            Err(SearchError::NotWanted) => return Ok(None),
            Err(SearchError::Io(error)) => return Err(error),
        };
        let unreadable_lines = reading.unreadable_lines;
        Ok(Some(Self { directory, filter, next, end, unreadable_lines, earlier_records }))
    }

    pub(crate) const fn restrict_to(&mut self, uid: u32) {
        self.filter.restrict_to(uid);
    }

    pub(crate) fn next_found(&mut self) -> io::Result<Batch> {
        let unreadable_lines = self.unreadable_lines;
        let end = self.end;
        let batch = self.read(|class| Some(*end.get(class)), u64::MAX);
        // They were counted when the records were found.
        self.unreadable_lines = unreadable_lines;
        batch
    }

    /// The next records that were written since, up to a number.
    pub(crate) fn next_written(&mut self, up_to: u64) -> io::Result<Batch> {
        self.read(|_| None, up_to)
    }

    fn read(&mut self, end: impl Fn(Class) -> Option<LogPosition>, up_to: u64) -> io::Result<Batch> {
        let mut series = ByClass::new(|class| Forward::new(class, *self.next.get(class), end(class)));
        let mut reading =
            Reading { directory: &self.directory, filter: &self.filter, up_to, unreadable_lines: 0 };
        let batch = merge(&mut series, &mut reading)?;
        self.unreadable_lines = self.unreadable_lines.saturating_add(reading.unreadable_lines);
        self.next = ByClass::new(|class| series.get(class).place);
        Ok(batch)
    }
}

/// The begin and the end of the latest records, and how many match before them.
fn search(
    reading: &mut Reading<'_>,
    latest: Latest,
    is_wanted: &dyn Fn() -> bool,
) -> Result<(ByClass<LogPosition>, ByClass<LogPosition>, u64), SearchError> {
    let mut searches = Vec::new();
    for class in Class::ALL {
        searches.push((class, Backward::new(reading.directory, class)?));
    }
    let mut heads = ByClass::<Option<Found>>::default();
    for (class, search) in &mut searches {
        *heads.get_mut(*class) = search.next_match(reading, is_wanted)?;
    }
    let (mut first, mut left, mut earlier) = (ByClass::<Option<LogPosition>>::default(), latest.limit, 0);
    while left > 0 || earlier < latest.count_earlier {
        let latest_head = heads.iter().filter_map(|(class, head)| Some((class, (*head)?)));
        let Some((class, found)) = latest_head.max_by_key(|(_, found)| found.seq) else { break };
        if left > 0 {
            left -= 1;
            *first.get_mut(class) = Some(found.place);
        } else {
            earlier += 1;
        }
        if let Some((_, search)) = searches.iter_mut().find(|(of, _)| *of == class) {
            *heads.get_mut(class) = search.next_match(reading, is_wanted)?;
        }
    }
    let mut end = ByClass::<LogPosition>::default();
    searches.iter().for_each(|(class, search)| *end.get_mut(*class) = search.end());
    let next = ByClass::new(|class| first.get(class).unwrap_or(*end.get(class)));
    Ok((next, end, earlier))
}

fn merge(series: &mut ByClass<Forward>, reading: &mut Reading<'_>) -> io::Result<Batch> {
    let (mut records, mut bytes, mut budget) = (Vec::new(), 0, MAX_STEP_BYTES);
    loop {
        for class in Class::ALL {
            series.get_mut(class).find_next(reading, &mut budget)?;
        }
        if !series.iter().all(|(_, series)| series.is_ready()) {
            return Ok(Batch { records, may_have_more: true });
        }
        let heads = series.iter().filter_map(|(class, series)| Some((series.next_seq()?, class)));
        let Some((_, class)) = heads.min() else { return Ok(Batch { records, may_have_more: false }) };
        let Some(head) = series.get_mut(class).take() else {
            return Ok(Batch { records, may_have_more: false });
        };
        bytes += head.bytes;
        records.push(head.record);
        if records.len() >= BATCH_RECORDS || bytes >= BATCH_BYTES {
            return Ok(Batch { records, may_have_more: true });
        }
    }
}
