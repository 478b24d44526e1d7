//! GGUF, the model file format of llama.cpp: reading and writing its header.
//!
//! A GGUF file is a header (metadata and a table of tensors), padding, and the tensors' bytes.
//! [`HeaderParser`] takes the header's bytes as they arrive and yields a [`Header`];
//! [`GgufWriter`] makes one. Both know versions 2 and 3 in both byte orders. [`Header::file_layout`]
//! says where the tensors lie. Nothing here reads tensor data or decides where a tensor goes: that
//! is [`crate::split`].
//!
//! A [`Header`] exists only if every length, type, name and dimension in it has passed its check,
//! and whatever is refused is refused at the first byte that decides it, in memory of the order
//! of [`Header::MAX_BYTES`].
//!
//! Source of the format: `ggml/docs/gguf.md` and `ggml/src/gguf.cpp` of llama.cpp.

mod cursor;
mod error;
mod file_layout;
mod format;
mod header;
mod parser;
mod value;
mod value_type;
mod writer;

#[cfg(test)]
pub(crate) mod generate;
#[cfg(test)]
mod tests;

pub use cursor::ByteOrder;
pub use error::GgufError;
pub(crate) use format::FORMAT;
pub use header::{Header, Tensors};
pub use parser::HeaderParser;
pub use value::{ArrayRef, ArrayValue, MetadataValue, Value};
pub use value_type::ValueType;
pub use writer::GgufWriter;

pub use crate::file_format::Progress;
pub use crate::ggml_type::GgmlType;

/// The longest header read, in bytes. The largest real one, of gemma-4 with its 262,144
/// tokens and 514,906 merges, has 15.8 MB.
const MAX_HEADER_BYTES: u64 = 32 << 20;
/// The same with the padding up to the data section.
pub(crate) const MAX_PADDED_HEADER_BYTES: u64 = MAX_HEADER_BYTES + MAX_ALIGNMENT as u64;
/// The metadata key that holds the alignment of the data section and of every tensor in it.
pub const ALIGNMENT_KEY: &str = "general.alignment";
/// The alignment of files that do not set one; fixed by the format.
pub(crate) const DEFAULT_ALIGNMENT: u32 = 32;
/// The largest alignment read. Files use 32, sometimes a page (4 KiB to 64 KiB); more would let a
/// header of a few bytes ask for gigabytes of padding.
pub(crate) const MAX_ALIGNMENT: u32 = 1 << 20;
/// The first four bytes of every GGUF file.
pub const MAGIC: [u8; 4] = *b"GGUF";
