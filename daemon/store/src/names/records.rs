//! The file with the history of one name: who set or removed it, when, and by which verb.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use blobd_store_format::digest::Digest;
use blobd_store_format::layout;
use blobd_store_format::reference::Reference;
use blobd_store_format::source::PulledSource;
use serde::{Deserialize, Serialize};

use crate::ledger::charge_limit::{Account, unix_nanos};
use crate::owner::StoreOwner;
use crate::root::Root;

/// The verbs that give a name to a model or take it away.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verb {
    Import,
    Pull,
    Edit,
    /// A model of a lower store was copied.
    Promote,
    Tag,
    /// A model got another name in place of its own; also the removal of that.
    Rename,
    Undelete,
    Rm,
    /// An earlier change was taken back.
    Undo,
    Evict,
    /// A verb of a later version.
    #[serde(other)]
    Unknown,
}

impl Verb {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Import => "import",
            Self::Pull => "pull",
            Self::Edit => "edit",
            Self::Promote => "promote",
            Self::Tag => "tag",
            Self::Rename => "rename",
            Self::Undelete => "undelete",
            Self::Rm => "rm",
            Self::Undo => "undo",
            Self::Evict => "evict",
            Self::Unknown => "unknown",
        }
    }
}

/// Identifies a request that has changed names, in their histories: one request may change several.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ChangeId(u64);

/// A text, because the number is larger than those that JavaScript's numbers can hold.
impl fmt::Display for ChangeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl ChangeId {
    /// The nanoseconds since 1970, but more than those of the last one of this process. One process at a time has the store
    /// open, so no two requests have the same.
    pub fn next() -> Self {
        static LAST: AtomicU64 = AtomicU64::new(0);
        let now = unix_nanos(SystemTime::now());
        let following = |last: u64| now.max(last.saturating_add(1));
        let last = LAST.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |last| Some(following(last)));
        Self(following(last.unwrap_or_default()))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Actor {
    pub uid: u32,
    pub verb: Verb,
    /// The request that makes the change. Absent if the change belongs to no other one, as an eviction.
    pub change: Option<ChangeId>,
    /// The change that this one takes back.
    pub undoes: Option<ChangeId>,
}

impl Actor {
    pub const fn new(uid: u32, verb: Verb) -> Self {
        Self { uid, verb, change: None, undoes: None }
    }

    /// The daemon itself, or the command that has the store open.
    pub fn daemon(verb: Verb) -> Self {
        Self::new(StoreOwner::for_process().uid, verb)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HistoryEntry {
    pub time: SystemTime,
    pub actor: Actor,
    /// The manifest that the name got; `None` if the name was removed.
    pub digest: Option<Digest>,
    pub origin: Option<String>,
}

/// A line of a history.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HistoryRow {
    Recorded(HistoryEntry),
    /// The name had this manifest, or none, and it is not recorded who set that.
    Unrecorded(Option<Digest>),
}

/// Where the content of a name came from, and what a later pull may replace it by.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NameOrigin {
    /// Where the content came from: a source, or `import` and a file name, or `edit` and a model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<String>,
    /// The source that the name was pulled from and follows. `None` if it follows none, such as an import, a copy made
    /// by `tag`, or a model that was pulled by its digest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
}

impl NameOrigin {
    /// The origin of a copy under another name, which no pull changes: it is often made to keep a version.
    #[must_use]
    pub fn for_copy(self) -> Self {
        Self { source: None, ..self }
    }

    /// The record of a model that was pulled. It follows its origin if that may have newer versions.
    pub(crate) fn following(origin: Option<String>) -> Self {
        let source = origin.as_deref().and_then(|origin| origin.parse::<PulledSource>().ok());
        let source = source.and_then(|pulled| pulled.latest()).map(|source| source.to_string());
        Self { origin, source }
    }
}

/// Times are nanoseconds since 1970, so that two changes within a second have an order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Entry {
    pub(super) time: u64,
    pub(super) uid: u32,
    pub(super) verb: Verb,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) digest: Option<Digest>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) previous: Option<Digest>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) origin: Option<String>,
    /// The source that the name follows; empty if none. Earlier versions recorded none: then the verb decides.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) source: Option<String>,
    /// Who is charged for the name, if not `uid` since `time`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) account: Option<Charged>,
    /// The request that made the change; the same in the entries of all names that it changed. Earlier versions recorded
    /// none: then the entry is a change of its own, identified by its time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) change: Option<ChangeId>,
    /// The change of this name that was taken back by this one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) undoes: Option<ChangeId>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Charged {
    pub(super) uid: u32,
    pub(super) since: u64,
    /// Who added the name, if that is another user.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) added_by: Option<u32>,
}

impl Entry {
    pub(super) fn account(&self) -> Account {
        let own = Charged { uid: self.uid, since: self.time, added_by: None };
        let Charged { uid, since, added_by } = self.account.unwrap_or(own);
        Account { since, uid, added_by }
    }

    pub(super) fn origin(&self) -> NameOrigin {
        let origin = self.origin.clone();
        match (&self.source, self.verb) {
            (Some(source), _) => {
                NameOrigin { origin, source: Some(source.clone()).filter(|it| !it.is_empty()) }
            }
            (None, Verb::Pull | Verb::Rename | Verb::Undelete) => NameOrigin::following(origin),
            (None, _) => NameOrigin { origin, source: None },
        }
    }

    pub(super) fn change(&self) -> ChangeId {
        self.change.unwrap_or(ChangeId(self.time))
    }

    pub(super) fn row(self) -> HistoryEntry {
        let Self { uid, verb, change, undoes, digest, origin, .. } = self;
        HistoryEntry {
            time: UNIX_EPOCH.checked_add(Duration::from_nanos(self.time)).unwrap_or(UNIX_EPOCH),
            actor: Actor { uid, verb, change, undoes },
            digest,
            origin,
        }
    }
}

/// The file of one name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    pub(super) reference: Reference,
    /// Entries that were dropped because there were too many.
    #[serde(default)]
    pub(super) dropped: u64,
    /// The oldest first.
    pub(super) entries: Vec<Entry>,
}

impl Record {
    /// The most entries of one name: a name that moves every day keeps two months.
    pub(super) const MAX_ENTRIES: usize = 64;
    /// Longer records are not read. An entry with the longest origin and source takes less than 6 KiB.
    pub(super) const MAX_BYTES: u64 = 512 << 10;
    /// The most characters of an origin in an entry; control characters take six bytes each in JSON.
    pub(super) const MAX_ORIGIN: usize = 512;
    /// The most bytes of a source; a name with a longer one follows none. It has no control characters.
    pub(super) const MAX_SOURCE: usize = 2048;
    /// An entry without its origin, rounded up.
    pub(super) const ENTRY_BYTES: u64 = 512;

    pub(super) const fn new(reference: Reference) -> Self {
        Self { reference, dropped: 0, entries: Vec::new() }
    }

    /// Drops a last entry whose change never happened: the name still means what it meant before.
    pub(super) fn without_interrupted(mut self, present: Option<Digest>) -> Self {
        let is_interrupted =
            |last: &Entry| last.digest != present && last.previous == present && last.digest != last.previous;
        if self.entries.last().is_some_and(is_interrupted) {
            self.entries.pop();
        }
        self
    }

    pub(super) fn add(&mut self, entry: Entry) {
        self.entries.push(entry);
        let excess = self.entries.len().saturating_sub(Self::MAX_ENTRIES);
        self.entries.drain(..excess);
        self.dropped = self.dropped.saturating_add(excess as u64);
    }

    /// The entries that were not taken back, newest first, without those that took others back.
    pub(super) fn standing(&self) -> impl Iterator<Item = &Entry> {
        let undone: BTreeSet<_> = self.entries.iter().filter_map(|entry| entry.undoes).collect();
        let is_standing = move |entry: &&Entry| entry.verb != Verb::Undo && !undone.contains(&entry.change());
        self.entries.iter().rev().filter(is_standing)
    }

    /// The rows, newest first. Where an entry does not begin with what the one before has set, a change is unrecorded.
    pub(super) fn rows(self, present: Option<Digest>) -> Vec<HistoryRow> {
        let (mut rows, mut expected) = (Vec::new(), Some(present));
        for entry in self.entries.into_iter().rev() {
            if let Some(found) = expected.filter(|expected| *expected != entry.digest) {
                rows.push(HistoryRow::Unrecorded(found));
            }
            expected = Some(entry.previous);
            rows.push(HistoryRow::Recorded(entry.row()));
        }
        if let Some(Some(oldest)) = expected {
            rows.push(HistoryRow::Unrecorded(Some(oldest)));
        }
        rows
    }
}

impl Entry {
    pub(super) fn new(actor: Actor, digest: Option<Digest>, previous: Option<Digest>) -> Self {
        let (Actor { uid, verb, change, undoes }, time) = (actor, unix_nanos(SystemTime::now()));
        let (origin, source, account) = (None, None, None);
        Self { time, uid, verb, digest, previous, origin, source, account, change, undoes }
    }
}

pub(super) fn shortened(origin: &str) -> String {
    match origin.char_indices().nth(Record::MAX_ORIGIN.saturating_sub(1)) {
        Some((end, _)) if origin.chars().nth(Record::MAX_ORIGIN).is_some() => {
            format!("{}…", origin.get(..end).unwrap_or_default())
        }
        _ => origin.to_owned(),
    }
}

/// As [`Names::account_of`], in one of several stores.
pub(crate) fn account_in(root: &Root, reference: &Reference, manifest: Digest) -> Option<Account> {
    let record = read_history(root, reference)?;
    record.entries.iter().rev().find(|entry| entry.digest == Some(manifest)).map(Entry::account)
}

/// Where a name with this manifest came from, by its history; `None` if that does not say.
pub(crate) fn recorded_origin_in(root: &Root, reference: &Reference, manifest: Digest) -> Option<NameOrigin> {
    let record = read_history(root, reference)?;
    record.entries.iter().rev().find(|entry| entry.digest == Some(manifest)).map(Entry::origin)
}

/// The record of a name; `None` if there is none, or if it cannot be read.
pub(super) fn read_history(root: &Root, reference: &Reference) -> Option<Record> {
    let path = layout::history(reference);
    let unreadable = |error: String| {
        tracing::warn!("{}: {error}; ignored", root.full(&path).display());
    };
    let json = root.read_limited(&path, Record::MAX_BYTES);
    let json = json.map_err(|error| unreadable(error.to_string())).ok()??;
    let record: Result<Record, _> = serde_json::from_slice(&json);
    record.map_err(|error| unreadable(error.to_string())).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{name, new_store};

    const DAY: u64 = 86_400_000_000_000;

    fn digest(number: u8) -> Digest {
        Digest::of(&[number])
    }

    fn entry(time: u64, digest: Option<Digest>, previous: Option<Digest>) -> Entry {
        let actor = Actor::new(7, Verb::Tag);
        Entry { time, ..Entry::new(actor, digest, previous) }
    }

    #[test]
    fn origin_is_shortened_only_if_it_is_longer_than_the_limit() {
        for (length, expected) in [(0, 0), (511, 511), (512, 512), (513, 512), (5000, 512)] {
            let origin = "é".repeat(length);
            let short = shortened(&origin);
            assert_eq!(short.chars().count(), expected, "{length}");
            assert_eq!((short == origin, short.ends_with('…')), (length <= 512, length > 512), "{length}");
        }
    }

    #[test]
    fn name_is_charged_to_who_has_set_it_unless_another_account_is_recorded() {
        let own = entry(5, None, None);
        assert_eq!(own.account(), Account { since: 5, uid: 7, added_by: None });
        let charged = Charged { uid: 8, since: 3, added_by: Some(9) };
        let other = Entry { account: Some(charged), ..own };
        assert_eq!(other.account(), Account { since: 3, uid: 8, added_by: Some(9) });
        assert_eq!((other.account().adder(), Account { added_by: None, ..other.account() }.adder()), (9, 8));
    }

    #[test]
    fn source_that_is_not_recorded_depends_on_the_verb() {
        let url = "https://example.org/m.gguf".to_owned();
        let of = |verb, source: Option<&str>| {
            let (origin, source) = (Some(url.clone()), source.map(str::to_owned));
            Entry { verb, origin, source, ..entry(1, None, None) }.origin()
        };
        let following = NameOrigin::following(Some(url.clone()));
        let fixed = NameOrigin { origin: Some(url.clone()), source: None };
        for verb in [Verb::Pull, Verb::Rename, Verb::Undelete] {
            assert_eq!(of(verb, None), following, "{verb:?}");
        }
        for verb in [Verb::Import, Verb::Edit, Verb::Promote, Verb::Tag, Verb::Rm, Verb::Evict, Verb::Unknown]
        {
            assert_eq!(of(verb, None), fixed, "{verb:?}");
        }
        assert_eq!(of(Verb::Pull, Some("")), fixed);
        let given = NameOrigin { source: Some("a source".to_owned()), ..fixed };
        assert_eq!(of(Verb::Tag, Some("a source")), given);
    }

    #[test]
    fn change_that_has_not_happened_is_recognised_by_what_the_name_means() {
        let [a, b] = [Some(digest(1)), Some(digest(2))];
        let kept = |last: (Option<Digest>, Option<Digest>), present| {
            let mut record = Record::new(name("m"));
            record.add(entry(1, a, None));
            record.add(entry(2, last.0, last.1));
            record.without_interrupted(present).entries.len()
        };
        assert_eq!(kept((b, a), a), 1, "the name still means what it meant");
        assert_eq!(kept((b, a), b), 2, "it has happened");
        assert_eq!(kept((b, a), None), 2, "something else has happened");
        assert_eq!(kept((a, a), a), 2, "a change of the source alone");
        assert_eq!(kept((None, a), a), 1);
        assert_eq!(kept((None, a), None), 2);
        assert!(Record::new(name("m")).without_interrupted(a).entries.is_empty());
    }

    #[test]
    fn changes_that_were_taken_back_and_what_took_them_back_do_not_stand() {
        let [a, b] = [Some(digest(1)), Some(digest(2))];
        let undo = |time, undoes, digest, previous| Entry {
            verb: Verb::Undo,
            undoes: Some(ChangeId(undoes)),
            ..entry(time, digest, previous)
        };
        let mut record = Record::new(name("m"));
        let standing = |record: &Record| record.standing().map(|entry| entry.time).collect::<Vec<_>>();
        record.add(entry(1, a, None));
        record.add(Entry { change: Some(ChangeId(20)), ..entry(2, b, a) });
        assert_eq!(standing(&record), [2, 1]);
        record.add(undo(3, 20, a, b));
        assert_eq!(standing(&record), [1]);
        record.add(undo(4, 1, None, a));
        assert!(standing(&record).is_empty());
        record.add(entry(5, a, None));
        assert_eq!(standing(&record), [5]);
        let json = serde_json::to_string(&record.entries[0]).unwrap();
        assert!(!json.contains("change") && !json.contains("undoes"), "as earlier versions write it: {json}");
    }

    #[test]
    fn no_two_requests_have_the_same_identifier() {
        let ids: Vec<_> = (0..100).map(|_| ChangeId::next()).collect();
        assert!(ids.is_sorted_by(|a, b| a < b), "{ids:?}");
    }

    #[test]
    fn unrecorded_changes_are_rows_between_the_recorded_ones() {
        let [a, b, c] = [1, 2, 3].map(|number| Some(digest(number)));
        let rows = |entries: &[(Option<Digest>, Option<Digest>)], present| {
            let mut record = Record::new(name("m"));
            entries.iter().for_each(|(digest, previous)| record.add(entry(DAY, *digest, *previous)));
            let rows = record.rows(present).into_iter();
            rows.map(|row| match row {
                HistoryRow::Recorded(row) => {
                    assert_eq!((row.time, row.actor.uid), (UNIX_EPOCH + Duration::from_nanos(DAY), 7));
                    (true, row.digest)
                }
                HistoryRow::Unrecorded(digest) => (false, digest),
            })
            .collect::<Vec<_>>()
        };
        assert_eq!(rows(&[(a, None)], a), [(true, a)]);
        assert_eq!(rows(&[(a, None), (b, a)], b), [(true, b), (true, a)]);
        assert_eq!(rows(&[(b, a)], b), [(true, b), (false, a)]);
        assert_eq!(rows(&[(a, None), (c, b)], c), [(true, c), (false, b), (true, a)]);
        assert_eq!(rows(&[(a, None)], b), [(false, b), (true, a)]);
        assert_eq!(rows(&[(a, None)], None), [(false, None), (true, a)]);
        assert_eq!(rows(&[], a), [(false, a)]);
        assert_eq!(rows(&[], None), []);
    }

    #[test]
    fn record_of_a_name_is_read_back_and_one_that_is_too_long_is_ignored() {
        let (_folder, store) = new_store();
        let root = &store.content.root;
        std::fs::create_dir_all(store.path(layout::HISTORY)).unwrap();
        let tag = name("m");
        assert_eq!(read_history(root, &tag), None);
        let mut record = Record::new(tag.clone());
        record.add(entry(1, Some(digest(1)), None));
        record.add(Entry {
            uid: 8,
            origin: Some("import x".to_owned()),
            ..entry(2, Some(digest(2)), Some(digest(1)))
        });
        record.add(Entry { uid: 9, ..entry(3, Some(digest(1)), Some(digest(2))) });
        let mut json = serde_json::to_vec(&record).unwrap();
        std::fs::write(store.path(layout::history(&tag)), &json).unwrap();
        assert_eq!(read_history(root, &tag), Some(record));
        let account =
            |number| account_in(root, &tag, digest(number)).map(|account| (account.uid, account.since));
        assert_eq!(
            [account(1), account(2), account(3)],
            [Some((9, 3)), Some((8, 2)), None],
            "the latest counts"
        );
        let origin = |number| recorded_origin_in(root, &tag, digest(number));
        assert_eq!(origin(2), Some(NameOrigin { origin: Some("import x".to_owned()), source: None }));
        assert_eq!((origin(1), origin(3)), (Some(NameOrigin::default()), None));
        json.resize(usize::try_from(Record::MAX_BYTES).unwrap(), b' ');
        std::fs::write(store.path(layout::history(&tag)), &json).unwrap();
        assert!(read_history(root, &tag).is_some());
    }

    #[test]
    fn verbs_have_their_names_in_records() {
        for verb in [
            Verb::Import,
            Verb::Pull,
            Verb::Edit,
            Verb::Promote,
            Verb::Tag,
            Verb::Rename,
            Verb::Undelete,
            Verb::Rm,
            Verb::Evict,
        ] {
            let json = serde_json::to_string(&verb).unwrap();
            assert_eq!(json, format!("\"{}\"", verb.name()));
        }
        assert_eq!(serde_json::from_str::<Verb>("\"of a later version\"").unwrap().name(), "unknown");
    }
}
