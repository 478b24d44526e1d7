//! Lower stores: read-only stores, searched after the writable store, such as a site-wide store on a shared disk.
//!
//! They belong to other users. Nothing in them is created, locked or changed, and they may vanish at any moment: a file
//! system is unmounted, or an empty directory takes its place. So a lower store is opened for each look-up, or for the
//! look-ups of one operation ([`LowerStores::hold`]), and closed after it. One that cannot be used is left out with a
//! warning, and so is one in which a look-up fails: whatever is wrong with it, the writable store goes on. No deletion
//! depends on lower stores: the writable store has the recipe of each file of its models ([`crate::Ingest`] copies it),
//! so collections read that store alone.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use blobd_store_format::layout;
use tracing_mutex::stdsync::Mutex;

use crate::content::Content;
use crate::error::DisplayPath;
use crate::filesystem::FileSystem;
use crate::root::{FileStatus, Root};
use crate::{StoreError, lock, store_dir};

/// In the order of look-ups.
#[derive(Debug)]
pub(crate) struct LowerStores {
    /// Device and inode of the writable store; `None` if its status cannot be read.
    upper: Option<(u64, u64)>,
    stores: Vec<LowerStore>,
}

#[derive(Debug)]
struct LowerStore {
    path: PathBuf,
    seen: Mutex<Seen>,
    held: Mutex<Held>,
}

/// What is known about a lower store. Not locked during disk access.
#[derive(Debug, Default)]
struct Seen {
    /// The ID that it had when it was first opened.
    id: Option<String>,
    problem: Option<String>,
    /// The last failure of a look-up in it, and when that was.
    failure: Option<(Instant, String)>,
    failure_logged: Option<Instant>,
}

/// The store as operations in progress have opened it.
#[derive(Debug, Default)]
struct Held {
    operations: usize,
    root: Option<Root>,
}

/// While it exists, each lower store is opened and identified once, and stays open.
#[derive(Debug)]
#[must_use]
pub struct HeldLowerStores<'s>(&'s [LowerStore]);

impl Drop for HeldLowerStores<'_> {
    fn drop(&mut self) {
        for store in self.0 {
            let mut held = lock(&store.held);
            held.operations = held.operations.saturating_sub(1);
            // Closed after the lock is released: the server of a network file system may not respond.
            let unused = if held.operations == 0 { held.root.take() } else { None };
            drop(held);
            drop(unused);
        }
    }
}

/// A lower store, for `doctor` and lists.
#[derive(Clone, Debug)]
pub struct LowerStatus {
    pub place: DisplayPath,
    /// The file system that it is on, or why it cannot be used.
    pub state: Result<FileSystem, String>,
}

/// The least time between two log lines about one lower store, and how long a failed look-up counts as a problem.
const BETWEEN_LOG_LINES: Duration = Duration::from_secs(60);

impl LowerStores {
    pub(crate) fn new(upper: &Root, paths: Vec<PathBuf>) -> Self {
        let store = |path| LowerStore { path, seen: Mutex::default(), held: Mutex::default() };
        Self { upper: identity(upper), stores: paths.into_iter().map(store).collect() }
    }

    pub(crate) const fn is_empty(&self) -> bool {
        self.stores.is_empty()
    }

    fn inspect_all(&self) {
        for store in &self.stores {
            let warning =
                store.open(self.upper).and_then(|root| FileSystem::for_root(&root).ok()?.limit_as_lower());
            if let Some(warning) = warning {
                tracing::warn!("lower store {}: {warning}", store.path.display());
            }
        }
    }

    /// The result of `look` in the first store where it finds something. A store where it fails is left out.
    pub(crate) fn find<T>(&self, look: impl FnMut(&Root) -> Result<Option<T>, StoreError>) -> Option<T> {
        self.find_or_damage(look).ok().flatten()
    }

    /// The same.
    ///
    /// # Errors
    /// If it is found nowhere, the first error that is about the file itself: it is damaged. All other errors are
    /// failures of the store.
    pub(crate) fn find_or_damage<T>(
        &self,
        mut look: impl FnMut(&Root) -> Result<Option<T>, StoreError>,
    ) -> Result<Option<T>, StoreError> {
        let mut damage = None;
        for store in &self.stores {
            let Some(root) = store.open(self.upper) else { continue };
            match look(&root) {
                Ok(None) => {}
                Ok(found) => return Ok(found),
                Err(error) if is_damage(&error) => damage = damage.or(Some(error)),
                Err(error) => store.note_failure(&error),
            }
        }
        damage.map_or(Ok(None), Err)
    }

    /// Why something may not have been found: a store could not be opened, or a look-up in it has just failed.
    pub(crate) fn problem(&self) -> Option<String> {
        self.stores.iter().find_map(LowerStore::problem)
    }

    pub(crate) fn left_out(&self) -> Option<(DisplayPath, String)> {
        self.stores.iter().find_map(|store| Some((store.path.as_path().into(), store.problem()?)))
    }

    pub(crate) fn paths(&self) -> impl Iterator<Item = &Path> {
        self.stores.iter().map(|store| store.path.as_path())
    }

    /// Calls `visit` with every store that can be used, and its number in the order. A failure is logged.
    pub(crate) fn each(&self, mut visit: impl FnMut(usize, &Root) -> Result<(), StoreError>) {
        for (number, store) in self.stores.iter().enumerate() {
            let Some(root) = store.open(self.upper) else { continue };
            if let Err(error) = visit(number, &root) {
                store.note_failure(&error);
            }
        }
    }

    /// Notes that a part of the store at `root` cannot be read, so that a list of it is incomplete.
    pub(crate) fn note_failure(&self, root: &Root, error: &StoreError) {
        let at_root = |store: &&LowerStore| DisplayPath::from(store.path.as_path()) == root.place();
        self.stores.iter().filter(at_root).for_each(|store| store.note_failure(error));
    }
}

/// Whether an error of a look-up says that the file which was looked up is damaged.
const fn is_damage(error: &StoreError) -> bool {
    matches!(
        error,
        StoreError::Manifest { .. }
            | StoreError::Recipe { .. }
            | StoreError::RecipeSize { .. }
            | StoreError::BlobSize { .. }
    )
}

fn identity(root: &Root) -> Option<(u64, u64)> {
    Some(FileStatus::from_file(root.directory_file()).ok()?.identity())
}

impl LowerStore {
    /// The store, as an operation in progress has opened it or opened for this look-up. A failure is logged.
    fn open(&self, upper: Option<(u64, u64)>) -> Option<Root> {
        if let Some(root) = lock(&self.held).root.clone() {
            return Some(root);
        }
        let opened = self.try_open(upper);
        self.note_opened(opened.as_ref().err());
        let root = opened.ok()?;
        let mut held = lock(&self.held);
        if held.operations > 0 {
            held.root = Some(root.clone());
        }
        Some(root)
    }

    fn note_opened(&self, problem: Option<&String>) {
        let mut seen = lock(&self.seen);
        match (problem, &seen.problem) {
            (None, Some(_)) => tracing::info!("lower store {}: available again", self.path.display()),
            (Some(problem), before) if before.as_ref() != Some(problem) => {
                tracing::warn!("lower store left out, its models are hidden: {problem}");
            }
            _ => {}
        }
        seen.problem = problem.cloned();
    }

    fn try_open(&self, upper: Option<(u64, u64)>) -> Result<Root, String> {
        let root = Root::open(&self.path).map_err(|error| error.to_string())?;
        if upper.is_some() && identity(&root) == upper {
            return Err(format!("{}: is the writable store itself", self.path.display()));
        }
        let id = store_dir::id_of_existing(&root).map_err(|error| error.to_string())?;
        let mut seen = lock(&self.seen);
        match &seen.id {
            Some(known) if *known != id => Err(format!(
                "{}: another store than before: expected {known}, found {id}; restart blobd if this one is meant",
                self.path.display()
            )),
            Some(_) => Ok(root),
            None => {
                seen.id = Some(id);
                Ok(root)
            }
        }
    }

    fn problem(&self) -> Option<String> {
        let seen = lock(&self.seen);
        let is_recent = |failed: &Instant| failed.elapsed() < BETWEEN_LOG_LINES;
        let failure = seen.failure.as_ref().filter(|(failed, _)| is_recent(failed));
        seen.problem.clone().or_else(|| failure.map(|(_, what)| what.clone()))
    }

    fn note_failure(&self, error: &StoreError) {
        let mut seen = lock(&self.seen);
        seen.failure = Some((Instant::now(), error.to_string()));
        if seen.failure_logged.is_none_or(|logged| logged.elapsed() >= BETWEEN_LOG_LINES) {
            seen.failure_logged = Some(Instant::now());
            tracing::warn!("lower store left out of a look-up: {error}");
        }
    }

    /// The file system, after a look into the directories that look-ups use.
    fn status(&self, upper: Option<(u64, u64)>) -> LowerStatus {
        let state = match self.open(upper) {
            Some(root) => {
                let directories = [layout::BLOBS, layout::RECIPES, layout::MANIFESTS];
                let opened = directories.iter().try_for_each(|name| root.existing_directory(name).map(drop));
                opened.and_then(|()| FileSystem::for_root(&root)).map_err(|error| error.to_string())
            }
            None => Err(String::new()),
        };
        let state = state.and_then(|state| self.problem().map_or(Ok(state), Err));
        let state = state.map_err(|what| self.problem().unwrap_or(what));
        LowerStatus { place: self.path.as_path().into(), state }
    }
}

impl Content {
    /// Opens each lower store once, so that its ID is known and a problem is logged. Waits a short time only: the
    /// server of a network file system may not respond, and the writable store does not need it.
    pub(crate) fn inspect_lower_stores(&self) {
        const MAX_WAIT: Duration = Duration::from_secs(2);
        if self.lower.is_empty() {
            return;
        }
        let (inspected, done) = std::sync::mpsc::channel();
        let stores = Arc::clone(&self.lower);
        let inspect = move || {
            stores.inspect_all();
            // Fails if the wait has ended.
            let _ = inspected.send(());
        };
        let thread = std::thread::Builder::new().name("lower-stores".to_owned()).spawn(inspect);
        if thread.is_err() || done.recv_timeout(MAX_WAIT).is_err() {
            tracing::warn!("lower stores: no response within {} s", MAX_WAIT.as_secs());
        }
    }

    /// Keeps the lower stores open for the look-ups of one operation, which then cost little more than in this store.
    pub fn hold_lower_stores(&self) -> HeldLowerStores<'_> {
        for store in &self.lower.stores {
            let mut held = lock(&store.held);
            held.operations = held.operations.saturating_add(1);
        }
        HeldLowerStores(&self.lower.stores)
    }

    /// Why something may not have been found in a lower store.
    pub fn lower_problem(&self) -> Option<String> {
        self.lower.problem()
    }

    pub fn lower_stores(&self) -> Vec<LowerStatus> {
        self.lower.stores.iter().map(|store| store.status(self.lower.upper)).collect()
    }

    /// How many lower stores could not be used when they were last searched. None of them is opened.
    pub fn unavailable_lower_stores(&self) -> usize {
        self.lower.stores.iter().filter(|store| store.problem().is_some()).count()
    }

    pub fn lower_paths(&self) -> Vec<DisplayPath> {
        self.lower.paths().map(Into::into).collect()
    }
}

#[cfg(test)]
mod tests;
