//! Models as they are stored: a manifest, and for each of its files a blob or a recipe.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use blobd_store_format::descriptor::Descriptor;
use blobd_store_format::digest::Digest;
use blobd_store_format::layout;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::recipe::{Member, Recipe, RecipeKind};
use blobd_store_format::reference::Reference;
use blobd_store_format::size::human_bytes;
use blobd_store_format::stored_file::StoredForm;

use super::leases::Lease;
use super::node::Node;
use super::place::Place;
use super::root::Root;
use super::{Store, StoreError};

/// The blobs of a model that only lower stores have. They are looked up before the tags are locked, because a look-up
/// in a lower store may take long.
pub(crate) type Borrowed = BTreeSet<Digest>;

/// A stored model with its recipes.
#[derive(Clone, Debug)]
pub struct Model {
    /// Its tag.
    pub reference: Reference,
    /// Its manifest.
    pub manifest: Manifest,
    /// Its files, the configuration first.
    pub files: Vec<StoredFile>,
}

/// One file of a model.
#[derive(Clone, Debug)]
pub struct StoredFile {
    /// Its entry in the manifest.
    pub descriptor: Descriptor,
    /// Its recipe if it was split; otherwise it is one blob.
    pub recipe: Option<Arc<Recipe>>,
}

/// A file that a model consists of, and its name if it has one.
#[derive(Clone, Debug)]
pub struct NamedFile {
    /// The file.
    pub file: StoredFile,
    /// Its name in the manifest, or its path in an archive.
    pub name: Option<String>,
    /// The layer that it was in, if that is compressed: its own bytes are not stored.
    pub unpacked_from: Option<Digest>,
}

impl Model {
    /// Every blob that the model needs, with the least length it must have in bytes.
    pub fn blob_sizes(&self) -> impl Iterator<Item = (Digest, u64)> + '_ {
        self.files.iter().flat_map(StoredFile::blob_sizes)
    }

    /// The files with their names. In place of an archive, the files in it.
    ///
    /// # Errors
    /// [`StoreError::Recipe`] when the recipe of an archive is inconsistent.
    pub fn contents(&self) -> Result<Vec<NamedFile>, StoreError> {
        let mut contents = Vec::with_capacity(self.files.len());
        for (file, name) in self.files.iter().zip(self.manifest.names()) {
            match file.members()? {
                members if members.is_empty() => {
                    let (file, name) = (file.clone(), name.map(str::to_owned));
                    contents.push(NamedFile { file, name, unpacked_from: None });
                }
                members => contents.extend(members),
            }
        }
        Ok(contents)
    }

    /// Whether both have the same manifest and the same blobs and recipes.
    fn is_stored_as(&self, other: &Self) -> bool {
        self.manifest.digest() == other.manifest.digest()
            && self.files.len() == other.files.len()
            && self.files.iter().zip(&other.files).all(|(file, other)| file.is_stored_as(other))
    }
}

impl StoredFile {
    fn is_stored_as(&self, other: &Self) -> bool {
        match (&self.recipe, &other.recipe) {
            (None, None) => self.descriptor.digest == other.descriptor.digest,
            // Recipes are cached, so the pointers are usually equal.
            (Some(recipe), Some(other)) => Arc::ptr_eq(recipe, other) || recipe == other,
            _ => false,
        }
    }

    /// The files in it, if it is an archive.
    ///
    /// # Errors
    /// [`StoreError::Recipe`] when its recipe is inconsistent.
    pub fn members(&self) -> Result<Vec<NamedFile>, StoreError> {
        let Some(recipe) = &self.recipe else { return Ok(Vec::new()) };
        let unpacked_from = recipe.unpacked().map(|_| self.descriptor.digest);
        let member = |(index, member): (usize, &Member)| {
            let own = recipe.member_recipe(index).map_err(|error| {
                let path = layout::recipe(self.descriptor.digest).into();
                StoreError::Recipe { path, what: error.to_string() }
            })?;
            let recipe = if own.is_one_blob() { None } else { Some(Arc::new(own)) };
            let file = Self { descriptor: member.descriptor(), recipe };
            Ok(NamedFile { file, name: Some(member.path.clone()), unpacked_from })
        };
        recipe.members().iter().enumerate().map(member).collect()
    }

    /// Whether it is stored as a blob or a recipe.
    #[must_use]
    pub const fn form(&self) -> StoredForm {
        match self.recipe {
            Some(_) => StoredForm::Recipe,
            None => StoredForm::Blob,
        }
    }

    /// Every blob that the file needs, with the least length it must have in bytes.
    #[must_use]
    pub fn blob_sizes(&self) -> Vec<(Digest, u64)> {
        match &self.recipe {
            Some(recipe) => recipe.blob_sizes().into_iter().collect(),
            None => vec![(self.descriptor.digest, self.descriptor.size)],
        }
    }
}

/// A recipe as a store has it.
enum RecipeFile {
    None,
    /// It says that the file is stored whole.
    Whole,
    Split(Arc<Recipe>),
}

impl RecipeFile {
    fn split(self) -> Option<Arc<Recipe>> {
        match self {
            Self::Split(recipe) => Some(recipe),
            Self::None | Self::Whole => None,
        }
    }
}

impl Store {
    /// Reads a model with all its recipes. Its blobs are not checked.
    ///
    /// # Errors
    /// [`StoreError::NoSuchModel`], or a damaged manifest or recipe.
    pub fn model(&self, reference: &Reference) -> Result<Model, StoreError> {
        let reference = self.resolve(reference)?;
        let _held = self.hold_lower_stores();
        let manifest = self.manifest(&reference)?;
        let files = manifest.files().map(|file| self.stored_file(file)).collect::<Result<_, _>>()?;
        Ok(Model { reference, manifest, files })
    }

    /// The length of a model's manifest in bytes. The manifest is not read.
    pub fn manifest_length(&self, reference: &Reference) -> Result<u64, StoreError> {
        let path = layout::manifest(&self.resolve(reference)?);
        let status = match self.root.status(&path)? {
            None => self.lower.find(|root| root.status(&path)),
            own => own,
        };
        // Whether it exists is found out when it is read.
        Ok(status.map_or(0, |status| status.len()))
    }

    /// A model's manifest digest and the sum of its recipes' file sizes in bytes. The recipes are not read.
    pub fn recipes_length(&self, reference: &Reference) -> Result<(Digest, u64), StoreError> {
        let manifest = self.manifest(&self.resolve(reference)?)?;
        let mut sum = 0u64;
        for file in manifest.digests() {
            let recipe = match self.root.status(&layout::recipe(file))? {
                None => self.lower.find(|root| root.status(&layout::recipe(file))),
                recipe => recipe,
            };
            sum = sum.saturating_add(recipe.map_or(0, |status| status.len()));
        }
        Ok((manifest.digest(), sum))
    }

    /// Reads a model and has `lease` protect its files and blobs. The tag is read again afterwards, so a
    /// model that was removed meanwhile is not found, rather than returned with missing blobs.
    pub fn leased_model(&self, reference: &Reference, lease: &Lease) -> Result<Model, StoreError> {
        let mut model = self.model(reference)?;
        loop {
            // The manifest's own digest shows which model is in use.
            let manifest = model.manifest.digest();
            let files = std::iter::once(manifest).chain(model.manifest.digests());
            lease.protect_model(manifest, files.chain(model.blob_sizes().map(|(digest, _)| digest)));
            let now = self.model(reference)?;
            if now.is_stored_as(&model) {
                return Ok(now);
            }
            model = now;
        }
    }

    /// A file with its recipe. A file without one is a blob, which may be missing.
    pub fn stored_file(&self, file: &Descriptor) -> Result<StoredFile, StoreError> {
        self.checked_size(file, self.recipe(file.digest)?)
    }

    fn checked_size(&self, file: &Descriptor, recipe: Option<Arc<Recipe>>) -> Result<StoredFile, StoreError> {
        // Code that rebuilds a file relies on the manifest's size.
        if let Some(found) = recipe.as_ref().map(|recipe| recipe.size()).filter(|size| *size != file.size) {
            let path = self.place_of_recipe(file.digest);
            return Err(StoreError::RecipeSize { path, found, expected: file.size });
        }
        Ok(StoredFile { descriptor: file.clone(), recipe })
    }

    /// Where the recipe of a file is, for messages.
    #[must_use]
    pub fn place_of_recipe(&self, file: Digest) -> Place {
        let path = layout::recipe(file);
        let below = || self.lower.find(|root| Ok(root.status(&path)?.map(|_| root.full(&path))));
        let is_own = self.has_own_recipe(file).unwrap_or(true);
        let place = if is_own { None } else { below() };
        place.unwrap_or_else(|| self.root.full(&path))
    }

    /// Like [`Self::stored_file`], but not from the cache. `None` if the recipe is damaged: a commit of
    /// the file replaces it.
    pub fn stored_file_now(&self, file: &Descriptor) -> Result<Option<StoredFile>, StoreError> {
        self.recipes.forget(file.digest);
        match self.stored_file(file) {
            Err(StoreError::Recipe { .. } | StoreError::RecipeSize { .. }) => Ok(None),
            stored => stored.map(Some),
        }
    }

    /// The recipe of the file with this digest, if it was split. A lower store's is used if this store has neither
    /// a recipe nor the file's blob.
    pub fn recipe(&self, file: Digest) -> Result<Option<Arc<Recipe>>, StoreError> {
        if let Some(recipe) = self.cached_recipe(file)? {
            return Ok(Some(recipe));
        }
        match self.read_recipe(&self.root, file)? {
            RecipeFile::Split(recipe) => return Ok(Some(recipe)),
            // Collections read the same record.
            RecipeFile::Whole => return Ok(None),
            RecipeFile::None => {}
        }
        if self.lower.is_empty() || self.own_blob_size(file)?.is_some() {
            return Ok(None);
        }
        self.lower.find_or_damage(|root| self.read_recipe(root, file).map(RecipeFile::split))
    }

    /// A cached recipe. One of a lower store is not used any more when this store has the file's blob.
    fn cached_recipe(&self, file: Digest) -> Result<Option<Arc<Recipe>>, StoreError> {
        let Some(recipe) = self.recipes.find(file) else { return Ok(None) };
        let is_hidden =
            !self.lower.is_empty() && !self.has_own_recipe(file)? && self.own_blob_size(file)?.is_some();
        Ok((!is_hidden).then_some(recipe))
    }

    /// The recipe of a file in the store at `root`.
    fn read_recipe(&self, root: &Root, file: Digest) -> Result<RecipeFile, StoreError> {
        let reading = self.recipes.begin(file);
        let path = layout::recipe(file);
        let Some(opened) = root.find_file(&path)? else { return Ok(RecipeFile::None) };
        let permit = self.recipe_permit(root, file, &opened)?;
        // The previous holder of the permit may have read the same recipe.
        if let Some(recipe) = permit.as_ref().and_then(|_permit| self.recipes.find(file)) {
            return Ok(RecipeFile::Split(recipe));
        }
        let recipe = parse_recipe(root, file, &opened)?;
        Ok(match recipe.kind() {
            RecipeKind::Whole => RecipeFile::Whole,
            _ => RecipeFile::Split(reading.keep(recipe)),
        })
    }

    /// Whether every blob of a file exists with its full length.
    pub fn has_file(&self, file: &Descriptor) -> Result<bool, StoreError> {
        let _held = self.hold_lower_stores();
        let stored = match self.stored_file(file) {
            Err(StoreError::RecipeSize { .. }) => return Ok(false),
            stored => stored?,
        };
        // Checked on disk: a cached recipe may have been collected.
        if stored.recipe.is_some() && self.find_recipe_file(file.digest)?.is_none() {
            return Ok(false);
        }
        Ok(check_sizes(&stored, |digest| self.blob_size(digest))?.is_none())
    }

    /// Removes a file's recipe if it is damaged or lacks blobs and the file is also stored as a blob. A
    /// power cut may undo the removal of a recipe, which would then hide the blob.
    pub(super) fn drop_useless_recipe(
        &self,
        file: &Descriptor,
        borrowed: &Borrowed,
    ) -> Result<(), StoreError> {
        let is_whole = self.own_blob_size(file.digest)? == Some(file.size);
        let is_useful = || {
            Ok::<_, StoreError>(
                self.stored_file_now(file)?.is_some() && self.check_own_file(file, borrowed)?.is_none(),
            )
        };
        if !is_whole || is_useful()? {
            return Ok(());
        }
        let _change = self.begin_change();
        let recipe = Node::Recipe(file.digest);
        let freed = self.remove_node(recipe)?;
        self.note_removed(recipe, freed.unwrap_or_default());
        // Durable before a tag needs the file, or another power cut could restore the recipe.
        self.disk().sync_dir(Path::new(layout::RECIPES))
    }

    /// A file with the recipe that this store itself has.
    pub(super) fn own_stored_file(&self, file: &Descriptor) -> Result<StoredFile, StoreError> {
        let cached =
            self.recipes.find(file.digest).filter(|_| self.has_own_recipe(file.digest).unwrap_or_default());
        let recipe = match cached {
            None => self.read_recipe(&self.root, file.digest)?.split(),
            cached => cached,
        };
        self.checked_size(file, recipe)
    }

    /// An error about the first missing or damaged part of a file, if there is one. No lower store is asked: what
    /// this store uses of them is `borrowed`.
    pub(super) fn check_own_file(
        &self,
        file: &Descriptor,
        borrowed: &Borrowed,
    ) -> Result<Option<StoreError>, StoreError> {
        let stored = match self.own_stored_file(file) {
            Err(mismatch @ StoreError::RecipeSize { .. }) => return Ok(Some(mismatch)),
            stored => stored?,
        };
        // Checked on disk: a cached recipe may have been collected.
        if stored.recipe.is_some() && !self.has_own_recipe(file.digest)? {
            return Ok(Some(StoreError::MissingBlob { digest: file.digest }));
        }
        let sizes: BTreeMap<Digest, u64> = stored.blob_sizes().into_iter().collect();
        let checked = check_sizes(&stored, |digest| match self.own_blob_size(digest)? {
            None if borrowed.contains(&digest) => Ok(sizes.get(&digest).copied()),
            size => Ok(size),
        })?;
        let Some(StoreError::MissingBlob { digest }) = checked else { return Ok(checked) };
        let problem = self.lower.problem();
        Ok(Some(match (self.blob_status(digest)?, problem) {
            // It has no length that counts, so it was taken for missing.
            (Some(other), _) if !other.is_file() => {
                self.root.unexpected_file(layout::blob(digest), other.kind())
            }
            (_, Some(problem)) => StoreError::Hidden { digest, problem },
            (_, None) => StoreError::MissingBlob { digest },
        }))
    }
}

/// An error about the first blob of a file that is missing or has the wrong size, if there is one.
fn check_sizes(
    stored: &StoredFile,
    size: impl Fn(Digest) -> Result<Option<u64>, StoreError>,
) -> Result<Option<StoreError>, StoreError> {
    for (digest, expected) in stored.blob_sizes() {
        match size(digest)? {
            None => return Ok(Some(StoreError::MissingBlob { digest })),
            Some(found) if found != expected => {
                return Ok(Some(StoreError::BlobSize { digest, found, expected }));
            }
            Some(_) => {}
        }
    }
    Ok(None)
}

/// Reads the recipe of `file` from its open file in the store at `root`.
pub(super) fn parse_recipe(root: &Root, file: Digest, opened: &File) -> Result<Recipe, StoreError> {
    let path = layout::recipe(file);
    let json = read_recipe_file(root, &path, opened)?;
    let path = || root.full(&path);
    let recipe =
        Recipe::parse(&json).map_err(|error| StoreError::Recipe { path: path(), what: error.to_string() })?;
    match recipe.file() == file {
        true => Ok(recipe),
        false => Err(StoreError::wrong_recipe(path(), recipe.file())),
    }
}

/// The content of a recipe's open file.
pub(super) fn read_recipe_file(root: &Root, path: &Path, opened: &File) -> Result<Vec<u8>, StoreError> {
    match Root::excessive_length(opened, Recipe::MAX_BYTES) {
        None => root.read_opened(opened, path, Recipe::MAX_BYTES),
        Some(found) => {
            let (most, found) = (human_bytes(Recipe::MAX_BYTES), human_bytes(found));
            let what = format!("too long: expected at most {most}, found {found}");
            Err(StoreError::Recipe { path: root.full(path), what })
        }
    }
}
