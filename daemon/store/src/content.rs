//! What is stored: blobs and recipes, what is known to be damaged, and the lower stores that are searched after this
//! one. A function with `own` in its name looks only in this store; any other one also looks in the lower stores.

use std::borrow::Cow;
use std::fs::File;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};

use blobd_store_format::layout;
use tracing_mutex::stdsync::Mutex;

use crate::disk::{GuardedDisk, is_disk_failure};
use crate::error::DisplayPath;
use crate::index::StoreIndex;
use crate::lock_file::{self, CommandState, LockHolder};
use crate::owner::StoreOwner;
use crate::root::{Directory, FileStatus, OPEN_DIRECTORY, Root};
use crate::space::Space;
use crate::store_dir::{self, MOUNTED_READ_ONLY};
use crate::{Durability, FileSystem, StoreError, StoreOptions, lock};

pub(crate) mod blobs;
mod directories;
pub(crate) mod downloads;
pub(crate) mod internal_reads;
pub(crate) mod lower;
pub(crate) mod name_tree;
pub(crate) mod other_files;
pub(crate) mod quarantine;
pub(crate) mod reader;
mod recipe_cache;
pub(crate) mod recipes;
pub(crate) mod stored_files;
pub(crate) mod surroundings;

/// The blobs and recipes of a store.
#[derive(Debug)]
pub struct Content {
    pub(crate) root: Root,
    pub(crate) lower: Arc<lower::LowerStores>,
    pub(crate) disk: GuardedDisk,
    pub(crate) file_system: FileSystem,
    pub(crate) durability: Durability,
    /// What the store uses of the disk: whatever appears or disappears here is counted.
    pub(crate) space: Space,
    index: Arc<StoreIndex>,
    pub(crate) counts: Mutex<StoreEvents>,
    /// `manifests/`, for surveys; decisions about removals list it again.
    pub(crate) manifests: Arc<name_tree::NameTree>,
    pins: name_tree::NameTree,
    record_sizes: other_files::RecordSizes,
    /// `blobs/`, opened when it is first needed.
    blobs: OnceLock<Directory>,
    pub(crate) recipes: recipe_cache::RecipeCache,
    damaged: quarantine::DamagedBlobs,
    internal_reads: internal_reads::InternalReads,
    staging_names: directories::StagingNames,
    /// `None` if the store cannot be written to and has no lock file.
    lock: Option<File>,
    /// If one of these directories is missing, nothing is collected.
    essential: Vec<&'static str>,
}

impl Content {
    pub(crate) fn open(root: &Path, options: StoreOptions) -> Result<Self, StoreError> {
        let root = store_dir::open_root(root)?;
        let disk = GuardedDisk::new(options.disk, root.clone());
        let opened = store_dir::open_or_create(&root, &disk)?;
        let file_system = FileSystem::for_root(&root)?;
        Ok(Self {
            index: StoreIndex::new(root.clone(), file_system),
            lower: Arc::new(lower::LowerStores::new(&root, options.lower)),
            durability: options.durability.on(file_system),
            space: Space::new(root.clone(), options.space)?,
            damaged: quarantine::DamagedBlobs::load(&root),
            root,
            disk,
            file_system,
            counts: Mutex::default(),
            manifests: Arc::default(),
            pins: name_tree::NameTree::default(),
            record_sizes: other_files::RecordSizes::default(),
            blobs: OnceLock::new(),
            recipes: recipe_cache::RecipeCache::default(),
            internal_reads: internal_reads::InternalReads::default(),
            staging_names: directories::StagingNames::default(),
            lock: opened.lock,
            essential: opened.essential,
        })
    }

    /// Which blobs and recipes there are, and their sizes.
    pub const fn index(&self) -> &Arc<StoreIndex> {
        &self.index
    }

    /// Starts a thread that keeps a copy of the catalog in `index/`, for the daemon. It loads the copy if that can be
    /// trusted, and reads the disk otherwise. Returns immediately.
    pub fn start_index(&self) {
        if !self.refuses_changes() {
            self.index.start();
        }
    }

    /// Ends the thread. A later change is not in the copy, and removes the marker that makes the copy trusted.
    pub fn stop_index(&self) {
        self.index.stop();
    }

    pub fn events(&self) -> StoreEvents {
        StoreEvents { index_rebuilds: self.index.rebuilds.load(Ordering::Relaxed), ..*lock(&self.counts) }
    }

    pub fn place(&self) -> DisplayPath {
        self.root.place()
    }

    /// Writes this process and its socket into the lock file, where clients that know only the store find the daemon.
    /// `command` is the state of a command, which serves other processes only while it works.
    pub fn announce(&self, socket: Option<&Path>, command: Option<CommandState>) {
        let Some(lock) = self.lock.as_ref().filter(|_| !self.refuses_changes()) else { return };
        let socket = socket.map(Path::to_path_buf);
        let holder = LockHolder { pid: std::process::id(), socket, command };
        if let Err(error) = lock_file::write_holder(lock, &holder) {
            let path = self.root.full(layout::LOCK_FILE);
            tracing::warn!("{}: cannot write the process and socket: {error}", path.display());
        }
    }

    pub const fn file_system(&self) -> FileSystem {
        self.file_system
    }

    pub fn root_status(&self) -> Result<FileStatus, StoreError> {
        FileStatus::from_file(self.root.directory_file()).map_err(StoreError::io("inspect", self.place()))
    }

    pub(crate) fn scrub_record(&self) -> Result<Option<Vec<u8>>, StoreError> {
        const MAX_BYTES: u64 = 4096;
        self.root.read_limited(Path::new(layout::SCRUB_FILE), MAX_BYTES)
    }

    /// Replaces the saved progress. The caller must not rely on it being durable.
    pub(crate) fn set_scrub_record(&self, content: &[u8]) -> Result<(), StoreError> {
        let path = Path::new(layout::SCRUB_FILE);
        self.disk.replace_file(&path.with_extension("json.new"), path, content, 0o644)
    }

    pub(crate) fn sync_everything(&self) -> Result<(), StoreError> {
        let path = Path::new("");
        // A descriptor opened earlier would report write errors of other programs, too.
        let root = self.root.try_open_directory(path).map_err(self.root.failure(OPEN_DIRECTORY, path))?;
        self.disk.sync_file_system(&root, path)
    }

    pub fn owner(&self) -> StoreOwner {
        self.root.owner()
    }

    /// Whether changes are refused until the store is opened again: a sync has failed, or it is not writable.
    pub(crate) fn refuses_changes(&self) -> bool {
        self.disk.failure().is_some()
    }

    /// Why nothing can be changed now: the store refuses changes, or its file system is read-only, which may end.
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
}

/// What has happened to the store since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreEvents {
    /// Collections that were carried out: by `gc`, `rm`, eviction, and in the background.
    pub collections: u64,
    pub freed_bytes: u64,
    pub evicted_models: u64,
    pub evicted_bytes: u64,
    /// Blobs that did not have their digest, and were moved to quarantine.
    pub damaged_blobs: u64,
    /// Bytes that were read and compared with a digest, by `verify` and in the background.
    pub checked_bytes: u64,
    /// How often the index was built from the files, or compared with them.
    pub index_rebuilds: u64,
}
