//! Updates the ledger and the index when files of the store are published or removed.

use std::path::Path;

use blobd_store_format::digest::Digest;
use blobd_store_format::layout;
use blobd_store_format::recipe::Recipe;

use super::reservation::Reservation;
use super::{Store, StoreError};

impl Store {
    /// Counts a blob that was just published, and notes it in the index.
    pub(crate) fn note_blob_added(
        &self,
        digest: Digest,
        reservation: &mut Reservation,
    ) -> Result<(), StoreError> {
        self.note_blob(digest);
        reservation.settle(self.blob_bytes_on_disk(digest)?.unwrap_or_default());
        Ok(())
    }

    /// Subtracts a removed blob of `bytes` on disk, and notes it in the index.
    pub(crate) fn note_blob_removed(&self, digest: Digest, bytes: u64) {
        self.note_blob(digest);
        self.space.freed(bytes);
    }

    /// Counts a recipe that has replaced one of `replaced` bytes on disk.
    pub(crate) fn note_recipe_added(
        &self,
        recipe: &Recipe,
        replaced: u64,
        reservation: &mut Reservation,
    ) -> Result<(), StoreError> {
        self.forget_recipe(recipe.file());
        self.note_recipe(recipe.file());
        self.space.freed(replaced);
        reservation.settle(self.file_bytes(&layout::recipe(recipe.file()))?.unwrap_or_default());
        Ok(())
    }

    pub(crate) fn note_recipe_removed(&self, file: Digest, bytes: u64) {
        self.forget_recipe(file);
        self.note_recipe(file);
        self.space.freed(bytes);
    }

    /// A file's bytes on disk; `None` if it does not exist.
    pub(crate) fn file_bytes(&self, path: &Path) -> Result<Option<u64>, StoreError> {
        Ok(self.root.status(path)?.map(|status| self.file_system.bytes_on_disk(&status)))
    }

    pub(crate) fn recipe_bytes(&self, file: Digest) -> Result<Option<u64>, StoreError> {
        self.file_bytes(&layout::recipe(file))
    }

    /// Removes a blob's file; returns its bytes on disk, or `None` if it did not exist. The caller holds a
    /// change, and notes the removal.
    pub(crate) fn remove_blob_file(&self, digest: Digest) -> Result<Option<u64>, StoreError> {
        let bytes = self.blob_bytes_on_disk(digest)?;
        Ok(self.disk.remove_file(&layout::blob(digest))?.and(bytes))
    }

    /// Like [`Self::remove_blob_file`] for a recipe.
    pub(crate) fn remove_recipe_file(&self, file: Digest) -> Result<Option<u64>, StoreError> {
        let bytes = self.recipe_bytes(file)?;
        let removed = self.disk.remove_file(&layout::recipe(file));
        self.forget_recipe(file);
        Ok(removed?.and(bytes))
    }

    /// Writes a manifest, origin or trash record and counts its bytes, from `reservation` if there is one.
    /// The caller makes the name durable.
    pub(crate) fn write_record(
        &self,
        temporary: &Path,
        target: &Path,
        content: &[u8],
        reservation: Option<Reservation>,
    ) -> Result<(), StoreError> {
        let replaced = self.file_bytes(target)?.unwrap_or_default();
        self.disk().replace_file(temporary, target, content, 0o644)?;
        self.space.freed(replaced);
        let bytes = self.file_bytes(target)?.unwrap_or_default();
        match reservation {
            Some(mut reservation) => reservation.settle(bytes),
            None => self.space.stored(0, bytes),
        }
        Ok(())
    }

    /// Removes a file that [`Self::write_record`] wrote; returns the bytes freed, or `None` if it did not
    /// exist.
    pub(crate) fn remove_record(&self, path: &Path) -> Result<Option<u64>, StoreError> {
        let bytes = self.file_bytes(path)?;
        let removed = self.disk().remove_file(path)?.and(bytes);
        self.space.freed(removed.unwrap_or_default());
        Ok(removed)
    }
}
