//! What each name has meant: a record per name of who set or removed it, when, and by which verb.
//!
//! An entry is durable before the tag changes. So after a crash the last entry may be of a change that has not
//! happened. It has the tag's present manifest as its previous one, by which it is recognised: readers leave it out,
//! and the next change replaces it. The record is information for people and for accounts: nothing that it contains
//! decides what is kept, and a damaged one never prevents a change.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use blobd_store_format::digest::Digest;
use blobd_store_format::layout;
use blobd_store_format::reference::Reference;
use blobd_store_format::similar_names;
use blobd_store_format::source::PulledSource;
use serde::{Deserialize, Serialize};

use super::reservation::Reservation;
use super::root::Root;
use super::{Store, StoreError};

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

/// Whom a name is charged to. A renamed or restored model stays with the user who added it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Account {
    /// Since when, in nanoseconds since 1970.
    pub since: u64,
    /// The user.
    pub uid: u32,
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

/// The history of one name.
#[derive(Clone, Debug)]
pub struct NameHistory {
    /// The name.
    pub reference: Reference,
    /// The newest change first.
    pub rows: Vec<HistoryRow>,
    /// The number of older entries that were dropped.
    pub dropped: u64,
}

/// A change that a commit records.
pub(super) struct NameChange<'c> {
    pub(super) actor: Actor,
    /// The tag that has the name now, if there is one.
    pub(super) reference: Option<&'c Reference>,
    pub(super) digest: Digest,
    /// What the name means now.
    pub(super) previous: Option<Digest>,
    /// The tag that the model has until now, if it is renamed.
    pub(super) renamed: Option<&'c Reference>,
    /// Where the model came from, and what updates the name.
    pub(super) origin: NameOrigin,
    /// Whom the name is charged to, if not to the actor.
    pub(super) account: Option<Account>,
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
    pub(super) fn following(origin: Option<String>) -> Self {
        let source = origin.as_deref().and_then(|origin| origin.parse::<PulledSource>().ok());
        let source = source.and_then(|pulled| pulled.latest()).map(|source| source.to_string());
        Self { origin, source }
    }
}

/// Times are nanoseconds since 1970, so that two changes within a second have an order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Entry {
    time: u64,
    uid: u32,
    verb: Verb,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    digest: Option<Digest>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    previous: Option<Digest>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    origin: Option<String>,
    /// The source that the name follows; empty if it follows none. Earlier versions did not record it: then the verb
    /// says whether the name follows its origin.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    source: Option<String>,
    /// Whom the name is charged to, if not to `uid` since `time`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    account: Option<Charged>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Charged {
    uid: u32,
    since: u64,
}

impl Entry {
    fn account(&self) -> Account {
        let charged = self.account.unwrap_or(Charged { uid: self.uid, since: self.time });
        Account { since: charged.since, uid: charged.uid }
    }

    fn origin(&self) -> NameOrigin {
        let origin = self.origin.clone();
        match (&self.source, self.verb) {
            (Some(source), _) => {
                NameOrigin { origin, source: Some(source.clone()).filter(|it| !it.is_empty()) }
            }
            (None, Verb::Pull | Verb::Rename | Verb::Undelete) => NameOrigin::following(origin),
            (None, _) => NameOrigin { origin, source: None },
        }
    }

    fn row(self) -> HistoryRow {
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
struct Record {
    reference: Reference,
    /// Entries that were dropped because there were too many.
    #[serde(default)]
    dropped: u64,
    /// The oldest first.
    entries: Vec<Entry>,
}

impl Record {
    /// The most entries of one name: a name that moves every day keeps two months.
    const MAX_ENTRIES: usize = 64;
    /// Longer records are not read. An entry with the longest origin and source takes less than 6 KiB.
    const MAX_BYTES: u64 = 512 << 10;
    /// The most characters of an origin in an entry; control characters take six bytes each in JSON.
    const MAX_ORIGIN: usize = 512;
    /// The most bytes of a source; a name with a longer one follows none. It has no control characters.
    const MAX_SOURCE: usize = 2048;
    /// An entry without its origin, rounded up.
    const ENTRY_BYTES: u64 = 512;

    const fn new(reference: Reference) -> Self {
        Self { reference, dropped: 0, entries: Vec::new() }
    }

    /// Without a last entry of a change that has not happened: the name still means what it meant before it.
    fn without_interrupted(mut self, present: Option<Digest>) -> Self {
        let is_interrupted =
            |last: &Entry| last.digest != present && last.previous == present && last.digest != last.previous;
        if self.entries.last().is_some_and(is_interrupted) {
            self.entries.pop();
        }
        self
    }

    fn add(&mut self, entry: Entry) {
        self.entries.push(entry);
        let excess = self.entries.len().saturating_sub(Self::MAX_ENTRIES);
        self.entries.drain(..excess);
        self.dropped = self.dropped.saturating_add(excess as u64);
    }

    /// The rows, the newest first. Where an entry does not begin with what the one before it has set, the name was
    /// changed without a record.
    fn rows(self, present: Option<Digest>) -> Vec<HistoryRow> {
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

impl Store {
    /// The history of a name, which may have been removed. A name without records has what it means now.
    ///
    /// # Errors
    /// [`StoreError::NoSuchModel`] with similar names if the name was never recorded and no model has it.
    pub fn history(&self, reference: &Reference) -> Result<NameHistory, StoreError> {
        let stored = match self.stored_case(reference)? {
            Some(stored) => Some(stored),
            None if read_history(&self.root, reference).is_some() => None,
            None => Some(self.resolve(reference).map_err(|error| self.with_removed_names(reference, error))?),
        };
        let tagged = |tag: &Reference| match self.tagged_digest(tag)? {
            // In a lower store, whose records are its own.
            None => Ok::<_, StoreError>(self.manifest(tag).ok().map(|manifest| manifest.digest())),
            digest => Ok(digest),
        };
        let present = stored.as_ref().map(tagged).transpose()?.flatten();
        let name = stored.as_ref().unwrap_or(reference);
        let record = read_history(&self.root, name).unwrap_or_else(|| Record::new(name.clone()));
        let is_stored = stored.is_some();
        let (reference, dropped) = (stored.unwrap_or_else(|| record.reference.clone()), record.dropped);
        let rows = record.without_interrupted(present).rows(present);
        // Only the first change of the name is recorded, and that has not happened.
        if rows.is_empty() && !is_stored {
            return Err(StoreError::no_such_model(&reference));
        }
        Ok(NameHistory { reference, rows, dropped })
    }

    /// Whom a name with this manifest is charged to, or was until it was removed. `None` without a record, as in a
    /// store of an earlier version.
    pub fn account_of(&self, reference: &Reference, manifest: Digest) -> Option<Account> {
        account_in(&self.root, reference, manifest)
    }

    /// The digest of what a tag's file has; `None` if there is no such file.
    pub(super) fn tagged_digest(&self, reference: &Reference) -> Result<Option<Digest>, StoreError> {
        match self.raw_manifest(reference) {
            Ok(raw) => Ok(Some(Digest::of(&raw))),
            Err(StoreError::NoSuchModel { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// An upper limit of the length of a name's record after one more change.
    pub(super) fn history_length(
        &self,
        reference: &Reference,
        origin: &NameOrigin,
    ) -> Result<u64, StoreError> {
        let status = self.root.status(&layout::history(reference))?;
        let length = |text: Option<&String>| text.map_or(0, String::len);
        let origin_bytes = length(origin.origin.as_ref()).min(Record::MAX_ORIGIN).saturating_mul(6);
        let texts = origin_bytes.saturating_add(length(origin.source.as_ref()).min(Record::MAX_SOURCE));
        let added = Record::ENTRY_BYTES.saturating_add(texts as u64);
        Ok(status.map_or(0, |status| status.len()).saturating_add(added).min(Record::MAX_BYTES))
    }

    /// Records, durably, that a name is about to get a manifest. The caller has locked the tags.
    pub(super) fn record_change(
        &self,
        reference: &Reference,
        change: &NameChange<'_>,
        temporary: &Path,
        reservation: Option<Reservation>,
    ) -> Result<(), StoreError> {
        if change.previous == Some(change.digest) && !self.follows_anew(reference, change) {
            return Ok(());
        }
        let source = change.origin.source.clone().filter(|source| source.len() <= Record::MAX_SOURCE);
        let entry = Entry {
            origin: change.origin.origin.as_deref().map(shortened),
            source: Some(source.unwrap_or_default()),
            account: self.kept_account(change),
            ..Entry::new(change.actor, Some(change.digest), change.previous)
        };
        let json = self.history_with(reference, entry)?;
        self.create_directories(Path::new(layout::HISTORY))?;
        self.write_record(temporary, &layout::history(reference), &json, reservation)?;
        self.disk().sync_dir(Path::new(layout::HISTORY))
    }

    /// Whether a pull of what the name means already makes it follow a source, and it followed none before.
    fn follows_anew(&self, reference: &Reference, change: &NameChange<'_>) -> bool {
        let is_pull = change.actor.verb == Verb::Pull && change.origin.source.is_some();
        is_pull && self.name_origin(reference, change.digest).source.is_none()
    }

    /// Records, durably, that a name is about to be removed. On a full disk it is removed without a record: removing
    /// must be possible then.
    pub(super) fn record_removal(&self, reference: &Reference, actor: Actor) -> Result<(), StoreError> {
        let raw = self.raw_manifest(reference);
        if matches!(raw, Err(StoreError::NoSuchModel { .. })) {
            return raw.map(drop);
        }
        let entry = Entry::new(actor, None, raw.ok().map(|raw| Digest::of(&raw)));
        let json = self.history_with(reference, entry)?;
        match self.write_removal(reference, &json) {
            Err(error) if error.is_no_space() => {
                tracing::warn!("{}: removed without a record in its history: {error}", reference.short());
                Ok(())
            }
            written => written,
        }
    }

    fn write_removal(&self, reference: &Reference, json: &[u8]) -> Result<(), StoreError> {
        self.create_directories(Path::new(layout::HISTORY))?;
        self.write_lone_record(&layout::history(reference), json)?;
        self.disk().sync_dir(Path::new(layout::HISTORY))
    }

    /// Deletes the oldest histories of names that no longer exist, if there are too many.
    pub(super) fn trim_histories(&self) -> Result<(), StoreError> {
        let recorded = self.root.parsed_names(layout::HISTORY, layout::parse_recipe_name)?;
        if recorded.len() <= MAX_REMOVED_NAMES {
            return Ok(());
        }
        let file_of = |reference: &Reference| Digest::of(reference.canonical().as_bytes());
        let mut kept: BTreeSet<Digest> = self.tags()?.references.iter().map(file_of).collect();
        kept.extend(self.trash()?.iter().map(|trashed| file_of(&trashed.reference)));
        let mut removed = Vec::new();
        for name in recorded.into_iter().filter(|name| !kept.contains(name)) {
            let path = Path::new(layout::HISTORY).join(layout::recipe_name(name));
            removed.extend(self.root.status(&path)?.map(|status| (status.modified(), path)));
        }
        removed.sort();
        let excess = removed.len().saturating_sub(MAX_REMOVED_NAMES);
        removed.iter().take(excess).try_for_each(|(_, path)| self.remove_record(path).map(drop))
    }

    /// A model that is renamed, restored or pulled again unchanged stays charged to the same user; `None` for any other
    /// change.
    fn kept_account(&self, change: &NameChange<'_>) -> Option<Charged> {
        let of_kept = |name| self.account_of(name, change.digest);
        let is_same = change.previous == Some(change.digest);
        let kept = change.renamed.or(change.reference.filter(|_| is_same));
        let Account { since, uid } = change.account.or_else(|| kept.and_then(of_kept))?;
        Some(Charged { uid, since })
    }

    /// The content of the record with one more entry.
    fn history_with(&self, reference: &Reference, entry: Entry) -> Result<Vec<u8>, StoreError> {
        let mut record =
            read_history(&self.root, reference).unwrap_or_else(|| Record::new(reference.clone()));
        // The name as it is written now, which may differ in upper and lower case.
        record.reference = reference.clone();
        let mut record = record.without_interrupted(entry.previous);
        record.add(entry);
        let json = serde_json::to_vec(&record);
        json.map_err(|error| StoreError::io("encode", layout::HISTORY)(error.into()))
    }

    /// Adds names that only have a history to those that the error suggests.
    fn with_removed_names(&self, wanted: &Reference, error: StoreError) -> StoreError {
        if !matches!(&error, StoreError::NoSuchModel { similar, .. } | StoreError::MayBeHidden { similar, .. } if similar.is_empty())
        {
            return error;
        }
        let recorded = self.root.parsed_names(layout::HISTORY, layout::parse_recipe_name);
        let names: Vec<_> =
            recorded.into_iter().flatten().filter_map(|file| self.recorded_name(file)).collect();
        let similar = similar_names::similar(wanted, &names);
        match error {
            StoreError::MayBeHidden { name, store, problem, .. } => {
                StoreError::MayBeHidden { name, similar, store, problem }
            }
            _ => StoreError::NoSuchModel { name: wanted.short(), similar },
        }
    }

    fn recorded_name(&self, file: Digest) -> Option<Reference> {
        let path = Path::new(layout::HISTORY).join(layout::recipe_name(file));
        let json = self.root.read_limited(&path, Record::MAX_BYTES).ok()??;
        Some(serde_json::from_slice::<Record>(&json).ok()?.reference)
    }
}

/// The most histories of removed names. Each takes a block of the disk.
const MAX_REMOVED_NAMES: usize = 1000;

impl Entry {
    fn new(actor: Actor, digest: Option<Digest>, previous: Option<Digest>) -> Self {
        let (Actor { uid, verb }, time) = (actor, unix_nanos(SystemTime::now()));
        Self { time, uid, verb, digest, previous, origin: None, source: None, account: None }
    }
}

fn shortened(origin: &str) -> String {
    match origin.char_indices().nth(Record::MAX_ORIGIN.saturating_sub(1)) {
        Some((end, _)) if origin.chars().nth(Record::MAX_ORIGIN).is_some() => {
            format!("{}…", origin.get(..end).unwrap_or_default())
        }
        _ => origin.to_owned(),
    }
}

pub(super) fn unix_nanos(time: SystemTime) -> u64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

/// As [`Store::account_of`], in one of several stores.
pub(super) fn account_in(root: &Root, reference: &Reference, manifest: Digest) -> Option<Account> {
    let record = read_history(root, reference)?;
    record.entries.iter().rev().find(|entry| entry.digest == Some(manifest)).map(Entry::account)
}

/// Where a name with this manifest came from, by its history; `None` if that does not say.
pub(super) fn recorded_origin_in(root: &Root, reference: &Reference, manifest: Digest) -> Option<NameOrigin> {
    let record = read_history(root, reference)?;
    record.entries.iter().rev().find(|entry| entry.digest == Some(manifest)).map(Entry::origin)
}

/// The record of a name; `None` if there is none, or if it cannot be read.
fn read_history(root: &Root, reference: &Reference) -> Option<Record> {
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
mod tests;
