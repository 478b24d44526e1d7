//! Manifests, origins, histories and trash records: writes and removes their files, and updates the ledger.

use std::path::Path;

use blobd_store_format::layout;

use super::reservation::Reservation;
use super::{Store, StoreError};

impl Store {
    /// A file's bytes on disk; `None` if it does not exist.
    pub(crate) fn file_bytes(&self, path: &Path) -> Result<Option<u64>, StoreError> {
        Ok(self.root.status(path)?.map(|status| self.file_system.bytes_on_disk(&status)))
    }

    /// Writes a manifest, origin, history or trash record and counts its bytes, from `reservation` if there is one.
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

    /// The same outside of a transaction, without reserving space.
    pub(crate) fn write_lone_record(&self, target: &Path, content: &[u8]) -> Result<(), StoreError> {
        self.create_directories(Path::new(layout::STAGING))?;
        let name = self.new_transaction();
        let temporary = Path::new(layout::STAGING).join(&name);
        let written = self.write_record(&temporary, target, content, None).inspect_err(|_| {
            // If this fails, `gc` or the next start removes it.
            let _ = self.disk().remove_file(&temporary);
        });
        self.end_transaction(&name);
        written
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
