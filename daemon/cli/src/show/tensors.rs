//! The tensors of a described model, with their positions in the original files.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};

use blobd_client::protocol::model_tensor::{ModelTensor, TensorFormat};
use blobd_store_format::digest::Digest;
use blobd_store_format::file_layout::{FileLayout, RangeContent, TensorRange};
use blobd_store_format::gguf::Header;
use blobd_store_format::recipe::Experts;
use serde::Serialize;

/// A parsed file of a described model.
#[derive(Debug)]
pub(super) struct ParsedFile {
    /// The number of the file in its model.
    pub(super) number: usize,
    pub(super) component: String,
    pub(super) header: Header,
    pub(super) layout: FileLayout,
}

/// A tensor, stored or not.
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

impl ShownTensor {
    pub(super) fn name(&self) -> &str {
        match self {
            Self::Stored { entry, .. } => &entry.name,
            Self::InFile { name, .. } => name,
        }
    }

    pub(super) fn type_name(&self) -> &str {
        match self {
            Self::Stored { entry, .. } => &entry.type_name,
            Self::InFile { type_name, .. } => type_name,
        }
    }

    pub(super) fn shape(&self) -> &[u64] {
        match self {
            Self::Stored { entry, .. } => &entry.shape,
            Self::InFile { shape, .. } => shape,
        }
    }

    pub(super) const fn size(&self) -> u64 {
        match self {
            Self::Stored { entry, .. } => entry.size,
            Self::InFile { size, .. } => *size,
        }
    }

    pub(super) const fn file_offset(&self) -> Option<u64> {
        match self {
            Self::Stored { file_offset, .. } => *file_offset,
            Self::InFile { file_offset, .. } => Some(*file_offset),
        }
    }

    pub(super) fn blob(&self) -> Option<String> {
        match self {
            Self::Stored { entry, .. } => Some(entry.digest.short()),
            Self::InFile { .. } => None,
        }
    }
}

/// The tensors of files that are not stored.
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
    whole: &HashSet<Digest>,
) -> Vec<ShownTensor> {
    let mut entries = entries.into_iter();
    let mut shown = Vec::with_capacity(entries.len());
    for file in files {
        let tensors = file.layout.tensors();
        let offsets: HashMap<&str, u64> =
            tensors.iter().map(|tensor| (tensor.name.as_str(), file_offset(file, tensor))).collect();
        for entry in entries.by_ref().take(tensors.len()) {
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

fn file_offset(file: &ParsedFile, tensor: &TensorRange) -> u64 {
    file.header.data_offset().saturating_add(tensor.offset)
}

/// The bytes of a file that belong to no tensor: header, padding and trailing bytes.
pub(super) fn other_bytes(file: &ParsedFile) -> u64 {
    let is_other = |content| !matches!(content, RangeContent::Tensor(_));
    let ranges = file.layout.ranges().iter().filter(|range| is_other(range.content));
    ranges.fold(0, |sum, range| sum.saturating_add(range.size))
}
