//! `index/CLEAN`: states that the database was closed completely.
//!
//! It exists only while nothing changes the store: a process that is about to change the store removes it
//! first. It records the ID of the store, the number of entries in the database, and the change times of
//! `blobs/` and `recipes/`. The kernel updates these for every change by any process, so the index of a
//! copied store, or of one that another program has changed, is not used.

use std::path::{Path, PathBuf};

use blobd_store_format::layout;
use serde::{Deserialize, Serialize};

use super::catalog::Catalog;
use super::database::{IndexError, disk};
use crate::StoreError;
use crate::disk::Root;
use crate::store_dir::store_id;

/// The format of the database. No other is read.
const FORMAT: u32 = 1;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Marker {
    format: u32,
    store: String,
    blob_count: u64,
    recipe_count: u64,
    directories: Stamps,
}

/// When the directories of blobs and recipes last changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Stamps {
    blobs: Stamp,
    recipes: Stamp,
}

/// Inode, and time of change in seconds and nanoseconds since 1970.
type Stamp = (u64, i64, i64);

impl Stamps {
    /// The current state of a store; `None` if it cannot be read.
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
    pub(super) fn new(store: String, catalog: &Catalog, directories: Stamps) -> Self {
        let (blob_count, recipe_count) = (catalog.blob_count(), catalog.recipe_count());
        Self { format: FORMAT, store, blob_count, recipe_count, directories }
    }

    /// Reads the marker and removes it, durably, because changes from now on are not in the database.
    /// `None` if there is no valid one.
    pub(super) fn take(root: &Root) -> Option<Self> {
        const MAX_BYTES: u64 = 4096;
        let json = root.read_limited(&path(), MAX_BYTES).ok()??;
        if let Err(error) = remove(root) {
            tracing::warn!("{error}; the index is not used");
            return None;
        }
        serde_json::from_slice(&json).ok()
    }

    pub(super) fn write(&self, root: &Root) -> Result<(), StoreError> {
        let (disk, target) = (disk(root), path());
        let json =
            serde_json::to_vec(self).map_err(|error| StoreError::io("write", &target)(error.into()))?;
        disk.replace_file(&target.with_extension("new"), &target, &json, 0o600)?;
        disk.sync_dir(Path::new(layout::INDEX))
    }

    /// Checks that the marker is for the current state of this store.
    pub(super) fn check_store(&self, root: &Root) -> Result<(), IndexError> {
        let is_current = self.format == FORMAT
            && store_id(root).as_ref() == Some(&self.store)
            && Stamps::of(root).as_ref() == Some(&self.directories);
        is_current.then_some(()).ok_or(IndexError::NotClean)
    }

    /// Checks that the database had as many entries as the marker says.
    pub(super) fn check_content(&self, catalog: &Catalog) -> Result<(), IndexError> {
        let found = (catalog.blob_count(), catalog.recipe_count());
        let expected = (self.blob_count, self.recipe_count);
        if found == expected { Ok(()) } else { Err(IndexError::Incomplete { found, expected }) }
    }
}

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
