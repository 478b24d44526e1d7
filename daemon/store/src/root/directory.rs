//! An open directory of the store: what is in it, without the way to it being walked again.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStringExt as _;
use std::path::Path;

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, openat, statat, unlinkat};
use rustix::io::Errno;

use super::FileStatus;
use crate::StoreError;
use crate::place::Place;

/// Directories nest no deeper than `manifests/` does; what somebody else has nested deeper is not counted.
const MAX_LEVELS: usize = 32;

/// A directory of the store, open for listing.
#[derive(Debug)]
pub(crate) struct Directory {
    file: File,
    place: Place,
}

/// A name in a directory.
#[derive(Debug)]
pub(crate) struct Entry {
    /// The name.
    pub(crate) name: OsString,
    /// What it is; a symbolic link is that, whatever it points to.
    pub(crate) kind: FileType,
    /// Its inode.
    pub(crate) inode: u64,
}

impl Entry {
    /// Whether it is a directory.
    pub(crate) fn is_dir(&self) -> bool {
        self.kind == FileType::Directory
    }
}

impl Directory {
    pub(super) const fn new(file: File, place: Place) -> Self {
        Self { file, place }
    }

    /// Where it is.
    pub(crate) const fn place(&self) -> &Place {
        &self.place
    }

    /// The open directory.
    pub(crate) const fn file(&self) -> &File {
        &self.file
    }

    /// What it says about itself.
    ///
    /// # Errors
    /// [`StoreError::Io`].
    pub(crate) fn own_status(&self) -> Result<FileStatus, StoreError> {
        FileStatus::of(&self.file).map_err(StoreError::io("inspect", self.place.clone()))
    }

    /// What the file system says about a name in it; `None` if nothing has it. A symbolic link is
    /// not followed.
    ///
    /// # Errors
    /// [`StoreError::Io`].
    pub(crate) fn status(&self, name: impl AsRef<Path>) -> Result<Option<FileStatus>, StoreError> {
        let name = name.as_ref();
        match statat(&self.file, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Ok(Some(stat.into())),
            Err(Errno::NOENT) => Ok(None),
            Err(errno) => Err(StoreError::errno("inspect", self.place.join(name))(errno)),
        }
    }

    /// Opens a directory in it; `None` if nothing has that name.
    ///
    /// # Errors
    /// [`StoreError::Io`], also if it is no directory.
    pub(crate) fn find_directory(&self, name: impl AsRef<Path>) -> Result<Option<Self>, StoreError> {
        let place = self.place.join(name.as_ref());
        match openat(&self.file, name.as_ref(), OFlags::RDONLY | super::DIRECTORY, Mode::empty()) {
            Ok(opened) => Ok(Some(Self { file: File::from(opened), place })),
            Err(Errno::NOENT) => Ok(None),
            Err(errno) => Err(StoreError::errno("open directory", place)(errno)),
        }
    }

    /// Opens a regular file or a directory in it for reading; `None` if nothing has that name.
    ///
    /// # Errors
    /// [`StoreError::Io`].
    pub(crate) fn find_entry(&self, name: impl AsRef<Path>) -> Result<Option<File>, StoreError> {
        let name = name.as_ref();
        match openat(&self.file, name, OFlags::RDONLY | super::FILE, Mode::empty()) {
            Ok(opened) => Ok(Some(File::from(opened))),
            Err(Errno::NOENT) => Ok(None),
            Err(errno) => Err(StoreError::errno("open", self.place.join(name))(errno)),
        }
    }

    /// Removes a file from it. For a cache: what is to last is removed through a [`super::super::disk::Disk`].
    ///
    /// # Errors
    /// [`StoreError::Io`].
    pub(crate) fn remove_file(&self, name: impl AsRef<Path>) -> Result<(), StoreError> {
        let name = name.as_ref();
        let removed = unlinkat(&self.file, name, AtFlags::empty());
        removed.map_err(StoreError::errno("remove", self.place.join(name)))
    }

    /// Whether it can be seen that nothing is in it.
    pub(crate) fn is_empty(&self) -> bool {
        self.entries().is_ok_and(|mut entries| entries.next().is_none())
    }

    /// What the files in it take on disk, all levels; what vanishes meanwhile or cannot be read
    /// counts not.
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

    /// Its entries, in no order. One that vanishes while they are read may be left out.
    ///
    /// # Errors
    /// [`StoreError::Io`], also for each entry.
    pub(crate) fn entries(&self) -> Result<impl Iterator<Item = Result<Entry, StoreError>> + '_, StoreError> {
        let names = Dir::read_from(&self.file).map_err(StoreError::errno("list", self.place.clone()))?;
        let named = names.filter(|entry| {
            let name = entry.as_ref().map(rustix::fs::DirEntry::file_name);
            !name.is_ok_and(|name| name == c"." || name == c"..")
        });
        Ok(named.filter_map(|entry| {
            match entry.map_err(io::Error::from).and_then(|entry| self.entry(&entry)) {
                Ok(entry) => entry.map(Ok),
                Err(error) => Some(Err(StoreError::io("list", self.place.clone())(error))),
            }
        }))
    }

    fn entry(&self, entry: &rustix::fs::DirEntry) -> io::Result<Option<Entry>> {
        let kind = match entry.file_type() {
            // Some file systems do not say it in the listing.
            FileType::Unknown => match statat(&self.file, entry.file_name(), AtFlags::SYMLINK_NOFOLLOW) {
                Ok(stat) => FileType::from_raw_mode(stat.st_mode),
                Err(Errno::NOENT) => return Ok(None),
                Err(errno) => return Err(errno.into()),
            },
            kind => kind,
        };
        let name = OsString::from_vec(entry.file_name().to_bytes().to_vec());
        Ok(Some(Entry { name, kind, inode: entry.ino() }))
    }
}
