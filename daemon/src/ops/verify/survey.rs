//! What a verification looks at: models with their recipes, read anew from the disk.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::sync::Arc;

use blobd_store_format::descriptor::Descriptor;
use blobd_store_format::digest::Digest;
use blobd_store_format::layout;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::recipe::Recipe;
use blobd_store_format::reference::Reference;

use super::{Damage, Finding};
use crate::scrub::{DiskReader, Step};
use crate::store::{Store, StoreError, StoredFile, StoredForm, disk};

/// Some or all models of a store, as far as they can be read.
#[derive(Debug, Default)]
pub(in crate::ops) struct Survey {
    /// The models.
    models: Vec<SurveyedModel>,
    /// Manifests and recipes that are not what they should be.
    pub(super) findings: Vec<Finding>,
}

/// One model.
#[derive(Debug)]
pub(in crate::ops) struct SurveyedModel {
    /// Its name.
    pub(in crate::ops) name: String,
    /// Its manifest's digest.
    pub(in crate::ops) manifest: Digest,
    /// Its files; one whose recipe is damaged is left out.
    pub(in crate::ops) files: Vec<StoredFile>,
    /// The files that are left out.
    unread: BTreeSet<Digest>,
}

impl Need {
    /// Whether it is a file of weights that lies there as one blob, or has lost its recipe.
    pub(in crate::ops) const fn is_whole_weights(&self) -> bool {
        self.is_whole_weights
    }
}

/// What the models need of a blob.
#[derive(Clone, Debug, Default)]
pub(in crate::ops) struct Need {
    /// Its length in bytes.
    pub(in crate::ops) size: u64,
    /// Their names.
    pub(in crate::ops) models: BTreeSet<String>,
    /// See the method.
    is_whole_weights: bool,
}

impl Survey {
    /// Reads the manifests and recipes of all models, or of one.
    ///
    /// # Errors
    /// [`StoreError::NoSuchModel`] and a damaged manifest if one model was named; of all models,
    /// such a manifest is a finding. [`StoreError::Io`].
    pub(in crate::ops) fn of(store: &Store, named: Option<&Reference>) -> Result<Self, StoreError> {
        let mut reader = DiskReader::default();
        let mut survey = Self::default();
        if let Some(reference) = named {
            let reference = store.resolve(reference)?;
            survey.add(store, &mut reader, reference.short(), &store.manifest(&reference)?);
            return Ok(survey);
        }
        for reference in store.tags()?.references {
            match store.manifest(&reference) {
                Ok(manifest) => survey.add(store, &mut reader, reference.short(), &manifest),
                // Removed since it was listed.
                Err(StoreError::NoSuchModel { .. }) => {}
                Err(error @ StoreError::Manifest { .. }) => {
                    survey.findings.push(manifest_finding(store, &reference, &error));
                }
                Err(error) => return Err(error),
            }
        }
        // Its records say themselves whether they are damaged, and `gc` reports that.
        for trashed in store.trash().unwrap_or_default() {
            let name = format!("{} (in the trash)", trashed.reference.short());
            survey.add(store, &mut reader, name, &trashed.manifest);
        }
        Ok(survey)
    }

    fn add(&mut self, store: &Store, reader: &mut DiskReader, name: String, manifest: &Manifest) {
        let mut model =
            SurveyedModel { name, manifest: manifest.digest(), files: Vec::new(), unread: BTreeSet::new() };
        let mut seen = BTreeSet::new();
        for file in manifest.files().filter(|file| seen.insert(file.digest)) {
            match read_recipe(store, reader, file) {
                Ok(recipe) => {
                    let form = recipe.map_or(StoredForm::Blob, |recipe| StoredForm::Recipe(Arc::new(recipe)));
                    model.files.push(StoredFile { descriptor: file.clone(), form });
                }
                Err(reason) => {
                    model.unread.insert(file.digest);
                    self.add_recipe_finding(file.digest, &reason);
                }
            }
        }
        self.models.push(model);
    }

    /// Enters a damaged recipe, once however many models need it.
    pub(super) fn add_recipe_finding(&mut self, file: Digest, reason: &str) {
        if self.findings.iter().any(|finding| finding.digest == file) {
            return;
        }
        let name = layout::recipe(file);
        let advice = "move it out of the store and pull or import the model again";
        let reason = format!("{}: {reason}; {advice}", name.display());
        self.findings.push(Finding { digest: file, damage: Damage::Recipe, reason });
    }

    /// Every blob that the models need.
    pub(in crate::ops) fn needs(&self) -> BTreeMap<Digest, Need> {
        let mut needs: BTreeMap<Digest, Need> = BTreeMap::new();
        for (model, file) in self.files() {
            let is_whole = matches!(file.form, StoredForm::Blob);
            for (digest, size) in file.blob_sizes() {
                let need = needs.entry(digest).or_default();
                need.size = size.max(need.size);
                need.models.insert(model.name.clone());
                need.is_whole_weights |= is_whole && file.descriptor.media_type.is_gguf();
            }
        }
        needs
    }

    /// The names of the models that have this file.
    pub(super) fn models_with(&self, file: Digest) -> BTreeSet<String> {
        let has = |model: &&SurveyedModel| {
            model.unread.contains(&file) || model.files.iter().any(|own| own.descriptor.digest == file)
        };
        self.models.iter().filter(has).map(|model| model.name.clone()).collect()
    }

    /// Every recipe that was read, once.
    pub(super) fn recipes(&self) -> BTreeMap<Digest, Arc<Recipe>> {
        let recipe = |(_, file): (_, &StoredFile)| match &file.form {
            StoredForm::Recipe(recipe) => Some((file.descriptor.digest, Arc::clone(recipe))),
            StoredForm::Blob => None,
        };
        self.files().filter_map(recipe).collect()
    }

    /// Every file that could be read, with its model.
    pub(in crate::ops) fn files(&self) -> impl Iterator<Item = (&SurveyedModel, &StoredFile)> {
        self.models.iter().flat_map(|model| model.files.iter().map(move |file| (model, file)))
    }
}

/// What a damaged manifest should be nobody knows: it is named by what it is.
fn manifest_finding(store: &Store, reference: &Reference, error: &StoreError) -> Finding {
    let found = disk::read_limited(&store.path(layout::manifest(reference)), Manifest::MAX_BYTES);
    let raw = found.ok().flatten().unwrap_or_default();
    let reason = format!("{error}; pull or import the model again, or remove it");
    Finding { digest: Digest::of(&raw), damage: Damage::Manifest { model: reference.short() }, reason }
}

/// A file's recipe from the disk, whatever the store remembers of it; nothing if there is none.
/// One that reads wrong is read once more, like a blob.
fn read_recipe(store: &Store, reader: &mut DiskReader, file: &Descriptor) -> Result<Option<Recipe>, String> {
    let mut read = || match recipe_bytes(store, reader, file.digest) {
        Ok(Some(json)) => parse(&json, file).map(Some),
        Ok(None) => Ok(None),
        Err(error) => Err(format!("cannot be read: {error}")),
    };
    read().or_else(|first| {
        let second = read();
        if second.is_ok() {
            tracing::error!("recipe of {}: {first}, and right when read again", file.digest);
        }
        second
    })
}

fn parse(json: &[u8], file: &Descriptor) -> Result<Recipe, String> {
    let recipe = Recipe::parse(json).map_err(|error| error.to_string())?;
    if recipe.file() != file.digest {
        return Err(format!("is the recipe of {}", recipe.file()));
    }
    if recipe.size() != file.size {
        return Err(format!("rebuilds {} bytes, the manifest says {}", recipe.size(), file.size));
    }
    Ok(recipe)
}

fn recipe_bytes(store: &Store, reader: &mut DiskReader, file: Digest) -> io::Result<Option<Vec<u8>>> {
    let opened = match File::open(store.path(layout::recipe(file))) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened?,
    };
    if opened.metadata()?.len() > Recipe::MAX_BYTES {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    let mut json = Vec::new();
    reader.read(&opened, &mut |_| Step::Go, &mut |bytes| json.extend_from_slice(bytes))?;
    Ok(Some(json))
}
