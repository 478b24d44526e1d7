//! The changes of names that can be taken back: what one request has changed, by the histories of the names.
//!
//! A change that was taken back no longer stands, and neither does the one that took it back. So the newest change that
//! stands is the next to be taken back.

use std::time::SystemTime;

use blobd_store_format::digest::Digest;
use blobd_store_format::layout;
use blobd_store_format::reference::Reference;

use super::Names;
use super::records::{ChangeId, Entry, HistoryEntry, NameOrigin, Record, Verb, read_history};
use crate::StoreError;

/// What a request has changed about one name.
#[derive(Clone, Debug)]
pub struct RecordedChange {
    /// The name, as its tag is written if it has one.
    pub reference: Reference,
    pub id: ChangeId,
    pub entry: HistoryEntry,
    /// The manifest that the name had before, and where that came from as far as recorded.
    pub previous: Option<Digest>,
    pub previous_origin: Option<NameOrigin>,
    /// The manifest that the name has now.
    pub present: Option<Digest>,
    /// The newest change of the name that stands, if that is another one.
    pub newer: Option<HistoryEntry>,
}

/// A name with the part of its history that has happened.
struct NamedRecord {
    reference: Reference,
    present: Option<Digest>,
    record: Record,
}

impl NamedRecord {
    fn change(&self, entry: &Entry) -> RecordedChange {
        let newest = self.record.standing().next();
        let earlier = self.record.entries.iter().take_while(|other| *other != entry);
        let set_previous = earlier.filter(|other| other.digest == entry.previous).last();
        RecordedChange {
            reference: self.reference.clone(),
            id: entry.change(),
            entry: entry.clone().row(),
            previous: entry.previous,
            previous_origin: set_previous.map(Entry::origin),
            present: self.present,
            newer: newest.filter(|newest| *newest != entry).cloned().map(Entry::row),
        }
    }
}

impl Names {
    /// The newest change that a user has made and that stands. Evictions are nobody's.
    pub fn newest_change_by(&self, uid: u32) -> Result<Option<ChangeId>, StoreError> {
        let is_own = |entry: &Entry| entry.uid == uid && !matches!(entry.verb, Verb::Evict | Verb::Unknown);
        let mut newest: Option<(SystemTime, ChangeId)> = None;
        self.each_record(is_own, |named| {
            let own = named.record.standing().find(|entry| is_own(entry));
            newest = newest.max(own.map(|entry| (entry.clone().row().time, entry.change())));
        })?;
        Ok(newest.map(|(_, id)| id))
    }

    /// The newest change of a name that stands. The name may have been removed.
    ///
    /// # Errors
    /// [`StoreError::NoSuchModel`] if the name never existed.
    pub fn newest_change_of(&self, reference: &Reference) -> Result<Option<RecordedChange>, StoreError> {
        let stored = self.stored_or_recorded(reference)?;
        let name = stored.as_ref().unwrap_or(reference);
        let Some(record) = read_history(&self.content.root, name) else { return Ok(None) };
        let named = self.named_record(record)?;
        let newest = named.record.standing().next().map(|entry| named.change(entry));
        Ok(newest)
    }

    /// What stands of a change, for each name.
    pub fn change(&self, id: ChangeId) -> Result<Vec<RecordedChange>, StoreError> {
        let mut changes = Vec::new();
        let is_part = |entry: &Entry| entry.change() == id;
        self.each_record(is_part, |named| {
            let part = named.record.standing().find(|entry| is_part(entry));
            changes.extend(part.map(|entry| named.change(entry)));
        })?;
        changes.sort_by(|a, b| a.reference.cmp(&b.reference));
        Ok(changes)
    }

    /// Visits the history of each name that has an entry for which `is_wanted` returns true.
    fn each_record(
        &self,
        is_wanted: impl Fn(&Entry) -> bool,
        mut visit: impl FnMut(&NamedRecord),
    ) -> Result<(), StoreError> {
        for file in self.content.root.parsed_names(layout::HISTORY, layout::parse_recipe_name)? {
            let Some(record) = self.record_in(file) else { continue };
            if record.entries.iter().any(&is_wanted) {
                visit(&self.named_record(record)?);
            }
        }
        Ok(())
    }

    fn named_record(&self, record: Record) -> Result<NamedRecord, StoreError> {
        let stored = self.stored_case(&record.reference)?;
        let present = stored.as_ref().map(|tag| self.tagged_digest(tag)).transpose()?.flatten();
        let reference = stored.unwrap_or_else(|| record.reference.clone());
        Ok(NamedRecord { reference, present, record: record.without_interrupted(present) })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::testing::{begin, manifest, name, new_store};
    use crate::{Actor, NameRule, Store};

    const ANN: u32 = 1001;
    const BOB: u32 = 1002;

    fn actor(uid: u32, verb: Verb) -> Actor {
        Actor { change: Some(ChangeId::next()), ..Actor::new(uid, verb) }
    }

    fn give(store: &Arc<Store>, actor: Actor, reference: &str, content: &str) -> Digest {
        let mut ingest = begin(store).may_take(NameRule::replacing_any()).on_behalf_of(actor);
        ingest.add_bytes(content.as_bytes()).unwrap();
        let manifest = manifest(&[content.as_bytes()]);
        ingest.commit(&name(reference), &manifest, None).unwrap();
        manifest.digest()
    }

    fn remove(store: &Store, actor: Actor, names: &[&str]) {
        let _tags = store.names.lock_tags();
        names.iter().for_each(|reference| store.names.remove_tag(&name(reference), actor).unwrap());
    }

    fn newest_names(store: &Store, uid: u32) -> Vec<String> {
        let id = store.names.newest_change_by(uid).unwrap();
        let changes = id.map(|id| store.names.change(id).unwrap()).unwrap_or_default();
        changes.iter().map(|change| change.reference.short()).collect()
    }

    #[test]
    fn change_of_several_names_by_one_request_is_one_change() {
        let (_folder, store) = new_store();
        let import = || actor(ANN, Verb::Import);
        let [a, _] = ["m:a", "m:b"].map(|reference| give(&store, import(), reference, reference));
        give(&store, actor(BOB, Verb::Import), "m:c", "c");
        assert_eq!(newest_names(&store, ANN), ["m:b"]);
        let rm = actor(ANN, Verb::Rm);
        remove(&store, rm, &["m:a", "m:b"]);
        assert_eq!(newest_names(&store, ANN), ["m:a", "m:b"]);
        assert_eq!((newest_names(&store, BOB), newest_names(&store, 7).len()), (vec!["m:c".to_owned()], 0));
        let undo = Actor { undoes: rm.change, ..actor(ANN, Verb::Undo) };
        give(&store, undo, "m:a", "m:a");
        assert_eq!(newest_names(&store, ANN), ["m:b"], "the rest of the removal stands");
        let change = store.names.newest_change_of(&name("m:a")).unwrap().unwrap();
        assert_eq!((change.entry.actor.verb, change.entry.digest), (Verb::Import, Some(a)));
        assert_eq!((change.previous, change.present, change.newer), (None, Some(a), None));
        give(&store, undo, "m:b", "m:b");
        assert_eq!(newest_names(&store, ANN), ["m:b"], "the import before it");
    }

    #[test]
    fn newer_change_of_the_name_and_evictions_are_seen() {
        let (_folder, store) = new_store();
        let first = give(&store, actor(ANN, Verb::Import), "m:a", "one");
        let second = give(&store, actor(BOB, Verb::Tag), "m:a", "two");
        let id = store.names.newest_change_by(ANN).unwrap().unwrap();
        let [change] = &store.names.change(id).unwrap()[..] else { panic!("one name") };
        assert_eq!((change.entry.digest, change.present), (Some(first), Some(second)));
        assert_eq!(change.newer.as_ref().map(|newer| newer.actor.uid), Some(BOB));
        remove(&store, Actor::new(ANN, Verb::Evict), &["m:a"]);
        assert_eq!(store.names.newest_change_by(ANN).unwrap(), Some(id), "an eviction is nobody's");
        let newest = store.names.newest_change_of(&name("m:A")).unwrap().unwrap();
        assert_eq!((newest.entry.actor.verb, newest.present), (Verb::Evict, None));
        assert!(store.names.newest_change_of(&name("m:none")).is_err());
    }

    #[test]
    fn change_that_has_not_happened_is_none() {
        let (_folder, store) = new_store();
        give(&store, actor(ANN, Verb::Import), "m:a", "one");
        let tag = store.path(layout::manifest(&name("m:a")));
        let content = std::fs::read(&tag).unwrap();
        remove(&store, actor(ANN, Verb::Rm), &["m:a"]);
        // As after a crash between the record and the removal.
        std::fs::create_dir_all(tag.parent().unwrap()).unwrap();
        std::fs::write(&tag, content).unwrap();
        let newest = store.names.newest_change_of(&name("m:a")).unwrap().unwrap();
        assert_eq!(newest.entry.actor.verb, Verb::Import);
    }

    #[test]
    fn entry_of_an_earlier_version_is_a_change_of_its_own() {
        let (_folder, store) = new_store();
        for reference in ["m:a", "m:b"] {
            give(&store, Actor::new(ANN, Verb::Import), reference, reference);
        }
        remove(&store, Actor::new(ANN, Verb::Rm), &["m:a", "m:b"]);
        assert_eq!(newest_names(&store, ANN), ["m:b"]);
    }
}
