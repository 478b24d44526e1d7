//! Compares the sizes in the catalog with the disk. A file that was changed in place, for instance truncated by
//! an administrator, does not change the times of its directory, so nothing else would notice.

use std::collections::HashSet;
use std::path::PathBuf;

use blobd_store_format::layout;

use super::catalog::RowState;
use super::state::StoreIndex;
use crate::node::Node;
use crate::root::Directory;
use crate::{Store, StoreError, lock};

/// The most blobs and recipes that are compared: about 50 ms. The sizes of more come from the catalog alone;
/// `reindex` and the background verification correct them.
const MAX_FILES: usize = 20_000;

impl Store {
    /// Corrects the sizes in the catalog, unless there are too many blobs for that. Returns device and inode of the
    /// blobs and recipes with several names.
    pub fn recheck_sizes(&self) -> Result<HashSet<(u64, u64)>, StoreError> {
        drop(self.catalog()?);
        self.index.recheck()
    }

    /// The paths of entries of `blobs/` and `recipes/` that are neither blobs nor recipes.
    pub(crate) fn foreign_entries(&self) -> Result<Vec<PathBuf>, StoreError> {
        self.index.foreign_entries()
    }
}

impl StoreIndex {
    fn recheck(&self) -> Result<HashSet<(u64, u64)>, StoreError> {
        let [blobs, recipes] =
            [layout::BLOBS, layout::RECIPES].map(|name| self.root.existing_directory(name));
        let (blobs, recipes) = (blobs?, recipes?);
        let mut linked = HashSet::new();
        for (node, bytes) in self.known_sizes() {
            let found = match node {
                Node::Blob(digest) => self.found(&blobs, &layout::blob_name(digest), &mut linked)?,
                Node::Recipe(file) => self.found(&recipes, &layout::recipe_name(file), &mut linked)?,
            };
            if found != Some(bytes) {
                self.note(node);
            }
        }
        Ok(linked)
    }

    /// Blobs and recipes with their bytes on disk; nothing if they are too many.
    fn known_sizes(&self) -> Vec<(Node, u64)> {
        let state = lock(&self.state);
        let (rows, recipes) = (state.catalog.rows(), state.catalog.recipes());
        if rows.len().saturating_add(recipes.len()) > MAX_FILES {
            return Vec::new();
        }
        let blobs = rows.iter().filter(|row| row.state == RowState::Present);
        let blobs = blobs.map(|row| (Node::Blob(row.digest), row.bytes_on_disk));
        blobs.chain(recipes.iter().map(|(file, row)| (Node::Recipe(*file), row.bytes_on_disk))).collect()
    }

    fn found(
        &self,
        directory: &Directory,
        name: &str,
        linked: &mut HashSet<(u64, u64)>,
    ) -> Result<Option<u64>, StoreError> {
        let Some(status) = directory.status(name)? else { return Ok(None) };
        if status.links() > 1 && status.is_file() {
            linked.insert(status.identity());
        }
        Ok(Some(self.file_system.bytes_on_disk(&status)))
    }
}
