//! Counts files: the space reserved for one, and manifests, origins, histories and trash records as they are written
//! and removed.

use std::path::Path;
use std::sync::Arc;

use blobd_store_format::digest::Digest;
use blobd_store_format::layout;

use crate::StoreError;
use crate::ledger::Ledger;
use crate::node::Node;

impl Ledger {
    /// Writes a record and counts its bytes, from `reservation` if there is one. The caller makes the name durable.
    pub(crate) fn write_record(
        &self,
        temporary: &Path,
        target: &Path,
        content: &[u8],
        reservation: Option<Reservation>,
    ) -> Result<(), StoreError> {
        let replaced = self.content.file_bytes(target)?.unwrap_or_default();
        self.content.disk.replace_file(temporary, target, content, 0o644)?;
        self.content.space.freed(replaced);
        let bytes = self.content.file_bytes(target)?.unwrap_or_default();
        match reservation {
            Some(mut reservation) => reservation.settle(bytes),
            None => self.content.space.stored(0, bytes),
        }
        Ok(())
    }

    /// Writes a record outside of a transaction, without reserving space.
    pub(crate) fn write_lone_record(&self, target: &Path, content: &[u8]) -> Result<(), StoreError> {
        self.content.create_directories(Path::new(layout::STAGING))?;
        let name = self.content.new_staging_name();
        let temporary = Path::new(layout::STAGING).join(&name);
        let written = self.write_record(&temporary, target, content, None).inspect_err(|_| {
            // If this fails, `gc` or the next start removes it.
            let _ = self.content.disk.remove_file(&temporary);
        });
        self.content.release_staging_name(&name);
        written
    }

    /// Removes a record; returns the bytes freed, or `None` if it did not exist.
    pub(crate) fn remove_record(&self, path: &Path) -> Result<Option<u64>, StoreError> {
        let bytes = self.content.file_bytes(path)?;
        let removed = self.content.disk.remove_file(path)?.and(bytes);
        self.content.space.freed(removed.unwrap_or_default());
        Ok(removed)
    }

    /// Counts a published blob or recipe that has replaced one of `replaced` bytes on disk, and notes it in the index.
    pub(crate) fn note_added(
        &self,
        node: Node,
        replaced: u64,
        reservation: &mut Reservation,
    ) -> Result<(), StoreError> {
        self.content.note_removed(node, replaced);
        reservation.settle(self.content.bytes_on_disk(node)?.unwrap_or_default());
        Ok(())
    }

    /// Removes the unfinished download of a file; returns the bytes freed on disk.
    pub fn remove_partial(&self, file: Digest) -> Result<u64, StoreError> {
        let directory = layout::partial(file);
        let bytes = self.content.partial_bytes(&directory)?;
        if self.content.root.status(&directory)?.is_some() {
            self.content.disk.remove_tree(&directory)?;
            self.space().recount_partial();
            self.note_partial_removed(file, bytes);
        }
        Ok(bytes)
    }
}

/// Disk space reserved for one file. On drop, releases that of a staged file, and what it counts against a quota.
#[derive(Debug)]
pub(crate) struct Reservation {
    ledger: Arc<Ledger>,
    bytes: u64,
    /// Bytes of content, if the space is taken as they are written.
    written: u64,
    /// The file is in `partial/` and not in `staging/`: it is kept after a restart.
    is_partial: bool,
    /// The transaction against whose user's quota it counts; `None` if it counts against none, or stays.
    transaction: Option<Arc<str>>,
}

impl Reservation {
    /// For a file in `staging/`, which the ledger and the quota of the transaction's user have counted.
    pub(crate) fn for_staged(ledger: &Arc<Ledger>, bytes: u64, transaction: Option<Arc<str>>) -> Self {
        Self { ledger: Arc::clone(ledger), bytes, written: 0, is_partial: false, transaction }
    }

    /// For a file in `partial/`.
    pub(crate) fn for_partial(ledger: &Arc<Ledger>, bytes: u64, transaction: Arc<str>) -> Self {
        let (ledger, transaction) = (Arc::clone(ledger), Some(transaction));
        Self { ledger, bytes, written: 0, is_partial: true, transaction }
    }

    /// The file is in `partial/` from now on, and stays there if the transaction fails.
    pub(crate) fn stays_in_partial(mut self) {
        self.is_partial = true;
        self.transaction = None;
        self.ledger.space().stays_in_partial(self.bytes);
    }

    /// By how much the file's size on disk grows when `length` more bytes are written to it.
    pub(crate) fn growth(&self, length: u64) -> u64 {
        self.ledger.space().on_disk(self.written.saturating_add(length)).saturating_sub(self.bytes)
    }

    /// Adds the space of `length` more bytes that were written to the file.
    pub(crate) fn add(&mut self, mut growth: Self, length: u64) {
        self.written = self.written.saturating_add(length);
        self.bytes = self.bytes.saturating_add(std::mem::take(&mut growth.bytes));
    }

    /// The file was published and uses `bytes` on disk.
    pub(crate) fn settle(&mut self, bytes: u64) {
        let reserved = std::mem::take(&mut self.bytes);
        self.give_back(reserved.saturating_sub(bytes));
        if self.is_partial {
            self.ledger.space().stored_from_partial(reserved, bytes);
        } else {
            self.ledger.space().stored(reserved, bytes);
        }
    }

    fn give_back(&self, bytes: u64) {
        if let Some(transaction) = self.transaction.as_ref().filter(|_| bytes > 0) {
            self.ledger.give_back_of_quota(transaction, bytes);
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.give_back(self.bytes);
        if !self.is_partial {
            self.ledger.space().unstage(self.bytes);
        }
    }
}
