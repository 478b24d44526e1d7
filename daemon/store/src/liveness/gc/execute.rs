//! Executes a plan.
//!
//! Expired records in the trash are removed first and durably, because the blobs that they kept follow. Then the file
//! system is synced once, and digests are deleted one at a time under the lock that leasing takes. A blob that a
//! process has open or mapped is kept: unlinking it would free nothing, and the next open would have to download it
//! again.

use std::thread;
use std::time::Duration;

use super::held::is_held;
use super::{GcPlan, Node, OtherDeletion, Snapshot};
use crate::leases::Collection;
use crate::liveness::Liveness;
use crate::{StoreError, lock};

/// Deletes what the plan lists and is still unused; returns what was deleted. It stays deleted after an error.
pub(super) fn execute(
    store: &Liveness,
    plan: &GcPlan,
    collection: &Collection,
) -> Result<GcPlan, StoreError> {
    let mut done = GcPlan::default();
    let executed = execute_into(store, plan, collection, &mut done);
    lock(&store.content.counts).collections += 1;
    lock(&store.content.counts).freed_bytes += done.freed_bytes();
    executed.map(|()| done)
}

fn execute_into(
    store: &Liveness,
    plan: &GcPlan,
    collection: &Collection,
    done: &mut GcPlan,
) -> Result<(), StoreError> {
    for deletion in &plan.other_deletions {
        if remove_other(store, deletion, collection)? {
            done.other_deletions.push(deletion.clone());
        }
    }
    if !plan.deletions.is_empty() || !plan.held.is_empty() {
        // Otherwise a power cut could bring back a tag whose data is deleted.
        store.content.sync_everything()?;
    }
    let _change = store.content.index().begin_change();
    let mut held = plan.held.clone();
    held.extend(delete_all(store, &plan.deletions, collection, done)?);
    for _ in 0..RECHECKS {
        if held.is_empty() {
            break;
        }
        thread::sleep(RECHECK_PAUSE);
        held = delete_all(store, &held, collection, done)?;
    }
    done.held = held;
    // A later collection deletes these when they are released.
    store.condemn(done.held.iter().map(|(node, _)| node.digest()).chain(plan.leased.iter().copied()));
    Ok(())
}

/// The pause before a held blob is checked again. A file looks open while the kernel writes it back. A program that is
/// being started has copies of its parent's descriptors until its `exec`, which can take tens of milliseconds on a busy
/// machine.
const RECHECK_PAUSE: Duration = Duration::from_millis(20);
/// How often a held blob is checked again: 100 ms in all for one that a program really uses.
const RECHECKS: usize = 5;

/// Deletes what is not held; returns the rest.
fn delete_all(
    store: &Liveness,
    nodes: &[(Node, u64)],
    collection: &Collection,
    done: &mut GcPlan,
) -> Result<Vec<(Node, u64)>, StoreError> {
    let mut held = Vec::new();
    for (node, _) in nodes {
        match collection.delete_unleased(node.digest(), || delete(store, *node)).transpose()? {
            Some(Outcome::Deleted(bytes)) => {
                store.content.note_removed(*node, bytes);
                done.deletions.push((*node, bytes));
            }
            Some(Outcome::Held(bytes)) => held.push((*node, bytes)),
            Some(Outcome::Gone) | None => {}
        }
    }
    Ok(held)
}

enum Outcome {
    Deleted(u64),
    Held(u64),
    Gone,
}

fn delete(store: &Liveness, node: Node) -> Result<Outcome, StoreError> {
    if let Node::Blob(digest) = node
        && is_held(store, digest)
    {
        return Ok(store.content.bytes_on_disk(node)?.map_or(Outcome::Gone, Outcome::Held));
    }
    Ok(store.content.remove_node(node)?.map_or(Outcome::Gone, Outcome::Deleted))
}

/// Returns whether it was removed: a download may have been resumed meanwhile.
fn remove_other(
    store: &Liveness,
    deletion: &OtherDeletion,
    collection: &Collection,
) -> Result<bool, StoreError> {
    match deletion {
        OtherDeletion::Trash { record, .. } => store.names.remove_from_trash(*record).map(|_freed| true),
        OtherDeletion::Staging { name, .. } => store.content.remove_abandoned(name).map(|()| true),
        OtherDeletion::Partial { file, .. } => {
            let removed = collection.delete_unleased(*file, || store.ledger.remove_partial(*file));
            Ok(removed.transpose()?.is_some())
        }
    }
}

/// Removes the origins and signatures of manifests that nothing in the snapshot has, and the oldest histories of names that are gone.
///
/// A commit leases its manifest, records the origin and sets the tag, in this order. A snapshot reads leases before
/// tags; otherwise a commit that ends in between would be in neither. The collection has begun before it.
pub(super) fn remove_unreferenced_origins(
    store: &Liveness,
    snapshot: &Snapshot,
    collection: &Collection,
) -> Result<(), StoreError> {
    let kept = snapshot.manifests();
    for origin in store.names.origins()?.into_iter().filter(|origin| !kept.contains(origin)) {
        if let Some(removed) = collection.delete_unleased(origin, || store.names.remove_origin(origin)) {
            removed?;
        }
    }
    for signed in store.names.signed()?.into_iter().filter(|signed| !kept.contains(signed)) {
        if let Some(removed) = collection.delete_unleased(signed, || store.names.remove_signatures(signed)) {
            removed?;
        }
    }
    store.names.trim_histories(&snapshot.names())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::time::SystemTime;

    use blobd_store_format::digest::Digest;
    use blobd_store_format::layout;

    use super::super::{collect_batch, collect_condemned};
    use super::*;
    use crate::testing::{new_store, store_with};

    #[test]
    fn origin_of_a_commit_in_progress_is_kept() {
        let (_folder, store) = new_store();
        let (in_progress, forgotten) = (Digest::of(b"in progress"), Digest::of(b"forgotten"));
        for manifest in [in_progress, forgotten] {
            fs::write(store.path(layout::origin(manifest)), "{}").unwrap();
        }
        let lease = store.liveness.leases().grant("a commit");
        lease.protect(in_progress);
        let remove = || {
            let collection = store.liveness.leases().begin_collection();
            let snapshot = Snapshot::take(&store.liveness, SystemTime::now()).unwrap();
            remove_unreferenced_origins(&store.liveness, &snapshot, &collection).unwrap();
        };
        remove();
        assert_eq!(store.names.origins().unwrap(), [in_progress]);
        drop(lease);
        remove();
        assert!(store.names.origins().unwrap().is_empty());
    }

    #[test]
    fn blob_is_kept_while_it_is_verified() {
        let (_folder, store, digest) = store_with(b"weights");
        let reading = store.content.begin_internal_read(digest);
        let done = collect_batch(&store.liveness, &mut |_plan| ()).unwrap();
        assert_eq!((done.freed_bytes(), done.held.len()), (0, 1));
        let [kept] = done.kept(&store.liveness).try_into().unwrap();
        assert_eq!(kept.by, ["blobd's own verification"]);
        assert!(store.liveness.is_condemned(digest));
        drop(reading);
        assert!(collect_condemned(&store.liveness).unwrap().freed_bytes() > 0);
        assert_eq!(store.content.blob_size(digest).unwrap(), None);
    }
}
