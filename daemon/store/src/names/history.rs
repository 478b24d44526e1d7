//! What each name has meant: a record per name of who set or removed it, when, and by which verb.
//!
//! An entry is durable before the tag changes. So after a crash the last entry may be of a change that has not
//! happened. It has the tag's present manifest as its previous one, by which it is recognised: readers leave it out,
//! and the next change replaces it. The record is information for people and for accounts: nothing that it contains
//! decides what is kept, and a damaged one never prevents a change.

use std::collections::BTreeSet;
use std::path::Path;

use blobd_store_format::digest::Digest;
use blobd_store_format::layout;
use blobd_store_format::reference::Reference;
use blobd_store_format::similar_names::similar;

use super::Names;
use super::records::{Actor, Charged, Entry, HistoryRow, NameOrigin, Record, Verb, read_history, shortened};
use crate::StoreError;
use crate::ledger::accounting::Reservation;
use crate::ledger::charge_limit::Account;

#[derive(Clone, Debug)]
pub struct NameHistory {
    pub reference: Reference,
    /// The newest change first.
    pub rows: Vec<HistoryRow>,
    pub dropped: u64,
}

/// A change that a commit records.
pub(crate) struct NameChange<'c> {
    pub(crate) actor: Actor,
    /// The tag that has the name now, if there is one.
    pub(crate) reference: Option<&'c Reference>,
    pub(crate) digest: Digest,
    /// What the name means now.
    pub(crate) previous: Option<Digest>,
    /// The tag that the model has until now, if it is renamed.
    pub(crate) renamed: Option<&'c Reference>,
    /// Where the model came from, and what updates the name.
    pub(crate) origin: NameOrigin,
    /// Who is charged for the name, if not the actor.
    pub(crate) account: Option<Account>,
    /// Whether the name follows a source and gets its newest version.
    pub(crate) is_update: bool,
}

impl Names {
    /// The history of a name, which may have been removed. A name without records has what it means now. The error for
    /// a name that never existed suggests others.
    pub fn history(&self, reference: &Reference) -> Result<NameHistory, StoreError> {
        let stored = self.stored_or_recorded(reference)?;
        let tagged = |tag: &Reference| match self.tagged_digest(tag)? {
            // In a lower store, whose records are its own.
            None => Ok::<_, StoreError>(self.manifest(tag).ok().map(|manifest| manifest.digest())),
            digest => Ok(digest),
        };
        let present = stored.as_ref().map(tagged).transpose()?.flatten();
        let name = stored.as_ref().unwrap_or(reference);
        let record = read_history(&self.content.root, name).unwrap_or_else(|| Record::new(name.clone()));
        let is_stored = stored.is_some();
        let (reference, dropped) = (stored.unwrap_or_else(|| record.reference.clone()), record.dropped);
        let rows = record.without_interrupted(present).rows(present);
        // Only the first change of the name is recorded, and that has not happened.
        if rows.is_empty() && !is_stored {
            return Err(StoreError::no_such_model(&reference));
        }
        Ok(NameHistory { reference, rows, dropped })
    }

    /// The tag of a name. `None` if it was removed and has a history.
    pub(crate) fn stored_or_recorded(&self, reference: &Reference) -> Result<Option<Reference>, StoreError> {
        match self.stored_case(reference)? {
            Some(stored) => Ok(Some(stored)),
            None if read_history(&self.content.root, reference).is_some() => Ok(None),
            None => {
                self.resolve(reference).map(Some).map_err(|error| self.with_removed_names(reference, error))
            }
        }
    }

    pub(crate) fn tagged_digest(&self, reference: &Reference) -> Result<Option<Digest>, StoreError> {
        match self.raw_manifest(reference) {
            Ok(raw) => Ok(Some(Digest::of(&raw))),
            Err(StoreError::NoSuchModel { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// An upper limit of the length of a name's record after one more change.
    pub(crate) fn history_length(
        &self,
        reference: &Reference,
        origin: &NameOrigin,
    ) -> Result<u64, StoreError> {
        let status = self.content.root.status(&layout::history(reference))?;
        let length = |text: Option<&String>| text.map_or(0, String::len);
        let origin_bytes = length(origin.origin.as_ref()).min(Record::MAX_ORIGIN).saturating_mul(6);
        let texts = origin_bytes.saturating_add(length(origin.source.as_ref()).min(Record::MAX_SOURCE));
        let added = Record::ENTRY_BYTES.saturating_add(texts as u64);
        Ok(status.map_or(0, |status| status.len()).saturating_add(added).min(Record::MAX_BYTES))
    }

    /// Records, durably, that a name is about to get a manifest. The caller has locked the tags.
    pub(crate) fn record_change(
        &self,
        reference: &Reference,
        change: &NameChange<'_>,
        temporary: &Path,
        reservation: Option<Reservation>,
    ) -> Result<(), StoreError> {
        let is_same = change.previous == Some(change.digest);
        if is_same && change.actor.verb != Verb::Undo && !self.starts_to_follow(reference, change) {
            return Ok(());
        }
        let source = change.origin.source.clone().filter(|source| source.len() <= Record::MAX_SOURCE);
        let entry = Entry {
            origin: change.origin.origin.as_deref().map(shortened),
            source: Some(source.unwrap_or_default()),
            account: self.kept_account(change),
            ..Entry::new(change.actor, Some(change.digest), change.previous)
        };
        let entry = match change.is_update {
            true => Entry { account: self.updated_account(reference, change, entry.account()), ..entry },
            false => entry,
        };
        let json = self.history_with(reference, entry)?;
        self.content.create_directories(Path::new(layout::HISTORY))?;
        self.ledger.write_record(temporary, &layout::history(reference), &json, reservation)?;
        self.content.disk.sync_dir(Path::new(layout::HISTORY))
    }

    /// Whether a pull of what the name means already makes it follow a source, and it followed none before.
    fn starts_to_follow(&self, reference: &Reference, change: &NameChange<'_>) -> bool {
        let is_pull = change.actor.verb == Verb::Pull && change.origin.source.is_some();
        is_pull && self.name_origin(reference, change.digest).source.is_none()
    }

    /// Records, durably, that a name is about to be removed. On a full disk, it may be removed without a record.
    pub(crate) fn record_removal(&self, reference: &Reference, actor: Actor) -> Result<(), StoreError> {
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
        self.content.create_directories(Path::new(layout::HISTORY))?;
        self.ledger.write_lone_record(&layout::history(reference), json)?;
        self.content.disk.sync_dir(Path::new(layout::HISTORY))
    }

    /// Deletes the oldest histories of names other than `kept`, if there are too many.
    pub(crate) fn trim_histories(&self, kept: &[&Reference]) -> Result<(), StoreError> {
        let recorded = self.content.root.parsed_names(layout::HISTORY, layout::parse_recipe_name)?;
        if recorded.len() <= MAX_REMOVED_NAMES {
            return Ok(());
        }
        let kept: BTreeSet<Digest> =
            kept.iter().map(|name| Digest::of(name.canonical().as_bytes())).collect();
        let mut removed = Vec::new();
        for name in recorded.into_iter().filter(|name| !kept.contains(name)) {
            let path = Path::new(layout::HISTORY).join(layout::recipe_name(name));
            removed.extend(self.content.root.status(&path)?.map(|status| (status.modified(), path)));
        }
        removed.sort();
        let excess = removed.len().saturating_sub(MAX_REMOVED_NAMES);
        removed.iter().take(excess).try_for_each(|(_, path)| self.ledger.remove_record(path).map(drop))
    }

    /// A model that is renamed, restored or pulled again unchanged stays charged to the same user.
    fn kept_account(&self, change: &NameChange<'_>) -> Option<Charged> {
        let of_kept = |name| self.account_of(name, change.digest);
        let is_same = change.previous == Some(change.digest);
        let kept = change.renamed.or(change.reference.filter(|_| is_same));
        let Account { since, uid, added_by } = change.account.or_else(|| kept.and_then(of_kept))?;
        Some(Charged { uid, since, added_by })
    }

    /// An update takes a name from nobody: it is charged to the user who updates it, and stays the name of the user who
    /// added it. One without a record of that, which belongs to administrators, stays root's.
    fn updated_account(
        &self,
        reference: &Reference,
        change: &NameChange<'_>,
        Account { since, uid, added_by }: Account,
    ) -> Option<Charged> {
        const ROOT: u32 = 0;
        let account = |previous| self.account_of(change.reference.unwrap_or(reference), previous);
        let adder = change.previous.and_then(account).map_or(ROOT, |account| account.adder());
        Some(Charged { uid, since, added_by: added_by.or(Some(adder).filter(|adder| *adder != uid)) })
    }

    fn history_with(&self, reference: &Reference, entry: Entry) -> Result<Vec<u8>, StoreError> {
        let mut record =
            read_history(&self.content.root, reference).unwrap_or_else(|| Record::new(reference.clone()));
        // The name as it is written now, which may differ in upper and lower case.
        record.reference = reference.clone();
        let mut record = record.without_interrupted(entry.previous);
        record.add(entry);
        StoreError::encode(&record, layout::HISTORY)
    }

    /// Adds names that only have a history to those that the error suggests.
    fn with_removed_names(&self, wanted: &Reference, error: StoreError) -> StoreError {
        if !matches!(&error, StoreError::NoSuchModel { similar, .. } | StoreError::MayBeHidden { similar, .. } if similar.is_empty())
        {
            return error;
        }
        let recorded = self.content.root.parsed_names(layout::HISTORY, layout::parse_recipe_name);
        let names: Vec<_> =
            recorded.into_iter().flatten().filter_map(|file| self.recorded_name(file)).collect();
        let similar = similar(wanted, &names);
        match error {
            StoreError::MayBeHidden { name, store, problem, .. } => {
                StoreError::MayBeHidden { name, similar, store, problem }
            }
            _ => StoreError::NoSuchModel { name: wanted.short(), similar },
        }
    }

    fn recorded_name(&self, file: Digest) -> Option<Reference> {
        Some(self.record_in(file)?.reference)
    }

    /// The record in a file of `history/`; `None` if it cannot be read.
    pub(super) fn record_in(&self, file: Digest) -> Option<Record> {
        let path = Path::new(layout::HISTORY).join(layout::recipe_name(file));
        let json = self.content.root.read_limited(&path, Record::MAX_BYTES).ok()??;
        serde_json::from_slice(&json).ok()
    }

    /// Removes a tag, durably. Its blobs may be deleted only after this. The caller has locked the tags.
    pub fn remove_tag(&self, reference: &Reference, actor: Actor) -> Result<(), StoreError> {
        self.record_removal(reference, actor)?;
        self.remove_tag_file(reference)
    }
}

/// The most histories of removed names. Each takes a block of the disk.
const MAX_REMOVED_NAMES: usize = 1000;

#[cfg(test)]
mod tests;
