//! Carrying out a plan.
//!
//! Records in the trash go first, durably, because blobs that they kept follow. Then the file
//! system is synced once, and each digest is deleted by itself, while whoever would pin it waits.
//! A blob that some process still has open or mapped stays: unlinking it would free nothing and
//! make the next load fetch it again.

use std::thread;
use std::time::Duration;

use blobd_store_format::digest::Digest;

use super::held::is_held;
use super::plan::{GcPlan, Litter, Node};
use crate::leases::Collection;
use crate::{Store, StoreError};

/// Deletes what the plan lists, but for what has come into use since; returns what was deleted.
///
/// # Errors
/// [`StoreError::Io`] when something cannot be removed; what was removed before stays removed.
pub(super) fn execute(store: &Store, plan: &GcPlan, collection: &Collection) -> Result<GcPlan, StoreError> {
    let mut done = GcPlan::default();
    for litter in &plan.litter {
        if remove_litter(store, litter, collection)? {
            done.litter.push(litter.clone());
        }
    }
    if !plan.deletions.is_empty() || !plan.held.is_empty() {
        settle(store)?;
    }
    let _change = store.begin_change();
    let mut held = plan.held.clone();
    held.extend(delete_all(store, &plan.deletions, collection, &mut done)?);
    for _ in 0..RECHECKS {
        if held.is_empty() {
            break;
        }
        thread::sleep(RECHECK_PAUSE);
        held = delete_all(store, &held, collection, &mut done)?;
    }
    done.held = held;
    // What a program holds goes when it lets go: whoever comes by next tries again.
    store.condemn(done.held.iter().map(|(node, _)| node.digest()).chain(plan.leased.iter().copied()));
    Ok(done)
}

/// How long to wait before a held blob is checked again. A file looks open while the kernel writes it out. A
/// program that is being started has copies of its parent's descriptors until its `exec`, which can take
/// tens of milliseconds on a busy machine.
const RECHECK_PAUSE: Duration = Duration::from_millis(20);
/// How often a held blob is checked again: 100 ms in all for one that a program really uses.
const RECHECKS: usize = 5;

/// Deletes what nobody holds; returns the rest.
fn delete_all(
    store: &Store,
    nodes: &[(Node, u64)],
    collection: &Collection,
    done: &mut GcPlan,
) -> Result<Vec<(Node, u64)>, StoreError> {
    let mut held = Vec::new();
    for (node, _) in nodes {
        match collection.delete_unpinned(node.digest(), || delete(store, *node)).transpose()? {
            Some(Outcome::Deleted(bytes)) => {
                node.note_removed(store, bytes);
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

fn delete(store: &Store, node: Node) -> Result<Outcome, StoreError> {
    if let Node::Blob(digest) = node
        && is_held(store, digest)
    {
        return Ok(node.bytes_on_disk(store)?.map_or(Outcome::Gone, Outcome::Held));
    }
    Ok(node.remove(store)?.map_or(Outcome::Gone, Outcome::Deleted))
}

/// What the mark phase has read must be what is on disk: a tag that was removed or replaced a
/// moment ago must not come back after a power cut, when what it needs has been deleted.
fn settle(store: &Store) -> Result<(), StoreError> {
    store.sync_everything()
}

/// Says whether it is gone: a download may have been taken up again meanwhile.
fn remove_litter(store: &Store, litter: &Litter, collection: &Collection) -> Result<bool, StoreError> {
    match litter {
        Litter::Trash { record, .. } => store.remove_from_trash(*record).map(|_freed| true),
        Litter::Staging { name, .. } => store.remove_abandoned(name).map(|()| true),
        Litter::Partial { file, .. } => {
            let removed = collection.delete_unpinned(*file, || store.remove_partial(*file));
            Ok(removed.transpose()?.is_some())
        }
    }
}

/// Drops the records of where manifests came from that no tag points to any more.
pub(super) fn forget_origins(store: &Store, collection: &Collection) -> Result<(), StoreError> {
    for origin in forgettable_origins(store)? {
        if let Some(removed) = collection.delete_unpinned(origin, || store.remove_origin(origin)) {
            removed?;
        }
    }
    Ok(())
}

/// A commit pins its manifest, records the origin and sets the tag, in this order; so the pins are
/// looked at before the tags, or one that ends in between would be in neither.
fn forgettable_origins(store: &Store) -> Result<Vec<Digest>, StoreError> {
    let mut manifests = store.leases().pinned();
    let tagged = store.tags()?.references;
    manifests.extend(tagged.iter().filter_map(|reference| Some(store.manifest(reference).ok()?.digest())));
    manifests.extend(store.trash()?.into_iter().map(|trashed| trashed.manifest.digest()));
    Ok(store.origins()?.into_iter().filter(|origin| !manifests.contains(origin)).collect())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use blobd_store_format::layout;

    use super::super::{collect, collect_condemned};
    use super::*;
    use crate::testing::{new_store, store_with};

    #[test]
    fn origin_of_a_commit_in_flight_is_kept() {
        let (_folder, store) = new_store();
        let (in_flight, forgotten) = (Digest::of(b"in flight"), Digest::of(b"forgotten"));
        for manifest in [in_flight, forgotten] {
            fs::write(store.path(layout::origin(manifest)), "{}").unwrap();
        }
        let lease = store.leases().grant("a commit");
        lease.pin(in_flight);
        assert_eq!(forgettable_origins(&store).unwrap(), [forgotten]);
        let collection = store.leases().begin_collection();
        forget_origins(&store, &collection).unwrap();
        assert_eq!(store.origins().unwrap(), [in_flight]);
        drop(lease);
        assert_eq!(forgettable_origins(&store).unwrap(), [in_flight]);
    }

    #[test]
    fn blob_that_is_being_verified_is_kept_until_that_is_over() {
        let (_folder, store, digest) = store_with(b"weights");
        let reading = store.begin_internal_read(digest);
        let done = collect(&store).unwrap();
        assert_eq!((done.freed_bytes(), done.held.len()), (0, 1));
        let [kept] = done.kept(&store).try_into().unwrap();
        assert_eq!(kept.by, ["blobd's own verification"]);
        assert!(store.is_condemned(digest));
        drop(reading);
        assert!(collect_condemned(&store).unwrap().freed_bytes() > 0);
        assert_eq!(store.blob_size(digest).unwrap(), None);
    }
}
