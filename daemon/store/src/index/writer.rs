//! The thread that maintains the database. It loads it, or builds the catalog from disk, then writes changes, and marks
//! the database as complete when it is closed.
//!
//! After any failure of the database, including a panic or hang of sled, the catalog is kept only in memory.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, PoisonError, mpsc};
use std::thread;
use std::time::Duration;

use super::catalog::Catalog;
use super::database::{self, Database, IndexError, RECORDED_SINCE, Uses};
use super::encoding::{Edit, next_edits};
use super::marker::Marker;
use super::state::{Stage, State, StoreIndex, Writer};
use crate::store_dir::store_id;
use crate::sys::give_back_memory;
use crate::{StoreError, lock};

/// How long loading the database may take.
const LOAD_LIMIT: Duration = Duration::from_secs(10);
/// How long a stop waits for changes of the store in progress.
const SETTLE_LIMIT: Duration = Duration::from_secs(2);
/// How long a stop waits for the last writes.
const STOP_LIMIT: Duration = Duration::from_secs(10);
/// Changes within this time are written together.
const BATCH_DELAY: Duration = Duration::from_millis(100);
/// The number of pages, and of recipes, written at a time.
const BATCH: usize = 64;
/// The number of uses kept: more than there are models, so that only uses of removed ones are dropped.
pub(super) const MAX_USES: usize = 1 << 16;

impl StoreIndex {
    pub(crate) fn start(self: &Arc<Self>) {
        let marker = {
            let mut has_marker = lock(&self.has_marker);
            *has_marker = false;
            Marker::take(&self.root)
        };
        {
            let mut state = lock(&self.state);
            state.writer = Writer::Running { busy_since: None, is_stopping: false };
            if state.stage == Stage::Unbuilt {
                state.stage = Stage::Loading;
            }
        }
        let index = Arc::clone(self);
        let spawned = thread::Builder::new().name("index".to_owned()).spawn(move || index.run(marker));
        if let Err(error) = spawned {
            self.fail(format!("cannot start its thread: {error}"));
        }
    }

    /// Ends the thread, with everything written if that takes only a few seconds.
    pub(crate) fn stop(&self) {
        let mut state = lock(&self.state);
        if state.stage == Stage::Ready && state.is_running() {
            state = self.wait_while(state, SETTLE_LIMIT, |state| state.changes > 0);
            if let Writer::Running { is_stopping, .. } = &mut state.writer {
                *is_stopping = true;
            }
            self.changed.notify_all();
            state = self.wait_while(state, STOP_LIMIT, State::is_running);
        }
        // Without a marker, the database is not used.
        state.writer = Writer::Absent;
        self.changed.notify_all();
    }

    fn run(&self, marker: Option<Marker>) {
        // A panic may leave the database inconsistent; it is not used any more.
        let ended = catch_unwind(AssertUnwindSafe(|| {
            // sled creates its files itself, in this thread and in those that it starts here.
            let _identity =
                self.root.owner().act().map_err(StoreError::io("act as the owner of", self.root.place()))?;
            let database = self.open(marker)?;
            self.begin_uses();
            // Loading has normal priority because the catalog may be waited for; writing need not.
            let _ = rustix::process::nice(5);
            while let Some(edits) = self.next_edits() {
                edits.into_iter().try_for_each(|edit| database.apply(edit))?;
            }
            self.close(database)
        }));
        if let Err(error) = ended.unwrap_or(Err(IndexError::Panicked)) {
            self.fail(error.to_string());
        }
    }

    fn fail(&self, reason: String) {
        tracing::error!("index: {reason}; it is kept only in memory until the daemon is restarted");
        let mut state = lock(&self.state);
        if state.is_running() {
            state.writer = Writer::Failed(reason);
        }
        if matches!(state.stage, Stage::Loading | Stage::Building) {
            // A thread that waits for the catalog builds it itself.
            state.stage = Stage::Unbuilt;
        }
        self.changed.notify_all();
    }

    /// Loads the database, or builds the catalog from disk and creates a new database.
    fn open(&self, marker: Option<Marker>) -> Result<Database, IndexError> {
        if lock(&self.state).stage == Stage::Loading {
            match self.load(marker) {
                Ok(database) => return Ok(database),
                Err(error) => tracing::info!("index: rebuilt from disk: {error}"),
            }
            let mut state = lock(&self.state);
            (state.stage, state.pending) = (Stage::Unbuilt, Vec::new());
        }
        self.refresh()?;
        {
            let mut state = lock(&self.state);
            state.catalog.mark_all_unwritten();
            state.set_busy(true);
            let (blobs, recipes) = (state.catalog.blob_count(), state.catalog.recipe_count());
            tracing::info!("index: complete, blobs {blobs}, recipes {recipes}");
        }
        Database::create(&self.root)
    }

    fn load(&self, marker: Option<Marker>) -> Result<Database, IndexError> {
        let marker = marker.ok_or(IndexError::NotClean)?;
        // Before the marker is compared, so that later changes are detected.
        self.stamp_directories();
        marker.check_store(&self.root)?;
        let (root, expected) = (self.root.clone(), marker);
        let loaded = with_time_limit(LOAD_LIMIT, move || {
            let database = Database::existing(&root)?;
            let (catalog, uses) = database.read()?;
            expected.check_content(&catalog)?;
            Ok((database, catalog, uses))
        });
        let (database, catalog, uses) = loaded.inspect_err(|error| {
            tracing::warn!("index: {error}");
            if let Err(error) = database::rename_damaged(&self.root) {
                tracing::warn!("index: cannot be renamed: {error}");
            }
        })?;
        for (manifest, last) in uses {
            self.record_use(manifest, last);
        }
        self.install(catalog);
        give_back_memory();
        tracing::info!("index: loaded without a rebuild");
        Ok(database)
    }

    /// Installs a loaded catalog and applies the changes that were reported meanwhile.
    fn install(&self, catalog: Catalog) {
        let pending = {
            let mut state = lock(&self.state);
            (state.catalog, state.stage) = (catalog, Stage::Building);
            std::mem::take(&mut state.pending)
        };
        pending.into_iter().for_each(|node| self.note(node));
        lock(&self.state).stage = Stage::Ready;
        self.changed.notify_all();
    }

    /// Waits for changes of the catalog; `None` if the thread must end.
    fn next_edits(&self) -> Option<Vec<Edit>> {
        let mut state = lock(&self.state);
        while state.is_running() {
            let edits = next_edits(&mut state.catalog, BATCH);
            state.set_busy(!edits.is_empty());
            if !edits.is_empty() {
                return Some(edits);
            }
            if state.is_stopping() {
                return None;
            }
            let is_idle = |state: &mut State| !state.catalog.has_unwritten() && !state.is_stopping();
            state = self.changed.wait_while(state, is_idle).unwrap_or_else(PoisonError::into_inner);
            state = self.wait_while(state, BATCH_DELAY, |state| !state.is_stopping());
        }
        None
    }

    /// Closes the database, and marks it as complete if nothing has changed meanwhile.
    fn close(&self, database: Database) -> Result<(), IndexError> {
        if !lock(&self.state).is_running() {
            // It was stopped without waiting for the last writes.
            return Ok(());
        }
        database.set_uses(&self.recent_uses())?;
        database.close()?;
        self.detect_foreign_changes();
        let mut has_marker = lock(&self.has_marker);
        // From here on, a change waits for this lock and then removes the marker.
        let marker = store_id(&self.root).and_then(|store| lock(&self.state).marker(store));
        if let Some(marker) = marker {
            marker.write(&self.root)?;
            *has_marker = true;
        }
        drop(has_marker);
        lock(&self.state).writer = Writer::Absent;
        self.changed.notify_all();
        Ok(())
    }

    pub(super) fn recent_uses(&self) -> Uses {
        let mut uses: Vec<_> = lock(&self.uses).iter().map(|(manifest, last)| (*last, *manifest)).collect();
        uses.sort_unstable_by(|a, b| b.cmp(a));
        let since = lock(&self.uses).get(&RECORDED_SINCE).map(|since| (RECORDED_SINCE, *since));
        uses.into_iter().take(MAX_USES).map(|(last, manifest)| (manifest, last)).chain(since).collect()
    }
}

/// Runs `work`, which may hang or panic, on its own thread, and stops waiting after `limit`.
fn with_time_limit<T: Send + 'static>(
    limit: Duration,
    work: impl FnOnce() -> Result<T, IndexError> + Send + 'static,
) -> Result<T, IndexError> {
    let (sender, receiver) = mpsc::channel();
    // The receiver is gone if this took too long.
    let run = move || drop(sender.send(work()));
    let spawned = thread::Builder::new().name("index-load".to_owned()).spawn(run);
    spawned.map_err(StoreError::io("start the thread for", "index"))?;
    receiver.recv_timeout(limit).unwrap_or_else(|error| match error {
        mpsc::RecvTimeoutError::Timeout => Err(IndexError::TooSlow(limit)),
        mpsc::RecvTimeoutError::Disconnected => Err(IndexError::Panicked),
    })
}
