//! What probably nothing needs any more, and could not be collected at once: a removed model that
//! is still open somewhere, blobs of a transaction that failed half-way.

use std::collections::BTreeSet;
use std::sync::Mutex;

use blobd_store_format::digest::Digest;

use super::lock;

/// Digests of blobs and recipes that are collected as soon as nothing holds them. Only a hint:
/// whether anything needs them is looked up when they are.
#[derive(Debug, Default)]
pub(super) struct Condemned(Mutex<BTreeSet<Digest>>);

impl Condemned {
    pub(super) fn add(&self, digests: impl IntoIterator<Item = Digest>) {
        lock(&self.0).extend(digests);
    }

    pub(super) fn is_empty(&self) -> bool {
        lock(&self.0).is_empty()
    }

    pub(super) fn contains(&self, digest: Digest) -> bool {
        lock(&self.0).contains(&digest)
    }

    pub(super) fn take(&self) -> BTreeSet<Digest> {
        std::mem::take(&mut *lock(&self.0))
    }
}
