//! A store of model weights: a directory of digest-named blobs, the recipes and manifests that give them
//! meaning, and the rules by which they appear and disappear.
//!
//! A file under its final name is complete, durable and has the digest in its name. A tag points only at a
//! model that is whole ([`Ingest::commit`]). What a lease protects is not collected ([`leases`], [`gc`]).
//! Damaged blobs are found and moved away, never used ([`scrub`]). `docs/STORE-FORMAT.md` is the form on disk.
//!
//! ```
//! use std::sync::Arc;
//!
//! use blobd_store::{Ingest, Store};
//! use blobd_store_format::descriptor::{Descriptor, MediaType};
//! use blobd_store_format::manifest::Manifest;
//!
//! let folder = tempfile::tempdir()?;
//! let store = Arc::new(Store::open(folder.path().join("store"))?);
//! let mut ingest = Ingest::begin(&store, store.leases().grant("an example"))?;
//! let mut stage = |bytes: &[u8], media_type| {
//!     let digest = ingest.add_bytes(bytes)?;
//!     Ok::<_, blobd_store::StoreError>(Descriptor {
//!         media_type: MediaType::new(media_type),
//!         digest,
//!         size: bytes.len() as u64,
//!     })
//! };
//! let config = stage(b"{}", MediaType::DOCKER_CONFIG)?;
//! let weights = stage(b"the weights", MediaType::OLLAMA_MODEL)?;
//! let digest = weights.digest;
//! ingest.commit(&"example".parse()?, &Manifest::compose(config, vec![weights])?, None)?;
//!
//! let blob = store.open_blob(digest, 0)?;
//! assert_eq!(std::io::read_to_string(blob)?, "the weights");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

// Files of the store are reached through its root alone, see `clippy.toml`.
#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};

use blobd_store_format::digest::Digest;
use blobd_store_format::layout;
use rustix::fs::FileType;

mod accounting;
mod assembler;
mod blobs;
mod condemned;
mod directories;
pub mod disk;
mod error;
mod filesystem;
pub mod gc;
mod home;
pub mod index;
mod ingest;
pub mod leases;
mod lock_file;
mod models;
mod outlines;
mod own_reads;
mod pins;
mod place;
mod quarantine;
mod rate;
mod reader;
mod recipe_cache;
mod reservation;
mod reserve;
mod root;
pub mod scrub;
mod seal;
mod space;
mod staging;
mod summaries;
mod sys;
mod tags;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod trash;

pub use assembler::{
    Assembler, BlobSink, BlobWriter, CHUNK_BYTES, HashedFile, PartialDownload, PartialFile, ReadAt,
};
pub use error::StoreError;
pub use filesystem::{Durability, FileSystem};
pub use home::FORMAT;
pub use ingest::{Committed, Ingest};
pub use lock_file::LockHolder;
pub use models::{Model, StoredFile};
pub use place::Place;
pub use rate::RateLimiter;
pub use reader::FileReader;
pub use root::FileStatus;
pub use seal::StagedBlob;
pub use space::{Eviction, SpacePolicy};
pub use staging::Staging;
pub use summaries::{ManifestSummary, TagSummary};
pub use sys::give_back_memory;
pub use tags::Tags;
pub use trash::TrashedModel;

use condemned::Condemned;
use disk::{Disk, GuardedDisk, KernelDisk};
use leases::Leases;
use root::{Directory, Entry, OPEN_DIRECTORY, Root};
use space::Space;

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
    root: Root,
    disk: GuardedDisk,
    file_system: FileSystem,
    durability: Durability,
    space: Space,
    index: Arc<index::StoreIndex>,
    summaries: summaries::Summaries,
    room_maker: OnceLock<Box<dyn MakeRoom>>,
    /// `blobs/`, open since it was first needed.
    blobs: OnceLock<Directory>,
    leases: Leases,
    recipes: recipe_cache::RecipeCache,
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
    /// None if the store cannot be written to and has no lock file.
    lock: Option<File>,
    /// The directories without which nothing is collected.
    essential: Vec<&'static str>,
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
        let root = home::open_root(&root.into())?;
        let disk = GuardedDisk::new(options.disk, root.clone());
        let home = home::enter(&root, &disk)?;
        let file_system = FileSystem::of(&root)?;
        let durability = options.durability.on(file_system);
        let space = Space::new(root.clone(), options.space)?;
        let damaged = quarantine::DamagedBlobs::load(&root);
        let store = Self {
            index: index::StoreIndex::new(root.clone(), file_system),
            summaries: summaries::Summaries::default(),
            root,
            disk,
            file_system,
            durability,
            space,
            room_maker: OnceLock::new(),
            blobs: OnceLock::new(),
            leases: Leases::default(),
            recipes: recipe_cache::RecipeCache::default(),
            damaged,
            tag_changes: Mutex::default(),
            collections: Mutex::default(),
            condemned: Condemned::default(),
            own_reads: own_reads::OwnReads::default(),
            future_records: trash::FutureRecords::default(),
            next_transaction: AtomicU64::new(0),
            transactions: Mutex::default(),
            lock: home.lock,
            essential: home.essential,
        };
        store.announce(None);
        store.sweep_staging();
        Ok(store)
    }

    /// Where the store is.
    #[must_use]
    pub fn place(&self) -> Place {
        self.root.place()
    }

    /// The leases that protect its content.
    #[must_use]
    pub const fn leases(&self) -> &Leases {
        &self.leases
    }

    /// Tells other processes, through the lock file, who serves this store. They find it by that if
    /// they are given the store and not the socket; without it nothing is lost but the way there.
    pub fn announce(&self, socket: Option<&Path>) {
        let Some(lock) = self.lock.as_ref().filter(|_| self.read_only_reason().is_none()) else { return };
        let holder = LockHolder { pid: std::process::id(), socket: socket.map(Path::to_path_buf) };
        if let Err(error) = lock_file::write_holder(lock, &holder) {
            let path = self.root.full(layout::LOCK_FILE);
            tracing::warn!("{}: cannot note who holds the store: {error}", path.display());
        }
    }

    /// Holds off other changes of tags.
    pub fn lock_tags(&self) -> MutexGuard<'_, ()> {
        lock(&self.tag_changes)
    }

    /// Holds off other collections.
    pub fn lock_collections(&self) -> MutexGuard<'_, ()> {
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
    fn blobs_directory(&self) -> Result<&Directory, StoreError> {
        if let Some(blobs) = self.blobs.get() {
            return Ok(blobs);
        }
        let opened = self.existing_directory(layout::BLOBS)?;
        Ok(self.blobs.get_or_init(|| opened))
    }

    /// Where something in the store lies, for tests that look at it from outside.
    #[cfg(test)]
    pub(crate) fn path(&self, relative: impl AsRef<Path>) -> PathBuf {
        self.root.full(relative).path().to_path_buf()
    }

    /// What kind of file system the store lies on.
    #[must_use]
    pub const fn file_system(&self) -> FileSystem {
        self.file_system
    }

    /// What the root directory says about itself.
    ///
    /// # Errors
    /// [`StoreError::Io`].
    pub fn root_status(&self) -> Result<FileStatus, StoreError> {
        FileStatus::of(self.root.directory_file()).map_err(StoreError::io("inspect", self.place()))
    }

    /// What is free on the file system for a user without privileges, in bytes.
    ///
    /// # Errors
    /// [`StoreError::Io`].
    pub fn free_bytes(&self) -> Result<u64, StoreError> {
        self.root.free_bytes()
    }

    /// What unfinished work takes on disk, in bytes: transactions and downloads.
    #[must_use]
    pub fn unfinished_bytes(&self) -> u64 {
        let [staging, partial] =
            [layout::STAGING, layout::PARTIAL].map(|name| self.root.tree_bytes(Path::new(name)));
        staging.saturating_add(partial)
    }

    /// What damaged blobs that were put aside take on disk, in bytes.
    #[must_use]
    pub fn quarantine_bytes(&self) -> u64 {
        self.root.tree_bytes(Path::new(layout::QUARANTINE))
    }

    /// What the background verification has left on record about how far it is; `None` if nothing.
    ///
    /// # Errors
    /// [`StoreError::UnexpectedFile`], [`StoreError::Io`].
    pub(crate) fn scrub_record(&self) -> Result<Option<Vec<u8>>, StoreError> {
        const MAX_BYTES: u64 = 4096;
        self.root.read_limited(Path::new(layout::SCRUB_FILE), MAX_BYTES)
    }

    /// Replaces that record. It is not durable at once.
    ///
    /// # Errors
    /// [`StoreError::Io`].
    pub(crate) fn set_scrub_record(&self, content: &[u8]) -> Result<(), StoreError> {
        let path = Path::new(layout::SCRUB_FILE);
        self.disk.replace_file(&path.with_extension("json.new"), path, content, 0o644)
    }

    /// How large the file system is, in bytes.
    ///
    /// # Errors
    /// [`StoreError::Io`].
    pub fn capacity_bytes(&self) -> Result<u64, StoreError> {
        self.root.capacity_bytes()
    }

    /// Makes everything durable that has been changed so far, whoever changed it.
    pub(crate) fn sync_everything(&self) -> Result<(), StoreError> {
        let path = Path::new("");
        // One that was open before would tell of failures that are none of the store's.
        let root = self.root.try_open_directory(path).map_err(self.root.failure(OPEN_DIRECTORY, path))?;
        self.disk.sync_file_system(&root, path)
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
    pub fn has_condemned(&self) -> bool {
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

    /// What lies in `staging/` and belongs to no transaction in progress, with what it takes on disk:
    /// this process holds the lock, so whoever left it is dead, or could not remove it.
    pub(crate) fn abandoned_staging(&self) -> Result<Vec<(OsString, u64)>, StoreError> {
        let Some(staging) = self.root.find_directory(Path::new(layout::STAGING))? else {
            return Ok(Vec::new());
        };
        let mut abandoned = Vec::new();
        for entry in staging.entries()? {
            let Entry { name, kind, .. } = entry?;
            // Looked up after the listing: a transaction is known before its directory exists.
            if self.is_in_progress(&name) {
                continue;
            }
            // And looked at after that: one that has ended meanwhile has removed its directory before.
            let Some(status) = staging.status(&name)? else { continue };
            let below = match kind {
                FileType::Directory => staging.find_directory(&name)?.map(|directory| directory.tree_bytes()),
                _ => None,
            };
            abandoned.push((name, status.allocated_bytes().saturating_add(below.unwrap_or_default())));
        }
        Ok(abandoned)
    }

    /// Whether this is the directory of a transaction that is not over.
    fn is_in_progress(&self, name: &OsStr) -> bool {
        name.to_str().is_some_and(|name| lock(&self.transactions).contains(name))
    }

    /// Removes what [`Self::abandoned_staging`] has found.
    pub(crate) fn remove_abandoned(&self, name: &OsStr) -> Result<(), StoreError> {
        if self.is_in_progress(name) {
            return Ok(());
        }
        let path = Path::new(layout::STAGING).join(name);
        match self.root.status(&path)? {
            Some(status) if status.is_dir() => self.disk.remove_tree(&path),
            Some(_) => self.disk.remove_file(&path).map(drop),
            None => Ok(()),
        }
    }

    /// Whatever goes wrong, `gc` tries again and says so.
    fn sweep_staging(&self) {
        if self.read_only_reason().is_some() {
            return;
        }
        let warn = |error| tracing::warn!("{error}; `blobd gc` tries again");
        match self.abandoned_staging() {
            Err(error) => warn(error),
            Ok(abandoned) => {
                let swept = abandoned.iter().filter_map(|(name, _)| self.remove_abandoned(name).err());
                swept.for_each(warn);
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // None of these locks guards memory that a panic could leave half changed.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
