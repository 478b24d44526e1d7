//! The disk: every change that the store makes to files goes through here.
//!
//! [`Disk`] is an interface, so that tests can use a disk that fails or loses writes. Reads do not use it, see
//! [`Root`]. `GuardedDisk` makes the first failed sync final: the kernel reports a lost write only once, so a second
//! sync would succeed although the bytes are lost. The store is then read-only until it is opened again. It also makes
//! every change as the store's owner, see `owner`.
//!
//! `ingest` and [`crate::gc`] determine the order of the steps.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::File;
use std::ops::Deref;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::{fmt, io};

use rustix::fs::{
    AtFlags, CWD, FallocateFlags, Mode, OFlags, RenameFlags, fchmod, linkat, mkdirat, openat, renameat,
    renameat_with, unlinkat,
};
use rustix::io::Errno;
use tracing_mutex::stdsync::Mutex;

use crate::error::{Refusal, StoreError};
pub use crate::root::Root;
use crate::root::{DIRECTORY, FILE, FileStatus, OPEN_DIRECTORY, Parent};
use crate::sys::{FileIdentity, start_writeback};

/// Changes a file system. Paths are relative to the store's root, and symbolic links in them are not followed. By
/// default each method makes the kernel's call; disks for tests replace some of them. After an error nothing has been
/// changed.
pub trait Disk: fmt::Debug + Send + Sync {
    fn create_dir(&self, root: &Root, path: &Path) -> io::Result<()> {
        let (parent, name) = root.parent_of(path)?;
        mkdirat(&parent, name, Mode::from_raw_mode(0o755))?;
        // Whatever the umask is: the root's mode says who may enter the store, and it can be shared.
        let directory = openat(&parent, name, DIRECTORY, Mode::empty())?;
        let found = FileStatus::from_file(&directory)?.permissions();
        // The new directory has inherited the bit that passes its group on to what is created in it.
        let wanted = 0o755 | (found & SET_GID);
        if found != wanted {
            fchmod(directory, Mode::from_raw_mode(wanted))?;
        }
        Ok(())
    }

    /// Creates a file for reading and writing; fails if anything has that name.
    fn create_file(&self, root: &Root, path: &Path, mode: u32) -> io::Result<File> {
        let (parent, name) = root.parent_of(path)?;
        let file = File::from(openat(parent, name, NEW_FILE, Mode::from_raw_mode(mode))?);
        if mode & 0o077 != 0 {
            // Whatever the umask is.
            fchmod(&file, Mode::from_raw_mode(mode))?;
        }
        Ok(file)
    }

    /// Creates a file that shares the blocks of another file of this length, which `reflink` has the kernel do (it returns
    /// false if that is not possible); `None` if the file has to be written instead. It has no name until it is complete:
    /// the kernel locks it while it waits in `reflink`, perhaps for ever, and removing a name would wait for the lock.
    fn create_reflink(
        &self,
        root: &Root,
        path: &Path,
        size: u64,
        reflink: &mut dyn FnMut(BorrowedFd<'_>) -> io::Result<bool>,
    ) -> io::Result<Option<File>> {
        let (parent, name) = root.parent_of(path)?;
        let Ok(file) = openat(&parent, ".", UNNAMED_FILE, Mode::from_raw_mode(0o600)) else {
            return Ok(None);
        };
        let file = File::from(file);
        if !reflink(file.as_fd())? || FileStatus::from_file(&file)?.len() != size {
            return Ok(None);
        }
        let unnamed = format!("/proc/self/fd/{}", file.as_raw_fd());
        let linked = linkat(CWD, unnamed, parent, name, AtFlags::SYMLINK_FOLLOW);
        Ok(linked.is_ok().then_some(file))
    }

    /// Opens a regular file to change it. Refuses a file with several names or another owner.
    fn open_file(&self, root: &Root, path: &Path, change: Change) -> io::Result<File> {
        let access = match change {
            Change::Content => OFlags::RDWR,
            Change::Mode => OFlags::RDONLY,
        };
        let file = root.try_open_file(path, access)?;
        check_own(root, &file)?;
        Ok(file)
    }

    /// Allocates `size` bytes for the file, which then has that length.
    fn reserve(&self, _path: &Path, file: &File, size: u64) -> io::Result<()> {
        match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, size) {
            // Not supported by the file system; a write will fail if there is no space.
            Err(Errno::OPNOTSUPP) => Ok(()),
            Err(errno) => {
                // ext4 keeps the blocks that it could allocate, which may be all that were free.
                file.set_len(0)?;
                Err(errno.into())
            }
            Ok(()) => Ok(()),
        }
    }

    /// Writes all of `bytes` at `offset`; if they are many, also starts writeback.
    fn write_at(&self, _path: &Path, file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
        file.write_all_at(bytes, offset)?;
        if bytes.len() >= WORTH_WRITEBACK_BYTES {
            start_writeback(file, offset, bytes.len() as u64);
        }
        Ok(())
    }

    fn set_mode(&self, _path: &Path, file: &File, mode: u32) -> io::Result<()> {
        Ok(fchmod(file, Mode::from_raw_mode(mode))?)
    }

    /// Makes a file's content durable, but not its name.
    fn sync_file(&self, _path: &Path, file: &File) -> io::Result<()> {
        file.sync_all()
    }

    /// Makes the names in a directory durable. `directory` must have been opened for this call.
    fn sync_dir(&self, _path: &Path, directory: &File) -> io::Result<()> {
        directory.sync_all()
    }

    /// `syncfs`: makes everything durable that was written since `directory` was opened.
    fn sync_file_system(&self, directory: &File) -> io::Result<()> {
        Ok(rustix::fs::syncfs(directory)?)
    }

    /// Renames a file, replacing what has the name `to`.
    fn rename(&self, root: &Root, from: &Path, to: &Path) -> io::Result<()> {
        let ((from_dir, from), (to_dir, to)) = (root.parent_of(from)?, root.parent_of(to)?);
        Ok(renameat(from_dir, from, to_dir, to)?)
    }

    /// Renames a file unless something has the name `to`. A crash may leave it under both names.
    fn publish(&self, root: &Root, from: &Path, to: &Path) -> io::Result<()> {
        let ((from_dir, from), (to_dir, to)) = (root.parent_of(from)?, root.parent_of(to)?);
        match renameat_with(&from_dir, from, &to_dir, to, RenameFlags::NOREPLACE) {
            Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP) => {
                link_and_unlink((&from_dir, from), (&to_dir, to))
            }
            renamed => Ok(renamed?),
        }
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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// To write to it.
    Content,
    /// To set its mode, which needs no write permission.
    Mode,
}

/// A file that is created, and that nothing else may be.
const NEW_FILE: OFlags = OFlags::RDWR.union(OFlags::CREATE).union(OFlags::EXCL).union(FILE);
/// A file without a name in a directory.
const UNNAMED_FILE: OFlags = OFlags::RDWR.union(OFlags::TMPFILE).union(OFlags::CLOEXEC);
/// The kernel writes smaller amounts back in time by itself, and a call for each would be expensive.
const WORTH_WRITEBACK_BYTES: usize = 64 << 10;

/// The kernel's file system.
#[derive(Clone, Copy, Debug, Default)]
pub struct KernelDisk;

impl Disk for KernelDisk {}

/// Renames a file on a file system that lacks `RENAME_NOREPLACE`, such as NFS. A hard link is never made in the place
/// of another file. The file has two names for a moment; after a crash in this moment the first one is removed as any
/// other leftover: with the transaction's directory, or when the download is resumed.
fn link_and_unlink(
    (from_dir, from): (&Parent<'_>, &OsStr),
    (to_dir, to): (&Parent<'_>, &OsStr),
) -> io::Result<()> {
    match linkat(from_dir, from, to_dir, to, AtFlags::empty()) {
        Err(Errno::PERM | Errno::NOSYS | Errno::NOTSUP | Errno::MLINK) => Err(Refusal::NoSafeRename.into()),
        linked => Ok(linked.and_then(|()| unlinkat(from_dir, from, AtFlags::empty()))?),
    }
}

/// Refuses a file with another name, or of another owner: writing to it would change another user's file.
fn check_own(root: &Root, file: &File) -> io::Result<()> {
    let status = FileStatus::from_file(file)?;
    if status.links() != 1 {
        let found = format!("file with {} names", status.links());
        return Err(Refusal::UnexpectedFile { found, expected: "file with one name" }.into());
    }
    match status.owner() {
        uid if uid == root.owner().uid => Ok(()),
        uid => Err(Refusal::WrongOwner { uid, owner: root.owner() }.into()),
    }
}

/// Refuses all changes after the first failed sync, and makes them as the store's owner.
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

    /// Creates a directory and its parents, and makes their names durable. Existing ones are synced, too, since the
    /// process that created them may have been killed before its sync.
    pub(crate) fn create_dir_all(&self, relative: &Path) -> Result<(), StoreError> {
        let mut path = PathBuf::new();
        for part in relative {
            let parent = path.clone();
            path.push(part);
            // It may have been removed manually.
            let is_dir = || self.root.try_status(&path).is_ok_and(|status| status.is_dir());
            if !crate::lock(&self.durable).contains(&path) || !is_dir() {
                self.create_dir(&path)?;
                self.sync_dir(&parent)?;
                crate::lock(&self.durable).insert(path.clone());
            }
        }
        Ok(())
    }

    pub(crate) fn create_file(&self, path: &Path, mode: u32) -> Result<File, StoreError> {
        self.writable()?.create_file(&self.root, path, mode).map_err(self.root.failure("create", path))
    }

    /// Creates a file that shares the blocks of another one, see [`Disk::create_reflink`].
    pub(crate) fn create_reflink(
        &self,
        path: &Path,
        size: u64,
        reflink: &mut dyn FnMut(BorrowedFd<'_>) -> io::Result<bool>,
    ) -> Result<Option<File>, StoreError> {
        let created = self.writable()?.create_reflink(&self.root, path, size, reflink);
        created.map_err(self.root.failure("create", path))
    }

    pub(crate) fn open_file(&self, path: &Path) -> Result<File, StoreError> {
        self.writable()?.open_file(&self.root, path, Change::Content).map_err(self.root.failure("open", path))
    }

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

    /// `file` should be the descriptor that wrote: one that was opened after a failed write may get no error.
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
        // If XFS shuts down, it reports success for a directory that was opened before, although the names are lost. It
        // refuses to open anything after that.
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

    /// Replaces a small file atomically. The new name is durable when the caller has synced its directory.
    pub(crate) fn replace_file(
        &self,
        temporary: &Path,
        target: &Path,
        content: &[u8],
        mode: u32,
    ) -> Result<(), StoreError> {
        self.write_file(temporary, content, mode)?;
        self.rename(temporary, target)
    }

    /// Writes a temporary file and syncs it.
    pub(crate) fn write_file(&self, temporary: &Path, content: &[u8], mode: u32) -> Result<(), StoreError> {
        // An earlier failure may have left it.
        self.remove_file(temporary)?;
        let file = self.create_file(temporary, mode)?;
        self.write_at(temporary, &file, content, 0)?;
        self.sync_file(temporary, &file)
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
        crate::lock(&self.durable).remove(path);
        Ok(self.writable()?.remove_dir(&self.root, path).is_ok())
    }

    /// Removes a directory and its content. A symbolic link in it is removed, but not its target.
    pub(crate) fn remove_tree(&self, path: &Path) -> Result<(), StoreError> {
        remove_tree(&*self.writable()?, &self.root, path)
    }

    fn writable(&self) -> Result<OwnersDisk<'_>, StoreError> {
        let refused = |reason| Err(StoreError::ReadOnly { reason });
        match (self.failure.get(), self.root.owner().act()) {
            (Some(reason), _) => refused(reason.clone()),
            (None, Err(_)) => refused(self.root.owner().refusal()),
            (None, Ok(identity)) => Ok(OwnersDisk { disk: &*self.disk, _identity: identity }),
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

/// The disk, for one change, which is made as the store's owner.
struct OwnersDisk<'d> {
    disk: &'d dyn Disk,
    _identity: Option<FileIdentity>,
}

impl<'d> Deref for OwnersDisk<'d> {
    type Target = dyn Disk + 'd;

    fn deref(&self) -> &Self::Target {
        self.disk
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

/// The bit of a directory's mode that passes its group on.
const SET_GID: u32 = 0o2000;
/// The root's parent directory, as a [`Disk`] gets it.
const ABOVE_ROOT: &str = "..";
/// blobd's own directories are not nested this deep; deeper ones cannot be removed.
const MAX_LEVELS: usize = 32;

/// Whether an error means that the disk has failed, unlike too many open files.
pub(crate) fn is_disk_failure(error: &io::Error) -> bool {
    let errno = Errno::from_io_error(error);
    matches!(errno, Some(Errno::IO | Errno::ROFS | Errno::SHUTDOWN | Errno::UCLEAN | Errno::NODEV))
}

#[cfg(test)]
mod tests;
