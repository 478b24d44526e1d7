//! Pins: users' marks that keep models from eviction and removal. A pin is a file under `pins/` with the relative path
//! that its tag has under `manifests/`. An empty one was set by an administrator, or by a version that did not record
//! who set it; the pin of any other user has the user in JSON.

use std::path::Path;

use blobd_store_format::layout;
use blobd_store_format::reference::Reference;
use serde::{Deserialize, Serialize};

use crate::StoreError;
use crate::names::Names;
use crate::names::records::Actor;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pinner {
    /// An administrator: only administrators end it.
    Administrator,
    /// A user, for a name that this user has added.
    User(u32),
}

/// The content of an ordinary user's pin.
#[derive(Serialize, Deserialize)]
struct Record {
    uid: u32,
}

impl Record {
    /// A longer file was not written by blobd.
    const MAX_BYTES: u64 = 64;
}

impl Names {
    /// Whether a model is pinned; true if that cannot be read. `reference` must be a stored tag.
    pub fn is_pinned(&self, reference: &Reference) -> bool {
        self.content.root.status(&layout::pin(reference)).map_or(true, |status| status.is_some())
    }

    /// Whether any model may be pinned; true if that cannot be read.
    pub fn has_pins(&self) -> bool {
        let pins = self.content.root.find_directory(Path::new(layout::PINS));
        pins.map_or(true, |pins| pins.is_some_and(|pins| !pins.is_empty()))
    }

    /// Who has pinned a model. A pin that cannot be read counts as an administrator's: nobody else ends it.
    pub fn pinner_of(&self, reference: &Reference) -> Option<Pinner> {
        if !self.is_pinned(reference) {
            return None;
        }
        let json = self.content.root.read_limited(&layout::pin(reference), Record::MAX_BYTES).ok().flatten();
        let record: Option<Record> = json.and_then(|json| serde_json::from_slice(&json).ok());
        Some(record.map_or(Pinner::Administrator, |record| Pinner::User(record.uid)))
    }

    /// Pins a model, durably. Only an administrator's pin takes the place of another one.
    pub fn pin(&self, reference: &Reference, pinner: Pinner) -> Result<(), StoreError> {
        let path = layout::pin(reference);
        let Some(directory) = path.parent() else { return Ok(()) };
        self.content.create_directories(directory)?;
        match (self.pinner_of(reference), pinner) {
            (None, Pinner::User(uid)) => {
                let json = StoreError::encode(&Record { uid }, layout::PINS)?;
                self.ledger.write_lone_record(&path, &json)?;
            }
            (Some(Pinner::User(_)), Pinner::Administrator) => self.ledger.write_lone_record(&path, b"")?,
            // Takes no space, so that it is possible on a full disk.
            _ => {
                let file = self.content.disk.open_or_create(&path, 0o644)?;
                self.content.disk.sync_file(&path, &file)?;
            }
        }
        self.content.disk.sync_dir(directory)
    }

    /// Moves the pin from a tag to its new name, which is durable, and removes the old tag. A crash may leave both.
    pub(crate) fn finish_rename(
        &self,
        old: &Reference,
        new: &Reference,
        actor: Actor,
    ) -> Result<(), StoreError> {
        if let Some(pinner) = self.pinner_of(old) {
            self.pin(new, pinner)?;
            self.unpin(old)?;
        }
        // Names that differ only in case have one history, which stays as it is.
        if old.same_model(new) { self.remove_tag_file(old) } else { self.remove_tag(old, actor) }
    }

    /// Unpins a model, durably; returns whether it was pinned.
    pub fn unpin(&self, reference: &Reference) -> Result<bool, StoreError> {
        let path = layout::pin(reference);
        let was_pinned = self.ledger.remove_record(&path)?.is_some();
        // Also if there was no pin: the process that removed it may have been killed before the sync.
        let directory =
            path.parent().map(|directory| self.content.root.status(directory)).transpose()?.flatten();
        if directory.is_some_and(|directory| directory.is_dir()) {
            self.sync_and_prune(&path)?;
        }
        Ok(was_pinned)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{name, new_store};

    #[test]
    fn only_an_administrator_takes_the_place_of_another_pinner() {
        let (_folder, store) = new_store();
        let tag = name("m");
        let pinner = || store.names.pinner_of(&tag);
        assert!(!store.names.has_pins() && !store.names.is_pinned(&tag) && pinner().is_none());
        for (by, expected) in [
            (Pinner::User(7), Pinner::User(7)),
            (Pinner::User(8), Pinner::User(7)),
            (Pinner::Administrator, Pinner::Administrator),
            (Pinner::User(7), Pinner::Administrator),
        ] {
            store.names.pin(&tag, by).unwrap();
            assert_eq!(pinner(), Some(expected), "{by:?}");
            assert!(store.names.has_pins() && store.names.is_pinned(&tag));
            assert!(!store.names.is_pinned(&name("other")));
        }
        assert!(store.names.unpin(&tag).unwrap() && !store.names.unpin(&tag).unwrap());
        assert!(!store.names.has_pins() && pinner().is_none());
        store.names.pin(&tag, Pinner::Administrator).unwrap();
        assert_eq!(pinner(), Some(Pinner::Administrator));
    }

    #[test]
    fn pin_that_cannot_be_read_is_an_administrators() {
        let (_folder, store) = new_store();
        let tag = name("m");
        store.names.pin(&tag, Pinner::User(7)).unwrap();
        let path = store.path(layout::pin(&tag));
        for content in ["{", &format!("{{\"uid\":7{}}}", " ".repeat(64))] {
            std::fs::write(&path, content).unwrap();
            assert_eq!(store.names.pinner_of(&tag), Some(Pinner::Administrator), "{content}");
        }
        std::fs::remove_dir_all(store.path(layout::PINS)).unwrap();
        std::fs::write(store.path(layout::PINS), "").unwrap();
        assert!(
            store.names.has_pins() && store.names.is_pinned(&tag),
            "a file in the place of the directory"
        );
    }
}
