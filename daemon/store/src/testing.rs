//! Helpers for unit tests of this crate and of the daemon.
#![allow(clippy::unwrap_used, clippy::disallowed_methods, reason = "for tests alone")]

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::sync::Arc;

use blobd_store_format::digest::Digest;
use blobd_store_format::layout;
use tempfile::TempDir;

use crate::{Ingest, Store, StoreOptions};

/// Creates an empty store in a temporary directory, which is removed when the first value is dropped.
#[must_use]
pub fn new_store() -> (TempDir, Arc<Store>) {
    new_store_with(StoreOptions::default())
}

/// Like [`new_store`], with options.
#[must_use]
pub fn new_store_with(options: StoreOptions) -> (TempDir, Arc<Store>) {
    let folder = tempfile::tempdir().unwrap();
    let store = Arc::new(Store::open_with(folder.path().join("store"), options).unwrap());
    (folder, store)
}

/// Begins a transaction.
pub fn begin(store: &Arc<Store>) -> Ingest {
    Ingest::begin(store, store.liveness().leases().grant("a test")).unwrap()
}

/// Stores blobs that no model needs.
pub fn add_blobs<B: AsRef<[u8]>>(store: &Arc<Store>, blobs: impl IntoIterator<Item = B>) -> Vec<Digest> {
    let mut ingest = begin(store);
    let digests = blobs.into_iter().map(|blob| ingest.add_bytes(blob.as_ref()).unwrap()).collect();
    ingest.commit_blobs().unwrap();
    digests
}

/// Creates a store with one blob.
#[must_use]
pub fn store_with(bytes: &[u8]) -> (TempDir, Arc<Store>, Digest) {
    let (folder, store) = new_store();
    let digests = add_blobs(&store, [bytes]);
    (folder, store, digests[0])
}

/// Damages a blob of the store that [`new_store`] created in `folder`: replaces its content by `bytes`.
pub fn overwrite_blob(folder: &TempDir, digest: Digest, bytes: &[u8]) {
    let path = folder.path().join("store").join(layout::blob(digest));
    fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
    fs::write(&path, bytes).unwrap();
    fs::set_permissions(&path, Permissions::from_mode(0o444)).unwrap();
}
