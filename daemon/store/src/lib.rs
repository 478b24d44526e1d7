//! A store of model weights: a directory of digest-named blobs, with the recipes and manifests that make
//! models of them.
//!
//! A file under its final name is complete, durable and has the digest in its name. A tag points only at a
//! complete model ([`Ingest::commit`]). Leased digests are not collected ([`leases`], [`gc`]). Damaged
//! blobs are moved to quarantine and never used ([`scrub`]). `docs/STORE-FORMAT.md` describes the files.
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

// Files of the store are opened only through its root, see `clippy.toml`.
// These macros panic if the descriptor cannot be written, such as a closed pipe.
#![warn(clippy::print_stdout, clippy::print_stderr)]
#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

use std::borrow::Cow;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock, PoisonError, TryLockError};

use blobd_store_format::layout;
use tracing_mutex::stdsync::{Mutex, MutexGuard};

mod accounting;
mod assembler;
mod blobs;
mod bounded_read;
mod charge_limit;
mod charges;
mod counts;
mod deferred_deletion;
mod direct;
mod directories;
pub mod disk;
mod error;
mod filesystem;
pub mod gc;
mod glance;
mod history;
pub mod index;
mod ingest;
mod internal_reads;
pub mod leases;
mod lock_file;
mod lower;
mod make_space;
mod models;
mod name_rule;
mod node;
mod origins;
mod other_files;
mod outlines;
mod owner;
mod pins;
mod place;
mod quarantine;
mod rate;
mod reader;
mod recipe_cache;
mod reservation;
mod reserve;
mod resolve;
mod root;
pub mod scrub;
mod seal;
mod space;
mod staging;
mod store_dir;
mod summaries;
mod surroundings;
mod sys;
mod tag_names;
mod tags;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod transactions;
mod trash;

pub use assembler::{
    Assembler, BlobSink, BlobWriter, BytesFrom, CHUNK_BYTES, CHUNKS_IN_USE, Difference, Differences,
    DownloadAbout, DownloadSummary, HashedFile, PartialDownload, PartialFile, RangeSource,
};
pub use bounded_read::{fill, read_uninterrupted};
pub use charge_limit::{ChargeLimit, Members, Payer, Pool};
pub use charges::UserCharge;
pub use counts::StoreEvents;
pub use error::StoreError;
pub use filesystem::{Durability, FileSystem};
pub use glance::Glance;
pub use history::{Account, Actor, HistoryEntry, HistoryRow, NameHistory, NameOrigin, Verb};
pub use ingest::{Committed, Ingest, NewName};
pub use lock_file::{CommandState, LockHolder};
pub use lower::{HeldLowerStores, LowerStatus};
pub use make_space::{EvictionObserver, MakeSpace};
pub use models::{Model, NamedFile, StoredFile};
pub use name_rule::{NameRule, NameUser};
pub use origins::FileVersion;
pub use other_files::OtherFiles;
pub use outlines::OpenRecipe;
pub use owner::{RUN_OUTSIDE, StoreOwner};
pub use pins::Pinner;
pub use place::Place;
pub use quarantine::QuarantinedBlob;
pub use rate::RateLimiter;
pub use reader::FileReader;
pub use root::FileStatus;
pub use seal::StagedBlob;
pub use space::{AvailableSpace, Eviction, SpacePolicy, SpaceStatus};
pub use staging::Staging;
pub use store_dir::FORMAT;
pub use summaries::{ListingSize, ManifestSummary, TagSummary};
pub use surroundings::{ForeignGroup, ForeignOwner, Inodes, Mount, Ownership, WrongGroups};
pub use sys::{FileIdentity, give_back_memory};
pub use tags::Tags;
pub use trash::{Displaced, TrashedModel};

use deferred_deletion::DeferredDeletion;
use disk::{Disk, GuardedDisk, KernelDisk, is_disk_failure};
use leases::Leases;
use root::{Directory, OPEN_DIRECTORY, Root};
use space::Space;
use store_dir::MOUNTED_READ_ONLY;
use transactions::Transactions;

/// Options for [`Store::open_with`].
#[derive(Clone, Debug)]
pub struct StoreOptions {
    /// How the content of new blobs is made durable.
    pub durability: Durability,
    /// How much of the disk the store may use.
    pub space: SpacePolicy,
    /// The disk that it writes to.
    pub disk: Arc<dyn Disk>,
    /// Read-only stores in which is looked for what this one lacks, in this order.
    pub lower: Vec<PathBuf>,
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self {
            durability: Durability::default(),
            space: SpacePolicy::default(),
            disk: Arc::new(KernelDisk),
            lower: Vec::new(),
        }
    }
}

/// An open store. One process has it open at a time.
#[derive(Debug)]
pub struct Store {
    root: Root,
    lower: Arc<lower::LowerStores>,
    disk: GuardedDisk,
    file_system: FileSystem,
    durability: Durability,
    space: Space,
    index: Arc<index::StoreIndex>,
    summaries: summaries::Summaries,
    tag_names: tag_names::TagNames,
    space_maker: OnceLock<Box<dyn MakeSpace>>,
    /// `blobs/`, opened when it is first needed.
    blobs: OnceLock<Directory>,
    leases: Leases,
    recipes: recipe_cache::RecipeCache,
    damaged: quarantine::DamagedBlobs,
    /// Held from the check that allows a change of a tag until the change is done.
    tag_changes: Mutex<()>,
    /// Held while blobs are deleted: one collection at a time.
    collections: Mutex<()>,
    counts: counts::Counts,
    deferred_deletion: DeferredDeletion,
    internal_reads: internal_reads::InternalReads,
    future_records: trash::FutureRecords,
    transactions: Transactions,
    /// The quotas of groups.
    pools: Mutex<Arc<[Pool]>>,
    totals: charges::Totals,
    displaced: charges::DisplacedData,
    /// Whether this process has found or requested the reserve.
    wants_reserve: AtomicBool,
    /// `None` if the store cannot be written to and has no lock file.
    lock: Option<File>,
    /// If one of these directories is missing, nothing is collected.
    essential: Vec<&'static str>,
}

impl Store {
    /// Opens the store in `root` with default options. See [`Self::open_with`].
    pub fn open(root: impl Into<PathBuf>) -> Result<Self, StoreError> {
        Self::open_with(root, StoreOptions::default())
    }

    /// Opens the store in `root`, or creates one there if the directory is empty or absent.
    /// Removes abandoned transactions from `staging/`.
    ///
    /// # Errors
    /// [`StoreError::Locked`], [`StoreError::NewerFormat`] (nothing is changed then),
    /// [`StoreError::NotAStore`], [`StoreError::Io`].
    pub fn open_with(root: impl Into<PathBuf>, options: StoreOptions) -> Result<Self, StoreError> {
        let root = store_dir::open_root(&root.into())?;
        let disk = GuardedDisk::new(options.disk, root.clone());
        let opened = store_dir::open_or_create(&root, &disk)?;
        let file_system = FileSystem::of(&root)?;
        let durability = options.durability.on(file_system);
        let space = Space::new(root.clone(), options.space)?;
        let damaged = quarantine::DamagedBlobs::load(&root);
        let store = Self {
            index: index::StoreIndex::new(root.clone(), file_system),
            summaries: summaries::Summaries::default(),
            tag_names: tag_names::TagNames::default(),
            lower: Arc::new(lower::LowerStores::new(&root, options.lower)),
            root,
            disk,
            file_system,
            durability,
            space,
            space_maker: OnceLock::new(),
            blobs: OnceLock::new(),
            leases: Leases::default(),
            recipes: recipe_cache::RecipeCache::default(),
            damaged,
            tag_changes: Mutex::default(),
            collections: Mutex::default(),
            counts: counts::Counts::default(),
            deferred_deletion: DeferredDeletion::default(),
            internal_reads: internal_reads::InternalReads::default(),
            future_records: trash::FutureRecords::default(),
            transactions: Transactions::default(),
            pools: Mutex::new(Arc::new([])),
            totals: charges::Totals::default(),
            displaced: charges::DisplacedData::default(),
            wants_reserve: AtomicBool::new(false),
            lock: opened.lock,
            essential: opened.essential,
        };
        store.announce(None);
        store.sweep_staging();
        lower::inspect(&store.lower);
        Ok(store)
    }

    /// The path of the store, for messages.
    #[must_use]
    pub fn place(&self) -> Place {
        self.root.place()
    }

    /// The leases that protect the store's content from collection.
    #[must_use]
    pub const fn leases(&self) -> &Leases {
        &self.leases
    }

    /// Writes this process and its socket into the lock file, so that a client that is given only the
    /// store finds the daemon.
    pub fn announce(&self, socket: Option<&Path>) {
        self.write_holder(socket, None);
    }

    /// The same for a command, which serves other processes only while it works.
    pub fn announce_command(&self, socket: Option<&Path>, state: CommandState) {
        self.write_holder(socket, Some(state));
    }

    fn write_holder(&self, socket: Option<&Path>, command: Option<CommandState>) {
        let Some(lock) = self.lock.as_ref().filter(|_| !self.refuses_changes()) else { return };
        let socket = socket.map(Path::to_path_buf);
        let holder = LockHolder { pid: std::process::id(), socket, command };
        if let Err(error) = lock_file::write_holder(lock, &holder) {
            let path = self.root.full(layout::LOCK_FILE);
            tracing::warn!("{}: cannot write the process and socket: {error}", path.display());
        }
    }

    /// Prevents other changes of tags until the guard is dropped.
    pub fn lock_tags(&self) -> MutexGuard<'_, ()> {
        lock(&self.tag_changes)
    }

    /// Prevents other collections until the guard is dropped.
    pub fn lock_collections(&self) -> MutexGuard<'_, ()> {
        lock(&self.collections)
    }

    /// Like [`Self::lock_collections`]; `None` instead of waiting if a collection holds the lock.
    pub(crate) fn try_lock_collections(&self) -> Option<MutexGuard<'_, ()>> {
        match self.collections.try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    fn blobs_directory(&self) -> Result<&Directory, StoreError> {
        if let Some(blobs) = self.blobs.get() {
            return Ok(blobs);
        }
        let opened = self.root.existing_directory(layout::BLOBS)?;
        Ok(self.blobs.get_or_init(|| opened))
    }

    /// For tests that inspect the store's files directly.
    #[cfg(test)]
    pub(crate) fn path(&self, relative: impl AsRef<Path>) -> PathBuf {
        self.root.full(relative).path().to_path_buf()
    }

    /// The file system that the store is on.
    #[must_use]
    pub const fn file_system(&self) -> FileSystem {
        self.file_system
    }

    /// The status of the root directory.
    pub fn root_status(&self) -> Result<FileStatus, StoreError> {
        FileStatus::of(self.root.directory_file()).map_err(StoreError::io("inspect", self.place()))
    }

    /// The saved progress of the background verification; `None` if there is none.
    pub(crate) fn scrub_record(&self) -> Result<Option<Vec<u8>>, StoreError> {
        const MAX_BYTES: u64 = 4096;
        self.root.read_limited(Path::new(layout::SCRUB_FILE), MAX_BYTES)
    }

    /// Replaces the saved progress. The caller must not rely on it being durable.
    pub(crate) fn set_scrub_record(&self, content: &[u8]) -> Result<(), StoreError> {
        let path = Path::new(layout::SCRUB_FILE);
        self.disk.replace_file(&path.with_extension("json.new"), path, content, 0o644)
    }

    /// Makes every change on the file system so far durable.
    pub(crate) fn sync_everything(&self) -> Result<(), StoreError> {
        let path = Path::new("");
        // A descriptor opened earlier would report write errors of other programs, too.
        let root = self.root.try_open_directory(path).map_err(self.root.failure(OPEN_DIRECTORY, path))?;
        self.disk.sync_file_system(&root, path)
    }

    /// The user whom the store's files belong to.
    #[must_use]
    pub fn owner(&self) -> StoreOwner {
        self.root.owner()
    }

    /// Why the store refuses changes until it is opened again: a sync has failed, or it could not be opened for
    /// writing.
    pub(crate) fn refuses_changes(&self) -> bool {
        self.disk.failure().is_some()
    }

    /// Why nothing can be changed now: the store refuses changes, or its file system is read-only, which may end.
    #[must_use]
    pub fn read_only_reason(&self) -> Option<Cow<'_, str>> {
        if let Some(failure) = self.disk.failure() {
            return Some(Cow::Borrowed(failure));
        }
        // XFS refuses to open anything after it has shut down, and says nothing in the options of its mount.
        match self.root.try_open_directory(Path::new("")) {
            Err(error) if is_disk_failure(&error) => {
                Some(format!("its directory cannot be opened: {error}").into())
            }
            _ => self.mount_is_read_only().then_some(Cow::Borrowed(MOUNTED_READ_ONLY)),
        }
    }

    pub(crate) const fn disk(&self) -> &GuardedDisk {
        &self.disk
    }

    const fn durability(&self) -> Durability {
        self.durability
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic cannot leave the data behind these locks inconsistent.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
