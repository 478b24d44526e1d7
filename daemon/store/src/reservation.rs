//! The disk space reserved for one file.

use std::sync::Arc;

use super::Store;

/// Disk space reserved for one file. On drop, releases that of a staged file, and what it counts against a quota.
#[derive(Debug)]
pub(super) struct Reservation {
    store: Arc<Store>,
    bytes: u64,
    /// Bytes of content, if the space is taken as they are written.
    written: u64,
    /// The file is in `partial/` and not in `staging/`: it is kept after a restart.
    is_partial: bool,
    /// The transaction against whose user's quota it counts; `None` if it counts against none, or stays.
    transaction: Option<Arc<str>>,
}

impl Reservation {
    /// For a file in `staging/`, which the ledger has counted, and the quota of the transaction's user, if there is
    /// one.
    pub(super) fn of_staged(store: &Arc<Store>, bytes: u64, transaction: Option<Arc<str>>) -> Self {
        Self { store: Arc::clone(store), bytes, written: 0, is_partial: false, transaction }
    }

    /// For a file in `partial/`.
    pub(super) fn of_partial(store: &Arc<Store>, bytes: u64, transaction: Arc<str>) -> Self {
        let (store, transaction) = (Arc::clone(store), Some(transaction));
        Self { store, bytes, written: 0, is_partial: true, transaction }
    }

    /// The file is in `partial/` from now on, and stays there if the transaction fails.
    pub(super) fn stays_in_partial(mut self) {
        self.is_partial = true;
        self.transaction = None;
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
        self.give_back(reserved.saturating_sub(bytes));
        if self.is_partial {
            self.store.space().stored_from_partial(reserved, bytes);
        } else {
            self.store.space().stored(reserved, bytes);
        }
    }
}

impl Reservation {
    fn give_back(&self, bytes: u64) {
        if let Some(transaction) = self.transaction.as_ref().filter(|_| bytes > 0) {
            self.store.give_back_of_quota(transaction, bytes);
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.give_back(self.bytes);
        if !self.is_partial {
            self.store.space().unstage(self.bytes);
        }
    }
}
