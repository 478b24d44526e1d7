//! The directory that a store lives in: who may make one where, and who has it.

use std::fs::{DirBuilder, File};
use std::io::{self, Read as _};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;

use blobd_store_format::digest::{Digest, Hasher};
use blobd_store_format::layout;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::StoreError;
use super::disk::{Change, Disk as _, GuardedDisk, KernelDisk};
use super::lock_file::read_holder;
use super::root::Root;

/// What every store has from the beginning.
const DIRECTORIES: [&str; 6] =
    [layout::BLOBS, layout::RECIPES, layout::MANIFESTS, layout::ORIGINS, layout::STAGING, layout::TRASH];
/// Without these nobody knows what is needed, so that nothing may be collected.
const ESSENTIAL: [&str; 3] = [layout::BLOBS, layout::RECIPES, layout::MANIFESTS];

/// The format this code writes, and the newest it reads.
pub const FORMAT: u32 = 1;

#[derive(Serialize, Deserialize)]
struct StoreFile {
    format: u32,
    id: String,
    /// The directories that the store was made with. Those of an earlier blobd do not say so, and had
    /// no `trash/` before it was needed.
    #[serde(default)]
    directories: Vec<String>,
}

/// A store that has been entered.
#[derive(Debug)]
pub(super) struct Home {
    /// The lock, taken. There is none to be taken of a store that cannot be written to and that has no
    /// lock file.
    pub(super) lock: Option<File>,
    /// The directories that must be there.
    pub(super) essential: Vec<&'static str>,
}

/// Makes the directory unless it is there, and opens it.
///
/// # Errors
/// [`StoreError::Io`].
pub(super) fn open_root(path: &Path) -> Result<Root, StoreError> {
    let made = DirBuilder::new().recursive(true).mode(MODE).create(path);
    made.map_err(StoreError::io("create directory", path))?;
    Root::open(path)
}

/// Makes the directory a store's unless it is one, and takes its lock. If it cannot be written to, the
/// disk refuses changes from now on.
///
/// # Errors
/// [`StoreError::Locked`], [`StoreError::NewerFormat`], [`StoreError::NotAStore`],
/// [`StoreError::Io`].
pub(super) fn enter(root: &Root, disk: &GuardedDisk) -> Result<Home, StoreError> {
    // Before a lock file is made in a directory that is something else.
    find_store(root)?;
    let lock = take_lock(root, disk)?;
    // Another process may have made the store, or converted it, before the lock was taken.
    let file = match find_store(root)? {
        Some(file) => file,
        None => create_store(root, disk)?,
    };
    let had_trash = file.directories.iter().any(|name| name == layout::TRASH);
    let mut essential = ESSENTIAL.to_vec();
    essential.extend(had_trash.then_some(layout::TRASH));
    complete_empty_store(root, disk, &essential);
    Ok(Home { lock, essential })
}

/// An earlier blobd wrote `store.json` before it made the directories, and may have died in between.
/// While none of them has anything in it, nothing is lost if one is made anew.
fn complete_empty_store(root: &Root, disk: &GuardedDisk, essential: &[&str]) {
    let state =
        |name: &&str| root.find_directory(Path::new(name)).map(|found| found.map(|found| found.is_empty()));
    let states: Vec<_> = essential.iter().map(state).collect();
    let is_complete = states.iter().all(|state| matches!(state, Ok(Some(_))));
    let has_content = states.iter().any(|state| !matches!(state, Ok(None | Some(true))));
    if is_complete || has_content || disk.failure().is_some() {
        return;
    }
    let made = essential.iter().try_for_each(|name| disk.create_dir_all(Path::new(name)));
    if let Err(error) = made {
        tracing::warn!("{error}");
    }
}

/// What is in a store may be under a licence that one user has accepted and others have not: they
/// get at it by the daemon, or not at all.
const MODE: u32 = 0o700;

/// What `store.json` is called until it is complete.
const NEW_STORE_FILE: &str = "store.json.new";

/// What `store.json` says, if there is a store. Refuses one of a later format, and a directory that
/// holds something else.
fn find_store(root: &Root) -> Result<Option<StoreFile>, StoreError> {
    const MAX_BYTES: u64 = 4096;
    let Some(json) = root.read_limited(Path::new(layout::STORE_FILE), MAX_BYTES)? else {
        return refuse_foreign_directory(root).map(|()| None);
    };
    let file: StoreFile = serde_json::from_slice(&json)
        .map_err(|source| StoreError::StoreFile { path: root.full(layout::STORE_FILE), source })?;
    if file.format > FORMAT {
        return Err(StoreError::NewerFormat { root: root.place(), found: file.format, supported: FORMAT });
    }
    Ok(Some(file))
}

/// A store is not strewn into a directory that holds something else, such as a home.
fn refuse_foreign_directory(root: &Root) -> Result<(), StoreError> {
    // Left by a process that died while it made the store.
    let is_own_file = |name: &str| [layout::LOCK_FILE, NEW_STORE_FILE].contains(&name);
    let is_own_directory = |name: &str| DIRECTORIES.contains(&name) && is_empty(root, name);
    for entry in
        root.find_directory(Path::new(""))?.iter().flat_map(|directory| directory.entries()).flatten()
    {
        let name = entry?.name;
        if !name.to_str().is_some_and(|name| is_own_file(name) || is_own_directory(name)) {
            return Err(StoreError::NotAStore { root: root.place() });
        }
    }
    Ok(())
}

fn is_empty(root: &Root, directory: &str) -> bool {
    let directory = root.find_directory(Path::new(directory)).ok().flatten();
    directory.is_some_and(|directory| directory.is_empty())
}

/// `store.json` comes last: where it is, the directories have been made and their names are durable, so
/// that one that is missing later was taken away.
fn create_store(root: &Root, disk: &GuardedDisk) -> Result<StoreFile, StoreError> {
    let path = Path::new(layout::STORE_FILE);
    let directories = DIRECTORIES.map(str::to_owned).to_vec();
    let file = StoreFile { format: FORMAT, id: new_store_id(), directories };
    let content = serde_json::to_vec(&file)
        .map_err(|source| StoreError::StoreFile { path: root.full(path), source })?;
    make_private(disk, root)?;
    // First the root's own name: who finds a store.json later takes all above it for durable.
    unless_denied(disk.sync_above_root())?;
    DIRECTORIES.iter().try_for_each(|name| disk.create_dir(Path::new(name)))?;
    disk.sync_dir(Path::new(""))?;
    disk.replace_file(Path::new(NEW_STORE_FILE), path, &content, 0o644)?;
    disk.sync_dir(Path::new(""))?;
    Ok(file)
}

/// The directory may have been there, empty and open to all. One that is somebody else's stays as
/// it is, and `doctor` says what is wrong with it.
fn make_private(disk: &GuardedDisk, root: &Root) -> Result<(), StoreError> {
    unless_denied(disk.set_mode(Path::new(""), root.directory_file(), MODE))
}

/// Whoever may not even list the directory above has not made the root there just now.
fn unless_denied(done: Result<(), StoreError>) -> Result<(), StoreError> {
    match done {
        Err(StoreError::Io { source, .. }) if source.kind() == io::ErrorKind::PermissionDenied => Ok(()),
        done => done,
    }
}

/// Tells stores apart in logs and bundles; nothing secret depends on it.
#[expect(clippy::disallowed_methods, reason = "a device of the system, none of the store")]
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
fn take_lock(root: &Root, disk: &GuardedDisk) -> Result<Option<File>, StoreError> {
    let path = Path::new(layout::LOCK_FILE);
    let file = match open_lock(root, path) {
        Ok(file) => file,
        Err(error) => match read_only_reason(&error) {
            None => return Err(root.failure("open", path)(error)),
            Some(reason) => {
                disk.refuse_changes(reason);
                match root.find_file(path) {
                    Ok(Some(file)) => file,
                    // Nothing is changed without it, and what is read is whole whoever changes what.
                    Ok(None) => return Ok(None),
                    Err(StoreError::Io { source, .. }) if read_only_reason(&source).is_some() => {
                        return Ok(None);
                    }
                    Err(error) => return Err(error),
                }
            }
        },
    };
    // Any number of processes may share a store that none of them can change.
    let operation = match disk.failure() {
        None => rustix::fs::FlockOperation::NonBlockingLockExclusive,
        Some(_) => rustix::fs::FlockOperation::NonBlockingLockShared,
    };
    match rustix::fs::flock(&file, operation) {
        Ok(()) => Ok(Some(file)),
        Err(Errno::WOULDBLOCK) => {
            Err(StoreError::Locked { root: root.place(), holder: Box::new(read_holder(&file)) })
        }
        Err(errno) => Err(StoreError::errno("lock", root.full(path))(errno)),
    }
}

fn open_lock(root: &Root, path: &Path) -> io::Result<File> {
    match KernelDisk.open_file(root, path, Change::Content) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        opened => return opened,
    }
    match KernelDisk.create_file(root, path, 0o600) {
        // Another process was faster.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            KernelDisk.open_file(root, path, Change::Content)
        }
        created => created,
    }
}

/// Why nothing in the store can be changed, if that is what the error says.
fn read_only_reason(error: &io::Error) -> Option<&'static str> {
    match Errno::from_io_error(error)? {
        Errno::ROFS => Some("it is on a file system that is mounted read-only"),
        Errno::ACCESS | Errno::PERM => Some("its lock file cannot be written to: permission denied"),
        _ => None,
    }
}
