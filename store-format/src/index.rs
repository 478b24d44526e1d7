//! Image indexes: a registry's list of several manifests under one name, and the list of the models in an OCI image layout,
//! which is a folder or an archive.
//!
//! Sources: the OCI image index and image layout, and Docker's `manifest.list.v2+json`. blobd follows an index of a registry
//! to the manifest that is a model, and refuses it if that is ambiguous.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::descriptor::{Descriptor, MediaType};
use crate::digest::Digest;
use crate::json_error::reason;
use crate::manifest::Manifest;
use crate::signature::Bundle;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ManifestIndex {
    entries: Vec<Entry>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Entry {
    manifest: Descriptor,
    artifact_type: Option<MediaType>,
    /// `linux/amd64`, …
    platform: Option<String>,
    annotations: BTreeMap<String, String>,
}

/// A model of an image layout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayoutModel {
    pub manifest: Descriptor,
    /// Its whole name, as containerd writes it.
    pub name: Option<String>,
    /// Its tag, or another text that distinguishes it from the other models of the layout.
    pub ref_name: Option<String>,
}

/// A signature of a model of an image layout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayoutSignature {
    /// Its manifest, whose subject is that of the model.
    pub manifest: Descriptor,
    /// The digest of its bundle. Only the layouts that blobd writes name it: it says what follows in a stream.
    pub bundle: Option<Digest>,
}

impl LayoutSignature {
    const BUNDLE: &str = "vnd.blobd.bundle.digest";
}

impl LayoutModel {
    const NAME: &str = "io.containerd.image.name";
    const REF_NAME: &str = "org.opencontainers.image.ref.name";

    fn annotations(&self) -> BTreeMap<&'static str, &str> {
        let named = [(Self::NAME, &self.name), (Self::REF_NAME, &self.ref_name)];
        named.into_iter().filter_map(|(key, value)| Some((key, value.as_deref()?))).collect()
    }
}

impl ManifestIndex {
    /// The path of the index in an image layout.
    pub const LAYOUT_PATH: &str = "index.json";
    /// The path of the file that marks a folder as an image layout.
    pub const LAYOUT_MARKER_PATH: &str = "oci-layout";
    /// Its content.
    pub const LAYOUT_MARKER: &str = r#"{"imageLayoutVersion":"1.0.0"}"#;

    /// The annotation with the digest of the index without annotations. Everything else in a layout is named by its digest.
    const LAYOUT_SUM: &str = "vnd.blobd.index.digest";

    /// The path of a file with this digest in an image layout.
    #[must_use]
    pub fn layout_blob_path(digest: Digest) -> String {
        format!("blobs/sha256/{}", digest.to_hex())
    }

    /// The index of an image layout with these models.
    ///
    /// # Errors
    /// [`IndexError::TooMany`] when it could not be read again.
    pub fn compose_layout(
        models: &[LayoutModel],
        signatures: &[LayoutSignature],
    ) -> Result<Vec<u8>, IndexError> {
        let found = models.len().saturating_add(signatures.len());
        if found > MAX_ENTRIES {
            return Err(IndexError::TooMany { found });
        }
        let entry = |model: &LayoutModel| {
            let Descriptor { media_type, digest, size } = &model.manifest;
            serde_json::json!({
                "mediaType": media_type,
                "digest": digest,
                "size": size,
                "annotations": model.annotations(),
            })
        };
        let signature = |LayoutSignature { manifest, bundle }: &LayoutSignature| {
            let Descriptor { media_type, digest, size } = manifest;
            serde_json::json!({
                "mediaType": media_type,
                "digest": digest,
                "size": size,
                "artifactType": Bundle::MEDIA_TYPE,
                "annotations": bundle.map(|digest| (LayoutSignature::BUNDLE, digest)).into_iter().collect::<BTreeMap<_, _>>(),
            })
        };
        let manifests: Vec<_> = models.iter().map(entry).chain(signatures.iter().map(signature)).collect();
        let mut index = serde_json::json!({
            "schemaVersion": 2,
            "mediaType": MediaType::OCI_INDEX,
            "manifests": manifests,
        });
        let sum = Digest::of(&serde_json::to_vec(&index)?);
        if let Some(index) = index.as_object_mut() {
            index.insert("annotations".to_owned(), serde_json::json!({ Self::LAYOUT_SUM: sum }));
        }
        Ok(serde_json::to_vec(&index)?)
    }

    /// Reads the models of an image layout, and its signatures.
    ///
    /// # Errors
    /// Also [`IndexError::Sum`] for an index that was changed after [`Self::compose_layout`], such as in a name.
    pub fn parse_layout(raw: &[u8]) -> Result<(Vec<LayoutModel>, Vec<LayoutSignature>), IndexError> {
        let mut index = Self::parse(raw)?;
        let mut value: serde_json::Value = serde_json::from_slice(raw)?;
        let annotations = value.as_object_mut().and_then(|index| index.remove("annotations"));
        let expected = annotations.as_ref().and_then(|all| all.get(Self::LAYOUT_SUM)?.as_str()?.parse().ok());
        let found = Digest::of(&serde_json::to_vec(&value)?);
        match expected {
            Some(expected) if expected != found => Err(IndexError::Sum { expected, found }),
            // Other programs write none.
            _ => {
                let signatures = index.take_signatures();
                Ok((index.into_layout_models()?, signatures))
            }
        }
    }

    /// Removes the signatures from the entries of an image layout.
    fn take_signatures(&mut self) -> Vec<LayoutSignature> {
        let is_signature = |entry: &mut Entry| {
            entry.artifact_type.as_ref().is_some_and(|kind| kind.as_str() == Bundle::MEDIA_TYPE)
        };
        let found = self.entries.extract_if(.., is_signature);
        let signature = |entry: Entry| LayoutSignature {
            bundle: entry.annotations.get(LayoutSignature::BUNDLE).and_then(|digest| digest.parse().ok()),
            manifest: entry.manifest,
        };
        found.map(signature).collect()
    }

    /// All models of an image layout.
    ///
    /// # Errors
    /// [`IndexError::TooLong`] for a manifest whose declared size is above the limit.
    fn into_layout_models(self) -> Result<Vec<LayoutModel>, IndexError> {
        let model = |mut entry: Entry| {
            let manifest = entry.manifest;
            if manifest.size > Manifest::MAX_BYTES {
                return Err(IndexError::TooLong { digest: manifest.digest, size: manifest.size });
            }
            let mut annotation = |key| entry.annotations.remove(key);
            let (name, ref_name) = (annotation(LayoutModel::NAME), annotation(LayoutModel::REF_NAME));
            Ok(LayoutModel { manifest, name, ref_name })
        };
        self.entries.into_iter().map(model).collect()
    }

    /// Checks a registry's bytes.
    pub fn parse(raw: &[u8]) -> Result<Self, IndexError> {
        let index: RawIndex = serde_json::from_slice(raw)?;
        if index.manifests.len() > MAX_ENTRIES {
            return Err(IndexError::TooMany { found: index.manifests.len() });
        }
        let models = index.manifests.into_iter().filter(|entry| !entry.is_attestation());
        Ok(Self { entries: models.map(RawEntry::into_entry).collect() })
    }

    /// The manifest of the model: the only manifest, or the only one with a model's media type.
    ///
    /// # Errors
    /// [`IndexError::Empty`], [`IndexError::Ambiguous`], and [`IndexError::TooLong`] when its
    /// declared size is above the limit.
    pub fn model(&self) -> Result<&Descriptor, IndexError> {
        let mut models = self.entries.iter().filter(|entry| entry.is_model());
        let only = match (self.entries.as_slice(), models.next(), models.next()) {
            ([], ..) => return Err(IndexError::Empty),
            ([only], ..) | (_, Some(only), None) => only,
            _ => return Err(IndexError::Ambiguous { entries: self.listed() }),
        };
        match &only.manifest {
            manifest if manifest.size > Manifest::MAX_BYTES => {
                Err(IndexError::TooLong { digest: manifest.digest, size: manifest.size })
            }
            manifest => Ok(manifest),
        }
    }

    fn listed(&self) -> String {
        let mut listed: Vec<_> = self.entries.iter().take(MAX_LISTED).map(Entry::describe).collect();
        let more = self.entries.len().saturating_sub(MAX_LISTED);
        if more > 0 {
            listed.push(format!("and {more} more"));
        }
        listed.join(", ")
    }
}

impl Entry {
    fn is_model(&self) -> bool {
        self.artifact_type.as_ref().is_some_and(MediaType::is_of_model)
    }

    fn describe(&self) -> String {
        let kind = self.artifact_type.as_ref().map(MediaType::as_str).or(self.platform.as_deref());
        let kind: String = kind.unwrap_or("no type").chars().filter(|c| !c.is_control()).take(60).collect();
        format!("{} ({kind})", self.manifest.digest)
    }
}

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IndexError {
    #[error("index: {}", reason(.0))]
    Json(#[from] serde_json::Error),
    #[error("index: too many manifests: expected at most {MAX_ENTRIES}, found {found}")]
    TooMany { found: usize },
    #[error("index: it was changed: expected {expected}, found {found}")]
    Sum { expected: Digest, found: Digest },
    #[error("index: no manifests in it")]
    Empty,
    #[error("index: several manifests, name one with @: {entries}")]
    Ambiguous { entries: String },
    #[error(
        "index: manifest {digest}: too long: expected at most {} bytes, found {size}",
        Manifest::MAX_BYTES
    )]
    TooLong { digest: Digest, size: u64 },
}

/// Real indexes have one manifest per platform and a few attestations, fewer than 100.
const MAX_ENTRIES: usize = 1024;
const MAX_LISTED: usize = 8;

#[derive(Deserialize)]
struct RawIndex {
    manifests: Vec<RawEntry>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RawEntry {
    media_type: MediaType,
    digest: Digest,
    size: u64,
    artifact_type: Option<MediaType>,
    platform: Option<Platform>,
    annotations: Option<BTreeMap<String, String>>,
}

#[derive(Deserialize)]
struct Platform {
    os: String,
    architecture: String,
}

impl RawEntry {
    /// Whether the entry is a build attestation, not an image.
    fn is_attestation(&self) -> bool {
        self.annotations.as_ref().is_some_and(|all| all.contains_key("vnd.docker.reference.type"))
    }

    fn into_entry(self) -> Entry {
        let Self { media_type, digest, size, artifact_type, platform, annotations } = self;
        let annotations = annotations.unwrap_or_default();
        let platform = platform.map(|Platform { os, architecture }| format!("{os}/{architecture}"));
        Entry { manifest: Descriptor { media_type, digest, size }, artifact_type, platform, annotations }
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::option;
    use proptest::prelude::*;
    use serde_json::{Value as Json, json};

    use super::*;

    const MODEL: &str = "application/vnd.cncf.model.manifest.v1+json";

    fn entry(content: &str, more: &Json) -> Json {
        let mut entry = json!({ "mediaType": MediaType::OCI_MANIFEST, "digest": Digest::of(content.as_bytes()), "size": 7 });
        entry.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        entry
    }

    fn model(entries: &[Json]) -> Result<Digest, IndexError> {
        let raw = json!({ "schemaVersion": 2, "manifests": entries }).to_string();
        let index = ManifestIndex::parse(raw.as_bytes())?;
        index.model().map(|manifest| manifest.digest)
    }

    #[test]
    fn only_manifest_is_the_model() {
        let attestation = json!({ "annotations": { "vnd.docker.reference.type": "attestation-manifest" } });
        let entries = [entry("a", &json!({})), entry("b", &attestation)];
        assert_eq!(model(&entries).unwrap(), Digest::of(b"a"));
    }

    #[test]
    fn the_only_model_is_chosen() {
        let linux = json!({ "platform": { "os": "linux", "architecture": "amd64" } });
        let (artifact, other) = (json!({ "artifactType": MODEL }), entry("a", &linux));
        assert_eq!(model(&[other.clone(), entry("b", &artifact)]).unwrap(), Digest::of(b"b"));
        let error = model(&[entry("b", &artifact), entry("c", &artifact), other]).unwrap_err().to_string();
        for listed in [MODEL, "linux/amd64", &Digest::of(b"c").to_string()] {
            assert!(error.contains(listed), "{error}");
        }
    }

    #[test]
    fn index_of_a_layout_is_read_as_it_was_composed() {
        let model = |content: &str, name: Option<&str>| LayoutModel {
            manifest: Descriptor {
                media_type: MediaType::new(MediaType::OCI_MANIFEST),
                digest: Digest::of(content.as_bytes()),
                size: 7,
            },
            name: name.map(str::to_owned),
            ref_name: Some("q4".to_owned()),
        };
        let models = [model("a", Some("registry.example/team/a:q4")), model("b", None)];
        let signature = LayoutSignature {
            manifest: Descriptor { digest: Digest::of(b"s"), ..models[0].manifest.clone() },
            bundle: Some(Digest::of(b"b")),
        };
        let expected = (models.to_vec(), vec![signature.clone()]);
        let raw = ManifestIndex::compose_layout(&models, &[signature]).unwrap();
        assert_eq!(ManifestIndex::parse_layout(&raw).unwrap(), expected);
        let text = String::from_utf8(raw).unwrap();
        let renamed = text.replace("team/a:q4", "team/a:q5");
        assert!(matches!(ManifestIndex::parse_layout(renamed.as_bytes()), Err(IndexError::Sum { .. })));
        // Of another program.
        let without = text.replace(ManifestIndex::LAYOUT_SUM, "x");
        assert_eq!(ManifestIndex::parse_layout(without.as_bytes()).unwrap(), expected);
        let many = vec![model("a", None); MAX_ENTRIES + 1];
        assert!(matches!(ManifestIndex::compose_layout(&many, &[]), Err(IndexError::TooMany { .. })));
    }

    proptest! {
        #[test]
        fn any_names_and_signatures_are_read_as_they_were_composed(
            models in vec((any::<u64>(), option::of(".*"), option::of(".*")), 0..4),
            signatures in vec((any::<u64>(), option::of(any::<u64>())), 0..4),
        ) {
            let digest = |seed: u64| Digest::of(&seed.to_le_bytes());
            let manifest = |seed: u64| Descriptor {
                media_type: MediaType::new(MediaType::OCI_MANIFEST),
                digest: digest(seed),
                size: seed % Manifest::MAX_BYTES,
            };
            let model = |(seed, name, ref_name)| LayoutModel { manifest: manifest(seed), name, ref_name };
            let models: Vec<_> = models.into_iter().map(model).collect();
            let signature = |(seed, bundle): (u64, Option<u64>)| LayoutSignature {
                manifest: manifest(seed),
                bundle: bundle.map(digest),
            };
            let signatures: Vec<_> = signatures.into_iter().map(signature).collect();
            let raw = ManifestIndex::compose_layout(&models, &signatures).unwrap();
            prop_assert_eq!(ManifestIndex::parse_layout(&raw).unwrap(), (models, signatures));
        }
    }

    #[test]
    fn invalid_index_is_refused() {
        assert!(matches!(model(&[]), Err(IndexError::Empty)));
        assert!(matches!(ManifestIndex::parse(b"{}"), Err(IndexError::Json(_))));
        let huge = entry("a", &json!({ "size": 1_u64 << 40 }));
        assert!(matches!(model(&[huge]), Err(IndexError::TooLong { .. })));
        let traversal = entry("a", &json!({ "digest": "sha256:../../x" }));
        assert!(matches!(model(&[traversal]), Err(IndexError::Json(_))));
        assert!(matches!(model(&vec![entry("a", &json!({})); 2000]), Err(IndexError::TooMany { .. })));
        let long = model(&vec![entry("a", &json!({})); 200]).unwrap_err().to_string();
        assert!(long.len() < 1500 && long.contains("and 192 more"), "{long}");
    }
}
