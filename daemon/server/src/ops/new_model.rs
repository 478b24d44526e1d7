//! A model on its way into the store: its files, the facts about each, and the manifest that results.
//!
//! Imports, pulls and edits fill a [`NewModel`] and commit its manifest. They differ in where the bytes come from.

use std::collections::BTreeSet;

use blobd_model::facts::ModelFacts;
use blobd_model::kind::ModelKind;
use blobd_store::{FileVersion, Ingest, RecordedFacts};
use blobd_store_format::descriptor::{Descriptor, MediaType};
use blobd_store_format::digest::Digest;
use blobd_store_format::file_format::{FileFormat, Shard};
use blobd_store_format::manifest::{Manifest, ManifestError};
use blobd_store_format::tensor::TensorFormat;
use serde::Serialize;

use super::OpError;

/// A file of a model that is stored, or will be after the commit.
#[derive(Debug)]
pub(super) struct NewFile {
    pub(super) descriptor: Descriptor,
    /// Its path in the model. A GGUF file that is the only one needs none.
    pub(super) name: Option<String>,
    /// From its header, if the format is known; of an archive, from the header of each file.
    pub(super) facts: Vec<ModelFacts>,
    /// Identifies the file at its server, if that gives no digest.
    pub(super) version: Option<FileVersion>,
}

impl NewFile {
    pub(super) fn new(descriptor: Descriptor, name: Option<&str>) -> Self {
        Self { descriptor, name: name.map(str::to_owned), facts: Vec::new(), version: None }
    }

    fn is_safetensors(&self) -> bool {
        self.facts.iter().any(|facts| facts.format == Some(TensorFormat::Safetensors.name()))
    }
}

/// The files of a model, in the order of its manifest.
#[derive(Debug)]
pub(super) struct NewModel {
    /// For errors.
    name: String,
    files: Vec<NewFile>,
    /// What to do about wrong shards.
    advice: &'static str,
}

impl NewModel {
    /// A model whose files somebody else has put together.
    pub(super) fn new(name: String, files: Vec<NewFile>) -> Self {
        Self { name, files, advice: "only its publisher can correct this" }
    }

    /// A model whose files the requester has chosen.
    pub(super) fn from_chosen(name: String, files: Vec<NewFile>) -> Self {
        Self { advice: "give exactly the shards of one model", ..Self::new(name, files) }
    }

    /// The files, in the order of the manifest.
    pub(super) fn files(&self) -> &[NewFile] {
        &self.files
    }

    /// Notes what the model is, and checks that its files are all shards of one model. `manifest` is the one that its
    /// registry has published.
    ///
    /// # Errors
    /// [`OpError::Shards`].
    pub(super) fn check_published(&self, ingest: &mut Ingest, manifest: &Manifest) -> Result<(), OpError> {
        ingest.note_facts(recorded(manifest, &self.facts()?));
        Ok(())
    }

    /// Composes the manifest of a model that no registry has published, as Ollama would write it. Notes the versions of
    /// its files.
    ///
    /// # Errors
    /// [`OpError::Shards`]; those of [`Ingest::add_bytes`] and [`Manifest::compose_named`].
    pub(super) fn compose(mut self, ingest: &mut Ingest) -> Result<Manifest, OpError> {
        let facts = self.facts()?;
        ingest.note_versions(self.files.iter_mut().filter_map(|file| file.version.take()));
        // The manifest of a single GGUF file depends on its content only. Programs find other weights by their names.
        if let [only] = self.files.as_mut_slice()
            && !only.is_safetensors()
        {
            only.name = None;
        }
        self.give_media_type_of(facts.kind);
        let config = config(&facts, &self.files)?;
        let config = Descriptor {
            media_type: MediaType::new(MediaType::DOCKER_CONFIG),
            digest: ingest.add_bytes(&config)?,
            size: config.len() as u64,
        };
        self.compose_with(ingest, config, &facts)
    }

    /// Composes a manifest with this configuration. Notes what the model is; `facts` are those of its weights.
    ///
    /// # Errors
    /// Those of [`Manifest::compose_named`].
    pub(super) fn compose_with(
        self,
        ingest: &mut Ingest,
        config: Descriptor,
        facts: &ModelFacts,
    ) -> Result<Manifest, OpError> {
        let layers = self.files.into_iter().map(|file| (file.descriptor, file.name)).collect();
        let manifest = Manifest::compose_named(config, layers)?;
        ingest.note_facts(recorded(&manifest, facts));
        Ok(manifest)
    }

    fn facts(&self) -> Result<ModelFacts, OpError> {
        let weights = self.files.iter().filter(|file| file.descriptor.media_type.component() == WEIGHTS);
        let facts: Vec<_> = weights.flat_map(|file| file.facts.iter().cloned()).collect();
        joined(&facts).map_err(|what| OpError::Shards { model: self.name.clone(), what, advice: self.advice })
    }

    /// Gives the only file with tensors the media type of its kind: an adapter that is imported by itself is an adapter. Only
    /// GGUF files say what they are.
    fn give_media_type_of(&mut self, kind: ModelKind) {
        let files = self.files.iter_mut().map(|file| &mut file.descriptor.media_type);
        let mut with_tensors = files.filter(|media_type| media_type.holds_tensors());
        if let (Some(only), None) = (with_tensors.next(), with_tensors.next())
            && only.as_str() == MediaType::OLLAMA_MODEL
        {
            *only = MediaType::new(kind.media_type());
        }
    }
}

fn config(facts: &ModelFacts, files: &[NewFile]) -> Result<Vec<u8>, ManifestError> {
    let family = facts.architecture.as_deref().unwrap_or("unknown");
    let diff_ids = files.iter().map(|file| file.descriptor.digest).collect();
    let config = ModelConfig {
        model_format: facts.format.unwrap_or(FileFormat::DEFAULT.name()),
        model_family: family,
        model_families: [family],
        model_type: facts.parameter_size(),
        file_type: facts.quantization.as_deref().unwrap_or("unknown"),
        architecture: "amd64",
        os: "linux",
        rootfs: RootFs { r#type: "layers", diff_ids },
    };
    serde_json::to_vec(&config).map_err(ManifestError::Json)
}

/// What the store records of a model with this manifest, so that lists need no headers.
pub(super) fn recorded(manifest: &Manifest, facts: &ModelFacts) -> RecordedFacts {
    let kind = Some(kind_of(manifest, facts.kind));
    short_facts(kind, facts.architecture.clone(), facts.quantization.clone())
}

/// Without texts that are too long: headers are untrusted, and a record must stay small.
pub(super) fn short_facts(
    kind: Option<ModelKind>,
    architecture: Option<String>,
    quantization: Option<String>,
) -> RecordedFacts {
    const MAX_BYTES: usize = 100;
    let short = |text: Option<String>| text.filter(|text| text.len() <= MAX_BYTES);
    RecordedFacts { kind, architecture: short(architecture), quantization: short(quantization) }
}

/// Determines the kind of a model with this manifest; `weights` is the kind of its weights by their header.
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

/// Joins the facts of files of weights, summed over shards. Refuses files that are not exactly the shards of one model:
/// the registry's list and the headers are both untrusted, and engines crash or compute wrong results when a shard is
/// missing or repeated.
/// The error says what is wrong.
fn joined(files: &[ModelFacts]) -> Result<ModelFacts, String> {
    let mut facts = files.first().cloned().unwrap_or_default();
    let shards: Vec<(Shard, &ModelFacts)> =
        files.iter().filter_map(|file| Some((file.shard?, file))).collect();
    if let Some(what) = contradiction(&shards) {
        return Err(what);
    }
    if shards.is_empty() {
        // Headers of safetensors files do not say what they are shards of.
        let safetensors =
            || files.iter().filter(|file| file.format == Some(TensorFormat::Safetensors.name()));
        if facts.format == Some(TensorFormat::Safetensors.name()) {
            facts.parameters = safetensors().fold(0, |sum, file| sum.saturating_add(file.parameters));
            facts.tensor_count = safetensors().fold(0, |sum, file| sum.saturating_add(file.tensor_count));
        }
    } else {
        // The others have no metadata.
        let first = shards.iter().find(|(shard, _)| shard.number == Some(0));
        facts.kind = first.map_or(facts.kind, |(_, file)| file.kind);
        let sum = |count: fn(&ModelFacts) -> u64| {
            shards.iter().fold(0u64, |sum, (_, file)| sum.saturating_add(count(file)))
        };
        facts.parameters = sum(|file| file.parameters);
        facts.tensor_count = sum(|file| file.tensor_count);
    }
    Ok(facts)
}

fn contradiction(shards: &[(Shard, &ModelFacts)]) -> Option<String> {
    let (first, _) = shards.first()?;
    let (count, found) = (first.count, shards.len() as u64);
    if let Some((other, _)) = shards.iter().find(|(shard, _)| shard.count != count) {
        return Some(format!("one shard says that there are {count} shards, another says {}", other.count));
    }
    if found != count {
        return Some(missing(shards, count).unwrap_or_else(|| format!("{found} of {count} shards")));
    }
    let mut architectures = shards.iter().filter_map(|(_, file)| file.architecture.as_deref());
    if let Some(expected) = architectures.next()
        && let Some(found) = architectures.find(|found| *found != expected)
    {
        return Some(format!("shards of several models: expected architecture {expected}, found {found}"));
    }
    let mut seen = BTreeSet::new();
    for (shard, _) in shards {
        match shard.number {
            Some(number) if number < count && seen.insert(number) => {}
            Some(number) if number < count => {
                return Some(format!("shard {} twice", number.saturating_add(1)));
            }
            Some(number) => return Some(format!("a shard with number {number} of {count}")),
            None => return Some("a shard without a number".to_owned()),
        }
    }
    let tensor_count = shards.iter().fold(0u64, |sum, (_, file)| sum.saturating_add(file.tensor_count));
    let wrong_total =
        shards.iter().filter_map(|(shard, _)| shard.total_tensor_count).find(|total| *total != tensor_count);
    wrong_total.map(|total| format!("{tensor_count} tensors in all shards, {total} declared"))
}

/// Names the missing shards; `None` if none is missing, or if the numbers of the others are not certain.
fn missing(shards: &[(Shard, &ModelFacts)], count: u64) -> Option<String> {
    /// A header may claim any number of shards.
    const MAX_NAMED: usize = 8;
    let numbers: BTreeSet<u64> = shards.iter().map(|(shard, _)| shard.number).collect::<Option<_>>()?;
    let is_certain = numbers.len() == shards.len() && numbers.iter().all(|number| *number < count);
    let missing = count.checked_sub(numbers.len() as u64).filter(|missing| is_certain && *missing > 0)?;
    let absent = (0..count).filter(|number| !numbers.contains(number)).take(MAX_NAMED);
    let named: Vec<_> = absent.map(|number| number.saturating_add(1).to_string()).collect();
    let (named, more) = (named.join(", "), missing.saturating_sub(named.len() as u64));
    Some(match (missing, more) {
        (1, _) => format!("shard {named} of {count} is missing"),
        (_, 0) => format!("shards {named} of {count} are missing"),
        _ => format!("shards {named} and {more} more of {count} are missing"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(number: u64, count: u64, total: u64) -> ModelFacts {
        let shard = Some(Shard { number: Some(number), count, total_tensor_count: Some(total) });
        ModelFacts { parameters: 10, tensor_count: 2, shard, ..ModelFacts::default() }
    }

    fn refused(files: &[ModelFacts]) -> String {
        joined(files).expect_err("was accepted")
    }

    #[test]
    fn facts_of_all_shards_are_summed() {
        let whole = joined(&[file(1, 2, 4), file(0, 2, 4)]).unwrap();
        assert_eq!((whole.parameters, whole.tensor_count), (20, 4));
        let one = ModelFacts { parameters: 7, ..ModelFacts::default() };
        assert_eq!(joined(&[one]).unwrap().parameters, 7);
        assert_eq!(joined(&[]).unwrap(), ModelFacts::default());
    }

    #[test]
    fn missing_repeated_or_contradictory_shards_are_refused() {
        assert!(refused(&[file(0, 2, 4)]).contains("shard 2 of 2 is missing"));
        assert!(refused(&[file(2, 3, 4), file(0, 3, 4)]).contains("shard 2 of 3 is missing"));
        assert!(refused(&[file(1, 4, 4)]).contains("shards 1, 3, 4 of 4 are missing"));
        let many = refused(&[file(0, u64::MAX, 4)]);
        assert!(many.contains("shards 2, 3, 4, 5, 6, 7, 8, 9 and 18446744073709551606 more of"), "{many}");
        assert!(refused(&[file(0, 1, 4), file(0, 1, 4)]).contains("2 of 1 shards"));
        assert!(refused(&[file(0, 2, 4), file(0, 2, 4)]).contains("shard 1 twice"));
        assert!(refused(&[file(0, 2, 4), file(7, 2, 4)]).contains("number 7"));
        let of = |number, architecture: Option<&str>| ModelFacts {
            architecture: architecture.map(str::to_owned),
            ..file(number, 2, 4)
        };
        assert!(joined(&[of(0, Some("llama")), of(1, None)]).is_ok());
        let found = "expected architecture llama, found qwen2";
        assert!(refused(&[of(0, Some("llama")), of(1, Some("qwen2"))]).contains(found));
        assert!(refused(&[file(0, 2, 4), file(1, 3, 4)]).contains("another says 3"));
        assert!(refused(&[file(0, 2, 5), file(1, 2, 5)]).contains("4 tensors in all shards, 5 declared"));
    }
}
