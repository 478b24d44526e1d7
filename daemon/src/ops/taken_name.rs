//! Refuses to give the name of a pinned model to another one before much work is done. The commit checks it again.

use blobd_store::{Store, StoreError};
use blobd_store_format::manifest::Manifest;
use blobd_store_format::reference::Reference;

use super::OpError;

/// Refuses if a pinned model has the name, unless it may be moved or `may_be_same` is true of that model's
/// manifest.
///
/// # Errors
/// [`StoreError::Pinned`].
pub(super) fn refuse_unless_movable(
    store: &Store,
    name: &Reference,
    may_move: bool,
    may_be_same: impl FnOnce(&Manifest) -> bool,
) -> Result<(), OpError> {
    if may_move || !store.has_pins() {
        return Ok(());
    }
    let Some(tag) = store.stored_case(name)? else { return Ok(()) };
    let is_other = || store.manifest(&tag).is_ok_and(|present| !may_be_same(&present));
    match store.is_pinned(&tag) && is_other() {
        true => Err(StoreError::Pinned { name: tag.short() }.into()),
        false => Ok(()),
    }
}
