//! Deltas: what a machine lacks of a model, when it has similar ones.
//!
//! A delta is an OCI artifact. Its layers are the manifest of the model, the recipes of the files that are to be rebuilt, and
//! the blobs that the other machine lacks: files, tensors, and headers, which may be [patches](patch) of the header of a file
//! that it has. The layers have media types that no other program opens, so that it copies them as they are.
//! `docs/OPERATIONS.md` specifies them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::descriptor::{Descriptor, MediaType};
use crate::digest::Digest;
use crate::json_error::reason;
use crate::manifest::Manifest;

pub mod patch;

/// The parts of a delta.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delta {
    /// The layer with the manifest of the model.
    pub manifest: Descriptor,
    /// The recipes, by the digest of the file that each rebuilds. They list no tensors.
    pub recipes: BTreeMap<Digest, Descriptor>,
    /// Blobs, and files that are stored as one.
    pub blobs: BTreeMap<Digest, Descriptor>,
    /// Headers as patches, by the digest of the header.
    pub patches: BTreeMap<Digest, HeaderPatch>,
    /// The names of the models that the other machine has.
    pub given: Vec<String>,
}

/// A header that is made from that of another file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeaderPatch {
    /// The layer with the patch.
    pub layer: Descriptor,
    /// The length of the header.
    pub size: u64,
    /// The file that has the other header.
    pub base: Digest,
}

impl Delta {
    /// The `artifactType` of its manifest.
    pub const ARTIFACT_TYPE: &str = "application/vnd.blobd.delta.v1";
    /// The configuration of an artifact without one, by OCI's specification.
    pub const CONFIG: &[u8] = b"{}";
    const MANIFEST_TYPE: &str = "application/vnd.blobd.model-manifest.v1";
    const RECIPE_TYPE: &str = "application/vnd.blobd.recipe.v1";
    const BLOB_TYPE: &str = "application/vnd.blobd.blob.v1";
    const PATCH_TYPE: &str = "application/vnd.blobd.header-patch.v1";
    const FILE: &str = "vnd.blobd.file.digest";
    const HEADER: &str = "vnd.blobd.header.digest";
    const HEADER_SIZE: &str = "vnd.blobd.header.size";
    const GIVEN: &str = "vnd.blobd.given";
    /// The most bytes of all headers that are made by patches.
    const MAX_HEADERS_BYTES: u64 = 256 << 20;
    /// The most names of models that the other machine has.
    pub const MAX_GIVEN: usize = 64;

    /// The layer with the manifest of a model.
    pub fn manifest_layer(manifest: &Manifest) -> Descriptor {
        layer(Self::MANIFEST_TYPE, manifest.digest(), manifest.raw().len() as u64)
    }

    /// The layer with a recipe.
    pub fn recipe_layer(recipe: &[u8]) -> Descriptor {
        layer(Self::RECIPE_TYPE, Digest::of(recipe), recipe.len() as u64)
    }

    /// The layer with a blob.
    pub fn blob_layer(digest: Digest, size: u64) -> Descriptor {
        layer(Self::BLOB_TYPE, digest, size)
    }

    /// The layer with a patch.
    pub fn patch_layer(patch: &[u8]) -> Descriptor {
        layer(Self::PATCH_TYPE, Digest::of(patch), patch.len() as u64)
    }

    /// The layers in the order of the manifest, with annotations.
    fn layers(&self) -> Vec<Layer> {
        let mut layers = vec![Layer::new(&self.manifest, [])];
        layers.extend(
            self.recipes.iter().map(|(file, recipe)| Layer::new(recipe, [(Self::FILE, file.to_string())])),
        );
        layers.extend(self.patches.iter().map(|(header, patch)| {
            let HeaderPatch { layer, size, base } = patch;
            let header = (Self::HEADER, header.to_string());
            Layer::new(layer, [header, (Self::HEADER_SIZE, size.to_string()), (Self::FILE, base.to_string())])
        }));
        layers.extend(self.blobs.values().map(|blob| Layer::new(blob, [])));
        layers
    }

    /// The bytes of its manifest.
    ///
    /// # Errors
    /// [`DeltaError`] if it could not be read again: it has too many parts.
    pub fn compose(&self) -> Result<Manifest, DeltaError> {
        let config = layer("application/vnd.oci.empty.v1+json", Digest::of(Self::CONFIG), 2);
        let artifact = Artifact {
            schema_version: 2,
            media_type: MediaType::new(MediaType::OCI_MANIFEST),
            artifact_type: Some(MediaType::new(Self::ARTIFACT_TYPE)),
            config: Layer::new(&config, []),
            layers: self.layers(),
            annotations: BTreeMap::from([(Self::GIVEN.to_owned(), self.given.join(" "))]),
        };
        Ok(Manifest::parse(serde_json::to_vec(&artifact)?)?)
    }

    /// Reads the parts; `None` for the manifest of anything else.
    ///
    /// # Errors
    /// [`DeltaError`] for a delta with a layer of another kind, or without what its kind needs.
    pub fn in_manifest(manifest: &Manifest) -> Result<Option<Self>, DeltaError> {
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Typed {
            artifact_type: Option<MediaType>,
        }
        let typed: Typed = serde_json::from_slice(manifest.raw())?;
        if typed.artifact_type.is_none_or(|kind| kind.as_str() != Self::ARTIFACT_TYPE) {
            return Ok(None);
        }
        let artifact: Artifact = serde_json::from_slice(manifest.raw())?;
        let mut layers = artifact.layers.into_iter();
        let first = layers.next().filter(|first| first.media_type.as_str() == Self::MANIFEST_TYPE);
        let first = first.ok_or(DeltaError::NoManifest)?;
        let given = artifact.annotations.get(Self::GIVEN).map(String::as_str).unwrap_or_default();
        let given = given.split_whitespace().take(Self::MAX_GIVEN).map(str::to_owned).collect();
        let manifest = first.descriptor();
        let (recipes, blobs, patches) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        let mut delta = Self { manifest, recipes, blobs, patches, given };
        layers.try_for_each(|layer| delta.add(&layer))?;
        // All of them are in memory together.
        let size = delta.patches.values().fold(0, |sum: u64, patch| sum.saturating_add(patch.size));
        if size > Self::MAX_HEADERS_BYTES {
            return Err(DeltaError::LongHeaders { size });
        }
        Ok(Some(delta))
    }

    fn add(&mut self, layer: &Layer) -> Result<(), DeltaError> {
        let descriptor = layer.descriptor();
        match layer.media_type.as_str() {
            Self::BLOB_TYPE => {
                self.blobs.insert(descriptor.digest, descriptor);
            }
            Self::RECIPE_TYPE => {
                self.recipes.insert(layer.digest_in(Self::FILE)?, descriptor);
            }
            Self::PATCH_TYPE => {
                let size = layer.annotations.get(Self::HEADER_SIZE).and_then(|size| size.parse().ok());
                let size = size.ok_or(DeltaError::Annotation { key: Self::HEADER_SIZE })?;
                if size > patch::MAX_BYTES {
                    return Err(DeltaError::LongHeader { size });
                }
                let patch = HeaderPatch { layer: descriptor, size, base: layer.digest_in(Self::FILE)? };
                self.patches.insert(layer.digest_in(Self::HEADER)?, patch);
            }
            other => return Err(DeltaError::Layer { found: other.chars().take(100).collect() }),
        }
        Ok(())
    }
}

fn layer(media_type: &str, digest: Digest, size: u64) -> Descriptor {
    Descriptor { media_type: MediaType::new(media_type), digest, size }
}

/// Why a manifest is not that of a delta.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeltaError {
    #[error("delta: {}", reason(.0))]
    Json(#[from] serde_json::Error),
    #[error("delta: {0}")]
    Manifest(#[from] crate::manifest::ManifestError),
    #[error("delta: its first layer is not the manifest of a model")]
    NoManifest,
    #[error("delta: a layer of an unknown type: {found}; a newer blobd may read it")]
    Layer { found: String },
    #[error("delta: a layer without a valid annotation {key}")]
    Annotation { key: &'static str },
    #[error("delta: header too long: expected at most {} bytes, found {size}", patch::MAX_BYTES)]
    LongHeader { size: u64 },
    #[error("delta: headers too long: expected at most {} bytes, found {size}", Delta::MAX_HEADERS_BYTES)]
    LongHeaders { size: u64 },
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Artifact {
    schema_version: u32,
    media_type: MediaType,
    #[serde(skip_serializing_if = "Option::is_none")]
    artifact_type: Option<MediaType>,
    config: Layer,
    layers: Vec<Layer>,
    #[serde(default)]
    annotations: BTreeMap<String, String>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Layer {
    media_type: MediaType,
    digest: Digest,
    size: u64,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    annotations: BTreeMap<String, String>,
}

impl Layer {
    fn new<const N: usize>(descriptor: &Descriptor, annotations: [(&str, String); N]) -> Self {
        let Descriptor { media_type, digest, size } = descriptor.clone();
        let annotations = annotations.into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
        Self { media_type, digest, size, annotations }
    }

    fn descriptor(&self) -> Descriptor {
        Descriptor { media_type: self.media_type.clone(), digest: self.digest, size: self.size }
    }

    fn digest_in(&self, key: &'static str) -> Result<Digest, DeltaError> {
        let digest = self.annotations.get(key).and_then(|digest| digest.parse().ok());
        digest.ok_or(DeltaError::Annotation { key })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn delta() -> Delta {
        let blob = |content: &[u8]| {
            let digest = Digest::of(content);
            (digest, Delta::blob_layer(digest, content.len() as u64))
        };
        let patch = HeaderPatch { layer: Delta::patch_layer(b"patch"), size: 9, base: Digest::of(b"base") };
        Delta {
            manifest: layer(Delta::MANIFEST_TYPE, Digest::of(b"manifest"), 8),
            recipes: BTreeMap::from([(Digest::of(b"file"), Delta::recipe_layer(b"recipe"))]),
            blobs: BTreeMap::from([blob(b"one"), blob(b"two")]),
            patches: BTreeMap::from([(Digest::of(b"header"), patch)]),
            given: vec!["a:q4".to_owned(), "b:q4".to_owned()],
        }
    }

    #[test]
    fn composed_delta_is_read_again() {
        let manifest = delta().compose().unwrap();
        assert_eq!(Delta::in_manifest(&manifest).unwrap(), Some(delta()));
        assert_eq!(manifest.layers().len(), 5);
    }

    #[test]
    fn other_manifests_are_none_and_wrong_layers_are_refused() {
        let text = String::from_utf8(delta().compose().unwrap().raw().to_vec()).unwrap();
        let read = |text: String| Delta::in_manifest(&Manifest::parse(text.into_bytes()).unwrap());
        assert_eq!(read(text.replace(Delta::ARTIFACT_TYPE, "application/other")).unwrap(), None);
        let refused = |from: &str, to: &str| read(text.replace(from, to)).unwrap_err().to_string();
        assert!(refused(Delta::BLOB_TYPE, "application/new").contains("unknown type: application/new"));
        assert!(refused(Delta::MANIFEST_TYPE, Delta::BLOB_TYPE).contains("first layer"));
        assert!(refused(Delta::FILE, "x").contains(Delta::FILE));
        assert!(refused("header.size\":\"9\"", "header.size\":\"-9\"").contains(Delta::HEADER_SIZE));
        assert!(refused("header.size\":\"9\"", "header.size\":\"99999999999\"").contains("too long"));
    }
}
