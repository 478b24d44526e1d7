//! Models as they are stored: a manifest, and for each of its files a blob or a recipe.

use crate::NamedFile;
use crate::StoredFile;

use blobd_store_format::digest::Digest;
use blobd_store_format::layout;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::reference::Reference;

use crate::StoreError;
use crate::leases::Lease;
use crate::names::Names;

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

impl Names {
    /// Reads a model with all its recipes. Its blobs are not checked.
    ///
    /// # Errors
    /// [`StoreError::NoSuchModel`], or a damaged manifest or recipe.
    pub fn model(&self, reference: &Reference) -> Result<Model, StoreError> {
        let reference = self.resolve(reference)?;
        let _held = self.content.hold_lower_stores();
        let manifest = self.manifest(&reference)?;
        let files = manifest.files().map(|file| self.content.stored_file(file)).collect::<Result<_, _>>()?;
        Ok(Model { reference, manifest, files })
    }

    /// The length of a model's manifest in bytes. The manifest is not read.
    pub fn manifest_length(&self, reference: &Reference) -> Result<u64, StoreError> {
        let path = layout::manifest(&self.resolve(reference)?);
        let status = match self.content.root.status(&path)? {
            None => self.content.lower.find(|root| root.status(&path)),
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
            let recipe = match self.content.root.status(&layout::recipe(file))? {
                None => self.content.lower.find(|root| root.status(&layout::recipe(file))),
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
}
