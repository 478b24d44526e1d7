//! `tag`, `rename`, `pin` and `unpin` change names only, and no model.

use std::sync::Arc;

use blobd_client::protocol::naming::{NameEffects, Pinned, Renamed, Tagged};
use blobd_client::protocol::request::{ImportOrigin, PinParams, RenameParams, TagParams};
use blobd_store::{NameOrigin, Store, Verb};
use blobd_store_format::derived_name::DerivedName;
use blobd_store_format::reference::Reference;

use super::{Leftover, NameChange, Named, TargetName, origin_record};
use crate::ops::{CallerPolicy, OpError};
use crate::requester::Requester;

/// Points `target` at the manifest of `source`. Copies no data. A name in another program's store is not the user's choice: it
/// is made distinct from that of another model.
///
/// # Errors
/// Those of [`Names::check_name`](blobd_store::Names::check_name) if `target` is another model and `force` is not set;
/// [`OpError::DeniedByPolicy`].
pub fn tag(
    store: &Arc<Store>,
    requester: Requester,
    policy: &CallerPolicy,
    params: &TagParams,
) -> Result<Tagged, OpError> {
    NameChange::run(store, Leftover::Nothing, || {
        let given = TargetName::given(&params.target)?;
        let is_of_program = params.origin.as_ref().is_some_and(|origin| origin.program.is_some());
        let target = match is_of_program && !params.force {
            true => TargetName::Derived(DerivedName::from_program(params.target.clone())),
            false => given,
        };
        let cause = format!("tag {}", params.target.short());
        let change = NameChange::new(store, requester, Verb::Tag, cause).replacing(params.force);
        let (model, lease) = change.stored_model(&params.source, policy, Some(&params.target))?;
        let digest = model.manifest.digest();
        let origin = match &params.origin {
            Some(ImportOrigin { file_name, copied_from, program }) => {
                let record = origin_record(file_name, copied_from.as_ref(), program.as_deref());
                let origin = Some(record);
                NameOrigin { origin, source: None }
            }
            None => store.names().name_origin(&model.reference, digest).for_copy(),
        };
        let ingest = change.begin_without_data(lease)?.with_name_origin(origin);
        let is_allowed = |name: &Reference| policy.check_stored(store, &model, Some(name)).is_ok();
        let named = change.commit(ingest, target, &model.manifest, None, is_allowed)?;
        let Named { name, unchanged, effects, .. } = named;
        Ok(Tagged { name, digest, unchanged, effects })
    })
}

/// Gives a model another name in place of its own. It keeps its pin, its origin and its last use. The new name is durable
/// before the old one is removed.
///
/// # Errors
/// Those of [`Names::check_change`](blobd_store::Names::check_change); those of
/// [`Names::check_name`](blobd_store::Names::check_name) if another model has the name and `force` is not set;
/// [`OpError::DeniedByPolicy`].
pub fn rename(
    store: &Arc<Store>,
    requester: Requester,
    policy: &CallerPolicy,
    params: &RenameParams,
) -> Result<Renamed, OpError> {
    NameChange::run(store, Leftover::Nothing, || {
        let target = TargetName::given(&params.target)?;
        let source = store.names().resolve_for_change(&params.source)?;
        // The commit checks this again.
        store.names().check_change(&source, requester.name_user())?;
        let from = source.short();
        let change = NameChange::new(store, requester, Verb::Rename, format!("rename of {from}"));
        let change = change.replacing(params.force);
        let (model, lease) = change.stored_model(&source, policy, Some(&params.target))?;
        let digest = model.manifest.digest();
        if source == params.target {
            let name = params.target.short();
            return Ok(Renamed { from, name, digest, effects: NameEffects::default() });
        }
        let ingest = change.begin_without_data(lease)?.renaming(source);
        let Named { name, effects, .. } =
            change.commit(ingest, target, &model.manifest, None, |_name| true)?;
        Ok(Renamed { from, name, digest, effects })
    })
}

/// Protects a model from eviction and removal, or ends that.
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
