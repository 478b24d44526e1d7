//! Garbage collection: deletes what no tag needs and no lease protects.
//!
//! The order of steps makes it safe: list the leased digests, read the manifests, make the plan, then delete one digest
//! at a time under the lock that leasing takes, and skip those that were leased since the start ([`crate::leases`]).
//! The manifests are read from disk each time. If one manifest or recipe cannot be read, nothing is deleted.

use std::collections::BTreeSet;
use std::time::SystemTime;

use blobd_store_format::digest::Digest;

use crate::StoreError;
use crate::liveness::Liveness;
pub use crate::node::Node;

mod displaced;
mod evict;
mod execute;
mod held;
mod lost;
mod mark;
mod plan;
mod walk;

pub use displaced::{displaced_bytes, drop_displaced};
pub use evict::{EvictionPlan, Victim, evict, evictable_bytes, plan_eviction};
pub use lost::{LossReport, LostModel, Untagged};
pub use mark::needs;
pub use plan::{GcPlan, KeptBytes, OtherDeletion, UNKNOWN_HOLDER, Unlisted};
pub use walk::{Owned, Owner, Snapshot, Visit, check_models, walk, walk_beside_tags};

use execute::{execute, remove_unreferenced_origins};
pub use held::holders;
use held::is_held_by_a_program;
use mark::mark;
use plan::Extent;

/// Plans a collection of the whole store.
///
/// # Errors
/// A manifest or recipe is missing or unreadable, or there is a foreign file under `manifests/` or in the trash.
pub fn plan(store: &Liveness) -> Result<GcPlan, StoreError> {
    // A collection at the same time would make files disappear, which would look like damage.
    let _guard = store.lock_collections();
    Ok(plan_locked(store, Extent::SHOWN)?.0)
}

/// Like [`plan`]; returns `None` if a collection is running or being planned.
pub fn plan_unless_collecting(store: &Liveness) -> Result<Option<GcPlan>, StoreError> {
    let Some(_guard) = store.try_lock_collections() else { return Ok(None) };
    Ok(Some(plan_locked(store, Extent::SHOWN)?.0))
}

fn plan_locked(store: &Liveness, extent: Extent) -> Result<(GcPlan, Snapshot), StoreError> {
    let now = SystemTime::now();
    let leased = store.leases().leased();
    let mut candidates: Vec<Node> = store.content.recipes()?.into_iter().map(Node::Recipe).collect();
    store.content.each_blob(|digest| candidates.push(Node::Blob(digest)))?;
    let snapshot = Snapshot::take(store, now)?;
    let marks = mark(store, candidates, &snapshot)?;
    let plan = GcPlan::up_to(store, marks.unreached(), &leased, extent)?;
    Ok((plan.with_litter(store, now)?, snapshot))
}

/// Collects the whole store; returns how many bytes were freed.
///
/// # Errors
/// As for [`plan`]; then nothing was deleted. [`StoreError::Io`] when a file cannot be removed; what was removed before
/// stays removed.
pub fn collect(store: &Liveness) -> Result<u64, StoreError> {
    let mut freed_bytes = 0_u64;
    loop {
        let deleted = collect_batch(store, &mut |_plan| ())?;
        freed_bytes = freed_bytes.saturating_add(deleted.freed_bytes());
        if deleted.is_last_batch() {
            return Ok(freed_bytes);
        }
    }
}

/// Collects a part of the store, so that much garbage takes little memory. `inspect` gets the plan before.
pub fn collect_batch(store: &Liveness, inspect: &mut dyn FnMut(&GcPlan)) -> Result<GcPlan, StoreError> {
    collect_up_to(store, Extent::BATCH, inspect)
}

fn collect_up_to(
    store: &Liveness,
    extent: Extent,
    inspect: &mut dyn FnMut(&GcPlan),
) -> Result<GcPlan, StoreError> {
    let _guard = store.lock_collections();
    let collection = store.leases().begin_collection();
    let (plan, snapshot) = plan_locked(store, extent)?;
    inspect(&plan);
    let _barred = store.content.block_internal_reads(plan.blobs());
    let deleted = execute(store, &plan, &collection)?;
    remove_unreferenced_origins(store, &snapshot, &collection)?;
    Ok(GcPlan { unlisted: plan.unlisted, ..deleted })
}

/// Collects condemned digests that nothing needs or holds any more. After an error they stay condemned.
pub fn collect_condemned(store: &Liveness) -> Result<GcPlan, StoreError> {
    collect_condemned_in_snapshot(store).map(|(deleted, _snapshot)| deleted)
}

fn collect_condemned_in_snapshot(store: &Liveness) -> Result<(GcPlan, Option<Snapshot>), StoreError> {
    let condemned = store.take_condemned();
    collect_in_snapshot(store, condemned.clone()).inspect_err(|_| store.condemn(condemned))
}

/// Collects what only `models`, which have lost their tags, needed, and reports where their bytes are.
pub fn free(store: &Liveness, models: &[Untagged]) -> (LossReport, Result<GcPlan, StoreError>) {
    let candidates: BTreeSet<Digest> =
        models.iter().flat_map(|model| &model.nodes).map(|node| node.digest()).collect();
    match collect_in_snapshot(store, candidates.clone()) {
        Ok((deleted, snapshot)) => {
            (LossReport::in_snapshot(store, models, &deleted.deletions, snapshot), Ok(deleted))
        }
        Err(refusal) => {
            store.condemn(candidates);
            (LossReport::unknown(store, models, &refusal), Err(refusal))
        }
    }
}

/// Deletes the candidates that are not needed. Those that are leased, open or mapped are condemned.
pub fn collect_from(store: &Liveness, candidates: BTreeSet<Digest>) -> Result<GcPlan, StoreError> {
    collect_in_snapshot(store, candidates).map(|(deleted, _snapshot)| deleted)
}

/// As [`collect_from`]; also returns the snapshot that decided, if one was needed.
fn collect_in_snapshot(
    store: &Liveness,
    candidates: BTreeSet<Digest>,
) -> Result<(GcPlan, Option<Snapshot>), StoreError> {
    let leased = store.leases().leased();
    let (leased, free): (BTreeSet<_>, BTreeSet<_>) =
        candidates.into_iter().partition(|digest| leased.contains(digest));
    // First, because asking the kernel takes microseconds and reading all manifests much longer.
    let (held, free): (BTreeSet<_>, BTreeSet<_>) =
        free.into_iter().partition(|digest| is_held_by_a_program(store, *digest));
    store.condemn(leased.into_iter().chain(held.iter().copied()));
    let measure = |node: Node| Ok((node, store.content.bytes_on_disk(node)?.unwrap_or_default()));
    let held = held.into_iter().map(Node::Blob).map(measure).collect::<Result<Vec<_>, StoreError>>()?;
    if free.is_empty() {
        return Ok((GcPlan { held, ..GcPlan::default() }, None));
    }
    // Keeps the scrubber from opening these blobs until they are deleted or known to be needed.
    let _barred = store.content.block_internal_reads(free.clone());
    let nodes = free.into_iter().flat_map(|digest| [Node::Recipe(digest), Node::Blob(digest)]).collect();
    let _guard = store.lock_collections();
    let collection = store.leases().begin_collection();
    let leased = store.leases().leased();
    // At this time no model in the trash has expired, so all are kept: `empty_trash` removes expired ones.
    let snapshot = Snapshot::take(store, SystemTime::UNIX_EPOCH)?;
    let marks = mark(store, nodes, &snapshot)?;
    let plan = GcPlan::up_to(store, marks.unreached(), &leased, Extent::ALL)?;
    let mut deleted = execute(store, &plan, &collection)?;
    remove_unreferenced_origins(store, &snapshot, &collection)?;
    deleted.held.extend(held);
    Ok((deleted, Some(snapshot)))
}

/// Removes expired models from the trash and collects what only they needed.
pub fn empty_trash(store: &Liveness) -> Result<GcPlan, StoreError> {
    let now = SystemTime::now();
    let expired: Vec<_> =
        store.names.trash()?.into_iter().filter(|trashed| trashed.is_expired(now)).collect();
    for trashed in &expired {
        let needed = needs(store, &trashed.manifest)?;
        store.names.remove_from_trash(trashed.record)?;
        store.condemn(needed.into_iter().map(Node::digest));
    }
    if expired.is_empty() { Ok(GcPlan::default()) } else { collect_condemned(store) }
}

#[cfg(test)]
mod tests;
