//! Carrying out a plan.
//!
//! Records in the trash go first, durably, because blobs that they kept follow. Then the file
//! system is synced once, and each digest is deleted by itself, while whoever would pin it waits.
//! A blob that some process still has open or mapped stays: unlinking it would free nothing and
//! make the next load fetch it again.

use std::collections::BTreeSet;
use std::io;
use std::sync::{Condvar, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use blobd_store_format::digest::Digest;
use rustix::io::Errno;

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

/// Whether a process has the blob open or mapped, as far as the kernel tells; also this one, to
/// verify it. When in doubt it is: what is kept for nothing can still be collected later.
fn is_held(store: &Store, digest: Digest) -> bool {
    // Unlinked while it is read, its bytes would be free only when the reader lets go.
    store.is_reading(digest) || is_in_use(store, digest)
}

/// The same, but for this process's own verification, which lets go of what is to be deleted.
pub fn is_held_by_a_program(store: &Store, digest: Digest) -> bool {
    // The second look is for a reading that began between the first and the kernel's answer.
    !store.is_reading(digest) && is_in_use(store, digest) && !store.is_reading(digest)
}

fn is_in_use(store: &Store, digest: Digest) -> bool {
    let _alone = Look::at(digest);
    let look = || match store.open_blob(digest, 0) {
        Ok(file) => crate::sys::is_in_use(&file).unwrap_or_else(|error| !has_no_answer(&error)),
        Err(StoreError::Io { source, .. }) => !has_no_answer(&source),
        // There is none, or something else has its name.
        Err(_) => false,
    };
    // A program that this process is starting has a copy of the last look's descriptor for a moment.
    look() && {
        thread::sleep(Duration::from_millis(1));
        look()
    }
}

/// A look at who holds a blob, until it is dropped. To the kernel two who look at once have the blob open,
/// and each would see the other.
struct Look(Digest);

static LOOKED_AT: Mutex<BTreeSet<Digest>> = Mutex::new(BTreeSet::new());
static LOOK_OVER: Condvar = Condvar::new();

impl Look {
    fn at(digest: Digest) -> Self {
        let looked_at = LOOKED_AT.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = LOOK_OVER.wait_while(looked_at, |looked_at| looked_at.contains(&digest));
        waited.unwrap_or_else(PoisonError::into_inner).insert(digest);
        Self(digest)
    }
}

impl Drop for Look {
    fn drop(&mut self) {
        LOOKED_AT.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.0);
        LOOK_OVER.notify_all();
    }
}

/// Whether the kernel will never say who holds the blob: it is gone, it is another user's, or the
/// file system has no leases. Then the sessions' own leases have to do. Any other failure, such
/// as too many open files, passes.
fn has_no_answer(error: &io::Error) -> bool {
    let never = [Errno::NOENT, Errno::ACCESS, Errno::INVAL, Errno::OPNOTSUPP];
    Errno::from_io_error(error).is_some_and(|errno| never.contains(&errno))
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
    use std::sync::Arc;

    use blobd_store_format::layout;

    use super::super::{collect, collect_condemned};
    use super::*;
    use crate::Ingest;

    #[test]
    fn origin_of_a_commit_in_flight_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        let store = Arc::new(Store::open(folder.path().join("store")).unwrap());
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
        let folder = tempfile::tempdir().unwrap();
        let store = Arc::new(Store::open(folder.path().join("store")).unwrap());
        let mut ingest = Ingest::begin(&store, store.leases().grant("a test")).unwrap();
        let digest = ingest.add_bytes(b"weights").unwrap();
        ingest.commit_blobs().unwrap();
        let reading = store.note_own_read(digest);
        let done = collect(&store).unwrap();
        assert_eq!((done.freed_bytes(), done.held.len()), (0, 1));
        let [kept] = done.kept(&store).try_into().unwrap();
        assert_eq!(kept.by, ["blobd's own verification"]);
        assert!(store.is_condemned(digest));
        drop(reading);
        assert!(collect_condemned(&store).unwrap().freed_bytes() > 0);
        assert_eq!(store.blob_size(digest).unwrap(), None);
    }

    #[test]
    fn failure_that_passes_does_not_make_a_blob_free() {
        for errno in [Errno::NOENT, Errno::ACCESS, Errno::INVAL, Errno::OPNOTSUPP] {
            assert!(has_no_answer(&errno.into()), "{errno}");
        }
        for errno in [Errno::MFILE, Errno::NFILE, Errno::NOMEM, Errno::IO, Errno::NOLCK, Errno::AGAIN] {
            assert!(!has_no_answer(&errno.into()), "{errno}");
        }
    }
}
