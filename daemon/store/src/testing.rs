//! Helpers for unit tests of this crate and of the daemon.
#![allow(clippy::unwrap_used, clippy::disallowed_methods, reason = "for tests alone")]

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::sync::Arc;

#[cfg(test)]
use blobd_store_format::descriptor::{Descriptor, MediaType};
use blobd_store_format::digest::Digest;
use blobd_store_format::layout;
#[cfg(test)]
use blobd_store_format::{
    manifest::Manifest,
    recipe::{Piece, Recipe},
    reference::Reference,
    tensor::TensorFormat,
};
use tempfile::TempDir;

use crate::{Ingest, Store, StoreOptions};

/// Creates an empty store in a temporary directory, which is removed when the first value is dropped.
pub fn new_store() -> (TempDir, Arc<Store>) {
    new_store_with(StoreOptions::default())
}

/// Like [`new_store`], with options.
pub fn new_store_with(options: StoreOptions) -> (TempDir, Arc<Store>) {
    let folder = tempfile::tempdir().unwrap();
    let store = Arc::new(Store::open_with(folder.path().join("store"), options).unwrap());
    (folder, store)
}

/// Begins a transaction.
pub fn begin(store: &Arc<Store>) -> Ingest {
    Ingest::begin(store, store.liveness.leases().grant("a test")).unwrap()
}

/// Stores blobs that no model needs.
pub fn add_blobs<B: AsRef<[u8]>>(store: &Arc<Store>, blobs: impl IntoIterator<Item = B>) -> Vec<Digest> {
    let mut ingest = begin(store);
    let digests = blobs.into_iter().map(|blob| ingest.add_bytes(blob.as_ref()).unwrap()).collect();
    ingest.commit_blobs().unwrap();
    digests
}

/// Creates a store with one blob.
pub fn store_with(bytes: &[u8]) -> (TempDir, Arc<Store>, Digest) {
    let (folder, store) = new_store();
    let digests = add_blobs(&store, [bytes]);
    (folder, store, digests[0])
}

/// A name of a model.
#[cfg(test)]
pub(crate) fn name(text: &str) -> Reference {
    text.parse().unwrap()
}

/// The entry of a file in a manifest.
#[cfg(test)]
pub(crate) fn file(bytes: &[u8]) -> Descriptor {
    let (digest, size) = (Digest::of(bytes), bytes.len() as u64);
    Descriptor { media_type: MediaType::new("text/plain"), digest, size }
}

/// The manifest of a model of these files, the first of them its configuration, and its layer if it is the only one.
#[cfg(test)]
pub(crate) fn manifest(files: &[&[u8]]) -> Manifest {
    let layers = files.get(1..).filter(|layers| !layers.is_empty()).unwrap_or(files);
    Manifest::compose(file(files[0]), layers.iter().map(|bytes| file(bytes)).collect()).unwrap()
}

/// The recipe of a file that is split into these blobs.
#[cfg(test)]
pub(crate) fn recipe_of(blobs: &[&[u8]]) -> Recipe {
    let piece =
        |bytes: &&[u8]| Piece::Blob { blob: Digest::of(bytes), offset: 0, length: bytes.len() as u64 };
    let pieces = blobs.iter().map(piece).collect();
    Recipe::new(Digest::of(&blobs.concat()), TensorFormat::Gguf, pieces, Vec::new()).unwrap()
}

/// Damages a blob of the store that [`new_store`] created in `folder`: replaces its content by `bytes`.
pub fn overwrite_blob(folder: &TempDir, digest: Digest, bytes: &[u8]) {
    let path = folder.path().join("store").join(layout::blob(digest));
    fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
    fs::write(&path, bytes).unwrap();
    fs::set_permissions(&path, Permissions::from_mode(0o444)).unwrap();
}
