//! The directory that one transaction writes to, and the disk space promised to it.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use blobd_store_format::layout;

use crate::disk::GuardedDisk;
use crate::ledger::accounting::Reservation;
use crate::liveness::EvictionObserver;
use crate::node::Node;
use crate::root::OPEN_DIRECTORY;
use crate::seal::{DurableBlob, StagedBlob, WrittenFiles};
use crate::{Store, StoreError};

/// A transaction's directory. When the last clone is dropped, the directory and its content are removed.
#[derive(Clone, Debug)]
pub struct Staging(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    store: Arc<Store>,
    name: Arc<str>,
    directory: PathBuf,
    written: WrittenFiles,
    next_file: AtomicU64,
    /// Bytes that the ledger has promised and no file has taken yet.
    promised: AtomicU64,
    /// The most bytes that the transaction may still take, as far as known.
    expected: AtomicU64,
    /// The staged blobs that other transactions published first, and their bytes.
    duplicates: Duplicates,
    /// Told of the models that are evicted for this transaction.
    observer: OnceLock<Arc<dyn EvictionObserver>>,
}

#[derive(Debug, Default)]
struct Duplicates {
    count: AtomicU64,
    bytes: AtomicU64,
}

impl Staging {
    pub(crate) fn begin(store: &Arc<Store>) -> Result<Self, StoreError> {
        let name = store.content.new_staging_name();
        let directory = Path::new(layout::STAGING).join(&name);
        let opened = make_directory(store, &directory);
        let directory_fd = opened.inspect_err(|_| store.content.release_staging_name(&name))?;
        store.ledger.begin_transaction(&name);
        let disk = store.content.disk.clone();
        let written = WrittenFiles::new(disk, store.content.durability, directory_fd, directory.clone());
        Ok(Self(Arc::new(Inner {
            store: Arc::clone(store),
            name: name.into(),
            directory,
            written,
            next_file: AtomicU64::new(0),
            promised: AtomicU64::new(0),
            expected: AtomicU64::new(0),
            duplicates: Duplicates::default(),
            observer: OnceLock::new(),
        })))
    }

    /// Reports the models that are evicted for this transaction. Only the first call has an effect.
    pub(crate) fn report_evictions_to(&self, observer: Arc<dyn EvictionObserver>) {
        let _ = self.0.observer.set(observer);
    }

    pub(crate) fn transaction(&self) -> &Arc<str> {
        &self.0.name
    }

    /// Has `bytes` of disk space promised, if necessary by evicting models. Files that are staged later use these bytes
    /// first.
    pub fn promise(&self, bytes: u64) -> Result<(), StoreError> {
        let store = &self.0.store;
        let with_the_rest = bytes.max(self.0.expected.load(Ordering::Relaxed));
        store.liveness.with_space(with_the_rest, self.observer(), || store.ledger.space().promise(bytes))?;
        self.0.promised.fetch_add(bytes, Ordering::Relaxed);
        Ok(())
    }

    /// Returns what was promised and not taken, because a file is received again from its start.
    pub fn return_promises(&self) {
        self.0.store.ledger.space().release_promise(self.0.promised.swap(0, Ordering::Relaxed));
    }

    /// Has `bytes` of disk space promised if they fit now. Evicts nothing.
    pub(crate) fn promise_now(&self, bytes: u64) -> bool {
        let is_promised = self.0.store.ledger.space().promise(bytes).is_ok();
        if is_promised {
            self.0.promised.fetch_add(bytes, Ordering::Relaxed);
        }
        is_promised
    }

    /// Announces that the transaction may take `bytes` more: models are evicted for all of these or not at all.
    pub fn expect(&self, bytes: u64) {
        self.0.expected.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Announces files of these sizes, each of which takes whole blocks, instead of `announced` bytes.
    pub fn expect_instead(&self, announced: u64, sizes: impl IntoIterator<Item = u64>) {
        let space = self.0.store.ledger.space();
        spend(&self.0.expected, announced);
        self.expect(sizes.into_iter().map(|size| space.on_disk(size)).fold(0, u64::saturating_add));
    }

    /// Gives up the space of a file of this size that need not be written.
    pub(crate) fn pass_over(&self, size: u64) {
        let space = self.0.store.ledger.space();
        let bytes = space.on_disk(size);
        spend(&self.0.expected, bytes);
        space.release_promise(spend(&self.0.promised, bytes));
    }

    pub(crate) fn next_path(&self) -> PathBuf {
        let number = self.0.next_file.fetch_add(1, Ordering::Relaxed);
        self.0.directory.join(number.to_string())
    }

    pub(crate) fn store(&self) -> &Arc<Store> {
        &self.0.store
    }

    pub(crate) fn disk(&self) -> &GuardedDisk {
        &self.0.store.content.disk
    }

    pub(crate) fn directory(&self) -> &Path {
        &self.0.directory
    }

    pub(crate) fn written(&self) -> &WrittenFiles {
        &self.0.written
    }

    /// Removes a staged blob that the store has already.
    pub(crate) fn discard(&self, blob: &StagedBlob) -> Result<(), StoreError> {
        self.written().forget(&blob.path);
        self.disk().remove_file(&blob.path).map(|_freed| ())
    }

    /// Makes the content of finished blobs durable and then renames them to their final names.
    pub(crate) fn publish(&self, blobs: Vec<StagedBlob>) -> Result<(), StoreError> {
        let _change = self.0.store.content.index().begin_change();
        let durable = self.written().seal(blobs)?;
        durable.into_iter().try_for_each(|blob| self.publish_blob(blob))
    }

    /// Keeps a file that another transaction has published, since clients may have mapped it. Replaces one of the wrong
    /// length; clients that have mapped it keep that.
    fn publish_blob(&self, blob: DurableBlob) -> Result<(), StoreError> {
        let mut blob = blob.into_blob();
        self.written().forget(&blob.path);
        let store = &self.0.store;
        let target = layout::blob(blob.digest);
        let (node, mut replaced) = (Node::Blob(blob.digest), 0);
        if !self.disk().publish(&blob.path, &target)? {
            if store.content.own_blob_size(blob.digest)? == Some(blob.size) {
                self.0.duplicates.count.fetch_add(1, Ordering::Relaxed);
                self.0.duplicates.bytes.fetch_add(blob.size, Ordering::Relaxed);
                return self.disk().remove_file(&blob.path).map(|_freed| ());
            }
            replaced = store.content.bytes_on_disk(node)?.unwrap_or_default();
            self.disk().rename(&blob.path, &target)?;
        }
        store.ledger.note_added(node, replaced, &mut blob.reservation)?;
        store.ledger.note_published(&self.0.name, node);
        Ok(())
    }

    /// The number and the bytes of staged blobs that were not published, because another transaction had published the
    /// same blobs in the meantime.
    pub(crate) fn duplicates(&self) -> (u64, u64) {
        let Duplicates { count, bytes } = &self.0.duplicates;
        (count.load(Ordering::Relaxed), bytes.load(Ordering::Relaxed))
    }

    /// Reserves space for a record of `size` bytes, which counts against no user's quota.
    pub(crate) fn reserve_record(&self, size: u64) -> Result<Reservation, StoreError> {
        let bytes = self.0.store.ledger.space().on_disk(size);
        self.take_disk_space(bytes, || Ok(()))?;
        Ok(Reservation::for_staged(&self.0.store.ledger, bytes, None))
    }

    /// Reserves space for a file, if necessary by evicting models; `reserve` has the file system allocate it.
    pub(crate) fn reserve_space(
        &self,
        size: u64,
        reserve: impl Fn() -> Result<(), StoreError>,
    ) -> Result<Reservation, StoreError> {
        self.take_space(self.0.store.ledger.space().on_disk(size), reserve)
    }

    /// Reserves `bytes` of space as [`Self::reserve_space`] does.
    pub(crate) fn take_space(
        &self,
        bytes: u64,
        reserve: impl Fn() -> Result<(), StoreError>,
    ) -> Result<Reservation, StoreError> {
        let (store, name) = (&self.0.store, &self.0.name);
        store.liveness.take_of_quota(name, bytes)?;
        let taken = self.take_disk_space(bytes, reserve);
        taken.inspect_err(|_| store.ledger.give_back_of_quota(name, bytes))?;
        Ok(Reservation::for_staged(&store.ledger, bytes, Some(Arc::clone(name))))
    }

    fn take_disk_space(
        &self,
        bytes: u64,
        reserve: impl Fn() -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        let store = &self.0.store;
        let promised = spend(&self.0.promised, bytes);
        spend(&self.0.expected, bytes);
        let (expected, in_hand) = (&self.0.expected, self.0.promised.load(Ordering::Relaxed));
        let rest = expected.load(Ordering::Relaxed).saturating_sub(in_hand);
        let with_the_rest = bytes.saturating_sub(promised).saturating_add(rest);
        let take = || store.ledger.space().take(bytes, promised, &reserve);
        let taken = store.liveness.with_space(with_the_rest, self.observer(), take);
        if taken.is_err() {
            self.0.promised.fetch_add(promised, Ordering::Relaxed);
        }
        taken
    }

    pub(super) fn observer(&self) -> Option<&dyn EvictionObserver> {
        self.0.observer.get().map(|observer| &**observer)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.store.ledger.space().release_promise(self.promised.load(Ordering::Relaxed));
        if let Err(error) = self.store.content.disk.remove_tree(&self.directory) {
            tracing::warn!("{error}; `blobd gc` or the next start removes it");
        }
        self.store.ledger.end_transaction(&self.name);
        self.store.content.release_staging_name(&self.name);
    }
}

fn spend(sum: &AtomicU64, bytes: u64) -> u64 {
    let rest = |left: u64| Some(left.saturating_sub(bytes));
    let left = sum.fetch_update(Ordering::Relaxed, Ordering::Relaxed, rest);
    left.unwrap_or_default().min(bytes)
}

fn make_directory(store: &Store, directory: &Path) -> Result<File, StoreError> {
    store.content.create_directories(Path::new(layout::STAGING))?;
    store.content.disk.create_dir(directory)?;
    let opened = store.content.root.try_open_directory(directory);
    opened.map_err(store.content.root.failure(OPEN_DIRECTORY, directory))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{begin, new_store};

    #[test]
    fn announced_bytes_are_replaced_by_the_blocks_of_files_and_spent_by_those_that_are_passed_over() {
        let (_folder, store) = new_store();
        let staging = begin(&store).staging();
        let expected = || staging.0.expected.load(Ordering::Relaxed);
        let on_disk = |size| store.ledger.space().on_disk(size);
        staging.expect(1000);
        assert_eq!(expected(), 1000);
        staging.expect_instead(600, [1, 5000]);
        assert_eq!(expected(), 400 + on_disk(1) + on_disk(5000));
        staging.pass_over(5000);
        assert_eq!(expected(), 400 + on_disk(1));
        staging.pass_over(1 << 40);
        assert_eq!(expected(), 0);
    }
}
