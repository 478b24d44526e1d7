//! Why a file is not a GGUF file that blobd takes.

use super::value_type::ValueType;
use super::{ALIGNMENT_KEY, GgmlType, MAX_ALIGNMENT, MAX_HEADER_BYTES};
use crate::file_format::start_hint;
use crate::file_layout::LayoutError;
use crate::tensor::TensorError;

/// Why a GGUF file is refused. Offsets are in bytes from the start of the file unless they are said
/// to be a tensor's own, which count from the start of the data section; names and keys are cut to
/// a printable length.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GgufError {
    /// The file is of another kind.
    #[error("gguf: starts with \"{}\", not with \"GGUF\"{}", found.escape_ascii(), start_hint(found))]
    Magic {
        /// The first four bytes.
        found: [u8; 4],
    },
    /// A version that is no longer read, or never existed.
    #[error("gguf: version {found} is not supported, only 2 and 3 are{}", version_hint(*found))]
    OldVersion {
        /// The version found: 0 or 1.
        found: u32,
    },
    /// Written by a program that is newer than this one.
    #[error("gguf: version {found} is newer than this blobd supports (3); upgrade blobd")]
    NewVersion {
        /// The version found.
        found: u32,
    },
    /// More tensors or metadata keys than any model has.
    #[error("gguf: {found} {what} declared at byte {offset}, at most {limit} allowed")]
    Count {
        /// What there is too much of.
        what: &'static str,
        /// Where the count stands.
        offset: u64,
        /// The count.
        found: u64,
        /// The largest count read.
        limit: u64,
    },
    /// Something does not fit a header of the largest size read.
    #[error(
        "gguf: {count} items of at least {size} bytes at byte {offset}, \
         a header may have {} bytes in all",
        MAX_HEADER_BYTES
    )]
    TooLong {
        /// Where the items would start.
        offset: u64,
        /// How many there should be.
        count: u64,
        /// The least size of one in bytes.
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
    /// A value of a type that the format does not have.
    #[error("gguf: metadata key {key:?} at byte {offset}: value type {found}, known are 0 to 12")]
    ValueType {
        /// The key.
        key: String,
        /// Where the type stands.
        offset: u64,
        /// The type found.
        found: u32,
    },
    /// An array of arrays, which no program writes and llama.cpp refuses.
    #[error("gguf: metadata key {key:?} at byte {offset}: an array of arrays")]
    NestedArray {
        /// The key.
        key: String,
        /// Where the inner type stands.
        offset: u64,
    },
    /// An alignment that is not a 32-bit unsigned number.
    #[error("gguf: {ALIGNMENT_KEY} has type {found}, must be u32")]
    AlignmentType {
        /// The type found.
        found: ValueType,
    },
    /// An alignment that cannot be used.
    #[error("gguf: {ALIGNMENT_KEY} is {found}, must be a power of two, at most {MAX_ALIGNMENT}")]
    Alignment {
        /// The alignment found.
        found: u32,
    },
    /// A tensor's description makes no sense.
    #[error("gguf: tensor {name:?} at byte {offset}: {problem}")]
    Tensor {
        /// The tensor, as far as its name was read.
        name: String,
        /// Where its entry in the table starts.
        offset: u64,
        /// What is wrong.
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
        /// How many bytes there were.
        offset: u64,
        /// What they end inside of.
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
    /// A tensor where no reader looks for one.
    #[error("gguf: tensor {name:?}: offset {offset} is not a multiple of {alignment}{}", alignment_hint(*alignment))]
    Misaligned {
        /// The tensor.
        name: String,
        /// Its own offset.
        offset: u64,
        /// The file's alignment.
        alignment: u64,
    },
    /// A tensor of an unknown type that no byte is left for.
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
    /// A tensor that [`super::GgufWriter`] was given cannot be written.
    #[error("gguf: tensor {name:?}: {problem}")]
    Unwritable {
        /// The tensor.
        name: String,
        /// What is wrong.
        problem: TensorError,
    },
}

/// Enough of a hostile name for an error message.
pub(crate) fn printable(name: &[u8]) -> String {
    // Four bytes a character at most: what lies beyond cannot be shown.
    let start = name.get(..320).unwrap_or(name);
    String::from_utf8_lossy(start).chars().take(80).collect()
}

fn version_hint(found: u32) -> &'static str {
    match found {
        1 => " (1 was used in August 2023 only; convert the original model with a current llama.cpp)",
        _ => "",
    }
}

/// Such files exist, and their makers can do better.
fn alignment_hint(alignment: u64) -> &'static str {
    match alignment > 32 {
        true => {
            "; llama-quantize and llama-gguf-split of 2026 write such files when general.alignment \
             is more than 32, and nothing can read them"
        }
        false => "",
    }
}
