//! Writing a header, in the form that [`Header`](super::Header) reads.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

use super::header::{check_name, size_bytes};
use super::json::METADATA;
use super::{Dtype, SafetensorsError};

/// The header of a file to be: metadata, and tensors in the order in which their data will follow.
#[derive(Clone, Debug, Default)]
pub struct HeaderWriter {
    metadata: BTreeMap<String, String>,
    entries: Map<String, Value>,
    names: BTreeSet<String>,
    position: u64,
}

impl HeaderWriter {
    /// Nothing yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets a text of the metadata.
    pub fn metadata(&mut self, key: impl Into<String>, value: impl Into<String>) -> &mut Self {
        self.metadata.insert(key.into(), value.into());
        self
    }

    /// Adds a tensor whose data comes after that of the one before; `shape` has the slowest
    /// dimension first.
    ///
    /// # Errors
    /// [`SafetensorsError`] for what no reader would take: a bad name, one that is there already,
    /// a shape of no size.
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

    /// The bytes in front of the data: the length, the JSON, and spaces up to a multiple of eight.
    ///
    /// # Errors
    /// [`SafetensorsError::HeaderLength`] when there is more than a reader takes.
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
