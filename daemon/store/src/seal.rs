//! Between a file that is written and its name: what makes the content durable.
//!
//! Every file that is to become a blob is written through a descriptor from here, whatever way its
//! bytes come: an import, a repair or small files in `staging/`, a pull in `partial/`, whoever
//! wrote the first of them. [`WrittenFiles::seal`] is the only place where a [`DurableBlob`] is
//! made, and only a [`DurableBlob`] can be published.
//!
//! A descriptor that has written is kept until what it wrote is durable. The kernel reports a write
//! that failed to descriptors that were open then; when none was, it may forget the failure with
//! the file's pages, and an `fsync` through a later descriptor succeeds although bytes are lost.
//! Descriptors are few, so one may have to be closed before: in mode `fsync` what it wrote is
//! synced first; in the others the group of such a file is synced by `syncfs`, through a descriptor
//! that was opened before the transaction wrote anything.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use blobd_store_format::digest::Digest;

use super::disk::GuardedDisk;
use super::filesystem::Durability;
use super::reservation::Reservation;
use super::{StoreError, lock};

/// The mode of a blob.
const READ_ONLY: u32 = 0o444;

/// The files that a transaction has written and not published.
#[derive(Debug)]
pub(super) struct WrittenFiles {
    disk: GuardedDisk,
    durability: Durability,
    /// The transaction's directory, for `syncfs`. Opened before the first write: only then does
    /// `syncfs` report what went wrong since.
    directory_fd: File,
    directory: PathBuf,
    files: Mutex<Files>,
    /// Held while single files are synced. Of two that sync one file only the first is told of an
    /// error; the other must not publish it before the first has ended all changes.
    syncing: Mutex<()>,
}

#[derive(Debug, Default)]
struct Files {
    open: BTreeMap<PathBuf, OpenFile>,
    /// Those that were sealed ahead of their group and are closed.
    sealed: BTreeSet<PathBuf>,
    /// Counts the uses, so that the file is closed that nobody has used for the longest time.
    uses: u64,
}

#[derive(Debug)]
struct OpenFile {
    file: Arc<File>,
    last_use: u64,
    /// Nothing more is written to it.
    is_complete: bool,
}

/// A blob that is completely written: content hashed, not yet durable.
#[derive(Debug)]
pub struct StagedBlob {
    /// Where it lies in the store.
    pub(super) path: PathBuf,
    /// The SHA-256 of its bytes.
    pub digest: Digest,
    /// How many they are.
    pub size: u64,
    /// The space it takes, until it is removed or published.
    pub(super) reservation: Reservation,
}

/// A blob whose content is durable and read-only: it may get its name.
#[derive(Debug)]
pub(super) struct DurableBlob(StagedBlob);

impl DurableBlob {
    /// The blob, to be published.
    pub(super) fn into_blob(self) -> StagedBlob {
        self.0
    }
}

impl WrittenFiles {
    /// None yet, of a transaction with this directory.
    pub(super) fn new(
        disk: GuardedDisk,
        durability: Durability,
        directory_fd: File,
        directory: PathBuf,
    ) -> Self {
        let (files, syncing) = (Mutex::default(), Mutex::default());
        Self { disk, durability, directory_fd, directory, files, syncing }
    }

    /// Takes a file that has just been created, for writing.
    pub(super) fn add(&self, path: &Path, file: File) -> Result<Arc<File>, StoreError> {
        self.close_the_oldest()?;
        let mut files = lock(&self.files);
        files.sealed.remove(path);
        Ok(files.insert(path, file))
    }

    /// The descriptor through which a file is written. One that was created by another session is
    /// opened here, before it is read: what of it is not on disk yet will be reported to this one.
    pub(super) fn writer(&self, path: &Path) -> Result<Arc<File>, StoreError> {
        if let Some(file) = lock(&self.files).used(path) {
            return Ok(file);
        }
        self.add(path, self.disk.open_file(path)?)
    }

    /// Nothing more is written to a file: it may be sealed ahead of its group.
    pub(super) fn complete(&self, path: &Path) {
        if let Some(open) = lock(&self.files).open.get_mut(path) {
            open.is_complete = true;
        }
    }

    /// A file has another name by now, or none.
    pub(super) fn forget(&self, path: &Path) {
        let mut files = lock(&self.files);
        files.sealed.remove(path);
        files.open.remove(path);
    }

    /// Makes the content of finished blobs durable, in the way that is configured, and read-only.
    ///
    /// A few are synced one by one, since `syncfs` would also write what others have dirtied on
    /// the file system; from about eight on it is several times cheaper.
    pub(super) fn seal(&self, blobs: Vec<StagedBlob>) -> Result<Vec<DurableBlob>, StoreError> {
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

    /// Seals a file by itself, unless that was done when it was closed.
    fn seal_file(&self, path: &Path) -> Result<(), StoreError> {
        let _syncing = lock(&self.syncing);
        if lock(&self.files).sealed.contains(path) {
            return Ok(());
        }
        // If it was closed, all that was written through closed descriptors was synced then.
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

    /// Read-only before the sync and the rename: a crash after those must not leave a writable blob.
    fn make_durable(&self, path: &Path, file: &File) -> Result<(), StoreError> {
        self.disk.set_mode(path, file, READ_ONLY)?;
        self.disk.sync_file(path, file)
    }

    fn has_all_open(&self, blobs: &[StagedBlob]) -> bool {
        let files = lock(&self.files);
        blobs.iter().all(|blob| files.open.contains_key(&blob.path))
    }

    /// Makes room for one more descriptor.
    fn close_the_oldest(&self) -> Result<(), StoreError> {
        const MAX_OPEN: usize = 64;
        loop {
            let _syncing = (self.durability == Durability::Fsync).then(|| lock(&self.syncing));
            let Some((path, open)) = lock(&self.files).take_oldest(MAX_OPEN) else { return Ok(()) };
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

    /// The file that nobody has used for the longest time, if there are `limit` of them.
    fn take_oldest(&mut self, limit: usize) -> Option<(PathBuf, OpenFile)> {
        if self.open.len() < limit {
            return None;
        }
        let oldest = self.open.iter().min_by_key(|(_, open)| open.last_use)?.0.clone();
        self.open.remove_entry(&oldest)
    }
}

#[cfg(test)]
mod tests;
