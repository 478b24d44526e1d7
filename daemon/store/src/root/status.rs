//! The result of `stat`.

use std::io;
use std::os::fd::AsFd;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::fs::{FileType, Stat};

/// The status of a file; of a symbolic link itself, not of its target.
#[derive(Clone, Copy, Debug)]
pub struct FileStatus(Stat);

impl From<Stat> for FileStatus {
    fn from(stat: Stat) -> Self {
        Self(stat)
    }
}

impl FileStatus {
    /// The status of an open file.
    pub fn of(file: impl AsFd) -> io::Result<Self> {
        Ok(Self(rustix::fs::fstat(file)?))
    }

    /// The type of the file.
    #[must_use]
    pub fn kind(&self) -> FileType {
        FileType::from_raw_mode(self.0.st_mode)
    }

    /// Whether it is a regular file.
    #[must_use]
    pub fn is_file(&self) -> bool {
        self.kind() == FileType::RegularFile
    }

    /// Whether it is a directory.
    #[must_use]
    pub fn is_dir(&self) -> bool {
        self.kind() == FileType::Directory
    }

    /// Its length in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "it is a file's length, as in `std::fs::Metadata`")]
    pub fn len(&self) -> u64 {
        u64::try_from(self.0.st_size).unwrap_or_default()
    }

    /// The bytes allocated on disk, which for sparse or short files differ from the length.
    #[must_use]
    pub fn allocated_bytes(&self) -> u64 {
        const STAT_BLOCK_BYTES: u64 = 512;
        u64::try_from(self.0.st_blocks).unwrap_or_default().saturating_mul(STAT_BLOCK_BYTES)
    }

    /// The permission bits.
    #[must_use]
    pub const fn permissions(&self) -> u32 {
        self.0.st_mode & 0o7777
    }

    /// The owner's user id.
    #[must_use]
    pub const fn owner(&self) -> u32 {
        self.0.st_uid
    }

    /// The owner's group id.
    #[must_use]
    pub(crate) const fn group(&self) -> u32 {
        self.0.st_gid
    }

    /// The number of names (hard links).
    #[must_use]
    #[allow(clippy::useless_conversion, reason = "its width depends on the architecture")]
    pub fn links(&self) -> u64 {
        u64::from(self.0.st_nlink)
    }

    /// Device and inode, which identify the file.
    #[must_use]
    pub const fn identity(&self) -> (u64, u64) {
        (self.0.st_dev, self.0.st_ino)
    }

    /// The modification time (mtime) in seconds and nanoseconds since 1970.
    #[must_use]
    #[allow(clippy::unnecessary_fallible_conversions, reason = "its width depends on the architecture")]
    pub(crate) fn content_changed(&self) -> (i64, i64) {
        (self.0.st_mtime, i64::try_from(self.0.st_mtime_nsec).unwrap_or_default())
    }

    /// The change time (ctime) in seconds and nanoseconds since 1970.
    #[must_use]
    #[allow(clippy::unnecessary_fallible_conversions, reason = "its width depends on the architecture")]
    pub(crate) fn status_changed(&self) -> (i64, i64) {
        (self.0.st_ctime, i64::try_from(self.0.st_ctime_nsec).unwrap_or_default())
    }

    /// The modification time; 1970 if earlier.
    #[must_use]
    pub fn modified(&self) -> SystemTime {
        let (seconds, nanos) = self.content_changed();
        let since = Duration::new(
            u64::try_from(seconds).unwrap_or_default(),
            u32::try_from(nanos).unwrap_or_default(),
        );
        UNIX_EPOCH.checked_add(since).unwrap_or(UNIX_EPOCH)
    }
}

/// The name of a file type, for messages.
pub(crate) const fn describe(kind: FileType) -> &'static str {
    match kind {
        FileType::RegularFile => "regular file",
        FileType::Directory => "directory",
        FileType::Symlink => "symbolic link",
        FileType::Fifo => "FIFO",
        FileType::Socket => "socket",
        FileType::CharacterDevice | FileType::BlockDevice => "device",
        FileType::Unknown => "file of an unknown kind",
    }
}
