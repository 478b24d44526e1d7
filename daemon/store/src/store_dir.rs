//! Creates and opens the store's directory, and takes its lock.

use std::fs::{DirBuilder, File};
use std::io::{self, Read as _};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;

use blobd_store_format::digest::{Digest, Hasher};
use blobd_store_format::layout;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::StoreError;
use crate::disk::{Change, Disk as _, GuardedDisk, KernelDisk};
use crate::lock_file::read_holder;
use crate::owner::{StoreOwner, owner_of_new_directory};
use crate::root::{FileStatus, Root};

/// The directories of a new store.
const DIRECTORIES: [&str; 6] =
    [layout::BLOBS, layout::RECIPES, layout::MANIFESTS, layout::ORIGINS, layout::STAGING, layout::TRASH];
/// If one of these is missing, it is unknown what tags need, so nothing may be collected.
const ESSENTIAL: [&str; 3] = [layout::BLOBS, layout::RECIPES, layout::MANIFESTS];

/// The format that this code writes, and the newest that it reads.
pub const FORMAT: u32 = 1;

#[derive(Serialize, Deserialize)]
struct StoreFile {
    format: u32,
    id: String,
    /// The directories of the new store. Earlier versions did not record them, and created `trash/` when needed.
    #[serde(default)]
    directories: Vec<String>,
}

#[derive(Debug)]
pub(crate) struct StoreDir {
    /// The locked lock file; `None` if the store cannot be written to and has no lock file.
    pub(crate) lock: Option<File>,
    /// The directories that must exist.
    pub(crate) essential: Vec<&'static str>,
}

pub(crate) fn open_root(path: &Path) -> Result<Root, StoreError> {
    if matches!(rustix::fs::stat(path), Err(Errno::NOENT)) {
        create_root(path).map_err(StoreError::io("create directory", path))?;
    }
    Root::open(path)
}

fn create_root(path: &Path) -> io::Result<()> {
    let _identity = owner_of_new_directory(path).map(StoreOwner::act).transpose()?;
    DirBuilder::new().recursive(true).mode(MODE).create(path)
}

/// Takes the store's lock; creates the store in an empty directory. `disk` refuses changes if it is not writable.
pub(crate) fn open_or_create(root: &Root, disk: &GuardedDisk) -> Result<StoreDir, StoreError> {
    // Checked first, so that no lock file is created in a directory with other files.
    find_store(root)?;
    let lock = take_lock(root, disk)?;
    // Checked again: another process may have created or converted the store before the lock was taken.
    let file = match find_store(root)? {
        Some(file) => file,
        None => create_store(root, disk)?,
    };
    // A crash may have left it beside store.json, if the file system cannot rename without replacing.
    if disk.failure().is_none()
        && let Err(error) = disk.remove_file(Path::new(NEW_STORE_FILE))
    {
        tracing::warn!("{error}");
    }
    let had_trash = file.directories.iter().any(|name| name == layout::TRASH);
    let mut essential = ESSENTIAL.to_vec();
    essential.extend(had_trash.then_some(layout::TRASH));
    complete_empty_store(root, disk, &essential);
    Ok(StoreDir { lock, essential })
}

/// Creates missing directories if all others are empty, as after a crash of an earlier version.
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

/// Other users must not read models without the daemon: some licences were accepted by one user only.
const MODE: u32 = 0o700;

/// Why a store cannot be changed.
pub(crate) const MOUNTED_READ_ONLY: &str = "it is on a file system that is mounted read-only";
/// The temporary name of `store.json`.
const NEW_STORE_FILE: &str = "store.json.new";

/// Reads `store.json`; `None` if the directory may become a store. Refuses newer formats and other directories.
fn find_store(root: &Root) -> Result<Option<StoreFile>, StoreError> {
    const MAX_BYTES: u64 = 4096;
    let Some(json) = root.read_limited(Path::new(layout::STORE_FILE), MAX_BYTES)? else {
        return refuse_foreign_directory(root).map(|()| None);
    };
    let file: StoreFile = serde_json::from_slice(&json).map_err(|error| StoreError::NotAStore {
        root: root.place(),
        what: format!("store.json is not a blobd store file: {error}"),
    })?;
    if file.format > FORMAT {
        return Err(StoreError::NewerFormat { root: root.place(), found: file.format, supported: FORMAT });
    }
    Ok(Some(file))
}

/// The ID of the store that a directory has, which is opened for reading only.
pub(crate) fn id_of_existing(root: &Root) -> Result<String, StoreError> {
    let what = "has no store.json; if it is a mount point, its file system is not mounted";
    let missing = || StoreError::NotAStore { root: root.place(), what: what.to_owned() };
    find_store(root)?.map(|file| file.id).ok_or_else(missing)
}

pub(crate) fn store_id(root: &Root) -> Option<String> {
    Some(find_store(root).ok()??.id)
}

/// Refuses to create a store in a directory with other files, such as a home directory.
fn refuse_foreign_directory(root: &Root) -> Result<(), StoreError> {
    // These may be left by a process that was killed while it created the store.
    let is_own_file = |name: &str| [layout::LOCK_FILE, NEW_STORE_FILE].contains(&name);
    let is_own_directory = |name: &str| DIRECTORIES.contains(&name) && is_empty(root, name);
    for entry in
        root.find_directory(Path::new(""))?.iter().flat_map(|directory| directory.entries()).flatten()
    {
        let name = entry?.name;
        if !name.to_str().is_some_and(|name| is_own_file(name) || is_own_directory(name)) {
            let what = "has files but no store.json; choose an empty directory with --root".to_owned();
            return Err(StoreError::NotAStore { root: root.place(), what });
        }
    }
    Ok(())
}

fn is_empty(root: &Root, directory: &str) -> bool {
    let directory = root.find_directory(Path::new(directory)).ok().flatten();
    directory.is_some_and(|directory| directory.is_empty())
}

/// `store.json` is written last, when the directories are durable: one that is missing later was removed.
fn create_store(root: &Root, disk: &GuardedDisk) -> Result<StoreFile, StoreError> {
    let path = Path::new(layout::STORE_FILE);
    let directories = DIRECTORIES.map(str::to_owned).to_vec();
    let file = StoreFile { format: FORMAT, id: new_store_id(), directories };
    let content = StoreError::encode(&file, root.full(path))?;
    make_private(disk, root)?;
    // The root's own name first: an opener that finds store.json relies on the path being durable.
    unless_denied(disk.sync_above_root())?;
    DIRECTORIES.iter().try_for_each(|name| disk.create_dir(Path::new(name)))?;
    disk.sync_dir(Path::new(""))?;
    let new = Path::new(NEW_STORE_FILE);
    disk.write_file(new, &content, 0o644)?;
    // As blobs are published later, so a file system that cannot do it gets no store.
    if let Err(error) = disk.publish(new, path) {
        disk.remove_file(new)?;
        return Err(error);
    }
    disk.sync_dir(Path::new(""))?;
    Ok(file)
}

/// The directory may have existed before, readable by others. That of another user is left to `doctor`.
fn make_private(disk: &GuardedDisk, root: &Root) -> Result<(), StoreError> {
    unless_denied(disk.set_mode(Path::new(""), root.directory_file(), MODE))
}

/// Without access to the parent directory, the root was not just created there: nothing is to be made durable.
fn unless_denied(done: Result<(), StoreError>) -> Result<(), StoreError> {
    match done {
        Err(StoreError::Io { source, .. }) if source.kind() == io::ErrorKind::PermissionDenied => Ok(()),
        done => done,
    }
}

/// Identifies a store in logs and bundles. It is not a secret.
#[expect(clippy::disallowed_methods, reason = "a device, not a file of the store")]
fn new_store_id() -> String {
    let mut hasher = Hasher::new();
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    hasher.update(format!("{now:?} {}", std::process::id()).as_bytes());
    let mut random = [0; 16];
    if let Ok(mut source) = File::open("/dev/urandom") {
        // Without random bytes, time and process id are sufficient.
        let _ = source.read_exact(&mut random);
    }
    hasher.update(&random);
    Digest::to_hex(hasher.finish())[..32].to_owned()
}

/// The kernel releases the lock when the process ends, so a lock is never stale.
fn take_lock(root: &Root, disk: &GuardedDisk) -> Result<Option<File>, StoreError> {
    let path = Path::new(layout::LOCK_FILE);
    let file = match open_lock(root, path) {
        Ok(file) => file,
        Err(error) => match read_only_reason(root, &error) {
            None => return Err(root.failure("open", path)(error)),
            Some(reason) => {
                disk.refuse_changes(&reason);
                match root.find_file(path) {
                    Ok(Some(file)) => file,
                    // A read-only store needs no lock: published files are complete and do not change.
                    Ok(None) => return Ok(None),
                    Err(StoreError::Io { source, .. }) if is_refused(&source) => return Ok(None),
                    Err(error) => return Err(error),
                }
            }
        },
    };
    // Several processes may share a store that none of them can change.
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
    let _identity = root.owner().act()?;
    match KernelDisk.open_file(root, path, Change::Content) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        opened => return opened,
    }
    match KernelDisk.create_file(root, path, 0o600) {
        // Another process created it first.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            KernelDisk.open_file(root, path, Change::Content)
        }
        created => created,
    }
}

/// Why the store is read-only, if the error about its lock file says so, and what to do about it.
fn read_only_reason(root: &Root, error: &io::Error) -> Option<String> {
    match Errno::from_io_error(error) {
        Some(Errno::ROFS) => Some(MOUNTED_READ_ONLY.to_owned()),
        _ if is_refused(error) => Some(refusal(root)),
        _ => None,
    }
}

fn is_refused(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::PermissionDenied || Errno::from_io_error(error) == Some(Errno::ROFS)
}

fn refusal(root: &Root) -> String {
    let owner = root.owner();
    if owner.act().is_err() || !owner.is_mapped() {
        return owner.refusal();
    }
    let lock = ("its lock file", root.try_status(Path::new(layout::LOCK_FILE)));
    let directory = ("its directory", FileStatus::from_file(root.directory_file()));
    let owners = [lock, directory].map(|(what, status)| (what, status.map(|status| status.owner())));
    match owners.into_iter().find_map(|(what, uid)| Some((what, uid.ok().filter(|uid| *uid != owner.uid)?))) {
        Some((what, uid)) => format!(
            "{what} belongs to uid {uid}, and the store to uid {}; `blobd doctor` prints the command that gives all \
             files to the store's owner",
            owner.uid
        ),
        None => "its lock file cannot be written to: permission denied".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_denied_changes_above_the_store_are_passed_over() {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::open(folder.path()).unwrap();
        let failed =
            |kind: io::ErrorKind| unless_denied(Err(root.failure("sync", Path::new(""))(kind.into())));
        failed(io::ErrorKind::PermissionDenied).unwrap();
        assert!(failed(io::ErrorKind::Other).is_err());
        unless_denied(Ok(())).unwrap();
    }

    /// Why a directory with these files and directories cannot become a new store.
    fn refused(entries: &[&str]) -> bool {
        let folder = tempfile::tempdir().unwrap();
        for entry in entries {
            match entry.strip_suffix('/') {
                Some(directory) => std::fs::create_dir_all(folder.path().join(directory)).unwrap(),
                None => std::fs::write(folder.path().join(entry), "").unwrap(),
            }
        }
        match refuse_foreign_directory(&Root::open(folder.path()).unwrap()) {
            Err(StoreError::NotAStore { .. }) => true,
            found => {
                found.unwrap();
                false
            }
        }
    }

    #[test]
    fn store_is_created_only_where_nothing_is_but_leftovers_of_an_interrupted_creation() {
        for accepted in
            [&[][..], &["lock"], &["store.json.new"], &["blobs/", "trash/"], &["lock", "blobs/", "recipes/"]]
        {
            assert!(!refused(accepted), "{accepted:?}");
        }
        for foreign in [&["thesis.tex"][..], &["blobs/x/"], &["index/"], &["lock", "photos/"], &["blobs"]] {
            assert!(refused(foreign), "{foreign:?}");
        }
    }

    #[test]
    fn invalid_store_file_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::open(folder.path()).unwrap();
        assert!(find_store(&root).unwrap().is_none() && store_id(&root).is_none());
        let missing = id_of_existing(&root).unwrap_err();
        assert!(matches!(&missing, StoreError::NotAStore { what, .. } if what.contains("no store.json")));
        let write = |json: &str| std::fs::write(folder.path().join("store.json"), json).unwrap();
        write("{");
        let damaged = id_of_existing(&root).unwrap_err();
        assert!(
            matches!(&damaged, StoreError::NotAStore { what, .. } if what.contains("not a blobd store file"))
        );
        assert_eq!(store_id(&root), None);
        write(r#"{"format":2,"id":"x"}"#);
        assert!(matches!(id_of_existing(&root), Err(StoreError::NewerFormat { found: 2, supported: 1, .. })));
        write(r#"{"format":1,"id":"an id"}"#);
        assert_eq!(
            (id_of_existing(&root).unwrap(), store_id(&root)),
            ("an id".to_owned(), Some("an id".to_owned()))
        );
    }

    #[test]
    fn missing_directories_are_made_in_an_empty_store_only() {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::open(folder.path()).unwrap();
        let disk = GuardedDisk::new(std::sync::Arc::new(KernelDisk), root.clone());
        let essential = [layout::BLOBS, layout::RECIPES, layout::MANIFESTS];
        let complete = || {
            complete_empty_store(&root, &disk, &essential);
            essential.map(|name| folder.path().join(name).is_dir())
        };
        assert_eq!(complete(), [true; 3]);
        std::fs::remove_dir(folder.path().join("recipes")).unwrap();
        std::fs::write(folder.path().join("blobs/x"), "").unwrap();
        assert_eq!(complete(), [true, false, true], "what was in it is lost");
        std::fs::remove_file(folder.path().join("blobs/x")).unwrap();
        disk.refuse_changes("a test");
        assert_eq!(complete(), [true, false, true]);
        std::fs::write(folder.path().join("recipes"), "").unwrap();
        assert_eq!(complete(), [true, false, true]);
    }

    #[test]
    fn store_records_which_directories_it_has() {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::open(folder.path()).unwrap();
        let disk = GuardedDisk::new(std::sync::Arc::new(KernelDisk), root.clone());
        let open = || open_or_create(&root, &disk).unwrap().essential;
        assert_eq!(open(), ["blobs", "recipes", "manifests", "trash"]);
        let json = std::fs::read_to_string(folder.path().join("store.json")).unwrap();
        let file: StoreFile = serde_json::from_str(&json).unwrap();
        assert_eq!((file.format, file.directories), (FORMAT, DIRECTORIES.map(str::to_owned).to_vec()));
        assert!(file.id.len() == 32 && file.id.bytes().all(|byte| byte.is_ascii_hexdigit()), "{}", file.id);
        assert_ne!(new_store_id(), new_store_id());
        std::fs::write(folder.path().join("store.json"), r#"{"format":1,"id":"of an earlier version"}"#)
            .unwrap();
        assert_eq!(open(), ["blobs", "recipes", "manifests"]);
    }

    #[test]
    fn errors_about_the_lock_file_say_why_a_store_is_read_only() {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::open(folder.path()).unwrap();
        let reason = |errno: Errno| read_only_reason(&root, &errno.into());
        assert_eq!(reason(Errno::ROFS).as_deref(), Some(MOUNTED_READ_ONLY));
        let denied = "its lock file cannot be written to: permission denied";
        assert_eq!(reason(Errno::ACCESS).as_deref(), Some(denied));
        assert_eq!(reason(Errno::PERM).as_deref(), Some(denied));
        assert_eq!(reason(Errno::IO), None);
        for (errno, expected) in
            [(Errno::ROFS, true), (Errno::ACCESS, true), (Errno::IO, false), (Errno::NOENT, false)]
        {
            assert_eq!(is_refused(&errno.into()), expected, "{errno}");
        }
    }

    #[test]
    fn lock_file_is_opened_or_created_and_anything_else_in_its_place_is_an_error() {
        use std::os::unix::fs::MetadataExt as _;
        let folder = tempfile::tempdir().unwrap();
        let root = Root::open(folder.path()).unwrap();
        let path = Path::new(layout::LOCK_FILE);
        let first = open_lock(&root, path).unwrap().metadata().unwrap();
        assert_eq!(first.mode() & 0o777, 0o600);
        assert_eq!(open_lock(&root, path).unwrap().metadata().unwrap().ino(), first.ino());
        let disk = GuardedDisk::new(std::sync::Arc::new(KernelDisk), root.clone());
        let held = take_lock(&root, &disk).unwrap().unwrap();
        assert!(matches!(take_lock(&root, &disk), Err(StoreError::Locked { .. })));
        drop(held);
        assert!(take_lock(&root, &disk).unwrap().is_some());
        std::fs::remove_file(folder.path().join("lock")).unwrap();
        std::os::unix::fs::symlink("nowhere", folder.path().join("lock")).unwrap();
        assert!(matches!(take_lock(&root, &disk), Err(StoreError::UnexpectedFile { .. })));
        assert_eq!(disk.failure(), None);
    }
}
