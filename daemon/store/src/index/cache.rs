//! Where a copy of the catalog is kept: in sled, or in memory alone.

#[cfg(test)]
use std::collections::BTreeMap;
use std::path::PathBuf;

use crate::StoreError;

/// A place for a copy of the catalog. It may lose what it was given, fail, or panic: whoever
/// uses one goes on without it. None of its methods may be called where somebody waits.
pub(super) trait Index: Send {
    /// Sets a key's value.
    ///
    /// # Errors
    /// [`IndexError`]; the copy is of no use then.
    fn put(&mut self, table: Table, key: &[u8], value: &[u8]) -> Result<(), IndexError>;

    /// Removes a key; says whether it was there.
    ///
    /// # Errors
    /// As for [`Self::put`].
    fn remove(&mut self, table: Table, key: &[u8]) -> Result<Removed, IndexError>;

    /// Calls `visit` with every key and its value, in the order of the keys.
    ///
    /// # Errors
    /// As for [`Self::put`]; the first of `visit`.
    fn scan(&self, table: Table, visit: &mut Visit<'_>) -> Result<(), IndexError>;

    /// Makes what was put and removed durable.
    ///
    /// # Errors
    /// As for [`Self::put`].
    fn sync(&mut self) -> Result<(), IndexError>;

    /// Lets go of the files, everything in them durable.
    ///
    /// # Errors
    /// As for [`Self::put`].
    fn close(self: Box<Self>) -> Result<(), IndexError>;
}

/// What a removal found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Removed {
    WasThere,
    WasNotThere,
}

impl Removed {
    pub(super) fn of<T>(old: Option<T>) -> Self {
        old.map_or(Self::WasNotThere, |_| Self::WasThere)
    }
}

/// What is called for each entry.
pub(super) type Visit<'v> = dyn FnMut(&[u8], &[u8]) -> Result<(), IndexError> + 'v;

/// The tables of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Table {
    /// Pages of the table of blobs.
    Blobs,
    /// Recipes.
    Recipes,
    /// When a model was used last: digest of the manifest → seconds since 1970 (8 bytes,
    /// little-endian).
    Uses,
}

impl Table {
    pub(super) const ALL: [Self; 3] = [Self::Blobs, Self::Recipes, Self::Uses];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Blobs => "blobs",
            Self::Recipes => "recipes",
            Self::Uses => "uses",
        }
    }
}

/// Why the copy cannot be used. Nothing but the copy is lost.
#[derive(Debug, thiserror::Error)]
pub(super) enum IndexError {
    #[error("sled: {0}")]
    Sled(#[from] sled::Error),
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: std::io::Error },
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("table {table}: entry {key} is malformed")]
    Malformed { table: &'static str, key: String },
    #[error("it panicked: {0}")]
    Panic(String),
    #[error("{what} took more than {} s", limit.as_secs())]
    TooSlow { what: &'static str, limit: std::time::Duration },
    #[error("{what} {found}, {expected} expected")]
    Mismatch { what: &'static str, found: String, expected: String },
}

/// A copy that nothing keeps, for tests.
#[cfg(test)]
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct MemoryIndex(BTreeMap<(Table, Vec<u8>), Vec<u8>>);

#[cfg(test)]
impl Index for MemoryIndex {
    fn put(&mut self, table: Table, key: &[u8], value: &[u8]) -> Result<(), IndexError> {
        self.0.insert((table, key.to_vec()), value.to_vec());
        Ok(())
    }

    fn remove(&mut self, table: Table, key: &[u8]) -> Result<Removed, IndexError> {
        Ok(Removed::of(self.0.remove(&(table, key.to_vec()))))
    }

    fn scan(&self, table: Table, visit: &mut Visit<'_>) -> Result<(), IndexError> {
        let mut entries = self.0.iter().filter(|((of, _), _)| *of == table);
        entries.try_for_each(|((_, key), value)| visit(key, value))
    }

    fn sync(&mut self) -> Result<(), IndexError> {
        Ok(())
    }

    fn close(self: Box<Self>) -> Result<(), IndexError> {
        Ok(())
    }
}
