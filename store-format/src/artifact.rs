//! Artifacts beside a model at its registry, by OCI's specification 1.1: manifests whose `subject` is the model's manifest,
//! which keeps its digest.
//!
//! A registry lists them with what refers to the model; where it has no such list, an image index under a tag made of the
//! model's digest is the list ([`Referrers`]). Lists and artifacts come from registries, so what they say is compared with
//! the digest of the model, and everything has a limit.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::descriptor::{Descriptor, MediaType};
use crate::digest::Digest;
use crate::json_error::reason;

/// What an artifact is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArtifactKind {
    pub artifact_type: &'static str,
    /// The longest manifest that is read.
    pub max_manifest_bytes: u64,
    /// Whether a model has only one of them: then a new one replaces an earlier one in a list.
    pub is_single: bool,
}

impl ArtifactKind {
    /// The configuration of an artifact without one, by OCI's specification.
    pub const EMPTY_CONFIG: &[u8] = b"{}";
    const EMPTY_CONFIG_TYPE: &str = "application/vnd.oci.empty.v1+json";
}

/// The manifests that refer to another one, as an image index lists them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Referrers {
    candidates: Vec<Descriptor>,
}

impl Referrers {
    /// The longest list read.
    pub const MAX_BYTES: u64 = 256 << 10;
    /// How many manifests are looked at whose type the list does not say.
    const MAX_UNTYPED: usize = 2;

    /// The tag of the list at a registry without an interface for it.
    pub fn fallback_tag(subject: Digest) -> String {
        subject.to_string().replace(':', "-")
    }

    /// Reads the artifacts of a kind from an image index.
    ///
    /// # Errors
    /// [`ArtifactError::Json`] for anything else: some registries answer the tag with the model's own manifest.
    pub fn parse(raw: &[u8], kind: &ArtifactKind) -> Result<Self, ArtifactError> {
        let list: List = serde_json::from_slice(raw)?;
        let is_short = |entry: &Entry| entry.size <= kind.max_manifest_bytes;
        let (typed, others): (Vec<_>, Vec<_>) =
            list.manifests.into_iter().filter(is_short).partition(|entry| entry.artifact_type.is_some());
        let is_of_kind = |entry: &Entry| {
            entry.artifact_type.as_ref().is_some_and(|found| found.as_str() == kind.artifact_type)
        };
        let typed = typed.into_iter().filter(is_of_kind);
        // Some programs write the list without types.
        let candidates = typed.chain(others.into_iter().take(Self::MAX_UNTYPED));
        Ok(Self { candidates: candidates.map(Entry::into_descriptor).collect() })
    }

    /// The manifests that may be artifacts of the kind, the most likely first.
    pub fn candidates(&self) -> &[Descriptor] {
        &self.candidates
    }

    /// The list `raw` with this artifact; everything else in it stays, except for earlier ones that it replaces. `None` if it
    /// is listed already.
    ///
    /// # Errors
    /// [`ArtifactError::Json`] if `raw` is not an image index.
    pub fn with_artifact(
        raw: Option<&[u8]>,
        kind: &ArtifactKind,
        artifact: &Descriptor,
    ) -> Result<Option<Vec<u8>>, ArtifactError> {
        let mut list = match raw {
            Some(raw) => {
                let _checked: List = serde_json::from_slice(raw)?;
                serde_json::from_slice(raw)?
            }
            None => serde_json::json!({
                "schemaVersion": 2,
                "mediaType": MediaType::OCI_INDEX,
                "manifests": [],
            }),
        };
        let Some(Value::Array(entries)) = list.get_mut("manifests") else { return Ok(None) };
        let text = artifact.digest.to_string();
        if entries.iter().any(|entry| entry.get("digest").is_some_and(|digest| *digest == text)) {
            return Ok(None);
        }
        if kind.is_single {
            let is_other =
                |entry: &Value| entry.get("artifactType").is_none_or(|of| *of != kind.artifact_type);
            entries.retain(is_other);
        }
        let own = Entry { artifact_type: Some(MediaType::new(kind.artifact_type)), ..Entry::new(artifact) };
        entries.push(serde_json::to_value(own)?);
        Ok(Some(serde_json::to_vec(&list)?))
    }
}

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ArtifactError {
    #[error("{}", reason(.0))]
    Json(#[from] serde_json::Error),
    #[error("wrong type: expected {expected}")]
    Kind { expected: &'static str },
    #[error("wrong subject: expected {expected}, found {found}")]
    Subject { expected: Digest, found: String },
    #[error("wrong number of layers: expected {expected}, found {found}")]
    Layers { expected: usize, found: usize },
}

/// The manifest of an artifact.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Artifact {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    schema_version: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    media_type: Option<MediaType>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    artifact_type: Option<MediaType>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    config: Option<Entry>,
    pub(crate) layers: Vec<Entry>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    subject: Option<Entry>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    annotations: Option<BTreeMap<String, Value>>,
}

impl Artifact {
    pub(crate) fn compose(
        kind: &ArtifactKind,
        subject: &Descriptor,
        layers: Vec<Entry>,
        annotations: Option<BTreeMap<String, Value>>,
    ) -> Result<Vec<u8>, ArtifactError> {
        let config = Descriptor {
            media_type: MediaType::new(ArtifactKind::EMPTY_CONFIG_TYPE),
            digest: Digest::of(ArtifactKind::EMPTY_CONFIG),
            size: ArtifactKind::EMPTY_CONFIG.len() as u64,
        };
        let artifact = Self {
            schema_version: Some(2),
            media_type: Some(MediaType::new(MediaType::OCI_MANIFEST)),
            artifact_type: Some(MediaType::new(kind.artifact_type)),
            config: Some(Entry::new(&config)),
            layers,
            subject: Some(Entry::new(subject)),
            annotations,
        };
        Ok(serde_json::to_vec(&artifact)?)
    }

    /// Checks that the bytes are an artifact of this kind beside the manifest `subject`.
    pub(crate) fn parse(raw: &[u8], kind: &ArtifactKind, subject: Digest) -> Result<Self, ArtifactError> {
        let artifact: Self = serde_json::from_slice(raw)?;
        let config = artifact.config.as_ref().map(|config| &config.media_type);
        let found = artifact.artifact_type.as_ref().or(config);
        if found.is_none_or(|found| found.as_str() != kind.artifact_type) {
            return Err(ArtifactError::Kind { expected: kind.artifact_type });
        }
        match &artifact.subject {
            Some(found) if found.digest == subject => Ok(artifact),
            found => {
                let found =
                    found.as_ref().map_or_else(|| "none".to_owned(), |found| found.digest.to_string());
                Err(ArtifactError::Subject { expected: subject, found })
            }
        }
    }
}

#[derive(Deserialize)]
struct List {
    manifests: Vec<Entry>,
}

/// A descriptor with what the specification allows in it besides.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Entry {
    pub(crate) media_type: MediaType,
    digest: Digest,
    size: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    artifact_type: Option<MediaType>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) annotations: Option<BTreeMap<String, Value>>,
}

impl Entry {
    pub(crate) fn new(Descriptor { media_type, digest, size }: &Descriptor) -> Self {
        let media_type = media_type.clone();
        Self { media_type, digest: *digest, size: *size, artifact_type: None, annotations: None }
    }

    pub(crate) fn annotated(self, annotations: BTreeMap<String, Value>) -> Self {
        Self { annotations: Some(annotations), ..self }
    }

    pub(crate) fn into_descriptor(self) -> Descriptor {
        let Self { media_type, digest, size, .. } = self;
        Descriptor { media_type, digest, size }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const KIND: ArtifactKind =
        ArtifactKind { artifact_type: "application/x.test", max_manifest_bytes: 1000, is_single: true };

    fn descriptor(content: &str) -> Descriptor {
        let media_type = MediaType::new(MediaType::OCI_MANIFEST);
        Descriptor { media_type, digest: Digest::of(content.as_bytes()), size: content.len() as u64 }
    }

    #[test]
    fn list_names_artifacts_of_the_kind_first_and_then_manifests_without_a_type() {
        let entry = |content: &str, kind: Option<&str>| {
            let Descriptor { media_type, digest, size } = descriptor(content);
            let mut entry = json!({ "mediaType": media_type, "digest": digest, "size": size });
            if let Some(kind) = kind {
                entry["artifactType"] = kind.into();
            }
            entry
        };
        let own = Some(KIND.artifact_type);
        let untyped = ["u", "v", "w"].map(|content| entry(content, None));
        let long = entry(&"l".repeat(1001), own);
        let entries = [&untyped[..], &[entry("sbom", Some("x/y")), long, entry("index", own)]].concat();
        let raw = json!({ "schemaVersion": 2, "manifests": entries }).to_string();
        let list = Referrers::parse(raw.as_bytes(), &KIND).unwrap();
        let found: Vec<_> = list.candidates().iter().map(|entry| entry.digest).collect();
        assert_eq!(found, [&b"index"[..], b"u", b"v"].map(Digest::of));
        // Some registries answer the tag with the model itself.
        let manifest = Artifact::compose(&KIND, &descriptor("model"), Vec::new(), None).unwrap();
        assert!(Referrers::parse(&manifest, &KIND).is_err());
    }

    #[test]
    fn artifact_replaces_an_earlier_one_of_a_single_kind_and_nothing_else() {
        let (first, second) = (descriptor("1"), descriptor("2"));
        let with = |raw: Option<&[u8]>, kind: &ArtifactKind, artifact: &Descriptor| {
            Referrers::with_artifact(raw, kind, artifact).unwrap()
        };
        let list = with(None, &KIND, &first).unwrap();
        assert_eq!(with(Some(&list), &KIND, &first), None);
        let mut json: Value = serde_json::from_slice(&list).unwrap();
        json["x-unknown"] = 7.into();
        let signature =
            json!({ "mediaType": "a/b", "digest": Digest::of(b"s"), "size": 1, "artifactType": "c/d" });
        json["manifests"].as_array_mut().unwrap().push(signature);
        let list = json.to_string();
        let digests = |list: &[u8]| {
            let json: Value = serde_json::from_slice(list).unwrap();
            assert_eq!((&json["x-unknown"], &json["mediaType"]), (&7.into(), &MediaType::OCI_INDEX.into()));
            let entries = json["manifests"].as_array().unwrap().iter();
            entries.map(|entry| entry["digest"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
        };
        let [one, other, two] =
            [first.digest, Digest::of(b"s"), second.digest].map(|digest| digest.to_string());
        let replaced = with(Some(list.as_bytes()), &KIND, &second).unwrap();
        assert_eq!(digests(&replaced), [other.clone(), two.clone()]);
        let several = ArtifactKind { is_single: false, ..KIND };
        let added = with(Some(list.as_bytes()), &several, &second).unwrap();
        assert_eq!(digests(&added), [one, other, two]);
        assert!(Referrers::with_artifact(Some(b"{}"), &KIND, &first).is_err());
    }
}
