//! Lower stores: read-only stores in which is looked for what the writable one lacks, for example a site-wide store
//! on a shared disk.
//!
//! They belong to others. Nothing in them is created, locked or changed, and they may vanish at any moment: a file
//! system is unmounted, or an empty directory takes its place. So a lower store is opened for each look-up and closed
//! after it, and one that cannot be used is left out with a warning. No deletion depends on them: the writable store
//! has the recipe of each file of its models ([`crate::Ingest`] copies it), so collections read that store alone.

use std::path::PathBuf;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use super::filesystem::FileSystem;
use super::place::Place;
use super::root::{FileStatus, Root};
use super::summaries::Summaries;
use super::{Store, StoreError, lock, store_dir};

/// The lower stores, in the order in which they are searched.
#[derive(Debug)]
pub(super) struct LowerStores {
    /// The writable store.
    upper: Root,
    stores: Vec<LowerStore>,
}

#[derive(Debug)]
struct LowerStore {
    path: PathBuf,
    seen: Mutex<Seen>,
    summaries: Summaries,
}

/// What is known about a lower store. Not locked during disk access.
#[derive(Debug, Default)]
struct Seen {
    /// The ID that it had when it was first opened.
    id: Option<String>,
    /// Why it could not be opened the last time.
    problem: Option<String>,
    /// When a failure of a look-up in it was last logged.
    failure_logged: Option<Instant>,
}

/// A lower store, for `doctor` and lists.
#[derive(Clone, Debug)]
pub struct LowerStatus {
    /// Its directory.
    pub place: Place,
    /// The file system that it is on, or why it cannot be used.
    pub state: Result<FileSystem, String>,
}

/// The least time between two log lines about failures in the same lower store.
const BETWEEN_LOG_LINES: Duration = Duration::from_secs(60);

impl LowerStores {
    pub(super) fn new(upper: &Root, paths: Vec<PathBuf>) -> Self {
        let store = |path| LowerStore { path, seen: Mutex::default(), summaries: Summaries::default() };
        Self { upper: upper.clone(), stores: paths.into_iter().map(store).collect() }
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.stores.is_empty()
    }

    /// Opens each store once, so that its ID is known and a problem is logged.
    pub(super) fn inspect(&self) {
        for store in &self.stores {
            let warning =
                store.open(&self.upper).and_then(|root| FileSystem::of(&root).ok()?.limit_as_lower());
            if let Some(warning) = warning {
                tracing::warn!("lower store {}: {warning}", store.path.display());
            }
        }
    }

    /// What `look` finds in the first store in which it finds something.
    ///
    /// # Errors
    /// If it is found nowhere, the first damage that `look` returned. A store in which it fails with
    /// [`StoreError::Io`] is left out.
    pub(super) fn find<T>(
        &self,
        mut look: impl FnMut(&Root) -> Result<Option<T>, StoreError>,
    ) -> Result<Option<T>, StoreError> {
        let mut damage = None;
        for store in &self.stores {
            let Some(root) = store.open(&self.upper) else { continue };
            match look(&root) {
                Ok(None) => {}
                Ok(found) => return Ok(found),
                Err(error) if is_absence(&error) => store.note_failure(&error),
                Err(error) => damage = damage.or(Some(error)),
            }
        }
        damage.map_or(Ok(None), Err)
    }

    /// Why a store could not be opened in the last look-up, if one could not.
    pub(super) fn problem(&self) -> Option<String> {
        self.stores.iter().find_map(|store| lock(&store.seen).problem.clone())
    }

    /// Calls `visit` with every store that can be used, and the summaries of its tags. A failure is logged.
    pub(super) fn each(&self, mut visit: impl FnMut(&Root, &Summaries) -> Result<(), StoreError>) {
        for store in &self.stores {
            let Some(root) = store.open(&self.upper) else { continue };
            if let Err(error) = visit(&root, &store.summaries) {
                store.note_failure(&error);
            }
        }
    }
}

/// Whether an error of a look-up says only that the store, or a part of it, is not there.
const fn is_absence(error: &StoreError) -> bool {
    matches!(error, StoreError::Io { .. } | StoreError::MissingDirectory { .. })
}

impl LowerStore {
    /// Opens the store; `None` with a line in the log if it cannot be used.
    fn open(&self, upper: &Root) -> Option<Root> {
        let opened = self.try_open(upper);
        let mut seen = lock(&self.seen);
        match (&opened, &seen.problem) {
            (Ok(_), Some(_)) => tracing::info!("lower store {}: available again", self.path.display()),
            (Err(problem), before) if before.as_ref() != Some(problem) => {
                tracing::warn!("lower store left out, its models are hidden: {problem}");
            }
            _ => {}
        }
        seen.problem = opened.as_ref().err().cloned();
        opened.ok()
    }

    fn try_open(&self, upper: &Root) -> Result<Root, String> {
        let root = Root::open(&self.path).map_err(|error| error.to_string())?;
        let identity = |root: &Root| Some(FileStatus::of(root.directory_file()).ok()?.identity());
        if identity(&root) == identity(upper) {
            return Err(format!("{}: is the writable store itself", self.path.display()));
        }
        let id = store_dir::id_of_existing(&root).map_err(|error| error.to_string())?;
        let mut seen = lock(&self.seen);
        match &seen.id {
            Some(known) if *known != id => Err(format!(
                "{}: has the store {id}, {known} expected; restart blobd if the other one is meant",
                self.path.display()
            )),
            Some(_) => Ok(root),
            None => {
                seen.id = Some(id);
                Ok(root)
            }
        }
    }

    fn note_failure(&self, error: &StoreError) {
        let mut seen = lock(&self.seen);
        if seen.failure_logged.is_none_or(|logged| logged.elapsed() >= BETWEEN_LOG_LINES) {
            seen.failure_logged = Some(Instant::now());
            tracing::warn!("lower store left out of a look-up: {error}");
        }
    }

    fn status(&self, upper: &Root) -> LowerStatus {
        let state = match self.open(upper) {
            Some(root) => FileSystem::of(&root).map_err(|error| error.to_string()),
            None => Err(lock(&self.seen).problem.clone().unwrap_or_default()),
        };
        LowerStatus { place: self.path.as_path().into(), state }
    }
}

impl Store {
    /// The lower stores, in the order in which they are searched.
    #[must_use]
    pub fn lower_stores(&self) -> Vec<LowerStatus> {
        self.lower.stores.iter().map(|store| store.status(&self.lower.upper)).collect()
    }

    /// How many lower stores could not be used when they were last searched. None of them is opened.
    #[must_use]
    pub fn unavailable_lower_stores(&self) -> usize {
        self.lower.stores.iter().filter(|store| lock(&store.seen).problem.is_some()).count()
    }

    /// The directories of the lower stores. None of them is opened.
    #[must_use]
    pub fn lower_paths(&self) -> Vec<Place> {
        self.lower.stores.iter().map(|store| store.path.as_path().into()).collect()
    }
}

#[cfg(test)]
mod tests;
