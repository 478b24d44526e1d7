//! Models that a registry has as a layer for each tensor, as `push --tensors` leaves them.

use std::collections::BTreeSet;
use std::sync::Arc;

use blobd_store_format::descriptor::Descriptor;
use blobd_store_format::digest::Digest;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::recipe::Recipe;
use blobd_store_format::reference::Reference;
use blobd_store_format::tensor_index::TensorIndex;
use blobd_store_format::tensor_layers::TensorLayers;

use super::RegistryClient;
use super::error::{RegistryError, Result};
use super::manifest::refuse_unusable;
use super::published::PublishedModel;
use super::remote::SeparateBlobs;
use super::tensor_index::{PackedRecipe, unpack};

impl RegistryClient {
    /// A model with its own manifest, which a manifest with a layer for each tensor only contains.
    pub(super) async fn with_separate_blobs(
        &self,
        reference: &Reference,
        manifest: Manifest,
    ) -> Result<PublishedModel> {
        let Some(layers) = TensorLayers::in_manifest(&manifest) else { return Ok(manifest.into()) };
        let refused =
            |what: &str| RegistryError::unusable_model(reference, &format!("layer per tensor: {what}"));
        if reference.digest().is_some() {
            return Err(refused(
                "its digest is not the model's, so no name can have it: pull it by its tag, and verify the digest of the \
                 model with `blobd show`",
            ));
        }
        let own = self.small_layer(reference, layers.model(), Manifest::MAX_BYTES, "manifest").await?;
        let own = Manifest::parse(own).map_err(|error| refused(&error.to_string()))?;
        if TensorLayers::in_manifest(&own).is_some() {
            return Err(refused("its own manifest is of the same kind"));
        }
        refuse_unusable(reference, &own)?;
        let mut model = PublishedModel::from(own);
        let (mut seen, mut left) = (BTreeSet::new(), TensorLayers::MAX_RECIPES_BYTES);
        for file in model.manifest.files().filter(|file| seen.insert(file.digest)) {
            let Some(packed) = layers.recipe(file.digest) else {
                match layers.blob_size(file.digest) {
                    Some(size) if size == file.size => continue,
                    _ => return Err(refused(&format!("no recipe and no blob of file {}", file.digest))),
                }
            };
            let blobs = self.separate_blobs(reference, (file, packed), &layers, &mut left).await?;
            model.separate.insert(file.digest, Arc::new(blobs));
        }
        Ok(model)
    }

    /// What a file consists of. `left` are the bytes that recipes may still have.
    async fn separate_blobs(
        &self,
        reference: &Reference,
        (file, packed): (&Descriptor, &Descriptor),
        layers: &TensorLayers,
        left: &mut u64,
    ) -> Result<SeparateBlobs> {
        let refused = |what: String| {
            RegistryError::unusable_model(
                reference,
                &format!("layer per tensor: file {}: {what}", file.digest),
            )
        };
        let limit = TensorIndex::max_recipe_bytes(file.size);
        let bytes = self.small_layer(reference, packed, limit, "recipe").await?;
        let json = unpack(&bytes).map_err(|error| refused(error.to_string()))?;
        *left = left.checked_sub(json.len() as u64).ok_or_else(|| {
            refused(format!("recipes: too long: expected at most {} bytes", TensorLayers::MAX_RECIPES_BYTES))
        })?;
        drop(json);
        let recipe = PackedRecipe::read(&bytes, file.digest, file.size);
        let recipe = recipe.map_err(|error| refused(error.to_string()))?;
        if recipe.unpacked().is_some() {
            return Err(refused("recipe: of a compressed file".to_owned()));
        }
        check_blobs(&recipe, layers).map_err(|(blob, found)| {
            refused(format!("blob {blob}: expected a layer with it, found {found}"))
        })?;
        let sizes = recipe.blob_sizes();
        let sizes = sizes.into_keys().filter_map(|blob| Some((blob, layers.blob_size(blob)?))).collect();
        Ok(SeparateBlobs { recipe: Arc::new(recipe), sizes, recipe_bytes: packed.size })
    }

    /// Downloads a layer into memory, unless it is longer than `limit`.
    async fn small_layer(
        &self,
        reference: &Reference,
        layer: &Descriptor,
        limit: u64,
        what: &str,
    ) -> Result<Vec<u8>> {
        if layer.size > limit {
            let size = layer.size;
            let what =
                format!("layer per tensor: {what}: too long: expected at most {limit} bytes, found {size}");
            return Err(RegistryError::unusable_model(reference, &what));
        }
        self.retried(|| self.artifact_layer(reference, layer, what)).await
    }
}

/// Whether each blob is a layer that is long enough; otherwise the one that is not, and what is there.
fn check_blobs(recipe: &Recipe, layers: &TensorLayers) -> std::result::Result<(), (Digest, String)> {
    for (blob, size) in recipe.blob_sizes() {
        match layers.blob_size(blob) {
            None => return Err((blob, "none".to_owned())),
            Some(found) if found < size => {
                return Err((blob, format!("{found} bytes of the {size} that are needed")));
            }
            Some(_) => {}
        }
    }
    Ok(())
}
