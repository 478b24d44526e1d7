//! Files of models as they are stored: each is one blob, or split by a recipe.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use blobd_store_format::descriptor::Descriptor;
use blobd_store_format::digest::Digest;
use blobd_store_format::layout;
use blobd_store_format::recipe::{Member, Recipe};
use blobd_store_format::stored_file::StoredForm;

use crate::node::Node;
use crate::{Content, StoreError};

/// A model's blobs that only lower stores have. Looked up before the tags are locked, because it may take long.
pub(crate) type Borrowed = BTreeSet<Digest>;

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

    pub const fn form(&self) -> StoredForm {
        match self.recipe {
            Some(_) => StoredForm::Recipe,
            None => StoredForm::Blob,
        }
    }

    /// Every blob that the file needs, with the least length it must have in bytes.
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

    /// Like [`Self::stored_file`], but not from the cache. `None` if the recipe is damaged: a commit replaces it.
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

    /// Removes a file's recipe if it is damaged or lacks blobs and the file is also stored as a blob. A power cut may
    /// undo the removal of a recipe, which would then hide the blob.
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
        self.disk.sync_dir(Path::new(layout::RECIPES))
    }

    pub(crate) fn own_stored_file(&self, file: &Descriptor) -> Result<StoredFile, StoreError> {
        let cached =
            self.recipes.find(file.digest).filter(|_| self.has_own_recipe(file.digest).unwrap_or_default());
        let recipe = match cached {
            None => self.read_recipe(&self.root, file.digest)?.split(),
            cached => cached,
        };
        self.checked_size(file, recipe)
    }

    /// An error about the first missing or damaged part of a file. Of lower stores, only `borrowed` counts.
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
            // It has no length that counts, so it was treated as missing.
            (Some(other), _) if !other.is_file() => {
                self.root.unexpected_file(layout::blob(digest), other.kind())
            }
            (_, Some(problem)) => StoreError::Hidden { digest, problem },
            (_, None) => StoreError::MissingBlob { digest },
        }))
    }
}

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

#[cfg(test)]
mod tests {

    use std::fs;

    use super::*;
    use crate::Store;
    use crate::testing::{add_blobs, file, new_store, recipe_of};

    /// A store with a file that is split into two blobs.
    fn split_file() -> (tempfile::TempDir, Arc<Store>, Descriptor) {
        let (folder, store) = new_store();
        add_blobs(&store, [&b"head"[..], b"tensor"]);
        write(&store, &[b"head", b"tensor"]);
        (folder, store, file(b"headtensor"))
    }

    fn write(store: &Store, parts: &[&[u8]]) {
        let recipe = recipe_of(parts);
        fs::write(store.path(layout::recipe(recipe.file())), recipe.to_json()).unwrap();
    }

    /// The first problem of the file, and whether all of it is there.
    fn checked(store: &Store, file: &Descriptor) -> (Option<StoreError>, bool) {
        (store.content.check_own_file(file, &Borrowed::new()).unwrap(), store.content.has_file(file).unwrap())
    }

    #[test]
    fn every_part_of_a_file_must_be_there_with_its_length() {
        let (_folder, store, split) = split_file();
        assert!(matches!(checked(&store, &split), (None, true)));
        let tensor = Digest::of(b"tensor");
        let blob = store.path(layout::blob(tensor));
        fs::remove_file(&blob).unwrap();
        let (problem, is_whole) = checked(&store, &split);
        assert!(matches!(problem, Some(StoreError::MissingBlob { digest }) if digest == tensor) && !is_whole);
        let borrowed = Borrowed::from([tensor]);
        assert!(store.content.check_own_file(&split, &borrowed).unwrap().is_none(), "a lower store has it");
        for wrong in ["tens", "tensor and more"] {
            fs::write(&blob, wrong).unwrap();
            let (problem, is_whole) = checked(&store, &split);
            let found = wrong.len() as u64;
            assert!(
                matches!(problem, Some(StoreError::BlobSize { found: f, expected: 6, .. }) if f == found)
                    && !is_whole,
                "{wrong}"
            );
            fs::remove_file(&blob).unwrap();
        }
        fs::create_dir(&blob).unwrap();
        let (problem, is_whole) = checked(&store, &split);
        assert!(matches!(problem, Some(StoreError::UnexpectedFile { .. })) && !is_whole, "{problem:?}");
    }

    #[test]
    fn recipe_must_rebuild_a_file_of_the_size_in_the_manifest() {
        let (_folder, store, split) = split_file();
        let other = Descriptor { size: 11, ..split.clone() };
        for _ in 0..2 {
            let error = store.content.stored_file(&other).unwrap_err();
            assert!(matches!(error, StoreError::RecipeSize { found: 10, expected: 11, .. }), "{error}");
            let (problem, is_whole) = checked(&store, &other);
            assert!(matches!(problem, Some(StoreError::RecipeSize { .. })) && !is_whole);
            assert!(store.content.stored_file_now(&other).unwrap().is_none());
            assert!(store.content.stored_file_now(&split).unwrap().is_some());
        }
        // A cached recipe that was collected is not used.
        store.content.stored_file(&split).unwrap();
        fs::remove_file(store.path(layout::recipe(split.digest))).unwrap();
        assert!(!store.content.has_file(&split).unwrap());
        assert!(store.content.own_stored_file(&split).unwrap().recipe.is_none());
        fs::write(store.path(layout::recipe(split.digest)), "damaged").unwrap();
        assert!(store.content.stored_file_now(&split).unwrap().is_none());
    }

    #[test]
    fn unneeded_recipe_is_removed_if_the_file_is_stored_whole() {
        let has_recipe =
            |store: &Store, file: &Descriptor| store.content.has_own_recipe(file.digest).unwrap();
        for (is_whole, is_damaged, lacks_blob, is_dropped) in [
            (true, false, false, false),
            (true, true, false, true),
            (true, false, true, true),
            (false, true, false, false),
            (false, false, true, false),
        ] {
            let (_folder, store, split) = split_file();
            if is_whole {
                fs::write(store.path(layout::blob(split.digest)), "headtensor").unwrap();
            }
            if is_damaged {
                fs::write(store.path(layout::recipe(split.digest)), "damaged").unwrap();
            }
            if lacks_blob {
                fs::remove_file(store.path(layout::blob(Digest::of(b"head")))).unwrap();
            }
            store.content.drop_useless_recipe(&split, &Borrowed::new()).unwrap();
            let case = (is_whole, is_damaged, lacks_blob);
            assert_eq!(has_recipe(&store, &split), !is_dropped, "{case:?}");
        }
    }

    #[test]
    fn form_and_blobs_are_those_of_the_recipe_or_of_the_file_itself() {
        let (_folder, store, split) = split_file();
        let stored = store.content.stored_file(&split).unwrap();
        assert_eq!(stored.form(), StoredForm::Recipe);
        let mut sizes = stored.blob_sizes();
        sizes.sort();
        let mut expected = vec![(Digest::of(b"head"), 4), (Digest::of(b"tensor"), 6)];
        expected.sort();
        assert_eq!(sizes, expected);
        let whole = store.content.stored_file(&file(b"whole")).unwrap();
        assert_eq!((whole.form(), whole.blob_sizes()), (StoredForm::Blob, vec![(Digest::of(b"whole"), 5)]));
        assert!(whole.members().unwrap().is_empty() && stored.members().unwrap().is_empty());
        let other = store.content.stored_file(&file(b"other")).unwrap();
        assert!(whole.is_stored_as(&whole) && !whole.is_stored_as(&other) && !whole.is_stored_as(&stored));
    }
}
