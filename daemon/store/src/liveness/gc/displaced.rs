//! Frees the space of models in the trash whose names other models have taken.

use std::collections::BTreeSet;
use std::time::SystemTime;

use blobd_store_format::digest::Digest;
use blobd_store_format::reference::Reference;

use super::mark::mark;
use super::{Node, Owner, Snapshot, collect_condemned, needs, walk};
use crate::liveness::Liveness;
use crate::{Payer, StoreError, TrashedModel};

impl Liveness {
    /// Whether the trash has models whose names other models have taken.
    pub fn has_displaced(&self) -> Result<bool, StoreError> {
        Ok(self.names.trash()?.iter().any(|trashed| trashed.displaced))
    }
}

/// Removes models whose names other models have taken from the trash, until `is_enough` returns true or none is left;
/// at least one, if there is any. The oldest goes first, but those whose blobs all have another owner go last: only
/// their records take space. With `only_of`, only those that are charged to this user or group. Returns those that were
/// removed, and the bytes freed.
///
/// # Errors
/// As for [`super::collect`]; then no model was removed from the trash, or the bytes of those that were are freed by
/// the next collection.
pub fn drop_displaced(
    store: &Liveness,
    only_of: Option<&Payer>,
    is_enough: &dyn Fn() -> Result<bool, StoreError>,
) -> Result<(Vec<TrashedModel>, u64), StoreError> {
    let (mut dropped, mut freed) = (Vec::new(), 0u64);
    let mut displaced = displaced(store, only_of)?;
    let only_theirs = needed_only_by(store, &displaced)?;
    displaced.sort_by_cached_key(|trashed| known_needs(store, trashed).is_disjoint(&only_theirs));
    for trashed in displaced {
        if dropped.is_empty() {
            check_collectable(store)?;
        } else if is_enough()? {
            break;
        }
        freed = freed.saturating_add(drop_one(store, &trashed)?);
        dropped.push(trashed);
    }
    Ok((dropped, freed))
}

/// The bytes on disk of displaced models in the trash and of what only they need; with `only_of`, of this payer's.
pub fn displaced_bytes(store: &Liveness, only_of: Option<&Payer>) -> Result<u64, StoreError> {
    let displaced = displaced(store, only_of)?;
    let only_theirs = needed_only_by(store, &displaced)?;
    let records = displaced.iter().map(|trashed| store.names.trashed_bytes(trashed.record));
    let blobs =
        only_theirs.into_iter().map(|node| Ok(store.content.bytes_on_disk(node)?.unwrap_or_default()));
    records.chain(blobs).try_fold(0, |sum: u64, size| Ok(sum.saturating_add(size?)))
}

/// What only these models in the trash need.
fn needed_only_by(store: &Liveness, displaced: &[TrashedModel]) -> Result<BTreeSet<Node>, StoreError> {
    if displaced.is_empty() {
        return Ok(BTreeSet::new());
    }
    let is_displaced = |name: &Reference, manifest| {
        displaced.iter().any(|trashed| trashed.reference == *name && trashed.manifest.digest() == manifest)
    };
    let mut only_theirs: BTreeSet<_> =
        displaced.iter().flat_map(|trashed| known_needs(store, trashed)).collect();
    walk(store, SystemTime::now(), &mut |owned| {
        if let (Owner::Trash(name), Some(manifest)) = (&owned.owner, owned.manifest)
            && is_displaced(name, manifest)
        {
            return Ok(());
        }
        let kept = owned.nodes(store)?;
        only_theirs.retain(|node| !kept.contains(node));
        Ok(())
    })?;
    Ok(only_theirs)
}

/// What the model needs. Without its recipes, only a collection of the whole store finds that: then nothing.
fn known_needs(store: &Liveness, trashed: &TrashedModel) -> BTreeSet<Node> {
    needs(store, &trashed.manifest).unwrap_or_default().into_iter().collect()
}

/// The models in the trash whose names other models have taken, the oldest first.
fn displaced(store: &Liveness, only_of: Option<&Payer>) -> Result<Vec<TrashedModel>, StoreError> {
    let is_of = |trashed: &TrashedModel| {
        only_of.is_none_or(|payer| trashed.account.is_some_and(|account| payer.includes(account.uid)))
    };
    let mut displaced: Vec<_> =
        store.names.trash()?.into_iter().filter(|trashed| trashed.displaced && is_of(trashed)).collect();
    displaced.sort_by_key(|trashed| trashed.removed);
    Ok(displaced)
}

/// If the collection is refused, removing records frees nothing.
pub(super) fn check_collectable(store: &Liveness) -> Result<(), StoreError> {
    let _guard = store.lock_collections();
    mark(store, Vec::new(), &Snapshot::take(store, SystemTime::UNIX_EPOCH)?).map(drop)
}

fn drop_one(store: &Liveness, trashed: &TrashedModel) -> Result<u64, StoreError> {
    let nodes = known_needs(store, trashed);
    let needed: BTreeSet<Digest> = nodes.iter().map(|node| node.digest()).collect();
    if let Some(account) = trashed.account {
        // What is open stays until it is closed, and its user pays for it.
        store.charge_displaced(account.uid, nodes);
    }
    let record_bytes = store.names.remove_from_trash(trashed.record)?.unwrap_or_default();
    store.condemn(needed);
    let name = trashed.reference.short();
    tracing::info!(
        "{name}: the version {} is no longer in the trash: space was needed",
        trashed.manifest.digest()
    );
    Ok(collect_condemned(store)?.freed_bytes().saturating_add(record_bytes))
}
