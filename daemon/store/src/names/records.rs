//! The file with the history of one name: who set or removed it, when, and by which verb.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use blobd_store_format::digest::Digest;
use blobd_store_format::layout;
use blobd_store_format::reference::Reference;
use blobd_store_format::source::PulledSource;
use serde::{Deserialize, Serialize};

use crate::ledger::charge_limit::{Account, unix_nanos};
use crate::root::Root;

/// The verbs that give a name to a model or take it away.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verb {
    /// A file of this machine became a model.
    Import,
    /// A model was downloaded.
    Pull,
    /// A model was made from another with other metadata.
    Edit,
    /// A model of a lower store was copied.
    Promote,
    /// A model got a further name.
    Tag,
    /// A model got another name in place of its own; also the removal of that.
    Rename,
    /// A model was restored from the trash.
    Undelete,
    /// The name was removed.
    Rm,
    /// The name was removed to free space.
    Evict,
    /// A verb of a later version.
    #[serde(other)]
    Unknown,
}

impl Verb {
    /// The name of the verb, as on the command line.
    #[must_use]
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
            Self::Evict => "evict",
            Self::Unknown => "unknown",
        }
    }
}

/// Who changes a name, and by which verb.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Actor {
    /// The user.
    pub uid: u32,
    /// The verb.
    pub verb: Verb,
}

impl Actor {
    /// The daemon itself, or the command that has the store open.
    #[must_use]
    pub fn daemon(verb: Verb) -> Self {
        Self { uid: own_uid(), verb }
    }
}

fn own_uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// One change of a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HistoryEntry {
    /// When it happened.
    pub time: SystemTime,
    /// Who did it.
    pub actor: Actor,
    /// The manifest that the name got; `None` if the name was removed.
    pub digest: Option<Digest>,
    /// Where the model came from, if that was recorded.
    pub origin: Option<String>,
}

/// A line of a history.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HistoryRow {
    /// A change that was recorded.
    Recorded(HistoryEntry),
    /// The name had this manifest, or none, and there is no record of who set that.
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
    pub fn of_copy(self) -> Self {
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
    /// The source that the name follows; empty if it follows none. Earlier versions did not record it: then the verb
    /// says whether the name follows its origin.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) source: Option<String>,
    /// Whom the name is charged to, if not to `uid` since `time`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) account: Option<Charged>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Charged {
    pub(super) uid: u32,
    pub(super) since: u64,
}

impl Entry {
    pub(super) fn account(&self) -> Account {
        let charged = self.account.unwrap_or(Charged { uid: self.uid, since: self.time });
        Account { since: charged.since, uid: charged.uid }
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

    pub(super) fn row(self) -> HistoryRow {
        HistoryRow::Recorded(HistoryEntry {
            time: UNIX_EPOCH.checked_add(Duration::from_nanos(self.time)).unwrap_or(UNIX_EPOCH),
            actor: Actor { uid: self.uid, verb: self.verb },
            digest: self.digest,
            origin: self.origin,
        })
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

    /// Without a last entry of a change that has not happened: the name still means what it meant before it.
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

    /// The rows, the newest first. Where an entry does not begin with what the one before it has set, the name was
    /// changed without a record.
    pub(super) fn rows(self, present: Option<Digest>) -> Vec<HistoryRow> {
        let (mut rows, mut expected) = (Vec::new(), Some(present));
        for entry in self.entries.into_iter().rev() {
            if let Some(found) = expected.filter(|expected| *expected != entry.digest) {
                rows.push(HistoryRow::Unrecorded(found));
            }
            expected = Some(entry.previous);
            rows.push(entry.row());
        }
        if let Some(Some(oldest)) = expected {
            rows.push(HistoryRow::Unrecorded(Some(oldest)));
        }
        rows
    }
}

impl Entry {
    pub(super) fn new(actor: Actor, digest: Option<Digest>, previous: Option<Digest>) -> Self {
        let (Actor { uid, verb }, time) = (actor, unix_nanos(SystemTime::now()));
        Self { time, uid, verb, digest, previous, origin: None, source: None, account: None }
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
