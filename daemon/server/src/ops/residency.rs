//! `residency`: how much of a model is in the page cache.

use std::collections::BTreeSet;
use std::os::fd::AsFd as _;

use blobd_client::residency::Residency;
use blobd_store::Store;
use blobd_store_format::digest::Digest;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::reference::Reference;

use super::OpError;

/// Counts the pages of all blobs of the model with this manifest, each blob once. Is no use of the model. `None` if
/// neither `reference` nor another name is that model any more.
///
/// # Errors
/// [`blobd_store::StoreError`], also for a blob that is missing; [`OpError::Internal`] if the kernel does not tell this user.
pub fn residency(
    store: &Store,
    reference: &Reference,
    manifest: Digest,
) -> Result<Option<Residency>, OpError> {
    let Some(manifest) = find(store, reference, manifest)? else { return Ok(None) };
    let mut blobs = BTreeSet::new();
    for file in manifest.files() {
        blobs.extend(store.content().stored_file(file)?.blob_sizes().into_iter().map(|(digest, _)| digest));
    }
    let mut sum = Residency::default();
    for digest in blobs {
        let file = store.content().open_blob(digest, 0)?;
        let part = Residency::of_file(file.as_fd()).map_err(|error| OpError::Internal(error.to_string()))?;
        sum = sum.plus(part);
    }
    Ok(Some(sum))
}

fn find(store: &Store, reference: &Reference, digest: Digest) -> Result<Option<Manifest>, OpError> {
    let named = |name: &Reference| store.names().manifest(name).ok().filter(|found| found.digest() == digest);
    match named(reference) {
        None => Ok(store.names().names_of(digest)?.iter().find_map(named)),
        found => Ok(found),
    }
}
