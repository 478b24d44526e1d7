//! `blobd import --move`: deletes the imported files.
//!
//! A file is deleted when every model that has it is imported: then all of its bytes are in the store, and durable. It must
//! still be the file that was there before the import, with the same content. So a crash at any moment leaves each model
//! whole in at least one of the two places, and the same command again moves the rest.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::PoisonError;

use blobd_client::protocol::pull::Imported;
use tracing_mutex::stdsync::{Condvar, Mutex};

use self::deletion::{ModelLocation, not_deleted};
use self::in_use::{open_files, user_of_store};
use self::journal::Journal;
pub(super) use self::journal::{Finished, Interrupted};
use self::sources::{ListedFile, Sources, unique};
use super::plan::{PathModel, Planned};
use super::related_files::ModelFile;
use crate::local_folder::{Identity, Inode};
use crate::other_stores::{Plan, PlannedModel};
use crate::{ErrorBody, ErrorCode};

mod deletion;
mod in_use;
mod journal;
mod sources;

/// The files of the models of a command that are deleted; none unless that was asked for.
#[derive(Debug, Default)]
pub(super) struct Moves {
    /// The most bytes of models that are imported at the same time; `None` if nothing is deleted.
    most: Option<u64>,
    in_flight: Mutex<u64>,
    left: Condvar,
    work: Mutex<Work>,
    /// Models that cannot be moved.
    refused: BTreeMap<usize, ErrorBody>,
}

#[derive(Debug, Default)]
struct Work {
    sources: Sources,
    journal: Journal,
}

impl Moves {
    /// Notes the files of all models. A model that cannot be moved becomes an error.
    pub(super) fn of_paths(models: &mut [PathModel], with_sidecars: bool) -> Self {
        let mut sources = Sources::default();
        // What cannot be planned may have the same sidecars, which then stay.
        let takes_sidecars = models.iter().all(|(_, model)| model.is_ok());
        for (number, (path, model)) in models.iter_mut().enumerate() {
            let Ok(planned) = model else { continue };
            let (place, mut files) = files_of(path, planned, with_sidecars);
            files.retain(|file| takes_sidecars || !file.is_sidecar);
            if let Err(error) = sources.add(number, place, files) {
                *model = Err(error);
            }
        }
        let used = open_files();
        for (number, (_, model)) in models.iter_mut().enumerate() {
            if let Err(error) = refuse_used(&sources, number, &used) {
                *model = Err(error);
            }
        }
        Self::new(sources, BTreeMap::new())
    }

    /// Notes the files of the models of other programs, those that are not imported included: what they need stays.
    pub(super) fn of_stores(plan: &Plan) -> Self {
        /// Stands for models whose files are not known.
        const UNUSABLE: usize = usize::MAX;
        let mut sources = Sources::default();
        let mut refused = BTreeMap::new();
        let models = plan.models().iter().chain(plan.unselected());
        let has_unusable: BTreeSet<&Path> = models
            .clone()
            .filter(|model| model.found.problem.is_some())
            .map(|model| model.folder.as_path())
            .collect();
        let mut stores = BTreeMap::new();
        for (number, model) in models.enumerate() {
            let PlannedModel { program, folder, found, .. } = model;
            let store = stores.entry((program.key, folder)).or_insert_with(|| store(model));
            let added = store.as_ref().map_err(Clone::clone).and_then(|root| {
                if has_unusable.contains(folder.as_path()) {
                    let sidecars = found.files.iter().filter(|file| file.component.is_some());
                    sidecars.for_each(|file| sources.keep(UNUSABLE, &file.place));
                }
                sources.add_found(number, (*program, root), found)
            });
            if let Err(error) = added {
                refused.insert(number, error);
            }
        }
        let used = open_files();
        for number in 0..plan.models().len() {
            if let Err(error) = refuse_used(&sources, number, &used) {
                refused.insert(number, error);
            }
        }
        Self::new(sources, refused)
    }

    fn new(sources: Sources, refused: BTreeMap<usize, ErrorBody>) -> Self {
        let most = sources.largest_file();
        let work = Mutex::new(Work { sources, journal: Journal::default() });
        Self { most: Some(most), work, refused, ..Self::default() }
    }

    pub(super) const fn is_wanted(&self) -> bool {
        self.most.is_some()
    }

    /// Why a model cannot be moved.
    pub(super) fn refusal(&self, number: usize) -> Result<(), ErrorBody> {
        self.refused.get(&number).map_or(Ok(()), |error| Err(error.clone()))
    }

    /// Waits until a model of this size can be imported, so that at no time more than the largest file is in both places. A
    /// model of several files that is larger is imported alone.
    pub(super) fn admit(&self, size: u64) -> Admitted<'_> {
        let mut in_flight = self.in_flight.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(most) = self.most {
            while *in_flight > 0 && in_flight.saturating_add(size) > most {
                in_flight = self.left.wait(in_flight).unwrap_or_else(PoisonError::into_inner);
            }
        }
        *in_flight = in_flight.saturating_add(size);
        Admitted { moves: self, size }
    }

    /// Deletes the files of an imported model that no other model needs. Returns what was done, for the user.
    pub(super) fn imported(&self, number: usize, imported: &Imported) -> Vec<String> {
        if !self.is_wanted() {
            return Vec::new();
        }
        // Each change is complete before anything can panic.
        let mut work = self.work.lock().unwrap_or_else(PoisonError::into_inner);
        let Work { sources, journal } = &mut *work;
        let files: Vec<PathBuf> = sources.of_model(number).map(|(path, _)| path.to_owned()).collect();
        let locked = sources.lock(number);
        let first = files.first().map_or(Path::new(""), PathBuf::as_path);
        let _locks = match locked {
            Ok(locks) => locks,
            Err(reason) => return vec![not_deleted(first, &reason)],
        };
        match sources.imported(number, &BTreeSet::new()) {
            Ok(deletion) => {
                if deletion.files.len() > 1 {
                    journal.add(imported.digest, &deletion);
                }
                deletion.execute().notes()
            }
            Err(error) => vec![not_deleted(first, &error.message)],
        }
    }

    /// What would be deleted for each of the models if all of them were imported.
    pub(super) fn preview(&self, numbers: impl Iterator<Item = usize>) -> BTreeMap<usize, Vec<PathBuf>> {
        let mut work = self.work.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut gone, mut deletions) = (BTreeSet::new(), BTreeMap::new());
        for number in numbers.filter(|number| !self.refused.contains_key(number)) {
            let Ok(deletion) = work.sources.imported(number, &gone) else { continue };
            let paths: Vec<PathBuf> = deletion.files.into_iter().map(|file| file.path).collect();
            gone.extend(paths.iter().cloned());
            deletions.insert(number, paths);
        }
        deletions
    }
}

/// A model that is being imported.
#[derive(Debug)]
pub(super) struct Admitted<'m> {
    moves: &'m Moves,
    size: u64,
}

impl Drop for Admitted<'_> {
    fn drop(&mut self) {
        let mut in_flight = self.moves.in_flight.lock().unwrap_or_else(PoisonError::into_inner);
        *in_flight = in_flight.saturating_sub(self.size);
        self.moves.left.notify_all();
    }
}

/// The folder of a model's store without links, if models can be deleted there now.
fn store(model: &PlannedModel) -> Result<PathBuf, ErrorBody> {
    let removal = model.program.removal()?;
    let failed = |error| blobd_cli_common::file_error(&model.folder.display().to_string(), &error);
    let root = model.folder.canonicalize().map_err(failed)?;
    if let Some(user) = user_of_store(removal, &root) {
        return Err(in_use(&root, &user));
    }
    (removal.used)(&root, &BTreeSet::new())?;
    Ok(root)
}

fn in_use(path: &Path, program: &str) -> ErrorBody {
    let body = ErrorBody::new(ErrorCode::Busy, format!("{}: in use by {program}", path.display()));
    body.with_hint("stop that program first, or import without --move")
}

/// Refuses a model if another program has one of its files open, or downloads one.
fn refuse_used(sources: &Sources, number: usize, used: &BTreeMap<Inode, String>) -> Result<(), ErrorBody> {
    let mut files = sources.of_model(number);
    if let Some((path, program)) =
        files.find_map(|(path, identity)| Some((path, used.get(&identity.inode())?)))
    {
        return Err(in_use(path, program));
    }
    let user = |lock: &PathBuf| {
        let data = lock.symlink_metadata().ok()?;
        used.get(&(data.dev(), data.ino())).map(|program| in_use(lock, program))
    };
    sources.locks(number).iter().find_map(user).map_or(Ok(()), Err)
}

/// Where a model is, and its files.
fn files_of(path: &Path, planned: &Planned, with_sidecars: bool) -> (ModelLocation, Vec<ListedFile>) {
    match planned {
        Planned::List(model) => {
            let files = model.paths().into_iter().zip(&model.files);
            let file = |((path, listed), file): ((PathBuf, Option<Identity>), &ModelFile)| {
                // The path of a listed folder has no links, unless one was put there since.
                let path = if listed.is_some() { path } else { unique(&path) };
                ListedFile { path, listed, is_sidecar: file.component.is_some() }
            };
            let place = model
                .folder()
                .map_or(ModelLocation::Anywhere, |folder| ModelLocation::Folder(folder.to_owned()));
            (place, files.map(file).collect())
        }
        Planned::File { sidecars } => {
            let sidecars = sidecars.iter().filter(|_| with_sidecars);
            let files =
                std::iter::once((path, false)).chain(sidecars.map(|file| (file.path.as_path(), true)));
            let file = |(path, is_sidecar): (&Path, bool)| ListedFile {
                path: unique(path),
                listed: None,
                is_sidecar,
            };
            (ModelLocation::Anywhere, files.map(file).collect())
        }
    }
}
