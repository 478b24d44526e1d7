//! A survey for a verification: models and their files, read from the disk.
//!
//! Each recipe is read, passed to a callback, and dropped. The survey keeps one entry per model and per file, so its size
//! does not depend on the number of blobs.

use std::collections::{BTreeMap, BTreeSet};
use std::io;

use blobd_store::scrub::{DiskReader, Ended, Fault, Step};
use blobd_store::{OpenRecipe, Store, StoreError};
use blobd_store_format::descriptor::{Descriptor, MediaType};
use blobd_store_format::digest::Digest;
use blobd_store_format::layout;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::recipe::{Recipe, RecipeKind};
use blobd_store_format::reference::Reference;
use blobd_store_format::stored_file::StoredForm;

mod recipe;

#[derive(Clone, Debug)]
pub(super) struct Finding {
    pub(super) digest: Digest,
    pub(super) damage: Damage,
    pub(super) reason: String,
}

/// The kind of damage, which decides how it can be repaired.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Damage {
    /// A blob is in quarantine or missing, and must be restored from elsewhere.
    Lost,
    /// A damaged blob could not be moved to quarantine, and so cannot be replaced.
    NotQuarantined,
    /// A damaged blob is in a lower store. A copy in the writable store would be used in its place.
    Below,
    Writable,
    /// A blob cannot be read; it may be undamaged.
    Unreadable,
    /// A blob was read correctly only on the second attempt.
    Unreliable,
    Recipe,
    /// A model's manifest is damaged; the finding has the digest of its content.
    Manifest {
        model: String,
    },
}

#[derive(Debug, Default)]
pub(super) struct Survey {
    models: Vec<SurveyedModel>,
    files: BTreeMap<FileId, SurveyedFile>,
    pub(super) findings: Vec<Finding>,
}

#[derive(Debug)]
pub(super) struct SurveyedModel {
    pub(super) name: String,
    pub(super) manifest: Digest,
}

/// A file as manifests name it. Manifests may disagree about a file's length, which is a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct FileId {
    pub(super) digest: Digest,
    pub(super) size: u64,
}

#[derive(Debug)]
struct SurveyedFile {
    media_type: MediaType,
    /// Whether any model has it as weights.
    is_weights: bool,
    /// How it is stored: as a blob if it has no recipe, unknown if its recipe is damaged.
    form: Option<StoredForm>,
    /// Indices into [`Survey::models`].
    models: Vec<usize>,
}

/// The size that the models expect of a blob, and the files that need it.
#[derive(Clone, Debug, Default)]
pub(super) struct Need {
    pub(super) size: u64,
    pub(super) files: Vec<FileId>,
}

pub(super) type Needs = BTreeMap<Digest, Need>;

#[derive(Clone, Copy)]
enum Selected<'r> {
    Model(&'r Reference),
    WritableStore,
    AllStores,
}

/// Called once for each readable file, with its recipe if it has one.
type Visit<'v> = dyn FnMut(FileId, Option<&Recipe>) + 'v;

impl Survey {
    /// Surveys all models of the writable store, or one of any store, and adds every blob that they need to `blobs`.
    pub(super) fn new(
        store: &Store,
        named: Option<&Reference>,
        blobs: &mut BTreeSet<Digest>,
    ) -> Result<Self, StoreError> {
        let selected = named.map_or(Selected::WritableStore, Selected::Model);
        Self::visiting(store, selected, &mut |file, recipe| {
            blobs.extend(blob_sizes(file, recipe).into_keys());
        })
    }

    /// Surveys all models, and which of the `wanted` blobs they need.
    pub(super) fn with_needs(store: &Store, wanted: &BTreeSet<Digest>) -> Result<(Self, Needs), StoreError> {
        let mut needs = Needs::new();
        let survey = Self::visiting(store, Selected::AllStores, &mut |file, recipe| {
            for (digest, size) in blob_sizes(file, recipe) {
                if wanted.contains(&digest) {
                    let need = needs.entry(digest).or_default();
                    need.size = size.max(need.size);
                    need.files.push(file);
                }
            }
        })?;
        Ok((survey, needs))
    }

    /// Reads the manifests and recipes of the selected models. A damaged manifest is an error if one model was named, and a
    /// finding otherwise.
    fn visiting(store: &Store, selected: Selected<'_>, visit: &mut Visit<'_>) -> Result<Self, StoreError> {
        let mut reader = DiskReader::default();
        let mut survey = Self::default();
        if let Selected::Model(reference) = selected {
            let reference = store.names().resolve(reference)?;
            survey.add(store, &mut reader, reference.short(), &store.names().manifest(&reference)?, visit)?;
            return Ok(survey);
        }
        let references = match selected {
            Selected::AllStores => store.names().all_tags()?,
            _ => store.names().tags()?.references,
        };
        for reference in references {
            match store.names().manifest(&reference) {
                Ok(manifest) => survey.add(store, &mut reader, reference.short(), &manifest, visit)?,
                // Removed since it was listed.
                Err(StoreError::NoSuchModel { .. }) => {}
                Err(error) if is_finding(&error) => {
                    survey.findings.push(manifest_finding(store, &reference, &error));
                }
                Err(error) => return Err(error),
            }
        }
        // Damaged trash records are reported by `gc`.
        for trashed in store.names().trash().unwrap_or_default() {
            let name = format!("{} (in the trash)", trashed.reference.short());
            survey.add(store, &mut reader, name, &trashed.manifest, visit)?;
        }
        Ok(survey)
    }

    fn add(
        &mut self,
        store: &Store,
        reader: &mut DiskReader,
        name: String,
        manifest: &Manifest,
        visit: &mut Visit<'_>,
    ) -> Result<(), StoreError> {
        let model = self.models.len();
        self.models.push(SurveyedModel { name, manifest: manifest.digest() });
        for descriptor in manifest.files() {
            let id = FileId { digest: descriptor.digest, size: descriptor.size };
            if !self.files.contains_key(&id) {
                let form = self.read(store, reader, id, visit)?;
                let media_type = descriptor.media_type.clone();
                self.files
                    .insert(id, SurveyedFile { media_type, is_weights: false, form, models: Vec::new() });
            }
            if let Some(file) = self.files.get_mut(&id) {
                file.is_weights |= descriptor.media_type.holds_tensors();
                // A model may name a file twice.
                if file.models.last() != Some(&model) {
                    file.models.push(model);
                }
            }
        }
        Ok(())
    }

    fn read(
        &mut self,
        store: &Store,
        reader: &mut DiskReader,
        file: FileId,
        visit: &mut Visit<'_>,
    ) -> Result<Option<StoredForm>, StoreError> {
        match read_recipe(store, reader, file)? {
            Ok(read) => {
                let recipe = read.as_ref().map(|read| &read.recipe);
                visit(file, recipe);
                Ok(Some(recipe.map_or(StoredForm::Blob, |_recipe| StoredForm::Recipe)))
            }
            Err(reason) => {
                self.findings.push(recipe_finding(file, &reason));
                Ok(None)
            }
        }
    }

    /// Compares the recipes of the files that `is_wanted` selects with the headers of those files, and adds findings.
    pub(super) fn check_recipes(
        &mut self,
        store: &Store,
        is_wanted: &dyn Fn(Digest) -> bool,
    ) -> Result<(), StoreError> {
        let mut reader = DiskReader::default();
        let is_split = |file: &SurveyedFile| file.form == Some(StoredForm::Recipe);
        let split = self.files.iter().filter(|(id, file)| is_split(file) && is_wanted(id.digest));
        for file in split.map(|(id, _)| *id) {
            let reason = match read_recipe(store, &mut reader, file)? {
                Ok(Some(read)) => recipe::mismatch(store, &mut reader, &read.recipe),
                // Collected since the survey.
                Ok(None) => None,
                Err(reason) => Some(reason),
            };
            self.findings.extend(reason.map(|reason| recipe_finding(file, &reason)));
        }
        Ok(())
    }

    /// Whether this survey repeats a finding of an earlier one: the same model's manifest with the same content, or the
    /// recipe of the same file.
    pub(super) fn confirms(&self, finding: &Finding) -> bool {
        let is_same = |now: &Finding| (&now.damage, now.digest) == (&finding.damage, finding.digest);
        self.findings.iter().any(is_same)
    }

    pub(super) fn names_of(&self, files: &[FileId]) -> BTreeSet<&str> {
        files.iter().flat_map(|file| self.models_of(*file)).map(|model| model.name.as_str()).collect()
    }

    pub(super) fn names_with(&self, digest: Digest) -> BTreeSet<&str> {
        let of_any_length = FileId { digest, size: 0 }..=FileId { digest, size: u64::MAX };
        let files: Vec<FileId> = self.files.range(of_any_length).map(|(id, _)| *id).collect();
        self.names_of(&files)
    }

    pub(super) fn models_of(&self, file: FileId) -> impl Iterator<Item = &SurveyedModel> {
        let models = self.files.get(&file).map(|file| file.models.as_slice()).unwrap_or_default();
        models.iter().filter_map(|model| self.models.get(*model))
    }

    /// A file's descriptor, and how it is stored if that is known.
    pub(super) fn file(&self, id: FileId) -> Option<(Descriptor, Option<StoredForm>)> {
        let file = self.files.get(&id)?;
        let FileId { digest, size } = id;
        Some((Descriptor { media_type: file.media_type.clone(), digest, size }, file.form))
    }

    /// Whether a blob is a file of weights that is stored whole, or that has lost its recipe.
    pub(super) fn is_whole_weights(&self, need: &Need) -> bool {
        let mut files = need.files.iter().filter_map(|file| self.files.get(file));
        files.any(|file| file.is_weights && file.form == Some(StoredForm::Blob))
    }
}

fn blob_sizes(file: FileId, recipe: Option<&Recipe>) -> BTreeMap<Digest, u64> {
    recipe.map_or_else(|| BTreeMap::from([(file.digest, file.size)]), Recipe::blob_sizes)
}

/// Whether an unreadable manifest affects only one model. A shortage of descriptors or memory does not.
fn is_finding(error: &StoreError) -> bool {
    match error {
        StoreError::Manifest { .. } | StoreError::UnexpectedFile { .. } => true,
        StoreError::Io { source, .. } => Fault::from_error(source) != Fault::Shortage,
        _ => false,
    }
}

/// The expected digest of a manifest is unknown, so the finding has the digest of the present content.
fn manifest_finding(store: &Store, reference: &Reference, error: &StoreError) -> Finding {
    let raw = store.names().raw_manifest(reference).unwrap_or_default();
    let reason = format!("{error}; pull or import the model again, or remove it");
    Finding { digest: Digest::of(&raw), damage: Damage::Manifest { model: reference.short() }, reason }
}

fn recipe_finding(file: FileId, reason: &str) -> Finding {
    let name = layout::recipe(file.digest);
    let advice = "move it out of the store and pull or import the model again";
    let reason = format!("{}: {reason}; {advice}", name.display());
    Finding { digest: file.digest, damage: Damage::Recipe, reason }
}

struct ReadRecipe<'s> {
    recipe: Recipe,
    _opened: OpenRecipe<'s>,
}

/// Reads a file's recipe from the disk, past the store's caches. The inner error says what is wrong with the recipe; the
/// outer one is a failure that says nothing about it. A wrong recipe is read twice, like a blob.
fn read_recipe<'s>(
    store: &'s Store,
    reader: &mut DiskReader,
    file: FileId,
) -> Result<Result<Option<ReadRecipe<'s>>, String>, StoreError> {
    let mut read = || match recipe_bytes(store, reader, file.digest) {
        Ok(Some((opened, json))) => Ok(parse(&json, file).map(|recipe| {
            (*recipe.kind() != RecipeKind::Whole).then_some(ReadRecipe { recipe, _opened: opened })
        })),
        Ok(None) => Ok(Ok(None)),
        Err(error) if Fault::from_error(&error) == Fault::Shortage => {
            Err(StoreError::io("read", layout::recipe(file.digest))(error))
        }
        Err(error) => Ok(Err(format!("cannot be read: {error}"))),
    };
    let first = match read()? {
        Err(first) => first,
        right => return Ok(right),
    };
    let second = read()?;
    if second.is_ok() {
        tracing::error!(
            "recipe of {}: first read failed ({first}), second read succeeded; check memory and disk of this machine",
            file.digest
        );
    }
    Ok(second)
}

fn parse(json: &[u8], file: FileId) -> Result<Recipe, String> {
    let recipe = Recipe::parse(json).map_err(|error| error.to_string())?;
    if recipe.file() != file.digest {
        return Err(format!("is the recipe of {}", recipe.file()));
    }
    if recipe.size() != file.size {
        return Err(format!(
            "wrong size of the file that it rebuilds: expected {} bytes as in the manifest, found {}",
            file.size,
            recipe.size()
        ));
    }
    Ok(recipe)
}

fn recipe_bytes<'s>(
    store: &'s Store,
    reader: &mut DiskReader,
    file: Digest,
) -> io::Result<Option<(OpenRecipe<'s>, Vec<u8>)>> {
    loop {
        let opened = match store.content().open_recipe(file) {
            Ok(Some(opened)) => opened,
            Ok(None) => return Ok(None),
            Err(StoreError::Io { source, .. }) => return Err(source),
            Err(error) => return Err(io::Error::other(error)),
        };
        let length = opened.file().metadata()?.len();
        if length > Recipe::MAX_BYTES {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        let mut json = Vec::with_capacity(usize::try_from(length).unwrap_or_default());
        let ended =
            reader.read(opened.file(), &mut |_| Step::Go, &mut |bytes| json.extend_from_slice(bytes))?;
        // Removed or replaced while it was read: try again with the new one, if any.
        if ended != Ended::Unlinked {
            return Ok(Some((opened, json)));
        }
    }
}

/// The fault that `verify` finds in a recipe, for tests of other modules.
#[cfg(test)]
pub(crate) fn recipe_fault(store: &Store, recipe: &Recipe) -> Option<String> {
    recipe::mismatch(store, &mut DiskReader::default(), recipe)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::PathBuf;
    use std::sync::Arc;

    use blobd_store_format::recipe::Piece;
    use blobd_store_format::tensor::TensorFormat;
    use tempfile::TempDir;

    use super::*;

    const WEIGHTS: &[u8] = b"the digest of the file that is split";
    const WEIGHTS_BYTES: u64 = 500;

    /// A store in which many models share a split file of many blobs, and a template.
    fn store_of_relatives(models: usize, blobs: u64) -> (TempDir, Arc<Store>) {
        let (folder, store) = blobd_store::testing::new_store();
        let length = WEIGHTS_BYTES / blobs;
        let piece = |number: u64| Piece::Blob { blob: blob(number), offset: 0, length };
        let recipe =
            Recipe::new(Digest::of(WEIGHTS), TensorFormat::Gguf, (0..blobs).map(piece).collect(), Vec::new())
                .unwrap();
        fs::write(root(&folder).join(layout::recipe(recipe.file())), recipe.to_json()).unwrap();
        (0..models).for_each(|model| add_model(&folder, &format!("m{model}"), WEIGHTS_BYTES));
        (folder, store)
    }

    fn root(folder: &TempDir) -> PathBuf {
        folder.path().join("store")
    }

    fn add_model(folder: &TempDir, name: &str, weights_bytes: u64) {
        let file = |media_type: &str, bytes: &[u8], size| Descriptor {
            media_type: MediaType::new(media_type),
            digest: Digest::of(bytes),
            size,
        };
        let weights = file(MediaType::OLLAMA_MODEL, WEIGHTS, weights_bytes);
        let manifest = Manifest::compose(file("config", name.as_bytes(), 2), vec![weights]).unwrap();
        let path = root(folder).join(layout::manifest(&name.parse().unwrap()));
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, manifest.raw()).unwrap();
    }

    fn blob(number: u64) -> Digest {
        Digest::of(&number.to_le_bytes())
    }

    fn weights() -> FileId {
        FileId { digest: Digest::of(WEIGHTS), size: WEIGHTS_BYTES }
    }

    #[test]
    fn file_that_many_models_share_is_read_once_and_kept_as_one_entry() {
        let (_folder, store) = store_of_relatives(40, 100);
        let mut shown = Vec::new();
        let survey = Survey::visiting(&store, Selected::WritableStore, &mut |file, recipe| {
            shown.push((file, recipe.is_some()));
        });
        let survey = survey.unwrap();
        assert_eq!(shown.iter().filter(|(file, _)| *file == weights()).count(), 1);
        assert!(shown.contains(&(weights(), true)) && shown.len() == 41);
        assert_eq!(survey.models_of(weights()).count(), 40);
        // Independent of the number of blobs.
        assert!(size_of::<(FileId, SurveyedFile)>() + size_of::<SurveyedModel>() <= 192);
    }

    #[test]
    fn needs_are_limited_to_the_requested_blobs() {
        let (_folder, store) = store_of_relatives(3, 100);
        let mut blobs = BTreeSet::new();
        assert!(Survey::new(&store, None, &mut blobs).unwrap().findings.is_empty());
        assert_eq!(blobs.len(), 103);
        let (survey, needs) = Survey::with_needs(&store, &[blob(7), Digest::of(b"nobody's")].into()).unwrap();
        assert_eq!(needs.keys().collect::<Vec<_>>(), [&blob(7)]);
        assert_eq!((needs[&blob(7)].size, needs[&blob(7)].files.as_slice()), (5, &[weights()][..]));
        let names = survey.names_of(&needs[&blob(7)].files);
        assert_eq!(names, ["m0:latest", "m1:latest", "m2:latest"].into());
        assert!(!survey.is_whole_weights(&needs[&blob(7)]));
    }

    #[test]
    fn weights_without_a_recipe_are_whole() {
        let (folder, store) = store_of_relatives(1, 100);
        fs::remove_file(root(&folder).join(layout::recipe(weights().digest))).unwrap();
        let (survey, needs) = Survey::with_needs(&store, &[weights().digest].into()).unwrap();
        assert!(survey.is_whole_weights(&needs[&weights().digest]));
    }

    #[test]
    fn model_that_disagrees_with_the_recipe_on_the_length_is_a_finding() {
        let (folder, store) = store_of_relatives(2, 100);
        add_model(&folder, "liar", WEIGHTS_BYTES + 1);
        let mut blobs = BTreeSet::new();
        let survey = Survey::new(&store, None, &mut blobs).unwrap();
        assert!(blobs.contains(&blob(99)));
        assert_eq!(survey.names_with(weights().digest).len(), 3);
        let [finding] = survey.findings.try_into().unwrap();
        assert!(
            finding.reason.contains("expected 501 bytes as in the manifest, found 500"),
            "{}",
            finding.reason
        );
    }

    #[test]
    fn manifest_that_cannot_be_read_does_not_hide_the_others() {
        let (folder, store) = store_of_relatives(2, 100);
        let path = root(&folder).join(layout::manifest(&"m0".parse().unwrap()));
        fs::write(path, "damaged").unwrap();
        let mut blobs = BTreeSet::new();
        let survey = Survey::new(&store, None, &mut blobs).unwrap();
        assert_eq!(blobs.len(), 101);
        assert_eq!(survey.findings.len(), 1);
        let of = |errno: rustix::io::Errno| is_finding(&StoreError::errno("read", "/m")(errno));
        assert!(of(rustix::io::Errno::IO) && of(rustix::io::Errno::ACCESS) && !of(rustix::io::Errno::MFILE));
    }
}
