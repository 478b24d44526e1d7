//! A model on its way into the store: its files, what is known of each, and the manifest that results.
//!
//! Imports and pulls fill a [`NewModel`] and commit its manifest. They differ in where the bytes come from.

mod shards;

use blobd_model::facts::ModelFacts;
use blobd_model::kind::ModelKind;
use blobd_store::{FileVersion, Ingest};
use blobd_store_format::descriptor::{Descriptor, MediaType};
use blobd_store_format::digest::Digest;
use blobd_store_format::file_format::FileFormat;
use blobd_store_format::manifest::{Manifest, ManifestError};
use serde::Serialize;

use super::OpError;

/// A file of a model that is stored, or will be after the commit.
#[derive(Debug)]
pub(super) struct NewFile {
    pub(super) descriptor: Descriptor,
    /// Its path in the model. The only file of a model needs none.
    pub(super) name: Option<String>,
    /// From its header, if the format is known; of an archive, from the header of each file.
    pub(super) facts: Vec<ModelFacts>,
    /// What identifies it at its server, if that gives no digest.
    pub(super) version: Option<FileVersion>,
}

/// The files of a model, in the order of its manifest.
#[derive(Debug)]
pub(super) struct NewModel {
    /// For errors: its name.
    name: String,
    files: Vec<NewFile>,
}

impl NewModel {
    pub(super) fn new(name: String, files: Vec<NewFile>) -> Self {
        Self { name, files }
    }

    /// Notes what the model is, and checks that its files are all shards of one model. `manifest` is the one that its
    /// registry has published.
    ///
    /// # Errors
    /// [`OpError::Shards`].
    pub(super) fn check_published(&self, ingest: &mut Ingest, manifest: &Manifest) -> Result<(), OpError> {
        ingest.note_kind(kind_of(manifest, self.facts()?.kind));
        Ok(())
    }

    /// Composes the manifest of a model that no registry has published, as Ollama would write it. Notes what the model
    /// is, and the versions of its files.
    ///
    /// # Errors
    /// [`OpError::Shards`]; those of [`Ingest::add_bytes`] and [`Manifest::compose_named`].
    pub(super) fn compose(self, ingest: &mut Ingest) -> Result<Manifest, OpError> {
        let facts = self.facts()?;
        // A single file gets no name: the manifest must depend on its content only.
        let is_alone = self.files.len() == 1;
        let (mut layers, mut versions) = (Vec::new(), Vec::new());
        for NewFile { descriptor, name, version, .. } in self.files {
            layers.push((descriptor, name.filter(|_| !is_alone)));
            versions.extend(version);
        }
        ingest.note_versions(versions);
        let layers = with_media_type_of(facts.kind, layers);
        let config = config(&facts, &layers)?;
        let config = Descriptor {
            media_type: MediaType::new(MediaType::DOCKER_CONFIG),
            digest: ingest.add_bytes(&config)?,
            size: config.len() as u64,
        };
        let manifest = Manifest::compose_named(config, layers)?;
        ingest.note_kind(kind_of(&manifest, facts.kind));
        Ok(manifest)
    }

    /// The facts of the whole model, from its files of weights.
    fn facts(&self) -> Result<ModelFacts, OpError> {
        let weights = self.files.iter().filter(|file| file.descriptor.media_type.component() == WEIGHTS);
        let facts: Vec<_> = weights.flat_map(|file| file.facts.iter().cloned()).collect();
        shards::joined(&self.name, &facts)
    }
}

fn config(facts: &ModelFacts, layers: &[(Descriptor, Option<String>)]) -> Result<Vec<u8>, ManifestError> {
    let family = facts.architecture.as_deref().unwrap_or("unknown");
    let config = ModelConfig {
        model_format: facts.format.unwrap_or(FileFormat::DEFAULT.name()),
        model_family: family,
        model_families: [family],
        model_type: facts.parameter_size(),
        file_type: facts.quantization.as_deref().unwrap_or("unknown"),
        architecture: "amd64",
        os: "linux",
        rootfs: RootFs { r#type: "layers", diff_ids: layers.iter().map(|(file, _)| file.digest).collect() },
    };
    serde_json::to_vec(&config).map_err(ManifestError::Json)
}

/// Gives a file that is the only one with tensors the media type of its kind: an adapter that is imported by itself is an
/// adapter.
fn with_media_type_of(
    kind: ModelKind,
    mut layers: Vec<(Descriptor, Option<String>)>,
) -> Vec<(Descriptor, Option<String>)> {
    let mut with_tensors = layers.iter_mut().filter(|(file, _)| file.media_type.holds_tensors());
    if let (Some((only, _)), None) = (with_tensors.next(), with_tensors.next())
        && only.media_type.component() == WEIGHTS
    {
        only.media_type = MediaType::new(kind.media_type());
    }
    layers
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
