//! `pin` and `unpin`: protects a model from eviction and removal, or ends that.

use blobd_client::protocol::request::PinParams;
use blobd_client::protocol::upkeep::Pinned;
use blobd_store::Store;

use super::OpError;

/// Pins or unpins a model.
pub fn pin(store: &Store, params: &PinParams) -> Result<Pinned, OpError> {
    // Prevents a removal between the lookup and the change.
    let _tags = store.lock_tags();
    let reference = store.resolve_for_change(&params.reference)?;
    if params.pinned {
        store.pin(&reference)?;
    } else {
        store.unpin(&reference)?;
    }
    Ok(Pinned { name: reference.short(), pinned: params.pinned })
}
