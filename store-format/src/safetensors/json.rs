//! The JSON of a header, read as the `safetensors` library reads it, not yet validated.
//!
//! The same file must mean the same tensors to both, so their habits are the same: of a name that comes twice the last
//! entry counts, unknown fields of a tensor are read and ignored, and fields and metadata that come twice are refused.
//! What a header may cost in memory is limited while it is read, and its own bytes are not kept.

use std::collections::BTreeMap;
use std::{fmt, io};

use serde::de::{self, Deserialize, DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};

use super::stream::{HeaderBytes, MAX_TEXT_BYTES};
use super::{Dtype, Limit, SafetensorsError};
use crate::tensor::Shape;

pub(super) const METADATA: &str = "__metadata__";

// `Header` says what the limits are for.
pub(super) const MAX_TENSORS: usize = 131_072;
pub(super) const MAX_TOTAL_DIMENSIONS: usize = 8 * MAX_TENSORS;
pub(super) const MAX_METADATA: usize = 65_536;

#[derive(Debug, Default)]
pub(super) struct RawHeader {
    pub(super) metadata: BTreeMap<String, String>,
    /// In the order of the JSON, names that come twice included.
    pub(super) tensors: Vec<RawTensor>,
}

#[derive(Debug)]
pub(super) struct RawTensor {
    pub(super) name: Box<str>,
    pub(super) dtype: Dtype,
    pub(super) shape: Box<[u64]>,
    pub(super) data_offsets: (u64, u64),
}

impl RawHeader {
    pub(super) fn parse(json: &mut HeaderBytes<'_>) -> io::Result<Result<Self, SafetensorsError>> {
        let mut budget = Budget::new();
        let mut deserializer = serde_json::Deserializer::from_reader(&mut *json);
        let header = deserializer.deserialize_map(HeaderVisitor(&mut budget));
        let header = header.and_then(|header| deserializer.end().map(|()| header));
        let error = match header {
            Ok(header) => return Ok(Ok(header)),
            Err(error) => error,
        };
        match json.take_failure() {
            Some(failure) => failure.map(Err),
            None => Ok(Err(budget.refused.unwrap_or_else(|| refusal(json.last_offset(), &error)))),
        }
    }
}

fn refusal(offset: u64, error: &serde_json::Error) -> SafetensorsError {
    const SHOWN_CHARS: usize = 200;
    let text = error.to_string();
    let text = text.rsplit_once(" at line ").map_or(text.as_str(), |(text, _place)| text);
    // The parser quotes unknown input, including control characters.
    let harmless = |c: char| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c };
    SafetensorsError::Json { offset, reason: text.chars().take(SHOWN_CHARS).map(harmless).collect() }
}

/// How much more a header may have.
struct Budget {
    tensors: usize,
    dimensions: usize,
    metadata: usize,
    text_bytes: usize,
    /// The reason why reading has ended, if it is not the JSON.
    refused: Option<SafetensorsError>,
}

impl Budget {
    const fn new() -> Self {
        Self {
            tensors: MAX_TENSORS,
            dimensions: MAX_TOTAL_DIMENSIONS,
            metadata: MAX_METADATA,
            text_bytes: MAX_TEXT_BYTES,
            refused: None,
        }
    }

    fn take<E: de::Error>(&mut self, limit: Limit, count: usize) -> Result<(), E> {
        let left = match limit {
            Limit::Tensors => &mut self.tensors,
            Limit::Dimensions => &mut self.dimensions,
            Limit::Metadata => &mut self.metadata,
            Limit::Text => &mut self.text_bytes,
        };
        match left.checked_sub(count) {
            Some(rest) => *left = rest,
            None => return Err(self.refuse(SafetensorsError::TooMany(limit))),
        }
        Ok(())
    }

    fn refuse<E: de::Error>(&mut self, error: SafetensorsError) -> E {
        self.refused = Some(error);
        E::custom("refused")
    }
}

struct HeaderVisitor<'b>(&'b mut Budget);

impl<'de> Visitor<'de> for HeaderVisitor<'_> {
    type Value = RawHeader;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a header: an object of tensors by name")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
        let Self(budget) = self;
        let (mut metadata, mut tensors) = (None, Vec::new());
        while let Some(name) = map.next_key::<Box<str>>()? {
            if *name == *METADATA {
                if metadata.is_some() {
                    return Err(de::Error::duplicate_field(METADATA));
                }
                metadata = Some(map.next_value_seed(MetadataSeed(budget))?);
                continue;
            }
            budget.take(Limit::Tensors, 1)?;
            budget.take(Limit::Text, name.len())?;
            tensors.push(map.next_value_seed(TensorSeed { name, budget })?);
        }
        Ok(RawHeader { metadata: metadata.unwrap_or_default(), tensors })
    }
}

/// An object of texts, or null. Of a key that comes twice, the last value counts.
struct MetadataSeed<'b>(&'b mut Budget);

impl<'de> DeserializeSeed<'de> for MetadataSeed<'_> {
    type Value = BTreeMap<String, String>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for MetadataSeed<'_> {
    type Value = BTreeMap<String, String>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("metadata: an object of texts")
    }

    fn visit_unit<E: de::Error>(self) -> Result<Self::Value, E> {
        Ok(BTreeMap::new())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut metadata = BTreeMap::new();
        while let Some((key, value)) = map.next_entry::<String, String>()? {
            self.0.take(Limit::Metadata, 1)?;
            self.0.take(Limit::Text, key.len().saturating_add(value.len()))?;
            metadata.insert(key, value);
        }
        Ok(metadata)
    }
}

struct TensorSeed<'b> {
    name: Box<str>,
    budget: &'b mut Budget,
}

impl<'de> DeserializeSeed<'de> for TensorSeed<'_> {
    type Value = RawTensor;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<RawTensor, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for TensorSeed<'_> {
    type Value = RawTensor;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a tensor: an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawTensor, A::Error> {
        const FIELDS: [&str; 3] = ["dtype", "shape", "data_offsets"];
        let Self { name, budget } = self;
        let (mut dtype, mut shape, mut data_offsets) = (None, None, None);
        while let Some(Text(field)) = map.next_key()? {
            let place = FIELDS.iter().position(|known| *known == field);
            let is_twice = match place {
                Some(0) => dtype.replace(map.next_value::<RawDtype>()?.known(&name, budget)?).is_some(),
                Some(1) => {
                    let seed = ShapeSeed { name: &name, budget };
                    shape.replace(map.next_value_seed(seed)?).is_some()
                }
                Some(_) => data_offsets.replace(map.next_value::<(u64, u64)>()?).is_some(),
                None => {
                    let Ignored = map.next_value()?;
                    false
                }
            };
            if let Some(field) = place.and_then(|place| FIELDS.get(place)).filter(|_| is_twice) {
                return Err(de::Error::duplicate_field(field));
            }
        }
        let [dtype_field, shape_field, offsets_field] = FIELDS;
        Ok(RawTensor {
            name,
            dtype: dtype.ok_or_else(|| de::Error::missing_field(dtype_field))?,
            shape: shape.ok_or_else(|| de::Error::missing_field(shape_field))?,
            data_offsets: data_offsets.ok_or_else(|| de::Error::missing_field(offsets_field))?,
        })
    }

    /// The library also reads the three values without their names.
    fn visit_seq<A: SeqAccess<'de>>(self, mut values: A) -> Result<RawTensor, A::Error> {
        let Self { name, budget } = self;
        let missing = |count: usize| de::Error::invalid_length(count, &"three values of a tensor");
        let dtype: RawDtype = values.next_element()?.ok_or_else(|| missing(0))?;
        let dtype = dtype.known(&name, budget)?;
        let seed = ShapeSeed { name: &name, budget };
        let shape = values.next_element_seed(seed)?.ok_or_else(|| missing(1))?;
        let data_offsets = values.next_element()?.ok_or_else(|| missing(2))?;
        Ok(RawTensor { name, dtype, shape, data_offsets })
    }
}

struct ShapeSeed<'b> {
    name: &'b str,
    budget: &'b mut Budget,
}

impl<'de> DeserializeSeed<'de> for ShapeSeed<'_> {
    type Value = Box<[u64]>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for ShapeSeed<'_> {
    type Value = Box<[u64]>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a shape: an array of dimensions")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut dimensions: A) -> Result<Self::Value, A::Error> {
        let mut shape = Vec::new();
        while let Some(dimension) = dimensions.next_element()? {
            self.budget.take(Limit::Dimensions, 1)?;
            shape.push(dimension);
            if shape.len() > Shape::MAX_DIMENSIONS {
                let name = self.name.to_owned();
                return Err(self.budget.refuse(SafetensorsError::Rank { name, found: shape.len() }));
            }
        }
        Ok(shape.into_boxed_slice())
    }
}

/// A type by its name, or the start of an unknown name. The library's derived code also reads it as an object,
/// `{"F32": null}`.
struct RawDtype(Result<Dtype, String>);

impl RawDtype {
    fn known<E: de::Error>(self, name: &str, budget: &mut Budget) -> Result<Dtype, E> {
        let name = || name.to_owned();
        self.0.map_err(|found| budget.refuse(SafetensorsError::UnknownDtype { name: name(), found }))
    }
}

impl<'de> Deserialize<'de> for RawDtype {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(DtypeVisitor)
    }
}

struct DtypeVisitor;

impl<'de> Visitor<'de> for DtypeVisitor {
    type Value = RawDtype;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an element type")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<RawDtype, E> {
        const SHOWN_CHARS: usize = 16;
        let start = || text.chars().take(SHOWN_CHARS).collect();
        Ok(RawDtype(Dtype::from_name(text).ok_or_else(start)))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawDtype, A::Error> {
        let found = map.next_entry::<Text, ()>()?;
        let (Text(name), ()) = found.ok_or_else(|| de::Error::invalid_length(0, &self))?;
        let dtype = DtypeVisitor.visit_str(&name)?;
        match map.next_key::<Ignored>()? {
            None => Ok(dtype),
            Some(Ignored) => Err(de::Error::invalid_length(2, &self)),
        }
    }
}

/// A text. Unlike `String` it is refused as "a text".
struct Text(String);

impl<'de> Deserialize<'de> for Text {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(TextVisitor)
    }
}

struct TextVisitor;

impl Visitor<'_> for TextVisitor {
    type Value = Text;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a text")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Text, E> {
        Ok(Text(text.to_owned()))
    }
}

/// Any value. Unlike `IgnoredAny` it is checked as a value that is used: the library keeps it until it knows the field.
/// The parser limits the depth to 128.
struct Ignored;

impl<'de> Deserialize<'de> for Ignored {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(IgnoredVisitor)
    }
}

struct IgnoredVisitor;

impl<'de> Visitor<'de> for IgnoredVisitor {
    type Value = Ignored;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_bool<E: de::Error>(self, _value: bool) -> Result<Ignored, E> {
        Ok(Ignored)
    }

    fn visit_i64<E: de::Error>(self, _value: i64) -> Result<Ignored, E> {
        Ok(Ignored)
    }

    fn visit_u64<E: de::Error>(self, _value: u64) -> Result<Ignored, E> {
        Ok(Ignored)
    }

    fn visit_f64<E: de::Error>(self, _value: f64) -> Result<Ignored, E> {
        Ok(Ignored)
    }

    fn visit_str<E: de::Error>(self, _value: &str) -> Result<Ignored, E> {
        Ok(Ignored)
    }

    fn visit_unit<E: de::Error>(self) -> Result<Ignored, E> {
        Ok(Ignored)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut values: A) -> Result<Ignored, A::Error> {
        while let Some(Ignored) = values.next_element()? {}
        Ok(Ignored)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Ignored, A::Error> {
        while let Some((Ignored, Ignored)) = map.next_entry()? {}
        Ok(Ignored)
    }
}
