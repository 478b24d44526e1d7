//! Recipe outlines: the digests that recipes need, read from disk each time.
//!
//! A collection reads all recipes. It does not use the recipe cache, which is for the few models that
//! are being opened.

use std::fs::File;

use blobd_store_format::digest::Digest;
use blobd_store_format::layout;
use blobd_store_format::outline::RecipeOutline;
use tracing_mutex::stdsync::MutexGuard;

use super::models::read_recipe_file;
use super::root::{FileStatus, Root};
use super::{Store, StoreError};

impl Store {
    /// The outline of a file's recipe in this store, without the lower ones; `None` if there is none.
    ///
    /// # Errors
    /// [`StoreError::Recipe`], [`StoreError::Io`].
    pub fn recipe_outline(&self, file: Digest) -> Result<Option<RecipeOutline>, StoreError> {
        let Some(opened) = self.root.find_file(&layout::recipe(file))? else { return Ok(None) };
        let _permit = self.recipe_permit(&self.root, file, &opened)?;
        read_outline(&self.root, file, &opened).map(Some)
    }

    /// Waits for the permit to read a recipe, see [`super::recipe_cache::RecipeCache::permit`].
    pub(super) fn recipe_permit(
        &self,
        root: &Root,
        file: Digest,
        opened: &File,
    ) -> Result<Option<MutexGuard<'_, ()>>, StoreError> {
        let path = layout::recipe(file);
        let status = FileStatus::of(opened).map_err(root.failure("inspect", &path))?;
        Ok(self.recipes.permit(status.len()))
    }

    pub(crate) fn has_own_recipe(&self, file: Digest) -> Result<bool, StoreError> {
        Ok(self.root.status(&layout::recipe(file))?.is_some())
    }

    /// Opens a recipe's file for reading, of a lower store if this one has none; `None` if it does not exist.
    pub fn find_recipe_file(&self, file: Digest) -> Result<Option<File>, StoreError> {
        let path = layout::recipe(file);
        match self.root.find_file(&path)? {
            None if self.own_blob_size(file)?.is_none() => Ok(self.lower.find(|root| root.find_file(&path))),
            own => Ok(own),
        }
    }
}

/// Reads the outline of the recipe of `file` from its open file.
pub(super) fn read_outline(root: &Root, file: Digest, opened: &File) -> Result<RecipeOutline, StoreError> {
    let path = layout::recipe(file);
    let json = read_recipe_file(root, &path, opened)?;
    let path = root.full(path);
    match RecipeOutline::parse(&json) {
        Err(error) => Err(StoreError::Recipe { path, what: error.to_string() }),
        Ok(outline) if outline.file() != file => Err(StoreError::wrong_recipe(path, outline.file())),
        Ok(outline) => Ok(outline),
    }
}
