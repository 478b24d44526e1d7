//! The index: what is in the store and how large, without asking the disk each time.
//!
//! The [`Catalog`] in memory answers; a copy of it in `index/`, the database, spares the daemon from reading
//! a million names and ten thousand recipes when it starts. Both are caches of the file system.
//! Nothing is deleted because of them, nothing waits for them but `df` and `reindex`, and losing
//! or damaging the database costs a rebuild in the background.
//!
//! Whoever changes `blobs/` or `recipes/` holds a [`Change`] meanwhile (`Store::begin_change`)
//! and says afterwards which name it was (`Store::note_blob`, `Store::note_recipe`). The disk is then asked
//! about that name, so the order in which two changes are noted does not matter. What somebody else puts
//! there is noticed by the time of change that the kernel gives the directories, unless it happens while a
//! change is under way.
//!
//! | file | responsibility |
//! |---|---|
//! | `catalog`, `facts` | the tables in memory; what the disk says about one name |
//! | `usage` | what models take, counted over the catalog |
//! | `state` | what the threads share: the catalog, changes under way, what is known of the directories |
//! | `scan` | comparing the catalog with the disk, and mending it |
//! | `encoding`, `database` | the form of the copy; sled, and the directory that it is in |
//! | `marker` | whether the database can be believed |
//! | `writer` | the thread that loads the database and writes to it |

use std::ops::Deref;
use std::sync::MutexGuard;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use blobd_store_format::digest::Digest;

use crate::{Store, StoreError, lock};

mod catalog;
mod database;
mod encoding;
mod facts;
mod marker;
mod scan;
mod state;
#[cfg(test)]
mod tests;
mod usage;
mod writer;

pub use catalog::Catalog;
pub(crate) use state::{Change, StoreIndex};
pub use usage::{ModelShare, UnreadableRecipe, Usage, UsageCounter};

use state::{Name, Stage, State, Writer};

/// How long `df` waits while the catalog is built.
const BUILD_LIMIT: Duration = Duration::from_secs(60);
/// A write of the database that takes longer is taken for one that never ends.
const WRITE_LIMIT: Duration = Duration::from_secs(10);

/// What a comparison of the catalog with the disk has found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Differences {
    /// How many blobs there are.
    pub blob_count: u64,
    /// How many recipes there are.
    pub recipe_count: u64,
    /// In how many entries the catalog was not what the disk says.
    pub count: u64,
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

impl Store {
    /// Has a thread keep a copy of the catalog in `index/`, from what lies there if it can be
    /// believed, from the disk if not. For the daemon: a command would pay for it and gain
    /// nothing. Returns at once. Of a store that cannot be written to there is no copy.
    pub fn start_index(&self) {
        if self.read_only_reason().is_none() {
            self.index.start();
        }
    }

    /// Ends the thread, with everything written if that takes but a few seconds. A change that
    /// comes later is not in the copy, and makes that known.
    pub fn stop_index(&self) {
        self.index.stop();
    }

    /// To be called before names in `blobs/` or `recipes/` change, and held until the changes
    /// are noted.
    pub(crate) fn begin_change(&self) -> Change {
        self.index.begin_change()
    }

    /// Notes that a blob may have appeared, vanished or been replaced. Never fails: an index that
    /// misses something is mended by `reindex`.
    pub(crate) fn note_blob(&self, digest: Digest) {
        self.index.note(Name::Blob(digest));
    }

    /// Notes that a recipe may have appeared, vanished or been replaced. Never fails.
    pub fn note_recipe(&self, file: Digest) {
        self.index.note(Name::Recipe(file));
    }

    /// Notes that the model with this manifest is used now. It is kept when the index is closed, and lost
    /// when the process is killed.
    pub fn note_use(&self, manifest: Digest) {
        self.index.note_use(manifest, UNIX_EPOCH.elapsed().unwrap_or_default().as_secs());
    }

    /// When the model with this manifest was used last, as far as that is known.
    #[must_use]
    pub fn last_use(&self, manifest: Digest) -> Option<SystemTime> {
        let last = *lock(&self.index.uses).get(&manifest)?;
        UNIX_EPOCH.checked_add(Duration::from_secs(last))
    }

    /// The catalog, complete and up to date with what others have put into the store. Waits up
    /// to a minute while it is built; builds it if nobody has.
    ///
    /// # Errors
    /// [`StoreError::IndexBuilding`] after that minute; [`StoreError::Io`] when the disk cannot
    /// be read.
    pub fn catalog(&self) -> Result<CatalogGuard<'_>, StoreError> {
        drop(self.index.built()?);
        self.index.detect_foreign_changes();
        if lock(&self.index.state).is_stale {
            // Once: somebody who changes it all the time must not keep us here.
            self.index.refresh()?;
        }
        Ok(CatalogGuard(lock(&self.index.state)))
    }

    /// The catalog if it is complete now: for those who do not wait.
    #[must_use]
    pub fn catalog_now(&self) -> Option<CatalogGuard<'_>> {
        let state = lock(&self.index.state);
        (state.stage == Stage::Ready).then_some(CatalogGuard(state))
    }

    /// The catalog as it is if it is complete; none while it is built. Builds it if nobody has.
    ///
    /// # Errors
    /// [`StoreError::Io`] when the disk cannot be read.
    pub(crate) fn catalog_unless_building(&self) -> Result<Option<CatalogGuard<'_>>, StoreError> {
        let stage = lock(&self.index.state).stage;
        if stage == Stage::Unbuilt {
            self.index.refresh()?;
        }
        Ok(self.catalog_now())
    }

    /// Compares the catalog with the disk, mends it, and has the database written anew. Reads every recipe.
    ///
    /// # Errors
    /// [`StoreError::Io`] when the disk cannot be read.
    pub fn reindex(&self) -> Result<Differences, StoreError> {
        // What is being built is no difference.
        drop(self.index.built()?);
        let count = self.index.compare()?;
        let mut state = lock(&self.index.state);
        state.catalog.mark_all_unwritten();
        let (blob_count, recipe_count) = (state.catalog.blob_count(), state.catalog.recipe_count());
        let has_failed = matches!(state.writer, Writer::Failed(_));
        drop(state);
        self.index.changed.notify_all();
        if has_failed {
            self.index.start();
        }
        Ok(Differences { blob_count, recipe_count, count })
    }

    /// How the index is.
    #[must_use]
    pub fn index_status(&self) -> IndexStatus {
        let state = lock(&self.index.state);
        match (&state.writer, state.stage) {
            (Writer::Failed(reason), _) => IndexStatus::Degraded(reason.clone()),
            (Writer::Running { busy_since: Some(since), .. }, _) if since.elapsed() > WRITE_LIMIT => {
                IndexStatus::Degraded(format!("a write takes more than {} s", WRITE_LIMIT.as_secs()))
            }
            (_, Stage::Unbuilt) => IndexStatus::Unused,
            (_, Stage::Loading | Stage::Building) => IndexStatus::Building,
            (_, Stage::Ready) => IndexStatus::Ready,
        }
    }
}

impl StoreIndex {
    /// Waits until the catalog has been built, or builds it.
    fn built(&self) -> Result<MutexGuard<'_, State>, StoreError> {
        let is_building = |state: &State| matches!(state.stage, Stage::Loading | Stage::Building);
        loop {
            let state = self.wait_while(lock(&self.state), BUILD_LIMIT, is_building);
            match state.stage {
                Stage::Ready => return Ok(state),
                Stage::Unbuilt => {
                    drop(state);
                    self.refresh()?;
                }
                Stage::Loading | Stage::Building => {
                    return Err(StoreError::IndexBuilding { root: self.root.place() });
                }
            }
        }
    }
}
