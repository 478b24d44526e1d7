//! The catalog's copy on disk, in sled 0.34.7, by the rules under which that behaves.
//!
//! - A snapshot that was being written when the process died would be taken for the newest and
//!   the database be unopenable: it is deleted before opening.
//! - Plain inserts only: batches of a few operations and transactions deadlock it.
//! - Its `flush` is no fsync on Linux: when it is closed, its files are synced here.
//! - It follows symbolic links, so nothing is opened that is not this user's own regular file.
//! - It may panic or hang: the caller runs it where that harms nobody.

use std::collections::HashMap;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use blobd_store_format::digest::Digest;
use blobd_store_format::layout;

use super::catalog::Catalog;
use super::encoding::{Decoder, Edit, chunk_key};
use crate::StoreError;
use crate::disk::{GuardedDisk, KernelDisk, Root};
use crate::root::{Directory, describe};

/// An open database.
#[derive(Debug)]
pub(super) struct Database {
    db: sled::Db,
    /// Pages of rows.
    blobs: sled::Tree,
    recipes: sled::Tree,
    /// Digest of the manifest → seconds since 1970 (8 bytes, little-endian).
    uses: sled::Tree,
    /// The database's own paths lead through this descriptor, so it is closed last.
    directory: Directory,
}

/// When models were used last, by the digest of the manifest, in seconds since 1970.
pub(super) type Uses = HashMap<Digest, u64>;

/// Why the database cannot be used. Nothing but a cache is lost.
#[derive(Debug, thiserror::Error)]
pub(super) enum IndexError {
    #[error("sled: {0}")]
    Sled(#[from] sled::Error),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("table {table}: entry {key} is malformed")]
    Malformed { table: &'static str, key: String },
    #[error("the store was not closed cleanly, or changed without a daemon")]
    NotClean,
    #[error("{} blobs and {} recipes in the database, {} and {} expected", found.0, found.1, expected.0, expected.1)]
    Incomplete { found: (u64, u64), expected: (u64, u64) },
    #[error("sled panicked")]
    Panicked,
    #[error("loading it took more than {} s", .0.as_secs())]
    TooSlow(Duration),
}

/// A page cache of this size holds what changes at a time; a scan needs none.
const CACHE_BYTES: u64 = 16 << 20;
/// Others have no business in the index, nor a way to put something there.
const MODE: u32 = 0o700;

impl Database {
    /// Opens the one that was written before.
    pub(super) fn existing(root: &Root) -> Result<Self, IndexError> {
        Self::open(root.existing_directory(path())?)
    }

    /// Makes an empty one in place of what is there.
    pub(super) fn create(root: &Root) -> Result<Self, IndexError> {
        let made = make_empty(root).or_else(|_| put_aside(root).and_then(|()| make_empty(root)));
        Self::open(made?)
    }

    fn open(directory: Directory) -> Result<Self, IndexError> {
        check(&directory)?;
        check_entries(&directory, true)?;
        remove_torn_snapshots(&directory)?;
        // sled knows paths alone. This one leads to the directory that was checked, whatever has its
        // name by now.
        let path = format!("/proc/self/fd/{}", directory.file().as_raw_fd());
        let config = sled::Config::new().path(path).cache_capacity(CACHE_BYTES);
        let db = config.flush_every_ms(Some(500)).open()?;
        let open = |name| db.open_tree(name);
        let (blobs, recipes, uses) = (open("blobs")?, open("recipes")?, open("uses")?);
        Ok(Self { db, blobs, recipes, uses, directory })
    }

    /// Reads everything.
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
        let mut uses = Uses::new();
        for entry in &self.uses {
            let (key, value) = entry?;
            // One that is malformed is forgotten.
            if let (Ok(manifest), Ok(last)) = (key.as_ref().try_into(), value.as_ref().try_into()) {
                uses.insert(Digest::from_bytes(manifest), u64::from_le_bytes(last));
            }
        }
        Ok((decoder.finish().ok_or_else(|| malformed("recipes", b""))?, uses))
    }

    /// Makes a change.
    ///
    /// # Errors
    /// [`IndexError`]; the database is of no use then.
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
                // It may have had more of them.
                while self.recipes.remove(chunk_key(file, count))?.is_some() {
                    count += 1;
                }
            }
        }
        Ok(())
    }

    /// Replaces all uses.
    pub(super) fn set_uses(&self, uses: &Uses) -> Result<(), IndexError> {
        self.uses.clear()?;
        for (manifest, last) in uses {
            self.uses.insert(manifest.as_bytes(), &last.to_le_bytes())?;
        }
        Ok(())
    }

    /// Lets go of the files, everything in them durable.
    pub(super) fn close(self) -> Result<(), IndexError> {
        let Self { db, blobs, recipes, uses, directory } = self;
        db.flush()?;
        drop((blobs, recipes, uses, db));
        for entry in directory.entries()? {
            let name = entry?.name;
            // A snapshot may be replaced meanwhile.
            if let Some(file) = directory.find_entry(&name)? {
                file.sync_all().map_err(StoreError::io("sync", directory.place().join(&name)))?;
            }
        }
        Ok(directory
            .file()
            .sync_all()
            .map_err(StoreError::io("sync directory", directory.place().clone()))?)
    }
}

fn malformed(table: &'static str, key: &[u8]) -> IndexError {
    IndexError::Malformed { table, key: key.iter().take(36).map(|byte| format!("{byte:02x}")).collect() }
}

/// Refuses a directory that somebody else may write to.
fn check(directory: &Directory) -> Result<(), StoreError> {
    const WRITABLE_BY_OTHERS: u32 = 0o022;
    let (own, status) = (rustix::process::geteuid().as_raw(), directory.own_status()?);
    if status.owner() == own && status.permissions() & WRITABLE_BY_OTHERS == 0 {
        return Ok(());
    }
    let found = format!("directory of uid {}, mode {:04o}", status.owner(), status.permissions());
    let expected = "one that its owner alone writes to";
    Err(StoreError::UnexpectedFile { path: directory.place().clone(), found, expected })
}

/// Refuses a directory with anything in it that is not a file or directory of this user's alone.
fn check_entries(directory: &Directory, may_nest: bool) -> Result<(), StoreError> {
    let own = rustix::process::geteuid().as_raw();
    for entry in directory.entries()? {
        let name = entry?.name;
        let Some(status) = directory.status(&name)? else { continue };
        if status.is_dir() && may_nest && status.owner() == own {
            // sled's own, for values that are too long for its log.
            directory.find_directory(&name)?.map_or(Ok(()), |below| check_entries(&below, false))?;
        } else if !status.is_file() || status.links() != 1 || status.owner() != own {
            let (path, found) = (directory.place().join(&name), describe(status.kind()).to_owned());
            let expected = "regular file of the daemon's own user with one name";
            return Err(StoreError::UnexpectedFile { path, found, expected });
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

/// Changes the index's files. Not the store's own guard: a sync that fails here costs a rebuild, and is no
/// reason to refuse changes of the store.
pub(super) fn disk(root: &Root) -> GuardedDisk {
    GuardedDisk::new(Arc::new(KernelDisk), root.clone())
}

fn make_empty(root: &Root) -> Result<Directory, StoreError> {
    let (disk, path) = (disk(root), path());
    disk.remove_tree(&path)?;
    for path in [Path::new(layout::INDEX), &path] {
        disk.create_dir(path)?;
        // Whatever the umask is.
        root.set_directory_mode(path, MODE)?;
    }
    root.existing_directory(path)
}

/// Renames `index` to `index.bad-<unix seconds>`, in place of an older one, for whoever wants to know what
/// was wrong with it.
pub(super) fn put_aside(root: &Root) -> Result<(), StoreError> {
    const BAD: &str = "index.bad-";
    for entry in root.existing_directory("")?.entries()? {
        let name = entry?.name;
        if name.to_string_lossy().starts_with(BAD)
            && let Err(error) = remove_older(root, Path::new(&name))
        {
            // One copy too many does less harm than no index.
            tracing::warn!("{error}");
        }
    }
    let now = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
    disk(root).rename(Path::new(layout::INDEX), Path::new(&format!("{BAD}{}", now.as_secs())))
}

/// Removes what was put aside before: often just because it could not be read or written.
fn remove_older(root: &Root, path: &Path) -> Result<(), StoreError> {
    match root.set_directory_mode(path, MODE) {
        Ok(()) => disk(root).remove_tree(path),
        Err(_no_directory) => disk(root).remove_file(path).map(drop),
    }
}
