//! How large the files of the log become, and which of them are removed.

use std::collections::BTreeMap;

use blobd_client::protocol::audit::AuditRecord;
use serde_json::Value;

use super::LogEvent;
use super::class::{ByClass, Class};
use super::directory::{LogDirectory, LogFile};
use super::lines::{Lines, Position};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rotation {
    /// A file that would become larger is followed by the next one.
    pub(crate) max_bytes: u64,
    /// The log is at most as large as this many files of that size.
    pub(crate) keep: usize,
}

impl Rotation {
    /// The smallest share of a class has room for two files, so that one is left when another is removed.
    const FILES_OF_TOTAL: u64 = 8;

    fn total(self) -> u64 {
        self.max_bytes.saturating_mul(self.keep as u64)
    }

    pub(super) fn file_bytes(self) -> u64 {
        self.max_bytes.min(self.total() / Self::FILES_OF_TOTAL)
    }

    /// The files to remove, the oldest first, so that each class can complete its current file. A class uses what
    /// others leave until they need their shares: a class that uses more than its share loses files first.
    pub(super) fn to_remove(self, files: &[LogFile]) -> Vec<LogFile> {
        let mut usages = ByClass::new(|class| Usage::new(class, files, self.file_bytes()));
        let mut removed = Vec::new();
        while usages.iter().map(|(_, usage)| usage.bytes).fold(0, u64::saturating_add) > self.total() {
            let excess = |class: Class, usage: &Usage| usage.bytes.saturating_sub(class.share(self.total()));
            let with_files = usages.iter().filter(|(_, usage)| !usage.complete.is_empty());
            let largest = with_files.max_by_key(|(class, usage)| excess(*class, usage));
            let Some(class) = largest.map(|(class, _)| class) else { break };
            let usage = usages.get_mut(class);
            let oldest = usage.complete.remove(0);
            usage.bytes = usage.bytes.saturating_sub(oldest.bytes);
            removed.push(oldest);
        }
        removed
    }
}

struct Usage {
    /// Its current file counts as if it were complete.
    bytes: u64,
    /// All files but the current one, the oldest first.
    complete: Vec<LogFile>,
}

impl Usage {
    fn new(class: Class, files: &[LogFile], file_bytes: u64) -> Self {
        let mut complete: Vec<LogFile> = files.iter().filter(|file| file.class == class).copied().collect();
        complete.sort_unstable_by_key(|file| file.number);
        let current = complete.pop().map_or(0, |current| current.bytes.max(file_bytes));
        let bytes = complete.iter().map(|file| file.bytes).fold(current, u64::saturating_add);
        Self { bytes, complete }
    }
}

#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Contents {
    pub(super) records: u64,
    /// The times of its first and its last record.
    pub(super) first: Option<String>,
    pub(super) last: Option<String>,
    /// The number of records of each user, largest first. The users beyond the listed ones are counted together.
    pub(super) users: Vec<(String, u64)>,
}

impl Contents {
    const MAX_USERS: usize = 20;
    /// Counting all users of one file could need too much memory.
    const MAX_COUNTED: usize = 1024;
    /// Records wait while a file is read.
    const MAX_BYTES: u64 = 64 << 20;

    /// Reads a file; `None` if it cannot be read or is too large.
    pub(super) fn read(directory: &LogDirectory, file: LogFile) -> Option<Self> {
        let opened = directory.read(file.class, file.number).ok()??;
        if file.bytes > Self::MAX_BYTES {
            return None;
        }
        let mut lines = Lines::new(opened, Position::from(0)).ok()?;
        let (mut contents, mut users) = (Self::default(), BTreeMap::<String, u64>::new());
        while let Ok(Some(line)) = lines.next_line() {
            let Some(record) = line.record() else { continue };
            let (first, counts) = counts_of(&record);
            contents.first.get_or_insert(first);
            contents.last = Some(record.time);
            for (user, records) in counts {
                contents.records = contents.records.saturating_add(records);
                let is_counted = users.len() < Self::MAX_COUNTED || users.contains_key(&user);
                let count = users.entry(if is_counted { user } else { OTHERS.to_owned() }).or_default();
                *count = count.saturating_add(records);
            }
        }
        contents.users = Self::most(users);
        Some(contents)
    }

    fn most(users: BTreeMap<String, u64>) -> Vec<(String, u64)> {
        let mut users: Vec<_> = users.into_iter().collect();
        users.sort_by_key(|(_, records)| std::cmp::Reverse(*records));
        let others = users.split_off(users.len().min(Self::MAX_USERS));
        let others = others.iter().map(|(_, records)| *records).fold(0, u64::saturating_add);
        users.extend((others > 0).then(|| (OTHERS.to_owned(), others)));
        users
    }
}

/// The time of a record, and the users that it counts for. A record about an earlier removal counts for the users that
/// it lists, so that no number is lost with it.
fn counts_of(record: &AuditRecord) -> (String, Vec<(String, u64)>) {
    if (record.verb.as_str(), record.result.as_str()) == ("audit", LogEvent::Removed.name())
        && let Some(users) = record.details.get("users").and_then(Value::as_object)
    {
        let first = record.details.get("first").and_then(Value::as_str).unwrap_or(&record.time);
        let counts = users.iter().map(|(user, records)| (user.clone(), records.as_u64().unwrap_or(0)));
        return (first.to_owned(), counts.collect());
    }
    let user = record.user.clone().unwrap_or_else(|| record.uid.to_string());
    (record.time.clone(), vec![(user, 1)])
}

/// Stands for users that are not listed one by one. No user has this name.
const OTHERS: &str = "(others)";

#[cfg(test)]
mod tests {
    use super::*;

    const ROTATION: Rotation = Rotation { max_bytes: 100, keep: 16 };

    fn files(class: Class, count: u64) -> Vec<LogFile> {
        (1..=count).map(|number| LogFile { class, number, bytes: 100 }).collect()
    }

    fn removed(changes: u64, opens: u64, attempts: u64) -> Vec<(Class, u64)> {
        let counts = [(Class::Change, changes), (Class::Open, opens), (Class::Attempt, attempts)];
        let files: Vec<_> = counts.into_iter().flat_map(|(class, count)| files(class, count)).collect();
        ROTATION.to_remove(&files).into_iter().map(|file| (file.class, file.number)).collect()
    }

    #[test]
    fn class_uses_the_space_that_others_leave_until_they_need_their_shares() {
        assert_eq!(removed(16, 0, 0), []);
        assert_eq!(removed(16, 1, 1), [(Class::Change, 1), (Class::Change, 2)]);
        assert_eq!(removed(1, 1, 15), [(Class::Attempt, 1)]);
        assert_eq!(removed(8, 4, 5), [(Class::Attempt, 1)]);
        assert_eq!(removed(9, 4, 4), [(Class::Change, 1)]);
    }

    #[test]
    fn few_files_become_smaller_ones_so_that_every_class_has_two() {
        for (keep, bytes) in [(2, 25), (4, 50), (8, 100), (100, 100)] {
            assert_eq!(Rotation { max_bytes: 100, keep }.file_bytes(), bytes, "{keep}");
        }
    }

    #[test]
    fn current_file_is_never_removed() {
        let huge = LogFile { class: Class::Attempt, number: 7, bytes: 1 << 40 };
        let old = LogFile { class: Class::Change, number: 1, bytes: 1 };
        assert_eq!(ROTATION.to_remove(&[huge]), []);
        assert_eq!(ROTATION.to_remove(&[huge, old, LogFile { number: 2, ..old }]), [old]);
    }
}
