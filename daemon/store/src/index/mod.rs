//! The index: what is in the store and how large, without asking the disk each time.
//!
//! The [`Catalog`] in memory answers; a copy in `index/` (sled) spares the daemon from reading a
//! million names and ten thousand recipes when it starts. Both are caches of the file system.
//! Nothing is deleted on their word, nothing waits for them but `df` and `reindex`, and losing
//! or damaging the copy costs a rebuild in the background.
//!
//! Whoever changes `blobs/` or `recipes/` holds a [`Change`] meanwhile (`Store::begin_change`)
//! and says afterwards which name it was (`Store::note_blob`, `Store::note_recipe`). What it
//! says is not believed: the disk is asked about that name, without any lock, and what was asked last is
//! entered; so the order in which two changes are noted does not matter. What somebody else puts there is noticed by the time of change that
//! the kernel gives the directories, unless it happens while a change is under way.
//!
//! | file | is |
//! |---|---|
//! | `catalog`, `tally` | the tables in memory, and what models take by them |
//! | `scan` | comparing the catalog with the disk, and mending it |
//! | `pages` | the form of the copy |
//! | `cache`, `sled_index` | where the copy is kept |
//! | `marker` | whether the copy can be believed |
//! | `keeper` | the thread that loads it and writes to it |

use std::collections::HashMap;
use std::ops::Deref;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use blobd_store_format::digest::Digest;

use crate::disk::Root;
use crate::{FileSystem, Store, StoreError, lock};

mod cache;
mod catalog;
mod keeper;
mod marker;
mod pages;
mod scan;
mod sled_index;
mod tally;
#[cfg(test)]
mod tests;

pub use catalog::{BlobFacts, Catalog, RecipeFacts};
pub use scan::Differences;
pub use tally::{Measured, Share, Tally, Unreadable};

use marker::Stamps;

/// How long `df` waits while the catalog is built.
const BUILD_PATIENCE: Duration = Duration::from_secs(60);
/// A write of the copy that takes longer is taken for one that never ends.
const WRITE_LIMIT: Duration = Duration::from_secs(10);
/// How long whoever notes a change waits for somebody else's look at the same name.
const LOOK_PATIENCE: Duration = Duration::from_secs(10);
/// A use of a model is written down again after this.
const USE_GRAIN: Duration = Duration::from_secs(3600);

/// A store's index.
#[derive(Clone, Debug)]
pub(super) struct StoreIndex(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    root: Root,
    file_system: FileSystem,
    state: Mutex<State>,
    /// When models were used. By itself, because whoever opens a model notes that, and waits for nothing.
    uses: Mutex<HashMap<Digest, Use>>,
    /// Something that somebody may wait for has changed.
    changed: Condvar,
    /// One comparison with the disk at a time.
    scans: Mutex<()>,
}

#[derive(Debug, Default)]
struct State {
    catalog: Catalog,
    stage: Stage,
    /// What was noted since a scan began, which the scan must not overwrite.
    noted: Option<Noted>,
    changes_in_flight: usize,
    /// The directories as they were after the last change that is known of.
    directories: Option<Stamps>,
    /// Somebody else has changed the directories.
    is_suspect: bool,
    /// The marker has been removed, or there is none.
    is_unmarked: bool,
    keeper: Keeper,
    looks: Looks,
    scans_begun: u64,
}

/// Looks at the disk that are under way, the last one for each name: only that counts, because it began
/// last.
#[derive(Debug, Default)]
struct Looks {
    count: u64,
    last: HashMap<Name, u64>,
}

/// What a look is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Name {
    Blob(Digest),
    Recipe(Digest),
}

impl Looks {
    fn begin(&mut self, name: Name) -> u64 {
        self.count += 1;
        self.last.insert(name, self.count);
        self.count
    }

    /// Ends a look; says whether none for the same name has begun since.
    fn end(&mut self, name: Name, number: u64) -> bool {
        let is_last = self.last.get(&name) == Some(&number);
        if is_last {
            self.last.remove(&name);
        }
        is_last
    }
}

/// How far the catalog is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Stage {
    /// Nobody has asked for it.
    #[default]
    Unbuilt,
    /// It is being read from the copy or from disk.
    Building,
    /// It says what the disk says.
    Ready,
}

#[derive(Debug, Default)]
struct Noted {
    blobs: HashMap<Digest, Option<BlobFacts>>,
    recipes: HashMap<Digest, Option<RecipeFacts>>,
}

/// Who keeps the copy.
#[derive(Debug, Default)]
enum Keeper {
    /// Nobody: the store is open in a command, or closing.
    #[default]
    Nobody,
    /// A thread of its own.
    Running(Running),
    /// Nobody any more, and why.
    Degraded(String),
}

#[derive(Debug, Default)]
struct Running {
    /// When the write that is in progress began.
    writing_since: Option<Instant>,
    order: Order,
}

/// What the keeper is asked to do beside keeping up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Order {
    #[default]
    Nothing,
    /// Compare the copy with the catalog.
    Compare,
    /// It has, and found so many differences.
    Compared(u64),
    /// End.
    Stop,
}

/// When a model was used, in seconds since 1970.
#[derive(Clone, Copy, Debug, Default)]
struct Use {
    last: u64,
    written: u64,
}

/// How the index is, for `doctor`.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum IndexStatus {
    /// Nobody has needed it so far.
    Unused,
    /// It is being read or rebuilt.
    Building,
    /// It is complete.
    Ready,
    /// It is in memory alone, and why; the next start rebuilds it.
    Degraded(String),
}

/// The catalog while nobody changes it. To be held for moments, and without calling the store:
/// imports wait for it to note what they have done.
#[derive(Debug)]
#[must_use]
pub struct CatalogGuard<'i>(MutexGuard<'i, State>);

impl Deref for CatalogGuard<'_> {
    type Target = Catalog;

    fn deref(&self) -> &Catalog {
        &self.0.catalog
    }
}

/// Held while names appear in or vanish from `blobs/` or `recipes/`.
#[derive(Debug)]
#[must_use]
pub struct Change(StoreIndex);

impl Store {
    /// Has a thread keep a copy of the catalog in `index/`, from what lies there if it can be
    /// believed, from the disk if not. For the daemon: a command would pay for it and gain
    /// nothing. Returns at once. Of a store that cannot be written to there is no copy.
    pub fn start_index(&self) {
        if self.read_only_reason().is_none() {
            self.index().start();
        }
    }

    /// Ends the thread, with everything written if that takes but a few seconds. A change that
    /// comes later is not in the copy, and makes that known.
    pub fn stop_index(&self) {
        self.index().stop();
    }

    /// To be called before names in `blobs/` or `recipes/` change, and held until the changes
    /// are noted.
    pub(crate) fn begin_change(&self) -> Change {
        self.index().begin_change()
    }

    /// Notes that a blob may have appeared, vanished or been replaced. Never fails: an index that
    /// misses something is mended by `reindex`.
    pub(crate) fn note_blob(&self, digest: Digest) {
        let look =
            |shared: &Shared| scan::blob_facts(&scan::blobs_in(&shared.root)?, shared.file_system, digest);
        self.index().note(Name::Blob(digest), look, |state, facts| {
            if let Some(noted) = &mut state.noted {
                noted.blobs.insert(digest, facts);
            }
            state.catalog.set_blob(digest, facts);
        });
    }

    /// Notes that a recipe may have appeared, vanished or been replaced. Never fails.
    pub fn note_recipe(&self, file: Digest) {
        let look = |shared: &Shared| scan::recipe_facts(&shared.root, shared.file_system, file);
        self.index().note(Name::Recipe(file), look, |state, facts| {
            if let Some(noted) = &mut state.noted {
                noted.recipes.insert(file, facts.clone());
            }
            state.catalog.set_recipe(file, facts);
        });
    }

    /// Notes that the model with this manifest is used now. What is kept across restarts is good
    /// to an hour, and may be lost.
    pub fn note_use(&self, manifest: Digest) {
        self.index().note_use(manifest, unix_seconds(SystemTime::now()));
    }

    /// When the model with this manifest was used last, as far as that is known.
    #[must_use]
    pub fn last_use(&self, manifest: Digest) -> Option<SystemTime> {
        let last = lock(&self.index().0.uses).get(&manifest)?.last;
        UNIX_EPOCH.checked_add(Duration::from_secs(last))
    }

    /// The catalog, complete and up to date with what others have put into the store. Waits up
    /// to a minute while it is built; builds it if nobody has.
    ///
    /// # Errors
    /// [`StoreError::IndexBuilding`] after that minute; [`StoreError::Io`] when the disk cannot
    /// be read.
    pub fn catalog(&self) -> Result<CatalogGuard<'_>, StoreError> {
        self.index().catalog()
    }

    /// The catalog if it is complete now: for those who do not wait.
    #[must_use]
    pub fn catalog_now(&self) -> Option<CatalogGuard<'_>> {
        let state = lock(&self.index().0.state);
        (state.stage == Stage::Ready).then_some(CatalogGuard(state))
    }

    /// The catalog as it is if it is complete; none while it is built. Builds it if nobody has.
    ///
    /// # Errors
    /// [`StoreError::Io`] when the disk cannot be read.
    pub(crate) fn catalog_unless_building(&self) -> Result<Option<CatalogGuard<'_>>, StoreError> {
        let stage = lock(&self.index().0.state).stage;
        if stage == Stage::Unbuilt {
            self.index().0.refresh()?;
        }
        Ok(self.catalog_now())
    }

    /// Compares the index with the disk, and mends it. Reads every recipe.
    ///
    /// # Errors
    /// [`StoreError::Io`] when the disk cannot be read.
    pub fn reindex(&self) -> Result<Differences, StoreError> {
        self.index().reindex()
    }

    /// How the index is.
    #[must_use]
    pub fn index_status(&self) -> IndexStatus {
        self.index().status()
    }
}

impl StoreIndex {
    pub(super) fn new(root: Root, file_system: FileSystem) -> Self {
        Self(Arc::new(Shared {
            root,
            file_system,
            state: Mutex::default(),
            uses: Mutex::default(),
            changed: Condvar::new(),
            scans: Mutex::default(),
        }))
    }

    fn begin_change(&self) -> Change {
        let mut state = lock(&self.0.state);
        if matches!(state.keeper, Keeper::Nobody) && !state.is_unmarked {
            if let Err(error) = marker::remove(&self.0.root) {
                // The times of the directories tell as much.
                tracing::warn!("{error}; the next daemon may rebuild the index");
            }
            state.is_unmarked = true;
        }
        state.look_for_others(&self.0.root);
        state.changes_in_flight += 1;
        drop(state);
        Change(self.clone())
    }

    fn end_change(&self) {
        let mut state = lock(&self.0.state);
        state.changes_in_flight -= 1;
        if state.changes_in_flight == 0 {
            state.directories = Stamps::of(&self.0.root);
        }
        self.0.changed.notify_all();
    }

    /// Enters what the disk says now. The look at the disk holds no lock: a recipe may be long and the
    /// disk slow. Of several looks for one name that which began last is entered, and all end with it.
    fn note<F>(
        &self,
        name: Name,
        look: impl Fn(&Shared) -> Result<F, StoreError>,
        enter: impl FnOnce(&mut State, F),
    ) {
        let mut state = lock(&self.0.state);
        state.watch_writer();
        if state.stage == Stage::Unbuilt {
            return;
        }
        let (number, found) = loop {
            let (number, scans) = (state.looks.begin(name), state.scans_begun);
            drop(state);
            let found = look(&self.0);
            state = lock(&self.0.state);
            // What a scan has seen meanwhile may be newer, and would not be entered over this.
            if state.scans_begun == scans {
                break (number, found);
            }
        };
        if state.looks.end(name, number) {
            match found {
                Ok(facts) => enter(&mut state, facts),
                Err(error) => {
                    tracing::warn!("{error}; the index looks again");
                    state.is_suspect = true;
                }
            }
            self.0.changed.notify_all();
        } else {
            self.0.wait_for_look(state, name);
        }
    }

    fn note_use(&self, manifest: Digest, now: u64) {
        let mut uses = lock(&self.0.uses);
        let entry = uses.entry(manifest).or_default();
        entry.last = entry.last.max(now);
        drop(uses);
        self.0.changed.notify_all();
    }

    fn catalog(&self) -> Result<CatalogGuard<'_>, StoreError> {
        let mut state = self.built()?;
        state.look_for_others(&self.0.root);
        if state.is_suspect {
            drop(state);
            // Once: somebody who changes it all the time must not keep us here.
            self.0.refresh()?;
            state = lock(&self.0.state);
        }
        Ok(CatalogGuard(state))
    }

    /// Waits until the catalog has been built, or builds it.
    fn built(&self) -> Result<MutexGuard<'_, State>, StoreError> {
        let deadline = Instant::now() + BUILD_PATIENCE;
        let mut state = lock(&self.0.state);
        loop {
            match state.stage {
                Stage::Ready => return Ok(state),
                Stage::Unbuilt => {
                    drop(state);
                    self.0.refresh()?;
                    state = lock(&self.0.state);
                }
                Stage::Building => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return Err(StoreError::IndexBuilding { root: self.0.root.path().into() });
                    }
                    state = self.0.wait(state, left);
                }
            }
        }
    }

    fn status(&self) -> IndexStatus {
        let mut state = lock(&self.0.state);
        state.watch_writer();
        match (&state.keeper, state.stage) {
            (Keeper::Degraded(reason), _) => IndexStatus::Degraded(reason.clone()),
            (_, Stage::Unbuilt) => IndexStatus::Unused,
            (_, Stage::Building) => IndexStatus::Building,
            (_, Stage::Ready) => IndexStatus::Ready,
        }
    }
}

impl Shared {
    /// Waits until the last look for a name has been entered, so that whoever has noted a change finds it.
    fn wait_for_look<'s>(&'s self, mut state: MutexGuard<'s, State>, name: Name) {
        let deadline = Instant::now() + LOOK_PATIENCE;
        while state.looks.last.contains_key(&name) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            state = self.wait(state, left);
        }
    }

    fn wait<'s>(&'s self, state: MutexGuard<'s, State>, limit: Duration) -> MutexGuard<'s, State> {
        // As for `lock`: no panic leaves the state half changed.
        let woken = self.changed.wait_timeout(state, limit);
        woken.unwrap_or_else(std::sync::PoisonError::into_inner).0
    }
}

impl State {
    /// Looks whether somebody else has changed the directories since the last change of our own.
    fn look_for_others(&mut self, root: &Root) {
        if self.changes_in_flight == 0 && self.stage == Stage::Ready && !self.is_suspect {
            self.is_suspect = self.directories.is_none() || Stamps::of(root) != self.directories;
        }
    }

    /// Gives up on a write that does not end.
    fn watch_writer(&mut self) {
        let Keeper::Running(Running { writing_since: Some(since), .. }) = &self.keeper else { return };
        if since.elapsed() > WRITE_LIMIT {
            self.degrade(format!("a write took more than {} s", WRITE_LIMIT.as_secs()));
        }
    }

    /// Goes on without a copy.
    fn degrade(&mut self, reason: String) {
        tracing::error!("index: {reason}; it is kept in memory until the daemon is started again");
        self.keeper = Keeper::Degraded(reason);
    }
}

impl Drop for Change {
    fn drop(&mut self) {
        self.0.end_change();
    }
}

fn unix_seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}
