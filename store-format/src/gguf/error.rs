//! Errors of the GGUF parser and writer.

use super::value_type::ValueType;
use super::{ALIGNMENT_KEY, GgmlType, MAX_ALIGNMENT, MAX_HEADER_BYTES};
use crate::file_layout::LayoutError;
use crate::tensor::TensorError;

/// Why a GGUF file is refused. Offsets are relative to the start of the file; a tensor's own offset is
/// relative to the data section. Names and keys are truncated.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GgufError {
    /// Not a GGUF file.
    #[error("gguf: wrong format: expected \"GGUF\" at the start, found \"{}\"", found.escape_ascii())]
    Magic {
        /// The first four bytes.
        found: [u8; 4],
    },
    /// A version that is not supported.
    #[error("gguf: version: expected 2 or 3, found {found}")]
    OldVersion {
        /// The version found: 0 or 1.
        found: u32,
    },
    /// A newer version of the format.
    #[error("gguf: version: expected 2 or 3, found {found}")]
    NewVersion {
        /// The version found.
        found: u32,
    },
    /// More tensors or metadata keys than any model has.
    #[error("gguf: too many {what} at byte {offset}: expected at most {limit}, found {found}")]
    Count {
        /// The kind of things that were counted.
        what: &'static str,
        /// The offset of the count.
        offset: u64,
        /// The count.
        found: u64,
        /// The limit.
        limit: u64,
    },
    /// Items that do not fit a header of the largest size.
    #[error(
        "gguf: {count} items of at least {size} bytes at byte {offset}, \
         a header may have {} bytes in all",
        MAX_HEADER_BYTES
    )]
    TooLong {
        /// The offset of the items.
        offset: u64,
        /// Their number.
        count: u64,
        /// The minimum size of one in bytes.
        size: u64,
    },
    /// A metadata key without a name.
    #[error("gguf: metadata key at byte {offset} is empty")]
    EmptyKey {
        /// Where the key starts.
        offset: u64,
    },
    /// Two metadata entries with one key.
    #[error("gguf: metadata key {key:?} appears twice")]
    DuplicateKey {
        /// The key.
        key: String,
    },
    /// An unknown value type.
    #[error("gguf: metadata key {key:?} at byte {offset}: value type {found}, known are 0 to 12")]
    ValueType {
        /// The key.
        key: String,
        /// The offset of the type.
        offset: u64,
        /// The type found.
        found: u32,
    },
    /// An array of arrays, which no program writes and llama.cpp refuses.
    #[error("gguf: metadata key {key:?} at byte {offset}: an array of arrays")]
    NestedArray {
        /// The key.
        key: String,
        /// The offset of the inner type.
        offset: u64,
    },
    /// An alignment that is not a 32-bit unsigned number.
    #[error("gguf: {ALIGNMENT_KEY}: wrong type: expected u32, found {found}")]
    AlignmentType {
        /// The type found.
        found: ValueType,
    },
    /// An invalid alignment.
    #[error(
        "gguf: {ALIGNMENT_KEY}: wrong value: expected a power of two up to {MAX_ALIGNMENT}, found {found}"
    )]
    Alignment {
        /// The alignment found.
        found: u32,
    },
    /// An invalid tensor description.
    #[error("gguf: tensor {name:?} at byte {offset}: {problem}")]
    Tensor {
        /// The tensor's name, as far as it was read.
        name: String,
        /// The offset of its table entry.
        offset: u64,
        /// The fault.
        problem: TensorError,
    },
    /// Two tensors with one name.
    #[error("gguf: tensor {name:?} appears twice")]
    DuplicateTensor {
        /// The name.
        name: String,
    },
    /// The bytes end before the header does.
    #[error("gguf: ends at byte {offset}, inside {inside}")]
    Ends {
        /// The number of bytes.
        offset: u64,
        /// The incomplete part of the header.
        inside: String,
    },
    /// The file ends inside its header.
    #[error("gguf: header of {header_size} bytes in a file of {file_size}")]
    FileSize {
        /// The length of the header.
        header_size: u64,
        /// The length of the file.
        file_size: u64,
    },
    /// A tensor offset that is not a multiple of the alignment.
    #[error("gguf: tensor {name:?}: offset {offset} is not a multiple of {alignment}{}", alignment_hint(*alignment))]
    Misaligned {
        /// The tensor.
        name: String,
        /// Its own offset.
        offset: u64,
        /// The file's alignment.
        alignment: u64,
    },
    /// A tensor of an unknown type with no bytes before the next tensor.
    #[error("gguf: tensor {name:?}: no bytes for it at offset {offset}, and {ggml_type} has no known size")]
    NoBytes {
        /// The tensor.
        name: String,
        /// Its type.
        ggml_type: GgmlType,
        /// Its own offset.
        offset: u64,
    },
    /// The tensors do not fit the file.
    #[error("gguf: {0}")]
    Layout(#[from] LayoutError),
    /// [`super::GgufWriter`] cannot write the tensor.
    #[error("gguf: tensor {name:?}: {problem}")]
    Unwritable {
        /// The tensor.
        name: String,
        /// The fault.
        problem: TensorError,
    },
}

/// Truncates an untrusted name for an error message.
#[must_use]
pub fn printable(name: &[u8]) -> String {
    // A character has at most four bytes.
    let start = name.get(..320).unwrap_or(name);
    String::from_utf8_lossy(start).chars().take(80).collect()
}

fn alignment_hint(alignment: u64) -> &'static str {
    match alignment > 32 {
        true => {
            "; llama-quantize and llama-gguf-split of 2026 write such files when general.alignment \
             is more than 32, and nothing can read them"
        }
        false => "",
    }
}
