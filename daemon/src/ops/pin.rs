//! `pin` and `unpin`: whether eviction and removal leave a model alone.

use blobd_client::protocol::request::PinParams;
use blobd_client::protocol::upkeep::Pinned;
use blobd_store::Store;

use super::OpError;

/// Pins a model, or lets it go.
///
/// # Errors
/// [`blobd_store::StoreError`] when there is no such model.
pub fn pin(store: &Store, params: &PinParams) -> Result<Pinned, OpError> {
    // No removal comes between the look and the deed.
    let _tags = store.lock_tags();
    let reference = store.resolve(&params.reference)?;
    if params.pinned {
        store.pin(&reference)?;
    } else {
        store.unpin(&reference)?;
    }
    Ok(Pinned { name: reference.short(), pinned: params.pinned })
}
