//! A checked GGUF header.

use std::borrow::Cow;
use std::fmt;

use super::MAX_HEADER_BYTES;
use super::cursor::{ByteOrder, Cursor};
use super::value::MetadataValue;
use super::value_type::ValueType;
use crate::ggml_type::GgmlType;
use crate::tensor::{Shape, TensorInfo};

/// The metadata and tensor table of a GGUF file, with their original bytes.
#[derive(Clone, PartialEq, Eq)]
pub struct Header {
    pub(super) preamble: Preamble,
    pub(super) alignment: u32,
    pub(super) bytes: Vec<u8>,
    pub(super) metadata: Vec<MetadataRecord>,
    pub(super) tensors: Vec<TensorRecord>,
    /// The dimensions of all tensors, in the order of the table.
    pub(super) dimensions: Vec<u64>,
}

#[derive(Clone, Debug)]
pub struct Tensors<'a> {
    bytes: &'a [u8],
    dimensions: &'a [u64],
    records: std::slice::Iter<'a, TensorRecord>,
}

impl Header {
    pub const MAX_BYTES: u64 = MAX_HEADER_BYTES;
    /// The most tensors read. Large models have about 1,000; the known maximum, Kimi K2 with unpacked
    /// experts, is 70,000.
    pub const MAX_TENSORS: u64 = 131_072;
    /// The most metadata keys read. Files have some dozens; a public test file has 32,768.
    pub const MAX_KEYS: u64 = 131_072;

    /// The byte order of the header and of the tensors' numbers.
    pub fn byte_order(&self) -> ByteOrder {
        self.preamble.order
    }

    /// The version of the format: 2 or 3, which differ in name only.
    pub fn version(&self) -> u32 {
        self.preamble.version
    }

    /// The alignment of the data section and of every tensor in bytes, a power of two.
    pub const fn alignment(&self) -> u32 {
        self.alignment
    }

    /// The header's bytes, without the padding before the data section.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The header's bytes with the padding before the data section.
    pub fn into_padded(self) -> Vec<u8> {
        // At most 33 MiB, or it would not have been parsed.
        let padded_size = usize::try_from(self.data_offset()).unwrap_or(self.bytes.len());
        let mut bytes = self.bytes;
        bytes.resize(padded_size, 0);
        bytes
    }

    /// Where the data section starts, in bytes from the start of the file.
    pub fn data_offset(&self) -> u64 {
        // At most `MAX_BYTES` and `MAX_ALIGNMENT`, so the sum is far from wrapping.
        (self.bytes.len() as u64).next_multiple_of(self.alignment.into())
    }

    /// All metadata in the order of the file. A key may be any bytes; [`key_text`](super::key_text)
    /// makes text of it.
    pub fn metadata(&self) -> impl Iterator<Item = (&[u8], MetadataValue<'_>)> {
        self.metadata.iter().filter_map(|record| {
            let key = record.key.slice(&self.bytes);
            self.read_value(record).map(|value| (key, value))
        })
    }

    pub fn value(&self, key: &str) -> Option<MetadataValue<'_>> {
        let is_meant = |record: &&MetadataRecord| record.key.slice(&self.bytes) == key.as_bytes();
        self.metadata.iter().find(is_meant).and_then(|record| self.read_value(record))
    }

    /// The model's architecture, such as `llama`: `general.architecture`, if it is text.
    pub fn architecture(&self) -> Option<&str> {
        self.value("general.architecture")?.as_str()
    }

    /// The tensors, in the order of the file's table.
    pub fn tensors(&self) -> Tensors<'_> {
        Tensors { bytes: &self.bytes, dimensions: &self.dimensions, records: self.tensors.iter() }
    }

    /// Each key, and the bytes of its value: the id of its type and the value.
    pub fn raw_metadata(&self) -> impl Iterator<Item = (&[u8], &[u8])> {
        self.metadata.iter().map(|record| (record.key.slice(&self.bytes), record.value.slice(&self.bytes)))
    }

    /// The table of tensors as it is in the file.
    pub fn raw_tensors(&self) -> &[u8] {
        const PREAMBLE_BYTES: usize = 24;
        let start = self.metadata.last().map_or(PREAMBLE_BYTES, |record| record.value.end());
        self.bytes.get(start..).unwrap_or_default()
    }

    fn read_value(&self, record: &MetadataRecord) -> Option<MetadataValue<'_>> {
        let mut cursor = Cursor::new(record.value.slice(&self.bytes), 0, self.preamble.order);
        let value_type = ValueType::from_id(cursor.u32().ok()?)?;
        MetadataValue::read(&mut cursor, value_type).ok()
    }
}

/// The counts instead of the content, which may be megabytes.
impl fmt::Debug for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Header")
            .field("preamble", &self.preamble)
            .field("alignment", &self.alignment)
            .field("bytes", &self.bytes.len())
            .finish_non_exhaustive()
    }
}

impl<'a> Iterator for Tensors<'a> {
    type Item = TensorInfo<'a>;

    fn next(&mut self) -> Option<TensorInfo<'a>> {
        self.records.next().map(|record| record.info(self.bytes, self.dimensions))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.records.size_hint()
    }

    fn nth(&mut self, n: usize) -> Option<TensorInfo<'a>> {
        self.records.nth(n).map(|record| record.info(self.bytes, self.dimensions))
    }
}

impl ExactSizeIterator for Tensors<'_> {}

/// A metadata key as text. Different keys have different texts: in keys that are not UTF-8 or contain a
/// backslash, each invalid byte is written as `\xff` and each backslash as `\\`. The text may hold control
/// characters.
pub fn key_text(key: &[u8]) -> Cow<'_, str> {
    match std::str::from_utf8(key) {
        Ok(text) if !text.contains('\\') => Cow::Borrowed(text),
        _ => Cow::Owned(key.utf8_chunks().map(|chunk| escaped(chunk.valid(), chunk.invalid())).collect()),
    }
}

/// The fields of the first 24 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Preamble {
    pub(super) order: ByteOrder,
    pub(super) version: u32,
    pub(super) tensor_count: usize,
    pub(super) key_count: usize,
}

/// A range of the header's bytes, or of its dimensions; half the size of a `Range<usize>`, since there may be many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Span {
    start: u32,
    end: u32,
}

impl Span {
    /// The range must have been read by a [`Cursor`], so that it ends within [`Header::MAX_BYTES`].
    pub(super) fn new(start: usize, end: usize) -> Self {
        let short = |place: usize| u32::try_from(place).unwrap_or(u32::MAX);
        Self { start: short(start), end: short(end) }
    }

    pub(super) fn ending_at(self, end: usize) -> Self {
        Self { start: self.start, ..Self::new(end, end) }
    }

    fn end(self) -> usize {
        usize::try_from(self.end).unwrap_or(usize::MAX)
    }

    pub(super) fn slice<T>(self, all: &[T]) -> &[T] {
        let place = |place: u32| usize::try_from(place).unwrap_or(usize::MAX);
        all.get(place(self.start)..place(self.end)).unwrap_or_default()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MetadataRecord {
    pub(super) key: Span,
    /// The id of the value's type and the value.
    pub(super) value: Span,
}

/// A checked tensor info whose name and dimensions are still in the header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TensorRecord {
    pub(super) name: Span,
    pub(super) ggml_type: GgmlType,
    pub(super) dimensions: Span,
    pub(super) offset: u64,
}

impl TensorRecord {
    fn info<'a>(&self, bytes: &'a [u8], dimensions: &'a [u64]) -> TensorInfo<'a> {
        // The parser has proved that the name is UTF-8 and the shape valid.
        let name = std::str::from_utf8(self.name.slice(bytes)).unwrap_or_default();
        let shape = Shape::new(self.dimensions.slice(dimensions)).unwrap_or_default();
        TensorInfo::checked(name, self.ggml_type, shape, self.offset)
    }
}

fn escaped(valid: &str, invalid: &[u8]) -> String {
    invalid.iter().fold(valid.replace('\\', "\\\\"), |text, byte| format!("{text}\\x{byte:02x}"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn ordinary_keys_are_unchanged() {
        assert_eq!(key_text(b"general.architecture"), "general.architecture");
        assert_eq!(key_text("größe".as_bytes()), "größe");
    }

    #[test]
    fn bytes_that_are_not_utf8_stay_apart() {
        assert_eq!(key_text(b"a\xff"), "a\\xff");
        assert_eq!(key_text(b"a\xfe"), "a\\xfe");
        assert_eq!(key_text(b"a\\xff"), "a\\\\xff");
    }

    proptest! {
        #[test]
        fn different_keys_have_different_texts(
            one in proptest::collection::vec(prop_oneof![Just(b'\\'), Just(b'x'), Just(b'f'), any::<u8>()], 0..8),
            two in proptest::collection::vec(prop_oneof![Just(b'\\'), Just(b'x'), Just(b'f'), any::<u8>()], 0..8),
        ) {
            prop_assert_eq!(key_text(&one) == key_text(&two), one == two);
        }
    }
}
