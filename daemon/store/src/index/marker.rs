//! `index/CLEAN`: states that the database was closed completely.
//!
//! It exists only while nothing changes the store: a process that is about to change the store removes it first. It
//! records the ID of the store, the number of entries in the database, and the change times of `blobs/` and `recipes/`.
//! The kernel updates these for every change by any process, so the index of a copied store, or of one that another
//! program has changed, is not used.

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
    pub(super) fn for_root(root: &Root) -> Option<Self> {
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

    /// Reads the marker and removes it, durably: changes from now on are not in the database.
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
        let json = StoreError::encode(self, &target)?;
        disk.replace_file(&target.with_extension("new"), &target, &json, 0o600)?;
        disk.sync_dir(Path::new(layout::INDEX))
    }

    pub(super) fn check_store(&self, root: &Root) -> Result<(), IndexError> {
        let is_current = self.format == FORMAT
            && store_id(root).as_ref() == Some(&self.store)
            && Stamps::for_root(root).as_ref() == Some(&self.directories);
        is_current.then_some(()).ok_or(IndexError::NotClean)
    }

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

#[cfg(test)]
mod tests {
    use blobd_store_format::digest::Digest;

    use super::*;
    use crate::index::catalog::BlobFacts;
    use crate::testing::new_store;

    #[test]
    fn marker_is_not_that_of_a_catalog_with_another_number_of_blobs() {
        let (_folder, store) = new_store();
        let (mut catalog, directories) = (Catalog::default(), Stamps::for_root(&store.content.root).unwrap());
        let marker = Marker::new("a store".to_owned(), &catalog, directories);
        marker.check_content(&catalog).unwrap();
        catalog.set_blob(Digest::of(b"x"), Some(BlobFacts { length: 1, bytes_on_disk: 512 }));
        assert!(matches!(
            marker.check_content(&catalog),
            Err(IndexError::Incomplete { found: (1, 0), expected: (0, 0) })
        ));
    }
}
