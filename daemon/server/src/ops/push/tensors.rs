//! A model with a layer for each of its blobs, so that the registry stores equal tensors of several models once. Only blobds
//! read it.

use std::collections::BTreeMap;
use std::sync::Arc;

use blobd_registry::PackedRecipe;
use blobd_store::{Model, StoredFile};
use blobd_store_format::descriptor::{Descriptor, MediaType};
use blobd_store_format::digest::Digest;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::recipe::Recipe;
use blobd_store_format::tensor_layers::TensorLayers;
use bytes::Bytes;

use super::super::OpError;
use super::uploads::{Upload, UploadBytes};

/// A manifest with a layer for each blob, and what its layers are.
pub(super) struct SeparateLayers {
    pub(super) manifest: Manifest,
    layers: Vec<Layer>,
}

struct Layer {
    file: StoredFile,
    /// A name for people.
    name: String,
    /// Its bytes, if they are not a blob of the store.
    made: Option<Bytes>,
}

impl SeparateLayers {
    /// The layers of a model; `files` are its files without duplicates, with their names.
    ///
    /// # Errors
    /// [`OpError::NotPushable`] if it has too many blobs for a manifest, or a recipe is too long.
    pub(super) fn new(model: &Model, files: &[(&StoredFile, String)]) -> Result<Self, OpError> {
        let refused = |reason: String| OpError::NotPushable {
            model: model.reference.short(),
            reason: format!(
                "{reason}; push it without --tensors: its tensor index spares pulls the tensors that they have"
            ),
        };
        let (mut blobs, mut recipes, mut layers) = (BTreeMap::new(), Vec::new(), Vec::new());
        let mut recipe_bytes = 0_u64;
        for (file, name) in files {
            let Some(recipe) = file.recipe.as_ref().filter(|recipe| !recipe.is_one_blob()) else {
                let Descriptor { digest, size, .. } = file.descriptor;
                blobs.entry(digest).or_insert_with(|| (size, name.clone()));
                continue;
            };
            recipe_bytes = recipe_bytes.saturating_add(recipe.to_json().len() as u64);
            let packed =
                PackedRecipe::new(recipe).filter(|_| recipe_bytes <= TensorLayers::MAX_RECIPES_BYTES);
            let packed = packed.ok_or_else(|| refused(format!("{name}: its recipe is too long")))?;
            let (descriptor, bytes) = (packed.descriptor(), packed.bytes().clone());
            recipes.push((file.descriptor.digest, descriptor.clone()));
            layers.push(made(descriptor, format!("recipe of {name}"), bytes));
            add_tensors(&mut blobs, recipe, name);
        }
        let sizes = blobs.iter().map(|(digest, (size, _))| (*digest, *size)).collect();
        let manifest = TensorLayers::compose(&model.manifest, &recipes, &sizes);
        let count = blobs.len();
        let manifest =
            manifest.map_err(|error| refused(format!("{count} tensors and other blobs: {error}")))?;
        let blob = |(digest, (size, name)): (Digest, (u64, String))| {
            let media_type = MediaType::new(TensorLayers::BLOB_TYPE);
            Layer { file: stored(Descriptor { media_type, digest, size }), name, made: None }
        };
        layers.extend(blobs.into_iter().map(blob));
        let (config, raw) = (manifest.config().clone(), model.manifest.raw().to_vec());
        layers.push(made(config, "manifest".to_owned(), raw.into()));
        Ok(Self { manifest, layers })
    }

    pub(super) fn uploads(&self) -> Vec<Upload<'_>> {
        self.layers.iter().map(Layer::upload).collect()
    }
}

impl Layer {
    fn upload(&self) -> Upload<'_> {
        let bytes = match &self.made {
            Some(bytes) => UploadBytes::Made(bytes.clone()),
            None => UploadBytes::Stored(&self.file),
        };
        Upload { file: self.file.descriptor.clone(), name: self.name.clone(), bytes }
    }
}

/// A blob of the store as a file of its own.
fn stored(descriptor: Descriptor) -> StoredFile {
    StoredFile { descriptor, recipe: None }
}

fn made(file: Descriptor, name: String, bytes: Bytes) -> Layer {
    Layer { file: stored(file), name, made: Some(bytes) }
}

type NamedBlobs = BTreeMap<Digest, (u64, String)>;

/// Adds the blobs of a file under the names of their tensors.
fn add_tensors(blobs: &mut NamedBlobs, recipe: &Arc<Recipe>, file: &str) {
    let mut names = BTreeMap::new();
    for tensor in recipe.tensors().iter() {
        names.entry(tensor.digest).or_insert(tensor.name);
    }
    for (digest, size) in recipe.blob_sizes() {
        let name = || names.get(&digest).map_or_else(|| format!("part of {file}"), ToString::to_string);
        blobs.entry(digest).or_insert_with(|| (size, name()));
    }
}
