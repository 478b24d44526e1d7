//! The disk space reserved for one file.

use std::sync::Arc;

use super::Store;

/// Disk space reserved for one file. On drop, releases that of a staged file.
#[derive(Debug)]
pub(super) struct Reservation {
    store: Arc<Store>,
    bytes: u64,
    /// Bytes of content, if the space is taken as they are written.
    written: u64,
    /// The file is in `partial/` and not in `staging/`: it is kept after a restart.
    is_partial: bool,
}

impl Reservation {
    /// For a file in `staging/`, which the ledger has counted.
    pub(super) fn of_staged(store: &Arc<Store>, bytes: u64) -> Self {
        Self { store: Arc::clone(store), bytes, written: 0, is_partial: false }
    }

    /// For a file in `partial/`.
    pub(super) fn of_partial(store: &Arc<Store>, bytes: u64) -> Self {
        Self { store: Arc::clone(store), bytes, written: 0, is_partial: true }
    }

    /// The file is in `partial/` from now on, and stays there if the transaction fails.
    pub(super) fn stays_in_partial(mut self) {
        self.is_partial = true;
        self.store.space().stays_in_partial(self.bytes);
    }

    /// By how much the file's size on disk grows when `length` more bytes are written to it.
    pub(super) fn growth(&self, length: u64) -> u64 {
        self.store.space().on_disk(self.written.saturating_add(length)).saturating_sub(self.bytes)
    }

    /// Adds the space of `length` more bytes that were written to the file.
    pub(super) fn add(&mut self, mut growth: Self, length: u64) {
        self.written = self.written.saturating_add(length);
        self.bytes = self.bytes.saturating_add(std::mem::take(&mut growth.bytes));
    }

    /// The file was published and uses `bytes` on disk.
    pub(super) fn settle(&mut self, bytes: u64) {
        let reserved = std::mem::take(&mut self.bytes);
        if self.is_partial {
            self.store.space().stored_from_partial(reserved, bytes);
        } else {
            self.store.space().stored(reserved, bytes);
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if !self.is_partial {
            self.store.space().unstage(self.bytes);
        }
    }
}
