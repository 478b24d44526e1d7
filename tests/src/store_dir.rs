//! Reads a store's directory without code of blobd.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use blobd_client::protocol::space::DiskUsage;

use crate::oracle::sha256_of;

/// Files below a directory: mode, modification time in nanoseconds and digest of each.
pub type Snapshot = BTreeMap<PathBuf, (u32, i64, String)>;

/// Asserts that every blob is a read-only file with the digest in its name; returns the digests.
///
/// # Panics
/// When one is not.
pub fn check_blobs(root: &Path) -> Vec<String> {
    let check = |name: String| {
        let path = root.join("blobs").join(&name);
        let metadata = fs::symlink_metadata(&path).unwrap();
        assert!(metadata.is_file(), "{}: not a file", path.display());
        assert_eq!(metadata.permissions().mode() & 0o7777, 0o444, "{}", path.display());
        let digest = sha256_of(&mut File::open(&path).unwrap());
        assert_eq!(name, format!("sha256-{digest}"));
        digest
    };
    names(&root.join("blobs")).into_iter().map(check).collect()
}

/// Asserts that the store is empty, without leftovers of failed operations.
///
/// # Panics
/// When something is.
pub fn check_empty(root: &Path) {
    for directory in ["blobs", "recipes", "manifests", "origins", "staging", "partial"] {
        assert_eq!(names(&root.join(directory)), [""; 0], "{directory}/");
    }
}

/// Removes unfinished downloads, of which none must be in progress.
///
/// # Panics
/// When they cannot be removed.
pub fn remove_downloads(root: &Path) {
    let directory = root.join("partial");
    if directory.exists() {
        fs::remove_dir_all(&directory).unwrap();
    }
}

/// The names in `staging/`.
///
/// # Panics
/// When it cannot be listed.
#[must_use]
pub fn staged(root: &Path) -> Vec<String> {
    names(&root.join("staging"))
}

/// The path of a blob in the store `root`.
#[must_use]
pub fn blob_path(root: &Path, digest: &str) -> PathBuf {
    root.join("blobs").join(digest.replace(':', "-"))
}

/// Inverts the bits of one byte of a file, as a faulty disk may do: the inode stays the same, and processes
/// that have it mapped see the change.
///
/// # Panics
/// When there is no such byte.
pub fn flip_byte(path: &Path, offset: u64) {
    let mode = |mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    mode(0o644);
    let file = File::options().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset).unwrap();
    file.write_all_at(&[!byte[0]], offset).unwrap();
    mode(0o444);
}

/// The names in a directory, sorted; none if there is no directory.
///
/// # Panics
/// When it cannot be listed.
#[must_use]
pub fn names(directory: &Path) -> Vec<String> {
    if !directory.exists() {
        return Vec::new();
    }
    let entries = fs::read_dir(directory).unwrap();
    let mut names: Vec<_> =
        entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// Everything below a directory, for a later comparison.
///
/// # Panics
/// When something cannot be read.
#[must_use]
pub fn snapshot(directory: &Path) -> Snapshot {
    let mut files = BTreeMap::new();
    let mut unvisited = vec![directory.to_path_buf()];
    while let Some(path) = unvisited.pop() {
        let metadata = fs::symlink_metadata(&path).unwrap();
        let mut digest = String::new();
        if metadata.is_dir() {
            unvisited.extend(names(&path).iter().map(|name| path.join(name)));
        } else if metadata.is_file() {
            digest = sha256_of(&mut File::open(&path).unwrap());
        }
        let changed = metadata.mtime() * 1_000_000_000 + metadata.mtime_nsec();
        files.insert(path, (metadata.mode(), changed, digest));
    }
    files
}

/// The space on disk, in bytes, of the files below a directory; 0 if it does not exist. A file that is
/// removed or replaced at the same time may or may not count.
#[must_use]
pub fn allocated_bytes(directory: &Path) -> u64 {
    let mut blocks = 0;
    let mut unvisited = vec![directory.to_path_buf()];
    while let Some(path) = unvisited.pop() {
        match fs::symlink_metadata(&path) {
            Ok(metadata) if metadata.is_dir() => {
                let entries = fs::read_dir(&path).into_iter().flatten();
                unvisited.extend(entries.filter_map(|entry| Some(entry.ok()?.path())));
            }
            Ok(metadata) => blocks += metadata.blocks(),
            Err(_) => {}
        }
    }
    blocks * 512
}

/// What `du -s --block-size=1` reports for a directory: the allocated blocks of everything in it and of itself, each
/// file once, however many names it has. A file that is removed or replaced at the same time may or may not count.
#[must_use]
pub fn du(directory: &Path) -> u64 {
    let (mut blocks, mut counted) = (0, BTreeSet::new());
    let mut unvisited = vec![directory.to_path_buf()];
    while let Some(path) = unvisited.pop() {
        let Ok(metadata) = fs::symlink_metadata(&path) else { continue };
        if metadata.is_dir() {
            let entries = fs::read_dir(&path).into_iter().flatten();
            unvisited.extend(entries.filter_map(|entry| Some(entry.ok()?.path())));
        } else if !counted.insert((metadata.dev(), metadata.ino())) {
            continue;
        }
        blocks += metadata.blocks();
    }
    blocks * 512
}

/// Asserts that the rows of `df` add up to `disk_bytes`, and that this is what [`du`] reports. Asks again while the
/// daemon writes its index. Returns the usage.
///
/// # Panics
/// When the numbers differ, or `df` fails.
pub fn check_rows<E: std::fmt::Display>(root: &Path, usage: impl Fn() -> Result<DiskUsage, E>) -> DiskUsage {
    loop {
        let before = du(root);
        let usage = usage().unwrap_or_else(|error| panic!("df: {error}"));
        if du(root) != before {
            continue;
        }
        let sum: u64 = usage.rows.iter().map(|row| row.bytes).sum();
        assert_eq!(usage.disk_bytes, sum, "the rows and their sum: {:#?}", usage.rows);
        assert_eq!(usage.disk_bytes, before, "df and du: {:#?}", usage.rows);
        return usage;
    }
}
