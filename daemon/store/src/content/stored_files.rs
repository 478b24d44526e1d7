//! Files of models as they are stored: each is one blob, or split by a recipe.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use blobd_store_format::descriptor::Descriptor;
use blobd_store_format::digest::Digest;
use blobd_store_format::layout;
use blobd_store_format::recipe::{Member, Recipe};
use blobd_store_format::stored_file::StoredForm;

use crate::Content;
use crate::StoreError;
use crate::node::Node;

/// The blobs of a model that only lower stores have. They are looked up before the tags are locked, because a look-up
/// in a lower store may take long.
pub(crate) type Borrowed = BTreeSet<Digest>;

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

impl StoredFile {
    pub(crate) fn is_stored_as(&self, other: &Self) -> bool {
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

impl Content {
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

    /// Like [`Self::stored_file`], but not from the cache. `None` if the recipe is damaged: a commit of
    /// the file replaces it.
    pub fn stored_file_now(&self, file: &Descriptor) -> Result<Option<StoredFile>, StoreError> {
        self.recipes.forget(file.digest);
        match self.stored_file(file) {
            Err(StoreError::Recipe { .. } | StoreError::RecipeSize { .. }) => Ok(None),
            stored => stored.map(Some),
        }
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
    pub(crate) fn drop_useless_recipe(
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
        let _change = self.index.begin_change();
        let recipe = Node::Recipe(file.digest);
        let freed = self.remove_node(recipe)?;
        self.note_removed(recipe, freed.unwrap_or_default());
        // Durable before a tag needs the file, or another power cut could restore the recipe.
        self.disk().sync_dir(Path::new(layout::RECIPES))
    }

    /// A file with the recipe that this store itself has.
    pub(crate) fn own_stored_file(&self, file: &Descriptor) -> Result<StoredFile, StoreError> {
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
    pub(crate) fn check_own_file(
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
