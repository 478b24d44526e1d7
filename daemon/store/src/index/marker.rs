//! `index/CLEAN`: the statement of the process that closed the database that nothing is missing in it.
//!
//! It is there only while nobody writes: whoever is about to change the store removes it first.
//! It says which store it is of, how much is in the database, and when `blobs/` and `recipes/` were
//! changed last. The kernel notes that time for every change whoever makes it, so a copy of a
//! store, or one that somebody has put something into, has an index that is not believed.

use std::path::{Path, PathBuf};

use blobd_store_format::layout;
use serde::{Deserialize, Serialize};

use super::catalog::Catalog;
use super::database::{IndexError, disk};
use crate::StoreError;
use crate::disk::Root;

/// The form of the database. Another is not read.
const FORMAT: u32 = 1;

/// What `index/CLEAN` says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Marker {
    format: u32,
    store: String,
    blob_count: u64,
    recipe_count: u64,
    directories: Stamps,
}

/// When the directories of blobs and recipes were changed last.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Stamps {
    blobs: Stamp,
    recipes: Stamp,
}

/// Inode, and time of change in seconds and nanoseconds since 1970.
type Stamp = (u64, i64, i64);

impl Stamps {
    /// Those of a store as it is now. `None` when it cannot be told.
    pub(super) fn of(root: &Root) -> Option<Self> {
        let stamp = |directory: &str| {
            let status = root.status(Path::new(directory)).ok()??;
            let ((_device, inode), (seconds, nanos)) = (status.identity(), status.status_changed());
            Some((inode, seconds, nanos))
        };
        Some(Self { blobs: stamp(layout::BLOBS)?, recipes: stamp(layout::RECIPES)? })
    }
}

impl Marker {
    /// Of a store with this ID, whose database holds this.
    pub(super) fn new(store: String, catalog: &Catalog, directories: Stamps) -> Self {
        let (blob_count, recipe_count) = (catalog.blob_count(), catalog.recipe_count());
        Self { format: FORMAT, store, blob_count, recipe_count, directories }
    }

    /// Reads the marker and removes it, durably: what is done from now on is not in the database
    /// yet. `None` when there is none that means anything.
    pub(super) fn take(root: &Root) -> Option<Self> {
        const MAX_BYTES: u64 = 4096;
        let json = root.read_limited(&path(), MAX_BYTES).ok()??;
        if let Err(error) = remove(root) {
            tracing::warn!("{error}; the index is not used");
            return None;
        }
        serde_json::from_slice(&json).ok()
    }

    /// Writes it, durably.
    pub(super) fn write(&self, root: &Root) -> Result<(), StoreError> {
        let (disk, target) = (disk(root), path());
        let json =
            serde_json::to_vec(self).map_err(|error| StoreError::io("write", &target)(error.into()))?;
        disk.replace_file(&target.with_extension("new"), &target, &json, 0o600)?;
        disk.sync_dir(Path::new(layout::INDEX))
    }

    /// Whether it is of this store as it is now.
    ///
    /// # Errors
    /// [`IndexError::NotClean`].
    pub(super) fn check_store(&self, root: &Root) -> Result<(), IndexError> {
        let is_current = self.format == FORMAT
            && store_id(root).as_ref() == Some(&self.store)
            && Stamps::of(root).as_ref() == Some(&self.directories);
        is_current.then_some(()).ok_or(IndexError::NotClean)
    }

    /// Whether what was read from the database is what it says.
    ///
    /// # Errors
    /// [`IndexError::Incomplete`].
    pub(super) fn check_content(&self, catalog: &Catalog) -> Result<(), IndexError> {
        let found = (catalog.blob_count(), catalog.recipe_count());
        let expected = (self.blob_count, self.recipe_count);
        if found == expected { Ok(()) } else { Err(IndexError::Incomplete { found, expected }) }
    }
}

/// Removes the marker, durably, if it is there.
pub(super) fn remove(root: &Root) -> Result<(), StoreError> {
    let disk = disk(root);
    match disk.remove_file(&path())? {
        Some(_) => disk.sync_dir(Path::new(layout::INDEX)),
        None => Ok(()),
    }
}

fn path() -> PathBuf {
    Path::new(layout::INDEX).join("CLEAN")
}

/// The ID in `store.json`; `None` if that cannot be read.
pub(super) fn store_id(root: &Root) -> Option<String> {
    #[derive(Deserialize)]
    struct StoreFile {
        id: String,
    }
    const MAX_BYTES: u64 = 4096;
    let json = root.read_limited(Path::new(layout::STORE_FILE), MAX_BYTES).ok()??;
    Some(serde_json::from_slice::<StoreFile>(&json).ok()?.id)
}
