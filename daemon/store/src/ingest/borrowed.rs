//! What a model uses from lower stores.

use std::collections::BTreeSet;
use std::fs::File;
use std::sync::Arc;

use blobd_store_format::descriptor::Descriptor;
use blobd_store_format::digest::Digest;
use blobd_store_format::layout;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::recipe::Recipe;

use super::Ingest;
use crate::bounded_read::read_exact;
use crate::content::stored_files::Borrowed;
use crate::root::Root;
use crate::seal::StagedBlob;
use crate::{Store, StoreError};

impl Ingest {
    /// Has this store keep its own copy of every blob that is added, also of those that a lower store has.
    pub const fn keeping_own_copies(mut self) -> Self {
        self.keeps_own_copies = true;
        self
    }

    /// Has this store keep its own copy of a blob, because that of a lower store is damaged.
    pub fn keep_own_copy(&mut self, digest: Digest) {
        self.own_copies.insert(digest);
    }

    /// Whether a blob need not be stored.
    pub(super) fn is_stored(&self, digest: Digest, size: u64) -> Result<bool, StoreError> {
        let found = match self.keeps_own_copies || self.own_copies.contains(&digest) {
            true => self.store.content.own_blob_size(digest)?,
            false => self.store.content.blob_size(digest)?,
        };
        Ok(found == Some(size))
    }

    /// Copies a blob of `size` bytes from the first lower store that has it undamaged. `report` gets the number of
    /// bytes of each step and returns false to stop; the result is false then.
    ///
    /// # Errors
    /// [`StoreError::DamagedBlob`] when its bytes have another digest in all lower stores; then nothing is added.
    /// [`StoreError::Hidden`], [`StoreError::MissingBlob`].
    pub fn copy_blob(
        &mut self,
        digest: Digest,
        size: u64,
        report: &mut dyn FnMut(u64) -> bool,
    ) -> Result<bool, StoreError> {
        let store = Arc::clone(&self.store);
        let mut failure = None;
        for (file, root) in store.content.lower_blobs(digest, size) {
            let copied = self.stage_copy(&file, size, &root, digest, report);
            match copied {
                Ok(None) => return Ok(false),
                Ok(Some(staged)) if staged.digest == digest => return self.add_blob(staged).map(|_| true),
                Ok(Some(staged)) => {
                    let found = staged.digest;
                    self.staging.discard(&staged)?;
                    tracing::error!(
                        "{}: its bytes have the digest {found}",
                        root.full(layout::blob(digest)).display()
                    );
                    failure = failure.or(Some(StoreError::DamagedBlob { digest, found }));
                }
                Err(error) if error.is_no_space() => return Err(error),
                Err(error) => failure = failure.or(Some(error)),
            }
        }
        let missing =
            || store.content.open_blob(digest, size).err().unwrap_or(StoreError::MissingBlob { digest });
        Err(failure.unwrap_or_else(missing))
    }

    /// Stages the bytes of an open blob of the store at `root`; `None` if `report` stops it.
    fn stage_copy(
        &self,
        file: &File,
        size: u64,
        root: &Root,
        digest: Digest,
        report: &mut dyn FnMut(u64) -> bool,
    ) -> Result<Option<StagedBlob>, StoreError> {
        let mut writer = self.staging.stage(size);
        let mut buffer = vec![0; crate::CHUNK_BYTES];
        let mut offset = 0;
        while offset < size {
            let length = buffer.len().min(usize::try_from(size - offset).unwrap_or(usize::MAX));
            let bytes = buffer.get_mut(..length).unwrap_or_default();
            read_exact(file, bytes, offset).map_err(root.failure("read", &layout::blob(digest)))?;
            writer.append(bytes)?;
            offset = offset.saturating_add(length as u64);
            if !report(length as u64) {
                return Ok(None);
            }
        }
        writer.finish().map(Some)
    }

    /// Adds the recipes of the model's files that only lower stores have. For a file that only they have as a blob,
    /// adds a recipe that says so. Without these records, a collection would not know what the model needs while a
    /// lower store is not there.
    pub(super) fn record_borrowed(&mut self, manifest: &Manifest) -> Result<(), StoreError> {
        if self.store.content.lower.is_empty() {
            return Ok(());
        }
        let store = Arc::clone(&self.store);
        let _held = store.content.hold_lower_stores();
        for file in manifest.files() {
            if self.recipes.contains_key(&file.digest) || self.store.records(file)? {
                continue;
            }
            // A damaged recipe of a lower store does not matter if the file is also a blob there.
            let recipe = match self.store.content.stored_file(file) {
                Err(StoreError::Recipe { .. } | StoreError::RecipeSize { .. }) => None,
                stored => stored?.recipe,
            };
            if let Some(recipe) = recipe {
                self.add_recipe(Recipe::clone(&recipe));
            } else if self.store.content.lower_blob_size(file.digest) == Some(file.size) {
                let path = layout::recipe(file.digest);
                let whole = Recipe::for_whole_file(file.digest, file.size);
                let refused = |error| StoreError::Recipe {
                    path: self.store.content.root.full(path),
                    what: format!("{error}"),
                };
                self.add_recipe(whole.map_err(refused)?);
            }
        }
        Ok(())
    }

    /// The model's blobs that only lower stores have. All its recipes are in this store.
    pub(super) fn borrowed(&self, manifest: &Manifest) -> Result<Borrowed, StoreError> {
        let mut borrowed = Borrowed::new();
        if self.store.content.lower.is_empty() {
            return Ok(borrowed);
        }
        let _held = self.store.content.hold_lower_stores();
        for file in manifest.files() {
            // A damaged recipe is replaced or refused later.
            let Ok(stored) = self.store.content.own_stored_file(file) else { continue };
            for (digest, size) in stored.blob_sizes() {
                if self.store.content.own_blob_size(digest)?.is_none()
                    && self.store.content.lower_blob_size(digest) == Some(size)
                {
                    borrowed.insert(digest);
                }
            }
        }
        Ok(borrowed)
    }
}

impl Store {
    /// Whether this store itself has a file's recipe, or its blob.
    fn records(&self, file: &Descriptor) -> Result<bool, StoreError> {
        Ok(self.content.has_own_recipe(file.digest)?
            || self.content.own_blob_size(file.digest)? == Some(file.size))
    }

    /// Those of these blobs that this store itself lacks.
    pub fn not_own_blobs(
        &self,
        blobs: impl IntoIterator<Item = (Digest, u64)>,
    ) -> Result<Vec<(Digest, u64)>, StoreError> {
        let mut seen = BTreeSet::new();
        let mut missing = Vec::new();
        for (digest, size) in blobs {
            if seen.insert(digest) && self.content.own_blob_size(digest)? != Some(size) {
                missing.push((digest, size));
            }
        }
        Ok(missing)
    }
}
