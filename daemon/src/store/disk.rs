//! The disk: every change that the store makes to files goes through here.
//!
//! [`Disk`] is the seam: the kernel's file system, or in tests one that fails or forgets. What is
//! read needs no seam, because reading promises nothing. `GuardedDisk` adds the rule that an
//! error of a sync is final: the kernel reports a lost write once, so a second try would succeed
//! with the bytes gone. From then on the store is read-only until it is opened again.
//!
//! The order of the steps is `ingest`'s and [`crate::gc`]'s business.

use std::collections::BTreeSet;
use std::fmt;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read as _};
use std::os::unix::fs::{DirBuilderExt as _, FileExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock};

use rustix::fs::{CWD, FallocateFlags, Mode, RenameFlags};

use super::error::{StoreError, optional};
use crate::sys::start_writeback;

/// What changes a file system. Paths are absolute.
///
/// # Errors
/// Each call fails as the system call does that it stands for, and has then changed nothing.
pub trait Disk: fmt::Debug + Send + Sync {
    /// `mkdir`.
    fn create_dir(&self, path: &Path) -> io::Result<()>;
    /// Opens an empty file for reading and writing; what was there is cut to nothing.
    fn create_file(&self, path: &Path, mode: u32) -> io::Result<File>;
    /// Has the file system set aside `size` bytes for the file, which then has that length.
    fn reserve(&self, path: &Path, file: &File, size: u64) -> io::Result<()>;
    /// Writes all of `bytes` at `offset` and, if they are many, has the kernel start to put them on disk.
    fn write_at(&self, path: &Path, file: &File, bytes: &[u8], offset: u64) -> io::Result<()>;
    /// `chmod`.
    fn set_mode(&self, path: &Path, mode: u32) -> io::Result<()>;
    /// Makes a file's content durable, not its name.
    fn sync_file(&self, path: &Path, file: &File) -> io::Result<()>;
    /// Makes the names in a directory durable, which has been opened for this.
    fn sync_dir(&self, path: &Path, directory: &File) -> io::Result<()>;
    /// `syncfs`: makes everything durable that was written since `directory` was opened.
    fn sync_file_system(&self, directory: &File) -> io::Result<()>;
    /// Renames a file, replacing what has the name `to`.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Renames a file unless something has the name `to`.
    fn publish(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// `unlink`.
    fn remove_file(&self, path: &Path) -> io::Result<()>;
    /// `rmdir`.
    fn remove_dir(&self, path: &Path) -> io::Result<()>;
}

/// Less dirties no more memory than the kernel writes by itself in time, and would be asked for often.
const WORTH_WRITEBACK_BYTES: usize = 64 << 10;

/// The file system as the kernel has it.
#[derive(Clone, Copy, Debug, Default)]
pub struct KernelDisk;

impl Disk for KernelDisk {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        DirBuilder::new().mode(0o755).create(path)
    }

    fn create_file(&self, path: &Path, mode: u32) -> io::Result<File> {
        OpenOptions::new().read(true).write(true).create(true).truncate(true).mode(mode).open(path)
    }

    fn reserve(&self, _path: &Path, file: &File, size: u64) -> io::Result<()> {
        match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, size) {
            // The file system cannot; then a write will tell whether there is room.
            Err(rustix::io::Errno::OPNOTSUPP) => Ok(()),
            Err(errno) => {
                // ext4 keeps what it got although it was not enough, and that is all there was.
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

    fn set_mode(&self, path: &Path, mode: u32) -> io::Result<()> {
        Ok(rustix::fs::chmod(path, Mode::from_raw_mode(mode))?)
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

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn publish(&self, from: &Path, to: &Path) -> io::Result<()> {
        Ok(rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE)?)
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        fs::remove_dir(path)
    }
}

/// A disk whose first failed sync ends all changes.
#[derive(Clone, Debug)]
pub(crate) struct GuardedDisk {
    disk: Arc<dyn Disk>,
    failure: Arc<OnceLock<String>>,
    /// Directories whose own name is known to be durable.
    durable: Arc<Mutex<BTreeSet<PathBuf>>>,
}

impl GuardedDisk {
    pub(crate) fn new(disk: Arc<dyn Disk>) -> Self {
        Self { disk, failure: Arc::default(), durable: Arc::default() }
    }

    /// Why nothing can be changed any more, if that is so.
    pub(crate) fn failure(&self) -> Option<&str> {
        self.failure.get().map(String::as_str)
    }

    /// Creates a directory unless it is there.
    pub(crate) fn create_dir(&self, path: &Path) -> Result<(), StoreError> {
        match self.writable()?.create_dir(path) {
            Ok(()) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            Err(error) => Err(StoreError::io("create directory", path)(error)),
        }
    }

    /// Creates a directory below `root` and those above it, and makes their names durable: also of
    /// those that are there, since whoever made them may have died before it came to that.
    pub(crate) fn create_dir_all(&self, root: &Path, relative: &Path) -> Result<(), StoreError> {
        let mut path = root.to_path_buf();
        for part in relative {
            let parent = path.clone();
            path.push(part);
            // Somebody may have removed it by hand.
            if !super::lock(&self.durable).contains(&path) || !path.is_dir() {
                self.create_dir(&path)?;
                self.sync_dir(&parent)?;
                super::lock(&self.durable).insert(path.clone());
            }
        }
        Ok(())
    }

    /// Opens an empty file for writing.
    pub(crate) fn create_file(&self, path: &Path, mode: u32) -> Result<File, StoreError> {
        self.writable()?.create_file(path, mode).map_err(StoreError::io("create", path))
    }

    /// Has the file system set aside what the file will take.
    pub(crate) fn reserve(&self, path: &Path, file: &File, size: u64) -> Result<(), StoreError> {
        self.writable()?.reserve(path, file, size).map_err(StoreError::io("reserve room for", path))
    }

    pub(crate) fn write_at(
        &self,
        path: &Path,
        file: &File,
        bytes: &[u8],
        offset: u64,
    ) -> Result<(), StoreError> {
        self.writable()?.write_at(path, file, bytes, offset).map_err(StoreError::io("write", path))
    }

    /// Makes a file read-only.
    pub(crate) fn make_read_only(&self, path: &Path) -> Result<(), StoreError> {
        self.set_mode(path, 0o444)
    }

    /// Says who may do what with it.
    pub(crate) fn set_mode(&self, path: &Path, mode: u32) -> Result<(), StoreError> {
        self.writable()?.set_mode(path, mode).map_err(StoreError::io("set the mode of", path))
    }

    /// Makes a file's content durable. The descriptor should be the one that wrote it: one that
    /// was opened after a write has failed may be told that all is well.
    pub(crate) fn sync_file(&self, path: &Path, file: &File) -> Result<(), StoreError> {
        self.synced(self.writable()?.sync_file(path, file), "sync", path)
    }

    /// Makes the names in a directory durable.
    pub(crate) fn sync_dir(&self, path: &Path) -> Result<(), StoreError> {
        let disk = self.writable()?;
        let open = || File::open(path).map_err(StoreError::io("open directory", path));
        let directory = open()?;
        self.synced(disk.sync_dir(path, &directory), "sync directory", path)?;
        // XFS reports success to who opened the directory before the file system shut itself down,
        // although the names are lost. It refuses to open anything after that.
        let reopened = open();
        if let Err(StoreError::Io { source, .. }) = &reopened
            && is_from_the_disk(source)
        {
            self.end_changes("reopen directory", path, source);
        }
        reopened.map(drop)
    }

    /// Makes everything durable that was written since `directory`, which lies at `path`, was
    /// opened.
    pub(crate) fn sync_file_system(&self, directory: &File, path: &Path) -> Result<(), StoreError> {
        self.synced(self.writable()?.sync_file_system(directory), "sync the file system of", path)
    }

    /// Writes a small file under a temporary name, durably, and then gives it its own: a reader
    /// sees the old content or the new one, whatever happens. The new name is durable once the
    /// caller has synced its directory.
    pub(crate) fn replace_file(
        &self,
        temporary: &Path,
        target: &Path,
        content: &[u8],
        mode: u32,
    ) -> Result<(), StoreError> {
        // A temporary file of mode 0444 that a failure has left could not be opened for writing.
        self.remove_file(temporary)?;
        let file = self.create_file(temporary, mode)?;
        self.write_at(temporary, &file, content, 0)?;
        self.sync_file(temporary, &file)?;
        self.rename(temporary, target)
    }

    /// Gives a file another name, replacing what has it.
    pub(crate) fn rename(&self, from: &Path, to: &Path) -> Result<(), StoreError> {
        self.writable()?.rename(from, to).map_err(StoreError::io("rename to", to))
    }

    /// Gives a staged file its final name unless that is taken; says whether it was free.
    pub(crate) fn publish(&self, staged: &Path, target: &Path) -> Result<bool, StoreError> {
        match self.writable()?.publish(staged, target) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
            Err(error) => Err(StoreError::io("rename to", target)(error)),
        }
    }

    /// Removes a file; says how many bytes it took on disk, or `None` when there was none.
    pub(crate) fn remove_file(&self, path: &Path) -> Result<Option<u64>, StoreError> {
        let Some(metadata) = optional(fs::symlink_metadata(path), "inspect", path)? else { return Ok(None) };
        self.writable()?.remove_file(path).map_err(StoreError::io("remove", path))?;
        Ok(Some(bytes_on_disk(&metadata)))
    }

    /// Removes a directory if it is empty; says whether it was.
    pub(crate) fn remove_dir(&self, path: &Path) -> Result<bool, StoreError> {
        // Before it goes, so that nobody takes it for durable who makes it again.
        super::lock(&self.durable).remove(path);
        Ok(self.writable()?.remove_dir(path).is_ok())
    }

    /// Removes a directory of files, such as a transaction's.
    pub(crate) fn remove_dir_of_files(&self, path: &Path) -> Result<(), StoreError> {
        for entry in fs::read_dir(path).map_err(StoreError::io("list", path))? {
            let entry = entry.map_err(StoreError::io("list", path))?;
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                // Not of our making, but in a place where nothing has a right to be.
                fs::remove_dir_all(entry.path()).map_err(StoreError::io("remove", entry.path()))?;
            } else {
                self.remove_file(&entry.path())?;
            }
        }
        self.writable()?.remove_dir(path).map_err(StoreError::io("remove", path))
    }

    fn writable(&self) -> Result<&dyn Disk, StoreError> {
        match self.failure.get() {
            None => Ok(&*self.disk),
            Some(reason) => Err(StoreError::ReadOnly { reason: reason.clone() }),
        }
    }

    fn synced(&self, result: io::Result<()>, action: &'static str, path: &Path) -> Result<(), StoreError> {
        result.map_err(|source| {
            self.end_changes(action, path, &source);
            StoreError::io(action, path)(source)
        })
    }

    /// Only the first failure says what happened; the others follow from it.
    fn end_changes(&self, action: &str, path: &Path, source: &io::Error) {
        let reason = format!("cannot {action} {}: {source}", path.display());
        tracing::error!("{reason}; the store is read-only from now on");
        let _ = self.failure.set(reason);
    }
}

/// Whether an error tells of the disk and not of the one who asked, as too many open files does.
fn is_from_the_disk(error: &io::Error) -> bool {
    use rustix::io::Errno;
    let errno = Errno::from_io_error(error);
    matches!(errno, Some(Errno::IO | Errno::ROFS | Errno::SHUTDOWN | Errno::UCLEAN | Errno::NODEV))
}

/// Reads a file of at most `limit` bytes; `None` when there is none.
pub(crate) fn read_limited(path: &Path, limit: u64) -> Result<Option<Vec<u8>>, StoreError> {
    let Some(file) = optional(File::open(path), "open", path)? else { return Ok(None) };
    // One read where the length is known; a hostile one is capped.
    let length = file.metadata().map_err(StoreError::io("inspect", path))?.len().min(limit);
    let mut content = Vec::with_capacity(usize::try_from(length).unwrap_or_default().saturating_add(1));
    // One byte more than allowed, so that the caller's own check of the length sees the excess.
    file.take(limit.saturating_add(1)).read_to_end(&mut content).map_err(StoreError::io("read", path))?;
    Ok(Some(content))
}

/// What a file takes on disk, which for sparse or short files is not its length.
pub(crate) fn bytes_on_disk(metadata: &fs::Metadata) -> u64 {
    const STAT_BLOCK_BYTES: u64 = 512;
    metadata.blocks().saturating_mul(STAT_BLOCK_BYTES)
}

/// What a file takes on disk; nothing if there is none.
pub(crate) fn file_bytes(path: &Path) -> Result<u64, StoreError> {
    let metadata = optional(fs::symlink_metadata(path), "inspect", path)?;
    Ok(metadata.as_ref().map_or(0, bytes_on_disk))
}

/// What a directory's files take on disk, all levels; a file that vanishes meanwhile counts not.
pub(crate) fn tree_bytes(path: &Path) -> u64 {
    let mut unvisited = vec![path.to_path_buf()];
    let mut bytes = 0u64;
    while let Some(dir) = unvisited.pop() {
        for entry in fs::read_dir(&dir).into_iter().flatten().flatten() {
            match entry.metadata() {
                Ok(metadata) if metadata.is_dir() => unvisited.push(entry.path()),
                Ok(metadata) => bytes = bytes.saturating_add(bytes_on_disk(&metadata)),
                Err(_vanished) => {}
            }
        }
    }
    bytes
}

/// What is free on the file system for a user without privileges.
pub(crate) fn free_bytes(path: &Path) -> Result<u64, StoreError> {
    let stat = rustix::fs::statvfs(path).map_err(StoreError::errno("inspect", path))?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// In which steps the file system hands out room.
pub(crate) fn block_bytes(path: &Path) -> Result<u64, StoreError> {
    let stat = rustix::fs::statvfs(path).map_err(StoreError::errno("inspect", path))?;
    Ok(stat.f_frsize.max(1))
}

/// How large the file system is.
pub(crate) fn capacity_bytes(path: &Path) -> Result<u64, StoreError> {
    let stat = rustix::fs::statvfs(path).map_err(StoreError::errno("inspect", path))?;
    Ok(stat.f_blocks.saturating_mul(stat.f_frsize))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A disk that keeps nothing: its syncs fail.
    #[derive(Debug)]
    struct Broken;

    impl Disk for Broken {
        fn create_dir(&self, path: &Path) -> io::Result<()> {
            KernelDisk.create_dir(path)
        }
        fn create_file(&self, path: &Path, mode: u32) -> io::Result<File> {
            KernelDisk.create_file(path, mode)
        }
        fn reserve(&self, path: &Path, file: &File, size: u64) -> io::Result<()> {
            KernelDisk.reserve(path, file, size)
        }
        fn write_at(&self, path: &Path, file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
            KernelDisk.write_at(path, file, bytes, offset)
        }
        fn set_mode(&self, path: &Path, mode: u32) -> io::Result<()> {
            KernelDisk.set_mode(path, mode)
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
        fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
            KernelDisk.rename(from, to)
        }
        fn publish(&self, from: &Path, to: &Path) -> io::Result<()> {
            KernelDisk.publish(from, to)
        }
        fn remove_file(&self, path: &Path) -> io::Result<()> {
            KernelDisk.remove_file(path)
        }
        fn remove_dir(&self, path: &Path) -> io::Result<()> {
            KernelDisk.remove_dir(path)
        }
    }

    #[test]
    fn failed_sync_ends_all_changes_and_is_remembered() {
        let folder = tempfile::tempdir().unwrap();
        let disk = GuardedDisk::new(Arc::new(Broken));
        let path = folder.path().join("f");
        let file = disk.create_file(&path, 0o600).unwrap();
        assert!(matches!(disk.sync_file(&path, &file), Err(StoreError::Io { action: "sync", .. })));
        assert!(disk.failure().unwrap().contains("cannot sync"), "{:?}", disk.failure());
        for refused in [disk.sync_dir(folder.path()), disk.rename(&path, &folder.path().join("g"))] {
            assert!(matches!(refused, Err(StoreError::ReadOnly { .. })));
        }
        assert!(path.exists());
    }

    #[test]
    fn only_what_the_disk_itself_says_ends_all_changes() {
        use rustix::io::Errno;
        for errno in [Errno::MFILE, Errno::NFILE, Errno::NOMEM, Errno::NOENT, Errno::ACCESS] {
            assert!(!is_from_the_disk(&errno.into()), "{errno}");
        }
        assert!(is_from_the_disk(&Errno::IO.into()));
        let folder = tempfile::tempdir().unwrap();
        let disk = GuardedDisk::new(Arc::new(Broken));
        disk.sync_dir(&folder.path().join("absent")).unwrap_err();
        assert_eq!(disk.failure(), None);
    }

    #[test]
    fn room_that_is_not_there_is_not_taken() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("f");
        let file = KernelDisk.create_file(&path, 0o600).unwrap();
        let error = KernelDisk.reserve(&path, &file, 1 << 60).unwrap_err();
        assert!(super::super::error::is_no_space(&error) || error.kind() == io::ErrorKind::FileTooLarge);
        assert_eq!(bytes_on_disk(&file.metadata().unwrap()), 0);
    }
}
