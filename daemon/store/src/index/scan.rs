//! Compares the catalog with the disk and corrects it name by name, so that no lock is held while the disk is read.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use blobd_store_format::digest::Digest;
use blobd_store_format::layout;

use super::catalog::RowState;
use super::state::{Stage, StoreIndex};
use crate::node::Node;
use crate::root::{Directory, Root};
use crate::sys::give_back_memory;
use crate::{StoreError, lock};

/// The number of names that are sorted before they are inspected: 2.5 MiB.
const LISTED_AT_ONCE: usize = 1 << 16;

impl StoreIndex {
    /// Makes the catalog agree with the disk, unless another thread has just done so.
    pub(super) fn refresh(&self) -> Result<(), StoreError> {
        let _guard = lock(&self.scans);
        let is_current = {
            let state = lock(&self.state);
            state.stage == Stage::Ready && !state.is_stale
        };
        if is_current { Ok(()) } else { self.scan().map(drop) }
    }

    /// Like [`Self::refresh`], but always compares; returns the number of entries that differed.
    pub(super) fn compare(&self) -> Result<u64, StoreError> {
        let _guard = lock(&self.scans);
        self.scan()
    }

    fn scan(&self) -> Result<u64, StoreError> {
        // Otherwise the stamps below would hide earlier changes by other processes.
        self.detect_foreign_changes();
        // Before the listing, so that later changes by other processes are detected.
        self.stamp_directories();
        {
            let mut state = lock(&self.state);
            state.catalog.start_scan();
            if state.stage == Stage::Unbuilt {
                state.stage = Stage::Building;
            }
        }
        let mut foreign = Vec::new();
        let found = self.scan_blobs(&mut foreign);
        let found = found.and_then(|blobs| Ok(blobs + self.scan_recipes(&mut foreign)?));
        {
            let mut state = lock(&self.state);
            if found.is_ok() {
                self.rebuilds.fetch_add(1, Ordering::Relaxed);
                state.stage = Stage::Ready;
                state.is_stale = false;
                state.foreign = Some(foreign);
            } else if state.stage == Stage::Building {
                state.stage = Stage::Unbuilt;
            }
        }
        self.changed.notify_all();
        give_back_memory();
        found
    }

    /// The paths of entries of `blobs/` and `recipes/` that are neither. Lists the directories unless a scan has.
    pub(crate) fn foreign_entries(&self) -> Result<Vec<PathBuf>, StoreError> {
        let _guard = lock(&self.scans);
        if let Some(foreign) = &lock(&self.state).foreign {
            return Ok(foreign.clone());
        }
        let mut foreign = Vec::new();
        list(&self.root, layout::BLOBS, layout::parse_blob_name, &mut foreign, |_| Ok(()))?;
        list(&self.root, layout::RECIPES, layout::parse_recipe_name, &mut foreign, |_| Ok(()))?;
        lock(&self.state).foreign = Some(foreign.clone());
        Ok(foreign)
    }

    fn scan_blobs(&self, foreign: &mut Vec<PathBuf>) -> Result<u64, StoreError> {
        let blobs = self.root.existing_directory(layout::BLOBS)?;
        let mut differences = 0;
        let mut update = |digest| {
            differences += u64::from(self.update_blob(&blobs, digest)?);
            Ok(())
        };
        list(&self.root, layout::BLOBS, layout::parse_blob_name, foreign, |listed| {
            listed.into_iter().try_for_each(&mut update)
        })?;
        let unlisted = lock(&self.state).catalog.unseen();
        unlisted.into_iter().try_for_each(update)?;
        Ok(differences)
    }

    fn scan_recipes(&self, foreign: &mut Vec<PathBuf>) -> Result<u64, StoreError> {
        let mut files = Vec::new();
        list(&self.root, layout::RECIPES, layout::parse_recipe_name, foreign, |listed| {
            files.extend(listed);
            Ok(())
        })?;
        let names: HashSet<Digest> = files.iter().copied().collect();
        let is_unlisted = |file: &&Digest| !names.contains(*file);
        files.extend(lock(&self.state).catalog.recipes().keys().filter(is_unlisted));
        files.into_iter().try_fold(0, |count, file| Ok(count + u64::from(self.update_recipe(file)?)))
    }
}

/// Calls `visit` with the digests of the names in a directory, in batches sorted by inode, so that inspecting them
/// reads the disk sequentially. Adds the paths of the other entries to `foreign`.
fn list(
    root: &Root,
    directory: &str,
    parse: impl Fn(&str) -> Option<Digest>,
    foreign: &mut Vec<PathBuf>,
    mut visit: impl FnMut(Vec<Digest>) -> Result<(), StoreError>,
) -> Result<(), StoreError> {
    let in_order = |mut listed: Vec<(u64, Digest)>| {
        listed.sort_unstable();
        listed.into_iter().map(|(_inode, digest)| digest).collect()
    };
    let mut listed = Vec::new();
    for entry in root.existing_directory(directory)?.entries()? {
        let entry = entry?;
        match entry.name.to_str().and_then(&parse) {
            Some(digest) => listed.push((entry.inode, digest)),
            None => foreign.push(Path::new(directory).join(entry.name)),
        }
        if listed.len() == LISTED_AT_ONCE {
            visit(in_order(std::mem::take(&mut listed)))?;
        }
    }
    visit(in_order(listed))
}

/// The most blobs and recipes that are compared: about 50 ms. The sizes of more come from the catalog alone; `reindex`
/// and the background verification correct them.
const MAX_FILES: usize = 20_000;

impl StoreIndex {
    /// Corrects the sizes in the catalog, unless there are too many. Returns the identities of files with several
    /// names.
    pub fn recheck_sizes(&self) -> Result<HashSet<(u64, u64)>, StoreError> {
        drop(self.catalog()?);
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
