//! The metadata of a new header that is derived from an existing one.

use blobd_store_format::gguf::{ByteOrder, Encoder, Header, Value};

/// Metadata entries in file order. Unchanged entries keep their exact bytes, because a key need not be UTF-8, and a
/// boolean may be any byte.
#[derive(Clone)]
pub(crate) struct Entries<'h> {
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
    /// The type ID and the value, in the byte order of the source.
    Copied(&'h [u8]),
    New(Value),
}

impl<'h> Entries<'h> {
    pub(crate) fn from_header(header: &'h Header) -> Self {
        let copied = |(key, value): (&[u8], _)| Entry { key: key.to_vec(), value: EntryValue::Copied(value) };
        Self { entries: header.raw_metadata().map(copied).collect(), order: header.byte_order() }
    }

    /// An empty list, for a header that does not keep the source's entries.
    pub(crate) const fn none() -> Self {
        Self { entries: Vec::new(), order: ByteOrder::Little }
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Replaces a value in place, or appends the entry.
    pub(crate) fn set(&mut self, key: &[u8], value: Value) {
        let value = EntryValue::New(value);
        match self.entries.iter_mut().find(|entry| entry.key == key) {
            Some(entry) => entry.value = value,
            None => self.entries.push(Entry { key: key.to_vec(), value }),
        }
    }

    pub(crate) fn retain(&mut self, keeps: impl Fn(&[u8]) -> bool) {
        self.entries.retain(|entry| keeps(&entry.key));
    }

    pub(crate) fn write(&self, out: &mut Encoder) {
        for entry in &self.entries {
            out.string(&entry.key);
            match &entry.value {
                EntryValue::New(value) => out.typed_value(value),
                EntryValue::Copied(bytes) => out.copied_value(bytes, self.order),
            }
        }
    }
}
