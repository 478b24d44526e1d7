//! The header of a safetensors file.
//!
//! ```
//! use blobd_store_format::safetensors::{Dtype, Header, HeaderWriter};
//!
//! let mut writer = HeaderWriter::new();
//! writer.metadata("quant_type", "int4").tensor("norm.weight", Dtype::F32, &[4])?;
//! let mut file = writer.header()?;
//! file.extend([0; 16]);
//!
//! let header = Header::parse(&file, file.len() as u64)?;
//! let tensor = header.tensor("norm.weight").ok_or("no such tensor")?;
//! assert_eq!((tensor.dtype(), tensor.shape(), tensor.size_bytes()), (Dtype::F32, &[4][..], 16));
//! assert_eq!(tensor.offset_in_file(), header.data_offset());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! In a [`Header`], a tensor's size is its shape times its type, the tensors cover the data without gap
//! or overlap, and names are unique. The format is that of the `safetensors` library
//! (<https://github.com/huggingface/safetensors>, "Format"): the length of the header as eight
//! little-endian bytes, the header in JSON, then the data.
//!
//! Accepted is what version 0.8 of the library accepts, and it means the same tensors; `library_cases.tsv` has its
//! verdicts. Beyond that, the constants of [`Header`] limit what a header may cost: it takes at most 64 MiB of memory,
//! and [`Header::read`] does not keep the header's own bytes.

mod dtype;
mod header;
mod json;
mod stream;
#[cfg(test)]
mod tests;

use std::fmt;

pub use self::dtype::Dtype;
pub use self::header::{Header, HeaderWriter, Tensor};
use crate::tensor::shown;

impl SafetensorsError {
    /// Whether the header exceeds a limit, and is not wrong otherwise.
    pub const fn is_over_limit(&self) -> bool {
        matches!(self, Self::HeaderLength { .. } | Self::TooMany(_) | Self::Name { .. } | Self::Rank { .. })
    }
}

/// A limit of what a header may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Limit {
    Tensors,
    /// The dimensions of all tensors.
    Dimensions,
    /// The entries of the metadata.
    Metadata,
    /// The bytes of all names and of the metadata, and of each string.
    Text,
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tensors => write!(f, "more than {} tensors", Header::MAX_TENSORS),
            Self::Dimensions => {
                write!(f, "more than {} dimensions in all tensors", Header::MAX_TOTAL_DIMENSIONS)
            }
            Self::Metadata => write!(f, "more than {} entries of metadata", Header::MAX_METADATA),
            Self::Text => write!(f, "more than {} bytes of names and metadata", Header::MAX_TEXT_BYTES),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SafetensorsError {
    #[error("safetensors: incomplete: expected a header of {expected} bytes, found {found}")]
    Truncated { found: u64, expected: u64 },
    #[error("safetensors: header too long: expected at most {} bytes, found {found}", Header::MAX_BYTES)]
    HeaderLength { found: u64 },
    #[error("safetensors: wrong header at byte {offset} of the file: {reason}")]
    Json { offset: u64, reason: String },
    #[error("safetensors: header too long: {0}")]
    TooMany(Limit),
    #[error("safetensors: tensor name of {length} bytes: {problem}")]
    Name { length: usize, problem: &'static str },
    #[error("safetensors: tensor {name:?}: unknown element type {found:?}")]
    UnknownDtype { name: String, found: String },
    #[error(
        "safetensors: tensor {name:?}: too many dimensions: expected at most {}, found {found}",
        Header::MAX_DIMENSIONS
    )]
    Rank { name: String, found: usize },
    #[error(
        "safetensors: tensor {name:?}: shape {} of {dtype} takes no whole number of bytes below 2^64",
        shown(shape)
    )]
    Size { name: String, dtype: Dtype, shape: Vec<u64> },
    #[error(
        "safetensors: tensor {name:?}: wrong size: expected {expected} bytes by its shape, found {begin} to {end}"
    )]
    Length { name: String, begin: u64, end: u64, expected: u64 },
    #[error("safetensors: tensor {name:?}: wrong offset in the data: expected {expected}, found {begin}")]
    Position { name: String, begin: u64, expected: u64 },
    #[error("safetensors: the tensors end at byte {found} of the file, which has {file_size}")]
    End { found: u64, file_size: u64 },
}
