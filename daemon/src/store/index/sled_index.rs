//! The copy of the catalog in sled 0.34.7, by the rules under which it behaves.
//!
//! - A snapshot that was being written when the process died would be taken for the newest and
//!   the database be unopenable: it is deleted before opening.
//! - Plain inserts only: batches of a few operations and transactions deadlock it.
//! - Its `flush` is no fsync on Linux: after it, its files are synced here.
//! - It may panic or hang: the caller runs it where that harms nobody.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use super::cache::{Index, IndexError, Removed, Table, Visit};

/// An open sled database.
#[derive(Debug)]
pub(super) struct SledIndex {
    directory: PathBuf,
    db: sled::Db,
    /// One per [`Table`], in their order.
    trees: Vec<sled::Tree>,
}

/// A page cache of this size holds what changes at a time; a scan needs none.
const CACHE_BYTES: u64 = 16 << 20;

impl SledIndex {
    /// Opens the database in `directory`, or makes one there.
    ///
    /// # Errors
    /// [`IndexError`].
    pub(super) fn open(directory: &Path) -> Result<Self, IndexError> {
        remove_torn_snapshots(directory)?;
        let config = sled::Config::new().path(directory).cache_capacity(CACHE_BYTES);
        let db = config.flush_every_ms(Some(500)).open()?;
        let open = |table: Table| db.open_tree(table.name());
        let trees = Table::ALL.into_iter().map(open).collect::<Result<_, _>>()?;
        Ok(Self { directory: directory.to_path_buf(), db, trees })
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
        let Self { directory, db, trees } = *self;
        db.flush()?;
        drop((trees, db));
        sync_files(&directory)
    }
}

fn remove_torn_snapshots(directory: &Path) -> Result<(), IndexError> {
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        entries => entries.map_err(io(directory))?,
    };
    for entry in entries {
        let path = entry.map_err(io(directory))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.starts_with("snap.") && name.ends_with(".generating") {
            fs::remove_file(&path).map_err(io(&path))?;
        }
    }
    Ok(())
}

/// What sled has written and not synced.
fn sync_files(directory: &Path) -> Result<(), IndexError> {
    for entry in fs::read_dir(directory).map_err(io(directory))? {
        let path = entry.map_err(io(directory))?.path();
        // A snapshot may be replaced meanwhile.
        if let Ok(file) = File::open(&path) {
            file.sync_all().map_err(io(&path))?;
        }
    }
    File::open(directory).and_then(|directory| directory.sync_all()).map_err(io(directory))
}

fn io(path: &Path) -> impl FnOnce(std::io::Error) -> IndexError + '_ {
    move |source| IndexError::Io { path: path.to_path_buf(), source }
}
