//! Refuses to give a name to another model before much work is done. The commit checks it again.

use blobd_store::{Store, StoreError};
use blobd_store_format::manifest::Manifest;
use blobd_store_format::reference::Reference;

use super::OpError;
use crate::requester::Requester;

/// Which names that other models have the requester may take.
#[derive(Clone, Copy, Debug)]
pub(super) struct MayTake {
    /// Those of pinned models.
    pub(super) pinned: bool,
    /// Those that other users have added.
    pub(super) of_others: bool,
}

impl MayTake {
    /// Only administrators may take the names of others.
    pub(super) const fn with_force(requester: Requester, force: bool) -> Self {
        Self { pinned: force, of_others: requester.may_administer() }
    }
}

/// Refuses if another model has the name and it may not be taken. `may_be_same` says of that model's manifest whether
/// the model may be the one that gets the name.
///
/// # Errors
/// [`StoreError::Pinned`], [`StoreError::NameOfAnother`].
pub(super) fn refuse_unless_movable(
    store: &Store,
    requester: Requester,
    name: &Reference,
    may: MayTake,
    may_be_same: impl FnOnce(&Manifest) -> bool,
) -> Result<(), OpError> {
    if may.of_others && (may.pinned || !store.has_pins()) {
        return Ok(());
    }
    let Some(tag) = store.stored_case(name)? else { return Ok(()) };
    let Ok(present) = store.manifest(&tag) else { return Ok(()) };
    if may_be_same(&present) {
        return Ok(());
    }
    if !may.pinned && store.is_pinned(&tag) {
        return Err(StoreError::Pinned { name: tag.short() }.into());
    }
    match store.account_of(&tag, present.digest()).filter(|account| account.uid != requester.uid()) {
        Some(other) if !may.of_others => {
            Err(StoreError::NameOfAnother { name: tag.short(), uid: other.uid }.into())
        }
        _ => Ok(()),
    }
}
