//! The tensors of a described model, with their positions in the original files.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap, HashSet};

use blobd_client::protocol::response::ModelTensor;
use blobd_model::layers::{block_number, split_name};
use blobd_store_format::file_layout::{FileLayout, RangeContent, TensorRange};
use blobd_store_format::gguf::Header;
use blobd_store_format::recipe::Experts;
use blobd_store_format::safetensors;
use blobd_store_format::tensor::TensorFormat;
use serde::Serialize;

use crate::Digest;

#[derive(Debug)]
pub(super) struct ParsedFile {
    pub(super) number: usize,
    pub(super) component: String,
    pub(super) header: Header,
    pub(super) layout: FileLayout,
}

/// A safetensors file. Its header has no facts about the model.
#[derive(Debug)]
pub(super) struct SafetensorsFile {
    pub(super) number: usize,
    pub(super) header: safetensors::Header,
}

#[derive(Clone, Debug, Serialize)]
#[serde(untagged)]
pub(super) enum ShownTensor {
    Stored {
        #[serde(flatten)]
        entry: ModelTensor,
        /// In bytes from the start of the original file; in JSON only with `--full`.
        #[serde(skip_serializing_if = "Option::is_none")]
        file_offset: Option<u64>,
    },
    InFile {
        name: String,
        #[serde(rename = "type")]
        type_name: Cow<'static, str>,
        format: TensorFormat,
        shape: Vec<u64>,
        size: u64,
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
    pub(super) file_offset: Option<u64>,
    pub(super) blob: Option<Digest>,
}

impl ShownTensor {
    pub(super) fn facts(&self) -> TensorFacts<'_> {
        match self {
            Self::Stored { entry, file_offset } => TensorFacts {
                name: &entry.name,
                type_name: &entry.type_name,
                shape: &entry.shape,
                size: entry.size,
                file_offset: *file_offset,
                blob: Some(entry.digest),
            },
            Self::InFile { name, type_name, shape, size, file_offset, .. } => TensorFacts {
                name,
                type_name,
                shape,
                size: *size,
                file_offset: Some(*file_offset),
                blob: None,
            },
        }
    }
}

pub(super) fn in_files(files: &[ParsedFile]) -> Vec<ShownTensor> {
    let tensors = files.iter().flat_map(|file| {
        file.layout.tensors().iter().map(|tensor| ShownTensor::InFile {
            name: tensor.name.clone(),
            type_name: tensor.type_name.clone(),
            format: TensorFormat::Gguf,
            shape: tensor.shape.clone(),
            size: tensor.size,
            file_offset: file_offset(file, tensor),
            experts: tensor.experts,
        })
    });
    tensors.collect()
}

/// The stored tensors with their positions in the files. The entries are grouped by file, in the same order. The files
/// `whole` are blobs themselves.
pub(super) fn stored(
    entries: Vec<ModelTensor>,
    files: &[ParsedFile],
    safetensors: &[SafetensorsFile],
    whole: &HashSet<Digest>,
) -> Vec<ShownTensor> {
    let mut entries = entries.into_iter();
    let mut shown = Vec::with_capacity(entries.len());
    let of_gguf = files.iter().map(|file| (file.number, offsets_of_gguf(file)));
    let of_safetensors = safetensors.iter().map(|file| (file.number, offsets_of_safetensors(file)));
    let by_number: BTreeMap<usize, HashMap<&str, u64>> = of_gguf.chain(of_safetensors).collect();
    for offsets in by_number.into_values() {
        for entry in entries.by_ref().take(offsets.len()) {
            let file_offset = offsets.get(entry.name.as_str()).copied();
            shown.push(ShownTensor::Stored { entry, file_offset });
        }
    }
    shown.extend(entries.map(|entry| {
        let file_offset = whole.contains(&entry.digest).then_some(entry.offset);
        ShownTensor::Stored { entry, file_offset }
    }));
    shown
}

fn offsets_of_gguf(file: &ParsedFile) -> HashMap<&str, u64> {
    let tensors = file.layout.tensors().iter();
    tensors.map(|tensor| (tensor.name.as_str(), file_offset(file, tensor))).collect()
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

fn file_offset(file: &ParsedFile, tensor: &TensorRange) -> u64 {
    file.header.data_offset().saturating_add(tensor.offset)
}

/// The bytes of a file that belong to no tensor: header, padding and trailing bytes.
pub(super) fn other_bytes(file: &ParsedFile) -> u64 {
    let is_other = |content| !matches!(content, RangeContent::Tensor(_));
    let ranges = file.layout.ranges().iter().filter(|range| is_other(range.content));
    ranges.fold(0, |sum, range| sum.saturating_add(range.size))
}
