//! Makes the content of written files durable before they are published.
//!
//! Every file that becomes a blob is written through a descriptor from here: files of imports and repairs in
//! `staging/`, downloads in `partial/`, also those that an earlier process began. Only [`WrittenFiles::seal`] creates a
//! [`DurableBlob`], and only a [`DurableBlob`] can be published.
//!
//! A descriptor is kept open until the data written through it is durable. The kernel reports a failed write to
//! descriptors that were open at that time. If none was, it may drop the failure together with the file's pages, and an
//! `fsync` through a later descriptor succeeds although bytes are lost. The number of descriptors is limited, so one
//! may have to be closed early: in mode `fsync` its data is synced first; in the other modes the group of its file is
//! synced by `syncfs`, through a descriptor that was opened before the transaction wrote anything.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use blobd_store_format::digest::Digest;
use tracing_mutex::stdsync::Mutex;

use crate::disk::GuardedDisk;
use crate::filesystem::Durability;
use crate::ledger::accounting::Reservation;
use crate::{StoreError, lock};

/// The permissions of a blob.
const READ_ONLY: u32 = 0o444;

/// The files that a transaction has written and not yet published.
#[derive(Debug)]
pub(crate) struct WrittenFiles {
    disk: GuardedDisk,
    durability: Durability,
    /// For `syncfs`. Opened before the first write, so that `syncfs` reports every write error of the transaction.
    directory_fd: File,
    directory: PathBuf,
    files: Mutex<Files>,
    /// Held while single files are synced. If two threads sync one file, only the first gets an error; the other must
    /// not publish the file before the first has made the store read-only.
    syncing: Mutex<()>,
}

#[derive(Debug, Default)]
struct Files {
    open: BTreeMap<PathBuf, OpenFile>,
    /// Files that were sealed before their group, and are closed.
    sealed: BTreeSet<PathBuf>,
    /// Counts uses, to find the least recently used file.
    uses: u64,
}

#[derive(Debug)]
struct OpenFile {
    file: Arc<File>,
    last_use: u64,
    /// No more data will be written to it.
    is_complete: bool,
}

/// A blob that is completely written and hashed, but not yet durable.
#[derive(Debug)]
pub struct StagedBlob {
    /// Its path in the store.
    pub(crate) path: PathBuf,
    pub digest: Digest,
    pub size: u64,
    /// Its disk space, until it is removed or published.
    pub(crate) reservation: Reservation,
}

/// A blob whose content is durable and read-only, so it may be published.
#[derive(Debug)]
pub(crate) struct DurableBlob(StagedBlob);

impl DurableBlob {
    pub(crate) fn into_blob(self) -> StagedBlob {
        self.0
    }
}

impl WrittenFiles {
    pub(crate) fn new(
        disk: GuardedDisk,
        durability: Durability,
        directory_fd: File,
        directory: PathBuf,
    ) -> Self {
        let (files, syncing) = (Mutex::default(), Mutex::default());
        Self { disk, durability, directory_fd, directory, files, syncing }
    }

    pub(crate) fn add(&self, path: &Path, file: File) -> Result<Arc<File>, StoreError> {
        self.close_least_recently_used()?;
        let mut files = lock(&self.files);
        files.sealed.remove(path);
        Ok(files.insert(path, file))
    }

    /// The descriptor for writing a file. One that an earlier session created is opened before it is read, so that this
    /// descriptor gets errors of its pending writes.
    pub(crate) fn writer(&self, path: &Path) -> Result<Arc<File>, StoreError> {
        if let Some(file) = lock(&self.files).used(path) {
            return Ok(file);
        }
        self.add(path, self.disk.open_file(path)?)
    }

    /// Declares that a file is completely written, so it may be sealed before its group.
    pub(crate) fn complete(&self, path: &Path) {
        if let Some(open) = lock(&self.files).open.get_mut(path) {
            open.is_complete = true;
        }
    }

    pub(crate) fn forget(&self, path: &Path) {
        let mut files = lock(&self.files);
        files.sealed.remove(path);
        files.open.remove(path);
    }

    /// Makes the content of finished blobs durable, in the configured mode, and read-only.
    ///
    /// A few are synced one by one, since `syncfs` also writes dirty data of other programs; from about eight blobs on
    /// it is several times cheaper.
    pub(crate) fn seal(&self, blobs: Vec<StagedBlob>) -> Result<Vec<DurableBlob>, StoreError> {
        const SYNCFS_FROM: usize = 8;
        let is_one_by_one = match self.durability {
            Durability::Fsync => true,
            Durability::Syncfs => false,
            Durability::Auto => blobs.len() < SYNCFS_FROM && self.has_all_open(&blobs),
        };
        if is_one_by_one {
            blobs.iter().try_for_each(|blob| self.seal_file(&blob.path))?;
        } else if !blobs.is_empty() {
            blobs.iter().try_for_each(|blob| self.make_read_only(&blob.path).map(drop))?;
            self.disk.sync_file_system(&self.directory_fd, &self.directory)?;
        }
        Ok(blobs.into_iter().map(DurableBlob).collect())
    }

    fn seal_file(&self, path: &Path) -> Result<(), StoreError> {
        let _syncing = lock(&self.syncing);
        if lock(&self.files).sealed.contains(path) {
            return Ok(());
        }
        // If it was closed before, its data was synced then.
        let file = self.make_read_only(path)?;
        self.disk.sync_file(path, &file)
    }

    fn make_read_only(&self, path: &Path) -> Result<Arc<File>, StoreError> {
        let Some(file) = lock(&self.files).used(path) else {
            return self.disk.set_mode_of(path, READ_ONLY).map(Arc::new);
        };
        self.disk.set_mode(path, &file, READ_ONLY)?;
        Ok(file)
    }

    /// Sets the mode before the sync, so that a crash after the rename cannot leave a writable blob.
    fn make_durable(&self, path: &Path, file: &File) -> Result<(), StoreError> {
        self.disk.set_mode(path, file, READ_ONLY)?;
        self.disk.sync_file(path, file)
    }

    fn has_all_open(&self, blobs: &[StagedBlob]) -> bool {
        let files = lock(&self.files);
        blobs.iter().all(|blob| files.open.contains_key(&blob.path))
    }

    /// Closes files until one more can be opened.
    fn close_least_recently_used(&self) -> Result<(), StoreError> {
        const MAX_OPEN: usize = 64;
        loop {
            let _syncing = (self.durability == Durability::Fsync).then(|| lock(&self.syncing));
            let Some((path, open)) = lock(&self.files).take_least_recently_used(MAX_OPEN) else {
                return Ok(());
            };
            match self.durability {
                Durability::Auto | Durability::Syncfs => {}
                Durability::Fsync if open.is_complete => {
                    self.make_durable(&path, &open.file)?;
                    lock(&self.files).sealed.insert(path);
                }
                Durability::Fsync => self.disk.sync_file(&path, &open.file)?,
            }
        }
    }
}

impl Files {
    fn insert(&mut self, path: &Path, file: File) -> Arc<File> {
        self.uses += 1;
        let file = Arc::new(file);
        let open = OpenFile { file: Arc::clone(&file), last_use: self.uses, is_complete: false };
        self.open.insert(path.to_path_buf(), open);
        file
    }

    fn used(&mut self, path: &Path) -> Option<Arc<File>> {
        self.uses += 1;
        let open = self.open.get_mut(path)?;
        open.last_use = self.uses;
        Some(Arc::clone(&open.file))
    }

    /// Takes the least recently used file, if `limit` files are open.
    fn take_least_recently_used(&mut self, limit: usize) -> Option<(PathBuf, OpenFile)> {
        if self.open.len() < limit {
            return None;
        }
        let oldest = self.open.iter().min_by_key(|(_, open)| open.last_use)?.0.clone();
        self.open.remove_entry(&oldest)
    }
}

#[cfg(test)]
mod tests;
