//! The state that the index's threads share, and how what the disk says gets into it.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use blobd_store_format::digest::Digest;
use blobd_store_format::layout;

use super::catalog::Catalog;
use super::database::Uses;
use super::facts::{BlobFacts, RecipeFacts};
use super::marker::{self, Marker, Stamps};
use crate::disk::Root;
use crate::root::Directory;
use crate::{FileSystem, StoreError, lock};

/// A store's index. No file is read or written while `state` or `uses` is locked.
#[derive(Debug)]
pub(crate) struct StoreIndex {
    pub(super) root: Root,
    file_system: FileSystem,
    pub(super) state: Mutex<State>,
    /// Something that somebody may wait for has changed.
    pub(super) changed: Condvar,
    /// Separate, because whoever opens a model notes that, and must not wait.
    pub(super) uses: Mutex<Uses>,
    /// Held while the disk is compared with the catalog: once at a time.
    pub(super) scans: Mutex<()>,
    /// Held while the disk is asked about a name and what it says is entered, so that of two answers the
    /// later one is entered last. Names share locks by their first byte.
    entry_locks: [Mutex<()>; 64],
    /// Whether there may be an `index/CLEAN`. Held while it is written or removed.
    pub(super) has_marker: Mutex<bool>,
}

#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) catalog: Catalog,
    pub(super) stage: Stage,
    pub(super) writer: Writer,
    /// What has been noted while the database is loaded.
    pub(super) noted: Vec<Name>,
    /// Changes of the store's own that are under way.
    pub(super) changes: usize,
    /// How `blobs/` and `recipes/` were after the last change that is known of.
    directories: Option<Stamps>,
    /// Readings of their times are numbered: which one this is, and the last one that has begun.
    stamped: (u64, u64),
    /// Somebody else has changed them, so the catalog must be compared with the disk.
    pub(super) is_stale: bool,
}

/// How far the catalog is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Stage {
    /// Nobody has asked for it.
    #[default]
    Unbuilt,
    /// It is being read from the database, and replaced by what that says.
    Loading,
    /// It is being completed from the disk.
    Building,
    /// It says what the disk says.
    Ready,
}

/// The thread that writes the database.
#[derive(Debug, Default)]
pub(super) enum Writer {
    /// None: the store is open in a command, or closing.
    #[default]
    Absent,
    /// It runs.
    Running {
        /// When the write that is in progress began.
        busy_since: Option<Instant>,
        /// It is to write the rest and end.
        is_stopping: bool,
    },
    /// It has ended, and why.
    Failed(String),
}

/// A name in `blobs/` or `recipes/`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Name {
    Blob(Digest),
    Recipe(Digest),
}

/// Held while names appear in or vanish from `blobs/` or `recipes/`.
#[derive(Debug)]
#[must_use]
pub(crate) struct Change(Arc<StoreIndex>);

impl StoreIndex {
    pub(crate) fn new(root: Root, file_system: FileSystem) -> Arc<Self> {
        Arc::new(Self {
            root,
            file_system,
            state: Mutex::default(),
            changed: Condvar::new(),
            uses: Mutex::default(),
            scans: Mutex::default(),
            entry_locks: std::array::from_fn(|_| Mutex::default()),
            has_marker: Mutex::new(true),
        })
    }

    pub(super) fn begin_change(self: &Arc<Self>) -> Change {
        self.detect_foreign_changes();
        lock(&self.state).changes += 1;
        let mut has_marker = lock(&self.has_marker);
        if *has_marker && let Err(error) = marker::remove(&self.root) {
            // The times of the directories tell as much.
            tracing::warn!("{error}; the next daemon may rebuild the index");
        }
        *has_marker = false;
        Change(Arc::clone(self))
    }

    /// Finds out whether somebody else has changed the directories since the last change of our own.
    pub(super) fn detect_foreign_changes(&self) {
        let number = lock(&self.state).stamped.1;
        let now = Stamps::of(&self.root);
        let mut state = lock(&self.state);
        // After a change of our own that has begun meanwhile, the two cannot be compared.
        if state.stage == Stage::Ready && state.changes == 0 && state.stamped == (number, number) {
            state.is_stale |= now.is_none() || now != state.directories;
        }
    }

    /// Records the times of the directories as they are now. Of two readings at once the later one counts.
    pub(super) fn stamp_directories(&self) {
        let number = {
            let mut state = lock(&self.state);
            state.stamped.1 += 1;
            state.stamped.1
        };
        let now = Stamps::of(&self.root);
        let mut state = lock(&self.state);
        if state.stamped.0 < number {
            state.stamped.0 = number;
            state.directories = now;
        }
    }

    /// Enters what the disk says about a name that may have appeared, vanished or been replaced.
    pub(super) fn note(&self, name: Name) {
        {
            let mut state = lock(&self.state);
            match state.stage {
                Stage::Unbuilt => return,
                Stage::Loading => return state.noted.push(name),
                Stage::Building | Stage::Ready => {}
            }
        }
        let updated = match name {
            Name::Blob(digest) => {
                let blobs = self.root.existing_directory(layout::BLOBS);
                blobs.and_then(|blobs| self.update_blob(&blobs, digest))
            }
            Name::Recipe(file) => self.update_recipe(file),
        };
        if let Err(error) = updated {
            tracing::warn!("{error}; the index will be compared with the disk");
            lock(&self.state).is_stale = true;
        }
        self.changed.notify_all();
    }

    /// Enters what the disk says about a blob; says whether that is news.
    pub(super) fn update_blob(&self, blobs: &Directory, digest: Digest) -> Result<bool, StoreError> {
        let read = || BlobFacts::read(blobs, self.file_system, digest);
        self.update_entry(digest, read, |catalog, facts| catalog.set_blob(digest, facts))
    }

    /// The same for a recipe.
    pub(super) fn update_recipe(&self, file: Digest) -> Result<bool, StoreError> {
        let read = || RecipeFacts::read(&self.root, self.file_system, file);
        self.update_entry(file, read, |catalog, facts| catalog.set_recipe(file, facts))
    }

    /// `read` asks the disk, `enter` says whether the answer is news.
    pub(super) fn update_entry<F>(
        &self,
        name: Digest,
        read: impl FnOnce() -> Result<F, StoreError>,
        enter: impl FnOnce(&mut Catalog, F) -> bool,
    ) -> Result<bool, StoreError> {
        let [first, ..] = name.as_bytes();
        let _alone = self.entry_locks.get(usize::from(first % 64)).map(lock);
        let facts = read()?;
        Ok(enter(&mut lock(&self.state).catalog, facts))
    }

    /// Notes that a model was used at `now`, in seconds since 1970.
    pub(super) fn note_use(&self, manifest: Digest, now: u64) {
        let mut uses = lock(&self.uses);
        let last = uses.entry(manifest).or_default();
        *last = now.max(*last);
    }

    /// Waits while something is so, but no longer than `limit`.
    pub(super) fn wait_while<'s>(
        &'s self,
        state: MutexGuard<'s, State>,
        limit: Duration,
        is_so: impl Fn(&State) -> bool,
    ) -> MutexGuard<'s, State> {
        // As for `lock`: no panic leaves the state half changed.
        let waited = self.changed.wait_timeout_while(state, limit, |state| is_so(state));
        waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

impl State {
    pub(super) fn is_running(&self) -> bool {
        matches!(self.writer, Writer::Running { .. })
    }

    /// Whether the writer is to end.
    pub(super) fn is_stopping(&self) -> bool {
        !matches!(self.writer, Writer::Running { is_stopping: false, .. })
    }

    pub(super) fn set_busy(&mut self, is_busy: bool) {
        if let Writer::Running { busy_since, .. } = &mut self.writer {
            *busy_since = is_busy.then(Instant::now);
        }
    }

    /// What can be said of the database of the store with this ID when it is closed; `None` if the database
    /// may lack something.
    pub(super) fn marker(&self, store: String) -> Option<Marker> {
        let is_complete = self.is_running() && !self.catalog.has_unwritten();
        let is_settled = self.changes == 0 && !self.is_stale;
        let directories = self.directories.clone().filter(|_| is_complete && is_settled)?;
        Some(Marker::new(store, &self.catalog, directories))
    }
}

impl Drop for Change {
    fn drop(&mut self) {
        self.0.stamp_directories();
        lock(&self.0.state).changes -= 1;
        self.0.changed.notify_all();
    }
}
