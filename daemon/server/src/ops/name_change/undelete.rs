//! `undelete` restores a model from the trash; `trash` lists the trash.

use std::sync::Arc;

use blobd_client::protocol::naming::{self, TrashList, Undeleted};
use blobd_client::protocol::request::UndeleteParams;

use blobd_store::leases::Lease;
use blobd_store::{Model, Store, TrashedModel, Verb};
use blobd_store_format::reference::Reference;

use super::{Leftover, NameChange, Named, TargetName};
use crate::ops::{CallerPolicy, OpError, rfc3339};
use crate::requester::Requester;

/// Restores a model under its old name, or under another one. If several have that name, restores the one that was
/// removed last. Only administrators restore models whose names others have added.
///
/// # Errors
/// [`OpError::NotInTrash`]; [`blobd_store::StoreError::NameOfAnother`]; those of
/// [`Names::check_name`](blobd_store::Names::check_name) if another model has the name and `force` is not set;
/// [`blobd_store::StoreError`] if the model is incomplete.
pub fn undelete(
    store: &Arc<Store>,
    requester: Requester,
    policy: &CallerPolicy,
    params: &UndeleteParams,
) -> Result<Undeleted, OpError> {
    NameChange::run(store, Leftover::Nothing, || {
        let cause = format!("undelete {}", params.reference.short());
        let change = NameChange::new(store, requester, Verb::Undelete, cause).replacing(params.force);
        let lease = change.lease();
        let trashed = find(store, requester, &params.reference)?;
        let reference = params.name.as_ref().unwrap_or(&trashed.reference).clone();
        TargetName::given(&reference)?;
        policy.check_stored(store, &leased_model(store, &trashed, &lease)?, params.name.as_ref())?;
        let origin = match reference.same_model(&trashed.reference) {
            true => trashed.origin.clone(),
            false => trashed.origin.clone().for_copy(),
        };
        let digest = trashed.manifest.digest();
        let ingest = change.begin_without_data(lease)?.charged_to(trashed.account).with_name_origin(origin);
        let Named { name, effects, .. } =
            change.restore_if(ingest, &reference, &trashed, |_present| Ok(()))?;
        Ok(Undeleted { name, digest, effects })
    })
}

/// Leases everything that the model needs. A collection could otherwise read the tags before the new tag exists
/// and the trash after the record is removed, and delete the model; an expired record protects nothing at all.
/// The commit checks that everything still exists.
pub(super) fn leased_model(store: &Store, trashed: &TrashedModel, lease: &Lease) -> Result<Model, OpError> {
    let (reference, manifest) = (trashed.reference.clone(), trashed.manifest.clone());
    lease.protect_all(manifest.digests());
    let mut files = Vec::new();
    for file in manifest.files() {
        let file = store.content().stored_file(file)?;
        lease.protect_all(file.blob_sizes().into_iter().map(|(digest, _)| digest));
        files.push(file);
    }
    Ok(Model { reference, manifest, files })
}

/// Lists the trash.
pub fn trash(store: &Store) -> Result<TrashList, OpError> {
    let listed = |trashed: TrashedModel| naming::TrashedModel {
        name: trashed.reference.short(),
        digest: trashed.manifest.digest(),
        size: trashed.manifest.size(),
        removed: rfc3339(trashed.removed),
        expires: rfc3339(trashed.expires),
        replaced: trashed.displaced,
        added_by: trashed.account.map(|account| account.adder()),
    };
    Ok(TrashList { models: store.names().trash()?.into_iter().map(listed).collect() })
}

fn find(store: &Store, requester: Requester, reference: &Reference) -> Result<TrashedModel, OpError> {
    let pinned = reference.digest();
    let of_that_name = store.names().trash()?.into_iter().filter(|trashed| {
        trashed.reference.same_model(reference)
            && pinned.is_none_or(|digest| digest == trashed.manifest.digest())
    });
    let (own, others): (Vec<_>, Vec<_>) =
        of_that_name.partition(|trashed| trashed.check_own(requester.name_user()).is_ok());
    match own.into_iter().max_by_key(|trashed| trashed.removed) {
        Some(found) => Ok(found),
        None => {
            others.first().map_or(Ok(()), |trashed| trashed.check_own(requester.name_user()))?;
            Err(OpError::NotInTrash { name: reference.short() })
        }
    }
}
