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

    /// Opens a recipe's file for reading, of a lower store if this one has none; `None` if it does not exist. Waits if the
    /// recipe is large and another one is being read.
    ///
    /// # Errors
    /// [`StoreError::Io`].
    pub fn open_recipe(&self, file: Digest) -> Result<Option<OpenRecipe<'_>>, StoreError> {
        let Some(opened) = self.find_recipe_file(file)? else { return Ok(None) };
        let permit = self.recipe_permit(&self.root, file, &opened)?;
        Ok(Some(OpenRecipe { file: opened, _permit: permit }))
    }

    pub(super) fn find_recipe_file(&self, file: Digest) -> Result<Option<File>, StoreError> {
        let path = layout::recipe(file);
        match self.root.find_file(&path)? {
            None if self.own_blob_size(file)?.is_none() => Ok(self.lower.find(|root| root.find_file(&path))),
            own => Ok(own),
        }
    }
}

/// A recipe's open file. Must be kept until the recipe is no longer in memory: large ones are read one at a time. A thread
/// that has one must not read another recipe.
#[derive(Debug)]
pub struct OpenRecipe<'s> {
    file: File,
    _permit: Option<MutexGuard<'s, ()>>,
}

impl OpenRecipe<'_> {
    /// The file, at its start.
    #[must_use]
    pub const fn file(&self) -> &File {
        &self.file
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
        let opened = store.open_recipe(large).unwrap().unwrap();
        assert!(store.recipes.is_large_one_read());
        assert!(store.open_recipe(small).unwrap().is_some());
        drop(opened);
        assert!(!store.recipes.is_large_one_read());
        let _small = store.open_recipe(small).unwrap().unwrap();
        assert!(!store.recipes.is_large_one_read());
        assert!(store.open_recipe(Digest::of(b"none")).unwrap().is_none());
    }
}
