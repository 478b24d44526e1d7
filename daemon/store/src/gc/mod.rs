//! Garbage collection: what no tag needs and no lease pins goes.
//!
//! The order that makes it safe: take the list of pins, then read the manifests, then plan, then
//! delete one digest at a time under the lock that pinning takes, leaving whatever was pinned
//! since the start ([`crate::leases`]). The manifests are read from disk each time. If
//! one manifest or recipe cannot be read, nothing is deleted at all.

use std::collections::BTreeSet;
use std::time::SystemTime;

use blobd_store_format::digest::Digest;

use crate::{Store, StoreError};

mod evict;
mod execute;
mod held;
mod holders;
mod mark;
mod plan;
mod read_ahead;
mod walk;

pub use evict::{EvictionPlan, Victim, evict, plan_eviction};
pub use holders::holders;
pub use mark::needs;
pub use plan::UNKNOWN_HOLDER;
pub use plan::{GcPlan, KeptBytes, Litter, Node};
pub use walk::{Owned, Owner, Visit, check_models, walk, walk_beside_tags};

use execute::{execute, forget_origins};
use held::is_held_by_a_program;
use mark::mark;

/// Plans a collection of the whole store.
///
/// # Errors
/// One manifest or recipe that cannot be read or is missing, or a file under `manifests/` or in the
/// trash that is none.
pub fn plan(store: &Store) -> Result<GcPlan, StoreError> {
    // What another collection deletes meanwhile would look like damage.
    let _alone = store.lock_collections();
    plan_alone(store)
}

/// The same unless a collection runs or is planned now.
///
/// # Errors
/// As for [`plan`].
pub fn plan_unless_collecting(store: &Store) -> Result<Option<GcPlan>, StoreError> {
    let Some(_alone) = store.try_lock_collections() else { return Ok(None) };
    plan_alone(store).map(Some)
}

fn plan_alone(store: &Store) -> Result<GcPlan, StoreError> {
    let now = SystemTime::now();
    let pinned = store.leases().pinned();
    let mut candidates: Vec<Node> = store.recipes()?.into_iter().map(Node::Recipe).collect();
    store.each_blob(|digest| candidates.push(Node::Blob(digest)))?;
    let marks = mark(store, candidates, now)?;
    let plan = GcPlan::new(store, marks.unreached(), &pinned)?;
    plan.with_litter(store, now)
}

/// Collects the whole store; returns what was deleted.
///
/// # Errors
/// As for [`plan`]; then nothing has been deleted. [`StoreError::Io`] when a file cannot be
/// removed; what was removed before stays removed.
pub fn collect(store: &Store) -> Result<GcPlan, StoreError> {
    let _alone = store.lock_collections();
    let collection = store.leases().begin_collection();
    let plan = plan_alone(store)?;
    let _barred = store.block_internal_reads(plan.blobs());
    let deleted = execute(store, &plan, &collection)?;
    forget_origins(store, &collection)?;
    Ok(deleted)
}

/// Collects what is condemned and nothing needs or holds any more. Cheap when that is nothing.
///
/// # Errors
/// As for [`collect_from`]; then it stays condemned.
pub fn collect_condemned(store: &Store) -> Result<GcPlan, StoreError> {
    let condemned = store.take_condemned();
    collect_unless_held(store, condemned.clone()).inspect_err(|_| store.condemn(condemned))
}

/// Collects what of `candidates` nothing needs. What a lease, or a program that has it open or
/// mapped, still holds is condemned. Cheap when that is all.
///
/// # Errors
/// As for [`collect`]; the candidates are left to the next `gc` then.
pub fn collect_from(store: &Store, candidates: BTreeSet<Digest>) -> Result<GcPlan, StoreError> {
    collect_unless_held(store, candidates)
}

fn collect_unless_held(store: &Store, candidates: BTreeSet<Digest>) -> Result<GcPlan, StoreError> {
    let pinned = store.leases().pinned();
    let (leased, free): (BTreeSet<_>, BTreeSet<_>) =
        candidates.into_iter().partition(|digest| pinned.contains(digest));
    // Asking the kernel costs microseconds; reading all manifests does not.
    let (held, free): (BTreeSet<_>, BTreeSet<_>) =
        free.into_iter().partition(|digest| is_held_by_a_program(store, *digest));
    store.condemn(leased.into_iter().chain(held.iter().copied()));
    let held = measured(store, held)?;
    if free.is_empty() {
        return Ok(GcPlan { held, ..GcPlan::default() });
    }
    // Until they are deleted, or known to be needed: a reader that goes on to the next blob meanwhile
    // must not open that one.
    let _barred = store.block_internal_reads(free.clone());
    let nodes = free.into_iter().flat_map(|digest| [Node::Recipe(digest), Node::Blob(digest)]).collect();
    let _alone = store.lock_collections();
    let collection = store.leases().begin_collection();
    let pinned = store.leases().pinned();
    // Of the trash everything stays: what has expired there goes with its record.
    let marks = mark(store, nodes, SystemTime::UNIX_EPOCH)?;
    let plan = GcPlan::new(store, marks.unreached(), &pinned)?;
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

/// Blobs with what they take on disk.
fn measured(store: &Store, blobs: BTreeSet<Digest>) -> Result<Vec<(Node, u64)>, StoreError> {
    let measure = |node: Node| Ok((node, node.bytes_on_disk(store)?.unwrap_or_default()));
    blobs.into_iter().map(Node::Blob).map(measure).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_condemned_stays_so_while_collections_refuse() {
        let (_folder, store, blob) = crate::testing::store_with(b"of a model that was evicted");
        let foreign = store.path("manifests/notes.txt");
        std::fs::write(&foreign, "of the administrator").unwrap();
        store.condemn([blob]);
        assert!(matches!(collect_condemned(&store), Err(StoreError::ForeignFile { .. })));
        std::fs::remove_file(foreign).unwrap();
        assert_eq!(collect_condemned(&store).unwrap().deletions.len(), 1);
        assert!(!store.has_condemned());
    }
}
