//! `residency`: how much of a model is in the page cache.

use std::collections::BTreeSet;
use std::os::fd::AsFd as _;

use blobd_client::residency::Residency;
use blobd_store::Store;
use blobd_store_format::reference::Reference;

use super::OpError;

/// Counts the pages of all blobs of a model, each blob once. Is no use of the model.
///
/// # Errors
/// [`blobd_store::StoreError`], also for a blob that is missing; [`OpError::Internal`] if the kernel does not tell this user.
pub fn residency(store: &Store, reference: &Reference) -> Result<Residency, OpError> {
    let mut blobs = BTreeSet::new();
    for file in store.manifest(&store.resolve(reference)?)?.files() {
        blobs.extend(store.stored_file(file)?.blob_sizes().into_iter().map(|(digest, _)| digest));
    }
    let mut sum = Residency::default();
    for digest in blobs {
        let file = store.open_blob(digest, 0)?;
        let part = Residency::of_file(file.as_fd()).map_err(|error| OpError::Internal(error.to_string()))?;
        sum = sum.plus(part);
    }
    Ok(sum)
}
