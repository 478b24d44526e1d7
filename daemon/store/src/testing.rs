//! What unit tests of this crate and of the daemon build on.
#![allow(clippy::unwrap_used, clippy::disallowed_methods, reason = "for tests alone")]

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::sync::Arc;

use blobd_store_format::digest::Digest;
use blobd_store_format::layout;
use tempfile::TempDir;

use crate::{Ingest, Store, StoreOptions};

/// An empty store, and the directory that it is in, which is removed when it is dropped.
///
/// # Panics
/// When there is no room for it.
#[must_use]
pub fn new_store() -> (TempDir, Arc<Store>) {
    new_store_with(StoreOptions::default())
}

/// The same with options.
///
/// # Panics
/// When there is no room for it.
#[must_use]
pub fn new_store_with(options: StoreOptions) -> (TempDir, Arc<Store>) {
    let folder = tempfile::tempdir().unwrap();
    let store = Arc::new(Store::open_with(folder.path().join("store"), options).unwrap());
    (folder, store)
}

/// A transaction.
///
/// # Panics
/// When none can begin.
pub fn begin(store: &Arc<Store>) -> Ingest {
    Ingest::begin(store, store.leases().grant("a test")).unwrap()
}

/// Stores blobs that no model needs.
///
/// # Panics
/// When that fails.
pub fn add_blobs<B: AsRef<[u8]>>(store: &Arc<Store>, blobs: impl IntoIterator<Item = B>) -> Vec<Digest> {
    let mut ingest = begin(store);
    let digests = blobs.into_iter().map(|blob| ingest.add_bytes(blob.as_ref()).unwrap()).collect();
    ingest.commit_blobs().unwrap();
    digests
}

/// A new store of one blob.
///
/// # Panics
/// As for [`add_blobs`].
#[must_use]
pub fn store_with(bytes: &[u8]) -> (TempDir, Arc<Store>, Digest) {
    let (folder, store) = new_store();
    let digests = add_blobs(&store, [bytes]);
    (folder, store, digests[0])
}

/// Damages a blob of the store that [`new_store`] has made in `folder`: writes these bytes in place of its own.
///
/// # Panics
/// When that fails.
pub fn overwrite_blob(folder: &TempDir, digest: Digest, bytes: &[u8]) {
    let path = folder.path().join("store").join(layout::blob(digest));
    fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
    fs::write(&path, bytes).unwrap();
    fs::set_permissions(&path, Permissions::from_mode(0o444)).unwrap();
}
