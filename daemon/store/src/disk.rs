//! The disk: every change that the store makes to files goes through here.
//!
//! [`Disk`] is an interface, so that tests can use a disk that fails or loses writes. Reads do not use it,
//! see [`Root`]. `GuardedDisk` makes the first failed sync final: the kernel reports a lost write only
//! once, so a second sync would succeed although the bytes are lost. The store is then read-only until it
//! is opened again.
//!
//! `ingest` and [`crate::gc`] determine the order of the steps.

use std::collections::BTreeSet;
use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use rustix::fs::{
    AtFlags, FallocateFlags, Mode, OFlags, RenameFlags, fchmod, mkdirat, openat, renameat, unlinkat,
};
use tracing_mutex::stdsync::Mutex;

use super::error::{StoreError, UnexpectedFile};
pub use super::root::Root;
use super::root::{FILE, FileStatus, OPEN_DIRECTORY};
use crate::sys::start_writeback;

/// Changes a file system. Paths are relative to the store's root, and symbolic links in them are not
/// followed.
///
/// # Errors
/// Those of the underlying system call; nothing has been changed then.
pub trait Disk: fmt::Debug + Send + Sync {
    /// `mkdir`.
    fn create_dir(&self, root: &Root, path: &Path) -> io::Result<()>;
    /// Creates a file for reading and writing; fails if anything has that name.
    fn create_file(&self, root: &Root, path: &Path, mode: u32) -> io::Result<File>;
    /// Opens a regular file to change it. Refuses a file with several names or another owner.
    fn open_file(&self, root: &Root, path: &Path, change: Change) -> io::Result<File>;
    /// Allocates `size` bytes for the file, which then has that length.
    fn reserve(&self, path: &Path, file: &File, size: u64) -> io::Result<()>;
    /// Writes all of `bytes` at `offset`; if they are many, also starts writeback.
    fn write_at(&self, path: &Path, file: &File, bytes: &[u8], offset: u64) -> io::Result<()>;
    /// `fchmod`.
    fn set_mode(&self, path: &Path, file: &File, mode: u32) -> io::Result<()>;
    /// Makes a file's content durable, but not its name.
    fn sync_file(&self, path: &Path, file: &File) -> io::Result<()>;
    /// Makes the names in a directory durable. `directory` must have been opened for this call.
    fn sync_dir(&self, path: &Path, directory: &File) -> io::Result<()>;
    /// `syncfs`: makes everything durable that was written since `directory` was opened.
    fn sync_file_system(&self, directory: &File) -> io::Result<()>;
    /// Renames a file, replacing what has the name `to`.
    fn rename(&self, root: &Root, from: &Path, to: &Path) -> io::Result<()>;
    /// Renames a file unless something has the name `to`.
    fn publish(&self, root: &Root, from: &Path, to: &Path) -> io::Result<()>;
    /// `unlink`.
    fn remove_file(&self, root: &Root, path: &Path) -> io::Result<()>;
    /// `rmdir`.
    fn remove_dir(&self, root: &Root, path: &Path) -> io::Result<()>;
}

/// Why a file is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// To write to it.
    Content,
    /// To set its mode, which needs no write permission.
    Mode,
}

/// The kernel writes smaller amounts back in time by itself, and a call for each would be expensive.
const WORTH_WRITEBACK_BYTES: usize = 64 << 10;

/// The kernel's file system.
#[derive(Clone, Copy, Debug, Default)]
pub struct KernelDisk;

impl Disk for KernelDisk {
    fn create_dir(&self, root: &Root, path: &Path) -> io::Result<()> {
        let (parent, name) = root.parent_of(path)?;
        mkdirat(&parent, name, Mode::from_raw_mode(0o755))?;
        // Whatever the umask is: the root's mode says who may enter the store, and it can be shared.
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let directory = openat(&parent, name, flags, Mode::empty())?;
        Ok(fchmod(directory, Mode::from_raw_mode(0o755))?)
    }

    fn create_file(&self, root: &Root, path: &Path, mode: u32) -> io::Result<File> {
        let (parent, name) = root.parent_of(path)?;
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | FILE;
        let file = File::from(openat(parent, name, flags, Mode::from_raw_mode(mode))?);
        if mode & 0o077 != 0 {
            // Whatever the umask is.
            fchmod(&file, Mode::from_raw_mode(mode))?;
        }
        Ok(file)
    }

    fn open_file(&self, root: &Root, path: &Path, change: Change) -> io::Result<File> {
        let access = match change {
            Change::Content => OFlags::RDWR,
            Change::Mode => OFlags::RDONLY,
        };
        let file = root.try_open_file(path, access)?;
        check_own(root, &file)?;
        Ok(file)
    }

    fn reserve(&self, _path: &Path, file: &File, size: u64) -> io::Result<()> {
        match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, size) {
            // Not supported by the file system; a write will fail if there is no space.
            Err(rustix::io::Errno::OPNOTSUPP) => Ok(()),
            Err(errno) => {
                // ext4 keeps the blocks that it could allocate, which may be all that were free.
                file.set_len(0)?;
                Err(errno.into())
            }
            Ok(()) => Ok(()),
        }
    }

    fn write_at(&self, _path: &Path, file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
        file.write_all_at(bytes, offset)?;
        if bytes.len() >= WORTH_WRITEBACK_BYTES {
            start_writeback(file, offset, bytes.len() as u64);
        }
        Ok(())
    }

    fn set_mode(&self, _path: &Path, file: &File, mode: u32) -> io::Result<()> {
        Ok(rustix::fs::fchmod(file, Mode::from_raw_mode(mode))?)
    }

    fn sync_file(&self, _path: &Path, file: &File) -> io::Result<()> {
        file.sync_all()
    }

    fn sync_dir(&self, _path: &Path, directory: &File) -> io::Result<()> {
        directory.sync_all()
    }

    fn sync_file_system(&self, directory: &File) -> io::Result<()> {
        Ok(rustix::fs::syncfs(directory)?)
    }

    fn rename(&self, root: &Root, from: &Path, to: &Path) -> io::Result<()> {
        let ((from_dir, from), (to_dir, to)) = (root.parent_of(from)?, root.parent_of(to)?);
        Ok(renameat(from_dir, from, to_dir, to)?)
    }

    fn publish(&self, root: &Root, from: &Path, to: &Path) -> io::Result<()> {
        let ((from_dir, from), (to_dir, to)) = (root.parent_of(from)?, root.parent_of(to)?);
        Ok(rustix::fs::renameat_with(from_dir, from, to_dir, to, RenameFlags::NOREPLACE)?)
    }

    fn remove_file(&self, root: &Root, path: &Path) -> io::Result<()> {
        let (parent, name) = root.parent_of(path)?;
        Ok(unlinkat(parent, name, AtFlags::empty())?)
    }

    fn remove_dir(&self, root: &Root, path: &Path) -> io::Result<()> {
        let (parent, name) = root.parent_of(path)?;
        Ok(unlinkat(parent, name, AtFlags::REMOVEDIR)?)
    }
}

/// Refuses a file that has another name, or whose owner is neither this process nor the store's owner:
/// writing to it would change another user's file.
fn check_own(root: &Root, file: &File) -> io::Result<()> {
    let (status, above) = (FileStatus::of(file)?, FileStatus::of(root.directory_file())?);
    if status.links() != 1 {
        let found = format!("file with {} names", status.links());
        return Err(UnexpectedFile { found, expected: "file with one name" }.into());
    }
    let own = rustix::process::geteuid().as_raw();
    if status.owner() != own && status.owner() != above.owner() {
        let found = format!("file of uid {}", status.owner());
        return Err(UnexpectedFile { found, expected: "file of the store's owner" }.into());
    }
    Ok(())
}

/// A disk that refuses all changes after the first failed sync. Paths are relative to the root.
#[derive(Clone, Debug)]
pub(crate) struct GuardedDisk {
    disk: Arc<dyn Disk>,
    root: Root,
    failure: Arc<OnceLock<String>>,
    /// Directories whose names are known to be durable.
    durable: Arc<Mutex<BTreeSet<PathBuf>>>,
}

impl GuardedDisk {
    pub(crate) fn new(disk: Arc<dyn Disk>, root: Root) -> Self {
        Self { disk, root, failure: Arc::default(), durable: Arc::default() }
    }

    /// Why changes are refused, if they are.
    pub(crate) fn failure(&self) -> Option<&str> {
        self.failure.get().map(String::as_str)
    }

    pub(crate) fn refuse_changes(&self, reason: &str) {
        let _ = self.failure.set(reason.to_owned());
    }

    /// Creates a directory unless it exists.
    pub(crate) fn create_dir(&self, path: &Path) -> Result<(), StoreError> {
        match self.writable()?.create_dir(&self.root, path) {
            Ok(()) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            Err(error) => Err(self.root.failure("create directory", path)(error)),
        }
    }

    /// Creates a directory and its parents, and makes their names durable. Existing ones are synced, too,
    /// since the process that created them may have been killed before its sync.
    pub(crate) fn create_dir_all(&self, relative: &Path) -> Result<(), StoreError> {
        let mut path = PathBuf::new();
        for part in relative {
            let parent = path.clone();
            path.push(part);
            // It may have been removed manually.
            let is_dir = || self.root.try_status(&path).is_ok_and(|status| status.is_dir());
            if !super::lock(&self.durable).contains(&path) || !is_dir() {
                self.create_dir(&path)?;
                self.sync_dir(&parent)?;
                super::lock(&self.durable).insert(path.clone());
            }
        }
        Ok(())
    }

    pub(crate) fn create_file(&self, path: &Path, mode: u32) -> Result<File, StoreError> {
        self.writable()?.create_file(&self.root, path, mode).map_err(self.root.failure("create", path))
    }

    pub(crate) fn open_file(&self, path: &Path) -> Result<File, StoreError> {
        self.writable()?.open_file(&self.root, path, Change::Content).map_err(self.root.failure("open", path))
    }

    /// Opens a file for writing; creates it if it does not exist.
    pub(crate) fn open_or_create(&self, path: &Path, mode: u32) -> Result<File, StoreError> {
        match self.writable()?.open_file(&self.root, path, Change::Content) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => self.create_file(path, mode),
            opened => opened.map_err(self.root.failure("open", path)),
        }
    }

    pub(crate) fn reserve(&self, path: &Path, file: &File, size: u64) -> Result<(), StoreError> {
        self.writable()?.reserve(path, file, size).map_err(self.root.failure("reserve space for", path))
    }

    pub(crate) fn write_at(
        &self,
        path: &Path,
        file: &File,
        bytes: &[u8],
        offset: u64,
    ) -> Result<(), StoreError> {
        self.writable()?.write_at(path, file, bytes, offset).map_err(self.root.failure("write", path))
    }

    /// Sets the mode of a file that is not open; returns the file, opened for reading.
    pub(crate) fn set_mode_of(&self, path: &Path, mode: u32) -> Result<File, StoreError> {
        let opened = self.writable()?.open_file(&self.root, path, Change::Mode);
        let file = opened.map_err(self.root.failure("open", path))?;
        self.set_mode(path, &file, mode)?;
        Ok(file)
    }

    pub(crate) fn set_mode(&self, path: &Path, file: &File, mode: u32) -> Result<(), StoreError> {
        self.writable()?.set_mode(path, file, mode).map_err(self.root.failure("set the mode of", path))
    }

    /// Makes a file's content durable. `file` should be the descriptor that wrote it: one that was
    /// opened after a failed write may get no error.
    pub(crate) fn sync_file(&self, path: &Path, file: &File) -> Result<(), StoreError> {
        self.synced(self.writable()?.sync_file(path, file), "sync", path)
    }

    /// Makes the names in a directory durable; the root is the empty path.
    pub(crate) fn sync_dir(&self, path: &Path) -> Result<(), StoreError> {
        self.sync_directory(path, || self.root.try_open_directory(path))
    }

    /// Makes the root's own name durable.
    pub(crate) fn sync_above_root(&self) -> Result<(), StoreError> {
        self.sync_directory(Path::new(ABOVE_ROOT), || self.root.try_open_above())
    }

    fn sync_directory(&self, path: &Path, open: impl Fn() -> io::Result<File>) -> Result<(), StoreError> {
        let disk = self.writable()?;
        let directory = open().map_err(self.root.failure(OPEN_DIRECTORY, path))?;
        self.synced(disk.sync_dir(path, &directory), "sync directory", path)?;
        // If XFS shuts down, it reports success for a directory that was opened before, although the
        // names are lost. It refuses to open anything after that.
        let reopened = open();
        if let Err(source) = &reopened
            && is_disk_failure(source)
        {
            self.refuse_changes_after("reopen directory", path, source);
        }
        reopened.map(drop).map_err(self.root.failure("reopen directory", path))
    }

    /// Makes everything durable that was written since `directory`, at `path`, was opened.
    pub(crate) fn sync_file_system(&self, directory: &File, path: &Path) -> Result<(), StoreError> {
        self.synced(self.writable()?.sync_file_system(directory), "sync the file system of", path)
    }

    /// Replaces a small file atomically: writes a temporary file, syncs it and renames it. The new name
    /// is durable when the caller has synced its directory.
    pub(crate) fn replace_file(
        &self,
        temporary: &Path,
        target: &Path,
        content: &[u8],
        mode: u32,
    ) -> Result<(), StoreError> {
        // An earlier failure may have left it.
        self.remove_file(temporary)?;
        let file = self.create_file(temporary, mode)?;
        self.write_at(temporary, &file, content, 0)?;
        self.sync_file(temporary, &file)?;
        self.rename(temporary, target)
    }

    pub(crate) fn rename(&self, from: &Path, to: &Path) -> Result<(), StoreError> {
        self.writable()?.rename(&self.root, from, to).map_err(self.root.failure("rename to", to))
    }

    /// Renames a staged file to its final name unless that exists; returns whether it was renamed.
    pub(crate) fn publish(&self, staged: &Path, target: &Path) -> Result<bool, StoreError> {
        match self.writable()?.publish(&self.root, staged, target) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
            Err(error) => Err(self.root.failure("rename to", target)(error)),
        }
    }

    /// Removes a file; returns its bytes on disk, or `None` if it did not exist.
    pub(crate) fn remove_file(&self, path: &Path) -> Result<Option<u64>, StoreError> {
        let Some(status) = self.root.status(path)? else { return Ok(None) };
        self.writable()?.remove_file(&self.root, path).map_err(self.root.failure("remove", path))?;
        Ok(Some(status.allocated_bytes()))
    }

    /// Removes a directory if it is empty; returns whether it was.
    pub(crate) fn remove_dir(&self, path: &Path) -> Result<bool, StoreError> {
        // Before the removal: if it is created again, it must be synced again.
        super::lock(&self.durable).remove(path);
        Ok(self.writable()?.remove_dir(&self.root, path).is_ok())
    }

    /// Removes a directory and its content. A symbolic link in it is removed, but not its target.
    pub(crate) fn remove_tree(&self, path: &Path) -> Result<(), StoreError> {
        remove_tree(self.writable()?, &self.root, path)
    }

    fn writable(&self) -> Result<&dyn Disk, StoreError> {
        match self.failure.get() {
            None => Ok(&*self.disk),
            Some(reason) => Err(StoreError::ReadOnly { reason: reason.clone() }),
        }
    }

    fn synced(&self, result: io::Result<()>, action: &'static str, path: &Path) -> Result<(), StoreError> {
        result.map_err(|source| {
            self.refuse_changes_after(action, path, &source);
            self.root.failure(action, path)(source)
        })
    }

    /// Keeps the first failure, which is the cause of later ones.
    fn refuse_changes_after(&self, action: &str, path: &Path, source: &io::Error) {
        let what = format!("cannot {action} {}: {source}", self.root.full(path).display());
        tracing::error!("{what}; the store is read-only from now on");
        let _ = self.failure.set(format!("{what}; check the disk, then restart blobd"));
    }
}

pub(super) fn remove_tree(disk: &dyn Disk, root: &Root, path: &Path) -> Result<(), StoreError> {
    remove_levels(disk, root, path, MAX_LEVELS)
}

fn remove_levels(disk: &dyn Disk, root: &Root, path: &Path, levels: usize) -> Result<(), StoreError> {
    let Some(directory) = root.find_directory(path)? else { return Ok(()) };
    for entry in directory.entries()? {
        let entry = entry?;
        let path = path.join(&entry.name);
        match levels.checked_sub(1) {
            // blobd creates no directories here, but nothing else may keep files here either.
            Some(levels) if entry.is_dir() => remove_levels(disk, root, &path, levels)?,
            _ => disk.remove_file(root, &path).map_err(root.failure("remove", &path))?,
        }
    }
    disk.remove_dir(root, path).map_err(root.failure("remove", path))
}

/// The root's parent directory, as a [`Disk`] gets it.
const ABOVE_ROOT: &str = "..";
/// blobd's own directories are not nested this deep; deeper ones cannot be removed.
const MAX_LEVELS: usize = 32;

/// Whether an error means that the disk has failed, unlike too many open files.
fn is_disk_failure(error: &io::Error) -> bool {
    use rustix::io::Errno;
    let errno = Errno::from_io_error(error);
    matches!(errno, Some(Errno::IO | Errno::ROFS | Errno::SHUTDOWN | Errno::UCLEAN | Errno::NODEV))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A disk whose syncs fail.
    #[derive(Debug)]
    struct Broken;

    impl Disk for Broken {
        fn create_dir(&self, root: &Root, path: &Path) -> io::Result<()> {
            KernelDisk.create_dir(root, path)
        }
        fn create_file(&self, root: &Root, path: &Path, mode: u32) -> io::Result<File> {
            KernelDisk.create_file(root, path, mode)
        }
        fn open_file(&self, root: &Root, path: &Path, change: Change) -> io::Result<File> {
            KernelDisk.open_file(root, path, change)
        }
        fn reserve(&self, path: &Path, file: &File, size: u64) -> io::Result<()> {
            KernelDisk.reserve(path, file, size)
        }
        fn write_at(&self, path: &Path, file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
            KernelDisk.write_at(path, file, bytes, offset)
        }
        fn set_mode(&self, path: &Path, file: &File, mode: u32) -> io::Result<()> {
            KernelDisk.set_mode(path, file, mode)
        }
        fn sync_file(&self, _path: &Path, _file: &File) -> io::Result<()> {
            Err(rustix::io::Errno::IO.into())
        }
        fn sync_dir(&self, _path: &Path, _directory: &File) -> io::Result<()> {
            Err(rustix::io::Errno::IO.into())
        }
        fn sync_file_system(&self, _directory: &File) -> io::Result<()> {
            Err(rustix::io::Errno::IO.into())
        }
        fn rename(&self, root: &Root, from: &Path, to: &Path) -> io::Result<()> {
            KernelDisk.rename(root, from, to)
        }
        fn publish(&self, root: &Root, from: &Path, to: &Path) -> io::Result<()> {
            KernelDisk.publish(root, from, to)
        }
        fn remove_file(&self, root: &Root, path: &Path) -> io::Result<()> {
            KernelDisk.remove_file(root, path)
        }
        fn remove_dir(&self, root: &Root, path: &Path) -> io::Result<()> {
            KernelDisk.remove_dir(root, path)
        }
    }

    fn disk_in(folder: &tempfile::TempDir, disk: impl Disk + 'static) -> GuardedDisk {
        GuardedDisk::new(Arc::new(disk), Root::open(folder.path()).unwrap())
    }

    #[test]
    fn failed_sync_ends_all_changes_and_is_remembered() {
        let folder = tempfile::tempdir().unwrap();
        let disk = disk_in(&folder, Broken);
        let path = Path::new("f");
        let file = disk.create_file(path, 0o600).unwrap();
        assert!(matches!(disk.sync_file(path, &file), Err(StoreError::Io { action: "sync", .. })));
        assert!(disk.failure().unwrap().contains("cannot sync"), "{:?}", disk.failure());
        for refused in [disk.sync_dir(Path::new("")), disk.rename(path, Path::new("g"))] {
            assert!(matches!(refused, Err(StoreError::ReadOnly { .. })));
        }
        assert!(folder.path().join("f").exists());
    }

    #[test]
    fn only_disk_failures_end_all_changes() {
        use rustix::io::Errno;
        for errno in [Errno::MFILE, Errno::NFILE, Errno::NOMEM, Errno::NOENT, Errno::ACCESS] {
            assert!(!is_disk_failure(&errno.into()), "{errno}");
        }
        assert!(is_disk_failure(&Errno::IO.into()));
        let folder = tempfile::tempdir().unwrap();
        let disk = disk_in(&folder, Broken);
        disk.sync_dir(Path::new("absent")).unwrap_err();
        assert_eq!(disk.failure(), None);
    }

    #[test]
    fn failed_reservation_allocates_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::open(folder.path()).unwrap();
        let path = Path::new("f");
        let file = KernelDisk.create_file(&root, path, 0o600).unwrap();
        let error = KernelDisk.reserve(path, &file, 1 << 60).unwrap_err();
        assert!(super::super::error::is_no_space(&error) || error.kind() == io::ErrorKind::FileTooLarge);
        assert_eq!(FileStatus::of(&file).unwrap().allocated_bytes(), 0);
    }
}
