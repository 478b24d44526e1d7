//! Writes a header.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

use super::header::{check_name, size_bytes};
use super::json::METADATA;
use super::{Dtype, SafetensorsError};

/// Makes a header from metadata and tensors, in the order of their data.
#[derive(Clone, Debug, Default)]
pub struct HeaderWriter {
    metadata: BTreeMap<String, String>,
    entries: Map<String, Value>,
    names: BTreeSet<String>,
    position: u64,
}

impl HeaderWriter {
    /// An empty header.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets a metadata entry.
    pub fn metadata(&mut self, key: impl Into<String>, value: impl Into<String>) -> &mut Self {
        self.metadata.insert(key.into(), value.into());
        self
    }

    /// Adds a tensor after the previous one; `shape` has the slowest dimension first.
    ///
    /// # Errors
    /// [`SafetensorsError`] for an invalid or duplicate name, or an invalid size.
    pub fn tensor(&mut self, name: &str, dtype: Dtype, shape: &[u64]) -> Result<&mut Self, SafetensorsError> {
        check_name(name)?;
        if name == METADATA || !self.names.insert(name.to_owned()) {
            return Err(SafetensorsError::Name { length: name.len(), problem: "is taken" });
        }
        let size = size_bytes(dtype, shape).and_then(|size| self.position.checked_add(size));
        let Some(end) = size else {
            return Err(SafetensorsError::Size { name: name.to_owned(), dtype, shape: shape.to_vec() });
        };
        let entry = json!({ "dtype": dtype.name(), "shape": shape, "data_offsets": [self.position, end] });
        self.entries.insert(name.to_owned(), entry);
        self.position = end;
        Ok(self)
    }

    /// The bytes before the data: the length, the JSON, and spaces up to a multiple of eight.
    ///
    /// # Errors
    /// [`SafetensorsError::HeaderLength`] when the header is above the limit.
    pub fn header(&self) -> Result<Vec<u8>, SafetensorsError> {
        let mut entries = self.entries.clone();
        if !self.metadata.is_empty() {
            entries.insert(METADATA.to_owned(), json!(self.metadata));
        }
        let mut json = Value::Object(entries).to_string().into_bytes();
        json.resize(json.len().next_multiple_of(super::Header::LENGTH_BYTES), b' ');
        let length = (json.len() as u64).to_le_bytes();
        super::Header::end(length)?;
        Ok([&length, json.as_slice()].concat())
    }
}
