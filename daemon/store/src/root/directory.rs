//! An open directory of the store. Access to its entries does not resolve its path again.

use std::ffi::{CStr, OsString};
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStringExt as _;
use std::path::Path;

use rustix::fs::{AtFlags, Dir, FileType, Mode, RawDir, SeekFrom, openat, seek, statat, unlinkat};
use rustix::io::Errno;

use super::FileStatus;
use crate::StoreError;
use crate::error::DisplayPath;

/// The store's own directories are not nested this deep; files in deeper ones are not counted.
const MAX_LEVELS: usize = 32;

#[derive(Debug)]
pub(crate) struct Directory {
    pub(crate) file: File,
    pub(crate) place: DisplayPath,
}

#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) name: OsString,
    /// The type of the entry itself, also of a symbolic link.
    pub(crate) kind: FileType,
    pub(crate) inode: u64,
}

impl Entry {
    pub(crate) fn is_dir(&self) -> bool {
        self.kind == FileType::Directory
    }
}

impl Directory {
    pub(super) const fn new(file: File, place: DisplayPath) -> Self {
        Self { file, place }
    }

    pub(crate) fn own_status(&self) -> Result<FileStatus, StoreError> {
        FileStatus::from_file(&self.file).map_err(StoreError::io("inspect", self.place.clone()))
    }

    /// The status of an entry; `None` if it does not exist. A symbolic link is not followed.
    pub(crate) fn status(&self, name: impl AsRef<Path>) -> Result<Option<FileStatus>, StoreError> {
        let name = name.as_ref();
        let stat = statat(&self.file, name, AtFlags::SYMLINK_NOFOLLOW);
        Ok(self.optional(stat, "inspect", name)?.map(FileStatus::from))
    }

    pub(crate) fn find_directory(&self, name: impl AsRef<Path>) -> Result<Option<Self>, StoreError> {
        let name = name.as_ref();
        let opened = openat(&self.file, name, super::DIRECTORY, Mode::empty());
        let opened = self.optional(opened, super::OPEN_DIRECTORY, name)?;
        Ok(opened.map(|opened| Self { file: File::from(opened), place: self.place.join(name) }))
    }

    pub(crate) fn find_entry(&self, name: impl AsRef<Path>) -> Result<Option<File>, StoreError> {
        let name = name.as_ref();
        let opened = openat(&self.file, name, super::FILE, Mode::empty());
        Ok(self.optional(opened, "open", name)?.map(File::from))
    }

    /// Turns a not-found error into `Ok(None)`.
    fn optional<T>(
        &self,
        found: rustix::io::Result<T>,
        action: &'static str,
        name: &Path,
    ) -> Result<Option<T>, StoreError> {
        match found {
            Ok(found) => Ok(Some(found)),
            Err(Errno::NOENT) => Ok(None),
            Err(errno) => Err(StoreError::errno(action, self.place.join(name))(errno)),
        }
    }

    /// Removes a file of a cache. Other files are removed through a [`crate::disk::Disk`].
    pub(crate) fn remove_file(&self, name: impl AsRef<Path>) -> Result<(), StoreError> {
        let name = name.as_ref();
        let removed = unlinkat(&self.file, name, AtFlags::empty());
        removed.map_err(StoreError::errno("remove", self.place.join(name)))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.entries().is_ok_and(|mut entries| entries.next().is_none())
    }

    /// Bytes on disk of all files below it. Files that cannot be read count as 0.
    pub(crate) fn tree_bytes(&self) -> u64 {
        self.bytes_to_depth(MAX_LEVELS)
    }

    fn bytes_to_depth(&self, levels: usize) -> u64 {
        let mut bytes = 0u64;
        for entry in self.entries().into_iter().flatten().flatten() {
            let below = match (entry.is_dir(), levels.checked_sub(1)) {
                (true, Some(levels)) => {
                    self.find_directory(&entry.name).ok().flatten().map(|d| d.bytes_to_depth(levels))
                }
                _ => self.status(&entry.name).ok().flatten().map(|status| status.allocated_bytes()),
            };
            bytes = bytes.saturating_add(below.unwrap_or_default());
        }
        bytes
    }

    /// What `parse` makes of the names in it, unordered. Names for which that is nothing are not blobd's.
    pub(crate) fn parsed_names<T>(&self, parse: impl Fn(&str) -> Option<T>) -> Result<Vec<T>, StoreError> {
        let mut parsed = Vec::new();
        for entry in self.entries()? {
            parsed.extend(entry?.name.to_str().and_then(&parse));
        }
        Ok(parsed)
    }

    /// Its entries, unordered. An entry that is removed during the iteration may be left out.
    pub(crate) fn entries(&self) -> Result<impl Iterator<Item = Result<Entry, StoreError>> + '_, StoreError> {
        let names = Dir::read_from(&self.file).map_err(StoreError::errno("list", self.place.clone()))?;
        let named = names.filter(|entry| {
            let name = entry.as_ref().map(rustix::fs::DirEntry::file_name);
            !name.is_ok_and(|name| name == c"." || name == c"..")
        });
        Ok(named.filter_map(|entry| {
            let entry = entry.map_err(io::Error::from);
            match entry.and_then(|entry| self.entry(entry.file_name(), entry.file_type(), entry.ino())) {
                Ok(entry) => entry.map(Ok),
                Err(error) => Some(Err(StoreError::io("list", self.place.clone())(error))),
            }
        }))
    }

    /// Like [`Self::entries`] in half as many system calls: the listing has no descriptor of its own, so no other one
    /// of this directory may be in progress.
    pub(crate) fn each_entry(
        &self,
        mut visit: impl FnMut(Entry) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        const BUFFER_BYTES: usize = 8 << 10;
        let failure = |errno| StoreError::errno("list", self.place.clone())(errno);
        seek(&self.file, SeekFrom::Start(0)).map_err(failure)?;
        let mut buffer = [MaybeUninit::uninit(); BUFFER_BYTES];
        let mut names = RawDir::new(&self.file, &mut buffer);
        while let Some(entry) = names.next() {
            let entry = match entry {
                // The directory was removed meanwhile.
                Err(Errno::NOENT) => break,
                entry => entry.map_err(failure)?,
            };
            let name = entry.file_name();
            if name == c"." || name == c".." {
                continue;
            }
            let entry = self.entry(name, entry.file_type(), entry.ino());
            entry.map_err(StoreError::io("list", self.place.clone()))?.map_or(Ok(()), &mut visit)?;
        }
        Ok(())
    }

    fn entry(&self, name: &CStr, kind: FileType, inode: u64) -> io::Result<Option<Entry>> {
        let kind = match kind {
            // Some file systems do not return the type in the listing.
            FileType::Unknown => match statat(&self.file, name, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(stat) => FileType::from_raw_mode(stat.st_mode),
                Err(Errno::NOENT) => return Ok(None),
                Err(errno) => return Err(errno.into()),
            },
            kind => kind,
        };
        Ok(Some(Entry { name: OsString::from_vec(name.to_bytes().to_vec()), kind, inode }))
    }
}
