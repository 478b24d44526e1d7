//! The state shared by the threads of the index, and how it is updated from disk.

use std::fs::File;
use std::path::PathBuf;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use blobd_store_format::digest::Digest;
use blobd_store_format::layout;
use tracing_mutex::stdsync::{Condvar, Mutex, MutexGuard};

use super::catalog::{BlobFacts, Catalog, RecipeFacts};
use super::database::{LastUse, RECORDED_SINCE, Uses, now};
use super::last_count::LastCounts;
use super::marker::{self, Marker, Stamps};
use crate::disk::Root;
use crate::node::{Node, read_outline};
use crate::root::Directory;
use crate::{FileSystem, StoreError, lock};

/// A store's index. No file is read or written while `state` or `uses` is locked.
#[derive(Debug)]
pub struct StoreIndex {
    pub(super) root: Root,
    pub(super) file_system: FileSystem,
    pub(super) state: Mutex<State>,
    /// Notified when something changes that a thread may wait for.
    pub(super) changed: Condvar,
    /// Has its own lock, so that opening a model does not wait for the catalog.
    pub(super) uses: Mutex<Uses>,
    /// Held while the disk is compared with the catalog, so that this runs once at a time.
    pub(super) scans: Mutex<()>,
    /// Held while the state of a name is read from disk and set in the catalog, so that of two states the later one is
    /// set last. Names share locks by their first byte.
    entry_locks: [Mutex<()>; 64],
    /// Whether `index/CLEAN` may exist. Held while it is written or removed.
    pub(super) has_marker: Mutex<bool>,
    /// How often it was built from the files, or compared with them.
    pub(crate) rebuilds: AtomicU64,
    /// Locked while `state` is, never before it.
    pub(super) last_counts: LastCounts,
}

#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) catalog: Catalog,
    pub(super) stage: Stage,
    pub(super) writer: Writer,
    /// Changes that were reported while the database was loaded.
    pub(super) pending: Vec<Node>,
    /// The number of own changes in progress.
    pub(super) changes: usize,
    /// The times of `blobs/` and `recipes/` after the last known change.
    directories: Option<Stamps>,
    /// Readings of these times are numbered: the current one, and the last one that was started.
    stamped: (u64, u64),
    /// Another process has changed them, so the catalog must be compared with the disk.
    pub(super) is_stale: bool,
    /// Entries of these directories that are neither blobs nor recipes; `None` until they are listed.
    pub(super) foreign: Option<Vec<PathBuf>>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Stage {
    #[default]
    Unbuilt,
    /// It is being loaded from the database, which will replace it.
    Loading,
    Building,
    Ready,
}

#[derive(Debug, Default)]
pub(super) enum Writer {
    /// There is none: the store is open in a command, or closing.
    #[default]
    Absent,
    Running {
        /// When the current write began.
        busy_since: Option<Instant>,
        /// It writes the rest and ends.
        is_stopping: bool,
    },
    Failed(String),
}

/// Held while names appear in or disappear from `blobs/` or `recipes/`.
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
            rebuilds: AtomicU64::default(),
            last_counts: LastCounts::default(),
        })
    }

    pub(crate) fn begin_change(self: &Arc<Self>) -> Change {
        self.detect_foreign_changes();
        lock(&self.state).changes += 1;
        let mut has_marker = lock(&self.has_marker);
        if *has_marker && let Err(error) = marker::remove(&self.root) {
            // The times of the directories show the change as well.
            tracing::warn!("{error}; the next daemon may rebuild the index");
        }
        *has_marker = false;
        Change(Arc::clone(self))
    }

    /// Detects whether another process has changed the directories since our own last change.
    pub(super) fn detect_foreign_changes(&self) {
        let number = lock(&self.state).stamped.1;
        let now = Stamps::for_root(&self.root);
        let mut state = lock(&self.state);
        // If a change of our own has begun meanwhile, the two cannot be compared.
        if state.stage == Stage::Ready && state.changes == 0 && state.stamped == (number, number) {
            state.is_stale |= now.is_none() || now != state.directories;
        }
    }

    /// Records the current times of the directories. Of two concurrent readings the later one is kept.
    pub(super) fn stamp_directories(&self) {
        let number = {
            let mut state = lock(&self.state);
            state.stamped.1 += 1;
            state.stamped.1
        };
        let now = Stamps::for_root(&self.root);
        let mut state = lock(&self.state);
        if state.stamped.0 < number {
            state.stamped.0 = number;
            state.directories = now;
        }
    }

    /// Updates what may have appeared, disappeared or been replaced.
    pub fn note(&self, node: Node) {
        {
            let mut state = lock(&self.state);
            match state.stage {
                Stage::Unbuilt => return,
                Stage::Loading => return state.pending.push(node),
                Stage::Building | Stage::Ready => {}
            }
        }
        let updated = match node {
            Node::Blob(digest) => {
                let blobs = self.root.existing_directory(layout::BLOBS);
                blobs.and_then(|blobs| self.update_blob(&blobs, digest))
            }
            Node::Recipe(file) => self.update_recipe(file),
        };
        if let Err(error) = updated {
            tracing::warn!("{error}; the index will be compared with the disk");
            lock(&self.state).is_stale = true;
        }
        self.changed.notify_all();
    }

    pub(super) fn update_blob(&self, blobs: &Directory, digest: Digest) -> Result<bool, StoreError> {
        let read = || BlobFacts::read(blobs, self.file_system, digest);
        self.update_entry(digest, read, |catalog, facts| catalog.set_blob(digest, facts))
    }

    pub(super) fn update_recipe(&self, file: Digest) -> Result<bool, StoreError> {
        let read = || RecipeFacts::read(&self.root, self.file_system, file);
        self.update_entry(file, read, |catalog, facts| catalog.set_recipe(file, facts))
    }

    pub(super) fn update_entry<F>(
        &self,
        name: Digest,
        read: impl FnOnce() -> Result<F, StoreError>,
        enter: impl FnOnce(&mut Catalog, F) -> bool,
    ) -> Result<bool, StoreError> {
        let [first, ..] = name.as_bytes();
        let _guard = self.entry_locks.get(usize::from(first % 64)).map(lock);
        let facts = read()?;
        Ok(enter(&mut lock(&self.state).catalog, facts))
    }

    /// Records a use, unless a later one is known.
    pub(super) fn record_use(&self, manifest: Digest, used: LastUse) {
        let mut uses = lock(&self.uses);
        let last = uses.entry(manifest).or_default();
        if used.seconds >= last.seconds {
            *last = used;
        }
    }

    /// Records that uses are recorded from now on, unless they were before.
    pub(super) fn begin_uses(&self) {
        lock(&self.uses).entry(RECORDED_SINCE).or_insert(LastUse { seconds: now(), uid: None });
    }

    pub(super) fn wait_while<'s>(
        &'s self,
        state: MutexGuard<'s, State>,
        limit: Duration,
        condition: impl Fn(&State) -> bool,
    ) -> MutexGuard<'s, State> {
        // As for `lock`: no panic leaves the state inconsistent.
        let waited = self.changed.wait_timeout_while(state, limit, |state| condition(state));
        waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

impl State {
    pub(super) fn is_running(&self) -> bool {
        matches!(self.writer, Writer::Running { .. })
    }

    pub(super) fn is_stopping(&self) -> bool {
        !matches!(self.writer, Writer::Running { is_stopping: false, .. })
    }

    pub(super) fn set_busy(&mut self, is_busy: bool) {
        if let Writer::Running { busy_since, .. } = &mut self.writer {
            *busy_since = is_busy.then(Instant::now);
        }
    }

    /// The marker for the database when it is closed; `None` if the database may be incomplete.
    pub(super) fn marker(&self, store: String) -> Option<Marker> {
        let is_complete = self.is_running() && !self.catalog.has_unwritten();
        let is_unchanged = self.changes == 0 && !self.is_stale;
        let directories = self.directories.clone().filter(|_| is_complete && is_unchanged)?;
        Some(Marker::new(store, &self.catalog, directories))
    }
}

impl BlobFacts {
    pub(super) fn read(
        blobs: &Directory,
        file_system: FileSystem,
        digest: Digest,
    ) -> Result<Option<Self>, StoreError> {
        let status = blobs.status(layout::blob_name(digest))?;
        Ok(status
            .map(|status| Self { length: status.len(), bytes_on_disk: file_system.bytes_on_disk(&status) }))
    }
}

impl RecipeFacts {
    /// Reads the state of a recipe; `None` if there is none. An unreadable recipe is not an error.
    pub(super) fn read(
        root: &Root,
        file_system: FileSystem,
        file: Digest,
    ) -> Result<Option<Self>, StoreError> {
        let path = layout::recipe(file);
        let Some(status) = root.status(&path)? else { return Ok(None) };
        let read = |opened: File| read_outline(root, file, &opened);
        let needs = match root.find_file(&path).and_then(|opened| opened.map(read).transpose()) {
            Ok(Some(outline)) => Some(outline.digests().to_vec()),
            Ok(None) => return Ok(None),
            Err(error) => {
                tracing::warn!("{error}");
                None
            }
        };
        Ok(Some(Self { bytes_on_disk: file_system.bytes_on_disk(&status), needs }))
    }
}

impl Drop for Change {
    fn drop(&mut self) {
        self.0.stamp_directories();
        lock(&self.0.state).changes -= 1;
        self.0.changed.notify_all();
    }
}
