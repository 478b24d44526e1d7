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
    let was_pinned = if params.pinned {
        let was_pinned = store.is_pinned(&reference);
        store.pin(&reference)?;
        was_pinned
    } else {
        store.unpin(&reference)?
    };
    let unchanged = was_pinned == params.pinned;
    Ok(Pinned { name: reference.short(), pinned: params.pinned, unchanged })
}
