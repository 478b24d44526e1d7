//! Quantised numbers: the layout of every ggml type, and the byte order of tensors.
//!
//! [`BlockLayout`] describes the block of a type as data; `docs/FORMATS.md` shows the same table.
//! [`swap_bytes`] changes the byte order of a tensor.
//!
//! ```
//! use blobd_store_format::gguf::GgmlType;
//! use blobd_store_format::quant::{BlockLayout, swap_bytes};
//!
//! let q4_0 = BlockLayout::of(GgmlType::Q4_0).unwrap();
//! assert_eq!((q4_0.elements(), q4_0.bytes(), q4_0.bits_per_weight()), (32, 18, 4.5));
//! let fields: Vec<_> = q4_0.fields().map(|field| field.to_string()).collect();
//! assert_eq!(fields, ["f16 d", "u8 qs[16]"]);
//! ```
//!
//! Sources: ggml's `ggml-common.h` and `ggml-quants.c`, and PyPI's `gguf`, `quants.py`.

mod block;
mod swap;
mod table;
#[cfg(test)]
mod table_tests;

pub use self::block::{BlockLayout, Field, FieldType};
pub use self::swap::swap_bytes;
use crate::ggml_type::GgmlType;

/// Why a tensor's bytes cannot be converted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum QuantError {
    /// The layout of the type is not known.
    #[error("type {ggml_type}: its layout is not known; only whole tensors of it can be copied")]
    UnknownType {
        /// The type.
        ggml_type: GgmlType,
    },
    /// The bytes are not whole blocks.
    #[error("type {ggml_type}: {found} bytes are not whole blocks of {block_bytes} bytes")]
    PartialBlock {
        /// The type.
        ggml_type: GgmlType,
        /// The number of bytes.
        found: usize,
        /// The size of a block.
        block_bytes: u64,
    },
}

/// The size of a block, if so many bytes are whole blocks.
fn whole_blocks(layout: &BlockLayout, found: usize) -> Result<usize, QuantError> {
    let block_bytes = layout.bytes();
    let size = usize::try_from(block_bytes).ok().filter(|size| found.is_multiple_of(*size));
    size.ok_or(QuantError::PartialBlock { ggml_type: layout.ggml_type(), found, block_bytes })
}
