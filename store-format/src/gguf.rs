//! GGUF, the model file format of llama.cpp: reading and writing its header.
//!
//! A GGUF file is a header (metadata and a table of tensors), padding, and the tensors' bytes.
//! [`HeaderParser`] takes the header's bytes as they arrive and yields a [`Header`];
//! [`GgufWriter`] makes one. Both know versions 2 and 3 in both byte orders. [`Header::file_layout`]
//! gives the position of each tensor; [`crate::split`] decides how they are stored.
//!
//! Every length, type, name and dimension in a [`Header`] is validated. Invalid input is refused at
//! the first byte that proves it invalid, with memory of about [`Header::MAX_BYTES`].
//!
//! Source of the format: `ggml/docs/gguf.md` and `ggml/src/gguf.cpp` of llama.cpp.

mod cursor;
mod encoder;
mod error;
mod file_layout;
#[cfg(any(test, feature = "testing"))]
pub mod generate;
mod header;
mod parser;
#[cfg(test)]
mod tests;
mod value;
mod value_type;
mod writer;

pub use crate::ggml_type::GgmlType;
pub use cursor::ByteOrder;
pub use encoder::Encoder;
pub use error::{GgufError, printable};
pub use header::{Header, Tensors, key_text};
pub use parser::{HeaderParser, Progress};
pub use value::{ArrayRef, ArrayValue, MetadataValue, Value};
pub use value_type::ValueType;
pub use writer::GgufWriter;

/// The longest header read, in bytes. The largest known one, of gemma-4 with 262,144 tokens and
/// 514,906 merges, has 15.8 MB.
const MAX_HEADER_BYTES: u64 = 32 << 20;
/// [`MAX_HEADER_BYTES`] and the padding before the data section.
pub(crate) const MAX_PADDED_HEADER_BYTES: u64 = MAX_HEADER_BYTES + MAX_ALIGNMENT as u64;
/// The metadata key that holds the alignment of the data section and of every tensor in it.
pub const ALIGNMENT_KEY: &str = "general.alignment";
pub const DEFAULT_ALIGNMENT: u32 = 32;
/// The largest alignment read. Files use 32, sometimes a page (4 KiB to 64 KiB); a larger limit would
/// let a small header demand gigabytes of padding.
pub const MAX_ALIGNMENT: u32 = 1 << 20;
/// The first four bytes of every GGUF file.
pub const MAGIC: [u8; 4] = *b"GGUF";
