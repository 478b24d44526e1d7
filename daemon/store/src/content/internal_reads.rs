//! Blobs that this process itself reads in order to verify them.
//!
//! The kernel reports such blobs as in use, like those that clients have open. These reads can be stopped: a reader
//! closes a blob that a collection is about to delete, and does not start to read it again before the collection is
//! over.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::PoisonError;
use std::time::Duration;

use blobd_store_format::digest::Digest;
use tracing_mutex::stdsync::{Condvar, Mutex};

use crate::content::Content;
use crate::lock;

#[derive(Debug, Default)]
pub(crate) struct InternalReads {
    counts: Mutex<Counts>,
    ended: Condvar,
}

#[derive(Debug, Default)]
struct Counts {
    /// The number of reads of each blob in progress.
    reads: BTreeMap<Digest, usize>,
    /// The number of collections that are about to delete each blob.
    collections: BTreeMap<Digest, usize>,
}

/// A read in progress, until it is dropped. The file must be closed first.
#[derive(Debug)]
#[must_use]
pub struct InternalRead<'s> {
    store: &'s Content,
    digest: Digest,
}

/// Blocks internal reads of these blobs until it is dropped.
#[derive(Debug)]
#[must_use]
pub(crate) struct InternalReadsBlocked<'s> {
    store: &'s Content,
    digests: BTreeSet<Digest>,
}

impl Content {
    /// Registers an internal read, even if a collection is about to delete the blob.
    pub fn begin_internal_read(&self, digest: Digest) -> InternalRead<'_> {
        count(&mut lock(&self.internal_reads.counts).reads, digest);
        InternalRead { store: self, digest }
    }

    /// Like [`Self::begin_internal_read`]; `None` if a collection is about to delete the blob.
    pub(crate) fn begin_internal_read_unless_blocked(&self, digest: Digest) -> Option<InternalRead<'_>> {
        let mut counts = lock(&self.internal_reads.counts);
        if counts.collections.contains_key(&digest) {
            return None;
        }
        count(&mut counts.reads, digest);
        Some(InternalRead { store: self, digest })
    }

    pub(crate) fn is_reading(&self, digest: Digest) -> bool {
        lock(&self.internal_reads.counts).reads.contains_key(&digest)
    }

    /// Whether a collection is about to delete a blob, so that its internal readers must close it.
    pub(crate) fn is_internal_read_blocked(&self, digest: Digest) -> bool {
        lock(&self.internal_reads.counts).collections.contains_key(&digest)
    }

    /// Blocks new internal reads of `digests`, and waits up to [`MAX_WAIT`] for those in progress to end.
    pub(crate) fn block_internal_reads(&self, digests: BTreeSet<Digest>) -> InternalReadsBlocked<'_> {
        let mut counts = lock(&self.internal_reads.counts);
        for digest in &digests {
            count(&mut counts.collections, *digest);
        }
        let is_read = |counts: &mut Counts| counts.reads.keys().any(|digest| digests.contains(digest));
        let waited = self.internal_reads.ended.wait_timeout_while(counts, MAX_WAIT, is_read);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
        InternalReadsBlocked { store: self, digests }
    }
}

impl Drop for InternalRead<'_> {
    fn drop(&mut self) {
        uncount(&mut lock(&self.store.internal_reads.counts).reads, self.digest);
        self.store.internal_reads.ended.notify_all();
    }
}

impl Drop for InternalReadsBlocked<'_> {
    fn drop(&mut self) {
        let mut counts = lock(&self.store.internal_reads.counts);
        for digest in &self.digests {
            uncount(&mut counts.collections, *digest);
        }
    }
}

/// A reader checks at least once a second whether it is blocked, even if it is rate limited.
const MAX_WAIT: Duration = Duration::from_secs(2);

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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::new_store;

    #[test]
    fn blob_is_being_read_until_its_last_reader_ends() {
        let (_folder, store) = new_store();
        let digest = Digest::of(b"x");
        let [first, second] = [(); 2].map(|()| store.content.begin_internal_read(digest));
        drop(first);
        assert!(store.content.is_reading(digest));
        drop(second);
        assert!(!store.content.is_reading(digest));
    }
}
