//! The store: a directory of digest-named blobs, the recipes and manifests that give them
//! meaning, and the rules by which they appear and disappear.
//!
//! What it promises: a file under its final name is complete, durable and has its digest, and a
//! tag points only at a model that is whole ([`Ingest::commit`]); what a lease pins is not
//! collected ([`leases`]). The form on disk is `docs/STORE-FORMAT.md`. What
//! may be deleted is decided in [`crate::gc`], not here.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{Seek as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};

use blobd_store_format::digest::Digest;
use blobd_store_format::layout;
use blobd_store_format::recipe::Recipe;

mod blobs;
mod condemned;
pub mod disk;
mod error;
mod filesystem;
mod home;
pub mod index;
mod ingest;
pub mod leases;
mod models;
mod outlines;
mod own_reads;
mod partial;
mod pins;
mod quarantine;
mod reserve;
mod seal;
mod space;
mod staged;
mod staging;
mod summaries;
mod tags;
mod trash;

pub use error::StoreError;
pub use filesystem::{Durability, FileSystem};
pub use home::{FORMAT, LockHolder};
pub use ingest::{Committed, Ingest};
pub use models::{Model, StoredFile, StoredForm};
pub use partial::{Extents, Partial, PartialDownload, PartialFile};
pub use space::{Eviction, SpacePolicy};
pub use staged::{StagedBlob, StagedFile, StagedHash, StagedWriter};
pub use staging::Staging;
pub use summaries::{ManifestSummary, TagSummary};
pub use tags::Tags;
pub use trash::TrashedModel;

use condemned::Condemned;
use disk::{Disk, GuardedDisk, KernelDisk};
use leases::Leases;
use space::Space;
use staging::Room;

/// How a store is opened.
#[derive(Clone, Debug)]
pub struct StoreOptions {
    /// How the content of new blobs is made durable.
    pub durability: Durability,
    /// How much of the disk the store may take.
    pub space: SpacePolicy,
    /// What it writes to.
    pub disk: Arc<dyn Disk>,
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self { durability: Durability::default(), space: SpacePolicy::default(), disk: Arc::new(KernelDisk) }
    }
}

/// Frees what it can when something does not fit.
pub trait MakeRoom: std::fmt::Debug + Send + Sync {
    /// Tries to make room for `bytes`, all or nothing; says whether to try again.
    ///
    /// # Errors
    /// [`StoreError`].
    fn make_room(&self, bytes: u64) -> Result<bool, StoreError>;
}

/// An open store. One process has it open at a time.
#[derive(Debug)]
pub struct Store {
    root: PathBuf,
    disk: GuardedDisk,
    file_system: FileSystem,
    durability: Durability,
    space: Space,
    index: index::StoreIndex,
    summaries: summaries::Summaries,
    room_maker: OnceLock<Box<dyn MakeRoom>>,
    /// `blobs/`, open.
    blobs: File,
    leases: Leases,
    recipes: models::RecipeCache,
    damaged: quarantine::DamagedBlobs,
    /// Held while a tag changes, so that a check and the change it allows belong together.
    tag_changes: Mutex<()>,
    /// Held while blobs are deleted: one collection at a time.
    collections: Mutex<()>,
    condemned: Condemned,
    own_reads: own_reads::OwnReads,
    future_records: trash::FutureRecords,
    next_transaction: AtomicU64,
    /// The transactions that are in progress, by the names of their directories.
    transactions: Mutex<BTreeSet<String>>,
    lock: Mutex<File>,
}

impl Store {
    /// Opens the store in `root` as [`Self::open_with`] does, with the options' defaults.
    ///
    /// # Errors
    /// As for [`Self::open_with`].
    pub fn open(root: impl Into<PathBuf>) -> Result<Self, StoreError> {
        Self::open_with(root, StoreOptions::default())
    }

    /// Opens the store in `root`, or makes one there if the directory is empty or absent.
    /// Removes what transactions that died left in `staging/`.
    ///
    /// # Errors
    /// [`StoreError::Locked`] when another process has it, [`StoreError::NewerFormat`] when it
    /// was written by a later blobd (nothing is touched then), [`StoreError::NotAStore`],
    /// [`StoreError::Io`].
    pub fn open_with(root: impl Into<PathBuf>, options: StoreOptions) -> Result<Self, StoreError> {
        let root = root.into();
        let disk = GuardedDisk::new(options.disk);
        let lock = home::enter(&root, &disk)?;
        for name in DIRECTORIES {
            disk.create_dir_all(&root, Path::new(name))?;
        }
        let blobs = root.join(layout::BLOBS);
        let blobs = File::open(&blobs).map_err(StoreError::io("open directory", blobs))?;
        let file_system = FileSystem::of(&root)?;
        let durability = options.durability.on(file_system);
        let space = Space::new(root.clone(), options.space)?;
        let damaged = quarantine::DamagedBlobs::load(&root)?;
        let store = Self {
            index: index::StoreIndex::new(root.clone(), file_system),
            summaries: summaries::Summaries::default(),
            root,
            disk,
            file_system,
            durability,
            space,
            room_maker: OnceLock::new(),
            blobs,
            leases: Leases::default(),
            recipes: models::RecipeCache::default(),
            damaged,
            tag_changes: Mutex::default(),
            collections: Mutex::default(),
            condemned: Condemned::default(),
            own_reads: own_reads::OwnReads::default(),
            future_records: trash::FutureRecords::default(),
            next_transaction: AtomicU64::new(0),
            transactions: Mutex::default(),
            lock: Mutex::new(lock),
        };
        store.sweep_staging()?;
        store.announce(None)?;
        Ok(store)
    }

    /// Where the store is.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The leases that protect its content.
    #[must_use]
    pub const fn leases(&self) -> &Leases {
        &self.leases
    }

    /// Tells other processes, through the lock file, who serves this store.
    ///
    /// # Errors
    /// [`StoreError::Io`].
    pub fn announce(&self, socket: Option<&Path>) -> Result<(), StoreError> {
        let holder = LockHolder { pid: std::process::id(), socket: socket.map(Path::to_path_buf) };
        let path = self.root.join(layout::LOCK_FILE);
        let mut lock = lock(&self.lock);
        let mut rewrite = || {
            lock.set_len(0)?;
            lock.rewind()?;
            lock.write_all(&serde_json::to_vec(&holder)?)
        };
        rewrite().map_err(StoreError::io("write", path))
    }

    /// Holds off other changes of tags.
    pub(crate) fn lock_tags(&self) -> MutexGuard<'_, ()> {
        lock(&self.tag_changes)
    }

    /// Holds off other collections.
    pub(crate) fn lock_collections(&self) -> MutexGuard<'_, ()> {
        lock(&self.collections)
    }

    /// The same unless one runs, or is planned, now.
    pub(crate) fn try_lock_collections(&self) -> Option<MutexGuard<'_, ()>> {
        match self.collections.try_lock() {
            Ok(alone) => Some(alone),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// The directory of all blobs.
    fn blobs_directory(&self) -> &File {
        &self.blobs
    }

    pub(crate) fn path(&self, relative: impl AsRef<Path>) -> PathBuf {
        self.root.join(relative)
    }

    /// Why nothing can be changed any more, if that is so: a sync has failed.
    #[must_use]
    pub fn read_only_reason(&self) -> Option<&str> {
        self.disk.failure()
    }

    /// How much of the disk the store may take.
    #[must_use]
    pub const fn space_policy(&self) -> &SpacePolicy {
        self.space.policy()
    }

    /// What the store takes on disk, in bytes, work in progress included.
    #[must_use]
    pub fn used_bytes(&self) -> u64 {
        self.space().used_bytes()
    }

    /// How much more than there is a need of `bytes` takes; 0 if it fits.
    #[must_use]
    pub fn shortage(&self, bytes: u64) -> u64 {
        self.space().shortage(bytes)
    }

    /// Whether models may be evicted when something does not fit.
    #[must_use]
    pub fn can_make_room(&self) -> bool {
        self.space_policy().eviction != Eviction::Never
    }

    /// From now on `maker` is asked when something does not fit. It can be set once.
    pub fn set_room_maker(&self, maker: Box<dyn MakeRoom>) {
        // A second one has nothing to add: there is one policy.
        let _ = self.room_maker.set(maker);
    }

    /// Collects these soon if nothing needs them: see [`crate::gc::collect_condemned`].
    pub fn condemn(&self, digests: impl IntoIterator<Item = Digest>) {
        self.condemned.add(digests);
    }

    /// Whether anything is condemned.
    pub(crate) fn has_condemned(&self) -> bool {
        !self.condemned.is_empty()
    }

    /// Whether a blob or recipe is condemned.
    pub(crate) fn is_condemned(&self, digest: Digest) -> bool {
        self.condemned.contains(digest)
    }

    /// Takes what is condemned.
    pub(crate) fn take_condemned(&self) -> BTreeSet<Digest> {
        self.condemned.take()
    }

    /// What changes the disk.
    pub(crate) const fn disk(&self) -> &GuardedDisk {
        &self.disk
    }

    fn space(&self) -> &Space {
        if self.space.is_uncounted() {
            // The catalog knows; without one the ledger looks at every file.
            let counted = self.catalog_now().map(|catalog| catalog.used_bytes());
            counted.into_iter().for_each(|bytes| self.space.count(bytes));
        }
        &self.space
    }

    const fn index(&self) -> &index::StoreIndex {
        &self.index
    }

    const fn durability(&self) -> Durability {
        self.durability
    }

    /// Tries something that takes room; if there is none, has room made for `bytes`, which may be
    /// more than this one step takes, and tries again.
    fn with_room<T>(&self, bytes: u64, attempt: impl Fn() -> Result<T, StoreError>) -> Result<T, StoreError> {
        /// Others may take what was made for this one, but not for ever.
        const MAX_TRIES: usize = 16;
        let mut tries = 0;
        loop {
            let refused = match attempt() {
                Err(error) if error.is_no_space() => error,
                other => return other,
            };
            let made = match self.room_maker.get() {
                Some(maker) if tries < MAX_TRIES => maker.make_room(bytes)?,
                _ => false,
            };
            if !made {
                return Err(refused.needing(bytes));
            }
            tries += 1;
        }
    }

    /// Enters a blob that has just been published into the books.
    fn note_blob_added(&self, digest: Digest, room: &mut Room) -> Result<(), StoreError> {
        self.note_blob(digest);
        room.settle(self.blob_bytes_on_disk(digest)?.unwrap_or_default());
        Ok(())
    }

    /// The same for one that is gone and took `bytes` on disk.
    pub(crate) fn note_blob_removed(&self, digest: Digest, bytes: u64) {
        self.note_blob(digest);
        self.space.freed(bytes);
    }

    /// Enters a recipe that has just been published and replaced one of `replaced` bytes on disk.
    fn note_recipe_added(&self, recipe: &Recipe, replaced: u64, room: &mut Room) -> Result<(), StoreError> {
        self.forget_recipe(recipe.file());
        self.note_recipe(recipe.file());
        self.space.freed(replaced);
        room.settle(self.file_bytes(&self.path(layout::recipe(recipe.file())))?.unwrap_or_default());
        Ok(())
    }

    /// The same for one that is gone.
    pub(crate) fn note_recipe_removed(&self, file: Digest, bytes: u64) {
        self.forget_recipe(file);
        self.note_recipe(file);
        self.space.freed(bytes);
    }

    /// What a file takes on disk, or `None` when it is not there.
    pub(crate) fn file_bytes(&self, path: &Path) -> Result<Option<u64>, StoreError> {
        let metadata = error::optional(fs::symlink_metadata(path), "inspect", path)?;
        Ok(metadata.map(|metadata| self.file_system.bytes_on_disk(&metadata)))
    }

    /// Writes a manifest or what is kept beside it, takes it out of `room` if any was taken, and
    /// enters it into the books. The caller makes the name durable.
    fn write_record(
        &self,
        temporary: &Path,
        target: &Path,
        content: &[u8],
        room: Option<Room>,
    ) -> Result<(), StoreError> {
        let replaced = self.file_bytes(target)?.unwrap_or_default();
        self.disk().replace_file(temporary, target, content, 0o644)?;
        self.space.freed(replaced);
        let bytes = self.file_bytes(target)?.unwrap_or_default();
        match room {
            Some(mut room) => room.settle(bytes),
            None => self.space.stored(0, bytes),
        }
        Ok(())
    }

    /// Removes what [`Self::write_record`] has written; returns what that frees, or `None` when it
    /// was not there.
    fn remove_record(&self, path: &Path) -> Result<Option<u64>, StoreError> {
        let bytes = self.file_bytes(path)?;
        let removed = self.disk().remove_file(path)?.and(bytes);
        self.space.freed(removed.unwrap_or_default());
        Ok(removed)
    }

    /// A name for a transaction's directory, which counts as in use from now on.
    fn new_transaction(&self) -> String {
        let number = self.next_transaction.fetch_add(1, Ordering::Relaxed);
        let name = format!("{}-{number}", std::process::id());
        lock(&self.transactions).insert(name.clone());
        name
    }

    fn end_transaction(&self, name: &str) {
        lock(&self.transactions).remove(name);
    }

    /// What lies in `staging/` and belongs to no transaction in progress: this process holds the
    /// lock, so whoever left it is dead, or could not remove it.
    pub(crate) fn abandoned_staging(&self) -> Result<Vec<PathBuf>, StoreError> {
        let mut paths = staging::directories(&self.path(layout::STAGING))?;
        // Looked up after the listing: a transaction is known before its directory exists.
        // And looked at after that: one that has ended meanwhile has removed its directory before.
        paths.retain(|path| !self.is_in_progress(path) && fs::symlink_metadata(path).is_ok());
        Ok(paths)
    }

    /// Whether this is the directory of a transaction that is not over.
    fn is_in_progress(&self, directory: &Path) -> bool {
        let name = directory.file_name().and_then(|name| name.to_str());
        name.is_some_and(|name| lock(&self.transactions).contains(name))
    }

    /// Removes what [`Self::abandoned_staging`] has found.
    pub(crate) fn remove_abandoned(&self, path: &Path) -> Result<(), StoreError> {
        if self.is_in_progress(path) {
            return Ok(());
        }
        // A link to a directory is a file: what it points to is none of ours.
        if fs::symlink_metadata(path).is_ok_and(|metadata| metadata.is_dir()) {
            self.disk.remove_dir_of_files(path)
        } else {
            self.disk.remove_file(path).map(|_freed| ())
        }
    }

    fn sweep_staging(&self) -> Result<(), StoreError> {
        for path in self.abandoned_staging()? {
            if let Err(error) = self.remove_abandoned(&path) {
                tracing::warn!("{error}; `blobd gc` tries again");
            }
        }
        Ok(())
    }
}

/// What every store has from the beginning.
const DIRECTORIES: [&str; 5] =
    [layout::BLOBS, layout::RECIPES, layout::MANIFESTS, layout::ORIGINS, layout::STAGING];

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // None of these locks guards memory that a panic could leave half changed.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
