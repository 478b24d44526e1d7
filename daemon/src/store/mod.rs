//! The store: a directory of digest-named blobs, the recipes and manifests that give them
//! meaning, and the rules by which they appear and disappear.
//!
//! What it promises: a file under its final name is complete, durable and has its digest, and a
//! tag points only at a model that is whole ([`Ingest::commit`]); what a lease pins is not
//! collected ([`leases`]). The form on disk is `docs/STORE-FORMAT.md`. What
//! may be deleted is decided in [`crate::gc`], not here.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{Read as _, Seek as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use blobd_store_format::digest::{Digest, Hasher};
use blobd_store_format::layout;
use serde::{Deserialize, Serialize};

mod blobs;
pub(crate) mod disk;
mod error;
mod ingest;
pub mod leases;
mod models;
mod quarantine;
mod staged;
mod tags;

pub use error::StoreError;
pub use ingest::{Committed, Ingest, Staging};
pub use models::{Model, StoredFile, StoredForm};
pub use staged::{StagedBlob, StagedFile, StagedHash, StagedWriter};
pub use tags::Tags;

use leases::Leases;

/// The format this code writes, and the newest it reads.
pub const FORMAT: u32 = 1;

/// What `store.json` is called until it is complete.
const NEW_STORE_FILE: &str = "store.json.new";

/// An open store. One process has it open at a time.
#[derive(Debug)]
pub struct Store {
    root: PathBuf,
    /// `blobs/`, open.
    blobs: File,
    leases: Leases,
    recipes: models::RecipeCache,
    damaged: quarantine::DamagedBlobs,
    /// Held while a tag changes, so that a check and the change it allows belong together.
    tag_changes: Mutex<()>,
    /// Held while blobs are deleted: one collection at a time.
    collections: Mutex<()>,
    next_transaction: AtomicU64,
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

#[derive(Serialize, Deserialize)]
struct StoreFile {
    format: u32,
    id: String,
}

impl Store {
    /// Opens the store in `root`, or makes one there if the directory is empty or absent.
    /// Removes what transactions that died left in `staging/`.
    ///
    /// # Errors
    /// [`StoreError::Locked`] when another process has it, [`StoreError::NewerFormat`] when it
    /// was written by a later blobd (nothing is touched then), [`StoreError::NotAStore`],
    /// [`StoreError::Io`].
    pub fn open(root: impl Into<PathBuf>) -> Result<Self, StoreError> {
        let root = root.into();
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&root)
            .map_err(StoreError::io("create directory", &root))?;
        check_store_file(&root)?;
        let lock = take_lock(&root)?;
        create_store_file(&root)?;
        for name in [layout::BLOBS, layout::RECIPES, layout::MANIFESTS, layout::ORIGINS, layout::STAGING] {
            disk::create_dir_all(&root, Path::new(name))?;
        }
        let blobs = root.join(layout::BLOBS);
        let blobs = File::open(&blobs).map_err(StoreError::io("open directory", blobs))?;
        let damaged = quarantine::DamagedBlobs::load(&root)?;
        let store = Self {
            root,
            blobs,
            leases: Leases::default(),
            recipes: models::RecipeCache::default(),
            damaged,
            tag_changes: Mutex::default(),
            collections: Mutex::default(),
            next_transaction: AtomicU64::new(0),
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

    /// A fresh directory for one transaction.
    fn new_staging_dir(&self) -> Result<PathBuf, StoreError> {
        let number = self.next_transaction.fetch_add(1, Ordering::Relaxed);
        let path = self.path(layout::STAGING).join(format!("{}-{number}", std::process::id()));
        fs::create_dir(&path).map_err(StoreError::io("create directory", &path))?;
        Ok(path)
    }

    /// Whatever lies in `staging/` when the store is opened belongs to a process that is dead:
    /// this one holds the lock.
    fn sweep_staging(&self) -> Result<(), StoreError> {
        let staging = self.path(layout::STAGING);
        for entry in fs::read_dir(&staging).map_err(StoreError::io("list", &staging))? {
            let path = entry.map_err(StoreError::io("list", &staging))?.path();
            let removed = if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
            removed.map_err(StoreError::io("remove", path))?;
        }
        Ok(())
    }
}

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

fn create_store_file(root: &Path) -> Result<(), StoreError> {
    let path = root.join(layout::STORE_FILE);
    if path.exists() {
        return Ok(());
    }
    let content = serde_json::to_vec(&StoreFile { format: FORMAT, id: new_store_id() })
        .map_err(|source| StoreError::StoreFile { path: path.clone(), source })?;
    disk::replace_file(&root.join(NEW_STORE_FILE), &path, &content, 0o644)?;
    disk::sync_dir(root)?;
    sync_parent(root)
}

/// The root's own name must survive what its content survives. Whoever may not even list the
/// directory above has not made the root there just now.
fn sync_parent(root: &Path) -> Result<(), StoreError> {
    let above = root.parent().filter(|above| !above.as_os_str().is_empty()).unwrap_or(Path::new("."));
    match disk::sync_dir(above) {
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
