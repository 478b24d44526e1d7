//! Garbage collection: what no tag needs and no lease pins goes.
//!
//! The order that makes it safe: take the list of pins, then read the manifests, then plan, then
//! delete one digest at a time under the lock that pinning takes, leaving whatever was pinned
//! since the start ([`crate::store::leases`]). The manifests are read from disk each time. If
//! one manifest or recipe cannot be read, nothing is deleted at all.

use std::collections::BTreeSet;
use std::time::SystemTime;

use blobd_store_format::digest::Digest;

use crate::store::{Store, StoreError};

mod evict;
mod execute;
mod holders;
mod mark;
mod plan;

pub use evict::{EvictionPlan, Victim, evict, plan_eviction};
pub use holders::holders;
pub use mark::needs;
pub(crate) use plan::UNKNOWN_HOLDER;
pub use plan::{GcPlan, Litter, Node};

pub(crate) use execute::is_held;
use execute::{execute, forget_origins};
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

fn plan_alone(store: &Store) -> Result<GcPlan, StoreError> {
    let now = SystemTime::now();
    let pinned = store.leases().pinned();
    let mut candidates: Vec<Node> = store.recipes()?.into_iter().map(Node::Recipe).collect();
    candidates.extend(store.blobs()?.into_iter().map(Node::Blob));
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
    let nodes = condemned.into_iter().flat_map(|digest| [Node::Recipe(digest), Node::Blob(digest)]).collect();
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
