//! Why a file does not fit its own header, or its bytes not the plan.

use crate::gguf::GgmlType;

/// Why a file cannot be split. Offsets are in bytes from the start of the file unless they are
/// said to be a tensor's own, which count from the start of the data section.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SplitError {
    /// The file ends inside its header.
    #[error("gguf: header of {header_size} bytes in a file of {file_size}")]
    Header {
        /// The length of the header.
        header_size: u64,
        /// The length of the file.
        file_size: u64,
    },
    /// A tensor where no reader looks for one.
    #[error("gguf: tensor {name:?}: offset {offset} is not a multiple of {alignment}{}", hint(*alignment))]
    Misaligned {
        /// The tensor.
        name: String,
        /// Its own offset.
        offset: u64,
        /// The file's alignment.
        alignment: u64,
    },
    /// A tensor that is not all in the file.
    #[error(
        "gguf: tensor {name:?}: offset {offset} and size {size} end beyond the data section of {data_size} bytes"
    )]
    Outside {
        /// The tensor.
        name: String,
        /// Its own offset.
        offset: u64,
        /// Its size.
        size: u64,
        /// How many bytes the file has from the data section's start on.
        data_size: u64,
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
    /// Two tensors that claim one byte.
    #[error("gguf: tensors {first:?} and {second:?} overlap at offset {offset}")]
    Overlap {
        /// The one that starts first.
        first: String,
        /// The one that starts inside it.
        second: String,
        /// The second one's own offset.
        offset: u64,
    },
    /// More bytes than the file was said to have.
    #[error("file: goes on after its {file_size} bytes")]
    TooLong {
        /// The file's size in the plan.
        file_size: u64,
    },
    /// Fewer bytes than the file was said to have.
    #[error("file: ends after {found} of its {file_size} bytes")]
    TooShort {
        /// How many bytes came.
        found: u64,
        /// The file's size in the plan.
        file_size: u64,
    },
}

/// Such files exist, and their makers can do better.
fn hint(alignment: u64) -> &'static str {
    match alignment > 32 {
        true => {
            "; llama-quantize and llama-gguf-split of 2026 write such files when general.alignment \
             is more than 32, and nothing can read them"
        }
        false => "",
    }
}
