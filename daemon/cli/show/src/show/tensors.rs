//! The tensors of a described model, with their positions in the original files.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use blobd_client::protocol::response::{ModelDetails, ModelTensor};
use blobd_model::diff::TensorFile;
use blobd_model::layers::{block_number, split_name};
use blobd_store_format::file_layout::{FileLayout, RangeContent, TensorRange};
use blobd_store_format::gguf::Header;
use blobd_store_format::safetensors;
use blobd_store_format::tensor::Experts;
use blobd_store_format::tensor::TensorFormat;
use serde::Serialize;

use crate::Digest;
use crate::tensor_choice::file_of_layer;

#[derive(Debug)]
pub(super) struct ParsedFile {
    pub(super) number: usize,
    pub(super) file: TensorFile,
    pub(super) header: Header,
    pub(super) layout: FileLayout,
}

/// A safetensors file. Its header has no facts about the model.
#[derive(Debug)]
pub(super) struct SafetensorsFile {
    pub(super) number: usize,
    pub(super) file: TensorFile,
    pub(super) header: safetensors::Header,
    pub(super) layout: FileLayout,
}

#[derive(Clone, Debug, Serialize)]
#[serde(untagged)]
pub(super) enum ShownTensor {
    Stored {
        #[serde(flatten)]
        entry: ModelTensor,
        /// Its file, if the model has several files with tensors.
        #[serde(skip_serializing_if = "Option::is_none")]
        file: Option<String>,
        /// In bytes from the start of the original file; in JSON only with `--full`.
        #[serde(skip_serializing_if = "Option::is_none")]
        file_offset: Option<u64>,
    },
    InFile {
        name: String,
        #[serde(rename = "type")]
        type_name: String,
        format: TensorFormat,
        shape: Vec<u64>,
        size: u64,
        #[serde(skip_serializing_if = "Option::is_none")]
        file: Option<String>,
        /// In bytes from the start of the original file.
        file_offset: u64,
        #[serde(skip_serializing_if = "Option::is_none")]
        experts: Option<Experts>,
    },
}

/// The facts of a tensor, stored or not.
pub(super) struct TensorFacts<'t> {
    pub(super) name: &'t str,
    pub(super) type_name: &'t str,
    pub(super) shape: &'t [u64],
    pub(super) size: u64,
    pub(super) file: Option<&'t str>,
    pub(super) file_offset: Option<u64>,
    pub(super) blob: Option<Digest>,
}

impl ShownTensor {
    pub(super) fn facts(&self) -> TensorFacts<'_> {
        match self {
            Self::Stored { entry, file, file_offset } => TensorFacts {
                name: &entry.name,
                type_name: &entry.type_name,
                shape: &entry.shape,
                size: entry.size,
                file: file.as_deref(),
                file_offset: *file_offset,
                blob: Some(entry.digest),
            },
            Self::InFile { name, type_name, shape, size, file, file_offset, .. } => TensorFacts {
                name,
                type_name,
                shape,
                size: *size,
                file: file.as_deref(),
                file_offset: Some(*file_offset),
                blob: None,
            },
        }
    }
}

/// The tensors of a model that is not stored.
pub(super) fn in_files(files: &[ParsedFile], safetensors: &[SafetensorsFile]) -> Vec<ShownTensor> {
    let has_several_files = files.len() + safetensors.len() > 1;
    let of_gguf =
        files.iter().map(|file| (&file.file, &file.layout, TensorFormat::Gguf, file.header.data_offset()));
    let of_safetensors = safetensors
        .iter()
        .map(|file| (&file.file, &file.layout, TensorFormat::Safetensors, file.header.data_offset()));
    let tensors = of_gguf.chain(of_safetensors).flat_map(|(file, layout, format, data_offset)| {
        layout.tensors().iter().map(move |tensor| ShownTensor::InFile {
            name: tensor.name.to_owned(),
            type_name: tensor.type_name.into_owned(),
            format,
            shape: tensor.shape.to_vec(),
            size: tensor.size,
            file: has_several_files.then(|| file.name().to_owned()),
            file_offset: data_offset.saturating_add(tensor.offset),
            experts: tensor.experts,
        })
    });
    tensors.collect()
}

/// The stored tensors with their files and their positions in these.
pub(super) fn stored(
    details: &mut ModelDetails,
    files: &[ParsedFile],
    safetensors: &[SafetensorsFile],
) -> Vec<ShownTensor> {
    // These are blobs themselves.
    let whole = details.whole_files();
    let names = file_names(details);
    let of_gguf = files.iter().map(|file| (file.number, offsets_of_gguf(file)));
    let of_safetensors = safetensors.iter().map(|file| (file.number, offsets_of_safetensors(file)));
    let by_number: BTreeMap<usize, HashMap<&str, u64>> = of_gguf.chain(of_safetensors).collect();
    let shown = std::mem::take(&mut details.tensors).into_iter().map(|entry| {
        let layer = entry.layer.and_then(|layer| usize::try_from(layer).ok());
        let offsets = layer.and_then(|layer| by_number.get(&layer));
        let in_blob = || whole.contains(&entry.digest).then_some(entry.offset);
        let file_offset =
            offsets.and_then(|offsets| offsets.get(entry.name.as_str()).copied()).or_else(in_blob);
        let file = layer.and_then(|layer| names.get(&layer).cloned());
        ShownTensor::Stored { entry, file, file_offset }
    });
    shown.collect()
}

/// The names of the files with tensors by their numbers, if there are several. A layer that is a tensor has its name.
fn file_names(details: &ModelDetails) -> BTreeMap<usize, String> {
    let numbers: BTreeSet<_> = details.tensors.iter().filter_map(|tensor| tensor.layer).collect();
    let numbers = numbers.into_iter().filter_map(|layer| usize::try_from(layer).ok());
    let layers = numbers.filter_map(|number| Some((number, details.layers.get(number)?)));
    let named = layers.filter(|(_, layer)| layer.media_type.holds_tensors());
    let named: BTreeMap<_, _> =
        named.map(|(number, layer)| (number, file_of_layer(layer).name().to_owned())).collect();
    if named.len() > 1 { named } else { BTreeMap::new() }
}

fn offsets_of_gguf(file: &ParsedFile) -> HashMap<&str, u64> {
    let tensors = file.layout.tensors().iter();
    tensors.map(|tensor| (tensor.name, file_offset(file, &tensor))).collect()
}

fn offsets_of_safetensors(file: &SafetensorsFile) -> HashMap<&str, u64> {
    let tensors = file.header.tensors().iter();
    tensors.map(|tensor| (tensor.name(), tensor.offset_in_file())).collect()
}

/// The tensors of one layer of the network, for `show --layers`.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub(super) struct NetworkLayer {
    pub(super) layer: String,
    pub(super) tensors: u64,
    pub(super) bytes: u64,
}

/// Groups the tensors by layer: the blocks by number, then the others in the order of the file.
pub(super) fn network_layers(tensors: &[ShownTensor]) -> Vec<NetworkLayer> {
    let mut layers: Vec<NetworkLayer> = Vec::new();
    let mut places: BTreeMap<&str, usize> = BTreeMap::new();
    let mut blocks = Vec::new();
    for tensor in tensors {
        let TensorFacts { name: tensor, size, .. } = tensor.facts();
        let (name, _) = split_name(tensor);
        let place = *places.entry(name).or_insert_with(|| {
            layers.push(NetworkLayer { layer: name.to_owned(), tensors: 0, bytes: 0 });
            blocks.push(block_number(tensor));
            layers.len() - 1
        });
        if let Some(layer) = layers.get_mut(place) {
            layer.tensors += 1;
            layer.bytes = layer.bytes.saturating_add(size);
        }
    }
    let mut ordered: Vec<_> = blocks.into_iter().zip(layers).collect();
    // The sort is stable, so layers outside the blocks keep their order.
    ordered.sort_by_key(|(block, _)| (block.is_none(), *block));
    ordered.into_iter().map(|(_, layer)| layer).collect()
}

fn file_offset(file: &ParsedFile, tensor: &TensorRange<'_>) -> u64 {
    file.header.data_offset().saturating_add(tensor.offset)
}

/// The bytes of a file that belong to no tensor: header, padding and trailing bytes.
pub(super) fn other_bytes(file: &ParsedFile) -> u64 {
    let is_other = |content| !matches!(content, RangeContent::Tensor(_));
    let ranges = file.layout.ranges().iter().filter(|range| is_other(range.content));
    ranges.fold(0, |sum, range| sum.saturating_add(range.size))
}
