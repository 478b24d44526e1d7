//! Recipe outlines: the digests that recipes need, read from disk each time.
//!
//! A collection reads all recipes. It does not use the recipe cache, which is for the few models that are being opened.

use std::fs::File;
use std::sync::Arc;

use blobd_store_format::digest::Digest;
use blobd_store_format::layout;
use blobd_store_format::recipe::RecipeOutline;
use blobd_store_format::recipe::{Recipe, RecipeKind};
use tracing_mutex::stdsync::MutexGuard;

use crate::StoreError;
use crate::content::Content;
use crate::error::DisplayPath;
use crate::node::{parse_recipe, read_outline};
use crate::root::{FileStatus, Root};

impl Content {
    /// The outline of a file's recipe in this store, without the lower ones; `None` if there is none.
    pub fn recipe_outline(&self, file: Digest) -> Result<Option<RecipeOutline>, StoreError> {
        let Some(opened) = self.root.find_file(&layout::recipe(file))? else { return Ok(None) };
        let _permit = self.recipe_permit(&self.root, file, &opened)?;
        read_outline(&self.root, file, &opened).map(Some)
    }

    pub(crate) fn recipe_permit(
        &self,
        root: &Root,
        file: Digest,
        opened: &File,
    ) -> Result<Option<MutexGuard<'_, ()>>, StoreError> {
        let path = layout::recipe(file);
        let status = FileStatus::from_file(opened).map_err(root.failure("inspect", &path))?;
        Ok(self.recipes.permit(status.len()))
    }

    pub(crate) fn has_own_recipe(&self, file: Digest) -> Result<bool, StoreError> {
        Ok(self.root.status(&layout::recipe(file))?.is_some())
    }

    /// Opens a recipe's file. Waits if the recipe is large and another one is being read.
    pub fn open_recipe(&self, file: Digest) -> Result<Option<OpenRecipe<'_>>, StoreError> {
        let Some(opened) = self.find_recipe_file(file)? else { return Ok(None) };
        let permit = self.recipe_permit(&self.root, file, &opened)?;
        Ok(Some(OpenRecipe { file: opened, _permit: permit }))
    }

    pub(crate) fn find_recipe_file(&self, file: Digest) -> Result<Option<File>, StoreError> {
        let path = layout::recipe(file);
        match self.root.find_file(&path)? {
            None if self.own_blob_size(file)?.is_none() => Ok(self.lower.find(|root| root.find_file(&path))),
            own => Ok(own),
        }
    }

    pub fn place_of_recipe(&self, file: Digest) -> DisplayPath {
        let path = layout::recipe(file);
        let below = || self.lower.find(|root| Ok(root.status(&path)?.map(|_| root.full(&path))));
        let is_own = self.has_own_recipe(file).unwrap_or(true);
        let place = if is_own { None } else { below() };
        place.unwrap_or_else(|| self.root.full(&path))
    }

    /// The recipe of a split file. A lower store's is used if this store has neither a recipe nor the file's blob.
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

    pub(super) fn read_recipe(&self, root: &Root, file: Digest) -> Result<RecipeFile, StoreError> {
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
}

/// A recipe's open file, to be kept as long as the recipe is in memory: large ones are read one at a time. A thread
/// that has one must not read another recipe.
#[derive(Debug)]
pub struct OpenRecipe<'s> {
    file: File,
    _permit: Option<MutexGuard<'s, ()>>,
}

impl OpenRecipe<'_> {
    pub const fn file(&self) -> &File {
        &self.file
    }
}

pub(super) enum RecipeFile {
    None,
    /// It says that the file is stored whole.
    Whole,
    Split(Arc<Recipe>),
}

impl RecipeFile {
    pub(super) fn split(self) -> Option<Arc<Recipe>> {
        match self {
            Self::Split(recipe) => Some(recipe),
            Self::None | Self::Whole => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use blobd_store_format::recipe::{Piece, Recipe};
    use blobd_store_format::tensor::TensorFormat;

    use super::*;

    /// Each request that reads recipes would otherwise have one of 40 MiB in memory.
    #[test]
    fn one_large_recipe_is_read_at_a_time_and_small_ones_do_not_wait_for_it() {
        let (_folder, store) = crate::testing::new_store();
        let add = |pieces: u64| {
            let blob = |number: u64| Digest::of(&number.to_le_bytes());
            let piece = |number| Piece::Blob { blob: blob(number), offset: 0, length: 1 };
            let recipe =
                Recipe::new(blob(pieces), TensorFormat::Gguf, (0..pieces).map(piece).collect(), vec![])
                    .unwrap();
            fs::write(store.path(layout::recipe(recipe.file())), recipe.to_json()).unwrap();
            recipe.file()
        };
        let (small, large) = (add(1), add(20_000));
        let opened = store.content.open_recipe(large).unwrap().unwrap();
        assert!(store.content.recipes.is_large_one_read());
        assert!(store.content.open_recipe(small).unwrap().is_some());
        drop(opened);
        assert!(!store.content.recipes.is_large_one_read());
        let _small = store.content.open_recipe(small).unwrap().unwrap();
        assert!(!store.content.recipes.is_large_one_read());
        assert!(store.content.open_recipe(Digest::of(b"none")).unwrap().is_none());
    }

    #[test]
    fn recipe_of_a_lower_store_is_used_unless_this_one_has_the_file() {
        use crate::StoreOptions;
        use crate::testing::{add_blobs, new_store, new_store_with, recipe_of};
        let (lower_folder, lower) = new_store();
        let recipe = recipe_of(&[b"head", b"tensor"]);
        let (file, path) = (recipe.file(), layout::recipe(recipe.file()));
        fs::write(lower.path(&path), recipe.to_json()).unwrap();
        let lower_place = lower.content.root.full(&path);
        drop(lower);
        let options =
            StoreOptions { lower: vec![lower_folder.path().join("store")], ..StoreOptions::default() };
        let (_folder, store) = new_store_with(options);
        let is_split = || store.content.recipe(file).unwrap().is_some();
        assert!(is_split() && is_split(), "also from the cache");
        assert!(store.content.find_recipe_file(file).unwrap().is_some());
        assert_eq!(store.content.place_of_recipe(file), lower_place);
        assert!(store.content.recipe_outline(file).unwrap().is_none(), "it is not in this store");
        add_blobs(&store, [b"headtensor"]);
        assert!(
            !is_split() && store.content.find_recipe_file(file).unwrap().is_none(),
            "it is stored whole here"
        );
        let own = recipe_of(&[b"headten", b"sor"]);
        fs::write(store.path(&path), own.to_json()).unwrap();
        store.content.recipes.forget(file);
        assert_eq!(*store.content.recipe(file).unwrap().unwrap(), own);
        assert_eq!(*store.content.recipe(file).unwrap().unwrap(), own, "from the cache");
        assert_eq!(store.content.place_of_recipe(file), store.content.root.full(&path));
        assert!(store.content.has_own_recipe(file).unwrap());
        let absent = Digest::of(b"absent");
        assert!(
            store.content.recipe(absent).unwrap().is_none() && !store.content.has_own_recipe(absent).unwrap()
        );
        assert_eq!(store.content.place_of_recipe(absent), store.content.root.full(layout::recipe(absent)));
    }

    #[test]
    fn record_of_a_whole_file_is_not_used_to_read_it() {
        let (_folder, store) = crate::testing::new_store();
        let whole = Recipe::for_whole_file(Digest::of(b"whole"), 5).unwrap();
        fs::write(store.path(layout::recipe(whole.file())), whole.to_json()).unwrap();
        assert!(store.content.recipe(whole.file()).unwrap().is_none());
        assert!(store.content.recipe_outline(whole.file()).unwrap().is_some());
        assert_eq!(store.content.recipes().unwrap(), [whole.file()]);
    }
}
