//! Comparing the catalog with the disk, and mending it.
//!
//! Names are listed and files inspected without any lock, so that nobody waits for a cold disk.
//! What is noted meanwhile was looked at later than the listing and is not overwritten.

use std::collections::HashSet;
use std::path::Path;

use blobd_store_format::digest::Digest;
use blobd_store_format::layout;

use super::catalog::{BlobFacts, RecipeFacts};
use super::marker::Stamps;
use super::{Noted, Shared, Stage, State};
use crate::disk::Root;
use crate::outlines::read_outline;
use crate::root::Directory;
use crate::sys::give_back_memory;
use crate::{FileStatus, FileSystem, StoreError, lock};

/// What a comparison has found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Differences {
    /// How many blobs there are.
    pub blob_count: u64,
    /// How many recipes there are.
    pub recipe_count: u64,
    /// In how many entries the catalog or its copy was not what the disk says.
    pub count: u64,
}

/// Entries that are entered while the lock is held once.
const STEP: usize = 1024;
/// Names that are sorted before they are inspected: 2.5 MiB of them.
const LISTED_AT_ONCE: usize = 1 << 16;

impl Shared {
    /// Makes the catalog say what the disk says, unless it does so already by the time this
    /// comes to it; returns how many entries it did not.
    ///
    /// # Errors
    /// [`StoreError::Io`]; the catalog is as complete as it was.
    pub(super) fn refresh(&self) -> Result<u64, StoreError> {
        let _alone = lock(&self.scans);
        let state = lock(&self.state);
        if state.stage == Stage::Ready && !state.is_suspect {
            return Ok(0);
        }
        drop(state);
        self.scan()
    }

    /// The same in any case.
    ///
    /// # Errors
    /// As for [`Self::refresh`].
    pub(super) fn compare(&self) -> Result<u64, StoreError> {
        let _alone = lock(&self.scans);
        self.scan()
    }

    fn scan(&self) -> Result<u64, StoreError> {
        lock(&self.state).begin_scan(&self.root);
        let found = self.scan_blobs().and_then(|blobs| Ok(blobs + self.scan_recipes()?));
        lock(&self.state).end_scan(found.is_ok());
        self.changed.notify_all();
        give_back_memory();
        found
    }

    /// In steps, so that neither a list of all names nor a long hold of the lock is needed.
    fn scan_blobs(&self) -> Result<u64, StoreError> {
        lock(&self.state).catalog.unsee_all();
        let mut differences = 0;
        let blobs = blobs_in(&self.root)?;
        list(&blobs, layout::parse_blob_name, |listed| {
            differences += self.inspect(&blobs, listed.into_iter().map(|(_, digest)| digest))?;
            Ok(())
        })?;
        let rows = lock(&self.state).catalog.row_count();
        for start in (0..rows).step_by(STEP) {
            let unlisted: Vec<_> = lock(&self.state).catalog.unseen_in(start..start + STEP).collect();
            differences += self.inspect(&blobs, unlisted.into_iter())?;
        }
        Ok(differences)
    }

    fn inspect(
        &self,
        blobs: &Directory,
        mut digests: impl Iterator<Item = Digest>,
    ) -> Result<u64, StoreError> {
        let mut differences = 0;
        loop {
            let inspect = |digest: Digest| Ok((digest, blob_facts(blobs, self.file_system, digest)?));
            let facts: Vec<_> =
                digests.by_ref().take(STEP).map(inspect).collect::<Result<_, StoreError>>()?;
            if facts.is_empty() {
                return Ok(differences);
            }
            differences += lock(&self.state).enter_blobs(facts);
        }
    }

    fn scan_recipes(&self) -> Result<u64, StoreError> {
        let mut files = Vec::new();
        list(&directory(&self.root, layout::RECIPES)?, layout::parse_recipe_name, |listed| {
            files.extend(listed.into_iter().map(|(_, file)| file));
            Ok(())
        })?;
        let names: HashSet<Digest> = files.iter().copied().collect();
        let known = lock(&self.state).catalog.recipe_files();
        files.extend(known.into_iter().filter(|file| !names.contains(file)));
        let mut differences = 0;
        for file in files {
            let facts = recipe_facts(&self.root, self.file_system, file)?;
            let mut state = lock(&self.state);
            if !state.noted.as_ref().is_some_and(|noted| noted.recipes.contains_key(&file)) {
                differences += u64::from(state.catalog.set_recipe(file, facts));
            }
        }
        Ok(differences)
    }
}

impl State {
    fn begin_scan(&mut self, root: &Root) {
        self.noted = Some(Noted::default());
        self.scans_begun += 1;
        if self.stage == Stage::Unbuilt {
            self.stage = Stage::Building;
        }
        // Before the listing: what others do from now on is noticed afterwards.
        if self.changes_in_flight == 0 {
            self.directories = Stamps::of(root);
        }
    }

    fn end_scan(&mut self, is_complete: bool) {
        self.noted = None;
        if is_complete {
            self.stage = Stage::Ready;
            self.is_suspect = false;
        } else if self.stage == Stage::Building {
            self.stage = Stage::Unbuilt;
        }
    }

    fn enter_blobs(&mut self, facts: Vec<(Digest, Option<BlobFacts>)>) -> u64 {
        let mut differences = 0;
        for (digest, facts) in facts {
            if !self.noted.as_ref().is_some_and(|noted| noted.blobs.contains_key(&digest)) {
                differences += u64::from(self.catalog.set_blob(digest, facts));
            }
        }
        differences
    }
}

/// What the disk says about a blob.
///
/// # Errors
/// [`StoreError::Io`].
pub(super) fn blob_facts(
    blobs: &Directory,
    file_system: FileSystem,
    digest: Digest,
) -> Result<Option<BlobFacts>, StoreError> {
    let status = blobs.status(layout::blob_name(digest))?;
    let facts = |status: FileStatus| BlobFacts {
        length: status.len(),
        bytes_on_disk: file_system.bytes_on_disk(&status),
    };
    Ok(status.map(facts))
}

/// The directory of all blobs.
pub(super) fn blobs_in(root: &Root) -> Result<Directory, StoreError> {
    directory(root, layout::BLOBS)
}

fn directory(root: &Root, name: &str) -> Result<Directory, StoreError> {
    let missing = || StoreError::MissingDirectory { path: root.full(name) };
    root.find_directory(Path::new(name))?.ok_or_else(missing)
}

/// What the disk says about a recipe.
///
/// # Errors
/// [`StoreError::Io`] when it cannot be inspected. One that cannot be read is a fact.
pub(super) fn recipe_facts(
    root: &Root,
    file_system: FileSystem,
    file: Digest,
) -> Result<Option<RecipeFacts>, StoreError> {
    let path = layout::recipe(file);
    let Some(status) = root.status(&path)? else { return Ok(None) };
    let read = |opened| read_outline(root, file, opened);
    let needs = match root.find_file(&path).and_then(|opened| opened.map(read).transpose()) {
        Ok(Some(outline)) => Some(outline.digests().to_vec()),
        Ok(None) => return Ok(None),
        Err(error) => {
            tracing::warn!("{error}");
            None
        }
    };
    Ok(Some(RecipeFacts { bytes_on_disk: file_system.bytes_on_disk(&status), needs }))
}

/// Calls `visit` with the inodes and digests of the names in a directory, many at a time, those in
/// the order of their inodes: so the disk is read from front to back and not criss-cross when they
/// are inspected.
fn list(
    directory: &Directory,
    parse: impl Fn(&str) -> Option<Digest>,
    mut visit: impl FnMut(Vec<(u64, Digest)>) -> Result<(), StoreError>,
) -> Result<(), StoreError> {
    let mut listed = Vec::new();
    for entry in directory.entries()? {
        let entry = entry?;
        let digest = entry.name.to_str().and_then(&parse);
        listed.extend(digest.map(|digest| (entry.inode, digest)));
        if listed.len() == LISTED_AT_ONCE {
            listed.sort_unstable();
            visit(std::mem::take(&mut listed))?;
        }
    }
    listed.sort_unstable();
    visit(listed)
}
