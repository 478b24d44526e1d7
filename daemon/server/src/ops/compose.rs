//! Composes the manifest of a model that no registry has published, as Ollama would write it.

use blobd_model::facts::ModelFacts;
use blobd_model::kind::ModelKind;
use blobd_store::Ingest;
use blobd_store_format::descriptor::{Descriptor, MediaType};
use blobd_store_format::digest::Digest;
use blobd_store_format::file_format::FileFormat;
use blobd_store_format::manifest::{Manifest, ManifestError};
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

/// Composes a manifest, and notes what the model is.
pub(super) fn compose(
    ingest: &mut Ingest,
    parts: Vec<Part>,
    facts: &ModelFacts,
) -> Result<Manifest, OpError> {
    let parts = with_media_type_of(facts.kind, parts);
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
    let layers = parts.into_iter().map(|part| (part.file, part.name)).collect();
    let manifest = Manifest::compose_named(config, layers)?;
    ingest.note_kind(kind_of(&manifest, facts.kind));
    Ok(manifest)
}

/// Gives a file that is the only one with tensors the media type of its kind: an adapter that is imported by itself is an
/// adapter.
fn with_media_type_of(kind: ModelKind, mut parts: Vec<Part>) -> Vec<Part> {
    let mut with_tensors = parts.iter_mut().filter(|part| part.file.media_type.holds_tensors());
    if let (Some(only), None) = (with_tensors.next(), with_tensors.next())
        && only.file.media_type.component() == WEIGHTS
    {
        only.file.media_type = MediaType::new(kind.media_type());
    }
    parts
}

/// What a model with this manifest is; `weights` is the kind of its weights by their header.
pub(super) fn kind_of(manifest: &Manifest, weights: ModelKind) -> ModelKind {
    let components = || manifest.layers().iter().map(|layer| layer.media_type.component());
    if components().any(|component| component == WEIGHTS) {
        return weights;
    }
    // Only models of several components, which generate images, have an index of them.
    let is_pipeline = || manifest.names().any(|name| name == Some("model_index.json"));
    let used_as = components().find_map(ModelKind::used_as);
    used_as.unwrap_or_else(|| if is_pipeline() { ModelKind::Diffusion } else { weights })
}

/// The component of a file with weights.
pub(super) const WEIGHTS: &str = "model";

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
