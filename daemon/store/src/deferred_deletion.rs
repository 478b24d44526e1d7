//! The deferred-deletion queue: blobs and recipes that no tag is likely to need, but that could not be
//! collected yet, such as those of a removed model that is still open, or of a failed transaction.

use std::collections::BTreeSet;

use blobd_store_format::digest::Digest;
use tracing_mutex::stdsync::Mutex;

use super::{Store, lock};

/// Only a hint: the collection checks whether anything needs a digest.
#[derive(Debug, Default)]
pub(super) struct DeferredDeletion(Mutex<BTreeSet<Digest>>);

impl Store {
    /// Queues digests to be collected if nothing needs them: see [`crate::gc::collect_condemned`].
    pub fn condemn(&self, digests: impl IntoIterator<Item = Digest>) {
        lock(&self.deferred_deletion.0).extend(digests);
    }

    /// Whether the queue has any digest.
    pub fn has_condemned(&self) -> bool {
        !lock(&self.deferred_deletion.0).is_empty()
    }

    pub(crate) fn is_condemned(&self, digest: Digest) -> bool {
        lock(&self.deferred_deletion.0).contains(&digest)
    }

    pub(crate) fn take_condemned(&self) -> BTreeSet<Digest> {
        std::mem::take(&mut *lock(&self.deferred_deletion.0))
    }
}
