//! Which blobs this process itself is reading to verify them. To the kernel that is a use like any
//! other, but one that can be ended: a reader lets go of what is condemned.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use blobd_store_format::digest::Digest;

use super::{Store, lock};

/// How many reads of each blob are going on.
#[derive(Debug, Default)]
pub(super) struct OwnReads {
    counts: Mutex<BTreeMap<Digest, usize>>,
    ended: Condvar,
}

/// A read that is going on, until it is dropped. The file is to be closed before.
#[derive(Debug)]
#[must_use]
pub(crate) struct OwnRead<'s> {
    store: &'s Store,
    digest: Digest,
}

impl Store {
    /// Notes that this process reads a blob to check it.
    pub(crate) fn note_own_read(&self, digest: Digest) -> OwnRead<'_> {
        *lock(&self.own_reads.counts).entry(digest).or_default() += 1;
        OwnRead { store: self, digest }
    }

    /// Whether this process is reading a blob to check it.
    pub(crate) fn is_reading(&self, digest: Digest) -> bool {
        lock(&self.own_reads.counts).contains_key(&digest)
    }

    /// Condemns those of `digests` that this process is reading, and waits a moment for its
    /// readers to let go of them.
    pub(crate) fn end_own_reads(&self, digests: &BTreeSet<Digest>) {
        /// A reader looks once a second even if it is told to be slow.
        const MAX_WAIT: Duration = Duration::from_secs(2);
        let counts = lock(&self.own_reads.counts);
        let read: Vec<Digest> = counts.keys().filter(|digest| digests.contains(digest)).copied().collect();
        if read.is_empty() {
            return;
        }
        self.condemn(read.iter().copied());
        let is_read = |counts: &mut BTreeMap<_, _>| read.iter().any(|digest| counts.contains_key(digest));
        let waited = self.own_reads.ended.wait_timeout_while(counts, MAX_WAIT, is_read);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }
}

impl Drop for OwnRead<'_> {
    fn drop(&mut self) {
        let mut counts = lock(&self.store.own_reads.counts);
        if let Some(count) = counts.get_mut(&self.digest) {
            *count = count.saturating_sub(1);
        }
        counts.retain(|_, count| *count > 0);
        self.store.own_reads.ended.notify_all();
    }
}
