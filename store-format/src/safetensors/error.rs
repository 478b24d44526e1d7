//! Errors of the safetensors parser and writer.

use super::{Dtype, MAX_DIMENSIONS, MAX_HEADER_BYTES, MAX_TENSORS};
use crate::tensor::shown;

/// Why the header of a safetensors file is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SafetensorsError {
    /// The input ends before the header does.
    #[error("safetensors: incomplete: expected a header of {expected} bytes, found {found}")]
    Truncated {
        /// The size of the input.
        found: u64,
        /// The size of the header with its length field.
        expected: u64,
    },
    /// The declared length of the header is above the limit.
    #[error("safetensors: header too long: expected at most {MAX_HEADER_BYTES} bytes, found {found}")]
    HeaderLength {
        /// Its length in bytes.
        found: u64,
    },
    /// The header is not JSON, or not the expected JSON.
    #[error("safetensors: wrong header: {reason}")]
    Json {
        /// The parser's message.
        reason: String,
    },
    /// Too many tensors.
    #[error("safetensors: more than {MAX_TENSORS} tensors")]
    TooManyTensors,
    /// A name that is empty, too long, or has control characters.
    #[error("safetensors: tensor name of {length} bytes: {problem}")]
    Name {
        /// Its length in bytes.
        length: usize,
        /// The fault in it.
        problem: &'static str,
    },
    /// An element type of a later version of the format.
    #[error("safetensors: tensor {name:?}: unknown element type {found:?}")]
    UnknownDtype {
        /// The tensor's name.
        name: String,
        /// The type's name, at most 16 characters of it.
        found: String,
    },
    /// Too many dimensions.
    #[error(
        "safetensors: tensor {name:?}: too many dimensions: expected at most {MAX_DIMENSIONS}, found {found}"
    )]
    Rank {
        /// The tensor's name.
        name: String,
        /// The number of dimensions.
        found: usize,
    },
    /// The size overflows or is not a whole number of bytes.
    #[error("safetensors: tensor {name:?}: shape {} of {dtype} is not a whole number of bytes", shown(shape))]
    Size {
        /// The tensor's name.
        name: String,
        /// Its element type.
        dtype: Dtype,
        /// Its dimensions.
        shape: Vec<u64>,
    },
    /// The offsets do not match the shape and type.
    #[error(
        "safetensors: tensor {name:?}: wrong size: expected {expected} bytes by its shape, found {begin} to {end}"
    )]
    Length {
        /// The tensor's name.
        name: String,
        /// Its start, relative to the data section.
        begin: u64,
        /// Its end.
        end: u64,
        /// Its size by shape and type.
        expected: u64,
    },
    /// A gap or an overlap between two tensors.
    #[error("safetensors: tensor {name:?}: wrong offset in the data: expected {expected}, found {begin}")]
    Position {
        /// The tensor's name.
        name: String,
        /// Its start.
        begin: u64,
        /// The end of the previous tensor.
        expected: u64,
    },
    /// The last tensor does not end at the end of the file.
    #[error("safetensors: the tensors end at byte {found} of the file, which has {file_size}")]
    End {
        /// The end of the last tensor.
        found: u64,
        /// The file's length.
        file_size: u64,
    },
}
