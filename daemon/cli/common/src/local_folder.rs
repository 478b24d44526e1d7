//! The files of a folder, listed and opened so that nothing outside of it is read.
//!
//! The folder may belong to somebody else, and may change meanwhile. So every file is opened from the folder's own
//! descriptor: the kernel refuses a path that leads out of it, through a link or `..` (`openat2` with
//! `RESOLVE_BENEATH`). A file is taken only if it is still the one that was listed.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::fs::{File, Metadata};
use std::io::{self, Read as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use crate::file_error;
use crate::output::printable;
use blobd_store_format::model_folder::{FolderFile, ListedFolder};
use rustix::fs::{CWD, Dir, FileType, Mode, OFlags, ResolveFlags, Stat, fstat, openat, openat2};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::{ErrorBody, ErrorCode};

/// A folder whose files are listed.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    /// The folder that links may not lead out of.
    boundary: OwnedFd,
    /// The path of the folder in `boundary`; empty if it is that itself.
    prefix: String,
    links: Links,
    entries: BTreeMap<String, Entry>,
}

/// A folder that is being listed.
struct Listing<'l> {
    is_excluded: &'l dyn Fn(&str) -> bool,
    /// How many excluded files were found.
    excluded: usize,
    seen: BTreeSet<Inode>,
    /// The folders in it that have not been listed.
    left: Vec<String>,
}

impl Listing<'_> {
    /// The most excluded files that are listed, so that their user sees what is left out.
    const MAX_EXCLUDED: usize = 10_000;
    /// The most excluded files that are looked at.
    const MAX_SEEN: usize = 2_000_000;

    /// Whether there are too many files, given the number of those that are listed.
    fn is_full(&self, listed: usize) -> bool {
        let counted = listed.saturating_sub(self.excluded.min(Self::MAX_EXCLUDED));
        counted.saturating_add(self.left.len()) > ListedFolder::MAX_FILES || self.excluded > Self::MAX_SEEN
    }

    /// Counts the file at this path; whether it is one of too many excluded files.
    fn skips(&mut self, path: &str) -> bool {
        let is_excluded = (self.is_excluded)(path);
        self.excluded = self.excluded.saturating_add(usize::from(is_excluded));
        is_excluded && self.excluded > Self::MAX_EXCLUDED
    }
}

/// Which links of a folder are followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Links {
    /// Those to files of the folder.
    Inside,
    /// All.
    Everywhere,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Entry {
    File(Identity),
    /// Something that is not a file of the folder, and what it is.
    Other(&'static str),
}

/// A file by its device and inode.
pub type Inode = (u64, u64);

/// What tells a file from all others, and from its own earlier content.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Identity {
    device: u64,
    inode: u64,
    size: u64,
    modified: (i64, u64),
    /// When the content, the rights or the number of links last changed.
    changed: (i64, u64),
}

impl Identity {
    /// The file that the kernel describes so.
    pub fn new(stat: &Stat) -> Self {
        let modified = (stat.st_mtime, stat.st_mtime_nsec);
        let changed = (stat.st_ctime, stat.st_ctime_nsec);
        let size = u64::try_from(stat.st_size).unwrap_or_default();
        Self { device: stat.st_dev, inode: stat.st_ino, size, modified, changed }
    }

    /// In bytes.
    pub const fn size(&self) -> u64 {
        self.size
    }

    /// Its device and inode.
    pub const fn inode(&self) -> Inode {
        (self.device, self.inode)
    }

    /// When the content, the rights or the number of links last changed, in seconds and nanoseconds.
    pub const fn changed(&self) -> (i64, u64) {
        self.changed
    }

    /// When the content last changed, in seconds.
    pub fn modified_seconds(&self) -> f64 {
        let (seconds, nanoseconds) = self.modified;
        seconds as f64 + nanoseconds as f64 / 1e9
    }

    /// Whether this is the same file with the same content. Its rights and its links may differ.
    pub fn is_content_of(&self, other: &Self) -> bool {
        Self { changed: other.changed, ..*self } == *other
    }
}

impl From<&Metadata> for Identity {
    fn from(data: &Metadata) -> Self {
        let nanoseconds = |found: i64| u64::try_from(found).unwrap_or_default();
        Self {
            device: data.dev(),
            inode: data.ino(),
            size: data.size(),
            modified: (data.mtime(), nanoseconds(data.mtime_nsec())),
            changed: (data.ctime(), nanoseconds(data.ctime_nsec())),
        }
    }
}

/// The regular file at a path; `None` if something else is there. A path that has a link in it is refused, because its
/// owner could let it lead anywhere.
pub fn file_without_links(path: &Path) -> io::Result<Option<Identity>> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let file = match openat2(CWD, path, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS) {
        // Before Linux 5.6, or in a sandbox that does not know the call.
        Err(Errno::NOSYS | Errno::PERM) => openat(CWD, path, flags | OFlags::NOFOLLOW, Mode::empty())?,
        opened => opened?,
    };
    let stat = fstat(&file)?;
    Ok((kind(&stat) == FileType::RegularFile).then(|| Identity::new(&stat)))
}

/// Opens the file at a path for reading if it is the one that was listed.
pub fn open_listed(path: &Path, listed: Identity) -> Result<File, ErrorBody> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let failed = |error: Errno| file_error(&path.display().to_string(), &error.into());
    let file = openat(CWD, path, flags, Mode::empty()).map_err(failed)?;
    let found = Identity::new(&fstat(&file).map_err(failed)?);
    if found.is_content_of(&listed) { Ok(File::from(file)) } else { Err(changed(&path.display())) }
}

fn changed(shown: &dyn Display) -> ErrorBody {
    let body = ErrorBody::new(ErrorCode::InvalidInput, format!("{shown}: changed while it was imported"));
    body.with_hint("import it again when no program writes to it")
}

impl Folder {
    /// Lists a folder and the folders in it. Stops when it has too many files.
    pub fn list(path: &Path, links: Links) -> Result<Self, ErrorBody> {
        Self::list_without(path, links, &|_| false)
    }

    /// Lists a folder without counting the files that are excluded. If they are very many, only some of them are listed.
    pub fn list_without(
        path: &Path,
        links: Links,
        is_excluded: &dyn Fn(&str) -> bool,
    ) -> Result<Self, ErrorBody> {
        let failed = |error: Errno| file_error(&path.display().to_string(), &error.into());
        let absolute =
            path.canonicalize().map_err(|error| file_error(&path.display().to_string(), &error))?;
        let (boundary, prefix) = boundary(&absolute);
        let boundary = openat(CWD, boundary, DIRECTORY, Mode::empty()).map_err(failed)?;
        let entries = BTreeMap::new();
        let mut folder = Self { path: absolute, boundary, prefix, links, entries };
        let mut listing =
            Listing { is_excluded, excluded: 0, seen: BTreeSet::new(), left: vec![String::new()] };
        while let Some(directory) = listing.left.pop() {
            folder.list_directory(&directory, &mut listing)?;
        }
        Ok(folder)
    }

    /// The folder's own path, without links.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All entries, also those that are not files.
    pub fn files(&self) -> impl Iterator<Item = FolderFile> {
        self.entries.iter().map(|(path, entry)| {
            let size = if let Entry::File(identity) = entry { identity.size } else { 0 };
            FolderFile { path: path.clone(), size }
        })
    }

    /// The paths of all entries.
    pub fn paths(&self) -> impl Iterator<Item = &str> + Clone {
        self.entries.keys().map(String::as_str)
    }

    /// A listed file.
    ///
    /// # Errors
    /// What is there, if it is not a file of the folder.
    pub fn identity(&self, path: &str) -> Result<Identity, &'static str> {
        match self.entries.get(path) {
            Some(Entry::File(identity)) => Ok(*identity),
            Some(Entry::Other(found)) => Err(found),
            None => Err("nothing"),
        }
    }

    /// Refuses an entry that is not a file of the folder.
    pub fn refuse_other(&self, path: &str) -> Result<(), ErrorBody> {
        let Some(Entry::Other(found)) = self.entries.get(path) else { return Ok(()) };
        let message = format!(
            "{}: wrong kind of file: expected a file of the folder, found {found}",
            printable(&self.shown(path))
        );
        let body = ErrorBody::new(ErrorCode::InvalidInput, message);
        Err(body.with_hint("`--exclude PATTERN` leaves it out"))
    }

    /// Opens a listed file for reading.
    ///
    /// # Errors
    /// When it cannot be opened, or is not the file that was listed.
    pub fn open(&self, path: &str) -> Result<File, ErrorBody> {
        self.refuse_other(path)?;
        let opened = self.open_beneath(path, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY);
        let file = opened.map_err(|error| file_error(&self.shown(path), &error.into()))?;
        let stat = fstat(&file).map_err(|error| file_error(&self.shown(path), &error.into()))?;
        match self.entries.get(path) {
            Some(Entry::File(listed)) if Identity::new(&stat).is_content_of(listed) => Ok(File::from(file)),
            _ => Err(changed(&self.shown(path))),
        }
    }

    /// Reads a file of at most this length.
    pub fn read(&self, path: &str, most: u64) -> Result<Vec<u8>, ErrorBody> {
        let mut bytes = Vec::new();
        let read = self.open(path)?.take(most).read_to_end(&mut bytes);
        read.map_err(|error| file_error(&self.shown(path), &error))?;
        Ok(bytes)
    }

    fn shown(&self, path: &str) -> String {
        self.path.join(path).display().to_string()
    }

    fn list_directory(&mut self, directory: &str, listing: &mut Listing<'_>) -> Result<(), ErrorBody> {
        let failed = |error: Errno| file_error(&self.shown(directory), &error.into());
        let opened = match self.open_beneath(directory, DIRECTORY) {
            // It was removed after its own folder was listed.
            Err(Errno::NOENT) if !directory.is_empty() => return Ok(()),
            opened => opened.map_err(failed)?,
        };
        let stat = fstat(&opened).map_err(failed)?;
        if !listing.seen.insert((stat.st_dev, stat.st_ino)) {
            if self.links == Links::Everywhere {
                return Ok(());
            }
            self.entries.insert(directory.to_owned(), Entry::Other("a folder that was listed already"));
            return Ok(());
        }
        for entry in Dir::new(opened).map_err(failed)? {
            let entry = entry.map_err(|error| file_error(&self.shown(directory), &error.into()))?;
            let name = entry.file_name();
            if matches!(name.to_bytes(), b"." | b"..") {
                continue;
            }
            if listing.is_full(self.entries.len()) {
                break;
            }
            let path = |name: &str| match directory {
                "" => name.to_owned(),
                directory => format!("{directory}/{name}"),
            };
            let Ok(name) = name.to_str() else {
                self.entries.insert(path(&name.to_string_lossy()), Entry::Other("a name that is not UTF-8"));
                continue;
            };
            let path = path(name);
            match self.entry(&path) {
                None => listing.left.push(path),
                Some(_) if listing.skips(&path) => {}
                Some(entry) => drop(self.entries.insert(path, entry)),
            }
        }
        Ok(())
    }

    /// What is at a path; `None` for a folder. A link counts as the file that it leads to.
    fn entry(&self, path: &str) -> Option<Entry> {
        let found = self.open_beneath(path, OFlags::PATH).and_then(|file| fstat(file.as_fd()));
        let is_link = || {
            let link = self.open_beneath(path, OFlags::PATH | OFlags::NOFOLLOW);
            link.and_then(fstat).is_ok_and(|stat| kind(&stat) == FileType::Symlink)
        };
        Some(match found {
            Ok(stat) => match kind(&stat) {
                FileType::RegularFile => Entry::File(Identity::new(&stat)),
                FileType::Directory if self.links == Links::Inside && is_link() => {
                    Entry::Other("a link to a folder")
                }
                FileType::Directory => return None,
                FileType::Fifo => Entry::Other("a pipe"),
                FileType::Socket => Entry::Other("a socket"),
                FileType::Symlink => Entry::Other("a link"),
                _ => Entry::Other("a device"),
            },
            Err(Errno::XDEV) => Entry::Other("a link that leads out of the folder"),
            Err(Errno::LOOP) => Entry::Other("a link that leads back to itself"),
            Err(Errno::NOENT) => Entry::Other("a link to a file that does not exist"),
            Err(_) => Entry::Other("a file that cannot be opened"),
        })
    }

    fn open_beneath(&self, path: &str, flags: OFlags) -> rustix::io::Result<OwnedFd> {
        let path = match (self.prefix.as_str(), path) {
            ("", "") => ".".to_owned(),
            (prefix, "") => prefix.to_owned(),
            ("", path) => path.to_owned(),
            (prefix, path) => format!("{prefix}/{path}"),
        };
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
        let flags = flags | OFlags::CLOEXEC;
        if self.links == Links::Everywhere {
            return openat(&self.boundary, path.as_str(), flags, Mode::empty());
        }
        match openat2(&self.boundary, path.as_str(), flags, Mode::empty(), resolve) {
            // The kernel could not follow the path because something was renamed meanwhile.
            Err(Errno::AGAIN) => openat2(&self.boundary, path.as_str(), flags, Mode::empty(), resolve),
            // Before Linux 5.6, or in a sandbox that does not know the call.
            Err(Errno::NOSYS | Errno::PERM) => open_without_links(&self.boundary, &path, flags),
            opened => opened,
        }
    }
}

const DIRECTORY: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

fn kind(stat: &Stat) -> FileType {
    FileType::from_raw_mode(stat.st_mode)
}

/// Opens a path part by part and follows no link. The path has no `..`: its parts are names that a listing gave.
fn open_without_links(folder: &OwnedFd, path: &str, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    let mut current = openat(folder, ".", DIRECTORY, Mode::empty())?;
    let mut parts = path.split('/').peekable();
    while let Some(part) = parts.next() {
        let of_part = if parts.peek().is_some() { DIRECTORY } else { flags };
        current = openat(&current, part, of_part | OFlags::NOFOLLOW, Mode::empty())?;
    }
    Ok(current)
}

/// The folder that links may not lead out of, and the path of this one in it: the folder itself, but a snapshot of the Hugging
/// Face cache consists of links into the cache.
fn boundary(folder: &Path) -> (PathBuf, String) {
    let mut names = folder.ancestors();
    let name = |path: Option<&Path>| {
        path.and_then(Path::file_name).and_then(|name| name.to_str()).map(str::to_owned)
    };
    let (commit, snapshots, repository) = (name(names.next()), name(names.next()), name(names.next()));
    match (commit, snapshots.as_deref(), repository, names.next()) {
        (Some(commit), Some("snapshots"), Some(repository), Some(cache))
            if repository.starts_with("models--") =>
        {
            (cache.to_owned(), format!("{repository}/snapshots/{commit}"))
        }
        _ => (folder.to_owned(), String::new()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn only_what_is_beneath_the_folder_is_opened() {
        let place = tempfile::tempdir().unwrap();
        let folder = place.path().join("m");
        fs::create_dir_all(folder.join("a/b")).unwrap();
        fs::write(place.path().join("secret"), "secret").unwrap();
        fs::write(folder.join("a/b/file"), "content").unwrap();
        symlink("../../secret", folder.join("a/out")).unwrap();
        symlink("/etc/passwd", folder.join("absolute")).unwrap();
        symlink("a/b/file", folder.join("inside")).unwrap();
        symlink("loop", folder.join("loop")).unwrap();
        symlink("nowhere", folder.join("dangling")).unwrap();
        symlink("a", folder.join("folder")).unwrap();
        let listed = Folder::list(&folder, Links::Inside).unwrap();
        let other = |file: FolderFile| {
            let error = listed.refuse_other(&file.path).err()?.message;
            Some((file.path, error.rsplit_once(", found ").unwrap().1.to_owned()))
        };
        let others: Vec<_> = listed.files().filter_map(other).collect();
        let expected = [
            ("a/out", "a link that leads out of the folder"),
            ("absolute", "a link that leads out of the folder"),
            ("dangling", "a link to a file that does not exist"),
            ("folder", "a link to a folder"),
            ("loop", "a link that leads back to itself"),
        ];
        assert_eq!(others, expected.map(|(path, found)| (path.to_owned(), found.to_owned())));
        assert_eq!(listed.read("inside", 100).unwrap(), b"content");
        assert!(listed.open("a/out").is_err() && listed.open("../secret").is_err());
        let followed = Folder::list(&folder, Links::Everywhere).unwrap();
        assert_eq!(followed.read("a/out", 100).unwrap(), b"secret");
        assert!(followed.refuse_other("loop").is_err() && followed.refuse_other("dangling").is_err());
        assert_eq!(followed.files().filter(|file| file.path.ends_with("b/file")).count(), 1);
        // Replaced by a link after the listing.
        fs::remove_file(folder.join("a/b/file")).unwrap();
        symlink("../../../secret", folder.join("a/b/file")).unwrap();
        assert!(listed.open("a/b/file").is_err());
    }

    #[test]
    fn file_that_changes_after_the_listing_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("a"), "one").unwrap();
        let listed = Folder::list(folder.path(), Links::Inside).unwrap();
        fs::write(folder.path().join("a"), "longer").unwrap();
        let error = listed.open("a").unwrap_err();
        assert!(error.message.ends_with("/a: changed while it was imported"), "{error}");
    }

    #[test]
    fn snapshot_of_the_hub_cache_may_link_to_its_blobs() {
        let place = tempfile::tempdir().unwrap();
        let hub = place.path().join("hub");
        let snapshot = hub.join("models--me--tiny/snapshots/0123");
        fs::create_dir_all(&snapshot).unwrap();
        fs::create_dir_all(hub.join("models--me--tiny/blobs")).unwrap();
        fs::create_dir_all(hub.join("blobs/ab")).unwrap();
        fs::write(hub.join("models--me--tiny/blobs/own"), "own").unwrap();
        fs::write(hub.join("blobs/ab/abcd"), "shared").unwrap();
        fs::write(place.path().join("outside"), "secret").unwrap();
        symlink("../../blobs/own", snapshot.join("config.json")).unwrap();
        symlink("../../blobs/ab/abcd", hub.join("models--me--tiny/blobs/shared")).unwrap();
        symlink("../../blobs/shared", snapshot.join("model.safetensors")).unwrap();
        symlink("../../../../outside", snapshot.join("out")).unwrap();
        let listed = Folder::list(&snapshot, Links::Inside).unwrap();
        assert_eq!(listed.read("config.json", 10).unwrap(), b"own");
        assert_eq!(listed.read("model.safetensors", 10).unwrap(), b"shared");
        let error = listed.open("out").unwrap_err();
        assert!(error.message.ends_with("found a link that leads out of the folder"), "{error}");
    }
}
