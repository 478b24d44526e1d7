//! The copy of the catalog on disk, in sled 0.34.7, with workarounds for that version:
//!
//! - A snapshot whose writing was interrupted is read as the newest and makes the database unreadable:
//!   it is deleted before opening.
//! - Only plain inserts: batches of a few operations and transactions deadlock it.
//! - Its `flush` does not fsync on Linux: its files are synced here when it is closed.
//! - It follows symbolic links: only regular files of this user are opened.
//! - It may panic or hang: the caller runs it where that does no harm.

use std::collections::HashMap;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use blobd_store_format::digest::Digest;
use blobd_store_format::layout;

use super::catalog::Catalog;
use super::encoding::{Decoder, Edit, chunk_key};
use crate::StoreError;
use crate::disk::{GuardedDisk, KernelDisk, Root};
use crate::root::{Directory, describe};

#[derive(Debug)]
pub(super) struct Database {
    db: sled::Db,
    blobs: sled::Tree,
    recipes: sled::Tree,
    /// Digest of the manifest → seconds since 1970 (8 bytes, little-endian).
    uses: sled::Tree,
    /// Digest of the manifest → the same seconds and the uid of the user (4 bytes, little-endian). An older blobd
    /// changes only `uses`, so a user counts only if the seconds agree.
    users: sled::Tree,
    /// The paths of the database go through this descriptor, so it is closed last.
    directory: Directory,
}

/// Why the database cannot be used. It is only a cache.
#[derive(Debug, thiserror::Error)]
pub(super) enum IndexError {
    #[error("sled: {0}")]
    Sled(#[from] sled::Error),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("table {table}: entry {key} is malformed")]
    Malformed { table: &'static str, key: String },
    #[error("the store is new, was not closed cleanly, or was changed without a daemon")]
    NotClean,
    #[error(
        "incomplete: expected {} blobs and {} recipes, found {} and {}",
        expected.0, expected.1, found.0, found.1
    )]
    Incomplete { found: (u64, u64), expected: (u64, u64) },
    #[error("sled panicked")]
    Panicked,
    #[error("loading it took more than {} s", .0.as_secs())]
    TooSlow(Duration),
}

/// Large enough for concurrent changes; a scan needs no cache.
const CACHE_BYTES: u64 = 16 << 20;
/// sled would read through longer holes when it opens the database. Its own files have some in their last segment.
const MAX_HOLE_BYTES: u64 = 256 << 20;
/// Other users can neither read the index nor put files into it.
const MODE: u32 = 0o700;

impl Database {
    pub(super) fn existing(root: &Root) -> Result<Self, IndexError> {
        Self::open(root, root.existing_directory(path())?)
    }

    /// Replaces whatever is there with an empty database.
    pub(super) fn create(root: &Root) -> Result<Self, IndexError> {
        let made = make_empty(root).or_else(|_| rename_damaged(root).and_then(|()| make_empty(root)));
        Self::open(root, made?)
    }

    fn open(root: &Root, directory: Directory) -> Result<Self, IndexError> {
        let owner = root.owner().uid;
        check(&directory, owner)?;
        check_entries(&directory, owner, true)?;
        remove_torn_snapshots(&directory)?;
        // sled only takes paths. This one leads to the directory that was checked, whatever has its name by now.
        let path = format!("/proc/self/fd/{}", directory.file.as_raw_fd());
        let config = sled::Config::new().path(path).cache_capacity(CACHE_BYTES);
        let db = config.flush_every_ms(Some(500)).open()?;
        let open = |name| db.open_tree(name);
        let (blobs, recipes) = (open("blobs")?, open("recipes")?);
        let (uses, users) = (open("uses")?, open("users")?);
        Ok(Self { db, blobs, recipes, uses, users, directory })
    }

    pub(super) fn read(&self) -> Result<(Catalog, Uses), IndexError> {
        let mut decoder = Decoder::default();
        for entry in &self.blobs {
            let (key, value) = entry?;
            decoder.add_page(&key, &value).ok_or_else(|| malformed("blobs", &key))?;
        }
        for entry in &self.recipes {
            let (key, value) = entry?;
            decoder.add_chunk(&key, &value).ok_or_else(|| malformed("recipes", &key))?;
        }
        Ok((decoder.finish().ok_or_else(|| malformed("recipes", b""))?, self.read_uses()?))
    }

    /// Malformed entries are skipped.
    fn read_uses(&self) -> Result<Uses, IndexError> {
        let mut uses = Uses::new();
        for entry in &self.uses {
            let (key, value) = entry?;
            if let (Ok(manifest), Ok(last)) = (key.as_ref().try_into(), value.as_ref().try_into()) {
                let last = LastUse { seconds: u64::from_le_bytes(last), uid: None };
                uses.insert(Digest::from_bytes(manifest), last);
            }
        }
        for entry in &self.users {
            let (key, value) = entry?;
            if let Ok(manifest) = key.as_ref().try_into()
                && let Some(last) = uses.get_mut(&Digest::from_bytes(manifest))
                && let Some((seconds, uid)) = value.split_first_chunk()
                && u64::from_le_bytes(*seconds) == last.seconds
            {
                last.uid = uid.try_into().ok().map(u32::from_le_bytes);
            }
        }
        Ok(uses)
    }

    pub(super) fn apply(&self, edit: Edit) -> Result<(), IndexError> {
        match edit {
            Edit::Page { number, value } => {
                self.blobs.insert(number.to_be_bytes(), value)?;
            }
            Edit::Recipe { file, chunks } => {
                let mut count = 0;
                for chunk in chunks {
                    self.recipes.insert(chunk_key(file, count), chunk)?;
                    count += 1;
                }
                // Removes the rest of a recipe that had more chunks.
                while self.recipes.remove(chunk_key(file, count))?.is_some() {
                    count += 1;
                }
            }
        }
        Ok(())
    }

    pub(super) fn set_uses(&self, uses: &Uses) -> Result<(), IndexError> {
        self.uses.clear()?;
        self.users.clear()?;
        for (manifest, last) in uses {
            let seconds = last.seconds.to_le_bytes();
            self.uses.insert(manifest.as_bytes(), &seconds)?;
            if let Some(uid) = last.uid {
                self.users.insert(manifest.as_bytes(), [&seconds[..], &uid.to_le_bytes()].concat())?;
            }
        }
        Ok(())
    }

    pub(super) fn close(self) -> Result<(), IndexError> {
        let Self { db, blobs, recipes, uses, users, directory } = self;
        db.flush()?;
        drop((blobs, recipes, uses, users, db));
        for entry in directory.entries()? {
            let name = entry?.name;
            // A snapshot may have been replaced meanwhile.
            if let Some(file) = directory.find_entry(&name)? {
                file.sync_all().map_err(StoreError::io("sync", directory.place.join(&name)))?;
            }
        }
        Ok(directory.file.sync_all().map_err(StoreError::io("sync directory", directory.place.clone()))?)
    }
}

fn malformed(table: &'static str, key: &[u8]) -> IndexError {
    IndexError::Malformed { table, key: key.iter().take(36).map(|byte| format!("{byte:02x}")).collect() }
}

/// Refuses a directory that other users than the store's owner may write to.
fn check(directory: &Directory, owner: u32) -> Result<(), StoreError> {
    const WRITABLE_BY_OTHERS: u32 = 0o022;
    let status = directory.own_status()?;
    if status.owner() == owner && status.permissions() & WRITABLE_BY_OTHERS == 0 {
        return Ok(());
    }
    let found = format!("directory of uid {}, mode {:04o}", status.owner(), status.permissions());
    let expected = "directory that only its owner can write to";
    Err(StoreError::UnexpectedFile { path: directory.place.clone(), found, expected })
}

/// Refuses a directory that contains anything but files and directories of the store's owner alone.
fn check_entries(directory: &Directory, owner: u32, may_nest: bool) -> Result<(), StoreError> {
    for entry in directory.entries()? {
        let name = entry?.name;
        let Some(status) = directory.status(&name)? else { continue };
        if status.is_dir() && may_nest && status.owner() == owner {
            // sled makes it for values that are too long for its log.
            directory.find_directory(&name)?.map_or(Ok(()), |below| check_entries(&below, owner, false))?;
        } else if !status.is_file() || status.links() != 1 || status.owner() != owner {
            let (path, found) = (directory.place.join(&name), describe(status.kind()).to_owned());
            let expected = "regular file of the store's owner with one name";
            return Err(StoreError::UnexpectedFile { path, found, expected });
        } else if status.len() > status.allocated_bytes().saturating_add(MAX_HOLE_BYTES) {
            let (path, found) = (directory.place.join(&name), "file with long holes".to_owned());
            return Err(StoreError::UnexpectedFile { path, found, expected: "file as sled writes it" });
        }
    }
    Ok(())
}

fn remove_torn_snapshots(directory: &Directory) -> Result<(), StoreError> {
    for entry in directory.entries()? {
        let name = entry?.name;
        let text = name.to_string_lossy();
        if text.starts_with("snap.") && text.ends_with(".generating") {
            directory.remove_file(&name)?;
        }
    }
    Ok(())
}

fn path() -> PathBuf {
    Path::new(layout::INDEX).join("sled")
}

/// The index has its own guard: a failed sync here must not make the store read-only.
pub(super) fn disk(root: &Root) -> GuardedDisk {
    GuardedDisk::new(Arc::new(KernelDisk), root.clone())
}

fn make_empty(root: &Root) -> Result<Directory, StoreError> {
    let (disk, path) = (disk(root), path());
    disk.remove_tree(&path)?;
    for path in [Path::new(layout::INDEX), &path] {
        disk.create_dir(path)?;
        // Regardless of the umask.
        root.set_directory_mode(path, MODE)?;
    }
    root.existing_directory(path)
}

/// Renames `index` to `index.bad-<unix seconds>` for diagnosis, and removes an older one.
pub(super) fn rename_damaged(root: &Root) -> Result<(), StoreError> {
    const BAD: &str = "index.bad-";
    for entry in root.existing_directory("")?.entries()? {
        let name = entry?.name;
        if name.to_string_lossy().starts_with(BAD)
            && let Err(error) = remove_older(root, Path::new(&name))
        {
            // An extra copy does less harm than no index.
            tracing::warn!("{error}");
        }
    }
    let now = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
    disk(root).rename(Path::new(layout::INDEX), Path::new(&format!("{BAD}{}", now.as_secs())))
}

fn remove_older(root: &Root, path: &Path) -> Result<(), StoreError> {
    match root.set_directory_mode(path, MODE) {
        Ok(()) => disk(root).remove_tree(path),
        Err(_no_directory) => disk(root).remove_file(path).map(drop),
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelUse {
    pub at: SystemTime,
    pub uid: Option<u32>,
}

/// The last uses, by the digest of the manifest.
pub(super) type Uses = HashMap<Digest, LastUse>;

/// The last use of a model, as it is stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct LastUse {
    pub(super) seconds: u64,
    pub(super) uid: Option<u32>,
}

/// The entry among the uses that says since when they are recorded. No manifest has this digest.
pub(super) const RECORDED_SINCE: Digest = Digest::from_bytes([0; 32]);

pub(super) fn now() -> u64 {
    UNIX_EPOCH.elapsed().unwrap_or_default().as_secs()
}

#[cfg(test)]
mod tests {

    use std::fs;
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use tempfile::TempDir;

    use super::*;

    /// An empty directory for the database, and its owner.
    fn directory() -> (TempDir, Directory, u32) {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::open(folder.path()).unwrap();
        let directory = root.existing_directory("").unwrap();
        (folder, directory, root.owner().uid)
    }

    fn set_mode(path: &Path, mode: u32) {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn directory_that_others_can_write_to_is_refused() {
        let (folder, directory, owner) = directory();
        for (mode, is_private) in
            [(0o700, true), (0o755, true), (0o720, false), (0o702, false), (0o777, false)]
        {
            set_mode(folder.path(), mode);
            assert_eq!(check(&directory, owner).is_ok(), is_private, "{mode:o}");
        }
        set_mode(folder.path(), 0o700);
        let error = check(&directory, owner + 1).unwrap_err();
        let found = format!("directory of uid {owner}, mode 0700");
        assert!(matches!(&error, StoreError::UnexpectedFile { found: f, .. } if *f == found), "{error}");
    }

    #[test]
    fn only_regular_files_of_the_owner_are_opened() {
        let (folder, directory, owner) = directory();
        let path = |name: &str| folder.path().join(name);
        let is_accepted = |owner| check_entries(&directory, owner, true).is_ok();
        fs::write(path("db"), "x").unwrap();
        assert!(is_accepted(owner) && !is_accepted(owner + 1));
        fs::create_dir(path("blobs")).unwrap();
        fs::write(path("blobs/1"), "x").unwrap();
        assert!(is_accepted(owner), "long values are in a directory");
        fs::create_dir(path("blobs/deep")).unwrap();
        assert!(!is_accepted(owner), "no deeper one is");
        fs::remove_dir(path("blobs/deep")).unwrap();
        fs::hard_link(path("db"), path("blobs/2")).unwrap();
        assert!(!is_accepted(owner), "a file with two names");
        fs::remove_file(path("blobs/2")).unwrap();
        symlink("db", path("link")).unwrap();
        assert!(!is_accepted(owner));
        fs::remove_file(path("link")).unwrap();
        assert!(is_accepted(owner));
    }

    #[test]
    fn file_with_longer_holes_than_sled_leaves_is_refused() {
        let (folder, directory, owner) = directory();
        let file = fs::File::create(folder.path().join("db")).unwrap();
        for (length, is_accepted) in [(MAX_HOLE_BYTES, true), (MAX_HOLE_BYTES + 1, false)] {
            file.set_len(length).unwrap();
            assert_eq!(check_entries(&directory, owner, true).is_ok(), is_accepted, "{length}");
        }
    }

    #[test]
    fn only_snapshots_that_were_being_written_are_removed() {
        let (folder, directory, _owner) = directory();
        for name in ["snap.0f.generating", "snap.0f", "db", "x.generating", "snap.generating.old"] {
            fs::write(folder.path().join(name), "").unwrap();
        }
        remove_torn_snapshots(&directory).unwrap();
        let mut left = directory.parsed_names(|name| Some(name.to_owned())).unwrap();
        left.sort();
        assert_eq!(left, ["db", "snap.0f", "snap.generating.old", "x.generating"]);
    }

    #[test]
    fn damaged_index_is_kept_once_for_diagnosis() {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::open(folder.path()).unwrap();
        fs::create_dir_all(folder.path().join("index.bad-1/sled")).unwrap();
        fs::write(folder.path().join("index.bad-1/sled/db"), "older").unwrap();
        set_mode(&folder.path().join("index.bad-1"), 0o500);
        fs::write(folder.path().join("index.bad-2"), "older").unwrap();
        fs::write(folder.path().join("index.badly"), "of somebody else").unwrap();
        fs::create_dir(folder.path().join("index")).unwrap();
        fs::write(folder.path().join("index/new"), "").unwrap();
        rename_damaged(&root).unwrap();
        let names = root.parsed_names("", |name| Some(name.to_owned())).unwrap();
        let kept: Vec<_> = names.iter().filter(|name| name.starts_with("index.bad-")).collect();
        assert_eq!((names.len(), kept.len()), (2, 1), "{names:?}");
        assert!(folder.path().join(kept[0]).join("new").exists());
        let seconds: u64 = kept[0].strip_prefix("index.bad-").unwrap().parse().unwrap();
        assert!(now().abs_diff(seconds) < 60);
    }

    #[test]
    fn uses_are_read_as_they_were_written_and_malformed_ones_left_out() {
        let folder = tempfile::tempdir().unwrap();
        let database = Database::create(&Root::open(folder.path()).unwrap()).unwrap();
        let manifest = |number: u8| Digest::of(&[number]);
        let used = |seconds, uid| LastUse { seconds, uid };
        let uses = Uses::from([
            (manifest(1), used(5, Some(7))),
            (manifest(2), used(6, None)),
            (manifest(3), used(8, Some(0))),
        ]);
        database.set_uses(&uses).unwrap();
        assert_eq!(database.read_uses().unwrap(), uses);
        // An older blobd has recorded a later use, without the user.
        database.uses.insert(manifest(1).as_bytes(), &9_u64.to_le_bytes()).unwrap();
        database.uses.insert(manifest(4).as_bytes(), b"short").unwrap();
        database.uses.insert(b"short", &9_u64.to_le_bytes()).unwrap();
        database
            .users
            .insert(manifest(3).as_bytes(), &[8_u64.to_le_bytes().as_slice(), b"?"].concat()[..])
            .unwrap();
        database
            .users
            .insert(manifest(5).as_bytes(), &[8_u64.to_le_bytes().as_slice(), &[0; 4]].concat()[..])
            .unwrap();
        let expected =
            [(manifest(1), used(9, None)), (manifest(2), used(6, None)), (manifest(3), used(8, None))];
        assert_eq!(database.read_uses().unwrap(), expected.into());
        database.set_uses(&Uses::new()).unwrap();
        assert!(database.read_uses().unwrap().is_empty());
        assert!(now() > 1_700_000_000);
    }
}
