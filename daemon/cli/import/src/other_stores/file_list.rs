//! The models that a list of files makes: one in each GGUF file or set of shards, and one of the safetensors files.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use blobd_cli_common::output::counted;
use blobd_client::protocol::lists::MAX_IMPORTED_FILES;
use blobd_client::protocol::request::SidecarComponent;
use blobd_store_format::file_format::FileFormat;
use blobd_store_format::model_folder::{
    FolderError, FolderFile, LeftOut, ListedFolder, Selection, is_never_taken,
};
use blobd_store_format::repository::{Choice, RepositoryFiles, Wanted};
use blobd_store_format::source::Components;
use blobd_store_format::text::one_line;

use super::found_model::{FoundFile, FoundModel, Problem};
use crate::Reference;

/// The most characters of the faults of a folder in an error.
const MAX_FAULTS: usize = 600;

/// The files of a model that is not GGUF, and what its user should know.
type FolderFiles = (Vec<FoundFile>, Vec<String>);

/// The files of a place where a program keeps one model, or several forms of it.
#[derive(Debug)]
pub(super) struct FileList {
    /// The name of its models without a tag.
    pub(super) name: String,
    pub(super) place: PathBuf,
    /// Follows the tag, to tell models from those of the same name without it.
    pub(super) revision: Option<String>,
    /// The key is the file's path in the folder.
    files: BTreeMap<String, Result<FoundFile, Problem>>,
    /// The weights, if they are not in the place.
    elsewhere: Option<PathBuf>,
}

impl FileList {
    pub(super) const fn new(name: String, place: PathBuf) -> Self {
        Self { name, place, revision: None, files: BTreeMap::new(), elsewhere: None }
    }

    /// Adds a file, or why it cannot be read.
    pub(super) fn add(&mut self, path: String, file: Result<FoundFile, Problem>) {
        self.files.insert(path, file);
    }

    /// Leaves out a model whose weights are at another path, unless there are others here.
    pub(super) fn leave_out(&mut self, elsewhere: &Path) {
        self.elsewhere = Some(elsewhere.to_owned());
    }

    /// Replaces a file by what a check makes of it.
    pub(super) fn check(&mut self, path: &str, check: impl FnOnce(FoundFile) -> Result<FoundFile, Problem>) {
        if let Some(file) = self.files.get_mut(path)
            && let Ok(found) = file
        {
            *file = check(found.clone());
        }
    }

    pub(super) fn has(&self, path: &str) -> bool {
        self.files.contains_key(path)
    }

    pub(super) fn paths(&self) -> impl Iterator<Item = &str> {
        self.files.keys().map(String::as_str)
    }

    /// Each GGUF model by its tag, and the safetensors model with what belongs to it. If there is no model because all
    /// weights are left out, the reason for that.
    pub(super) fn models(&self, selection: &Selection) -> Vec<FoundModel> {
        let mut models = self.gguf_models(selection);
        models.extend(
            self.folder_model(selection).or_else(|| self.left_out(selection).filter(|_| models.is_empty())),
        );
        models
    }

    fn gguf_models(&self, selection: &Selection) -> Vec<FoundModel> {
        let is_taken = |path: &&str| !is_never_taken(path) && selection.takes_gguf(&self.folder_file(path));
        let paths: Vec<&str> = self.files.keys().map(String::as_str).filter(is_taken).collect();
        // Each file is compared with all others.
        if paths.iter().filter(|path| is_named(path, FileFormat::GGUF)).count() > MAX_IMPORTED_FILES {
            let what = format!("too many files: expected at most {MAX_IMPORTED_FILES}");
            return vec![FoundModel::unusable(self.name.clone(), Problem::new(&self.place, what))];
        }
        let repository = RepositoryFiles::new(paths.iter().copied());
        let listed = repository.all_models().into_iter();
        let models = listed.map(|model| {
            let choice = repository.choose(Wanted::File(model.path), &Components::DEFAULT);
            let choice =
                choice.map_err(|refusal| Problem::new(&self.place.join(model.path), refusal.to_string()));
            self.model(&model.tag, choice.and_then(|choice| self.chosen(&paths, &choice)))
        });
        models.collect()
    }

    /// The model that is not GGUF, if there is one.
    fn folder_model(&self, selection: &Selection) -> Option<FoundModel> {
        let (files, notes) = match self.folder(selection)? {
            Ok((files, notes)) => (Ok(files), notes),
            Err(problem) => (Err(problem), Vec::new()),
        };
        Some(FoundModel { notes, ..self.model(Reference::DEFAULT_TAG, files) })
    }

    /// Says which weights are left out, and why.
    fn left_out(&self, selection: &Selection) -> Option<FoundModel> {
        if let Some(elsewhere) = &self.elsewhere {
            let what = format!("its file is {}, which is not in this store", elsewhere.display());
            let problem =
                Problem::left_out(&self.place, what).with_hint("import that file: `blobd import FILE`");
            return Some(self.model(Reference::DEFAULT_TAG, Err(problem)));
        }
        let files = self.files.keys().map(|path| self.folder_file(path));
        let left_out =
            files.filter_map(|file| Some(LeftOut { reason: selection.reason_against(&file)?, file }));
        let left_out: Vec<LeftOut> = left_out.filter(|left| left.reason.is_weights()).collect();
        let first = left_out.first()?;
        let more = left_out.len().saturating_sub(1);
        let more = if more > 0 { format!("; and {}", counted(more, "more file")) } else { String::new() };
        let hint = "`--include '*'` takes all files, those of other formats whole";
        let problem = Problem::left_out(&self.place, format!("{first}{more}")).with_hint(hint);
        Some(self.model(Reference::DEFAULT_TAG, Err(problem)))
    }

    fn folder_file(&self, path: &str) -> FolderFile {
        let size = self.files.get(path).and_then(|file| file.as_ref().ok()).map_or(0, |file| file.size);
        FolderFile { path: path.to_owned(), size }
    }

    fn model(&self, tag: &str, files: Result<Vec<FoundFile>, Problem>) -> FoundModel {
        let tag = match (&self.revision, tag) {
            (None, tag) => tag.to_owned(),
            (Some(revision), Reference::DEFAULT_TAG) => revision.clone(),
            (Some(revision), tag) => format!("{tag}-{revision}"),
        };
        let name = format!("{}:{tag}", self.name);
        let parsed = name.parse::<Reference>();
        let parsed = parsed.map_err(|error| Problem::name(&self.place, format!("{name}: {error}")));
        match parsed.and_then(|target| Ok((target, files?))) {
            Ok((target, files)) => FoundModel::new(target, files),
            Err(problem) => FoundModel::unusable(name, problem),
        }
    }

    fn chosen(&self, paths: &[&str], choice: &Choice) -> Result<Vec<FoundFile>, Problem> {
        let of = |numbers: &[usize], component: Option<SidecarComponent>| {
            let paths = numbers.iter().filter_map(|number| paths.get(*number));
            let files = paths.filter_map(|path| self.file(path));
            files.map(|file| Ok(FoundFile { component, ..file? })).collect::<Result<Vec<_>, Problem>>()
        };
        let mut files = of(&choice.model, None)?;
        files.extend(of(&choice.projector, Some(SidecarComponent::Projector))?);
        files.extend(of(&choice.draft, Some(SidecarComponent::Draft))?);
        Ok(files)
    }

    fn file(&self, path: &str) -> Option<Result<FoundFile, Problem>> {
        self.files.get(path).cloned()
    }

    /// The files of the model that is a folder, by the rules for a folder, and what its user should know. `None` if no file
    /// with weights is taken. GGUF files belong to it only if patterns take them and JSON files, as in a pull.
    fn folder(&self, selection: &Selection) -> Option<Result<FolderFiles, Problem>> {
        let with_gguf =
            selection.has_includes() && self.paths().any(|path| self.is_taken_json(path, selection));
        let others = self.files.keys().filter(|path| with_gguf || !is_named(path, FileFormat::GGUF));
        let has_weights = || self.files.keys().any(|path| is_named(path, FileFormat::SAFETENSORS));
        match ListedFolder::new(others.map(|path| self.folder_file(path)), selection) {
            Ok(listed) => Some(self.planned(listed)),
            Err(FolderError::NoWeights { .. }) => None,
            Err(error) => has_weights().then(|| Err(self.refused(&error))),
        }
    }

    fn is_taken_json(&self, path: &str, selection: &Selection) -> bool {
        path.ends_with(".json") && selection.reason_against(&self.folder_file(path)).is_none()
    }

    fn planned(&self, listed: ListedFolder) -> Result<FolderFiles, Problem> {
        let mut texts = BTreeMap::new();
        for path in listed.texts() {
            texts.insert(path.to_owned(), self.read(path)?);
        }
        let plan = listed.plan(&texts).map_err(|error| self.refused(&error))?;
        let (fatal, notes): (Vec<_>, Vec<_>) = plan.faults().iter().partition(|fault| fault.is_fatal());
        if !fatal.is_empty() {
            let faults: Vec<String> = fatal.iter().map(ToString::to_string).collect();
            return Err(Problem::new(&self.place, one_line(&faults, MAX_FAULTS)));
        }
        let files = plan.files().iter().filter_map(|file| self.file(&file.path)).collect::<Result<_, _>>()?;
        Ok((files, notes.into_iter().map(ToString::to_string).collect()))
    }

    fn refused(&self, error: &FolderError) -> Problem {
        Problem::new(&self.place, error.to_string()).with_hint(error.advice())
    }

    fn read(&self, path: &str) -> Result<Vec<u8>, Problem> {
        let place = || self.place.join(path);
        let file =
            self.file(path).unwrap_or_else(|| Err(Problem::new(&place(), "is missing: expected a file")))?;
        if file.size > ListedFolder::MAX_TEXT_BYTES {
            let (expected, found) = (ListedFolder::MAX_TEXT_BYTES, file.size);
            return Err(Problem::new(
                &place(),
                format!("too long: expected at most {expected} bytes, found {found}"),
            ));
        }
        file.read().map_err(|_error| Problem::new(&file.source, "cannot be read, or changed meanwhile"))
    }
}

fn is_named(path: &str, format: &FileFormat) -> bool {
    format.stem_of(path).is_some()
}
