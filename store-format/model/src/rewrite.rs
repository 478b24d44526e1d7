//! Rewrites GGUF files without changing their tensors: changes alignment or byte order, merges shards, or splits a file
//! into shards.
//!
//! [`RewritePlan::new`] computes the headers and lists where the bytes of the data sections come from. It reads
//! no tensor data; the caller executes the plan. Tensors are written in the order of the table, each padded to
//! the alignment, as llama.cpp requires.
//!
//! Source of the rules for shards: `llama.h` and `tools/gguf-split` of llama.cpp.

#[cfg(test)]
mod tests;

use std::collections::BTreeSet;

use blobd_store_format::file_layout::FileLayout;
use blobd_store_format::gguf::{
    ALIGNMENT_KEY, ByteOrder, DEFAULT_ALIGNMENT, Encoder, GgmlType, GgufError, Header, MAX_ALIGNMENT, Value,
};
use blobd_store_format::tensor::TensorInfo;

use crate::entries::Entries;
use crate::quant::swap_bytes;

/// A file to be rewritten.
#[derive(Clone, Debug)]
pub struct RewriteSource {
    header: Header,
    layout: FileLayout,
}

impl RewriteSource {
    /// Checks that the tensors are in a file of `file_size` bytes.
    pub fn new(header: Header, file_size: u64) -> Result<Self, GgufError> {
        Ok(Self { layout: header.file_layout(file_size)?, header })
    }

    pub const fn header(&self) -> &Header {
        &self.header
    }
}

/// What to change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RewriteOptions {
    /// The alignment in bytes; that of the source if `None`.
    pub alignment: Option<u32>,
    /// The byte order; that of the source if `None`.
    pub byte_order: Option<ByteOrder>,
    /// The distribution of tensors over files.
    pub sharding: Sharding,
}

/// How the tensors are distributed over files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sharding {
    /// As in the sources.
    #[default]
    Keep,
    /// All tensors in one file.
    Merge,
    /// In shards with at most `max_bytes` of tensors and padding each; headers do not count.
    Split {
        /// The maximum.
        max_bytes: u64,
    },
}

/// The files to write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RewritePlan {
    files: Vec<RewrittenFile>,
}

/// A file to write: its header and then its pieces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RewrittenFile {
    header: Vec<u8>,
    pieces: Vec<RewritePiece>,
    size: u64,
}

/// Consecutive bytes of a data section.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RewritePiece {
    Zeros {
        length: u64,
    },
    /// All bytes of a tensor.
    Tensor {
        /// The index of the source.
        source: usize,
        /// Where the tensor starts, in bytes from the start of the source.
        offset: u64,
        /// Its size in bytes; never 0.
        size: u64,
        /// The type by which its bytes are swapped, if the byte order changes.
        swapped: Option<GgmlType>,
    },
}

impl RewritePiece {
    pub const fn length(&self) -> u64 {
        match self {
            Self::Zeros { length } => *length,
            Self::Tensor { size, .. } => *size,
        }
    }
}

impl RewritePlan {
    /// Plans the files. `sources` are one file, or all shards of a model in any order.
    pub fn new(sources: &[RewriteSource], options: &RewriteOptions) -> Result<Self, RewriteError> {
        let shards = in_shard_order(sources)?;
        let Some(first) = shards.first().and_then(|first| sources.get(*first)) else {
            return Err(RewriteError::NoSource);
        };
        let format = Format::new(&first.header, options)?;
        let files = match options.sharding {
            Sharding::Keep => keep(sources, options)?,
            Sharding::Merge if shards.len() == 1 && split_value(&first.header, SPLIT_COUNT).is_none() => {
                return Err(RewriteError::NotSharded);
            }
            Sharding::Merge => {
                let tensors = tensors_of(sources, &shards);
                vec![format.file(&format.unsharded_metadata(&first.header), &tensors)?]
            }
            Sharding::Split { max_bytes } => {
                let tensors = tensors_of(sources, &shards);
                format.split(&format.unsharded_metadata(&first.header), &tensors, max_bytes)?
            }
        };
        Ok(Self { files })
    }

    /// The files, in order.
    pub fn files(&self) -> &[RewrittenFile] {
        &self.files
    }
}

impl RewrittenFile {
    /// The header with the padding before the data section.
    pub fn header(&self) -> &[u8] {
        &self.header
    }

    /// The pieces of the data section, in order; none is empty.
    pub fn pieces(&self) -> &[RewritePiece] {
        &self.pieces
    }

    pub const fn size(&self) -> u64 {
        self.size
    }
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RewriteError {
    #[error("no GGUF file")]
    NoSource,
    #[error(
        "not the shards of one model: expected shard {expected} of {found}, found shard {} of {count}",
        number.map_or_else(|| "none".to_owned(), |number| number.to_string())
    )]
    Shards {
        found: u64,
        count: u64,
        /// The number of the shard, from 0, if it has one.
        number: Option<u64>,
        expected: u64,
    },
    #[error("is one file already, nothing to merge")]
    NotSharded,
    #[error(
        "tensor {name:?}: the byte order of {ggml_type} cannot be changed, because its layout is not known"
    )]
    CannotSwap { name: String, ggml_type: GgmlType },
    #[error("{found} shards, at most {} possible; use a larger maximum size", u16::MAX)]
    TooManyShards { found: usize },
    #[error("the tensors end beyond 2^64 bytes")]
    Size,
    #[error(transparent)]
    Gguf(#[from] GgufError),
}

/// The prefix of the keys that only shards have.
pub(crate) const SPLIT_PREFIX: &[u8] = b"split.";
const SPLIT_NO: &str = "split.no";
const SPLIT_COUNT: &str = "split.count";
const SPLIT_TENSORS: &str = "split.tensors.count";

fn split_value(header: &Header, key: &str) -> Option<u64> {
    header.value(key)?.as_u64()
}

/// The indices of the sources in the order of their shard numbers. Shards that do not say which they are stay in the
/// order of the model's files, which is that of the numbers in their names.
fn in_shard_order(sources: &[RewriteSource]) -> Result<Vec<usize>, RewriteError> {
    let number = |source: &RewriteSource| split_value(&source.header, SPLIT_NO);
    let mut order: Vec<usize> = (0..sources.len()).collect();
    if are_unnumbered_shards(sources) {
        return Ok(order);
    }
    order.sort_by_key(|index| sources.get(*index).and_then(number));
    let found = sources.len() as u64;
    for (place, source) in order.iter().filter_map(|index| sources.get(*index)).enumerate() {
        let count = split_value(&source.header, SPLIT_COUNT).unwrap_or(1);
        let expected = place as u64;
        let is_next = found == 1 || number(source) == Some(expected);
        if count != found || !is_next {
            return Err(RewriteError::Shards { found, count, number: number(source), expected });
        }
    }
    Ok(order)
}

/// Whether the sources are parts of one model without `split.*` keys: no tensor is in two of them.
fn are_unnumbered_shards(sources: &[RewriteSource]) -> bool {
    let mut names = BTreeSet::new();
    let headers = || sources.iter().map(|source| &source.header);
    headers().all(|header| split_value(header, SPLIT_COUNT).is_none() && header.value(SPLIT_NO).is_none())
        && headers().flat_map(Header::tensors).all(|tensor| names.insert(tensor.name()))
}

/// Writes each source to a file of its own.
fn keep(sources: &[RewriteSource], options: &RewriteOptions) -> Result<Vec<RewrittenFile>, RewriteError> {
    let file = |(index, source): (usize, &RewriteSource)| {
        let format = Format::new(&source.header, options)?;
        let mut metadata = Entries::from_header(&source.header);
        format.set_alignment(&mut metadata, &source.header);
        format.file(&metadata, &tensors_of(sources, &[index]))
    };
    sources.iter().enumerate().map(file).collect()
}

/// A tensor and its place in the sources.
struct SourceTensor<'s> {
    info: TensorInfo<'s>,
    source: usize,
    order: ByteOrder,
    /// Where it starts, in bytes from the start of the source.
    offset: u64,
    size: u64,
}

/// The tensors of some sources in table order.
fn tensors_of<'s>(sources: &'s [RewriteSource], indices: &[usize]) -> Vec<SourceTensor<'s>> {
    let chosen = indices.iter().filter_map(|index| Some((*index, sources.get(*index)?)));
    let tensors = chosen.flat_map(|(index, RewriteSource { header, layout })| {
        // The layout has a range for each tensor, and the constructor has checked that it is inside the file.
        header.tensors().zip(layout.tensors().iter()).map(move |(info, range)| SourceTensor {
            info,
            source: index,
            order: header.byte_order(),
            offset: header.data_offset().saturating_add(range.offset),
            size: range.size,
        })
    });
    tensors.collect()
}

impl SourceTensor<'_> {
    /// The type that determines how the bytes are swapped; `None` if the byte order stays. Fails if the type's layout
    /// is unknown or does not match the tensor's size: a fork of llama.cpp may use a known type ID for another format.
    fn swap_to(&self, order: ByteOrder) -> Result<Option<GgmlType>, RewriteError> {
        let ggml_type = self.info.ggml_type();
        if self.order == order || self.size == 0 {
            return Ok(None);
        }
        if self.info.size_bytes() != Some(self.size) || swap_bytes(ggml_type, &mut []).is_err() {
            return Err(RewriteError::CannotSwap { name: self.info.name().to_owned(), ggml_type });
        }
        Ok(Some(ggml_type))
    }

    fn padded_size(&self, alignment: u64) -> Result<u64, RewriteError> {
        self.size.checked_next_multiple_of(alignment).ok_or(RewriteError::Size)
    }
}

/// The properties that all files of a plan share.
#[derive(Clone, Copy)]
struct Format {
    version: u32,
    order: ByteOrder,
    alignment: u32,
}

impl Format {
    fn new(header: &Header, options: &RewriteOptions) -> Result<Self, RewriteError> {
        let alignment = options.alignment.unwrap_or_else(|| header.alignment());
        if !alignment.is_power_of_two() || alignment > MAX_ALIGNMENT {
            return Err(GgufError::Alignment { found: alignment }.into());
        }
        let order = options.byte_order.unwrap_or_else(|| header.byte_order());
        // Version 2 has no big-endian form.
        let version = if order == ByteOrder::Big { 3 } else { header.version() };
        Ok(Self { version, order, alignment })
    }

    /// The metadata of an unsharded file.
    fn unsharded_metadata<'h>(&self, header: &'h Header) -> Entries<'h> {
        let mut metadata = Entries::from_header(header);
        metadata.retain(|key| !key.starts_with(SPLIT_PREFIX));
        self.set_alignment(&mut metadata, header);
        metadata
    }

    /// Sets the alignment's key. It stays unchanged if the alignment does not change, and is removed for the default.
    fn set_alignment(&self, metadata: &mut Entries<'_>, header: &Header) {
        if self.alignment == header.alignment() {
            return;
        }
        match self.alignment {
            DEFAULT_ALIGNMENT => metadata.retain(|key| key != ALIGNMENT_KEY.as_bytes()),
            alignment => metadata.set(ALIGNMENT_KEY.as_bytes(), Value::U32(alignment)),
        }
    }

    fn file(
        &self,
        metadata: &Entries<'_>,
        tensors: &[SourceTensor<'_>],
    ) -> Result<RewrittenFile, RewriteError> {
        let mut out = Encoder::new(self.order);
        out.preamble(self.version, tensors.len(), metadata.len());
        metadata.write(&mut out);
        let (mut pieces, mut end) = (Vec::new(), 0u64);
        for tensor in tensors {
            out.tensor(tensor.info.name(), tensor.info.ggml_type(), tensor.info.shape().dimensions(), end);
            let padded = tensor.padded_size(self.alignment.into())?;
            let SourceTensor { source, offset, size, .. } = *tensor;
            let swapped = tensor.swap_to(self.order)?;
            pieces.push(RewritePiece::Tensor { source, offset, size, swapped });
            pieces.push(RewritePiece::Zeros { length: padded.saturating_sub(size) });
            end = end.checked_add(padded).ok_or(RewriteError::Size)?;
        }
        pieces.retain(|piece| piece.length() > 0);
        let header = out.finish()?.into_padded();
        let size = end.checked_add(header.len() as u64).ok_or(RewriteError::Size)?;
        Ok(RewrittenFile { header, pieces, size })
    }

    /// Distributes the tensors like llama.cpp's `gguf-split --split-max-size`, which starts a new shard before a tensor
    /// that does not fit. A tensor larger than a shard gets a shard to itself.
    fn split(
        &self,
        metadata: &Entries<'_>,
        tensors: &[SourceTensor<'_>],
        max_bytes: u64,
    ) -> Result<Vec<RewrittenFile>, RewriteError> {
        let (mut shards, mut start, mut bytes) = (Vec::new(), 0, 0u64);
        for (place, tensor) in tensors.iter().enumerate() {
            let size = tensor.padded_size(self.alignment.into())?;
            bytes = bytes.saturating_add(size);
            if bytes > max_bytes && place > start {
                shards.push(start..place);
                (start, bytes) = (place, size);
            }
        }
        shards.push(start..tensors.len());
        let found = shards.len();
        let count = u16::try_from(found).map_err(|_beyond_u16| RewriteError::TooManyShards { found })?;
        let total = i32::try_from(tensors.len()).unwrap_or(i32::MAX);
        let file = |(number, range)| {
            let mut own = self.shard_metadata();
            let mut first = metadata.clone();
            let metadata = if number == 0 { &mut first } else { &mut own };
            metadata.set(SPLIT_NO.as_bytes(), Value::U16(number));
            metadata.set(SPLIT_COUNT.as_bytes(), Value::U16(count));
            metadata.set(SPLIT_TENSORS.as_bytes(), Value::I32(total));
            self.file(metadata, tensors.get::<std::ops::Range<usize>>(range).unwrap_or_default())
        };
        (0..count).zip(shards).map(file).collect()
    }

    /// The metadata of all shards except the first. Each shard is a complete GGUF file, so it repeats the alignment.
    fn shard_metadata(&self) -> Entries<'static> {
        let mut metadata = Entries::none();
        if self.alignment != DEFAULT_ALIGNMENT {
            metadata.set(ALIGNMENT_KEY.as_bytes(), Value::U32(self.alignment));
        }
        metadata
    }
}
