//! Tensor indexes: manifests beside a model at its registry that list the tensors in its files.
//!
//! A tensor index is an OCI artifact whose `subject` is the model's manifest, which keeps its digest. It has one layer per
//! file: the file's [recipe](crate::recipe), compressed with zstd. `docs/PULLING.md` specifies it. A registry lists
//! the artifact with the manifests that refer to the model; where it has no such list, an image index under a tag made of
//! the model's digest is the list ([`Referrers`]).
//!
//! Nothing in an index is trusted: it is only used to choose what to download, and the digest of the file decides.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::descriptor::{Descriptor, MediaType};
use crate::digest::Digest;
use crate::json_error::reason;
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
    /// The configuration of an artifact without one, by OCI's specification.
    pub const CONFIG: &[u8] = b"{}";
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
    /// [`TensorIndexError::Json`] if they cannot be written as JSON.
    pub fn compose(
        subject: &Descriptor,
        recipes: &[(Digest, Descriptor)],
    ) -> Result<Vec<u8>, TensorIndexError> {
        let layer = |(file, recipe): &(Digest, Descriptor)| Entry {
            annotations: Some(BTreeMap::from([(
                Self::FILE_ANNOTATION.to_owned(),
                Value::from(file.to_string()),
            )])),
            ..Entry::new(recipe)
        };
        let empty = Descriptor {
            media_type: MediaType::new("application/vnd.oci.empty.v1+json"),
            digest: Digest::of(Self::CONFIG),
            size: Self::CONFIG.len() as u64,
        };
        let artifact = Artifact {
            schema_version: Some(2),
            media_type: Some(MediaType::new(MediaType::OCI_MANIFEST)),
            artifact_type: Some(MediaType::new(Self::ARTIFACT_TYPE)),
            config: Some(Entry::new(&empty)),
            layers: recipes.iter().map(layer).collect(),
            subject: Some(Entry::new(subject)),
        };
        Ok(serde_json::to_vec(&artifact)?)
    }

    /// Checks the bytes of an index of the manifest `subject`.
    ///
    /// # Errors
    /// [`TensorIndexError`] if it is of another type or another manifest, or has no recipe.
    pub fn parse(raw: &[u8], subject: Digest) -> Result<Self, TensorIndexError> {
        let artifact: Artifact = serde_json::from_slice(raw)?;
        let config = artifact.config.as_ref().map(|config| &config.media_type);
        let kind = artifact.artifact_type.as_ref().or(config);
        if kind.is_none_or(|kind| kind.as_str() != Self::ARTIFACT_TYPE) {
            return Err(TensorIndexError::Kind);
        }
        match artifact.subject {
            Some(found) if found.digest == subject => {}
            found => {
                let found = found.map_or_else(|| "none".to_owned(), |found| found.digest.to_string());
                return Err(TensorIndexError::Subject { expected: subject, found });
            }
        }
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
    #[error("tensor index: {}", reason(.0))]
    Json(#[from] serde_json::Error),
    #[error("tensor index: wrong type: expected {}", TensorIndex::ARTIFACT_TYPE)]
    Kind,
    #[error("tensor index: wrong subject: expected {expected}, found {found}")]
    Subject { expected: Digest, found: String },
    #[error("tensor index: no recipes in it")]
    NoRecipes,
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

    /// Reads the list from an image index.
    ///
    /// # Errors
    /// [`TensorIndexError::Json`] for anything else: some registries answer the tag with the model's own manifest.
    pub fn parse(raw: &[u8]) -> Result<Self, TensorIndexError> {
        let list: List = serde_json::from_slice(raw)?;
        let is_short = |entry: &Entry| entry.size <= TensorIndex::MAX_BYTES;
        let (typed, others): (Vec<_>, Vec<_>) =
            list.manifests.into_iter().filter(is_short).partition(|entry| entry.artifact_type.is_some());
        let is_index = |entry: &Entry| {
            entry.artifact_type.as_ref().is_some_and(|kind| kind.as_str() == TensorIndex::ARTIFACT_TYPE)
        };
        let typed = typed.into_iter().filter(is_index);
        // Some programs write the list without types.
        let candidates = typed.chain(others.into_iter().take(Self::MAX_UNTYPED));
        Ok(Self { candidates: candidates.map(Entry::into_descriptor).collect() })
    }

    /// The manifests that may be tensor indexes, the most likely first.
    pub fn candidates(&self) -> &[Descriptor] {
        &self.candidates
    }

    /// The list `raw` with this tensor index instead of earlier ones; everything else in it stays. `None` if it is listed
    /// already.
    ///
    /// # Errors
    /// [`TensorIndexError::Json`] if `raw` is not an image index.
    pub fn with_index(raw: Option<&[u8]>, index: &Descriptor) -> Result<Option<Vec<u8>>, TensorIndexError> {
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
        let text = index.digest.to_string();
        if entries.iter().any(|entry| entry.get("digest").is_some_and(|digest| *digest == text)) {
            return Ok(None);
        }
        entries
            .retain(|entry| entry.get("artifactType").is_none_or(|kind| *kind != TensorIndex::ARTIFACT_TYPE));
        let own =
            Entry { artifact_type: Some(MediaType::new(TensorIndex::ARTIFACT_TYPE)), ..Entry::new(index) };
        entries.push(serde_json::to_value(own)?);
        Ok(Some(serde_json::to_vec(&list)?))
    }
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Artifact {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    schema_version: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    media_type: Option<MediaType>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    artifact_type: Option<MediaType>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    config: Option<Entry>,
    layers: Vec<Entry>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    subject: Option<Entry>,
}

#[derive(Deserialize)]
struct List {
    manifests: Vec<Entry>,
}

/// A descriptor with what the specification allows in it besides.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Entry {
    media_type: MediaType,
    digest: Digest,
    size: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    artifact_type: Option<MediaType>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    annotations: Option<BTreeMap<String, Value>>,
}

impl Entry {
    fn new(Descriptor { media_type, digest, size }: &Descriptor) -> Self {
        let media_type = media_type.clone();
        Self { media_type, digest: *digest, size: *size, artifact_type: None, annotations: None }
    }

    fn into_descriptor(self) -> Descriptor {
        let Self { media_type, digest, size, .. } = self;
        Descriptor { media_type, digest, size }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

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
        assert!(matches!(other, Err(TensorIndexError::Subject { .. })));
        let changed = |from: &str, to: &str| {
            let text = String::from_utf8(raw.clone()).unwrap();
            assert!(text.contains(from), "{text}");
            TensorIndex::parse(text.replace(from, to).as_bytes(), own)
        };
        assert!(matches!(changed("\"subject\"", "\"object\""), Err(TensorIndexError::Subject { .. })));
        assert!(matches!(changed("tensor-index", "sbom"), Err(TensorIndexError::Kind)));
        assert!(matches!(changed("file.digest", "file"), Err(TensorIndexError::NoRecipes)));
        assert!(matches!(changed("recipe.v1", "recipe.v9"), Err(TensorIndexError::NoRecipes)));
        assert!(matches!(changed("sha256:", "sha256:../"), Err(TensorIndexError::Json(_))));
    }

    #[test]
    fn list_names_indexes_first_and_then_manifests_without_a_type() {
        let entry = |content: &str, kind: Option<&str>| {
            let Descriptor { media_type, digest, size } = descriptor(content, MediaType::OCI_MANIFEST);
            let mut entry = json!({ "mediaType": media_type, "digest": digest, "size": size });
            if let Some(kind) = kind {
                entry["artifactType"] = kind.into();
            }
            entry
        };
        let own = Some(TensorIndex::ARTIFACT_TYPE);
        let untyped = ["u", "v", "w"].map(|content| entry(content, None));
        let entries = [&untyped[..], &[entry("sbom", Some("x/y")), entry("index", own)]].concat();
        let raw = json!({ "schemaVersion": 2, "manifests": entries }).to_string();
        let list = Referrers::parse(raw.as_bytes()).unwrap();
        let found: Vec<_> = list.candidates().iter().map(|entry| entry.digest).collect();
        assert_eq!(found, [&b"index"[..], b"u", b"v"].map(Digest::of));
        // Some registries answer the tag with the model itself.
        assert!(Referrers::parse(&index_of("model")).is_err());
    }

    #[test]
    fn index_replaces_an_earlier_one_in_the_list_and_nothing_else() {
        let (first, second) =
            (descriptor("1", MediaType::OCI_MANIFEST), descriptor("2", MediaType::OCI_MANIFEST));
        let list = Referrers::with_index(None, &first).unwrap().unwrap();
        assert_eq!(Referrers::with_index(Some(&list), &first).unwrap(), None);
        let mut json: Value = serde_json::from_slice(&list).unwrap();
        json["x-unknown"] = 7.into();
        let signature =
            json!({ "mediaType": "a/b", "digest": Digest::of(b"s"), "size": 1, "artifactType": "c/d" });
        json["manifests"].as_array_mut().unwrap().push(signature);
        let list = Referrers::with_index(Some(json.to_string().as_bytes()), &second).unwrap().unwrap();
        let json: Value = serde_json::from_slice(&list).unwrap();
        let digests: Vec<_> =
            json["manifests"].as_array().unwrap().iter().map(|entry| entry["digest"].clone()).collect();
        assert_eq!(digests, [Digest::of(b"s").to_string(), second.digest.to_string()]);
        assert_eq!((&json["x-unknown"], &json["mediaType"]), (&7.into(), &MediaType::OCI_INDEX.into()));
        assert!(Referrers::with_index(Some(b"{}"), &first).is_err());
    }
}
