//! `pin` and `unpin`: protects a model from eviction and removal, or ends that.

use blobd_client::protocol::request::PinParams;
use blobd_client::protocol::upkeep::Pinned;
use blobd_store::Store;

use super::OpError;
use crate::requester::Requester;

/// Pins or unpins a model.
///
/// # Errors
/// Those of [`blobd_store::Names::check_change`].
pub fn pin(store: &Store, requester: Requester, params: &PinParams) -> Result<Pinned, OpError> {
    // Before the lock: a look-up in a lower store may take long.
    let reference = store.names().resolve_for_change(&params.reference)?;
    // Prevents a removal between the check and the change.
    let _tags = store.names().lock_tags();
    store.names().check_tag(&reference)?;
    let unchanged = if params.pinned {
        store.names().check_own(&reference, requester.name_user())?;
        let before = store.names().pinner_of(&reference);
        store.names().pin(&reference, requester.pinner())?;
        before == store.names().pinner_of(&reference)
    } else {
        store.names().check_change(&reference, requester.name_user())?;
        !store.names().unpin(&reference)?
    };
    Ok(Pinned { name: reference.short(), pinned: params.pinned, unchanged })
}
