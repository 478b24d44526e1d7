//! Quantised numbers: the layout of every ggml type, their values, and the byte order of tensors.
//!
//! [`BlockLayout`] describes the block of a type as data; `docs/FORMATS.md` shows the same table, and draws
//! each bit. [`dequantize`] converts blocks to `f32`, [`Values`] converts them without loss, and
//! [`swap_bytes`] changes the byte order of a tensor. All take any whole number of blocks, so a tensor can be
//! converted in pieces. [`ElementType`] converts the types of safetensors too. [`Range`] computes statistics, [`relative_rms_error`] compares two tensors.
//!
//! ```
//! use blobd_store_format::gguf::GgmlType;
//! use blobd_model::quant::{BlockLayout, dequantize};
//!
//! let q4_0 = BlockLayout::for_type(GgmlType::Q4_0).unwrap();
//! assert_eq!((q4_0.elements(), q4_0.bytes(), q4_0.bits_per_weight()), (32, 18, 4.5));
//! assert_eq!(q4_0.formula(), "d * (q - 8), q of 4 bits");
//! let fields: Vec<_> = q4_0.fields().map(|field| field.to_string()).collect();
//! assert_eq!(fields, ["f16 d", "u8 qs[16]"]);
//!
//! let block: Vec<u8> = [0x00, 0x40].into_iter().chain(0xf0..=0xff).collect(); // d is 2
//! let mut values = [0.0; 32];
//! dequantize(GgmlType::Q4_0, &block, &mut values)?;
//! assert_eq!(values[..3], [-16.0, -14.0, -12.0]); // the low nibbles are 0, 1, 2 …
//! assert_eq!(values[16..], [14.0; 16]); // and all high nibbles 15
//! # Ok::<(), blobd_model::quant::QuantError>(())
//! ```
//!
//! Sources: ggml's `ggml-common.h` and `ggml-quants.c`, and PyPI's `gguf`, `quants.py`.

mod block;
mod decode;
mod dequantize;
mod element_type;
mod field;
mod statistics;
mod swap;
mod table;
#[cfg(test)]
mod tests;

use blobd_store_format::gguf::GgmlType;
use blobd_store_format::safetensors::Dtype;

pub use self::block::BlockLayout;
pub use self::dequantize::{Values, dequantize, element_count};
pub use self::element_type::ElementType;
pub use self::field::{Field, FieldType};
pub use self::statistics::{Distribution, Histogram, Range, Statistics, relative_rms_error};
pub use self::swap::swap_bytes;

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum QuantError {
    #[error("type {ggml_type}: its layout is not known; only whole tensors of it can be copied")]
    UnknownType { ggml_type: GgmlType },
    #[error("type {ggml_type}: {found} bytes are not whole blocks of {block_bytes} bytes")]
    PartialBlock { ggml_type: GgmlType, found: usize, block_bytes: u64 },
    #[error("type {dtype}: {found} bytes are not a whole number of elements")]
    PartialElement { dtype: Dtype, found: usize },
    #[error("{found} elements, expected {expected}; only tensors of the same shape can be compared")]
    ElementCount { found: usize, expected: usize },
    #[error("room for {found} numbers, expected {expected}")]
    OutputLength { found: usize, expected: usize },
}

/// The size of a block, if `found` bytes are whole blocks.
fn whole_blocks(layout: &BlockLayout, found: usize) -> Result<usize, QuantError> {
    let block_bytes = layout.bytes();
    let size = usize::try_from(block_bytes).ok().filter(|size| found.is_multiple_of(*size));
    size.ok_or(QuantError::PartialBlock { ggml_type: layout.ggml_type(), found, block_bytes })
}
