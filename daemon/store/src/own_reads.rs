//! Which blobs this process itself is reading to verify them. To the kernel that is a use like any
//! other, but one that can be ended: a reader lets go of what a collection is about to delete, and
//! begins no reading of it until the collection is over.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use blobd_store_format::digest::Digest;

use super::{Store, lock};

/// The readings that are going on, and the blobs of which none may begin.
#[derive(Debug, Default)]
pub(super) struct OwnReads {
    counts: Mutex<Counts>,
    ended: Condvar,
}

#[derive(Debug, Default)]
struct Counts {
    /// How many reads of each blob are going on.
    reads: BTreeMap<Digest, usize>,
    /// How many collections want to delete each blob.
    collections: BTreeMap<Digest, usize>,
}

/// A read that is going on, until it is dropped. The file is to be closed before.
#[derive(Debug)]
#[must_use]
pub struct OwnRead<'s> {
    store: &'s Store,
    digest: Digest,
}

/// Keeps this process from reading blobs to verify them, until it is dropped.
#[derive(Debug)]
#[must_use]
pub(crate) struct OwnReadsBarred<'s> {
    store: &'s Store,
    digests: BTreeSet<Digest>,
}

impl Store {
    /// Notes that this process reads a blob to check it, whatever is about to be deleted.
    pub fn note_own_read(&self, digest: Digest) -> OwnRead<'_> {
        count(&mut lock(&self.own_reads.counts).reads, digest);
        OwnRead { store: self, digest }
    }

    /// The same, unless a collection is about to delete the blob.
    pub(crate) fn note_own_read_unless_barred(&self, digest: Digest) -> Option<OwnRead<'_>> {
        let mut counts = lock(&self.own_reads.counts);
        if counts.collections.contains_key(&digest) {
            return None;
        }
        count(&mut counts.reads, digest);
        Some(OwnRead { store: self, digest })
    }

    /// Whether this process is reading a blob to check it.
    pub(crate) fn is_reading(&self, digest: Digest) -> bool {
        lock(&self.own_reads.counts).reads.contains_key(&digest)
    }

    /// Whether a collection is about to delete a blob, so that its readers are to let go of it.
    pub(crate) fn is_own_read_barred(&self, digest: Digest) -> bool {
        lock(&self.own_reads.counts).collections.contains_key(&digest)
    }

    /// Lets no reading of `digests` begin, and waits a moment for those that are going on to end.
    pub(crate) fn bar_own_reads(&self, digests: BTreeSet<Digest>) -> OwnReadsBarred<'_> {
        /// A reader looks once a second even if it is told to be slow.
        const MAX_WAIT: Duration = Duration::from_secs(2);
        let mut counts = lock(&self.own_reads.counts);
        for digest in &digests {
            count(&mut counts.collections, *digest);
        }
        let is_read = |counts: &mut Counts| counts.reads.keys().any(|digest| digests.contains(digest));
        let waited = self.own_reads.ended.wait_timeout_while(counts, MAX_WAIT, is_read);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
        OwnReadsBarred { store: self, digests }
    }
}

impl Drop for OwnRead<'_> {
    fn drop(&mut self) {
        uncount(&mut lock(&self.store.own_reads.counts).reads, self.digest);
        self.store.own_reads.ended.notify_all();
    }
}

impl Drop for OwnReadsBarred<'_> {
    fn drop(&mut self) {
        let mut counts = lock(&self.store.own_reads.counts);
        for digest in &self.digests {
            uncount(&mut counts.collections, *digest);
        }
    }
}

fn count(counts: &mut BTreeMap<Digest, usize>, digest: Digest) {
    *counts.entry(digest).or_default() += 1;
}

fn uncount(counts: &mut BTreeMap<Digest, usize>, digest: Digest) {
    if let Some(count) = counts.get_mut(&digest) {
        *count = count.saturating_sub(1);
        if *count == 0 {
            counts.remove(&digest);
        }
    }
}
