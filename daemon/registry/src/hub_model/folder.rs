//! A model of a repository that is a folder of files, such as one for transformers or diffusers.

use std::collections::BTreeMap;

use blobd_store_format::model_file::layer_type;
use blobd_store_format::model_folder::{
    FolderError, FolderFile, FolderKind, FolderPlan, ListedFolder, Selection,
};
use blobd_store_format::reference::Reference;
use blobd_store_format::source::{Components, HubFile};

use super::Hub;
use crate::error::{RegistryError, Result};
use crate::huggingface::{HubListing, address};
use crate::listing::TreeFile;
use crate::published::{Chosen, ChosenFile, RemoteModel};
use crate::remote::RemoteFile;

/// The most files of a model, as of an import.
const MAX_FILES: usize = 4000;

/// Which files of a repository are the model, if it is a folder.
fn plan(listed: &HubListing, components: &Components) -> Result<FolderPlan, FolderError> {
    let Components { include, exclude, .. } = components;
    let selection = Selection::new(include.iter().map(String::as_str), exclude.iter().map(String::as_str));
    let files = listed.files.iter().map(|file| FolderFile { path: file.path.clone(), size: file.size });
    // The texts of the indexes are not there yet: only the numbers of shards are compared.
    ListedFolder::new(files, &selection)?.plan(&BTreeMap::new())
}

/// Whether a folder is what a user means by the name of its repository, even if that has GGUF files too.
const fn is_whole_model(plan: &FolderPlan) -> bool {
    !matches!(plan.kind(), FolderKind::Weights)
}

impl Hub<'_> {
    /// The model that is a folder, if the reference and the choice mean one: patterns always do, and a name without a tag
    /// does if the files are such a model, or if no GGUF file is there.
    pub(super) fn folder_of(
        &self,
        reference: &Reference,
        components: &Components,
    ) -> Result<Option<RemoteModel>> {
        let has_tag = reference.tag() != Reference::DEFAULT_TAG;
        let has_patterns = components.have_patterns();
        if has_tag && has_patterns {
            return Err(RegistryError::NoChoice { subject: format!("model {reference}") });
        }
        let has_gguf = self.listed.gguf().next().is_some();
        match plan(self.listed, components) {
            _ if has_tag => Ok(None),
            Ok(plan) if has_patterns || !has_gguf || is_whole_model(&plan) => self.folder(&plan).map(Some),
            Err(error) if has_patterns || (!has_gguf && matches!(error, FolderError::Path(_))) => {
                Err(refused(self.repository, &error))
            }
            Ok(_) | Err(_) => Ok(None),
        }
    }

    /// The files of a folder as a model without a manifest.
    fn folder(&self, plan: &FolderPlan) -> Result<RemoteModel> {
        if let Some(fault) = plan.faults().iter().find(|fault| fault.is_fatal()) {
            return Err(RegistryError::unusable(address(self.repository), fault.to_string()));
        }
        if plan.files().len() > MAX_FILES {
            let what = format!("too many files: expected at most {MAX_FILES}, found {}", plan.files().len());
            let error = RegistryError::unusable(address(self.repository), what);
            return Err(error.explained("`--exclude PATTERN` leaves files out".to_owned()));
        }
        let listed: BTreeMap<&str, &TreeFile> =
            self.listed.files.iter().map(|file| (file.path.as_str(), file)).collect();
        let taken: Vec<&TreeFile> =
            plan.files().iter().filter_map(|file| listed.get(file.path.as_str()).copied()).collect();
        let files = taken.iter().map(|file| self.file_of_folder(file)).collect::<Result<_>>()?;
        let weights: Vec<&TreeFile> = taken.iter().copied().filter(|file| file.format().is_some()).collect();
        let first = weights.first().map(|file| file.path.as_str()).unwrap_or_default();
        let origin = HubFile::new(self.repository, Some(&self.listed.commit), first).ok();
        let beside = Some(taken.len().saturating_sub(weights.len()));
        let chosen = |file: &&TreeFile| ChosenFile {
            media_type: layer_type(&file.path, file.format()),
            path: file.path.clone(),
        };
        let files_of_weights = weights.iter().map(chosen).collect();
        let listed = self.listed.weights().count();
        // The other faults are found again once the contents of the indexes are known.
        let notes = plan.faults().iter().filter(|fault| fault.is_of_selection());
        let notes = notes.map(ToString::to_string).collect();
        Ok(RemoteModel::Files {
            files,
            origin: origin.map(|file| file.to_string()),
            chosen: Some(Chosen { files: files_of_weights, listed, beside, notes }),
        })
    }

    fn file_of_folder(&self, file: &TreeFile) -> Result<RemoteFile> {
        self.remote_as(file, layer_type(&file.path, file.format()).as_str(), &file.path)
    }
}

/// Why the files that the patterns choose are not a model.
fn refused(repository: &str, error: &FolderError) -> RegistryError {
    let advice = match error {
        FolderError::NoWeights { .. } => "the patterns have to match at least one file with weights".into(),
        _ => error.advice(),
    };
    RegistryError::unusable(address(repository), error.to_string()).explained(advice.into_owned())
}
