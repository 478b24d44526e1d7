//! Tensor indexes: manifests beside a model at its registry that list the tensors in its files.
//!
//! A tensor index is an OCI artifact whose `subject` is the model's manifest, which keeps its digest. It has one layer per
//! file: the file's [recipe](crate::recipe), compressed with zstd. `docs/PULLING.md` specifies it.
//!
//! Nothing in an index is trusted: it is only used to choose what to download, and the digest of the file decides.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::artifact::{Artifact, ArtifactError, ArtifactKind, Entry};
use crate::descriptor::Descriptor;
use crate::digest::Digest;
use crate::manifest::Manifest;

/// A checked tensor index.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TensorIndex {
    files: BTreeMap<Digest, Descriptor>,
}

impl TensorIndex {
    /// The `artifactType` of its manifest.
    pub const ARTIFACT_TYPE: &str = "application/vnd.blobd.tensor-index.v1";
    /// The media type of its layers.
    pub const RECIPE_TYPE: &str = "application/vnd.blobd.recipe.v1+zstd";
    /// The annotation of a layer: the digest of the file that the recipe is of.
    pub const FILE_ANNOTATION: &str = "vnd.blobd.file.digest";
    /// The longest manifest read: 1,000 files.
    pub const MAX_BYTES: u64 = 256 << 10;
    /// What such an artifact is. A model has one.
    pub const KIND: ArtifactKind = ArtifactKind {
        artifact_type: Self::ARTIFACT_TYPE,
        max_manifest_bytes: Self::MAX_BYTES,
        is_single: true,
    };
    /// A shorter file is downloaded as fast as an index.
    pub const MIN_FILE_BYTES: u64 = 1 << 20;

    /// The longest compressed recipe of a file of this size, so that it costs little even if it is useless.
    pub const fn max_recipe_bytes(file_size: u64) -> u64 {
        const LEAST: u64 = 64 << 10;
        if file_size / 100 > LEAST { file_size / 100 } else { LEAST }
    }

    /// The longest recipe that is decompressed: 25,000 tensors.
    pub const MAX_UNPACKED_BYTES: u64 = 8 << 20;

    /// The bytes of the index of a model, for files and their compressed recipes.
    ///
    /// # Errors
    /// [`TensorIndexError::Artifact`] if they cannot be written as JSON.
    pub fn compose(
        subject: &Descriptor,
        recipes: &[(Digest, Descriptor)],
    ) -> Result<Vec<u8>, TensorIndexError> {
        let layer = |(file, recipe): &(Digest, Descriptor)| {
            let annotations = [(Self::FILE_ANNOTATION.to_owned(), Value::from(file.to_string()))];
            Entry::new(recipe).annotated(annotations.into())
        };
        let layers = recipes.iter().map(layer).collect();
        Ok(Artifact::compose(&Self::KIND, subject, layers, None)?)
    }

    /// Checks the bytes of an index of the manifest `subject`.
    ///
    /// # Errors
    /// [`TensorIndexError`] if it is of another type or another manifest, or has no recipe.
    pub fn parse(raw: &[u8], subject: Digest) -> Result<Self, TensorIndexError> {
        let artifact = Artifact::parse(raw, &Self::KIND, subject)?;
        Self::of_layers(artifact.layers)
    }

    /// The recipes among the layers of the model's own manifest; empty if it has none.
    pub fn in_manifest(manifest: &Manifest) -> Self {
        let is_recipe = |layer: &Descriptor| layer.media_type.as_str() == Self::RECIPE_TYPE;
        if !manifest.layers().iter().any(is_recipe) {
            return Self::default();
        }
        let artifact: Option<Artifact> = serde_json::from_slice(manifest.raw()).ok();
        artifact.and_then(|artifact| Self::of_layers(artifact.layers).ok()).unwrap_or_default()
    }

    fn of_layers(layers: Vec<Entry>) -> Result<Self, TensorIndexError> {
        let recipes = layers.into_iter().filter(|layer| layer.media_type.as_str() == Self::RECIPE_TYPE);
        let files: BTreeMap<_, _> = recipes
            .filter_map(|layer| {
                let file = layer.annotations.as_ref()?.get(Self::FILE_ANNOTATION)?.as_str()?.parse().ok()?;
                Some((file, layer.into_descriptor()))
            })
            .collect();
        if files.is_empty() { Err(TensorIndexError::NoRecipes) } else { Ok(Self { files }) }
    }

    pub fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    /// The compressed recipe of a file.
    pub fn recipe(&self, file: Digest) -> Option<&Descriptor> {
        self.files.get(&file)
    }
}

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TensorIndexError {
    #[error("tensor index: {0}")]
    Artifact(#[from] ArtifactError),
    #[error("tensor index: no recipes in it")]
    NoRecipes,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::descriptor::MediaType;

    fn descriptor(content: &str, media_type: &str) -> Descriptor {
        let media_type = MediaType::new(media_type);
        Descriptor { media_type, digest: Digest::of(content.as_bytes()), size: content.len() as u64 }
    }

    fn recipe() -> Descriptor {
        descriptor("recipe", TensorIndex::RECIPE_TYPE)
    }

    fn index_of(subject: &str) -> Vec<u8> {
        let subject = descriptor(subject, MediaType::DOCKER_MANIFEST);
        TensorIndex::compose(&subject, &[(Digest::of(b"file"), recipe())]).unwrap()
    }

    #[test]
    fn composed_index_is_a_manifest_and_names_its_subject() {
        let raw = index_of("model");
        let index = TensorIndex::parse(&raw, Digest::of(b"model")).unwrap();
        assert_eq!(index.recipe(Digest::of(b"file")), Some(&recipe()));
        assert_eq!(index.recipe(Digest::of(b"another")), None);
        let manifest = Manifest::parse(raw.clone()).unwrap();
        assert_eq!((manifest.layers(), manifest.config().size), (&[recipe()][..], 2));
        let json: Value = serde_json::from_slice(&raw).unwrap();
        assert_eq!(json["subject"]["digest"], Digest::of(b"model").to_string());
        assert_eq!(json["artifactType"], TensorIndex::ARTIFACT_TYPE);
        // As an extra layer of a model it has the same form.
        assert_eq!(TensorIndex::in_manifest(&manifest), index);
    }

    #[test]
    fn index_of_another_manifest_or_type_is_refused() {
        let (raw, own) = (index_of("model"), Digest::of(b"model"));
        let other = TensorIndex::parse(&raw, Digest::of(b"other"));
        assert!(matches!(other, Err(TensorIndexError::Artifact(ArtifactError::Subject { .. }))));
        let changed = |from: &str, to: &str| {
            let text = String::from_utf8(raw.clone()).unwrap();
            assert!(text.contains(from), "{text}");
            TensorIndex::parse(text.replace(from, to).as_bytes(), own)
        };
        assert!(matches!(
            changed("\"subject\"", "\"object\""),
            Err(TensorIndexError::Artifact(ArtifactError::Subject { .. }))
        ));
        assert!(matches!(
            changed("tensor-index", "sbom"),
            Err(TensorIndexError::Artifact(ArtifactError::Kind { .. }))
        ));
        assert!(matches!(changed("file.digest", "file"), Err(TensorIndexError::NoRecipes)));
        assert!(matches!(changed("recipe.v1", "recipe.v9"), Err(TensorIndexError::NoRecipes)));
        assert!(matches!(
            changed("sha256:", "sha256:../"),
            Err(TensorIndexError::Artifact(ArtifactError::Json(_)))
        ));
    }
}
