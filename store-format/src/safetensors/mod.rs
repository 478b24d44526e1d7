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

mod dtype;
mod error;
mod header;
mod json;
mod writer;

#[cfg(test)]
mod tests;

pub use self::dtype::Dtype;
pub use self::error::SafetensorsError;
pub use self::header::{Header, Tensor};
pub use self::writer::HeaderWriter;
use crate::tensor::Shape;

/// The longest header read, in bytes.
const MAX_HEADER_BYTES: u64 = 100_000_000;
/// The most tensors of a file.
const MAX_TENSORS: usize = 131_072;
/// The most dimensions of a tensor.
const MAX_DIMENSIONS: usize = Shape::MAX_DIMENSIONS;
