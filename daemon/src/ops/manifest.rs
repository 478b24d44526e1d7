//! `GET /v1/manifests/…`: returns a model's manifest unchanged.

use blobd_store::Store;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::reference::Reference;

use super::OpError;

/// Reads a model's manifest.
///
/// # Errors
/// [`blobd_store::StoreError`] when it is missing or damaged.
pub fn manifest(store: &Store, reference: &Reference) -> Result<Manifest, OpError> {
    Ok(store.manifest(&store.resolve(reference)?)?)
}
