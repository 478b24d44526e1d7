//! The disk space of a file that is being stored.

use std::sync::Arc;

use super::Store;

/// Disk space that is reserved for one file; released when this is dropped.
#[derive(Debug)]
pub(super) struct Reservation {
    store: Arc<Store>,
    bytes: u64,
    /// The file lies in `partial/` and not in `staging/`: it may outlive this process.
    is_partial: bool,
}

impl Reservation {
    /// The space of a file in `staging/`, which the ledger has counted.
    pub(super) fn of_staged(store: &Arc<Store>, bytes: u64) -> Self {
        Self { store: Arc::clone(store), bytes, is_partial: false }
    }

    /// The space of a file in `partial/`.
    pub(super) fn of_partial(store: &Arc<Store>, bytes: u64) -> Self {
        Self { store: Arc::clone(store), bytes, is_partial: true }
    }

    /// The file lies in `partial/`, whatever becomes of the transaction.
    pub(super) fn stays_in_partial(mut self) {
        self.is_partial = true;
        self.store.space().stays_in_partial(self.bytes);
    }

    /// The file has its final name, and takes `bytes` on disk from now on.
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
