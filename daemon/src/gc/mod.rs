//! Garbage collection: what no tag needs and no lease pins goes.
//!
//! The order that makes it safe: take the list of pins, then read the manifests, then plan, then
//! delete one digest at a time under the lock that pinning takes, leaving whatever was pinned
//! since the start ([`crate::store::leases`]). The manifests are read from disk each time. If
//! one manifest or recipe cannot be read, nothing is deleted at all.

use std::collections::BTreeSet;
use std::time::SystemTime;

use blobd_store_format::digest::Digest;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::reach::reachable;
use blobd_store_format::reference::Reference;

use crate::store::{Store, StoreError};

mod evict;
mod execute;
mod holders;
mod plan;

pub use evict::{EvictionPlan, Victim, evict, plan_eviction};
pub use holders::holders;
pub(crate) use plan::UNKNOWN_HOLDER;
pub use plan::{GcPlan, Litter, Node};

use execute::{execute, forget_origins, is_held};

/// Everything that some tag needs, or some model whose time in the trash is not over at `now`.
///
/// # Errors
/// The first manifest or recipe that cannot be read or is missing, or a file under `manifests/`
/// that is none; the same in the trash.
fn mark(store: &Store, now: SystemTime) -> Result<BTreeSet<Node>, StoreError> {
    let tags = store.tags()?;
    if let Some(path) = tags.foreign.into_iter().next() {
        return Err(StoreError::ForeignFile { path });
    }
    let mut roots = Vec::new();
    for reference in &tags.references {
        match store.manifest(reference) {
            Ok(manifest) => {
                check_complete(store, reference, &manifest)?;
                roots.extend(roots_of(&manifest));
            }
            // Removed since it was listed, by its owner.
            Err(StoreError::NoSuchModel { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    for trashed in store.trash()?.iter().filter(|trashed| !trashed.is_expired(now)) {
        roots.extend(roots_of(&trashed.manifest));
    }
    reachable(roots, |node| references(store, node))
}

/// Everything that a manifest needs.
///
/// # Errors
/// A recipe that cannot be read.
pub fn needs(store: &Store, manifest: &Manifest) -> Result<BTreeSet<Node>, StoreError> {
    reachable(roots_of(manifest), |node| references(store, node))
}

/// Plans a collection of the whole store.
///
/// # Errors
/// As for [`mark`].
pub fn plan(store: &Store) -> Result<GcPlan, StoreError> {
    // What another collection deletes meanwhile would look like damage.
    let _alone = store.lock_collections();
    plan_alone(store)
}

fn plan_alone(store: &Store) -> Result<GcPlan, StoreError> {
    let now = SystemTime::now();
    let pinned = store.leases().pinned();
    let reachable = mark(store, now)?;
    let blobs = store.blobs()?.into_iter().map(Node::Blob);
    let recipes = store.recipes()?.into_iter().map(Node::Recipe);
    let plan = GcPlan::new(store, blobs.chain(recipes), &reachable, &pinned)?;
    plan.with_litter(store, now)
}

/// Collects the whole store; returns what was deleted.
///
/// # Errors
/// As for [`mark`]; then nothing has been deleted. [`StoreError::Io`] when a file cannot be
/// removed; what was removed before stays removed.
pub fn collect(store: &Store) -> Result<GcPlan, StoreError> {
    let _alone = store.lock_collections();
    let collection = store.leases().begin_collection();
    let plan = plan_alone(store)?;
    let deleted = execute(store, &plan, &collection)?;
    forget_origins(store, &collection)?;
    Ok(deleted)
}

/// Collects what is condemned and nothing needs or holds any more. Cheap when that is nothing.
///
/// # Errors
/// As for [`collect`]; what was condemned is left to the next `gc` then.
pub fn collect_condemned(store: &Store) -> Result<GcPlan, StoreError> {
    let (held, condemned) = still_held(store, store.take_condemned())?;
    if condemned.is_empty() {
        return Ok(GcPlan { held, ..GcPlan::default() });
    }
    let nodes = condemned.into_iter().flat_map(|digest| [Node::Recipe(digest), Node::Blob(digest)]);
    let _alone = store.lock_collections();
    let collection = store.leases().begin_collection();
    let pinned = store.leases().pinned();
    // Of the trash everything stays: what has expired there goes with its record.
    let reachable = mark(store, SystemTime::UNIX_EPOCH)?;
    let plan = GcPlan::new(store, nodes, &reachable, &pinned)?;
    let mut deleted = execute(store, &plan, &collection)?;
    forget_origins(store, &collection)?;
    deleted.held.extend(held);
    Ok(deleted)
}

/// Collects the models in the trash whose time is over, and what only they needed.
///
/// # Errors
/// As for [`collect`].
pub fn empty_trash(store: &Store) -> Result<GcPlan, StoreError> {
    let now = SystemTime::now();
    let expired: Vec<_> = store.trash()?.into_iter().filter(|trashed| trashed.is_expired(now)).collect();
    for trashed in &expired {
        let needed = needs(store, &trashed.manifest)?;
        store.remove_from_trash(trashed.record)?;
        store.condemn(needed.into_iter().map(Node::digest));
    }
    if expired.is_empty() { Ok(GcPlan::default()) } else { collect_condemned(store) }
}

/// Parts what some process has open or mapped, which stays condemned, from what is free. Asking
/// the kernel costs microseconds; reading all manifests does not.
fn still_held(
    store: &Store,
    condemned: BTreeSet<Digest>,
) -> Result<(Vec<(Node, u64)>, BTreeSet<Digest>), StoreError> {
    let (held, free): (BTreeSet<_>, BTreeSet<_>) =
        condemned.into_iter().partition(|digest| is_held(store, *digest));
    store.condemn(held.iter().copied());
    let measured = held.into_iter().map(Node::Blob).map(|node| {
        let bytes = node.bytes_on_disk(store)?;
        Ok((node, bytes.unwrap_or_default()))
    });
    Ok((measured.collect::<Result<_, StoreError>>()?, free))
}

/// A file that has neither blob nor recipe may have had a recipe, and nobody knows which blobs
/// that would have named. One that was put aside was a blob.
fn check_complete(store: &Store, reference: &Reference, manifest: &Manifest) -> Result<(), StoreError> {
    for digest in manifest.digests() {
        let is_there = store.blob_size(digest)?.is_some() || store.recipe(digest)?.is_some();
        if !is_there && !store.is_quarantined(digest) {
            return Err(StoreError::Incomplete { name: reference.short(), digest });
        }
    }
    Ok(())
}

fn roots_of(manifest: &Manifest) -> Vec<Node> {
    let digests = manifest.digests();
    digests.into_iter().flat_map(|digest| [Node::Blob(digest), Node::Recipe(digest)]).collect()
}

fn references(store: &Store, node: Node) -> Result<Vec<Node>, StoreError> {
    let Node::Recipe(file) = node else { return Ok(Vec::new()) };
    let blobs = store.recipe(file)?.map(|recipe| recipe.digests()).unwrap_or_default();
    Ok(blobs.into_iter().map(Node::Blob).collect())
}
