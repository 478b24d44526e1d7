//! The document of `show --json`, from which the tables are made too.

use std::collections::{BTreeMap, BTreeSet};

use blobd_cli_common::connect::{Connected, client_error};
use blobd_cli_common::described_model::{DescribedModel, ModelLocation};
use blobd_client::protocol::access::PolicyDecision;
use blobd_client::protocol::response::ModelSharing;
use blobd_client::protocol::space::SharedWith;
use blobd_model::capabilities::{CapabilitySources, capabilities};
use blobd_model::card::ModelCard;
use blobd_model::config::{ConfigQuantization, ModelConfig, QUANTIZATION_FILES};
use blobd_model::facts::ModelFacts;
use blobd_model::kind::ModelKind;
use blobd_model::manifest_config::{ConfiguredDraft, ManifestConfig};
use blobd_model::metadata_json::Abridger;
use blobd_model::overview::{ModelOverview, TypeShare};
use blobd_store_format::descriptor::MediaType;
use blobd_store_format::file_format::FileFormat;
use blobd_store_format::gguf::{Header, MAGIC, MetadataValue, key_text};
use blobd_store_format::recipe::TensorEntry;
use blobd_store_format::safetensors;
use blobd_store_format::stored_file::StoredForm;
use blobd_store_format::tensor::TensorFormat;
use serde::Serialize;
use serde_json::{Map, Value as Json};

use super::header::{self, HeaderForm, OtherHeader, WholeKey};
use super::invalid;
use super::tensors::{self, NetworkLayer, ParsedFile, SafetensorsFile, ShownTensor, TensorFacts};
use crate::tensor_choice::file_of_described;
use crate::{Digest, ErrorBody, Reference, local_model};

#[derive(Debug, Serialize)]
pub(super) struct Document {
    pub(super) name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) digest: Option<Digest>,
    pub(super) stored: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) origin: Option<String>,
    /// What the daemon's policy decides for the caller; absent if it is not stored.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) policy: Option<PolicyDecision>,
    pub(super) kind: ModelKind,
    /// What an adapter's header says of it; absent for other kinds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) adapter: Option<ShownAdapter>,
    /// Who made the model, and under which license; absent if no header says it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) about: Option<ModelCard>,
    /// What the manifest's configuration says for Ollama; absent if it says nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) config: Option<ShownConfig>,
    pub(super) architecture: Option<String>,
    pub(super) parameters: u64,
    pub(super) quantization: Option<String>,
    pub(super) bits_per_weight: Option<f64>,
    pub(super) types: Vec<TypeRow>,
    pub(super) context_length: Option<u64>,
    pub(super) embedding_length: Option<u64>,
    pub(super) block_count: Option<u64>,
    pub(super) head_count: Option<u64>,
    pub(super) head_count_kv: Option<u64>,
    pub(super) expert_count: Option<u64>,
    pub(super) expert_used_count: Option<u64>,
    pub(super) vocabulary_size: Option<u64>,
    pub(super) capabilities: Vec<String>,
    /// The sum of all files.
    pub(super) size: u64,
    /// Its sharing on disk; absent if it is not stored or the store is not indexed yet.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub(super) sharing: Option<Sharing>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) header: Option<HeaderForm>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) keys: Option<Vec<WholeKey>>,
    /// The headers of the other files with tensors, such as further shards and a projector.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) other_headers: Vec<OtherHeader>,
    pub(super) metadata: BTreeMap<String, Json>,
    pub(super) layers: Vec<LayerRow>,
    pub(super) tensors: Vec<ShownTensor>,
    /// With `--layers`, the layers of the network; `layers` are files.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) network_layers: Option<Vec<NetworkLayer>>,
    #[serde(skip)]
    pub(super) files: Vec<ParsedFile>,
}

#[derive(Debug, PartialEq, Serialize)]
pub(super) struct ShownAdapter {
    /// `adapter.type`, such as `lora`.
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    type_name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    alpha: Option<f64>,
    /// The name of the model for which it was made, or its page.
    #[serde(skip_serializing_if = "Option::is_none")]
    base: Option<String>,
}

impl ShownAdapter {
    fn of(header: &Header) -> Self {
        let text = |key: &str| header.value(key)?.as_str().map(str::to_owned);
        let base = ModelCard::from_header(header).base_models.into_iter().next();
        Self {
            type_name: text("adapter.type"),
            alpha: header.value("adapter.lora.alpha").and_then(|alpha| alpha.to_string().parse().ok()),
            base: base.and_then(|base| base.name.or(base.url)),
        }
    }
}

#[derive(Debug, Serialize)]
pub(super) struct TypeRow {
    #[serde(rename = "type")]
    pub(super) type_name: String,
    pub(super) tensors: u64,
    pub(super) elements: u64,
    pub(super) bytes: u64,
}

/// The fields of a [`ManifestConfig`] that the layers do not tell.
#[derive(Debug, Default, PartialEq, Serialize)]
pub(super) struct ShownConfig {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) remote_host: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) remote_model: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) capabilities: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) renderer: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) parser: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) requires: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) base_name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) draft: Option<ConfiguredDraft>,
    #[serde(skip_serializing_if = "Map::is_empty")]
    pub(super) generation_defaults: Map<String, Json>,
}

#[derive(Debug, Serialize)]
pub(super) struct Sharing {
    pub(super) unique_bytes: u64,
    pub(super) shared_bytes: u64,
    pub(super) shared_with: Vec<SharedWith>,
}

#[derive(Debug, Serialize)]
pub(super) struct LayerRow {
    pub(super) media_type: MediaType,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) digest: Option<Digest>,
    pub(super) size: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) stored: Option<StoredForm>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) unpacked_from: Option<Digest>,
}

impl Document {
    pub(super) fn new(
        model: &DescribedModel,
        connected: Option<&Connected>,
        is_full: bool,
    ) -> Result<Self, ErrorBody> {
        let (files, safetensors) = (parse(model)?, parse_safetensors(model)?);
        let mut document = Self::from_files(model, files);
        match (&model.place, connected) {
            (ModelLocation::Store(reference), Some(connected)) => {
                document.add_stored(connected, reference, &safetensors)?;
            }
            _ => document.add_unstored(model, &safetensors),
        }
        if is_full {
            document.add_headers(&safetensors);
        }
        Ok(document)
    }

    fn from_files(model: &DescribedModel, files: Vec<ParsedFile>) -> Self {
        let config = config(model);
        let weights = weights(&files);
        let overview = ModelOverview::new(weights.iter().map(|file| (&file.header, &file.layout)));
        let first = weights.first().map(|file| &file.header);
        let facts = first.map(|header| ModelFacts::from_header(header)).unwrap_or_default();
        let kind = kind(model, weights.first().copied());
        let about = first.map(ModelCard::from_header).filter(|card| *card != ModelCard::default());
        let origin = match &model.place {
            ModelLocation::Registry(origin) => Some(origin.clone()),
            ModelLocation::Store(_) | ModelLocation::LocalFiles => None,
        };
        Self {
            name: model.name.clone(),
            digest: model.digest,
            stored: matches!(model.place, ModelLocation::Store(_)),
            origin,
            policy: None,
            kind,
            adapter: first.filter(|_| kind == ModelKind::Adapter).map(ShownAdapter::of),
            about,
            architecture: facts.architecture,
            parameters: overview.parameters,
            quantization: facts.quantization,
            bits_per_weight: overview.bits_per_weight(),
            context_length: overview.context_length.or(config.context_length),
            embedding_length: overview.embedding_length.or(config.embedding_length),
            block_count: overview.block_count,
            head_count: overview.head_count,
            head_count_kv: overview.head_count_kv,
            expert_count: overview.expert_count,
            expert_used_count: overview.expert_used_count,
            vocabulary_size: overview.vocabulary_size,
            types: overview.types.into_iter().map(TypeRow::from).collect(),
            capabilities: capabilities_of(model, kind, first, &files, &config),
            config: ShownConfig::of(config),
            size: model.files.iter().fold(0, |sum, file| sum.saturating_add(file.size)),
            sharing: None,
            header: None,
            keys: None,
            other_headers: Vec::new(),
            metadata: first.map(metadata).unwrap_or_default(),
            layers: layers(model),
            tensors: Vec::new(),
            network_layers: None,
            files,
        }
    }

    fn add_stored(
        &mut self,
        connected: &Connected,
        reference: &Reference,
        safetensors: &[SafetensorsFile],
    ) -> Result<(), ErrorBody> {
        let mut details = connected.client.model(reference).map_err(client_error)?;
        self.tensors = tensors::stored(&mut details, &self.files, safetensors);
        // The index may still be in preparation; everything else can be shown.
        self.sharing = connected.client.sharing(reference).ok().map(Sharing::from);
        self.origin = details.origin;
        self.policy = details.policy;
        self.kind = details.kind.unwrap_or(self.kind);
        self.architecture = details.architecture;
        self.parameters = details.parameters;
        self.quantization = details.quantization;
        self.metadata = details.metadata;
        let layers = details.layers.into_iter().map(|layer| LayerRow {
            media_type: layer.media_type,
            name: layer.name,
            digest: Some(layer.digest),
            size: layer.size,
            stored: Some(layer.stored),
            unpacked_from: layer.unpacked_from,
        });
        self.layers = layers.collect();
        self.add_facts_of_layers();
        Ok(())
    }

    /// Describes a model that is not stored by its headers, and one of safetensors files by its JSON files too, as the daemon
    /// does for a stored model.
    fn add_unstored(&mut self, model: &DescribedModel, safetensors: &[SafetensorsFile]) {
        self.tensors = tensors::in_files(&self.files, safetensors);
        let Some(first) = safetensors.first().filter(|_| self.files.is_empty()) else { return };
        let json = |name: &str| {
            let file = model.files.iter().find(|file| file.name.as_deref() == Some(name))?;
            file.content.as_deref().filter(|_| !file.media_type.holds_tensors())
        };
        let config = json("config.json").and_then(|json| ModelConfig::from_config(json).ok());
        let config = config.filter(|config| config.architecture().is_some());
        let of_index = || ModelConfig::from_model_index(json("model_index.json")?).ok();
        let config = config.or_else(of_index).unwrap_or_default();
        self.architecture = config.architecture().map(str::to_owned);
        let mut abridger = Abridger::new();
        let of_header = first
            .header
            .metadata()
            .iter()
            .map(|(key, text)| (key.clone(), abridger.json(&MetadataValue::String(text.as_bytes()))));
        self.metadata = of_header.chain(config.metadata()).collect();
        let mut quantizations = QUANTIZATION_FILES.iter();
        let quantization = quantizations.find_map(|name| ConfigQuantization::from_file(name, json(name)?));
        let entries: Vec<_> = safetensors
            .iter()
            .flat_map(|file| file.layout.tensors().iter())
            .map(|tensor| local_model::entry(&tensor))
            .collect();
        let elements = |entry: &TensorEntry<'_>| {
            entry.shape.iter().fold(1_u64, |count, length| count.saturating_mul(*length))
        };
        self.parameters = match &quantization {
            Some(quantization) => quantization.parameters(entries.iter().cloned()),
            None => entries.iter().map(elements).fold(0, u64::saturating_add),
        };
        self.add_facts_of_layers();
        let main_type = || self.types.first().map(|row| row.type_name.clone());
        self.quantization = quantization.map(|quantization| quantization.label()).or_else(main_type);
    }

    /// For models without a GGUF header, such as those with safetensors files: adds the numbers and the quantisation mix that
    /// follow from the daemon's description.
    fn add_facts_of_layers(&mut self) {
        if !self.files.is_empty() || self.tensors.is_empty() {
            return;
        }
        let architecture = self.architecture.clone().unwrap_or_default();
        let metadata = &self.metadata;
        let number = |key| metadata.get(&format!("{architecture}.{key}")).and_then(Json::as_u64);
        self.context_length = number("context_length");
        self.embedding_length = number("embedding_length");
        self.block_count = number("block_count");
        self.head_count = number("attention.head_count");
        self.head_count_kv = number("attention.head_count_kv");
        self.expert_count = number("expert_count");
        self.expert_used_count = number("expert_used_count");
        self.vocabulary_size = number("vocab_size");
        self.types = self.types_of_tensors();
        self.bits_per_weight = self.bits_of_layers();
    }

    fn types_of_tensors(&self) -> Vec<TypeRow> {
        let mut types: BTreeMap<&str, (u64, u64, u64)> = BTreeMap::new();
        for tensor in &self.tensors {
            let TensorFacts { type_name, shape, size, .. } = tensor.facts();
            let (tensors, elements, bytes) = types.entry(type_name).or_default();
            let count = shape.iter().fold(1_u64, |count, length| count.saturating_mul(*length));
            (*tensors, *elements) = (tensors.saturating_add(1), elements.saturating_add(count));
            *bytes = bytes.saturating_add(size);
        }
        let row = |(name, (tensors, elements, bytes)): (&str, _)| {
            let type_name = name.to_owned();
            TypeRow { type_name, tensors, elements, bytes }
        };
        let mut rows: Vec<_> = types.into_iter().map(row).collect();
        rows.sort_by_key(|row| std::cmp::Reverse(row.bytes));
        rows
    }

    /// The bits per parameter: of one layer per tensor with scales, biases and headers, otherwise of the tensors.
    #[expect(clippy::cast_precision_loss, reason = "shown with two decimals")]
    fn bits_of_layers(&self) -> Option<f64> {
        let layers = self.layers.iter().filter(|layer| layer.media_type.component() == "tensor");
        let of_layers = layers.fold(0_u64, |sum, layer| sum.saturating_add(layer.size));
        let of_types = || self.types.iter().fold(0_u64, |sum, row| sum.saturating_add(row.bytes));
        let bytes = if of_layers > 0 { of_layers } else { of_types() };
        (self.parameters > 0).then(|| bytes as f64 * 8.0 / self.parameters as f64)
    }

    /// Without `--full`, the tensors in the store have exactly the keys of the daemon's own description.
    pub(super) fn forget_file_offsets(&mut self) {
        for tensor in &mut self.tensors {
            if let ShownTensor::Stored { file_offset, .. } = tensor {
                *file_offset = None;
            }
        }
    }

    /// The first header is that of the first GGUF file, which describes the model; without one, that of the first
    /// safetensors file.
    fn add_headers(&mut self, safetensors: &[SafetensorsFile]) {
        let of_gguf = self.files.iter().map(|file| OtherHeader {
            layer: file.number,
            header: HeaderForm::new(&file.header),
            keys: header::keys(&file.header),
        });
        let of_safetensors = safetensors.iter().map(|file| OtherHeader {
            layer: file.number,
            header: HeaderForm::of_safetensors(&file.header),
            keys: header::keys_of_safetensors(&file.header),
        });
        let mut headers = of_gguf.chain(of_safetensors);
        let first = headers.next();
        let other = headers.collect();
        self.other_headers = other;
        if let Some(OtherHeader { header, keys, .. }) = first {
            (self.header, self.keys) = (Some(header), Some(keys));
        }
    }
}

impl ShownConfig {
    fn of(config: ManifestConfig) -> Option<Self> {
        let shown = Self {
            remote_host: config.remote_host,
            remote_model: config.remote_model,
            capabilities: config.capabilities,
            renderer: config.renderer,
            parser: config.parser,
            requires: config.requires,
            base_name: config.base_name,
            draft: config.draft,
            generation_defaults: config.generation_defaults,
        };
        (shown != Self::default()).then_some(shown)
    }
}

impl From<TypeShare> for TypeRow {
    fn from(share: TypeShare) -> Self {
        let TypeShare { type_name, tensor_count, elements, bytes } = share;
        Self { type_name, tensors: tensor_count, elements, bytes }
    }
}

impl From<ModelSharing> for Sharing {
    fn from(sharing: ModelSharing) -> Self {
        let ModelSharing { unique_bytes, shared_bytes, models, .. } = sharing;
        Self { unique_bytes, shared_bytes, shared_with: models }
    }
}

/// The files with tensors, each once, even if the manifest names it several times.
fn parse(model: &DescribedModel) -> Result<Vec<ParsedFile>, ErrorBody> {
    let mut seen = BTreeSet::new();
    let mut parsed = Vec::new();
    for (number, file) in model.files.iter().enumerate() {
        let content = file.content.as_deref().filter(|_| file.media_type.holds_tensors());
        // Only GGUF headers have the metadata that is described here.
        let Some(content) = content.filter(|content| content.starts_with(&MAGIC)) else { continue };
        if file.digest.is_some_and(|digest| !seen.insert(digest)) {
            continue;
        }
        let blame = |error| invalid(format!("{}: {error}", file.name.as_deref().unwrap_or(&model.name)));
        let header = Header::parse(content).map_err(blame)?;
        let layout = header.file_layout(file.size).map_err(blame)?;
        parsed.push(ParsedFile { number, file: file_of_described(file), header, layout });
    }
    Ok(parsed)
}

/// The safetensors files among them.
fn parse_safetensors(model: &DescribedModel) -> Result<Vec<SafetensorsFile>, ErrorBody> {
    let mut seen = BTreeSet::new();
    let mut parsed = Vec::new();
    for (number, file) in model.files.iter().enumerate() {
        let content = file.content.as_deref().filter(|_| file.media_type.holds_tensors());
        let format = content.and_then(FileFormat::from_start).map(FileFormat::tensor_format);
        let Some(content) = content.filter(|_| format == Some(TensorFormat::Safetensors)) else { continue };
        if file.digest.is_some_and(|digest| !seen.insert(digest)) {
            continue;
        }
        let blame = |error| invalid(format!("{}: {error}", file.name.as_deref().unwrap_or(&model.name)));
        let header = safetensors::Header::parse_start(content).map_err(blame)?;
        let layout = file.model_header().map(|header| header.file_layout(file.size));
        let layout = layout.transpose().map_err(|error| invalid(format!("{}: {error}", model.name)))?;
        let Some(layout) = layout else { continue };
        parsed.push(SafetensorsFile { number, file: file_of_described(file), header, layout });
    }
    Ok(parsed)
}

fn config(model: &DescribedModel) -> ManifestConfig {
    let file = model.files.iter().find(|file| file.media_type.component() == "config");
    let content = file.and_then(|file| file.content.as_deref());
    content.map(ManifestConfig::parse).unwrap_or_default()
}

/// The files of the described component: the model, or what takes its place, such as an adapter.
fn weights(files: &[ParsedFile]) -> Vec<&ParsedFile> {
    let is_model = files.iter().any(|file| file.file.component() == "model");
    let component = if is_model { Some("model") } else { files.first().map(|file| file.file.component()) };
    files.iter().filter(|file| Some(file.file.component()) == component).collect()
}

fn kind(model: &DescribedModel, first: Option<&ParsedFile>) -> ModelKind {
    if let Some(file) = first {
        return ModelKind::for_layer(file.file.component(), Some(&file.header));
    }
    // Only models of several components, which generate images, have an index of them.
    if model.files.iter().any(|file| file.name.as_deref() == Some("model_index.json")) {
        return ModelKind::Diffusion;
    }
    let weights = model.files.iter().find(|file| file.media_type.holds_tensors());
    weights.map_or_else(ModelKind::default, |file| ModelKind::for_layer(file.media_type.component(), None))
}

fn capabilities_of(
    model: &DescribedModel,
    kind: ModelKind,
    header: Option<&Header>,
    files: &[ParsedFile],
    config: &ManifestConfig,
) -> Vec<String> {
    let is_projector = |component: &str| component == "projector" && kind != ModelKind::Projector;
    let projectors = files.iter().filter(|file| is_projector(file.file.component()));
    let projectors: Vec<&Header> = projectors.map(|file| &file.header).collect();
    capabilities(&CapabilitySources {
        kind,
        header,
        projectors: &projectors,
        has_projector: model.files.iter().any(|file| is_projector(file.media_type.component())),
        template: model.text("template"),
        config: Some(config),
    })
}

fn metadata(header: &Header) -> BTreeMap<String, Json> {
    let mut abridger = Abridger::new();
    header.metadata().map(|(key, value)| (key_text(key).into_owned(), abridger.json(&value))).collect()
}

fn layers(model: &DescribedModel) -> Vec<LayerRow> {
    let row = |file: &blobd_cli_common::described_model::DescribedFile| LayerRow {
        media_type: file.media_type.clone(),
        name: file.name.clone(),
        digest: file.digest,
        size: file.size,
        stored: None,
        unpacked_from: None,
    };
    model.files.iter().map(row).collect()
}
