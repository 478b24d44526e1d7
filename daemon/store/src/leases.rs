//! Leases: they protect digests from collection that no tag needs yet, or needs no more.
//!
//! An import holds a lease from before it checks whether a blob exists until its manifest is durable; a session holds
//! one while its client has a model open. Leases exist only in memory: if the daemon is killed, its clients and
//! transactions end too.
//!
//! A collection claims each digest before it deletes it ([`Collection::delete_unleased`]), under the lock that leasing
//! takes. The deletion itself, which may take long, happens without the lock. A caller that leases a digest which is
//! being deleted waits until that is over; no other caller waits. A digest that was leased since the collection began
//! is not deleted, even if the lease has ended: a manifest may have been committed under it that the mark phase did not
//! see.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, PoisonError, Weak};

use blobd_store_format::digest::Digest;
use tracing_mutex::stdsync::{Condvar, Mutex, MutexGuard};

use crate::lock;

#[derive(Clone, Debug, Default)]
pub struct Leases(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    table: Mutex<Table>,
    /// Notified when a deletion is over.
    deleted: Condvar,
}

#[derive(Debug, Default)]
struct Table {
    next_id: u64,
    entries: BTreeMap<u64, Entry>,
    /// The sets that leases of the same model share, by manifest digest. Only used to find an equal set, which has an
    /// entry for each tensor: `entries` decides what is protected.
    models: BTreeMap<Digest, Weak<BTreeSet<Digest>>>,
    /// Digests leased since the running collection began; `None` if none is running.
    since_collection: Option<BTreeSet<Digest>>,
    deleting: BTreeSet<Digest>,
}

impl Table {
    fn is_leased(&self, digest: Digest) -> bool {
        self.entries.values().any(|entry| entry.contains(digest))
    }
}

#[derive(Debug)]
struct Entry {
    holder: String,
    digests: BTreeSet<Digest>,
    /// The digests of the leased model, shared with other leases.
    model: Option<Arc<BTreeSet<Digest>>>,
}

impl Entry {
    fn contains(&self, digest: Digest) -> bool {
        self.digests.contains(&digest) || self.model.as_ref().is_some_and(|model| model.contains(&digest))
    }
}

impl Leases {
    /// Creates a lease that protects nothing yet. `holder` names it for users, in the response to `rm`.
    pub fn grant(&self, holder: impl Into<String>) -> Lease {
        let mut table = self.lock();
        let id = table.next_id;
        table.next_id += 1;
        table.entries.insert(id, Entry { holder: holder.into(), digests: BTreeSet::new(), model: None });
        Lease { leases: self.clone(), id }
    }

    pub fn holders(&self, digest: Digest) -> Vec<String> {
        let table = self.lock();
        let leasing = table.entries.values().filter(|entry| entry.contains(digest));
        leasing.map(|entry| entry.holder.clone()).collect()
    }

    pub fn holders_of_any(&self, digests: &BTreeSet<Digest>) -> BTreeSet<String> {
        let table = self.lock();
        let holds = |entry: &&Entry| digests.iter().any(|digest| entry.contains(*digest));
        table.entries.values().filter(holds).map(|entry| entry.holder.clone()).collect()
    }

    pub fn is_leased(&self, digest: Digest) -> bool {
        self.lock().is_leased(digest)
    }

    pub fn leased(&self) -> BTreeSet<Digest> {
        let table = self.lock();
        let mut leased: BTreeSet<Digest> =
            table.entries.values().flat_map(|entry| entry.digests.iter().copied()).collect();
        // Each set once, however many leases share it.
        let mut seen = BTreeSet::new();
        for model in table.entries.values().filter_map(|entry| entry.model.as_ref()) {
            if seen.insert(Arc::as_ptr(model)) {
                leased.extend(model.iter());
            }
        }
        leased
    }

    /// Starts a collection: digests that are leased from now on stay even if the lease ends.
    pub fn begin_collection(&self) -> Collection {
        self.lock().since_collection.get_or_insert_default();
        Collection { leases: self.clone() }
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        lock(&self.0.table)
    }

    /// Waits until none of `digests` is being deleted, and locks the table.
    fn lock_unless_deleting(&self, digests: &BTreeSet<Digest>) -> MutexGuard<'_, Table> {
        let is_deleting = |table: &mut Table| !table.deleting.is_disjoint(digests);
        let waited = self.0.deleted.wait_while(self.lock(), is_deleting);
        waited.unwrap_or_else(PoisonError::into_inner)
    }
}

/// A collection in progress. Only one runs at a time, see [`crate::Liveness::lock_collections`].
#[derive(Debug)]
#[must_use]
pub struct Collection {
    leases: Leases,
}

impl Collection {
    /// Calls `delete` unless the digest is, or was, leased since the collection began. Callers that lease it wait.
    /// `delete` may take long, but must not lease it.
    pub fn delete_unleased<T>(&self, digest: Digest, delete: impl FnOnce() -> T) -> Option<T> {
        let claim = self.claim(digest)?;
        let deleted = delete();
        drop(claim);
        Some(deleted)
    }

    fn claim(&self, digest: Digest) -> Option<Claim<'_>> {
        let mut table = self.leases.lock();
        let since = table.since_collection.as_ref();
        if table.is_leased(digest) || since.is_some_and(|since| since.contains(&digest)) {
            return None;
        }
        table.deleting.insert(digest);
        Some(Claim { leases: &self.leases, digest })
    }
}

/// Marks a digest as being deleted until dropped.
struct Claim<'c> {
    leases: &'c Leases,
    digest: Digest,
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        self.leases.lock().deleting.remove(&self.digest);
        self.leases.0.deleted.notify_all();
    }
}

impl Drop for Collection {
    fn drop(&mut self) {
        self.leases.lock().since_collection = None;
    }
}

/// Protects digests from collection until it is dropped.
#[derive(Debug)]
#[must_use]
pub struct Lease {
    leases: Leases,
    id: u64,
}

impl Lease {
    /// Check only after this whether the blob exists, or a collection could delete it in between.
    pub fn protect(&self, digest: Digest) {
        self.protect_all([digest]);
    }

    /// Protects nothing any more. Of several callers that release a digest, the last one sees that it is not leased.
    pub fn release(&self) {
        if let Some(entry) = self.leases.lock().entries.get_mut(&self.id) {
            entry.digests.clear();
            entry.model = None;
        }
    }

    /// Protects the digests of a model by its manifest's digest, instead of those of the model before. Waits like
    /// [`Self::protect_all`].
    pub(crate) fn protect_model(&self, manifest: Digest, digests: impl IntoIterator<Item = Digest>) {
        let digests: BTreeSet<Digest> = digests.into_iter().collect();
        let mut table = self.leases.lock_unless_deleting(&digests);
        let Table { entries, models, since_collection, .. } = &mut *table;
        let Some(entry) = entries.get_mut(&self.id) else { return };
        if let Some(since) = since_collection {
            since.extend(&digests);
        }
        models.retain(|_, model| model.strong_count() > 0);
        let shared = models.get(&manifest).and_then(Weak::upgrade).filter(|model| **model == digests);
        let model = shared.unwrap_or_else(|| {
            let model = Arc::new(digests);
            models.insert(manifest, Arc::downgrade(&model));
            model
        });
        entry.model = Some(model);
    }

    /// Protects several digests. Waits until none of them is being deleted.
    pub fn protect_all(&self, digests: impl IntoIterator<Item = Digest>) {
        // Building the set at once is faster than inserting a model's thousand digests one by one.
        let more: BTreeSet<Digest> = digests.into_iter().collect();
        let mut table = self.leases.lock_unless_deleting(&more);
        let Table { entries, since_collection, .. } = &mut *table;
        let Some(Entry { digests: leased, .. }) = entries.get_mut(&self.id) else { return };
        if let Some(since) = since_collection {
            since.extend(&more);
        }
        if leased.is_empty() {
            *leased = more;
        } else {
            leased.extend(more);
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.leases.lock().entries.remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;
    use std::time::Duration;

    use super::*;

    #[test]
    fn leased_digest_is_not_deleted_until_its_last_lease_ends() {
        let (leases, digest) = (Leases::default(), Digest::of(b"x"));
        let (first, second) = (leases.grant("first"), leases.grant("second"));
        first.protect(digest);
        second.protect(digest);
        assert_eq!(leases.holders(digest), ["first", "second"]);
        drop(first);
        assert_eq!(leases.begin_collection().delete_unleased(digest, || ()), None);
        drop(second);
        assert_eq!(leases.begin_collection().delete_unleased(digest, || ()), Some(()));
        assert!(leases.leased().is_empty());
    }

    #[test]
    fn models_without_a_lease_are_forgotten() {
        let leases = Leases::default();
        for number in 0..3_u8 {
            let manifest = Digest::of(&[number]);
            let lease = leases.grant("open");
            lease.protect_model(manifest, [Digest::of(b"shared"), manifest]);
            assert!(leases.is_leased(manifest));
            assert_eq!(leases.lock().models.len(), 1, "{number}");
        }
        assert!(leases.leased().is_empty());
    }

    #[test]
    fn holders_are_those_of_any_of_the_digests() {
        let leases = Leases::default();
        let [a, b, c] = [b"a", b"b", b"c"].map(|bytes| Digest::of(bytes));
        let (first, second) = (leases.grant("first"), leases.grant("second"));
        first.protect(a);
        second.protect(b);
        let holders = |digests: &[Digest]| -> Vec<String> {
            leases.holders_of_any(&digests.iter().copied().collect()).into_iter().collect()
        };
        assert_eq!(holders(&[a, c]), ["first"]);
        assert_eq!(holders(&[a, b]), ["first", "second"]);
        assert_eq!(holders(&[c]), [""; 0]);
    }

    #[test]
    fn only_callers_that_lease_the_deleted_digest_wait_for_a_slow_deletion() {
        let (leases, digest, other) = (Leases::default(), Digest::of(b"x"), Digest::of(b"y"));
        let collection = leases.begin_collection();
        let (lease, has_leased) = (leases.grant("import"), AtomicBool::new(false));
        thread::scope(|scope| {
            let deleted = collection.delete_unleased(digest, || {
                // Other calls do not wait, even on this thread.
                leases.grant("another import").protect(other);
                assert!(!leases.is_leased(digest) && leases.holders(digest).is_empty());
                assert_eq!(collection.delete_unleased(other, || ()), None, "it was leased");
                scope.spawn(|| {
                    lease.protect(digest);
                    has_leased.store(true, Ordering::SeqCst);
                });
                thread::sleep(Duration::from_millis(50));
                assert!(
                    !has_leased.load(Ordering::SeqCst),
                    "a digest that is being deleted cannot be leased"
                );
            });
            assert_eq!(deleted, Some(()));
        });
        assert!(leases.is_leased(digest));
        assert_eq!(collection.delete_unleased(digest, || ()), None);
    }

    #[test]
    fn deletion_that_panics_blocks_no_lease() {
        let (leases, digest) = (Leases::default(), Digest::of(b"x"));
        let collection = leases.begin_collection();
        let deletion = || collection.delete_unleased(digest, || panic!("a test"));
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(deletion));
        assert!(caught.is_err());
        leases.grant("import").protect(digest);
    }

    #[test]
    fn leases_of_a_model_share_what_they_protect_unless_it_is_stored_in_other_parts() {
        let (leases, manifest) = (Leases::default(), Digest::of(b"manifest"));
        let (old, new) = ([Digest::of(b"a"), Digest::of(b"b")], [Digest::of(b"a"), Digest::of(b"c")]);
        let (first, second, third) = (leases.grant("1"), leases.grant("2"), leases.grant("3"));
        first.protect_model(manifest, old);
        second.protect_model(manifest, old);
        let set_of = |lease: &Lease| leases.lock().entries[&lease.id].model.clone().unwrap();
        assert!(Arc::ptr_eq(&set_of(&first), &set_of(&second)));
        third.protect_model(manifest, new);
        assert_eq!(leases.leased(), [old[0], old[1], new[1]].into());
        assert_eq!(leases.holders(old[1]), ["1", "2"]);
        drop(third);
        assert_eq!(leases.leased(), old.into());
        let collection = leases.begin_collection();
        let late = leases.grant("late");
        late.protect_model(manifest, new);
        drop(late);
        assert_eq!(collection.delete_unleased(new[1], || ()), None, "leased since it began");
        drop(collection);
        second.release();
        drop(first);
        assert!(leases.leased().is_empty());
        assert_eq!(leases.begin_collection().delete_unleased(old[1], || ()), Some(()));
    }

    #[test]
    fn digest_leased_and_released_during_a_collection_stays() {
        let (leases, digest) = (Leases::default(), Digest::of(b"x"));
        let collection = leases.begin_collection();
        let import = leases.grant("import");
        import.protect(digest);
        drop(import);
        assert_eq!(collection.delete_unleased(digest, || ()), None);
        drop(collection);
        assert_eq!(leases.begin_collection().delete_unleased(digest, || ()), Some(()));
    }
}
