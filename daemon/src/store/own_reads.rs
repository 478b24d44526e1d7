//! Which blobs this process itself is reading, so that it does not take its own descriptor for a
//! client's when it asks the kernel whether a blob is in use.

use std::collections::BTreeMap;
use std::sync::Mutex;

use blobd_store_format::digest::Digest;

use super::{Store, lock};

/// How many reads of each blob are going on.
#[derive(Debug, Default)]
pub(super) struct OwnReads(Mutex<BTreeMap<Digest, usize>>);

/// A read that is going on, until it is dropped.
#[derive(Debug)]
#[must_use]
pub(crate) struct OwnRead<'s> {
    store: &'s Store,
    digest: Digest,
}

impl Store {
    /// Notes that this process reads a blob to check it, and lets go of it soon.
    pub(crate) fn note_own_read(&self, digest: Digest) -> OwnRead<'_> {
        *lock(&self.own_reads.0).entry(digest).or_default() += 1;
        OwnRead { store: self, digest }
    }

    /// Whether this process is reading a blob to check it.
    pub(crate) fn is_reading(&self, digest: Digest) -> bool {
        lock(&self.own_reads.0).contains_key(&digest)
    }
}

impl Drop for OwnRead<'_> {
    fn drop(&mut self) {
        let mut reads = lock(&self.store.own_reads.0);
        if let Some(count) = reads.get_mut(&self.digest) {
            *count = count.saturating_sub(1);
        }
        reads.retain(|_, count| *count > 0);
    }
}
