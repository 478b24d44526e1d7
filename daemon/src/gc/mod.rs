//! Garbage collection: what no tag needs and no lease pins goes.
//!
//! The order that makes it safe: take the list of pins, then read the manifests, then plan, then
//! delete one digest at a time under the lock that pinning takes, leaving whatever was pinned
//! since the start ([`crate::store::leases`]). The manifests are read from disk each time. If
//! one manifest or recipe cannot be read, nothing is deleted at all.

use std::collections::BTreeSet;

use blobd_store_format::digest::Digest;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::reach::reachable;
use blobd_store_format::reference::Reference;

use crate::store::{Store, StoreError, disk, leases::Collection};

mod plan;

pub use plan::{GcPlan, Node};

/// Everything that some tag needs.
///
/// # Errors
/// The first manifest or recipe that cannot be read or is missing, or a file under `manifests/`
/// that is none.
pub fn mark(store: &Store) -> Result<BTreeSet<Node>, StoreError> {
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
    let pinned = store.leases().pinned();
    let reachable = mark(store)?;
    let blobs = store.blobs()?.into_iter().map(Node::Blob);
    let recipes = store.recipes()?.into_iter().map(Node::Recipe);
    GcPlan::new(store, blobs.chain(recipes), &reachable, &pinned)
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

/// Collects only what of `candidates` nothing needs; returns what was deleted.
///
/// # Errors
/// As for [`collect`].
pub fn collect_from(store: &Store, candidates: &BTreeSet<Node>) -> Result<GcPlan, StoreError> {
    let _alone = store.lock_collections();
    let collection = store.leases().begin_collection();
    let pinned = store.leases().pinned();
    let reachable = mark(store)?;
    let plan = GcPlan::new(store, candidates.iter().copied(), &reachable, &pinned)?;
    let deleted = execute(store, &plan, &collection)?;
    forget_origins(store, &collection)?;
    Ok(deleted)
}

/// What the mark phase has read must be what is on disk: a tag that was removed or replaced a
/// moment ago must not come back after a power cut, when what it needs has been deleted.
fn settle(store: &Store) -> Result<(), StoreError> {
    disk::sync_file_system(store.root())
}

fn execute(store: &Store, plan: &GcPlan, collection: &Collection) -> Result<GcPlan, StoreError> {
    let mut deleted = GcPlan::default();
    if plan.deletions.is_empty() {
        return Ok(deleted);
    }
    settle(store)?;
    for (node, _) in &plan.deletions {
        let removed = collection.delete_unpinned(node.digest(), || node.remove(store));
        if let Some(bytes) = removed.transpose()?.flatten() {
            deleted.deletions.push((*node, bytes));
        }
    }
    Ok(deleted)
}

/// Drops the records of where manifests came from that no tag points to any more.
fn forget_origins(store: &Store, collection: &Collection) -> Result<(), StoreError> {
    let manifests: BTreeSet<Digest> = store
        .tags()?
        .references
        .iter()
        .filter_map(|reference| Some(store.manifest(reference).ok()?.digest()))
        .collect();
    for origin in store.origins()?.into_iter().filter(|origin| !manifests.contains(origin)) {
        let path = store.path(blobd_store_format::layout::origin(origin));
        if let Some(removed) = collection.delete_unpinned(origin, || disk::remove_file(&path)) {
            removed?;
        }
    }
    Ok(())
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
