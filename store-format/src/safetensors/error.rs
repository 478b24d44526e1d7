//! Why the header of a safetensors file is refused.

use super::{Dtype, MAX_DIMENSIONS, MAX_HEADER_BYTES, MAX_TENSORS};

/// Why the header of a safetensors file is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SafetensorsError {
    /// The file, or what was given of it, ends before its header does.
    #[error("safetensors: ends at byte {found}, the header at byte {expected}")]
    Truncated {
        /// How many bytes there are.
        found: u64,
        /// How many the header needs, its length's eight included.
        expected: u64,
    },
    /// The header says of itself that it is longer than any.
    #[error("safetensors: header of {found} bytes, at most {MAX_HEADER_BYTES} allowed")]
    HeaderLength {
        /// Its length in bytes.
        found: u64,
    },
    /// The header is not JSON, or JSON of another form: a name twice, a field too many, a number
    /// that is none, metadata that is no text.
    #[error("safetensors: header is not the JSON expected: {reason}")]
    Json {
        /// What the parser says.
        reason: String,
    },
    /// More tensors than any file has.
    #[error("safetensors: more than {MAX_TENSORS} tensors")]
    TooManyTensors,
    /// A name that is too long, empty, or would harm a terminal.
    #[error("safetensors: tensor name of {length} bytes: {problem}")]
    Name {
        /// Its length in bytes.
        length: usize,
        /// What is wrong with it.
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
    /// More dimensions than any tensor has.
    #[error("safetensors: tensor {name:?}: {found} dimensions, at most {MAX_DIMENSIONS} allowed")]
    Rank {
        /// The tensor's name.
        name: String,
        /// How many dimensions.
        found: usize,
    },
    /// The shape's product overflows, or does not fill whole bytes.
    #[error("safetensors: tensor {name:?}: shape {shape:?} of {dtype} is no number of bytes")]
    Size {
        /// The tensor's name.
        name: String,
        /// Its element type.
        dtype: Dtype,
        /// Its dimensions.
        shape: Vec<u64>,
    },
    /// The offsets leave another length than the shape needs.
    #[error("safetensors: tensor {name:?}: bytes {begin} to {end}, its shape needs {expected}")]
    Length {
        /// The tensor's name.
        name: String,
        /// Where it starts, counted from the start of the data.
        begin: u64,
        /// Where it ends.
        end: u64,
        /// How many bytes its shape and type make.
        expected: u64,
    },
    /// A tensor does not start where the one before ends: a gap or an overlap.
    #[error("safetensors: tensor {name:?}: starts at byte {begin} of the data, {expected} expected")]
    Position {
        /// The tensor's name.
        name: String,
        /// Where it starts.
        begin: u64,
        /// Where the one before ends.
        expected: u64,
    },
    /// The last tensor does not end where the file does.
    #[error("safetensors: the tensors end at byte {found} of the file, which has {file_size}")]
    End {
        /// Where the last tensor ends.
        found: u64,
        /// The file's length.
        file_size: u64,
    },
}
