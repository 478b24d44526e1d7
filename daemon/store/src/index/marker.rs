//! `index/CLEAN`: the word of the process that wrote the index last that nothing is missing in it.
//!
//! It is there only while nobody writes: whoever is about to change the store removes it first.
//! It says which store it is of, how much is in the index, and when `blobs/` and `recipes/` were
//! changed last. The kernel notes that time for every change whoever makes it, so a copy of a
//! store, or one that somebody has put something into, has an index that is not believed.

use std::io::{self, ErrorKind, Write as _};
use std::path::{Path, PathBuf};

use blobd_store_format::layout;
use serde::{Deserialize, Serialize};

use super::cache::IndexError;
use super::catalog::Catalog;
use crate::disk::{Disk as _, KernelDisk, Root};

/// The form of the index. Another is not read.
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
    /// What is to be said of a store whose index holds this.
    pub(super) fn new(root: &Root, catalog: &Catalog, directories: Stamps) -> Option<Self> {
        let (blob_count, recipe_count) = (catalog.blob_count(), catalog.recipe_count());
        Some(Self { format: FORMAT, store: store_id(root)?, blob_count, recipe_count, directories })
    }

    /// Reads the marker and removes it, durably: what is done from now on is not in the index
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
    ///
    /// # Errors
    /// [`IndexError::Io`].
    pub(super) fn write(&self, root: &Root) -> Result<(), IndexError> {
        let target = path();
        let new = target.with_extension("new");
        let write = || -> io::Result<()> {
            remove_file(root, &new)?;
            let mut file = KernelDisk.create_file(root, &new, 0o600)?;
            file.write_all(&serde_json::to_vec(self)?)?;
            file.sync_all()?;
            KernelDisk.rename(root, &new, &target)?;
            sync_index(root)
        };
        Ok(write().map_err(root.failure("write", &target))?)
    }

    /// Whether it is of this store as it lies there now.
    ///
    /// # Errors
    /// [`IndexError::Mismatch`] with the first thing that is not as it says.
    pub(super) fn check_store(&self, root: &Root) -> Result<(), IndexError> {
        same("format", &FORMAT, &self.format)?;
        same("store", &store_id(root).unwrap_or_default(), &self.store)?;
        if Stamps::of(root).as_ref() == Some(&self.directories) {
            return Ok(());
        }
        let (what, expected) = ("time of the last change of blobs/ or recipes/: another", "the daemon's own");
        Err(IndexError::Mismatch { what, found: String::new(), expected: expected.to_owned() })
    }

    /// When the directories were changed last.
    pub(super) const fn directories(&self) -> &Stamps {
        &self.directories
    }

    /// Whether what was read from the index is what it says.
    ///
    /// # Errors
    /// As for [`Self::check_store`].
    pub(super) fn check_content(&self, catalog: &Catalog) -> Result<(), IndexError> {
        same("blobs in the index:", &catalog.blob_count(), &self.blob_count)?;
        same("recipes in the index:", &catalog.recipe_count(), &self.recipe_count)
    }
}

/// Removes the marker, durably, if it is there. Not through the store's own disk: a sync that
/// fails here costs a rebuild, and is no reason to refuse writes.
///
/// # Errors
/// [`IndexError::Io`].
pub(super) fn remove(root: &Root) -> Result<(), IndexError> {
    let removed = remove_file(root, &path());
    let synced = removed.and_then(|was_there| if was_there { sync_index(root) } else { Ok(()) });
    Ok(synced.map_err(root.failure("remove", &path()))?)
}

/// Says whether it was there.
fn remove_file(root: &Root, path: &Path) -> io::Result<bool> {
    match KernelDisk.remove_file(root, path) {
        Ok(()) => Ok(true),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Ok(false),
        Err(error) => Err(error),
    }
}

fn sync_index(root: &Root) -> io::Result<()> {
    root.try_open_directory(Path::new(layout::INDEX))?.sync_all()
}

fn path() -> PathBuf {
    Path::new(layout::INDEX).join("CLEAN")
}

fn same<T: PartialEq + ToString>(what: &'static str, expected: &T, found: &T) -> Result<(), IndexError> {
    if found == expected {
        return Ok(());
    }
    Err(IndexError::Mismatch { what, found: found.to_string(), expected: expected.to_string() })
}

fn store_id(root: &Root) -> Option<String> {
    #[derive(Deserialize)]
    struct StoreFile {
        id: String,
    }
    const MAX_BYTES: u64 = 4096;
    let json = root.read_limited(Path::new(layout::STORE_FILE), MAX_BYTES).ok()??;
    Some(serde_json::from_slice::<StoreFile>(&json).ok()?.id)
}
