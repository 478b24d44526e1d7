//! `rm`: removes names, and what only they needed.

use std::collections::BTreeSet;
use std::time::Duration;

use blobd_client::protocol::request::RemoveParams;
use blobd_client::protocol::response::Removed;
use blobd_store::gc::{self, Account, Untagged};
use blobd_store::{Store, StoreError};
use blobd_store_format::digest::Digest;
use blobd_store_format::reference::Reference;

use super::lost_models::{kept, lost_model};
use super::{OpError, rfc3339};

/// Removes the names and frees what nothing else needs. What another model, the trash, a session or a
/// mapping program needs is kept and reported with its holder. With `keep_seconds`, moves the models to
/// the trash and frees nothing.
///
/// # Errors
/// [`StoreError::NoSuchModel`] or [`OpError::Pinned`] for any of the names; then none is removed.
pub fn remove(store: &Store, params: &RemoveParams) -> Result<Removed, OpError> {
    store.with_reserve(|| match params.keep_seconds {
        Some(seconds) => move_to_trash(store, &params.references, Duration::from_secs(seconds)),
        None => free(store, &params.references),
    })
}

fn move_to_trash(store: &Store, names: &[Reference], keep: Duration) -> Result<Removed, OpError> {
    // Held until the tags are removed: a collection that saw neither record nor tag would delete the models.
    let lease = store.leases().grant("rm --keep");
    let mut trashed_until = None;
    let trash = |reference: &Reference| -> Result<(), OpError> {
        let manifest = store.leased_model(reference, &lease)?.manifest;
        // Before the tag is removed: a crash in between leaves both, which is harmless.
        trashed_until = Some(rfc3339(store.add_to_trash(reference, &manifest, keep)?));
        Ok(())
    };
    let models = drop_names(store, names, trash)?;
    drop(lease);
    Ok(Removed { trashed_until, ..removed(Account::of(store, &models, &[]), 0) })
}

fn free(store: &Store, names: &[Reference]) -> Result<Removed, OpError> {
    let models = drop_names(store, names, |_| Ok(()))?;
    let candidates: BTreeSet<Digest> =
        models.iter().flat_map(|model| &model.nodes).map(|node| node.digest()).collect();
    // An unreadable manifest may need any blob: then the names are removed and the bytes kept.
    match gc::collect_from(store, candidates.clone()) {
        Ok(deleted) => Ok(removed(Account::of(store, &models, &deleted.deletions), deleted.freed_bytes())),
        Err(refusal) => {
            // Retried later, by the next `gc` at the latest.
            store.condemn(candidates);
            Ok(removed(Account::unknown(store, &models, &refusal), 0))
        }
    }
}

fn removed(account: Account, freed_bytes: u64) -> Removed {
    let models: Vec<_> = account.models.into_iter().map(lost_model).collect();
    Removed {
        removed: models.iter().map(|model| model.name.clone()).collect(),
        freed_bytes,
        kept: account.kept.into_iter().map(kept).collect(),
        trashed_until: None,
        models,
    }
}

/// Removes the names, all or none, after `before` was called with each. Returns the models with what they needed.
/// Tags are locked, so that none changes between check and removal.
fn drop_names(
    store: &Store,
    names: &[Reference],
    mut before: impl FnMut(&Reference) -> Result<(), OpError>,
) -> Result<Vec<Untagged>, OpError> {
    let _tags = store.lock_tags();
    let references: BTreeSet<Reference> =
        names.iter().map(|reference| store.resolve_for_change(reference)).collect::<Result<_, _>>()?;
    let mut models = Vec::new();
    for reference in &references {
        models.extend(untagged(store, reference)?);
    }
    if let Some(pinned) = references.iter().find(|reference| store.is_pinned(reference)) {
        return Err(OpError::Pinned { name: pinned.short() });
    }
    references.iter().try_for_each(&mut before)?;
    for reference in &references {
        store.remove_tag(reference)?;
    }
    Ok(models)
}

/// A tag's model. It needs nothing if its manifest or a recipe is damaged: then only `gc` finds what to free.
fn untagged(store: &Store, reference: &Reference) -> Result<Option<Untagged>, StoreError> {
    match store.raw_manifest(reference) {
        Ok(raw) => Ok(Some(Untagged::of(store, reference.clone(), raw))),
        // Removed by another process meanwhile.
        Err(StoreError::NoSuchModel { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}
