//! The files of the audit log: `audit-00000001.jsonl` and so on for changes, `opens-…` and `attempts-…` for the other
//! classes. The last one of each class is written.
//!
//! A file never gets another name, so a reader that follows the log cannot lose its place, and an administrator may
//! make the files append-only (`chattr +a`).

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};

use blobd_store::{Store, StoreOwner};
use blobd_store_format::layout;
use rustix::fs::{
    AtFlags, CWD, Dir, FileType, Mode, OFlags, Stat, fstat, fsync, mkdir, openat, statat, unlinkat,
};
use rustix::io::Errno;
use tracing_mutex::stdsync::Mutex;

use super::class::Class;
use crate::locks::lock;

/// No symbolic link is followed, and no open waits for a pipe's other end.
const SAFE: OFlags = OFlags::NOFOLLOW.union(OFlags::CLOEXEC).union(OFlags::NONBLOCK);

/// The directory of an audit log. It is opened when it is first used, and again if it was removed.
#[derive(Debug)]
pub(crate) struct LogDirectory {
    location: Location,
    opened: Mutex<Option<Arc<File>>>,
    path: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LogFile {
    pub(super) class: Class,
    pub(super) number: u64,
    pub(super) bytes: u64,
}

#[derive(Debug)]
enum Location {
    /// In the store, which ends before the log. Its files belong to the store's owner.
    Store(Weak<Store>, StoreOwner),
    /// A directory that the configuration names. Its files belong to the store's owner too, whose daemon writes them.
    Path(PathBuf, StoreOwner),
}

impl LogDirectory {
    pub(crate) fn in_store(store: &Arc<Store>) -> Self {
        let path = format!("{}/{}", store.content().place().display(), layout::AUDIT);
        Self {
            location: Location::Store(Arc::downgrade(store), store.content().owner()),
            opened: Mutex::default(),
            path,
        }
    }

    /// Of a store with this owner.
    pub(crate) fn at(path: &Path, owner: StoreOwner) -> Self {
        let text = path.display().to_string();
        Self { location: Location::Path(path.to_path_buf(), owner), opened: Mutex::default(), path: text }
    }

    pub(crate) fn path(&self) -> &str {
        &self.path
    }

    /// Unlike the other methods, this creates nothing.
    pub(super) fn exists(&self) -> bool {
        match &self.location {
            Location::Store(store, _) => {
                store.upgrade().is_some_and(|store| store.content().has_audit_directory())
            }
            Location::Path(path, _) => path.exists(),
        }
    }

    const fn owner(&self) -> StoreOwner {
        match &self.location {
            Location::Store(_, owner) | Location::Path(_, owner) => *owner,
        }
    }

    /// Opens the current file of changes, to find out whether it can be written. Creates it if it does not exist.
    pub(super) fn check(&self) -> io::Result<()> {
        let last = self.numbers(Class::Change)?.last().copied().unwrap_or(1);
        self.append(Class::Change, last).map(drop)
    }

    /// The same for a log that has been written; of another one, only whether its directory can be used or created.
    /// Creates nothing.
    pub(super) fn check_present(&self) -> io::Result<()> {
        let Location::Path(path, owner) = &self.location else {
            return if self.exists() { self.check() } else { Ok(()) };
        };
        if !path.exists() {
            let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
            return check_writable(
                &fstat(openat(CWD, parent.unwrap_or(Path::new(".")), DIRECTORY, Mode::empty())?)?,
                *owner,
            );
        }
        if self.numbers(Class::Change)?.is_empty() {
            return check_writable(&fstat(self.directory()?)?, *owner);
        }
        self.check()
    }

    fn directory(&self) -> io::Result<Arc<File>> {
        let mut current = lock(&self.opened);
        if let Some(opened) = &*current
            && fstat(opened)?.st_nlink > 0
        {
            return Ok(Arc::clone(opened));
        }
        let opened = match &self.location {
            Location::Store(store, _) => {
                let store = store.upgrade().ok_or_else(|| io::Error::other("the store is closed"))?;
                store.content().audit_directory().map_err(io::Error::other)?
            }
            Location::Path(path, owner) => open(path, *owner)?,
        };
        Ok(Arc::clone(current.insert(Arc::new(opened))))
    }

    /// The numbers of the files of a class, the oldest first.
    pub(super) fn numbers(&self, class: Class) -> io::Result<Vec<u64>> {
        let names = self.names()?.into_iter().filter(|(of, _)| *of == class);
        let mut numbers: Vec<u64> = names.map(|(_, number)| number).collect();
        numbers.sort_unstable();
        Ok(numbers)
    }

    pub(super) fn files(&self) -> io::Result<Vec<LogFile>> {
        let directory = self.directory()?;
        let mut files = Vec::new();
        for (class, number) in self.names()? {
            match statat(&directory, name(class, number), AtFlags::SYMLINK_NOFOLLOW) {
                Ok(status) => files.push(LogFile { class, number, bytes: taken_bytes(&status) }),
                Err(Errno::NOENT) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(files)
    }

    fn names(&self) -> io::Result<Vec<(Class, u64)>> {
        let mut names = Vec::new();
        for entry in Dir::read_from(&self.directory()?)? {
            names.extend(entry?.file_name().to_str().ok().and_then(parse_name));
        }
        Ok(names)
    }

    /// Opens a file for appending, and creates it if it does not exist.
    pub(super) fn append(&self, class: Class, number: u64) -> io::Result<File> {
        let flags = OFlags::WRONLY | OFlags::APPEND | OFlags::CREATE | SAFE;
        let directory = self.directory()?;
        let _identity = self.owner().act()?;
        let file = openat(&directory, name(class, number), flags, Mode::RUSR | Mode::WUSR)?;
        regular(File::from(file))
    }

    /// Opens a file for reading; `None` if it was removed.
    pub(super) fn read(&self, class: Class, number: u64) -> io::Result<Option<File>> {
        match openat(&self.directory()?, name(class, number), OFlags::RDONLY | SAFE, Mode::empty()) {
            Ok(file) => regular(File::from(file)).map(Some),
            Err(Errno::NOENT) => Ok(None),
            Err(errno) => Err(errno.into()),
        }
    }

    pub(super) fn remove(&self, file: LogFile) -> io::Result<()> {
        let _identity = self.owner().act()?;
        Ok(unlinkat(&self.directory()?, name(file.class, file.number), AtFlags::empty())?)
    }

    /// Makes the names of the files durable.
    pub(super) fn sync(&self) -> io::Result<()> {
        Ok(fsync(&self.directory()?)?)
    }
}

const DIRECTORY: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(SAFE);

/// Opens a directory, or creates it for the owner alone. Its parent must exist.
fn open(path: &Path, owner: StoreOwner) -> io::Result<File> {
    let _identity = owner.act()?;
    match mkdir(path, Mode::RWXU) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(errno) => return Err(errno.into()),
    }
    let directory = File::from(openat(CWD, path, DIRECTORY, Mode::empty())?);
    let status = fstat(&directory)?;
    if status.st_mode & 0o022 == 0 && [0, owner.uid].contains(&status.st_uid) {
        return Ok(directory);
    }
    let (mode, uid, own) = (status.st_mode & 0o777, status.st_uid, owner.uid);
    let what = format!(
        "expected a directory of uid {own} or root that only its owner can write, found owner uid {uid} and mode {mode:04o}"
    );
    Err(io::Error::new(io::ErrorKind::PermissionDenied, what))
}

/// Whether the owner of the store may create files in a directory, as far as its mode says. `access` does not tell: it
/// asks for the user of the process.
fn check_writable(directory: &Stat, owner: StoreOwner) -> io::Result<()> {
    const TO_CREATE: u32 = 0o3;
    let (mode, uid) = (directory.st_mode & 0o777, directory.st_uid);
    let granted = match (uid == owner.uid, directory.st_gid == owner.gid) {
        (true, _) => mode >> 6,
        (false, true) => mode >> 3,
        (false, false) => mode,
    };
    if owner.uid == 0 || granted & TO_CREATE == TO_CREATE {
        return Ok(());
    }
    let own = owner.uid;
    let what =
        format!("uid {own} cannot create files there: it belongs to uid {uid} and has mode {mode:04o}");
    Err(io::Error::new(io::ErrorKind::PermissionDenied, what))
}

/// The length of a file, or its size on disk if that is less: a hole must not push other files out of the log.
fn taken_bytes(status: &Stat) -> u64 {
    const STAT_BLOCK_BYTES: u64 = 512;
    let length = u64::try_from(status.st_size).unwrap_or_default();
    let allocated = u64::try_from(status.st_blocks).unwrap_or_default().saturating_mul(STAT_BLOCK_BYTES);
    length.min(allocated)
}

fn name(class: Class, number: u64) -> String {
    format!("{}{number:08}.jsonl", class.file_prefix())
}

fn parse_name(text: &str) -> Option<(Class, u64)> {
    let class = Class::ALL.into_iter().find(|class| text.starts_with(class.file_prefix()))?;
    let number = text.strip_prefix(class.file_prefix())?.strip_suffix(".jsonl")?.parse().ok()?;
    (name(class, number) == text).then_some((class, number))
}

/// Refuses anything but a regular file with one name: another name may be in a directory that others can write.
fn regular(file: File) -> io::Result<File> {
    let status = fstat(&file)?;
    if FileType::from_raw_mode(status.st_mode) == FileType::RegularFile && status.st_nlink <= 1 {
        return Ok(file);
    }
    Err(io::Error::other("not a regular file with one name"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_parsed_as_they_are_made() {
        for class in Class::ALL {
            for number in [0, 1, 99_999_999, 100_000_000, u64::MAX] {
                assert_eq!(parse_name(&name(class, number)), Some((class, number)));
            }
        }
        for other in ["audit-1.jsonl", "audit-+0000001.jsonl", "audit-00000001.json", "other"] {
            assert_eq!(parse_name(other), None, "{other}");
        }
    }

    #[test]
    fn directory_that_was_removed_is_created_again() {
        let folder = tempfile::tempdir().unwrap();
        let directory = LogDirectory::at(&folder.path().join("log"), StoreOwner::for_process());
        directory.append(Class::Change, 1).unwrap();
        std::fs::remove_dir_all(folder.path().join("log")).unwrap();
        directory.append(Class::Change, 2).unwrap();
        assert_eq!(directory.numbers(Class::Change).unwrap(), [2]);
    }

    #[test]
    fn links_and_pipes_are_not_opened() {
        let folder = tempfile::tempdir().unwrap();
        let directory = LogDirectory::at(&folder.path().join("log"), StoreOwner::for_process());
        assert!(directory.numbers(Class::Change).unwrap().is_empty());
        let path = |number| folder.path().join("log").join(name(Class::Open, number));
        std::fs::write(folder.path().join("victim"), "x").unwrap();
        std::os::unix::fs::symlink("../victim", path(1)).unwrap();
        std::fs::hard_link(folder.path().join("victim"), path(2)).unwrap();
        rustix::fs::mknodat(CWD, path(3), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        for number in 1..=3 {
            assert!(
                directory.append(Class::Open, number).is_err()
                    && directory.read(Class::Open, number).is_err(),
                "{number}"
            );
        }
        assert!(directory.read(Class::Open, 4).unwrap().is_none());
    }

    #[test]
    fn directory_that_others_can_write_is_refused() {
        use std::os::unix::fs::PermissionsExt as _;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        std::fs::create_dir(&path).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o770)).unwrap();
        let error = LogDirectory::at(&path, StoreOwner::for_process())
            .numbers(Class::Change)
            .unwrap_err()
            .to_string();
        assert!(error.contains("mode 0770"), "{error}");
    }

    #[test]
    fn directory_is_checked_without_creating_anything() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        let (own, other) = (StoreOwner::for_process(), StoreOwner { uid: 54321, gid: 54321 });
        LogDirectory::at(&path, own).check_present().unwrap();
        assert!(!path.exists());
        let missing = LogDirectory::at(&path.join("log"), own).check_present().unwrap_err();
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
        std::fs::create_dir(&path).unwrap();
        LogDirectory::at(&path, own).check_present().unwrap();
        assert_eq!(std::fs::read_dir(&path).unwrap().count(), 0);
        let refusal = LogDirectory::at(&path, other).check_present().unwrap_err();
        assert_eq!(refusal.kind(), io::ErrorKind::PermissionDenied);
    }
}
