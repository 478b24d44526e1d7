//! The JSON of a header, not yet validated.
//!
//! The nesting depth is at most four, so nothing recurses on input. Duplicate names are refused here:
//! a map would silently keep one of them, and other readers might keep the other.

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::marker::PhantomData;

use serde::Deserialize;
use serde::de::value::MapAccessDeserializer;
use serde::de::{self, Deserializer, MapAccess, Visitor};

use super::MAX_TENSORS;

/// A header's JSON.
#[derive(Debug, Default)]
pub(super) struct RawHeader {
    pub(super) metadata: BTreeMap<String, String>,
    /// In the order of the JSON.
    pub(super) tensors: Vec<(String, RawTensor)>,
}

/// A tensor as a header describes it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawTensor {
    pub(super) dtype: String,
    pub(super) shape: Vec<u64>,
    pub(super) data_offsets: (u64, u64),
}

/// The key of the metadata.
pub(super) const METADATA: &str = "__metadata__";

/// The message of a refused count, which distinguishes it from a JSON error.
pub(super) const TOO_MANY: &str = "too many tensors";

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(HeaderVisitor)
    }
}

struct HeaderVisitor;

impl<'de> Visitor<'de> for HeaderVisitor {
    type Value = RawHeader;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a header: an object of tensors by name")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
        let (mut header, mut names) = (RawHeader::default(), HashSet::new());
        while let Some(name) = map.next_key::<String>()? {
            if !names.insert(name.clone()) {
                return Err(de::Error::custom(format_args!("{} comes twice", shown(&name))));
            }
            if name == METADATA {
                header.metadata = map.next_value::<Metadata>()?.0;
            } else if header.tensors.len() < MAX_TENSORS {
                let Object(tensor) = map.next_value()?;
                header.tensors.push((name, tensor));
            } else {
                return Err(de::Error::custom(TOO_MANY));
            }
        }
        Ok(header)
    }
}

/// A value that must be an object. Without this, a derived type would also accept an array of its fields' values.
struct Object<T>(T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(ObjectVisitor(PhantomData)).map(Self)
    }
}

struct ObjectVisitor<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for ObjectVisitor<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<T, A::Error> {
        T::deserialize(MapAccessDeserializer::new(map))
    }
}

struct Metadata(BTreeMap<String, String>);

impl<'de> Deserialize<'de> for Metadata {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(MetadataVisitor).map(Self)
    }
}

struct MetadataVisitor;

impl<'de> Visitor<'de> for MetadataVisitor {
    type Value = BTreeMap<String, String>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("metadata: an object of texts")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut metadata = BTreeMap::new();
        while let Some((key, value)) = map.next_entry::<String, String>()? {
            let name = shown(&key);
            if metadata.insert(key, value).is_some() {
                return Err(de::Error::custom(format_args!("metadata {name} comes twice")));
            }
        }
        Ok(metadata)
    }
}

/// A name for an error message, truncated and escaped.
pub(super) fn shown(name: &str) -> String {
    const SHOWN_CHARS: usize = 64;
    format!("{:?}", name.chars().take(SHOWN_CHARS).collect::<String>())
}
