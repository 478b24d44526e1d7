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
use super::lock;

/// No symbolic link is followed, and no open waits for a pipe's other end.
const SAFE: OFlags = OFlags::NOFOLLOW.union(OFlags::CLOEXEC).union(OFlags::NONBLOCK);

/// The directory of an audit log, which is opened when it is first used, and again if it was removed.
#[derive(Debug)]
pub(crate) struct LogDirectory {
    place: Place,
    opened: Mutex<Option<Arc<File>>>,
    path: String,
}

/// A file of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LogFile {
    pub(super) class: Class,
    pub(super) number: u64,
    pub(super) bytes: u64,
}

#[derive(Debug)]
enum Place {
    /// In the store, which ends before the log. Its files belong to the store's owner.
    Store(Weak<Store>, StoreOwner),
    /// A directory that the configuration names.
    Path(PathBuf),
}

impl LogDirectory {
    pub(crate) fn of_store(store: &Arc<Store>) -> Self {
        let path = format!("{}/{}", store.content().place().display(), layout::AUDIT);
        Self {
            place: Place::Store(Arc::downgrade(store), store.content().owner()),
            opened: Mutex::default(),
            path,
        }
    }

    pub(crate) fn at(path: &Path) -> Self {
        let text = path.display().to_string();
        Self { place: Place::Path(path.to_path_buf()), opened: Mutex::default(), path: text }
    }

    /// For messages.
    pub(crate) fn path(&self) -> &str {
        &self.path
    }

    /// Whether there is something at its place. Unlike the other methods, this creates nothing.
    pub(super) fn exists(&self) -> bool {
        match &self.place {
            Place::Store(store, _) => {
                store.upgrade().is_some_and(|store| store.content().has_audit_directory())
            }
            Place::Path(path) => path.exists(),
        }
    }

    fn directory(&self) -> io::Result<Arc<File>> {
        let mut current = lock(&self.opened);
        if let Some(opened) = &*current
            && fstat(opened)?.st_nlink > 0
        {
            return Ok(Arc::clone(opened));
        }
        let opened = match &self.place {
            Place::Store(store, _) => {
                let store = store.upgrade().ok_or_else(|| io::Error::other("the store is closed"))?;
                store.content().audit_directory().map_err(io::Error::other)?
            }
            Place::Path(path) => open(path)?,
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

    /// All files, with their sizes.
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
        let _identity = match self.place {
            Place::Store(_, owner) => owner.act()?,
            Place::Path(_) => None,
        };
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
        Ok(unlinkat(&self.directory()?, name(file.class, file.number), AtFlags::empty())?)
    }

    /// Makes the names of the files durable.
    pub(super) fn sync(&self) -> io::Result<()> {
        Ok(fsync(&self.directory()?)?)
    }
}

/// Opens a directory, or creates it for this user alone. Its parent must exist.
fn open(path: &Path) -> io::Result<File> {
    match mkdir(path, Mode::RWXU) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(errno) => return Err(errno.into()),
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | SAFE;
    let directory = File::from(openat(CWD, path, flags, Mode::empty())?);
    let status = fstat(&directory)?;
    let own = rustix::process::geteuid().as_raw();
    if status.st_mode & 0o022 == 0 && [0, own].contains(&status.st_uid) {
        return Ok(directory);
    }
    let (mode, uid) = (status.st_mode & 0o777, status.st_uid);
    Err(io::Error::other(format!(
        "expected a directory of uid {own} or root that only its owner can write, found owner uid {uid} and mode {mode:04o}"
    )))
}

/// The length of a file, or what it takes on disk if that is less: a hole must not push other files out of the log.
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

/// Refuses anything but a file with one name: another name may be in a directory that others can write.
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
        let directory = LogDirectory::at(&folder.path().join("log"));
        directory.append(Class::Change, 1).unwrap();
        std::fs::remove_dir_all(folder.path().join("log")).unwrap();
        directory.append(Class::Change, 2).unwrap();
        assert_eq!(directory.numbers(Class::Change).unwrap(), [2]);
    }

    #[test]
    fn links_and_pipes_are_not_opened() {
        let folder = tempfile::tempdir().unwrap();
        let directory = LogDirectory::at(&folder.path().join("log"));
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
        let error = LogDirectory::at(&path).numbers(Class::Change).unwrap_err().to_string();
        assert!(error.contains("mode 0770"), "{error}");
    }
}
