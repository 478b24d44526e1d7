//! `undelete`: a model comes back from the trash; `trash` lists what can.

use std::sync::Arc;

use blobd_client::protocol::request::UndeleteParams;
use blobd_client::protocol::upkeep::{TrashList, TrashedModel, Undeleted};
use blobd_store_format::reference::Reference;

use super::{OpError, rfc3339};
use crate::store::{self, Ingest, Store};

/// Gives a model in the trash its name back; of several of that name the one that was removed last.
///
/// # Errors
/// [`OpError::NotInTrash`]; [`OpError::NameTaken`] when another model has the name by now;
/// [`crate::store::StoreError`] when it is not whole any more.
pub fn undelete(store: &Arc<Store>, params: &UndeleteParams) -> Result<Undeleted, OpError> {
    let lease = store.leases().grant(format!("undelete {}", params.reference.short()));
    let trashed = find(store, &params.reference)?;
    let (reference, manifest) = (&trashed.reference, &trashed.manifest);
    if let Ok(present) = store.resolve(reference)
        && store.manifest(&present)?.digest() != manifest.digest()
    {
        return Err(OpError::NameTaken { name: present.short() });
    }
    let done = Undeleted { name: reference.short(), digest: manifest.digest() };
    // The commit pins and checks everything; the record goes only once the tag is durable.
    Ingest::begin(store, lease)?.commit(reference, manifest, None)?;
    store.remove_from_trash(trashed.record)?;
    Ok(done)
}

/// Lists the trash.
///
/// # Errors
/// [`crate::store::StoreError`].
pub fn trash(store: &Store) -> Result<TrashList, OpError> {
    let listed = |trashed: store::TrashedModel| TrashedModel {
        name: trashed.reference.short(),
        digest: trashed.manifest.digest(),
        size: trashed.manifest.size(),
        removed: rfc3339(trashed.removed),
        expires: rfc3339(trashed.expires),
    };
    Ok(TrashList { models: store.trash()?.into_iter().map(listed).collect() })
}

fn find(store: &Store, reference: &Reference) -> Result<store::TrashedModel, OpError> {
    let pinned = reference.digest();
    let found = store.trash()?.into_iter().rfind(|trashed| {
        trashed.reference.same_model(reference)
            && pinned.is_none_or(|digest| digest == trashed.manifest.digest())
    });
    found.ok_or_else(|| OpError::NotInTrash { name: reference.short() })
}
