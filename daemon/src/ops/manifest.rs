//! `GET /v1/manifests/…`: what a model's registry says about it, byte for byte.

use blobd_store::Store;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::reference::Reference;

use super::OpError;

/// Reads a model's manifest.
///
/// # Errors
/// [`blobd_store::StoreError`]: there is none, or it is damaged.
pub fn manifest(store: &Store, reference: &Reference) -> Result<Manifest, OpError> {
    Ok(store.manifest(&store.resolve(reference)?)?)
}
