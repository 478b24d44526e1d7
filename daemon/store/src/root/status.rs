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
    pub fn from_file(file: impl AsFd) -> io::Result<Self> {
        Ok(Self(rustix::fs::fstat(file)?))
    }

    pub fn kind(&self) -> FileType {
        FileType::from_raw_mode(self.0.st_mode)
    }

    pub fn is_file(&self) -> bool {
        self.kind() == FileType::RegularFile
    }

    pub fn is_dir(&self) -> bool {
        self.kind() == FileType::Directory
    }

    #[expect(clippy::len_without_is_empty, reason = "it is a file's length, as in `std::fs::Metadata`")]
    pub fn len(&self) -> u64 {
        u64::try_from(self.0.st_size).unwrap_or_default()
    }

    /// The bytes allocated on disk, which for sparse or short files differ from the length.
    pub fn allocated_bytes(&self) -> u64 {
        const STAT_BLOCK_BYTES: u64 = 512;
        u64::try_from(self.0.st_blocks).unwrap_or_default().saturating_mul(STAT_BLOCK_BYTES)
    }

    pub const fn permissions(&self) -> u32 {
        self.0.st_mode & 0o7777
    }

    pub const fn owner(&self) -> u32 {
        self.0.st_uid
    }

    pub(crate) const fn group(&self) -> u32 {
        self.0.st_gid
    }

    #[allow(clippy::useless_conversion, reason = "its width depends on the architecture")]
    pub fn links(&self) -> u64 {
        u64::from(self.0.st_nlink)
    }

    /// Device and inode, which identify the file.
    pub const fn identity(&self) -> (u64, u64) {
        (self.0.st_dev, self.0.st_ino)
    }

    /// The modification time (mtime) in seconds and nanoseconds since 1970.
    #[allow(clippy::unnecessary_fallible_conversions, reason = "its width depends on the architecture")]
    pub(crate) fn content_changed(&self) -> (i64, i64) {
        (self.0.st_mtime, i64::try_from(self.0.st_mtime_nsec).unwrap_or_default())
    }

    /// The change time (ctime) in seconds and nanoseconds since 1970.
    #[allow(clippy::unnecessary_fallible_conversions, reason = "its width depends on the architecture")]
    pub(crate) fn status_changed(&self) -> (i64, i64) {
        (self.0.st_ctime, i64::try_from(self.0.st_ctime_nsec).unwrap_or_default())
    }

    /// The modification time; 1970 if earlier.
    pub fn modified(&self) -> SystemTime {
        let (seconds, nanos) = self.content_changed();
        let since = Duration::new(
            u64::try_from(seconds).unwrap_or_default(),
            u32::try_from(nanos).unwrap_or_default(),
        );
        UNIX_EPOCH.checked_add(since).unwrap_or(UNIX_EPOCH)
    }
}

/// Inode, length, and modification and change time, each in seconds and nanoseconds since 1970.
pub(crate) type Stamp = (u64, u64, [i64; 4]);

/// No file system has a longer clock tick; some older ones have two seconds.
#[cfg(not(test))]
const TICK: Duration = Duration::from_secs(2);
/// So that tests need not wait; the file systems on which they run have shorter ticks.
#[cfg(test)]
const TICK: Duration = Duration::from_millis(50);

impl FileStatus {
    /// A value that changes with the file; `None` if it changed so recently that another change would not show.
    pub(crate) fn settled_stamp(&self) -> Option<Stamp> {
        let (content, changed) = (self.content_changed(), self.status_changed());
        let since = Duration::new(u64::try_from(changed.0).ok()?, u32::try_from(changed.1).ok()?);
        let age = SystemTime::UNIX_EPOCH.elapsed().ok()?.checked_sub(since)?;
        let ((_device, inode), times) = (self.identity(), [content.0, content.1, changed.0, changed.1]);
        (age > TICK).then_some((inode, self.len(), times))
    }
}

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

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    fn stat() -> Stat {
        let file = tempfile::tempfile().unwrap();
        file.set_len(5).unwrap();
        rustix::fs::fstat(&file).unwrap()
    }

    #[test]
    fn status_is_that_of_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("f");
        std::fs::write(&path, vec![7; 5000]).unwrap();
        std::fs::hard_link(&path, folder.path().join("g")).unwrap();
        let file = std::fs::File::open(&path).unwrap();
        let time = UNIX_EPOCH + Duration::new(1_234_567, 891_000_000);
        file.set_modified(time).unwrap();
        let (found, expected) = (FileStatus::from_file(&file).unwrap(), file.metadata().unwrap());
        assert_eq!((found.len(), found.allocated_bytes()), (5000, expected.blocks() * 512));
        assert_eq!((found.permissions(), found.links()), (expected.mode() & 0o7777, 2));
        assert_eq!((found.owner(), found.group()), (expected.uid(), expected.gid()));
        assert_eq!(found.identity(), (expected.dev(), expected.ino()));
        assert_eq!((found.content_changed(), found.modified()), ((1_234_567, 891_000_000), time));
        assert_eq!(found.status_changed(), (expected.ctime(), expected.ctime_nsec()));
        assert!(found.is_file() && !found.is_dir());
        let directory = FileStatus::from_file(std::fs::File::open(folder.path()).unwrap()).unwrap();
        assert!(directory.is_dir() && !directory.is_file());
    }

    #[test]
    fn time_before_1970_counts_as_1970() {
        let mut early = stat();
        (early.st_mtime, early.st_mtime_nsec) = (-5, 0);
        assert_eq!(FileStatus(early).modified(), UNIX_EPOCH);
    }

    #[test]
    fn stamp_is_known_when_the_last_change_is_some_time_ago() {
        let now = i64::try_from(UNIX_EPOCH.elapsed().unwrap().as_secs()).unwrap();
        let changed = |seconds| {
            let mut stat = stat();
            (stat.st_mtime, stat.st_mtime_nsec, stat.st_ctime, stat.st_ctime_nsec) = (1000, 1, seconds, 2);
            (stat.st_ino, FileStatus(stat).settled_stamp())
        };
        let (inode, stamp) = changed(now - 60);
        assert_eq!(stamp, Some((inode, 5, [1000, 1, now - 60, 2])));
        for recent in [now + 60, -1] {
            assert_eq!(changed(recent).1, None, "{recent}");
        }
        let file = tempfile::tempfile().unwrap();
        // Again if this thread had to wait in between.
        let is_recent = |length| {
            file.set_len(length).unwrap();
            FileStatus::from_file(&file).unwrap().settled_stamp().is_none()
        };
        assert!((0..100).any(is_recent), "it has just changed");
    }

    #[test]
    fn kinds_of_files_have_names() {
        for (kind, name) in [
            (FileType::RegularFile, "regular file"),
            (FileType::Directory, "directory"),
            (FileType::Symlink, "symbolic link"),
            (FileType::Fifo, "FIFO"),
            (FileType::Socket, "socket"),
            (FileType::CharacterDevice, "device"),
            (FileType::BlockDevice, "device"),
            (FileType::Unknown, "file of an unknown kind"),
        ] {
            assert_eq!(describe(kind), name);
        }
    }
}
