//! Manifests: the registry's JSON record of a model.
//!
//! A [`Manifest`] is validated, and keeps the registry's bytes unchanged because their digest is the
//! model's ID. Source of the format: the OCI image manifest and Docker's `manifest.v2+json`, as
//! served by Ollama's registry.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Deserializer, Serialize};

use crate::descriptor::{Descriptor, MediaType};
use crate::digest::Digest;
use crate::json_error::reason;

/// A validated manifest and its original bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Manifest {
    raw: Vec<u8>,
    digest: Digest,
    config: Descriptor,
    layers: Vec<Descriptor>,
    /// One per layer.
    names: Vec<Option<String>>,
}

impl Manifest {
    /// The longest manifest read: the size that registries must accept.
    pub const MAX_BYTES: u64 = 4 << 20;
    /// The annotation of a container image with the files of a model: the digest of the model's manifest.
    pub const MODEL_ANNOTATION: &str = "vnd.blobd.model.digest";
    /// The most layers of a manifest. The largest known models have 2,000, one per tensor.
    pub const MAX_LAYERS: usize = 16_384;

    /// Parses a registry's bytes and keeps them.
    pub fn parse(raw: Vec<u8>) -> Result<Self, ManifestError> {
        if raw.len() as u64 > Self::MAX_BYTES {
            return Err(ManifestError::TooLong { length: raw.len() });
        }
        refuse_index(&raw)?;
        let image: ImageManifest = serde_json::from_slice(&raw)?;
        check(&image)?;
        let (layers, names) = image.layers.into_iter().map(ImageLayer::into_parts).unzip();
        Ok(Self { digest: Digest::of(&raw), config: image.config.into_parts().0, layers, names, raw })
    }

    /// Makes the manifest of a model without a registry, in Ollama's form.
    pub fn compose(config: Descriptor, layers: Vec<Descriptor>) -> Result<Self, ManifestError> {
        Self::compose_named(config, layers.into_iter().map(|layer| (layer, None)).collect())
    }

    /// Like [`Self::compose`], with file names, as Ollama writes them for tensor layers.
    pub fn compose_named(
        config: Descriptor,
        layers: Vec<(Descriptor, Option<String>)>,
    ) -> Result<Self, ManifestError> {
        if layers.is_empty() {
            return Err(ManifestError::NoLayers);
        }
        let image = ImageManifest {
            schema_version: 2,
            media_type: Some(MediaType::new(MediaType::DOCKER_MANIFEST)),
            config: ImageLayer::new(config, None),
            layers: layers.into_iter().map(|(layer, name)| ImageLayer::new(layer, name)).collect(),
        };
        Self::parse(serde_json::to_vec(&image)?)
    }

    /// The bytes, as the registry served them.
    pub fn raw(&self) -> &[u8] {
        &self.raw
    }

    /// The digest of [`Self::raw`]: the model's ID.
    pub const fn digest(&self) -> Digest {
        self.digest
    }

    /// The descriptor of the manifest itself.
    pub fn descriptor(&self) -> Descriptor {
        let media_type = self.media_type().unwrap_or_else(|| MediaType::new(MediaType::OCI_MANIFEST));
        Descriptor { media_type, digest: self.digest, size: self.raw.len() as u64 }
    }

    pub const fn config(&self) -> &Descriptor {
        &self.config
    }

    pub fn layers(&self) -> &[Descriptor] {
        &self.layers
    }

    /// All files of the model: the configuration and the layers.
    pub fn files(&self) -> impl Iterator<Item = &Descriptor> {
        std::iter::once(&self.config).chain(&self.layers)
    }

    /// The files' original names in the order of [`Self::files`]: a tensor's name, or a relative path
    /// without `..`. Many have none.
    pub fn names(&self) -> impl Iterator<Item = Option<&str>> {
        std::iter::once(None).chain(self.names.iter().map(Option::as_deref))
    }

    /// The manifest's own media type, which OCI allows to leave out. It is not kept in memory.
    pub fn media_type(&self) -> Option<MediaType> {
        #[derive(Deserialize)]
        struct Typed {
            #[serde(rename = "mediaType")]
            media_type: Option<MediaType>,
        }

        serde_json::from_slice::<Typed>(&self.raw).ok()?.media_type
    }

    /// An annotation of the manifest itself, if it has one with this key. Annotations are not kept in memory.
    pub fn annotation(&self, key: &str) -> Option<String> {
        #[derive(Deserialize)]
        struct Annotated {
            annotations: Option<BTreeMap<String, serde_json::Value>>,
        }

        let annotated: Annotated = serde_json::from_slice(&self.raw).ok()?;
        Some(annotated.annotations?.get(key)?.as_str()?.to_owned())
    }

    pub fn digests(&self) -> BTreeSet<Digest> {
        self.files().map(|file| file.digest).collect()
    }

    /// The size of all files in bytes, as `ollama list` counts it.
    pub fn size(&self) -> u64 {
        // `check` has proved that the sum does not overflow.
        self.files().fold(0, |sum, file| sum.saturating_add(file.size))
    }
}

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ManifestError {
    #[error("manifest: too long: expected at most {} bytes, found {length}", Manifest::MAX_BYTES)]
    TooLong { length: usize },
    #[error("manifest: {}", reason(.0))]
    Json(#[from] serde_json::Error),
    #[error("manifest: wrong schema version: expected 2, found {found}")]
    SchemaVersion { found: u32 },
    #[error("manifest: is an index of manifests")]
    Index,
    #[error("manifest: no layers")]
    NoLayers,
    #[error("manifest: too many layers: expected at most {}, found {found}", Manifest::MAX_LAYERS)]
    TooManyLayers { found: usize },
    #[error("manifest: {digest}: sizes {first} and {second}")]
    SizesDiffer { digest: Digest, first: u64, second: u64 },
    #[error("manifest: the layers' sizes add up to more than 2^64 bytes")]
    SizeOverflow,
}

/// The JSON form, with the fields in the order that Ollama writes them.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct ImageManifest {
    schema_version: u32,
    /// The manifest's own media type; OCI allows to leave it out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    media_type: Option<MediaType>,
    config: ImageLayer,
    #[serde(deserialize_with = "layers_or_null")]
    layers: Vec<ImageLayer>,
}

/// Go writes an empty list as `null`.
fn layers_or_null<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<ImageLayer>, D::Error> {
    Ok(Option::<Vec<ImageLayer>>::deserialize(deserializer)?.unwrap_or_default())
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct ImageLayer {
    media_type: MediaType,
    digest: Digest,
    size: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    #[serde(default, skip_serializing)]
    annotations: Option<BTreeMap<String, String>>,
    /// In Ollama's manifests of local models the name of the file that was imported, or of a parent model.
    #[serde(default, skip_serializing)]
    from: Option<serde_json::Value>,
}

impl ImageLayer {
    fn new(Descriptor { media_type, digest, size }: Descriptor, name: Option<String>) -> Self {
        Self { media_type, digest, size, name, annotations: None, from: None }
    }

    /// Drops an unsafe name instead of failing, so that a stored manifest stays readable.
    fn into_parts(self) -> (Descriptor, Option<String>) {
        let Self { media_type, digest, size, name, annotations, from } = self;
        let mut annotations = annotations.unwrap_or_default();
        let mut annotated = NAME_ANNOTATIONS.iter().filter_map(|key| annotations.remove(*key));
        let from = || from?.as_str().filter(|from| is_name_of_weights(from)).map(str::to_owned);
        let name = name.or_else(|| annotated.next()).or_else(from).filter(|name| is_file_name(name));
        (Descriptor { media_type, digest, size }, name)
    }
}

/// The annotations for a file's name: ModelPack and Docker Model Runner, then general OCI tools.
const NAME_ANNOTATIONS: [&str; 3] =
    ["org.cncf.model.filepath", "org.cnai.model.filepath", "org.opencontainers.image.title"];
/// The longest file name on disk; thousands of names must fit into one response.
const MAX_NAME_BYTES: usize = 255;

/// Whether a text is a relative path without `..` and control characters, safe to print and to join.
pub fn is_file_name(text: &str) -> bool {
    let is_plain = |part: &str| !matches!(part, "" | "." | "..");
    text.len() <= MAX_NAME_BYTES
        && !text.contains(|c: char| c.is_control() || c == '\\')
        && text.split('/').all(is_plain)
}

fn is_name_of_weights(text: &str) -> bool {
    let text = text.to_ascii_lowercase();
    [".gguf", ".safetensors"].iter().any(|extension| text.ends_with(extension)) && !text.contains('/')
}

/// Checked first: for an index, the error "missing field `config`" would be misleading, and a document
/// that is both a manifest and an index is ambiguous (CVE-2021-41190).
fn refuse_index(raw: &[u8]) -> Result<(), ManifestError> {
    #[derive(Deserialize)]
    struct Kind {
        #[serde(rename = "mediaType")]
        media_type: Option<MediaType>,
        manifests: Option<serde::de::IgnoredAny>,
    }
    let kind: Kind = serde_json::from_slice(raw)?;
    let index_type = kind.media_type.is_some_and(|media_type| {
        [MediaType::OCI_INDEX, MediaType::DOCKER_MANIFEST_LIST].contains(&media_type.as_str())
    });
    if index_type || kind.manifests.is_some() { Err(ManifestError::Index) } else { Ok(()) }
}

fn check(image: &ImageManifest) -> Result<(), ManifestError> {
    if image.schema_version != 2 {
        return Err(ManifestError::SchemaVersion { found: image.schema_version });
    }
    let found = image.layers.len();
    if found > Manifest::MAX_LAYERS {
        return Err(ManifestError::TooManyLayers { found });
    }
    let mut sizes = BTreeMap::new();
    let mut sum = 0u64;
    for ImageLayer { digest, size, .. } in std::iter::once(&image.config).chain(&image.layers) {
        sum = sum.checked_add(*size).ok_or(ManifestError::SizeOverflow)?;
        match sizes.insert(*digest, *size) {
            Some(first) if first != *size => {
                return Err(ManifestError::SizesDiffer { digest: *digest, first, second: *size });
            }
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The manifest of `llama3:8b` as registry.ollama.ai serves it, byte for byte.
    const LLAMA3_8B: &str = concat!(
        r#"{"schemaVersion":2,"mediaType":"application/vnd.docker.distribution.manifest.v2+json","config":{"#,
        r#""mediaType":"application/vnd.docker.container.image.v1+json","digest":"#,
        r#""sha256:3f8eb4da87fa7a3c9da615036b0dc418d31fef2a30b115ff33562588b32c691d","size":485},"layers":["#,
        r#"{"mediaType":"application/vnd.ollama.image.model","digest":"#,
        r#""sha256:6a0746a1ec1aef3e7ec53868f220ff6e389f6f8ef87a01d77c96807de94ca2aa","size":4661211424},"#,
        r#"{"mediaType":"application/vnd.ollama.image.license","digest":"#,
        r#""sha256:4fa551d4f938f68b8c1e6afa9d28befb70e3f33f75d0753248d530364aeea40f","size":12403},"#,
        r#"{"mediaType":"application/vnd.ollama.image.template","digest":"#,
        r#""sha256:8ab4849b038cf0abc5b1c9b8ee1443dca6b93a045c2272180d985126eb40bf6f","size":254},"#,
        r#"{"mediaType":"application/vnd.ollama.image.params","digest":"#,
        r#""sha256:577073ffcc6ce95b9981eacc77d1039568639e5638e83044994560d9ef82ce1b","size":110}]}"#,
    );

    fn refused(json: &str) -> ManifestError {
        Manifest::parse(json.as_bytes().to_vec()).expect_err("was accepted")
    }

    fn edited(from: &str, to: &str) -> String {
        let json = LLAMA3_8B.replacen(from, to, 1);
        assert_ne!(json, LLAMA3_8B, "{from} is not in the manifest");
        json
    }

    #[test]
    fn ollamas_llama3_has_its_well_known_id_and_size() {
        let manifest = Manifest::parse(LLAMA3_8B.into()).unwrap();
        assert_eq!(manifest.digest().short(), "365c0bd3c000");
        assert_eq!(manifest.size(), 4_661_224_676);
        assert_eq!(manifest.digests().len(), 5);
        assert_eq!(manifest.raw(), LLAMA3_8B.as_bytes());
    }

    #[test]
    fn composed_manifest_has_ollamas_form() {
        let pulled = Manifest::parse(LLAMA3_8B.into()).unwrap();
        let composed = Manifest::compose(pulled.config().clone(), pulled.layers().to_vec()).unwrap();
        assert_eq!(composed, pulled);
    }

    #[test]
    fn unknown_fields_are_kept_in_the_raw_bytes() {
        let json = edited(r#""size":485"#, r#""size":485,"from":"llama2","annotations":{"a":"b"}"#);
        assert_eq!(Manifest::parse(json.clone().into()).unwrap().raw(), json.as_bytes());
    }

    #[test]
    fn layer_names_are_read_from_fields_and_annotations() {
        for (field, name) in [
            (r#""name":"model.layers.0.mlp.experts""#, Some("model.layers.0.mlp.experts")),
            (r#""annotations":{"org.cncf.model.filepath":"a/b.gguf"}"#, Some("a/b.gguf")),
            (r#""annotations":{"org.cnai.model.filepath":"b.gguf"}"#, Some("b.gguf")),
            (r#""annotations":{"org.opencontainers.image.title":"c.gguf"}"#, Some("c.gguf")),
            (r#""annotations":null"#, None),
            (r#""from":"tiny-00001-of-00002.gguf""#, Some("tiny-00001-of-00002.gguf")),
            (r#""from":"llama2","name":"x""#, Some("x")),
            (r#""from":"llama2:latest""#, None),
            (r#""from":"/home/me/x.gguf""#, None),
            (r#""from":7"#, None),
            (r#""name":"../../etc/passwd""#, None),
            (r#""name":"/etc/passwd""#, None),
            (r#""name":"a//b""#, None),
            (r#""name":"a\nb""#, None),
            (r#""name":"""#, None),
        ] {
            let manifest = Manifest::parse(edited(r#""size":254"#, &format!(r#""size":254,{field}"#)).into());
            assert_eq!(manifest.unwrap().names().nth(3), Some(name), "{field}");
        }
        let pulled = Manifest::parse(LLAMA3_8B.into()).unwrap();
        let layers = vec![(pulled.layers()[0].clone(), Some("x/y".to_owned()))];
        let named = Manifest::compose_named(pulled.config().clone(), layers).unwrap();
        assert_eq!(named.names().collect::<Vec<_>>(), [None, Some("x/y")]);
    }

    #[test]
    fn traversing_and_foreign_digests_are_refused() {
        for digest in ["../../etc/passwd", "sha512:00", "sha256:6A07", "", "sha256:../../../../x"] {
            let json =
                edited("sha256:6a0746a1ec1aef3e7ec53868f220ff6e389f6f8ef87a01d77c96807de94ca2aa", digest);
            assert!(matches!(refused(&json), ManifestError::Json(_)), "{digest}");
        }
    }

    #[test]
    fn impossible_sizes_are_refused() {
        for size in ["-1", "1.5", "1e30", "18446744073709551616", "\"254\"", "null"] {
            let json = edited(r#""size":254"#, &format!(r#""size":{size}"#));
            assert!(matches!(refused(&json), ManifestError::Json(_)), "{size}");
        }
        let json = edited(r#""size":254"#, r#""size":18446744073709551615"#);
        assert!(matches!(refused(&json), ManifestError::SizeOverflow));
    }

    #[test]
    fn index_and_ambiguous_documents_are_refused() {
        assert!(matches!(refused(r#"{"schemaVersion":2,"manifests":[]}"#), ManifestError::Index));
        let both = edited(r#""layers":"#, r#""manifests":[],"layers":"#);
        assert!(matches!(refused(&both), ManifestError::Index));
        let media_type = edited(MediaType::DOCKER_MANIFEST, MediaType::OCI_INDEX);
        assert!(matches!(refused(&media_type), ManifestError::Index));
    }

    #[test]
    fn other_documents_are_refused() {
        for json in ["", "{}", "[]", "null", "<html>captive portal</html>", r#"{"schemaVersion":2}"#] {
            assert!(matches!(refused(json), ManifestError::Json(_)), "{json}");
        }
        let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
        assert!(matches!(refused(&deep), ManifestError::Json(_)));
        let twice = edited(r#""schemaVersion":2"#, r#""schemaVersion":2,"schemaVersion":2"#);
        assert!(matches!(refused(&twice), ManifestError::Json(_)));
        let one = edited(r#""schemaVersion":2"#, r#""schemaVersion":1"#);
        assert!(matches!(refused(&one), ManifestError::SchemaVersion { found: 1 }));
    }

    #[test]
    fn layer_count_is_limited() {
        let layer = r#"{"mediaType":"m","digest":"sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855","size":0}"#;
        let with = |count: usize| {
            let layers = vec![layer; count].join(",");
            format!(r#"{{"schemaVersion":2,"config":{layer},"layers":[{layers}]}}"#)
        };
        assert_eq!(Manifest::parse(with(0).into()).unwrap().layers(), [], "the model may run elsewhere");
        assert!(Manifest::parse(with(0).replace("[]", "null").into()).is_ok());
        let missing = with(0).replace(r#","layers":[]"#, "");
        assert!(matches!(refused(&missing), ManifestError::Json(_)));
        assert!(Manifest::parse(with(Manifest::MAX_LAYERS).into()).is_ok());
        assert!(matches!(refused(&with(Manifest::MAX_LAYERS + 1)), ManifestError::TooManyLayers { .. }));
        assert!(matches!(refused(&" ".repeat(5 << 20)), ManifestError::TooLong { .. }));
    }

    #[test]
    fn one_digest_with_two_sizes_is_refused() {
        let json = edited(
            "8ab4849b038cf0abc5b1c9b8ee1443dca6b93a045c2272180d985126eb40bf6f",
            "577073ffcc6ce95b9981eacc77d1039568639e5638e83044994560d9ef82ce1b",
        );
        assert!(matches!(refused(&json), ManifestError::SizesDiffer { first: 254, second: 110, .. }));
    }
}
