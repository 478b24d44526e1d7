//! The directory that a store lives in: who may make one where, and who has it.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::Read as _;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use blobd_store_format::digest::{Digest, Hasher};
use blobd_store_format::layout;
use serde::{Deserialize, Serialize};

use super::StoreError;
use super::disk::{self, GuardedDisk};

/// The format this code writes, and the newest it reads.
pub const FORMAT: u32 = 1;

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

/// Makes the directory a store's unless it is one; returns its lock, taken.
///
/// # Errors
/// [`StoreError::Locked`], [`StoreError::NewerFormat`], [`StoreError::NotAStore`],
/// [`StoreError::Io`].
pub(super) fn enter(root: &Path, disk: &GuardedDisk) -> Result<File, StoreError> {
    DirBuilder::new()
        .recursive(true)
        .mode(MODE)
        .create(root)
        .map_err(StoreError::io("create directory", root))?;
    check_store_file(root)?;
    let lock = take_lock(root)?;
    create_store_file(disk, root)?;
    Ok(lock)
}

/// What is in a store may be under a licence that one user has accepted and others have not: they
/// get at it by the daemon, or not at all.
const MODE: u32 = 0o700;

/// What `store.json` is called until it is complete.
const NEW_STORE_FILE: &str = "store.json.new";

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
    make_private(disk, root)?;
    // First the root's own name: who finds a store.json later takes all above it for durable.
    sync_parent(disk, root)?;
    disk.replace_file(&root.join(NEW_STORE_FILE), &path, &content, 0o644)?;
    disk.sync_dir(root)
}

/// The directory may have been there, empty and open to all. One that is somebody else's stays as
/// it is, and `doctor` says what is wrong with it.
fn make_private(disk: &GuardedDisk, root: &Path) -> Result<(), StoreError> {
    match disk.set_mode(root, MODE) {
        Err(StoreError::Io { source, .. }) if source.kind() == std::io::ErrorKind::PermissionDenied => Ok(()),
        made => made,
    }
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
