//! `rm`: removes names, and what only they needed.

use std::collections::BTreeSet;
use std::time::Duration;

use blobd_client::protocol::request::RemoveParams;
use blobd_client::protocol::response::Removed;
use blobd_client::protocol::upkeep::Spared;
use blobd_store::gc::{self, Account, Untagged};
use blobd_store::{Store, StoreError};
use blobd_store_format::digest::Digest;
use blobd_store_format::reference::Reference;

use super::lost_models::{kept, lost_model};
use super::select::{Selection, select};
use super::{LastOpened, OpError, rfc3339};

/// Removes models and frees what nothing else needs. What another model, the trash, a session or a
/// mapping program needs is kept and reported with its holder. With `keep_seconds`, moves the models to
/// the trash and frees nothing. A dry run reports the same and removes nothing.
///
/// # Errors
/// [`StoreError::NoSuchModel`] or [`OpError::Pinned`] for any of the names; then none is removed.
/// [`OpError::NothingToRemove`] if the request selects no models at all.
pub fn remove(store: &Store, last_opened: &LastOpened, params: &RemoveParams) -> Result<Removed, OpError> {
    let is_selected = params.older_than_seconds.is_some() || params.unused;
    if params.references.is_empty() && params.patterns.is_empty() && !is_selected {
        return Err(OpError::NothingToRemove);
    }
    if params.dry_run {
        return plan(store, last_opened, params);
    }
    store.with_reserve(|| match params.keep_seconds {
        Some(seconds) => move_to_trash(store, last_opened, params, Duration::from_secs(seconds)),
        None => free(store, last_opened, params),
    })
}

fn plan(store: &Store, last_opened: &LastOpened, params: &RemoveParams) -> Result<Removed, OpError> {
    let (models, spared) = {
        let _tags = store.lock_tags();
        checked(store, last_opened, params)?
    };
    let mut account = Account::of(store, &models, &[]);
    account.kept.retain(|kept| !kept.by.is_empty());
    let mut freed_bytes = 0u64;
    for model in &mut account.models {
        // What nothing else needs would be freed at once, or when the trash is emptied.
        let bytes = std::mem::take(&mut model.reclaimable_bytes);
        model.freed_bytes = if params.keep_seconds.is_none() { bytes } else { 0 };
        freed_bytes = freed_bytes.saturating_add(model.freed_bytes);
    }
    Ok(Removed { spared, dry_run: true, ..removed(account, freed_bytes) })
}

fn move_to_trash(
    store: &Store,
    last_opened: &LastOpened,
    params: &RemoveParams,
    keep: Duration,
) -> Result<Removed, OpError> {
    // Held until the tags are removed: a collection that saw neither record nor tag would delete the models.
    let lease = store.leases().grant("rm --keep");
    let mut trashed_until = None;
    let trash = |reference: &Reference| -> Result<(), OpError> {
        let manifest = store.leased_model(reference, &lease)?.manifest;
        // Before the tag is removed: a crash in between leaves both, which is harmless.
        trashed_until = Some(rfc3339(store.add_to_trash(reference, &manifest, keep)?));
        Ok(())
    };
    let (models, spared) = drop_names(store, last_opened, params, trash)?;
    drop(lease);
    Ok(Removed { trashed_until, spared, ..removed(Account::of(store, &models, &[]), 0) })
}

fn free(store: &Store, last_opened: &LastOpened, params: &RemoveParams) -> Result<Removed, OpError> {
    let (models, spared) = drop_names(store, last_opened, params, |_| Ok(()))?;
    let candidates: BTreeSet<Digest> =
        models.iter().flat_map(|model| &model.nodes).map(|node| node.digest()).collect();
    // An unreadable manifest may need any blob: then the names are removed and the bytes kept.
    let removed = match gc::collect_from(store, candidates.clone()) {
        Ok(deleted) => removed(Account::of(store, &models, &deleted.deletions), deleted.freed_bytes()),
        Err(refusal) => {
            // Retried later, by the next `gc` at the latest.
            store.condemn(candidates);
            removed(Account::unknown(store, &models, &refusal), 0)
        }
    };
    Ok(Removed { spared, ..removed })
}

fn removed(account: Account, freed_bytes: u64) -> Removed {
    let models: Vec<_> = account.models.into_iter().map(lost_model).collect();
    Removed {
        removed: models.iter().map(|model| model.name.clone()).collect(),
        freed_bytes,
        kept: account.kept.into_iter().map(kept).collect(),
        trashed_until: None,
        models,
        spared: Vec::new(),
        dry_run: false,
    }
}

/// Removes the names, all or none, after `before` was called with each. Returns the models with what they needed,
/// and those that match but stay. Tags are locked, so that none changes between check and removal.
fn drop_names(
    store: &Store,
    last_opened: &LastOpened,
    params: &RemoveParams,
    mut before: impl FnMut(&Reference) -> Result<(), OpError>,
) -> Result<(Vec<Untagged>, Vec<Spared>), OpError> {
    let _tags = store.lock_tags();
    let (models, spared) = checked(store, last_opened, params)?;
    models.iter().try_for_each(|model| before(&model.reference))?;
    for model in &models {
        store.remove_tag(&model.reference)?;
    }
    Ok((models, spared))
}

/// The models to remove with what they need, none of which is pinned, and those that match but stay.
fn checked(
    store: &Store,
    last_opened: &LastOpened,
    params: &RemoveParams,
) -> Result<(Vec<Untagged>, Vec<Spared>), OpError> {
    let Selection { references, spared } = select(store, last_opened, params)?;
    let mut models = Vec::new();
    for reference in &references {
        models.extend(untagged(store, reference)?);
    }
    match references.iter().find(|reference| store.is_pinned(reference)) {
        Some(pinned) => Err(OpError::Pinned { name: pinned.short() }),
        None => Ok((models, spared)),
    }
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
