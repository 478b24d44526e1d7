//! The metadata of a header that is made from another one.

use super::ValueType;
use super::cursor::{ByteOrder, Cursor};
use super::encoder::Encoder;
use super::header::Header;
use super::value::Value;

/// Metadata entries in file order. Entries that are not changed keep their bytes: a key need not be UTF-8, and a
/// boolean may have any byte.
#[derive(Clone)]
pub(super) struct Entries<'h> {
    entries: Vec<Entry<'h>>,
    order: ByteOrder,
}

#[derive(Clone)]
struct Entry<'h> {
    key: Vec<u8>,
    value: EntryValue<'h>,
}

#[derive(Clone)]
enum EntryValue<'h> {
    /// The id of the type and the value, in the byte order of the source.
    Copied(&'h [u8]),
    New(Value),
}

impl<'h> Entries<'h> {
    pub(super) fn of(header: &'h Header) -> Self {
        let copied = |(key, value): (&[u8], _)| Entry { key: key.to_vec(), value: EntryValue::Copied(value) };
        Self { entries: header.raw_metadata().map(copied).collect(), order: header.byte_order() }
    }

    /// No entries; those that are set are written in any order.
    pub(super) const fn none() -> Self {
        Self { entries: Vec::new(), order: ByteOrder::Little }
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Replaces a value in place, or appends the entry.
    pub(super) fn set(&mut self, key: &[u8], value: Value) {
        let value = EntryValue::New(value);
        match self.entries.iter_mut().find(|entry| entry.key == key) {
            Some(entry) => entry.value = value,
            None => self.entries.push(Entry { key: key.to_vec(), value }),
        }
    }

    pub(super) fn retain(&mut self, keeps: impl Fn(&[u8]) -> bool) {
        self.entries.retain(|entry| keeps(&entry.key));
    }

    pub(super) fn write(&self, out: &mut Encoder) {
        for entry in &self.entries {
            out.string(&entry.key);
            match &entry.value {
                EntryValue::New(value) => out.typed_value(value),
                EntryValue::Copied(bytes) if self.order == out.order() => out.raw(bytes),
                // The bytes of a checked header can be read. If they could not, the new header would be
                // refused when it is parsed.
                EntryValue::Copied(bytes) => copy_reordered(out, bytes, self.order).unwrap_or_default(),
            }
        }
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
