//! Ingests: how anything gets into the store.
//!
//! The order of the steps in [`Ingest::commit`] is what makes the store's first promise true:
//! whatever happens at whatever moment, a file under its final name is complete and has its
//! digest, and a tag points only at a model that is whole. `docs/STORE-FORMAT.md` lists what
//! goes wrong, and on which file system, when a step is left out or moved.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use blobd_store_format::digest::Digest;
use blobd_store_format::layout;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::recipe::Recipe;
use blobd_store_format::reference::Reference;

use super::leases::Lease;
use super::staged::{StagedBlob, StagedWriter};
use super::{Store, StoreError, disk};

/// One transaction: blobs and recipes are staged, then committed together with the tag that
/// needs them. Dropped without a commit, it leaves nothing behind.
#[derive(Debug)]
#[must_use]
pub struct Ingest {
    store: Arc<Store>,
    lease: Lease,
    staging: Staging,
    /// Opened before the first write: only then does `syncfs` report what went wrong since.
    directory_fd: File,
    new: BTreeMap<Digest, StagedBlob>,
    recipes: BTreeMap<Digest, Recipe>,
    new_bytes: u64,
    reused_bytes: u64,
}

/// Where a transaction writes. Its clones may be used by several threads.
#[derive(Clone, Debug)]
pub struct Staging {
    directory: Arc<PathBuf>,
    next_file: Arc<AtomicU64>,
}

impl Staging {
    /// Starts a blob of `size` bytes.
    ///
    /// # Errors
    /// [`StoreError::Io`].
    pub fn stage(&self, size: u64) -> Result<StagedWriter, StoreError> {
        let number = self.next_file.fetch_add(1, Ordering::Relaxed);
        StagedWriter::create(self.directory.join(number.to_string()), size)
    }
}

/// What a transaction did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Committed {
    /// The length of the blobs that were written.
    pub new_bytes: u64,
    /// How many those are.
    pub new_blob_count: u64,
    /// The length of what was staged and turned out to be there already.
    pub reused_bytes: u64,
}

impl Ingest {
    /// Starts a transaction. Everything it stages is pinned by `lease` until it ends.
    ///
    /// # Errors
    /// [`StoreError::Io`].
    pub fn begin(store: &Arc<Store>, lease: Lease) -> Result<Self, StoreError> {
        let directory = store.new_staging_dir()?;
        let directory_fd = File::open(&directory).map_err(StoreError::io("open directory", &directory))?;
        Ok(Self {
            store: Arc::clone(store),
            lease,
            staging: Staging { directory: Arc::new(directory), next_file: Arc::default() },
            directory_fd,
            new: BTreeMap::new(),
            recipes: BTreeMap::new(),
            new_bytes: 0,
            reused_bytes: 0,
        })
    }

    /// The store that the transaction is part of.
    #[must_use]
    pub const fn store(&self) -> &Arc<Store> {
        &self.store
    }

    /// The lease that protects what the transaction needs.
    pub const fn lease(&self) -> &Lease {
        &self.lease
    }

    /// Where its blobs are written.
    #[must_use]
    pub fn staging(&self) -> Staging {
        self.staging.clone()
    }

    /// Takes a finished blob. One that the store or this transaction has already is dropped at
    /// once, so that the disk never holds more than is new.
    ///
    /// # Errors
    /// [`StoreError::Io`].
    pub fn add_blob(&mut self, blob: StagedBlob) -> Result<Digest, StoreError> {
        let digest = blob.digest;
        // Before the look whether it exists: a collection could delete it between look and pin.
        self.lease.pin(digest);
        let present = self.new.contains_key(&digest) || self.store.blob_size(digest)? == Some(blob.size);
        if present {
            self.reused_bytes += blob.size;
            disk::remove_file(&blob.path)?;
        } else {
            self.new_bytes += blob.size;
            self.new.insert(digest, blob);
        }
        Ok(digest)
    }

    /// Stages and takes a blob that is in memory.
    ///
    /// # Errors
    /// [`StoreError::Io`].
    pub fn add_bytes(&mut self, bytes: &[u8]) -> Result<Digest, StoreError> {
        let mut writer = self.staging.stage(bytes.len() as u64)?;
        if !bytes.is_empty() {
            writer.write_at(0, bytes)?;
        }
        self.add_blob(writer.finish()?)
    }

    /// Takes a recipe whose blobs have been added or are in the store.
    pub fn add_recipe(&mut self, recipe: Recipe) {
        self.lease.pin(recipe.file());
        self.lease.pin_all(recipe.digests());
        self.recipes.insert(recipe.file(), recipe);
    }

    /// The blobs and the recipes that a commit would add.
    pub(crate) fn staged(&self) -> (BTreeSet<Digest>, BTreeSet<Digest>) {
        (self.new.keys().copied().collect(), self.recipes.keys().copied().collect())
    }

    /// Makes everything durable and visible, the tag last.
    ///
    /// A failure before the tag is written leaves at most blobs that no tag needs: the next
    /// collection takes them. An error of a sync is final, because the kernel reports it once
    /// and a second try would succeed with the data gone.
    ///
    /// # Errors
    /// [`StoreError::Io`]; [`StoreError::MissingBlob`] or [`StoreError::BlobSize`] when the
    /// model would not be whole.
    pub fn commit(
        mut self,
        reference: &Reference,
        manifest: &Manifest,
        origin: Option<&str>,
    ) -> Result<Committed, StoreError> {
        let new_blob_count = self.new.len() as u64;
        // Content before names: a name that survives a crash without its content is a torn blob.
        self.sync_content()?;
        self.publish_blobs()?;
        self.publish_recipes()?;
        self.lease.pin(manifest.digest());
        self.lease.pin_all(manifest.digests());
        let _tags = self.store.lock_tags();
        let mut checked = BTreeSet::new();
        for file in manifest.files().filter(|file| checked.insert(file.digest)) {
            if let Some(lack) = self.store.check_file(file)? {
                return Err(lack);
            }
        }
        let temporary = self.staging.directory.join("tag");
        if let Some(origin) = origin {
            self.store.write_origin(&temporary, manifest.digest(), origin)?;
        }
        let stored = self.store.stored_case(reference)?;
        // The commit point: before it the model does not exist, after it it is whole.
        self.store.write_tag(&temporary, stored.as_ref().unwrap_or(reference), manifest)?;
        Ok(Committed { new_bytes: self.new_bytes, new_blob_count, reused_bytes: self.reused_bytes })
    }

    /// Makes the blobs alone durable and visible: those of a repair, which a tag needs already.
    /// What no tag needs is the next collection's. Recipes are not committed.
    ///
    /// # Errors
    /// [`StoreError::Io`].
    pub(crate) fn commit_blobs(mut self) -> Result<(), StoreError> {
        self.sync_content()?;
        self.publish_blobs()
    }

    /// A few files are synced one by one, since `syncfs` would also write what others have
    /// dirtied on the file system; from about eight on it is several times cheaper.
    fn sync_content(&self) -> Result<(), StoreError> {
        const SYNCFS_FROM: usize = 8;
        if self.new.len() < SYNCFS_FROM {
            return self.new.values().try_for_each(|blob| disk::sync_file(&blob.path));
        }
        rustix::fs::syncfs(&self.directory_fd).map_err(StoreError::errno("sync", &*self.staging.directory))
    }

    /// The directory is synced even when every blob was there already: the transaction that
    /// published them may not have come that far yet.
    fn publish_blobs(&mut self) -> Result<(), StoreError> {
        for (digest, blob) in std::mem::take(&mut self.new) {
            let target = self.store.path(layout::blob(digest));
            if !disk::publish(&blob.path, &target)? {
                self.settle_duplicate(&blob)?;
            }
        }
        disk::sync_dir(&self.store.path(layout::BLOBS))
    }

    /// Another transaction was faster, or what lies there is damaged: a blob of the wrong length
    /// is replaced, and whoever has mapped it keeps the old file.
    fn settle_duplicate(&self, blob: &StagedBlob) -> Result<(), StoreError> {
        if self.store.blob_size(blob.digest)? == Some(blob.size) {
            return disk::remove_file(&blob.path).map(|_freed| ());
        }
        let target = self.store.path(layout::blob(blob.digest));
        fs::rename(&blob.path, &target).map_err(StoreError::io("replace", target))
    }

    fn publish_recipes(&mut self) -> Result<(), StoreError> {
        let temporary = self.staging.directory.join("recipe");
        for (file, recipe) in std::mem::take(&mut self.recipes) {
            let target = self.store.path(layout::recipe(file));
            disk::replace_file(&temporary, &target, &recipe.to_json(), 0o444)?;
            self.store.forget_recipe(file);
        }
        disk::sync_dir(&self.store.path(layout::RECIPES))
    }
}

impl Drop for Ingest {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&*self.staging.directory) {
            tracing::warn!(
                "{}: cannot remove: {error}; it goes at the next start",
                self.staging.directory.display()
            );
        }
    }
}
