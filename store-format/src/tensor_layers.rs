//! A model as a manifest with a layer for each stored blob, so that a registry stores equal tensors of several models once.
//!
//! The configuration is the model's own manifest, whose digest it keeps. The layers are the [recipes](crate::recipe) of its
//! files, as those of a [tensor index](crate::tensor_index), and every blob that the files consist of. Only blobds read it;
//! `docs/PULLING.md` specifies it.
//!
//! Nothing in it is trusted: the files must have the digests that the model's own manifest says.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::descriptor::{Descriptor, MediaType};
use crate::digest::Digest;
use crate::manifest::{Manifest, ManifestError};
use crate::tensor_index::TensorIndex;

/// The layers of such a manifest, by what they are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorLayers {
    model: Descriptor,
    recipes: TensorIndex,
    /// The sizes of the blobs.
    blobs: BTreeMap<Digest, u64>,
}

impl TensorLayers {
    /// The `artifactType` of the manifest.
    pub const ARTIFACT_TYPE: &str = "application/vnd.blobd.tensors.v1";
    /// The media type of its configuration, which is the model's own manifest.
    pub const MODEL_TYPE: &str = "application/vnd.blobd.manifest.v1+json";
    /// The media type of a blob.
    pub const BLOB_TYPE: &str = "application/vnd.blobd.blob.v1";
    /// The most bytes that all recipes of a model may have when they are decompressed.
    pub const MAX_RECIPES_BYTES: u64 = 4 * TensorIndex::MAX_UNPACKED_BYTES;

    /// The manifest of a model, for its files with a recipe and for the sizes of all blobs.
    ///
    /// # Errors
    /// [`ManifestError::TooLong`] and [`ManifestError::TooManyLayers`] if it has more blobs than a manifest can list.
    pub fn compose(
        model: &Manifest,
        recipes: &[(Digest, Descriptor)],
        blobs: &BTreeMap<Digest, u64>,
    ) -> Result<Manifest, ManifestError> {
        let recipe = |(file, recipe): &(Digest, Descriptor)| {
            let annotations = [(TensorIndex::FILE_ANNOTATION, file.to_string())];
            let annotations: BTreeMap<_, _> = annotations.into();
            let Descriptor { media_type, digest, size } = recipe;
            json!({ "mediaType": media_type, "digest": digest, "size": size, "annotations": annotations })
        };
        let blob = |(digest, size): (&Digest, &u64)| json!({ "mediaType": Self::BLOB_TYPE, "digest": digest, "size": size });
        let layers: Vec<Value> = recipes.iter().map(recipe).chain(blobs.iter().map(blob)).collect();
        let manifest = json!({
            "schemaVersion": 2,
            "mediaType": MediaType::OCI_MANIFEST,
            "artifactType": Self::ARTIFACT_TYPE,
            "config": { "mediaType": Self::MODEL_TYPE, "digest": model.digest(), "size": model.raw().len() },
            "layers": layers,
        });
        Manifest::parse(manifest.to_string().into_bytes())
    }

    /// The layers of a manifest; `None` if it is another kind of manifest.
    pub fn in_manifest(manifest: &Manifest) -> Option<Self> {
        if manifest.config().media_type.as_str() != Self::MODEL_TYPE {
            return None;
        }
        let is_blob = |layer: &&Descriptor| layer.media_type.as_str() == Self::BLOB_TYPE;
        let blobs = manifest.layers().iter().filter(is_blob).map(|layer| (layer.digest, layer.size));
        Some(Self {
            model: manifest.config().clone(),
            recipes: TensorIndex::in_manifest(manifest),
            blobs: blobs.collect(),
        })
    }

    /// The model's own manifest.
    pub const fn model(&self) -> &Descriptor {
        &self.model
    }

    /// The compressed recipe of a file.
    pub fn recipe(&self, file: Digest) -> Option<&Descriptor> {
        self.recipes.recipe(file)
    }

    /// The size of a blob; `None` if none of the layers is this blob.
    pub fn blob_size(&self, blob: Digest) -> Option<u64> {
        self.blobs.get(&blob).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn descriptor(content: &str, media_type: &str) -> Descriptor {
        let media_type = MediaType::new(media_type);
        Descriptor { media_type, digest: Digest::of(content.as_bytes()), size: content.len() as u64 }
    }

    fn model() -> Manifest {
        let config = descriptor("{}", "application/vnd.docker.container.image.v1+json");
        Manifest::compose(config, vec![descriptor("file", MediaType::OLLAMA_MODEL)]).unwrap()
    }

    #[test]
    fn composed_manifest_names_the_model_its_recipes_and_its_blobs() {
        let model = model();
        let recipe = descriptor("recipe", TensorIndex::RECIPE_TYPE);
        let blobs: BTreeMap<_, _> = [(Digest::of(b"fi"), 2), (Digest::of(b"le"), 2)].into();
        let manifest =
            TensorLayers::compose(&model, &[(Digest::of(b"file"), recipe.clone())], &blobs).unwrap();
        assert_eq!(manifest.layers().len(), 3);
        let found = TensorLayers::in_manifest(&manifest).unwrap();
        assert_eq!((found.model().digest, found.model().size), (model.digest(), model.raw().len() as u64));
        assert_eq!(found.recipe(Digest::of(b"file")), Some(&recipe));
        assert_eq!((found.blob_size(Digest::of(b"le")), found.blob_size(Digest::of(b"x"))), (Some(2), None));
        assert_eq!(TensorLayers::in_manifest(&model), None);
    }

    #[test]
    fn model_with_more_blobs_than_a_manifest_lists_is_refused() {
        let blobs = |count: usize| -> BTreeMap<Digest, u64> {
            (0..count).map(|number| (Digest::of(&number.to_le_bytes()), 1)).collect()
        };
        assert!(TensorLayers::compose(&model(), &[], &blobs(Manifest::MAX_LAYERS)).is_ok());
        let refused = TensorLayers::compose(&model(), &[], &blobs(Manifest::MAX_LAYERS + 1));
        assert!(matches!(refused, Err(ManifestError::TooManyLayers { .. })));
    }
}
