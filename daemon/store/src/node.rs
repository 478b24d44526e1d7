//! Blobs and recipes by their digests, and the files of recipes: read and checked, in this store or in a lower one.

use std::fs::File;
use std::path::{Path, PathBuf};

use blobd_store_format::digest::Digest;
use blobd_store_format::layout;
use blobd_store_format::recipe::Recipe;
use blobd_store_format::recipe::RecipeOutline;
use blobd_store_format::size::human_bytes;

use crate::StoreError;
use crate::root::Root;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Node {
    /// A recipe. Ordered before blobs, so that it is deleted before the blobs that it names.
    Recipe(Digest),
    Blob(Digest),
}

impl Node {
    /// A file of a model is stored as one of them.
    pub(crate) const fn both(file: Digest) -> [Self; 2] {
        [Self::Blob(file), Self::Recipe(file)]
    }

    pub(crate) const fn blob(self) -> Option<Digest> {
        match self {
            Self::Blob(digest) => Some(digest),
            Self::Recipe(_) => None,
        }
    }

    pub const fn digest(self) -> Digest {
        match self {
            Self::Recipe(digest) | Self::Blob(digest) => digest,
        }
    }

    pub(crate) fn path(self) -> PathBuf {
        match self {
            Self::Blob(digest) => layout::blob(digest),
            Self::Recipe(file) => layout::recipe(file),
        }
    }
}

pub(crate) fn parse_recipe(root: &Root, file: Digest, opened: &File) -> Result<Recipe, StoreError> {
    let path = layout::recipe(file);
    let json = read_recipe_file(root, &path, opened)?;
    let path = || root.full(&path);
    let recipe =
        Recipe::parse(json).map_err(|error| StoreError::Recipe { path: path(), what: error.to_string() })?;
    match recipe.file() == file {
        true => Ok(recipe),
        false => Err(StoreError::wrong_recipe(path(), recipe.file())),
    }
}

pub(crate) fn read_outline(root: &Root, file: Digest, opened: &File) -> Result<RecipeOutline, StoreError> {
    let path = layout::recipe(file);
    let json = read_recipe_file(root, &path, opened)?;
    let path = root.full(path);
    match RecipeOutline::parse(&json) {
        Err(error) => Err(StoreError::Recipe { path, what: error.to_string() }),
        Ok(outline) if outline.file() != file => Err(StoreError::wrong_recipe(path, outline.file())),
        Ok(outline) => Ok(outline),
    }
}

fn read_recipe_file(root: &Root, path: &Path, opened: &File) -> Result<Vec<u8>, StoreError> {
    match Root::excessive_length(opened, Recipe::MAX_BYTES) {
        None => root.read_opened(opened, path, Recipe::MAX_BYTES),
        Some(found) => {
            let (most, found) = (human_bytes(Recipe::MAX_BYTES), human_bytes(found));
            let what = format!("too long: expected at most {most}, found {found}");
            Err(StoreError::Recipe { path: root.full(path), what })
        }
    }
}
