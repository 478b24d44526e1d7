//! `undelete`: a model comes back from the trash; `trash` lists what can.

use std::sync::Arc;

use blobd_client::protocol::request::UndeleteParams;
use blobd_client::protocol::upkeep::{TrashList, TrashedModel, Undeleted};
use blobd_store::leases::Lease;
use blobd_store::{Ingest, Store};
use blobd_store_format::manifest::Manifest;
use blobd_store_format::reference::Reference;

use super::{OpError, rfc3339};

/// Gives a model in the trash its name back; of several of that name the one that was removed last.
///
/// # Errors
/// [`OpError::NotInTrash`]; [`OpError::NameTaken`] when another model has the name by now;
/// [`blobd_store::StoreError`] when it is not whole any more.
pub fn undelete(store: &Arc<Store>, params: &UndeleteParams) -> Result<Undeleted, OpError> {
    // It takes a block for the manifest and gives back the record's.
    store.with_reserve(|| take_out(store, params))
}

fn take_out(store: &Arc<Store>, params: &UndeleteParams) -> Result<Undeleted, OpError> {
    let lease = store.leases().grant(format!("undelete {}", params.reference.short()));
    let trashed = find(store, &params.reference)?;
    let (reference, manifest) = (&trashed.reference, &trashed.manifest);
    pin_all(store, &lease, manifest)?;
    let is_free = |present: Option<&Reference>| match present {
        Some(present) if store.manifest(present)?.digest() != manifest.digest() => {
            Err(OpError::NameTaken { name: present.short() })
        }
        _ => Ok(()),
    };
    let done = Undeleted { name: reference.short(), digest: manifest.digest() };
    Ingest::begin(store, lease)?.commit_if(reference, manifest, is_free)?;
    // Only once the tag is durable.
    store.remove_from_trash(trashed.record)?;
    Ok(done)
}

/// A collection that reads the tags before the new one is there and the trash after the record is
/// gone sees neither, and of an expired model it has not even to be so unlucky. The commit looks
/// whether everything is still there.
fn pin_all(store: &Store, lease: &Lease, manifest: &Manifest) -> Result<(), OpError> {
    lease.pin_all(manifest.digests());
    for file in manifest.files() {
        lease.pin_all(store.stored_file(file)?.blob_sizes().into_iter().map(|(digest, _)| digest));
    }
    Ok(())
}

/// Lists the trash.
///
/// # Errors
/// [`blobd_store::StoreError`].
pub fn trash(store: &Store) -> Result<TrashList, OpError> {
    let listed = |trashed: blobd_store::TrashedModel| TrashedModel {
        name: trashed.reference.short(),
        digest: trashed.manifest.digest(),
        size: trashed.manifest.size(),
        removed: rfc3339(trashed.removed),
        expires: rfc3339(trashed.expires),
    };
    Ok(TrashList { models: store.trash()?.into_iter().map(listed).collect() })
}

fn find(store: &Store, reference: &Reference) -> Result<blobd_store::TrashedModel, OpError> {
    let pinned = reference.digest();
    let of_that_name = store.trash()?.into_iter().filter(|trashed| {
        trashed.reference.same_model(reference)
            && pinned.is_none_or(|digest| digest == trashed.manifest.digest())
    });
    let found = of_that_name.max_by_key(|trashed| trashed.removed);
    found.ok_or_else(|| OpError::NotInTrash { name: reference.short() })
}
