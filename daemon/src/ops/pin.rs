//! `pin` and `unpin`: protects a model from eviction and removal, or ends that.

use blobd_client::protocol::request::PinParams;
use blobd_client::protocol::upkeep::Pinned;
use blobd_store::Store;

use super::OpError;

/// Pins or unpins a model.
pub fn pin(store: &Store, params: &PinParams) -> Result<Pinned, OpError> {
    // Before the lock: a look-up in a lower store may take long.
    let reference = store.resolve_for_change(&params.reference)?;
    // Prevents a removal between the check and the change.
    let _tags = store.lock_tags();
    store.check_tag(&reference)?;
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
