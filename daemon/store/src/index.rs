//! The index: which blobs and recipes the store has and their sizes, without reading the disk each time.
//!
//! The [`Catalog`] is in memory. The database in `index/` is a copy of it, so that the daemon does not have to read a
//! million names and ten thousand recipes when it starts. Both are caches of the file system. Nothing is deleted
//! because of them, only `df` and `reindex` wait for them, and losing or damaging the database costs a rebuild in the
//! background.
//!
//! Code that changes `blobs/` or `recipes/` holds a `Change` meanwhile (`StoreIndex::begin_change`) and reports the
//! changed names afterwards ([`StoreIndex::note`]). The index then reads the state of that name from disk, so the order
//! in which two changes are reported does not matter. Changes by other processes are detected by the change times of
//! the directories, unless they happen during a change of our own.
//!
//! | file | responsibility |
//! |---|---|
//! | `catalog` | the tables in memory |
//! | `usage` | the space that models use, counted over the catalog |
//! | `last_count` | the last counts, which stay valid until something changes |
//! | `payers` | who pays for which blob and recipe, counted likewise |
//! | `sharing` | the space that models share, each with each other and all of them, counted likewise |
//! | `state` | the state shared by threads: catalog, changes in progress, times of the directories; the state of one name on disk |
//! | `scan` | compares the catalog with the disk and corrects it |
//! | `encoding`, `database` | the format of the copy; sled, its directory, and the last uses of models |
//! | `marker` | whether the database can be trusted |
//! | `writer` | the thread that loads the database and writes to it |

use std::ops::Deref;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use blobd_store_format::digest::Digest;
use tracing_mutex::stdsync::MutexGuard;

use crate::{StoreError, lock};

mod catalog;
mod database;
mod encoding;
mod last_count;
mod marker;
mod payers;
mod scan;
mod sharing;
mod state;
#[cfg(test)]
mod tests;
mod usage;
mod writer;

pub use catalog::Catalog;
pub use database::ModelUse;
pub use last_count::UsageInputs;
pub use payers::{Claim, ClaimKind, Payers, UserShare, user_shares};
pub use sharing::{SharedPart, Sharing};
pub use state::StoreIndex;
pub use usage::{ModelShare, UnreadableRecipe, Usage, UsageCounter};

use database::LastUse;
use state::{Stage, State, Writer};

/// How long `df` waits for the catalog to be built.
const BUILD_LIMIT: Duration = Duration::from_secs(60);
/// A write that takes longer is considered to hang.
const WRITE_LIMIT: Duration = Duration::from_secs(10);

/// The result of a comparison of the catalog with the disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Differences {
    pub blob_count: u64,
    pub recipe_count: u64,
    /// The number of entries in which the catalog differed from the disk.
    pub count: u64,
}

/// The state of the index, for `doctor`.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum IndexStatus {
    Unused,
    Building,
    Ready,
    /// It is only in memory, with the reason; the next start rebuilds it.
    Degraded(String),
}

/// The locked catalog. Hold it only briefly, and do not call the store meanwhile: imports wait for it to report their
/// changes.
#[derive(Debug)]
#[must_use]
pub struct CatalogGuard<'i>(MutexGuard<'i, State>);

impl Deref for CatalogGuard<'_> {
    type Target = Catalog;

    fn deref(&self) -> &Catalog {
        &self.0.catalog
    }
}

impl StoreIndex {
    /// Records that the user `uid` uses the model with this manifest now. The record is saved when the index is closed,
    /// and lost when the process is killed.
    pub fn note_use(&self, manifest: Digest, uid: u32) {
        self.record_use(manifest, LastUse { seconds: database::now(), uid: Some(uid) });
    }

    /// When the model with this manifest was last used, and by whom, if known.
    pub fn last_use(&self, manifest: Digest) -> Option<ModelUse> {
        let LastUse { seconds, uid } = *lock(&self.uses).get(&manifest)?;
        Some(ModelUse { at: UNIX_EPOCH.checked_add(Duration::from_secs(seconds))?, uid })
    }

    /// Since when uses have been recorded without a gap: earlier ones may be lost. `None` if this process has no
    /// records, as in a command without a daemon.
    pub fn uses_since(&self) -> Option<SystemTime> {
        self.last_use(database::RECORDED_SINCE).map(|since| since.at)
    }

    /// The catalog, complete and up to date with changes by other processes. Waits up to a minute while it is built;
    /// builds it if no other thread has. After that minute, [`StoreError::IndexBuilding`].
    pub fn catalog(&self) -> Result<CatalogGuard<'_>, StoreError> {
        drop(self.built()?);
        self.detect_foreign_changes();
        if lock(&self.state).is_stale {
            // Only once, so that constant changes by another process do not keep this call here.
            self.refresh()?;
        }
        Ok(CatalogGuard(lock(&self.state)))
    }

    /// The catalog if it is complete now. Never waits.
    pub fn catalog_now(&self) -> Option<CatalogGuard<'_>> {
        let state = lock(&self.state);
        (state.stage == Stage::Ready).then_some(CatalogGuard(state))
    }

    /// The catalog if it is complete; `None` while it is built. Builds it if no other thread has.
    pub fn catalog_unless_building(&self) -> Result<Option<CatalogGuard<'_>>, StoreError> {
        let stage = lock(&self.state).stage;
        if stage == Stage::Unbuilt {
            self.refresh()?;
        }
        Ok(self.catalog_now())
    }

    /// Compares the catalog with the disk, corrects it, and has the database rewritten. Reads every recipe.
    pub(crate) fn reindex(self: &Arc<Self>) -> Result<Differences, StoreError> {
        // While the catalog is being built, missing entries are not differences.
        drop(self.built()?);
        let count = self.compare()?;
        let mut state = lock(&self.state);
        state.catalog.mark_all_unwritten();
        let (blob_count, recipe_count) = (state.catalog.blob_count(), state.catalog.recipe_count());
        let has_failed = matches!(state.writer, Writer::Failed(_));
        drop(state);
        self.changed.notify_all();
        if has_failed {
            self.start();
        }
        Ok(Differences { blob_count, recipe_count, count })
    }

    /// Counts the space that these use, or returns the last count if nothing has changed.
    pub fn usage(&self, catalog: &Catalog, inputs: &UsageInputs) -> Result<Arc<Usage>, UnreadableRecipe> {
        self.last_counts.usage(catalog, inputs)
    }

    /// Divides what the models share, as [`SharedPart::count`] does, or returns the last result if nothing has changed.
    pub fn shared_parts(
        &self,
        catalog: &Catalog,
        models: &Vec<Arc<[Digest]>>,
    ) -> Result<Arc<Vec<SharedPart>>, UnreadableRecipe> {
        self.last_counts.shared_parts(catalog, models)
    }

    /// The state of the index.
    pub fn status(&self) -> IndexStatus {
        let state = lock(&self.state);
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

#[cfg(test)]
impl StoreIndex {
    /// Has the complete catalog count as being built.
    pub(crate) fn set_building(&self, is_building: bool) {
        lock(&self.state).stage = if is_building { Stage::Building } else { Stage::Ready };
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
