//! Pins: users' marks that keep models from eviction and removal. A pin is an empty file under `pins/`
//! with the relative path that its tag has under `manifests/`.

use std::path::Path;

use blobd_store_format::layout;
use blobd_store_format::reference::Reference;

use super::history::Actor;
use super::{Store, StoreError};

impl Store {
    /// Whether a model is pinned; true if that cannot be read. `reference` must be a stored tag.
    #[must_use]
    pub fn is_pinned(&self, reference: &Reference) -> bool {
        self.root.status(&layout::pin(reference)).map_or(true, |status| status.is_some())
    }

    /// Whether any model may be pinned; true if that cannot be read.
    #[must_use]
    pub fn has_pins(&self) -> bool {
        let pins = self.root.find_directory(Path::new(layout::PINS));
        pins.map_or(true, |pins| pins.is_some_and(|pins| !pins.is_empty()))
    }

    /// Pins a model, durably.
    pub fn pin(&self, reference: &Reference) -> Result<(), StoreError> {
        let path = layout::pin(reference);
        let Some(directory) = path.parent() else { return Ok(()) };
        self.create_directories(directory)?;
        let file = self.disk().open_or_create(&path, 0o644)?;
        self.disk().sync_file(&path, &file)?;
        self.disk().sync_dir(directory)
    }

    /// Moves the pin from one tag of a model to its new one, and removes the old tag. The new tag is durable, so a
    /// crash leaves at worst both.
    pub(super) fn finish_rename(
        &self,
        old: &Reference,
        new: &Reference,
        actor: Actor,
    ) -> Result<(), StoreError> {
        if self.is_pinned(old) {
            self.pin(new)?;
            self.unpin(old)?;
        }
        // Names that differ only in upper and lower case have one history, in which nothing has changed.
        if old.same_model(new) { self.remove_tag_file(old) } else { self.remove_tag(old, actor) }
    }

    /// Unpins a model, durably; returns whether it was pinned.
    pub fn unpin(&self, reference: &Reference) -> Result<bool, StoreError> {
        let path = layout::pin(reference);
        let was_pinned = self.disk().remove_file(&path)?.is_some();
        // Also if there was no pin: the process that removed it may have been killed before the sync.
        let directory = path.parent().map(|directory| self.root.status(directory)).transpose()?.flatten();
        if directory.is_some_and(|directory| directory.is_dir()) {
            self.sync_and_prune(&path)?;
        }
        Ok(was_pinned)
    }
}
