//! Encodes the fields of a GGUF header.

use super::MAGIC;
use super::cursor::ByteOrder;
use super::error::GgufError;
use super::header::Header;
use super::value::Value;
use crate::ggml_type::GgmlType;

/// The bytes of a header, as far as they are written.
pub(super) struct Encoder {
    bytes: Vec<u8>,
    order: ByteOrder,
}

impl Encoder {
    pub(super) const fn new(order: ByteOrder) -> Self {
        Self { bytes: Vec::new(), order }
    }

    pub(super) const fn order(&self) -> ByteOrder {
        self.order
    }

    pub(super) fn preamble(&mut self, version: u32, tensor_count: usize, key_count: usize) {
        self.raw(&MAGIC);
        self.number(version.to_le_bytes());
        self.count(tensor_count);
        self.count(key_count);
    }

    /// Bytes that are in the right order already.
    pub(super) fn raw(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// The header, validated by parsing it.
    pub(super) fn finish(self) -> Result<Header, GgufError> {
        Header::from_bytes(self.bytes)
    }

    /// A number, given least significant byte first.
    pub(super) fn number<const N: usize>(&mut self, little_endian: [u8; N]) {
        self.bytes.extend(self.order.swap(little_endian));
    }

    pub(super) fn count(&mut self, count: usize) {
        self.number((count as u64).to_le_bytes());
    }

    pub(super) fn string(&mut self, bytes: &[u8]) {
        self.count(bytes.len());
        self.bytes.extend_from_slice(bytes);
    }

    /// A value, preceded by the id of its type.
    pub(super) fn typed_value(&mut self, value: &Value) {
        self.number(value.value_type().id().to_le_bytes());
        match value {
            Value::Array(array) => {
                self.number(array.element_type().id().to_le_bytes());
                self.count(array.values().len());
                // An `ArrayValue` never holds arrays, so there is no recursion.
                array.values().iter().for_each(|value| self.scalar(value));
            }
            _ => self.scalar(value),
        }
    }

    fn scalar(&mut self, value: &Value) {
        match value {
            Value::U8(value) => self.number(value.to_le_bytes()),
            Value::I8(value) => self.number(value.to_le_bytes()),
            Value::U16(value) => self.number(value.to_le_bytes()),
            Value::I16(value) => self.number(value.to_le_bytes()),
            Value::U32(value) => self.number(value.to_le_bytes()),
            Value::I32(value) => self.number(value.to_le_bytes()),
            Value::F32(value) => self.number(value.to_le_bytes()),
            Value::Bool(value) => self.number([u8::from(*value)]),
            Value::String(bytes) => self.string(bytes),
            Value::Array(_) => {}
            Value::U64(value) => self.number(value.to_le_bytes()),
            Value::I64(value) => self.number(value.to_le_bytes()),
            Value::F64(value) => self.number(value.to_le_bytes()),
        }
    }

    pub(super) fn tensor(&mut self, name: &str, ggml_type: GgmlType, dimensions: &[u64], offset: u64) {
        self.string(name.as_bytes());
        // A checked shape is never that long.
        self.number(u32::try_from(dimensions.len()).unwrap_or(u32::MAX).to_le_bytes());
        for dimension in dimensions {
            self.number(dimension.to_le_bytes());
        }
        self.number(ggml_type.id().to_le_bytes());
        self.number(offset.to_le_bytes());
    }
}
