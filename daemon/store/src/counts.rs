//! What has happened to the store since it was opened, for the daemon's metrics.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counters. Only this crate increments them, where the event happens.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) collections: Count,
    pub(crate) freed_bytes: Count,
    pub(crate) evicted_models: Count,
    pub(crate) evicted_bytes: Count,
    pub(crate) damaged_blobs: Count,
    pub(crate) checked_bytes: Count,
}

/// A number that only grows.
#[derive(Debug, Default)]
pub(crate) struct Count(AtomicU64);

impl Count {
    pub(crate) fn add(&self, more: u64) {
        self.0.fetch_add(more, Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// The counters at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreEvents {
    /// Collections that were carried out: by `gc`, `rm`, eviction, and in the background.
    pub collections: u64,
    /// Disk space that they have freed.
    pub freed_bytes: u64,
    /// Models that were evicted.
    pub evicted_models: u64,
    /// Disk space that their eviction has freed.
    pub evicted_bytes: u64,
    /// Blobs that did not have their digest, and were moved to quarantine.
    pub damaged_blobs: u64,
    /// Bytes that were read and compared with a digest, by `verify` and in the background.
    pub checked_bytes: u64,
    /// How often the index was built from the files, or compared with them.
    pub index_rebuilds: u64,
}

impl Counts {
    pub(crate) fn events(&self, rebuilds: &Count) -> StoreEvents {
        StoreEvents {
            collections: self.collections.get(),
            freed_bytes: self.freed_bytes.get(),
            evicted_models: self.evicted_models.get(),
            evicted_bytes: self.evicted_bytes.get(),
            damaged_blobs: self.damaged_blobs.get(),
            checked_bytes: self.checked_bytes.get(),
            index_rebuilds: rebuilds.get(),
        }
    }
}
