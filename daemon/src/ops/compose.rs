//! Composes the manifest of a model that no registry has published, as Ollama would write it.

use blobd_store::Ingest;
use blobd_store_format::descriptor::{Descriptor, MediaType};
use blobd_store_format::digest::Digest;
use blobd_store_format::file_format::FileFormat;
use blobd_store_format::manifest::{Manifest, ManifestError};
use blobd_store_format::model_facts::ModelFacts;
use serde::Serialize;

use super::OpError;
use crate::ingest::IngestedFile;

#[derive(Clone, Debug)]
pub(super) struct Part {
    pub(super) file: Descriptor,
    /// Its name, if the model has several files.
    pub(super) name: Option<String>,
}

impl Part {
    /// A model's only file of weights. It has no name, so that the manifest depends only on the content.
    pub(super) fn model(file: &IngestedFile) -> Self {
        let media_type = MediaType::new(MediaType::OLLAMA_MODEL);
        Self { file: Descriptor { media_type, digest: file.digest, size: file.size }, name: None }
    }
}

pub(super) fn compose(ingest: &mut Ingest, parts: &[Part], facts: &ModelFacts) -> Result<Manifest, OpError> {
    let family = facts.architecture.as_deref().unwrap_or("unknown");
    let config = ModelConfig {
        model_format: facts.format.unwrap_or(FileFormat::DEFAULT.name()),
        model_family: family,
        model_families: [family],
        model_type: facts.parameter_size(),
        file_type: facts.quantization.as_deref().unwrap_or("unknown"),
        architecture: "amd64",
        os: "linux",
        rootfs: RootFs { r#type: "layers", diff_ids: parts.iter().map(|part| part.file.digest).collect() },
    };
    let config = serde_json::to_vec(&config).map_err(ManifestError::Json)?;
    let config = Descriptor {
        media_type: MediaType::new(MediaType::DOCKER_CONFIG),
        digest: ingest.add_bytes(&config)?,
        size: config.len() as u64,
    };
    let layers = parts.iter().map(|part| (part.file.clone(), part.name.clone())).collect();
    Ok(Manifest::compose_named(config, layers)?)
}

/// The configuration that Ollama writes for a model, with its keys in its order.
#[derive(Serialize)]
struct ModelConfig<'a> {
    model_format: &'a str,
    model_family: &'a str,
    model_families: [&'a str; 1],
    model_type: String,
    file_type: &'a str,
    architecture: &'a str,
    os: &'a str,
    rootfs: RootFs,
}

#[derive(Serialize)]
struct RootFs {
    r#type: &'static str,
    diff_ids: Vec<Digest>,
}
