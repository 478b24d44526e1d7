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
    #[error("gguf: wrong format: expected \"GGUF\" at the start, found \"{}\"", found.escape_ascii())]
    Magic { found: [u8; 4] },
    #[error("gguf: version: expected 2 or 3, found {found}")]
    OldVersion { found: u32 },
    #[error("gguf: version: expected 2 or 3, found {found}")]
    NewVersion { found: u32 },
    #[error("gguf: too many {what} at byte {offset}: expected at most {limit}, found {found}")]
    Count { what: &'static str, offset: u64, found: u64, limit: u64 },
    #[error(
        "gguf: too long at byte {offset}: expected a header of at most {} bytes, found {count} items of at least {size}",
        MAX_HEADER_BYTES
    )]
    TooLong { offset: u64, count: u64, size: u64 },
    #[error("gguf: metadata key at byte {offset} is empty")]
    EmptyKey { offset: u64 },
    #[error("gguf: metadata key {key:?} appears twice")]
    DuplicateKey { key: String },
    #[error("gguf: metadata key {key:?} at byte {offset}: value type: expected 0 to 12, found {found}")]
    ValueType { key: String, offset: u64, found: u32 },
    /// An array of arrays, which no program writes and llama.cpp refuses.
    #[error("gguf: metadata key {key:?} at byte {offset}: an array of arrays")]
    NestedArray { key: String, offset: u64 },
    #[error("gguf: {ALIGNMENT_KEY}: wrong type: expected u32, found {found}")]
    AlignmentType { found: ValueType },
    #[error(
        "gguf: {ALIGNMENT_KEY}: wrong value: expected a power of two up to {MAX_ALIGNMENT}, found {found}"
    )]
    Alignment { found: u32 },
    #[error("gguf: tensor {name:?} at byte {offset}: {problem}")]
    Tensor { name: String, offset: u64, problem: TensorError },
    #[error("gguf: tensor {name:?} appears twice")]
    DuplicateTensor { name: String },
    #[error("gguf: ends at byte {offset}, inside {inside}")]
    Ends { offset: u64, inside: String },
    #[error("gguf: header of {header_size} bytes in a file of {file_size}")]
    FileSize { header_size: u64, file_size: u64 },
    #[error("gguf: tensor {name:?}: offset {offset} is not a multiple of {alignment}{}", alignment_hint(*alignment))]
    Misaligned { name: String, offset: u64, alignment: u64 },
    #[error("gguf: tensor {name:?}: no bytes for it at offset {offset}, and {ggml_type} has no known size")]
    NoBytes { name: String, ggml_type: GgmlType, offset: u64 },
    #[error("gguf: {0}")]
    Layout(#[from] LayoutError),
    #[error("gguf: tensor {name:?}: {problem}")]
    Unwritable { name: String, problem: TensorError },
}

/// Truncates an untrusted name for an error message.
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
