//! What has happened to the store since it was opened, for the daemon's metrics.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::Store;

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

impl Store {
    /// What has happened since the store was opened.
    #[must_use]
    pub fn events(&self) -> StoreEvents {
        let Counts { collections, freed_bytes, evicted_models, evicted_bytes, damaged_blobs, checked_bytes } =
            &self.counts;
        StoreEvents {
            collections: collections.get(),
            freed_bytes: freed_bytes.get(),
            evicted_models: evicted_models.get(),
            evicted_bytes: evicted_bytes.get(),
            damaged_blobs: damaged_blobs.get(),
            checked_bytes: checked_bytes.get(),
            index_rebuilds: self.index.rebuilds.get(),
        }
    }
}
