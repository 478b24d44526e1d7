//! What recipes keep alive, read from disk each time.
//!
//! A collection reads all recipes there are. It leaves the cache of parsed ones alone, which is
//! there for the few models that are being opened.

use std::fs::File;
use std::sync::MutexGuard;

use blobd_store_format::digest::Digest;
use blobd_store_format::layout;
use blobd_store_format::outline::RecipeOutline;
use blobd_store_format::recipe::Recipe;

use super::root::{FileStatus, Root};
use super::{Store, StoreError};

impl Store {
    /// What the recipe of the file with this digest keeps alive, if the file was split.
    ///
    /// # Errors
    /// [`StoreError::Recipe`] when it is damaged, [`StoreError::WrongRecipe`], [`StoreError::Io`].
    pub fn recipe_outline(&self, file: Digest) -> Result<Option<RecipeOutline>, StoreError> {
        let Some(opened) = self.find_recipe_file(file)? else { return Ok(None) };
        let _permit = self.recipe_permit(file, &opened)?;
        read_outline(&self.root, file, opened).map(Some)
    }

    /// Waits until this recipe may be read into memory: if it is large, until no other large one is read.
    pub(super) fn recipe_permit(
        &self,
        file: Digest,
        opened: &File,
    ) -> Result<Option<MutexGuard<'_, ()>>, StoreError> {
        let path = layout::recipe(file);
        let status = FileStatus::of(opened).map_err(self.root.failure("examine", &path))?;
        Ok(self.recipes.permit(status.len()))
    }

    /// Whether there is a recipe of this name. Nothing of it is read.
    #[must_use]
    pub(crate) fn has_recipe(&self, file: Digest) -> bool {
        self.recipe_bytes(file).is_ok_and(|bytes| bytes.is_some())
    }

    /// Opens a recipe's file for reading, to be read past the page cache.
    ///
    /// # Errors
    /// [`StoreError::UnexpectedFile`], [`StoreError::Io`].
    pub fn find_recipe_file(&self, file: Digest) -> Result<Option<File>, StoreError> {
        self.root.find_file(&layout::recipe(file))
    }
}

/// What the recipe of `file` keeps alive. `opened` is the recipe.
pub(super) fn read_outline(root: &Root, file: Digest, opened: File) -> Result<RecipeOutline, StoreError> {
    let path = layout::recipe(file);
    let json = root.read_opened(opened, &path, Recipe::MAX_BYTES)?;
    let path = root.full(path);
    match RecipeOutline::parse(&json) {
        Err(source) => Err(StoreError::Recipe { path, source }),
        Ok(outline) if outline.file() != file => Err(StoreError::WrongRecipe { path, found: outline.file() }),
        Ok(outline) => Ok(outline),
    }
}
