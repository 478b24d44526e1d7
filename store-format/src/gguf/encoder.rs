//! Encodes the fields of a GGUF header.

use super::MAGIC;
use super::cursor::{ByteOrder, Cursor};
use super::error::GgufError;
use super::header::Header;
use super::value::Value;
use super::value_type::ValueType;
use crate::ggml_type::GgmlType;

/// Writes a header in either byte order, field by field. [`GgufWriter`](super::GgufWriter) makes a whole header; this
/// type serves the functions that copy fields of another header.
#[derive(Debug)]
pub struct Encoder {
    bytes: Vec<u8>,
    order: ByteOrder,
}

impl Encoder {
    /// No fields yet; all numbers are written in this order.
    pub const fn new(order: ByteOrder) -> Self {
        Self { bytes: Vec::new(), order }
    }

    pub const fn order(&self) -> ByteOrder {
        self.order
    }

    /// Magic number, version and the numbers of tensors and metadata keys: the first field.
    pub fn preamble(&mut self, version: u32, tensor_count: usize, key_count: usize) {
        self.raw(&MAGIC);
        self.number(version.to_le_bytes());
        self.count(tensor_count);
        self.count(key_count);
    }

    /// Bytes that are in the right order already.
    pub fn raw(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// The header, validated by parsing it.
    pub fn finish(self) -> Result<Header, GgufError> {
        Header::from_bytes(self.bytes)
    }

    /// A number, given least significant byte first.
    pub fn number<const N: usize>(&mut self, little_endian: [u8; N]) {
        self.bytes.extend(self.order.swap(little_endian));
    }

    /// A number of elements or bytes, as 64 bits.
    pub fn count(&mut self, count: usize) {
        self.number((count as u64).to_le_bytes());
    }

    /// A string with its length in front.
    pub fn string(&mut self, bytes: &[u8]) {
        self.count(bytes.len());
        self.bytes.extend_from_slice(bytes);
    }

    /// A value, preceded by the id of its type.
    pub fn typed_value(&mut self, value: &Value) {
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

    /// A value of a checked header in byte order `order`, preceded by the id of its type.
    pub fn copied_value(&mut self, bytes: &[u8], order: ByteOrder) {
        if order == self.order {
            self.raw(bytes);
        } else {
            // The bytes of a checked header can be read. If they could not, the new header would be refused
            // when it is parsed.
            copy_reordered(self, bytes, order).unwrap_or_default();
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

    /// An entry of the table of tensors. `offset` counts from the start of the data section.
    pub fn tensor(&mut self, name: &str, ggml_type: GgmlType, dimensions: &[u64], offset: u64) {
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

/// Writes a value in another byte order. Numbers are not interpreted, so that NaNs keep their bits.
fn copy_reordered(out: &mut Encoder, bytes: &[u8], order: ByteOrder) -> Option<()> {
    let mut cursor = Cursor::new(bytes, 0, order);
    let value_type = copy_type(out, &mut cursor)?;
    if value_type != ValueType::Array {
        return copy_scalar(out, &mut cursor, value_type);
    }
    let element = copy_type(out, &mut cursor)?;
    let count = cursor.count(element.least_bytes() as u64).ok()?;
    out.count(count);
    (0..count).try_for_each(|_| copy_scalar(out, &mut cursor, element))
}

fn copy_type(out: &mut Encoder, cursor: &mut Cursor<'_>) -> Option<ValueType> {
    let value_type = ValueType::from_id(cursor.u32().ok()?)?;
    out.number(value_type.id().to_le_bytes());
    Some(value_type)
}

fn copy_scalar(out: &mut Encoder, cursor: &mut Cursor<'_>, value_type: ValueType) -> Option<()> {
    match value_type {
        ValueType::U8 | ValueType::I8 | ValueType::Bool => out.number(cursor.number::<1>().ok()?),
        ValueType::U16 | ValueType::I16 => out.number(cursor.number::<2>().ok()?),
        ValueType::U32 | ValueType::I32 | ValueType::F32 => out.number(cursor.number::<4>().ok()?),
        ValueType::U64 | ValueType::I64 | ValueType::F64 => out.number(cursor.number::<8>().ok()?),
        ValueType::String => out.string(cursor.string().ok()?),
        // The parser refuses arrays of arrays.
        ValueType::Array => return None,
    }
    Some(())
}
