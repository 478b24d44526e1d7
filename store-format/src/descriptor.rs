//! OCI descriptors: media type, digest and size of a file in a manifest.
//!
//! Source: the OCI image specification, `descriptor.md`. The file name of a layer, which Ollama writes
//! as `name` and others as an annotation, is read by [`crate::manifest`].
//!
//! Three families of media types name the parts of a model: Ollama's, Docker Model Runner's
//! (`docker/model-runner`, `pkg/distribution`) and CNCF ModelPack's (`modelpack/model-spec`).

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::digest::Digest;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Descriptor {
    #[serde(rename = "mediaType")]
    pub media_type: MediaType,
    /// The SHA-256 of the whole file.
    pub digest: Digest,
    /// Its length in bytes.
    pub size: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct MediaType(String);

impl MediaType {
    /// A Docker image manifest, the form that Ollama's registry serves.
    pub const DOCKER_MANIFEST: &str = "application/vnd.docker.distribution.manifest.v2+json";
    pub const OCI_MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
    /// An OCI index: a list of manifests, one per platform.
    pub const OCI_INDEX: &str = "application/vnd.oci.image.index.v1+json";
    /// Docker's form of an index.
    pub const DOCKER_MANIFEST_LIST: &str = "application/vnd.docker.distribution.manifest.list.v2+json";
    /// The configuration of a Docker image, which Ollama uses for its models too.
    pub const DOCKER_CONFIG: &str = "application/vnd.docker.container.image.v1+json";
    /// The configuration of an OCI image of a container.
    pub const OCI_CONFIG: &str = "application/vnd.oci.image.config.v1+json";
    /// A layer of such an image: a tar archive without compression.
    pub const OCI_LAYER: &str = "application/vnd.oci.image.layer.v1.tar";
    /// A GGUF file with weights.
    pub const OLLAMA_MODEL: &str = "application/vnd.ollama.image.model";
    /// A GGUF file with an image encoder.
    pub const OLLAMA_PROJECTOR: &str = "application/vnd.ollama.image.projector";
    /// A GGUF file with a low-rank adapter (LoRA).
    pub const OLLAMA_ADAPTER: &str = "application/vnd.ollama.image.adapter";
    /// A GGUF file with a model for speculative decoding.
    pub const OLLAMA_DRAFT: &str = "application/vnd.ollama.image.draft";
    /// A JSON file beside weights.
    pub const OLLAMA_JSON: &str = "application/vnd.ollama.image.json";
    /// The text of a license.
    pub const OLLAMA_LICENSE: &str = "application/vnd.ollama.image.license";

    /// CNCF ModelPack's GGUF file, used for one in an archive.
    pub const PACK_GGUF: &str = "application/vnd.cncf.model.weight.v1.gguf";
    /// CNCF ModelPack's safetensors file, used for one that was imported or is in an archive.
    pub const PACK_SAFETENSORS: &str = "application/vnd.cncf.model.weight.v1.safetensors";
    /// CNCF ModelPack's weights in any other format, such as a pickle.
    pub const PACK_OTHER_WEIGHTS: &str = "application/vnd.cncf.model.weight.v1.raw";
    /// CNCF ModelPack's other file beside weights, used for one that was imported or is in an archive.
    pub const PACK_CONFIG: &str = "application/vnd.cncf.model.weight.config.v1.raw";

    /// CNCF ModelPack's text about a model, such as its license.
    pub const PACK_DOC: &str = "application/vnd.cncf.model.doc.v1.raw";
    /// The type of a CNCF ModelPack as an artifact.
    pub const PACK_MANIFEST: &str = "application/vnd.cncf.model.manifest.v1+json";
    /// The configuration of a CNCF ModelPack.
    pub const PACK_MODEL_CONFIG: &str = "application/vnd.cncf.model.config.v1+json";

    /// Docker Model Runner's configuration of a GGUF model.
    pub const DOCKER_MODEL_CONFIG: &str = "application/vnd.docker.ai.model.config.v0.1+json";
    /// Docker Model Runner's configuration of a model whose layers are files with paths.
    pub const DOCKER_FILES_CONFIG: &str = "application/vnd.docker.ai.model.config.v0.2+json";
    /// Docker Model Runner's GGUF file.
    pub const DOCKER_GGUF: &str = "application/vnd.docker.ai.gguf.v3";
    /// Docker Model Runner's safetensors file.
    pub const DOCKER_SAFETENSORS: &str = "application/vnd.docker.ai.safetensors";
    /// Docker Model Runner's GGUF file with an image encoder.
    pub const DOCKER_PROJECTOR: &str = "application/vnd.docker.ai.mmproj";
    /// Docker Model Runner's text of a license.
    pub const DOCKER_LICENSE: &str = "application/vnd.docker.ai.license";
    /// Docker Model Runner's template in the language Jinja.
    pub const DOCKER_TEMPLATE: &str = "application/vnd.docker.ai.chat.template.jinja";
    /// Docker Model Runner's other file beside weights.
    pub const DOCKER_FILE: &str = "application/vnd.docker.ai.model.file";

    /// Wraps any text, unchecked.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The role of the layer in its model, for the media types of all registries: `model`,
    /// `projector`, `adapter`, `template`, `license`, …; `config` for the configuration; the whole
    /// media type if unknown.
    pub fn component(&self) -> &str {
        if CONFIGS.contains(&self.as_str()) {
            return "config";
        }
        if let Some((_, component)) = DOCKER_MODEL_RUNNER.iter().find(|(known, _)| *known == self.0) {
            return component;
        }
        if let Some(kind) = self.model_pack_kind() {
            return match kind.split_once(".v1") {
                Some(("weight", _)) => "model",
                Some(("config", _)) => "config",
                Some((other, _)) => other,
                None => kind,
            };
        }
        if let Some(kind) = self.kit_kind() {
            return match kind.split('.').next() {
                Some("model" | "modelpart") => "model",
                Some(other) if kind.split_once(".v1").is_some() => other,
                _ => &self.0,
            };
        }
        if self.0 == DOCKER_PACKED_DIRECTORY {
            return "model";
        }
        self.0.strip_prefix(OLLAMA_PREFIX).unwrap_or(&self.0)
    }

    /// The component of a model's weights: `model`, or, without such a file, that of its first file with tensors,
    /// such as `adapter`.
    pub fn weights_component<'m>(types: impl IntoIterator<Item = &'m Self>) -> &'m str {
        const WEIGHTS: &str = "model";
        let mut in_place = None;
        for media_type in types.into_iter().filter(|media_type| media_type.holds_tensors()) {
            match media_type.component() {
                WEIGHTS => return WEIGHTS,
                other => in_place = in_place.or(Some(other)),
            }
        }
        in_place.unwrap_or(WEIGHTS)
    }

    /// Whether files of this type hold tensors; they are split if their format is known.
    pub fn holds_tensors(&self) -> bool {
        matches!(self.component(), "model" | "projector" | "adapter" | "draft")
    }

    /// The encoding of an archive of weights; `None` for any other file.
    pub fn archive_of_weights(&self) -> Option<Archive> {
        if self.0 == DOCKER_PACKED_DIRECTORY {
            return Some(Archive::Tar);
        }
        let in_pack = self.model_pack_kind().and_then(|kind| kind.strip_prefix("weight.v1."));
        let in_kit = || {
            let kind = self.kit_kind()?;
            KIT_WEIGHTS.iter().find_map(|weights| kind.strip_prefix(weights))
        };
        Archive::from_suffix(in_pack.or_else(in_kit)?)
    }

    /// Whether files of this type are layers of a container's file system.
    pub fn is_container_layer(&self) -> bool {
        CONTAINER_LAYERS.iter().any(|prefix| self.0.starts_with(prefix))
    }

    /// Whether a manifest with this artifact or configuration type describes a model.
    pub fn is_of_model(&self) -> bool {
        self.model_pack_kind().is_some()
            || [OLLAMA_PREFIX, DOCKER_PREFIX].iter().any(|prefix| self.0.starts_with(prefix))
    }

    /// The part after the prefix of KitOps.
    fn kit_kind(&self) -> Option<&str> {
        self.0.strip_prefix(KIT_PREFIX)
    }

    /// The part after the prefix of CNCF ModelPack, under its current or first name.
    fn model_pack_kind(&self) -> Option<&str> {
        MODEL_PACK_PREFIXES.iter().find_map(|prefix| self.0.strip_prefix(prefix))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Archive {
    /// An archive whose files can be read in place.
    Tar,
    /// A compressed archive, whose files are read while all of it is received.
    Compressed(Compression),
    /// An archive that is compressed in another way.
    Unknown,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Compression {
    /// RFC 1952.
    Gzip,
    /// RFC 8878.
    Zstd,
}

impl fmt::Display for Compression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Gzip => "gzip",
            Self::Zstd => "zstd",
        })
    }
}

impl Archive {
    /// Parses the end of a media type: `tar`, `tar+gzip`, `tar+zstd`, or `tar.gz` as in names of files.
    fn from_suffix(suffix: &str) -> Option<Self> {
        match suffix {
            "tar" => Some(Self::Tar),
            "tar+gzip" | "tar.gz" | "tar.gzip" => Some(Self::Compressed(Compression::Gzip)),
            "tar+zstd" | "tar.zst" | "tar.zstd" => Some(Self::Compressed(Compression::Zstd)),
            _ => ["tar+", "tar."].iter().any(|start| suffix.starts_with(start)).then_some(Self::Unknown),
        }
    }
}

const OLLAMA_PREFIX: &str = "application/vnd.ollama.image.";
const DOCKER_PREFIX: &str = "application/vnd.docker.ai.";
const MODEL_PACK_PREFIXES: [&str; 2] = ["application/vnd.cncf.model.", "application/vnd.cnai.model."];
const KIT_PREFIX: &str = "application/vnd.kitops.modelkit.";
/// The layers of KitOps with weights, up to the encoding.
const KIT_WEIGHTS: [&str; 2] = ["model.v1.", "modelpart.v1."];
/// A folder of a model, as Docker Model Runner packs it.
const DOCKER_PACKED_DIRECTORY: &str = "application/vnd.docker.ai.dir.tar";
const CONTAINER_LAYERS: [&str; 2] =
    ["application/vnd.oci.image.layer.", "application/vnd.docker.image.rootfs."];
const CONFIGS: [&str; 6] = [
    MediaType::DOCKER_CONFIG,
    MediaType::OCI_CONFIG,
    "application/vnd.oci.empty.v1+json",
    MediaType::DOCKER_MODEL_CONFIG,
    MediaType::DOCKER_FILES_CONFIG,
    "application/vnd.docker.ai.model.config.v1+json",
];
/// The layers of Docker Model Runner; the last is the form of March 2025.
const DOCKER_MODEL_RUNNER: [(&str, &str); 8] = [
    (MediaType::DOCKER_GGUF, "model"),
    (MediaType::DOCKER_SAFETENSORS, "model"),
    ("application/vnd.docker.ai.dduf", "model"),
    (MediaType::DOCKER_PROJECTOR, "projector"),
    (MediaType::DOCKER_LICENSE, "license"),
    (MediaType::DOCKER_TEMPLATE, "template"),
    (MediaType::DOCKER_FILE, "file"),
    ("application/vnd.docker.ai.model.file.v1+gguf", "model"),
];

impl fmt::Display for MediaType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn components_of_the_well_known_media_types() {
        let component = |text: &str| MediaType::new(text).component().to_owned();
        assert_eq!(component(MediaType::OLLAMA_MODEL), "model");
        assert_eq!(component("application/vnd.ollama.image.params"), "params");
        assert_eq!(component(MediaType::DOCKER_CONFIG), "config");
        assert_eq!(component("text/plain"), "text/plain");
        for (text, expected) in [
            ("application/vnd.docker.ai.model.config.v0.1+json", "config"),
            ("application/vnd.docker.ai.model.config.v0.2+json", "config"),
            ("application/vnd.docker.ai.model.config.v1+json", "config"),
            ("application/vnd.docker.ai.gguf.v3", "model"),
            ("application/vnd.docker.ai.model.file.v1+gguf", "model"),
            ("application/vnd.docker.ai.mmproj", "projector"),
            ("application/vnd.docker.ai.license", "license"),
            ("application/vnd.docker.ai.chat.template.jinja", "template"),
            ("application/vnd.cncf.model.config.v1+json", "config"),
            ("application/vnd.cncf.model.weight.v1.raw", "model"),
            ("application/vnd.cncf.model.weight.v1.gguf", "model"),
            ("application/vnd.cnai.model.weight.v1.raw", "model"),
            ("application/vnd.cncf.model.weight.config.v1.raw", "weight.config"),
            ("application/vnd.cncf.model.doc.v1.tar+gzip", "doc"),
            ("application/vnd.ollama.image.tensor", "tensor"),
            ("application/vnd.kitops.modelkit.config.v1+json", "config"),
            ("application/vnd.kitops.modelkit.model.v1.tar", "model"),
            ("application/vnd.kitops.modelkit.modelpart.v1.tar", "model"),
            ("application/vnd.kitops.modelkit.docs.v1.tar+gzip", "docs"),
            (MediaType::PACK_CONFIG, "weight.config"),
            ("application/vnd.oci.empty.v1+json", "config"),
        ] {
            assert_eq!(component(text), expected, "{text}");
        }
    }

    #[test]
    fn archives_of_weights_and_container_layers_are_distinguished() {
        let archive = |text: &str| MediaType::new(text).archive_of_weights();
        assert_eq!(archive("application/vnd.cncf.model.weight.v1.tar"), Some(Archive::Tar));
        assert_eq!(
            archive("application/vnd.cnai.model.weight.v1.tar+zstd"),
            Some(Archive::Compressed(Compression::Zstd))
        );
        assert_eq!(archive("application/vnd.docker.ai.dir.tar"), Some(Archive::Tar));
        assert_eq!(archive("application/vnd.kitops.modelkit.model.v1.tar"), Some(Archive::Tar));
        assert_eq!(
            archive("application/vnd.kitops.modelkit.modelpart.v1.tar+gzip"),
            Some(Archive::Compressed(Compression::Gzip))
        );
        assert_eq!(
            archive("application/vnd.kitops.modelkit.model.v1.tar.gz"),
            Some(Archive::Compressed(Compression::Gzip))
        );
        assert_eq!(archive("application/vnd.kitops.modelkit.model.v1.tar+xz"), Some(Archive::Unknown));
        for text in [
            "application/vnd.cncf.model.weight.v1.raw",
            "application/vnd.cncf.model.doc.v1.tar",
            "application/vnd.kitops.modelkit.docs.v1.tar",
        ] {
            assert_eq!(archive(text), None, "{text}");
        }
        assert!(MediaType::new("application/vnd.oci.image.layer.v1.tar+gzip").is_container_layer());
        assert!(MediaType::new("application/vnd.cncf.model.manifest.v1+json").is_of_model());
        assert!(!MediaType::new(MediaType::DOCKER_CONFIG).is_of_model());
    }

    #[test]
    fn only_weights_are_split() {
        assert!(MediaType::new(MediaType::OLLAMA_MODEL).holds_tensors());
        assert!(MediaType::new("application/vnd.ollama.image.projector").holds_tensors());
        assert!(!MediaType::new("application/vnd.ollama.image.license").holds_tensors());
        assert!(!MediaType::new("application/vnd.ollama.image.embed").holds_tensors());
    }

    #[test]
    fn weights_are_the_model_or_else_the_first_file_with_tensors() {
        let [license, adapter, projector] = ["license", "adapter", "projector"];
        for (components, expected) in [
            (vec![license, adapter, "model"], "model"),
            (vec![license, adapter, projector], adapter),
            (vec![projector, adapter], projector),
            (vec![license], "model"),
            (vec![], "model"),
        ] {
            let media_type = |component: &&str| MediaType::new(format!("{OLLAMA_PREFIX}{component}"));
            let types: Vec<MediaType> = components.iter().map(media_type).collect();
            assert_eq!(MediaType::weights_component(&types), expected, "{components:?}");
        }
    }
}
