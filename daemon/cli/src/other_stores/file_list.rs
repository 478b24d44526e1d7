//! The models that a list of files makes: one in each GGUF file or set of shards, and one of the safetensors files.

use std::collections::BTreeMap;
use std::path::PathBuf;

use blobd_client::protocol::request::SidecarComponent;
use blobd_store_format::file_format::FileFormat;
use blobd_store_format::model_folder::{FolderFile, ListedFolder, Selection, is_never_taken};
use blobd_store_format::repository::{Choice, RepositoryFiles, Wanted};
use blobd_store_format::source::Components;

use super::found::{FoundFile, FoundModel, Problem};
use crate::Reference;

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
}

impl FileList {
    pub(super) const fn new(name: String, place: PathBuf) -> Self {
        Self { name, place, revision: None, files: BTreeMap::new() }
    }

    /// Adds a file, or why it cannot be read.
    pub(super) fn add(&mut self, path: String, file: Result<FoundFile, Problem>) {
        self.files.insert(path, file);
    }

    pub(super) fn file_mut(&mut self, path: &str) -> Option<&mut FoundFile> {
        self.files.get_mut(path)?.as_mut().ok()
    }

    pub(super) fn has(&self, path: &str) -> bool {
        self.files.contains_key(path)
    }

    /// Each GGUF model by its tag, and the safetensors model with what belongs to it.
    pub(super) fn models(&self) -> Vec<FoundModel> {
        let mut models = self.gguf_models();
        models.extend(self.folder_model());
        models
    }

    pub(super) fn gguf_models(&self) -> Vec<FoundModel> {
        let paths = self.files.keys().map(String::as_str).filter(|path| !is_never_taken(path));
        let paths: Vec<&str> = paths.collect();
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
    pub(super) fn folder_model(&self) -> Option<FoundModel> {
        let has_weights = self.files.keys().any(|path| is_named(path, FileFormat::SAFETENSORS));
        has_weights.then(|| self.model(Reference::DEFAULT_TAG, self.folder()))
    }

    fn model(&self, tag: &str, files: Result<Vec<FoundFile>, Problem>) -> FoundModel {
        let tag = match (&self.revision, tag) {
            (None, tag) => tag.to_owned(),
            (Some(revision), Reference::DEFAULT_TAG) => revision.clone(),
            (Some(revision), tag) => format!("{tag}-{revision}"),
        };
        let name = format!("{}:{tag}", self.name);
        let parsed = name.parse::<Reference>();
        let parsed = parsed.map_err(|error| Problem::new(&self.place, format!("{name}: {error}")));
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

    /// The files of the model that is not GGUF, by the rules for a folder.
    fn folder(&self) -> Result<Vec<FoundFile>, Problem> {
        let problem = |error: &dyn std::fmt::Display| Problem::new(&self.place, error.to_string());
        let others = self.files.iter().filter(|(path, _)| !is_named(path, FileFormat::GGUF));
        let size = |file: &Result<FoundFile, Problem>| file.as_ref().map_or(0, |file| file.size);
        let listed = others.map(|(path, file)| FolderFile { path: path.clone(), size: size(file) });
        let listed = ListedFolder::new(listed, &Selection::default()).map_err(|error| problem(&error))?;
        let mut texts = BTreeMap::new();
        for path in listed.texts() {
            texts.insert(path.to_owned(), self.read(path)?);
        }
        let plan = listed.plan(&texts).map_err(|error| problem(&error))?;
        if let Some(fault) = plan.faults().iter().find(|fault| fault.is_fatal()) {
            return Err(problem(fault));
        }
        plan.files().iter().filter_map(|file| self.file(&file.path)).collect()
    }

    fn read(&self, path: &str) -> Result<Vec<u8>, Problem> {
        let place = || self.place.join(path);
        let file = self.file(path).unwrap_or_else(|| Err(Problem::new(&place(), "is missing")))?;
        if file.size > ListedFolder::MAX_TEXT_BYTES {
            return Err(Problem::new(&place(), "is too long"));
        }
        file.read().map_err(|_error| Problem::new(&file.source, "cannot be read, or changed meanwhile"))
    }
}

fn is_named(path: &str, format: &FileFormat) -> bool {
    format.stem_of(path).is_some()
}
