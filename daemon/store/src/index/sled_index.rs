//! The copy of the catalog in sled 0.34.7, by the rules under which it behaves.
//!
//! - A snapshot that was being written when the process died would be taken for the newest and
//!   the database be unopenable: it is deleted before opening.
//! - Plain inserts only: batches of a few operations and transactions deadlock it.
//! - Its `flush` is no fsync on Linux: after it, its files are synced here.
//! - It may panic or hang: the caller runs it where that harms nobody.

use std::os::fd::AsRawFd as _;

use super::cache::{Index, IndexError, Removed, Table, Visit};
use crate::StoreError;
use crate::root::{Directory, describe};

/// An open sled database.
#[derive(Debug)]
pub(super) struct SledIndex {
    db: sled::Db,
    /// One per [`Table`], in their order.
    trees: Vec<sled::Tree>,
    /// The database's own paths lead through this descriptor, so it is closed last.
    directory: Directory,
}

/// A page cache of this size holds what changes at a time; a scan needs none.
const CACHE_BYTES: u64 = 16 << 20;

impl SledIndex {
    /// Opens the database in `directory`, or makes one there.
    ///
    /// # Errors
    /// [`IndexError`].
    pub(super) fn open(directory: Directory) -> Result<Self, IndexError> {
        check(&directory)?;
        check_entries(&directory, true)?;
        remove_torn_snapshots(&directory)?;
        // sled knows paths alone. This one leads to the directory that was checked, whatever has its
        // name by now.
        let path = format!("/proc/self/fd/{}", directory.file().as_raw_fd());
        let config = sled::Config::new().path(path).cache_capacity(CACHE_BYTES);
        let db = config.flush_every_ms(Some(500)).open()?;
        let open = |table: Table| db.open_tree(table.name());
        let trees = Table::ALL.into_iter().map(open).collect::<Result<_, _>>()?;
        Ok(Self { db, trees, directory })
    }

    fn tree(&self, table: Table) -> &sled::Tree {
        // The default tree stands in for one that cannot be missing.
        Table::ALL.iter().zip(&self.trees).find(|(of, _)| **of == table).map_or(&self.db, |(_, tree)| tree)
    }
}

impl Index for SledIndex {
    fn put(&mut self, table: Table, key: &[u8], value: &[u8]) -> Result<(), IndexError> {
        self.tree(table).insert(key, value)?;
        Ok(())
    }

    fn remove(&mut self, table: Table, key: &[u8]) -> Result<Removed, IndexError> {
        Ok(Removed::of(self.tree(table).remove(key)?))
    }

    fn scan(&self, table: Table, visit: &mut Visit<'_>) -> Result<(), IndexError> {
        for entry in self.tree(table) {
            let (key, value) = entry?;
            visit(&key, &value)?;
        }
        Ok(())
    }

    fn sync(&mut self) -> Result<(), IndexError> {
        self.db.flush()?;
        sync_files(&self.directory)
    }

    fn close(self: Box<Self>) -> Result<(), IndexError> {
        let Self { db, trees, directory } = *self;
        db.flush()?;
        drop((trees, db));
        sync_files(&directory)
    }
}

/// Refuses a directory that somebody else may write to, or one with anything in it that is not a file
/// or directory of this user's alone: sled follows symbolic links, and writes to what they lead to.
fn check(directory: &Directory) -> Result<(), IndexError> {
    const WRITABLE_BY_OTHERS: u32 = 0o022;
    let (own, status) = (rustix::process::geteuid().as_raw(), directory.own_status()?);
    if status.owner() == own && status.permissions() & WRITABLE_BY_OTHERS == 0 {
        return Ok(());
    }
    let found = format!("directory of uid {}, mode {:04o}", status.owner(), status.permissions());
    let expected = "one that its owner alone writes to";
    Err(StoreError::UnexpectedFile { path: directory.path().to_path_buf(), found, expected }.into())
}

fn check_entries(directory: &Directory, may_nest: bool) -> Result<(), IndexError> {
    let own = rustix::process::geteuid().as_raw();
    for entry in directory.entries()? {
        let name = entry?.name;
        let Some(status) = directory.status(&name)? else { continue };
        if status.is_dir() && may_nest && status.owner() == own {
            // sled's own, for values that are too long for its log.
            directory.find_directory(&name)?.map_or(Ok(()), |below| check_entries(&below, false))?;
        } else if !status.is_file() || status.links() != 1 || status.owner() != own {
            let (path, found) = (directory.path().join(&name), describe(status.kind()).to_owned());
            let expected = "regular file of the daemon's own user with one name";
            return Err(StoreError::UnexpectedFile { path, found, expected }.into());
        }
    }
    Ok(())
}

fn remove_torn_snapshots(directory: &Directory) -> Result<(), IndexError> {
    for entry in directory.entries()? {
        let name = entry?.name;
        let text = name.to_string_lossy();
        if text.starts_with("snap.") && text.ends_with(".generating") {
            directory.remove_file(&name)?;
        }
    }
    Ok(())
}

/// What sled has written and not synced.
fn sync_files(directory: &Directory) -> Result<(), IndexError> {
    for entry in directory.entries()? {
        let name = entry?.name;
        // A snapshot may be replaced meanwhile.
        if let Some(file) = directory.find_entry(&name)? {
            file.sync_all().map_err(StoreError::io("sync", directory.path().join(&name)))?;
        }
    }
    Ok(directory.file().sync_all().map_err(StoreError::io("sync directory", directory.path()))?)
}
