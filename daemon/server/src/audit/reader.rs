//! Reads the audit log: the latest records that match, and then those that are written. The records of all classes are
//! merged in the order in which they were written.

use std::io;
use std::sync::Arc;

use blobd_client::protocol::audit::AuditRecord;

use super::class::{ByClass, Class};
use super::directory::LogDirectory;
use super::filter::Filter;
use super::series::{Backward, Forward, Found, Place, Reading, SearchError};

/// Records that are read at a time.
const BATCH_RECORDS: usize = 64;
/// Bytes of the lines of these records, except for the last one.
const BATCH_BYTES: u64 = 64 << 10;
/// Bytes that one step reads, of records that do not match too.
const MAX_STEP_BYTES: u64 = 4 << 20;

/// The memory that the records of one batch take at most: texts, and lists of short ones.
pub(crate) const BATCH_MEMORY: usize = 512 << 10;

/// Which records are searched.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Latest {
    /// At most so many, the latest ones.
    pub(crate) limit: u64,
    /// How many earlier ones that match are counted.
    pub(crate) count_earlier: u64,
    /// The number of the last record.
    pub(crate) up_to: u64,
}

/// Reads the log for one request. Keeps only places, so that a client that waits takes no memory.
#[derive(Debug)]
pub(crate) struct LogReader {
    directory: Arc<LogDirectory>,
    filter: Filter,
    /// Where the records begin that were not read yet.
    next: ByClass<Place>,
    /// Where the records end that existed when the reader was made.
    end: ByClass<Place>,
    /// The number of lines that are not records.
    pub(crate) unreadable_lines: u64,
    /// Records before those that were found that match too.
    pub(crate) earlier_records: u64,
}

/// Some records.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    pub(crate) records: Vec<AuditRecord>,
    /// Whether there may be more already. A batch without records is not always the last one.
    pub(crate) may_have_more: bool,
}

impl LogReader {
    /// Finds the latest records that match. Reads from the end of the log, and no more than it needs. Returns `None` as
    /// soon as `is_wanted` does not hold any more.
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

    /// From now on reads only the records of this user.
    pub(crate) const fn restrict_to(&mut self, uid: u32) {
        self.filter.restrict_to(uid);
    }

    /// The next of the records that were found.
    pub(crate) fn next_found(&mut self) -> io::Result<Batch> {
        let unreadable_lines = self.unreadable_lines;
        let end = self.end;
        let batch = self.read(|class| Some(*end.of(class)), u64::MAX);
        // They were counted when the records were found.
        self.unreadable_lines = unreadable_lines;
        batch
    }

    /// The next of the records that were written since, up to a number.
    pub(crate) fn next_written(&mut self, up_to: u64) -> io::Result<Batch> {
        self.read(|_| None, up_to)
    }

    fn read(&mut self, end: impl Fn(Class) -> Option<Place>, up_to: u64) -> io::Result<Batch> {
        let mut series = ByClass::new(|class| Forward::new(class, *self.next.of(class), end(class)));
        let mut reading =
            Reading { directory: &self.directory, filter: &self.filter, up_to, unreadable_lines: 0 };
        let batch = merge(&mut series, &mut reading)?;
        self.unreadable_lines = self.unreadable_lines.saturating_add(reading.unreadable_lines);
        self.next = ByClass::new(|class| series.of(class).place);
        Ok(batch)
    }
}

/// Where the latest records begin and end, and how many match before them.
fn search(
    reading: &mut Reading<'_>,
    latest: Latest,
    is_wanted: &dyn Fn() -> bool,
) -> Result<(ByClass<Place>, ByClass<Place>, u64), SearchError> {
    let mut searches = Vec::new();
    for class in Class::ALL {
        searches.push((class, Backward::new(reading.directory, class)?));
    }
    let mut heads = ByClass::<Option<Found>>::default();
    for (class, search) in &mut searches {
        *heads.of_mut(*class) = search.next_match(reading, is_wanted)?;
    }
    let (mut first, mut left, mut earlier) = (ByClass::<Option<Place>>::default(), latest.limit, 0);
    while left > 0 || earlier < latest.count_earlier {
        let latest_head = heads.iter().filter_map(|(class, head)| Some((class, (*head)?)));
        let Some((class, found)) = latest_head.max_by_key(|(_, found)| found.seq) else { break };
        if left > 0 {
            left -= 1;
            *first.of_mut(class) = Some(found.place);
        } else {
            earlier += 1;
        }
        if let Some((_, search)) = searches.iter_mut().find(|(of, _)| *of == class) {
            *heads.of_mut(class) = search.next_match(reading, is_wanted)?;
        }
    }
    let mut end = ByClass::<Place>::default();
    searches.iter().for_each(|(class, search)| *end.of_mut(*class) = search.end());
    let next = ByClass::new(|class| first.of(class).unwrap_or(*end.of(class)));
    Ok((next, end, earlier))
}

/// The next records of all series, in their order.
fn merge(series: &mut ByClass<Forward>, reading: &mut Reading<'_>) -> io::Result<Batch> {
    let (mut records, mut bytes, mut budget) = (Vec::new(), 0, MAX_STEP_BYTES);
    loop {
        for class in Class::ALL {
            series.of_mut(class).find_next(reading, &mut budget)?;
        }
        if !series.iter().all(|(_, series)| series.is_ready()) {
            return Ok(Batch { records, may_have_more: true });
        }
        let heads = series.iter().filter_map(|(class, series)| Some((series.next_seq()?, class)));
        let Some((_, class)) = heads.min() else { return Ok(Batch { records, may_have_more: false }) };
        let Some(head) = series.of_mut(class).take() else {
            return Ok(Batch { records, may_have_more: false });
        };
        bytes += head.bytes;
        records.push(head.record);
        if records.len() >= BATCH_RECORDS || bytes >= BATCH_BYTES {
            return Ok(Batch { records, may_have_more: true });
        }
    }
}
