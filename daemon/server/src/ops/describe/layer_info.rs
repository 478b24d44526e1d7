//! The facts about a model without a GGUF file, from its layers: one layer per tensor, and `config.json`.

use std::collections::HashMap;

use blobd_client::fit::FitContent;
use blobd_client::protocol::response::{ModelDetails, ModelTensor};
use blobd_model::config::{ConfigQuantization, ModelConfig, QUANTIZATION_FILES};
use blobd_model::tensor_layers::{DescribedTensor, Quantization, TensorLayers, Totals};
use blobd_store::{FileReader, Model, Store, StoreError, StoredFile};
use blobd_store_format::digest::Digest;
use blobd_store_format::safetensors::Header;
use blobd_store_format::tensor::Experts;
use blobd_store_format::tensor::TensorFormat;
use serde_json::Value as Json;

use crate::ops::OpError;

/// The longest header that is read. That of a group of 512 experts, each a single tensor, is shorter.
const MAX_HEADER_BYTES: u64 = 1 << 20;
/// The bytes of all headers together. A tensor with its scales takes some 300 bytes, and the largest models have
/// some thousand of them.
const MAX_HEADERS_BYTES: u64 = 16 << 20;
/// The most tensors that are listed, including scales and biases.
const MAX_TENSORS: usize = 1 << 16;
/// The longest JSON file that is read. Those of models have some KiB.
const MAX_JSON_BYTES: u64 = 1 << 20;

/// The most bytes of the layers' headers that [`describe`] reads.
pub(super) fn header_bytes(model: &Model) -> u64 {
    let headers = tensor_layers(model).map(|(_, file)| file.descriptor.size.min(MAX_HEADER_BYTES));
    headers.fold(0, u64::saturating_add).min(MAX_HEADERS_BYTES)
}

/// Describes a model without a GGUF file, if it has layers that are tensors, in the terms of GGUF: the architecture and
/// numbers of `config.json`, and the tensors in the headers of the layers.
///
/// A layer that is missing or is not a safetensors file is left out, as Ollama does: `verify` reports it. If the layers
/// exceed a limit or contradict each other, no tensors are listed.
pub(super) fn describe(store: &Store, model: &Model, details: &mut ModelDetails) -> Result<(), OpError> {
    if tensor_layers(model).next().is_none() {
        return Ok(());
    }
    let index = describe_config(store, model, details)?;
    let Some(layers) = layers(store, model)? else { return Ok(()) };
    let index = index.and_then(|bytes| serde_json::from_slice::<Json>(&bytes).ok());
    let index = index.as_ref().map(Quantization::from_model_index).unwrap_or_default();
    let Totals { parameters, quantization } = Totals::from_tensors(layers.describe(&index));
    (details.parameters, details.quantization) = (parameters, quantization);
    details.metadata.insert("general.parameter_count".to_owned(), parameters.into());
    let numbers: HashMap<Digest, u32> = details.layers.iter().map(|layer| layer.digest).zip(0..).collect();
    let listed = layers.describe(&index).filter_map(|tensor| listed(model, &numbers, tensor)).collect();
    details.tensors = listed;
    Ok(())
}

/// Adds the architecture and the numbers of `config.json`, or of `model_index.json`, whose content is returned.
pub(super) fn describe_config(
    store: &Store,
    model: &Model,
    details: &mut ModelDetails,
) -> Result<Option<Vec<u8>>, OpError> {
    let (config, index) = (json(store, model, "config.json")?, json(store, model, "model_index.json")?);
    let config = config.and_then(|bytes| ModelConfig::from_config(&bytes).ok()).unwrap_or_default();
    let of_index = index.as_ref().and_then(|bytes| ModelConfig::from_model_index(bytes).ok());
    let config = if config.architecture().is_some() { config } else { of_index.unwrap_or_default() };
    details.architecture = config.architecture().map(str::to_owned);
    details.metadata.extend(config.metadata());
    Ok(index)
}

/// The quantisation that `config.json` or a file of a quantisation tool states.
pub(super) fn quantization(store: &Store, model: &Model) -> Result<Option<ConfigQuantization>, OpError> {
    for name in QUANTIZATION_FILES {
        let json = json(store, model, name)?;
        let found = json.and_then(|bytes| ConfigQuantization::from_file(name, &bytes));
        if found.is_some() {
            return Ok(found);
        }
    }
    Ok(None)
}

/// The layers that are tensors, with their number in the model.
fn tensor_layers(model: &Model) -> impl Iterator<Item = (usize, &StoredFile)> {
    let files = model.files.iter().enumerate();
    files.filter(|(_, file)| is_layer(file))
}

fn is_layer(file: &StoredFile) -> bool {
    file.recipe.is_none() && FitContent::is_layer(&file.descriptor.media_type)
}

/// The tensors in the layers; `None` above a limit, or if two layers have a tensor of one name.
fn layers(store: &Store, model: &Model) -> Result<Option<TensorLayers>, OpError> {
    let names: Vec<Option<&str>> = model.manifest.names().collect();
    let (mut layers, mut bytes, mut tensors) = (TensorLayers::new(""), 0_u64, 0_usize);
    for (number, file) in tensor_layers(model) {
        let Some(name) = names.get(number).copied().flatten() else { continue };
        let Some(header) = header(store, file)? else { continue };
        bytes = bytes.saturating_add(header.data_offset());
        tensors = tensors.saturating_add(header.tensors().len());
        let is_within_limits = bytes <= MAX_HEADERS_BYTES && tensors <= MAX_TENSORS;
        if !is_within_limits || layers.add(name, number, &header).is_err() {
            return Ok(None);
        }
    }
    Ok(Some(layers))
}

/// The headers of a model's layers, limited in total.
pub(super) struct LayerHeaders {
    bytes_left: u64,
}

impl LayerHeaders {
    pub(super) const fn new() -> Self {
        Self { bytes_left: MAX_HEADERS_BYTES }
    }

    /// The header of a file if it is a layer; `None` above the limit too.
    pub(super) fn read(&mut self, store: &Store, file: &StoredFile) -> Result<Option<Header>, OpError> {
        let header = if is_layer(file) { header(store, file)? } else { None };
        let left = header.as_ref().and_then(|header| self.bytes_left.checked_sub(header.data_offset()));
        self.bytes_left = left.unwrap_or(self.bytes_left);
        Ok(header.filter(|_| left.is_some()))
    }
}

/// The header of a layer's file; `None` if the file is missing or not a safetensors file of the expected size, or its
/// header is too long.
fn header(store: &Store, file: &StoredFile) -> Result<Option<Header>, OpError> {
    let Some(start) = start(store, file, Header::LENGTH_BYTES as u64)? else { return Ok(None) };
    let end = start.as_slice().try_into().ok().and_then(|length| Header::end(length).ok());
    let Some(end) = end.filter(|end| *end <= MAX_HEADER_BYTES) else { return Ok(None) };
    let start = self::start(store, file, end)?;
    Ok(start.and_then(|start| Header::parse(&start, file.descriptor.size).ok()))
}

/// Reads a JSON file of the model; `None` if it has no such file, or if the file is missing or too long.
fn json(store: &Store, model: &Model, name: &str) -> Result<Option<Vec<u8>>, OpError> {
    let mut files = model.files.iter().zip(model.manifest.names());
    let file =
        files.find(|(file, found)| *found == Some(name) && file.descriptor.media_type.component() == "json");
    match file.filter(|(file, _)| file.descriptor.size <= MAX_JSON_BYTES) {
        Some((file, _)) => start(store, file, file.descriptor.size),
        None => Ok(None),
    }
}

/// Reads the first bytes of a file, fewer if it is shorter; `None` if it is missing or shorter than in its manifest.
fn start(store: &Store, file: &StoredFile, length: u64) -> Result<Option<Vec<u8>>, OpError> {
    match FileReader::new(store.content(), file).read_range(0..length) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(StoreError::MissingBlob { .. } | StoreError::BlobSize { .. }) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn listed(model: &Model, numbers: &HashMap<Digest, u32>, tensor: DescribedTensor<'_>) -> Option<ModelTensor> {
    let DescribedTensor { name, type_name, shape, stored, .. } = tensor;
    let (offset, size) = (stored.offset_in_file(), stored.size_bytes());
    let digest = model.files.get(stored.layer())?.descriptor.digest;
    Some(ModelTensor {
        name: name.to_owned(),
        type_name: type_name.into_owned(),
        format: TensorFormat::Safetensors,
        digest,
        layer: numbers.get(&digest).copied(),
        experts: experts(name, stored.shape(), size),
        shape,
        offset,
        size,
    })
}

/// The experts of a stack: Ollama packs those of a projection into one tensor with the experts as its slowest dimension.
fn experts(name: &str, shape: &[u64], size: u64) -> Option<Experts> {
    const MARKERS: [&str; 2] = [".experts.", ".switch_mlp."];
    let is_stack = shape.len() == 3 && MARKERS.iter().any(|marker| name.contains(marker));
    let count = shape.first().copied().filter(|_| is_stack && size > 0)?;
    let stride = size.checked_div(count)?;
    (stride.checked_mul(count) == Some(size)).then_some(Experts { count, stride })
}
