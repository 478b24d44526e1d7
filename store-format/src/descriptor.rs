//! OCI descriptors: what a manifest says about one of its files.
//!
//! Source: the OCI image specification, `descriptor.md`; Ollama adds `from` and `name`, which
//! blobd keeps in the manifest's raw bytes and does not interpret.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::digest::Digest;

/// Media type, digest and size of one file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Descriptor {
    /// What the file is.
    #[serde(rename = "mediaType")]
    pub media_type: MediaType,
    /// The SHA-256 of the whole file.
    pub digest: Digest,
    /// Its length in bytes.
    pub size: u64,
}

/// A media type such as `application/vnd.ollama.image.model`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct MediaType(String);

impl MediaType {
    /// A Docker image manifest, the form that Ollama's registry serves.
    pub const DOCKER_MANIFEST: &str = "application/vnd.docker.distribution.manifest.v2+json";
    /// An OCI image manifest.
    pub const OCI_MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
    /// An OCI index: a list of manifests, one per platform.
    pub const OCI_INDEX: &str = "application/vnd.oci.image.index.v1+json";
    /// Docker's form of an index.
    pub const DOCKER_MANIFEST_LIST: &str = "application/vnd.docker.distribution.manifest.list.v2+json";
    /// The configuration of a Docker image, which Ollama uses for its models too.
    pub const DOCKER_CONFIG: &str = "application/vnd.docker.container.image.v1+json";
    /// A GGUF file with weights.
    pub const OLLAMA_MODEL: &str = "application/vnd.ollama.image.model";

    const OLLAMA_PREFIX: &str = "application/vnd.ollama.image.";

    /// Takes any text as it is.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The part a layer plays in its model: `model`, `projector`, `adapter`, `template`, …;
    /// `config` for the configuration, the whole media type for anything unknown.
    #[must_use]
    pub fn component(&self) -> &str {
        if self.0 == Self::DOCKER_CONFIG {
            return "config";
        }
        self.0.strip_prefix(Self::OLLAMA_PREFIX).unwrap_or(&self.0)
    }

    /// Whether files of this type are GGUF files and therefore split into tensors.
    #[must_use]
    pub fn is_gguf(&self) -> bool {
        matches!(self.component(), "model" | "projector" | "adapter" | "draft")
    }
}

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
    }

    #[test]
    fn only_weights_are_split() {
        assert!(MediaType::new(MediaType::OLLAMA_MODEL).is_gguf());
        assert!(MediaType::new("application/vnd.ollama.image.projector").is_gguf());
        assert!(!MediaType::new("application/vnd.ollama.image.license").is_gguf());
        assert!(!MediaType::new("application/vnd.ollama.image.embed").is_gguf());
    }
}
