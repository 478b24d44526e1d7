//! The store's root directory, and the only way to open files in it.
//!
//! Users with write access to a store may have created anything in it: symbolic links to other users' files, FIFOs that
//! block on open, directories instead of files. So every access uses a path relative to the open root. Symbolic links
//! are not followed, a path never leads out of the root, opening never blocks, and a file's type is checked on the open
//! descriptor.
//!
//! `openat2` does this in one call. If the kernel or a seccomp filter refuses it, the path is resolved component by
//! component with `openat` and `O_NOFOLLOW`.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags, openat, openat2, statat};
use rustix::io::Errno;

use crate::bounded_read;
use crate::error::{DisplayPath, Refusal, StoreError};
use crate::owner::StoreOwner;

mod directory;
mod status;
#[cfg(test)]
mod tests;

pub(crate) use directory::{Directory, Entry};
pub use status::FileStatus;
pub(crate) use status::{Stamp, describe};

#[cfg(test)]
thread_local! {
    /// The files that this thread has opened by [`Root::find_file`], for tests of how often something is read.
    pub(crate) static OPENED: std::cell::RefCell<Vec<PathBuf>> = const { std::cell::RefCell::new(Vec::new()) };
}

/// A store's root directory, open.
#[derive(Clone, Debug)]
pub struct Root(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    place: DisplayPath,
    directory: File,
    owner: StoreOwner,
    resolver: Resolver,
}

/// How a relative path is resolved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Resolver {
    /// In one call of the kernel.
    Openat2,
    /// Component by component.
    Walk,
}

/// The directory of a path's last component.
#[derive(Debug)]
pub(crate) enum Parent<'r> {
    Root(&'r File),
    Below(OwnedFd),
}

impl AsFd for Parent<'_> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Root(root) => root.as_fd(),
            Self::Below(directory) => directory.as_fd(),
        }
    }
}

const RESOLVE: ResolveFlags =
    ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS).union(ResolveFlags::NO_MAGICLINKS);
pub(crate) const DIRECTORY: OFlags = OFlags::DIRECTORY.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
/// To resolve further paths, for which no permission to read it is needed.
const DIRECTORY_PATH: OFlags = DIRECTORY.union(OFlags::PATH);
/// The action that errors name when a directory cannot be opened.
pub(crate) const OPEN_DIRECTORY: &str = "open directory";
/// Opening a FIFO must not block, and a terminal must not become the controlling one.
pub(crate) const FILE: OFlags =
    OFlags::NONBLOCK.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC).union(OFlags::NOCTTY);

impl Root {
    /// Opens the directory at `path`. Symbolic links in it are followed: the administrator decides where the store is.
    pub fn open(path: impl Into<PathBuf>) -> Result<Self, StoreError> {
        let path = path.into();
        let opened = rustix::fs::open(&path, DIRECTORY - OFlags::NOFOLLOW, Mode::empty());
        let directory = File::from(opened.map_err(|errno| cannot_open(&path, errno))?);
        let owner = StoreOwner::from_directory(&directory).map_err(StoreError::io("inspect", &path))?;
        let probe = openat2(&directory, ".", DIRECTORY_PATH, Mode::empty(), RESOLVE);
        let resolver = if probe.is_ok() { Resolver::Openat2 } else { Resolver::Walk };
        Ok(Self(Arc::new(Inner { place: path.into(), directory, owner, resolver })))
    }

    pub(crate) fn place(&self) -> DisplayPath {
        self.0.place.clone()
    }

    pub(crate) fn full(&self, relative: impl AsRef<Path>) -> DisplayPath {
        let relative = relative.as_ref();
        if relative.as_os_str().is_empty() { self.place() } else { self.0.place.join(relative) }
    }

    /// The user who owns the store's files.
    pub(crate) fn owner(&self) -> StoreOwner {
        self.0.owner
    }

    pub(crate) fn directory_file(&self) -> &File {
        &self.0.directory
    }

    /// The error about something that is in the place of a regular file.
    pub(crate) fn unexpected_file(&self, relative: impl AsRef<Path>, found: FileType) -> StoreError {
        let (found, expected) = (describe(found).to_owned(), describe(FileType::RegularFile));
        StoreError::UnexpectedFile { path: self.full(relative), found, expected }
    }

    /// Opens a regular file for reading.
    pub(crate) fn open_file(&self, relative: &Path) -> Result<File, StoreError> {
        self.try_open_file(relative, OFlags::RDONLY).map_err(self.failure("open", relative))
    }

    /// Opens a regular file for reading; `None` if it does not exist.
    pub(crate) fn find_file(&self, relative: &Path) -> Result<Option<File>, StoreError> {
        #[cfg(test)]
        OPENED.with_borrow_mut(|opened| opened.push(relative.to_path_buf()));
        self.optional(self.try_open_file(relative, OFlags::RDONLY), "open", relative)
    }

    /// Opens a directory; `None` if it does not exist.
    pub(crate) fn find_directory(&self, relative: &Path) -> Result<Option<Directory>, StoreError> {
        let opened = self.optional(self.try_open_directory(relative), OPEN_DIRECTORY, relative)?;
        Ok(opened.map(|file| Directory::new(file, self.full(relative))))
    }

    /// As [`Directory::parsed_names`]; nothing if the directory does not exist.
    pub(crate) fn parsed_names<T>(
        &self,
        relative: &str,
        parse: impl Fn(&str) -> Option<T>,
    ) -> Result<Vec<T>, StoreError> {
        let directory = self.find_directory(Path::new(relative))?;
        directory.map_or_else(|| Ok(Vec::new()), |directory| directory.parsed_names(parse))
    }

    pub(crate) fn existing_directory(&self, relative: impl AsRef<Path>) -> Result<Directory, StoreError> {
        let opened = self.find_directory(relative.as_ref())?;
        opened.ok_or_else(|| StoreError::MissingDirectory { path: self.full(relative) })
    }

    /// The status of a file; `None` if it does not exist. A symbolic link is not followed.
    pub(crate) fn status(&self, relative: &Path) -> Result<Option<FileStatus>, StoreError> {
        self.optional(self.try_status(relative), "inspect", relative)
    }

    /// Reads a file of at most `limit` bytes; `None` if it does not exist. If the file is longer, returns one byte more
    /// than `limit`, so that the caller's own check of the length fails.
    pub(crate) fn read_limited(&self, relative: &Path, limit: u64) -> Result<Option<Vec<u8>>, StoreError> {
        let Some(file) = self.find_file(relative)? else { return Ok(None) };
        self.read_opened(&file, relative, limit).map(Some)
    }

    /// Like [`Self::read_limited`] for an open file; `relative` is its path.
    pub(crate) fn read_opened(
        &self,
        file: &File,
        relative: &Path,
        limit: u64,
    ) -> Result<Vec<u8>, StoreError> {
        let read = || bounded_read::read_limited(file, FileStatus::from_file(file)?.len(), limit);
        read().map_err(self.failure("read", relative))
    }

    /// The length of an open file that is longer than `limit`, as a sparse file in the place of a record can be. For
    /// records with a high limit, so that a longer file is not read at all.
    pub(crate) fn excessive_length(file: &File, limit: u64) -> Option<u64> {
        FileStatus::from_file(file).ok().map(|status| status.len()).filter(|length| *length > limit)
    }

    pub(crate) fn try_status(&self, relative: &Path) -> io::Result<FileStatus> {
        let (parent, name) = self.parent_of(relative)?;
        Ok(statat(&parent, name, AtFlags::SYMLINK_NOFOLLOW)?.into())
    }

    pub(crate) fn try_open_file(&self, relative: &Path, access: OFlags) -> io::Result<File> {
        let file = retry_while_leased(|| self.resolve(relative, access.union(FILE)))?;
        expect_regular(file)
    }

    pub(crate) fn try_open_directory(&self, relative: &Path) -> io::Result<File> {
        if relative.as_os_str().is_empty() {
            return Ok(File::from(openat(&self.0.directory, ".", DIRECTORY, Mode::empty())?));
        }
        Ok(File::from(self.resolve(relative, DIRECTORY)?))
    }

    pub(crate) fn try_open_above(&self) -> io::Result<File> {
        Ok(File::from(openat(&self.0.directory, "..", DIRECTORY, Mode::empty())?))
    }

    /// Sets the mode of a directory for which the process may have no read permission.
    pub(crate) fn set_directory_mode(&self, relative: &Path, mode: u32) -> Result<(), StoreError> {
        let set = self.resolve(relative, DIRECTORY_PATH).and_then(|directory| {
            // `fchmod` does not accept an `O_PATH` descriptor.
            let path = format!("/proc/self/fd/{}", directory.as_raw_fd());
            rustix::fs::chmod(path, Mode::from_raw_mode(mode))
        });
        set.map_err(|errno| self.failure("set the mode of", relative)(errno.into()))
    }

    /// Bytes free for a user without privileges.
    pub(crate) fn free_bytes(&self) -> Result<u64, StoreError> {
        let stat = self.file_system_status()?;
        Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
    }

    /// The file system's allocation unit in bytes.
    pub(crate) fn block_bytes(&self) -> Result<u64, StoreError> {
        Ok(self.file_system_status()?.f_frsize.max(1))
    }

    /// The size of the file system in bytes.
    pub(crate) fn capacity_bytes(&self) -> Result<u64, StoreError> {
        let stat = self.file_system_status()?;
        Ok(stat.f_blocks.saturating_mul(stat.f_frsize))
    }

    /// Whether the file system limits the number of files and has reached the limit.
    fn has_no_inodes(&self) -> bool {
        self.file_system_status().is_ok_and(|stat| are_exhausted(stat.f_files, stat.f_favail))
    }

    fn file_system_status(&self) -> Result<rustix::fs::StatVfs, StoreError> {
        let stat = rustix::fs::fstatvfs(&self.0.directory);
        stat.map_err(StoreError::errno("inspect", self.place()))
    }

    /// Bytes on disk of all files below a directory. Files that cannot be read count as 0.
    pub(crate) fn tree_bytes(&self, relative: &Path) -> u64 {
        self.find_directory(relative).ok().flatten().map_or(0, |directory| directory.tree_bytes())
    }

    /// A file's bytes on disk; 0 if it does not exist.
    pub(crate) fn allocated_bytes(&self, relative: &Path) -> Result<u64, StoreError> {
        Ok(self.status(relative)?.map_or(0, |status| status.allocated_bytes()))
    }

    /// The directory of the last component, and the last component.
    pub(crate) fn parent_of<'p>(&self, relative: &'p Path) -> io::Result<(Parent<'_>, &'p OsStr)> {
        let name = relative.file_name().ok_or(Errno::INVAL)?;
        let parent = match relative.parent() {
            Some(above) if !above.as_os_str().is_empty() => {
                Parent::Below(self.resolve(above, DIRECTORY_PATH)?)
            }
            _ => Parent::Root(&self.0.directory),
        };
        Ok((parent, name))
    }

    fn resolve(&self, relative: &Path, flags: OFlags) -> rustix::io::Result<OwnedFd> {
        match self.0.resolver {
            Resolver::Openat2 => openat2(&self.0.directory, relative, flags, Mode::empty(), RESOLVE),
            Resolver::Walk => self.walk(relative, flags),
        }
    }

    fn walk(&self, relative: &Path, flags: OFlags) -> rustix::io::Result<OwnedFd> {
        let mut components = relative.components().peekable();
        let mut directory: Option<OwnedFd> = None;
        while let Some(component) = components.next() {
            // `..` or an absolute path would lead out of the store.
            let Component::Normal(name) = component else { return Err(Errno::XDEV) };
            let flags = match components.peek() {
                Some(_) => DIRECTORY_PATH,
                None => flags.union(OFlags::NOFOLLOW),
            };
            let above = directory.as_ref().map_or(self.0.directory.as_fd(), AsFd::as_fd);
            directory = Some(openat(above, name, flags, Mode::empty())?);
        }
        directory.ok_or(Errno::INVAL)
    }

    /// Turns a not-found error into `Ok(None)`.
    fn optional<T>(
        &self,
        result: io::Result<T>,
        action: &'static str,
        relative: &Path,
    ) -> Result<Option<T>, StoreError> {
        match result {
            Ok(value) => Ok(Some(value)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(self.failure(action, relative)(error)),
        }
    }

    /// Wraps a failed call. If it failed because a component of the path has the wrong type, the error names that
    /// component.
    pub(crate) fn failure<'r>(
        &'r self,
        action: &'static str,
        relative: &'r Path,
    ) -> impl FnOnce(io::Error) -> StoreError + 'r {
        move |error| {
            let path = self.full(relative);
            if let Some(refusal) = error.get_ref().and_then(|inner| inner.downcast_ref::<Refusal>()) {
                return match refusal.clone() {
                    Refusal::UnexpectedFile { found, expected } => {
                        StoreError::UnexpectedFile { path, found, expected }
                    }
                    Refusal::WrongOwner { uid, owner } => StoreError::WrongOwner { path, uid, owner },
                    Refusal::NoSafeRename => StoreError::NoSafeRename { path },
                };
            }
            match Errno::from_io_error(&error) {
                Some(Errno::LOOP | Errno::NOTDIR | Errno::ISDIR | Errno::NXIO) => self
                    .wrong_component(action, relative)
                    .unwrap_or_else(|| StoreError::io(action, path)(error)),
                Some(Errno::NOSPC) if self.has_no_inodes() => StoreError::NoInodes { action, path },
                _ => StoreError::io(action, path)(error),
            }
        }
    }

    /// An error about the first component of a path that has the wrong type. The last one must be a regular file unless
    /// `action` opens a directory; the others must be directories.
    fn wrong_component(&self, action: &str, relative: &Path) -> Option<StoreError> {
        let mut path = PathBuf::new();
        let count = relative.components().count();
        for (index, component) in relative.components().enumerate() {
            path.push(component);
            let kind = self.try_status(&path).ok()?.kind();
            let is_file = index + 1 == count && action != OPEN_DIRECTORY;
            let expected = if is_file { FileType::RegularFile } else { FileType::Directory };
            if kind != expected {
                let expected = status::describe(expected);
                let (path, found) = (self.full(&path), status::describe(kind).to_owned());
                return Some(StoreError::UnexpectedFile { path, found, expected });
            }
        }
        None
    }
}

/// A file system without a limit says that it has none at all.
const fn are_exhausted(inodes: u64, available: u64) -> bool {
    inodes > 0 && available == 0
}

/// Names the owner if this process may not enter the directory of another user.
fn cannot_open(path: &Path, errno: Errno) -> StoreError {
    if errno == Errno::ACCESS
        && let Ok(found) = rustix::fs::stat(path)
        && let owner = StoreOwner::from(found)
        && !(owner.is_own() && owner.is_mapped())
    {
        return StoreError::OfAnother { root: path.into(), owner };
    }
    StoreError::errno(OPEN_DIRECTORY, path)(errno)
}

/// Opens a regular file in an open directory, by a name without a slash. The descriptor is read-only and has no other
/// flags.
pub(crate) fn open_blob_in(directory: &File, name: &str) -> io::Result<(File, FileStatus)> {
    let file = retry_while_leased(|| openat(directory, name, FILE, Mode::empty()))?;
    let file = File::from(file);
    let status = FileStatus::from_file(&file)?;
    check_regular(status.kind())?;
    // Clients get the descriptor, and `O_NONBLOCK` is of no use to them.
    rustix::fs::fcntl_setfl(&file, OFlags::empty())?;
    Ok((file, status))
}

fn expect_regular(file: OwnedFd) -> io::Result<File> {
    let file = File::from(file);
    check_regular(FileStatus::from_file(&file)?.kind())?;
    Ok(file)
}

fn check_regular(kind: FileType) -> io::Result<()> {
    match kind {
        FileType::RegularFile => Ok(()),
        other => Err(Refusal::UnexpectedFile {
            found: status::describe(other).to_owned(),
            expected: "regular file",
        }
        .into()),
    }
}

/// A process may hold a kernel lease on the file, such as a collection that checks whether it is in use. A blocking
/// `open` would wait until it ends; a non-blocking one fails, so it is tried again.
fn retry_while_leased<T>(open: impl Fn() -> rustix::io::Result<T>) -> io::Result<T> {
    const FIRST_PAUSE: Duration = Duration::from_micros(50);
    /// About four seconds in total.
    const TRIES: u32 = 17;
    let mut pause = FIRST_PAUSE;
    for _ in 1..TRIES {
        match open() {
            Err(Errno::WOULDBLOCK) => std::thread::sleep(pause),
            other => return Ok(other?),
        }
        pause = pause.saturating_mul(2);
    }
    Ok(open()?)
}
