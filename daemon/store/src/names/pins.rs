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

/// Who has set a pin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pinner {
    /// An administrator: only administrators end it.
    Administrator,
    /// A user, for a name that this user has added.
    User(u32),
}

/// The content of the pin of a user who is no administrator.
#[derive(Serialize, Deserialize)]
struct Record {
    uid: u32,
}

impl Record {
    /// Longer files are none that blobd has written.
    const MAX_BYTES: u64 = 64;
}

impl Names {
    /// Whether a model is pinned; true if that cannot be read. `reference` must be a stored tag.
    #[must_use]
    pub fn is_pinned(&self, reference: &Reference) -> bool {
        self.content.root.status(&layout::pin(reference)).map_or(true, |status| status.is_some())
    }

    /// Whether any model may be pinned; true if that cannot be read.
    #[must_use]
    pub fn has_pins(&self) -> bool {
        let pins = self.content.root.find_directory(Path::new(layout::PINS));
        pins.map_or(true, |pins| pins.is_some_and(|pins| !pins.is_empty()))
    }

    /// Who has pinned a model; `None` if it is not pinned. A pin that cannot be read counts as an administrator's:
    /// nobody else ends it.
    #[must_use]
    pub fn pinner_of(&self, reference: &Reference) -> Option<Pinner> {
        if !self.is_pinned(reference) {
            return None;
        }
        let json = self.content.root.read_limited(&layout::pin(reference), Record::MAX_BYTES).ok().flatten();
        let record: Option<Record> = json.and_then(|json| serde_json::from_slice(&json).ok());
        Some(record.map_or(Pinner::Administrator, |record| Pinner::User(record.uid)))
    }

    /// Pins a model, durably. An administrator's pin takes the place of another one; that of any other user leaves an
    /// existing pin as it is.
    pub fn pin(&self, reference: &Reference, pinner: Pinner) -> Result<(), StoreError> {
        let path = layout::pin(reference);
        let Some(directory) = path.parent() else { return Ok(()) };
        self.content.create_directories(directory)?;
        match (self.pinner_of(reference), pinner) {
            (None, Pinner::User(uid)) => {
                let json = serde_json::to_vec(&Record { uid });
                let json = json.map_err(|error| StoreError::io("encode", layout::PINS)(error.into()))?;
                self.ledger.write_lone_record(&path, &json)?;
            }
            (Some(Pinner::User(_)), Pinner::Administrator) => self.ledger.write_lone_record(&path, b"")?,
            // Takes no space, so that it is possible on a full disk.
            _ => {
                let file = self.content.disk().open_or_create(&path, 0o644)?;
                self.content.disk().sync_file(&path, &file)?;
            }
        }
        self.content.disk().sync_dir(directory)
    }

    /// Moves the pin from one tag of a model to its new one, and removes the old tag. The new tag is durable, so a
    /// crash leaves at worst both.
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
        // Names that differ only in upper and lower case have one history, in which nothing has changed.
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
