//! The store: a directory of digest-named blobs, the recipes and manifests that give them
//! meaning, and the rules by which they appear and disappear.
//!
//! What it promises: a file under its final name is complete, durable and has its digest, and a
//! tag points only at a model that is whole ([`Ingest::commit`]); what a lease pins is not
//! collected ([`leases`]). The form on disk is `docs/STORE-FORMAT.md`. What
//! may be deleted is decided in [`crate::gc`], not here.

use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{Read as _, Seek as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use blobd_store_format::digest::{Digest, Hasher};
use blobd_store_format::layout;
use blobd_store_format::recipe::Recipe;
use serde::{Deserialize, Serialize};

mod blobs;
mod condemned;
pub mod disk;
mod error;
mod filesystem;
pub mod index;
mod ingest;
pub mod leases;
mod models;
mod outlines;
mod own_reads;
mod pins;
mod quarantine;
mod reserve;
mod space;
mod staged;
mod staging;
mod summaries;
mod tags;
mod trash;

pub use error::StoreError;
pub use filesystem::{Durability, FileSystem};
pub use ingest::{Committed, Ingest};
pub use models::{Model, StoredFile, StoredForm};
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

/// The format this code writes, and the newest it reads.
pub const FORMAT: u32 = 1;

/// What `store.json` is called until it is complete.
const NEW_STORE_FILE: &str = "store.json.new";

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

/// What the lock file says about the process that has the store open.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LockHolder {
    /// The process.
    pub pid: u32,
    /// The socket it serves, if it is a daemon.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub socket: Option<PathBuf>,
}

impl std::fmt::Display for LockHolder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "process {}", self.pid)?;
        self.socket.as_ref().map_or(Ok(()), |socket| write!(f, ", which serves {}", socket.display()))
    }
}

#[derive(Serialize, Deserialize)]
struct StoreFile {
    format: u32,
    id: String,
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
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&root)
            .map_err(StoreError::io("create directory", &root))?;
        check_store_file(&root)?;
        let lock = take_lock(&root)?;
        let disk = GuardedDisk::new(options.disk);
        create_store_file(&disk, &root)?;
        for name in DIRECTORIES {
            disk.create_dir_all(&root, Path::new(name))?;
        }
        let blobs = root.join(layout::BLOBS);
        let blobs = File::open(&blobs).map_err(StoreError::io("open directory", blobs))?;
        let durability = options.durability.on(FileSystem::of(&root)?);
        let space = Space::new(root.clone(), options.space)?;
        let damaged = quarantine::DamagedBlobs::load(&root)?;
        let store = Self {
            index: index::StoreIndex::new(root.clone()),
            summaries: summaries::Summaries::default(),
            root,
            disk,
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
        room.settle(disk::file_bytes(&self.path(layout::recipe(recipe.file())))?);
        Ok(())
    }

    /// The same for one that is gone.
    pub(crate) fn note_recipe_removed(&self, file: Digest, bytes: u64) {
        self.forget_recipe(file);
        self.note_recipe(file);
        self.space.freed(bytes);
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
        let transactions = lock(&self.transactions).clone();
        staging::abandoned(&self.path(layout::STAGING), |name| transactions.contains(name))
    }

    /// Removes what [`Self::abandoned_staging`] has found.
    pub(crate) fn remove_abandoned(&self, path: &Path) -> Result<(), StoreError> {
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

/// Refuses a store of a later format before anything in it is touched.
fn check_store_file(root: &Path) -> Result<(), StoreError> {
    const MAX_BYTES: u64 = 4096;
    let path = root.join(layout::STORE_FILE);
    let Some(json) = disk::read_limited(&path, MAX_BYTES)? else { return refuse_foreign_directory(root) };
    let file: StoreFile =
        serde_json::from_slice(&json).map_err(|source| StoreError::StoreFile { path, source })?;
    if file.format > FORMAT {
        return Err(StoreError::NewerFormat { root: root.to_path_buf(), found: file.format });
    }
    Ok(())
}

/// A store is not strewn into a directory that holds something else, such as a home.
fn refuse_foreign_directory(root: &Path) -> Result<(), StoreError> {
    let entries = fs::read_dir(root).map_err(StoreError::io("list", root))?;
    // Left by a process that died while it made the store.
    let own = [layout::LOCK_FILE, NEW_STORE_FILE];
    let foreign = entries.flatten().any(|entry| own.iter().all(|name| entry.file_name() != *name));
    if foreign { Err(StoreError::NotAStore { root: root.to_path_buf() }) } else { Ok(()) }
}

fn create_store_file(disk: &GuardedDisk, root: &Path) -> Result<(), StoreError> {
    let path = root.join(layout::STORE_FILE);
    if path.exists() {
        return Ok(());
    }
    let content = serde_json::to_vec(&StoreFile { format: FORMAT, id: new_store_id() })
        .map_err(|source| StoreError::StoreFile { path: path.clone(), source })?;
    // First the root's own name: who finds a store.json later takes all above it for durable.
    sync_parent(disk, root)?;
    disk.replace_file(&root.join(NEW_STORE_FILE), &path, &content, 0o644)?;
    disk.sync_dir(root)
}

/// The root's own name must survive what its content survives. Whoever may not even list the
/// directory above has not made the root there just now.
fn sync_parent(disk: &GuardedDisk, root: &Path) -> Result<(), StoreError> {
    let above = root.parent().filter(|above| !above.as_os_str().is_empty()).unwrap_or(Path::new("."));
    match disk.sync_dir(above) {
        Err(StoreError::Io { source, .. }) if source.kind() == std::io::ErrorKind::PermissionDenied => Ok(()),
        synced => synced,
    }
}

/// Tells stores apart in logs and bundles; nothing secret depends on it.
fn new_store_id() -> String {
    let mut hasher = Hasher::new();
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    hasher.update(format!("{now:?} {}", std::process::id()).as_bytes());
    let mut random = [0; 16];
    if let Ok(mut source) = File::open("/dev/urandom") {
        // Without it, time and process tell stores apart well enough.
        let _ = source.read_exact(&mut random);
    }
    hasher.update(&random);
    Digest::to_hex(hasher.finish())[..32].to_owned()
}

/// The kernel releases the lock when the process ends, however it ends: it is never stale.
fn take_lock(root: &Path) -> Result<File, StoreError> {
    let path = root.join(layout::LOCK_FILE);
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(&path)
        .map_err(StoreError::io("open", &path))?;
    match rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(rustix::io::Errno::WOULDBLOCK) => {
            let mut json = String::new();
            // The holder may be writing it this very moment; then the message lacks its number.
            let _ = file.read_to_string(&mut json);
            let holder = serde_json::from_str(&json).unwrap_or_default();
            Err(StoreError::Locked { root: root.to_path_buf(), holder: Box::new(holder) })
        }
        Err(errno) => Err(StoreError::errno("lock", path)(errno)),
    }
}

#[cfg(test)]
mod tests;
