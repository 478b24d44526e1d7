//! Metadata values given as text.

use std::fmt;
use std::str::FromStr;

use serde_json::value::RawValue;

use blobd_store_format::gguf::ValueType;
use blobd_store_format::gguf::printable;
use blobd_store_format::gguf::{ArrayValue, MetadataValue, Value};

/// The type of a value to be set: `uint8` to `float64`, `bool`, `string`, or an array such as `array<uint32>`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EditType {
    /// Never [`ValueType::Array`].
    element: ValueType,
    is_array: bool,
}

/// The text is not the name of a type.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?}: not a type; write for example uint32, float32, bool, string or array<string>")]
pub struct EditTypeError {
    text: String,
}

impl EditType {
    const fn scalar(element: ValueType) -> Self {
        Self { element, is_array: false }
    }

    fn from_value(value: &MetadataValue<'_>) -> Self {
        match value.as_array() {
            Some(array) => Self { element: array.element_type(), is_array: true },
            None => Self::scalar(value.value_type()),
        }
    }

    pub(super) const fn is_array(&self) -> bool {
        self.is_array
    }

    /// The type of a new key, guessed from the form of its text.
    fn inferred(text: &str) -> Self {
        let is_number = text.starts_with(|c: char| c.is_ascii_digit() || "+-.".contains(c));
        Self::scalar(match text {
            "true" | "false" => ValueType::Bool,
            _ if text.parse::<u32>().is_ok() => ValueType::U32,
            _ if text.parse::<i32>().is_ok() => ValueType::I32,
            _ if text.parse::<i64>().is_ok() => ValueType::I64,
            _ if text.parse::<u64>().is_ok() => ValueType::U64,
            _ if is_number && float(text).is_some() => ValueType::F32,
            _ => ValueType::String,
        })
    }

    fn read(self, text: &str) -> Option<Value> {
        if !self.is_array {
            return scalar(self.element, text);
        }
        let elements: Vec<&RawValue> = serde_json::from_str(text).ok()?;
        let values = elements.into_iter().map(|element| self.read_element(element.get()));
        Some(Value::Array(ArrayValue::new(self.element, values.collect::<Option<_>>()?)))
    }

    /// Reads an element of a JSON array. Strings are quoted, and so are NaN and infinities.
    fn read_element(self, json: &str) -> Option<Value> {
        let is_quoted = json.starts_with('"');
        let may_be_quoted = matches!(self.element, ValueType::String | ValueType::F32 | ValueType::F64);
        match (is_quoted, self.element) {
            (true, _) if may_be_quoted => scalar(self.element, &serde_json::from_str::<String>(json).ok()?),
            (false, ValueType::String) | (true, _) => None,
            (false, _) => scalar(self.element, json),
        }
    }
}

/// The new value of a key with the value `old`. On failure, returns the type that the text does not fit.
pub(super) fn resolve(
    given: Option<EditType>,
    text: &str,
    old: Option<MetadataValue<'_>>,
) -> Result<Value, EditType> {
    let known = given.or_else(|| old.as_ref().map(EditType::from_value));
    let value_type = known.unwrap_or_else(|| EditType::inferred(text));
    value_type.read(text).ok_or(value_type)
}

fn scalar(value_type: ValueType, text: &str) -> Option<Value> {
    Some(match value_type {
        ValueType::U8 => Value::U8(text.parse().ok()?),
        ValueType::I8 => Value::I8(text.parse().ok()?),
        ValueType::U16 => Value::U16(text.parse().ok()?),
        ValueType::I16 => Value::I16(text.parse().ok()?),
        ValueType::U32 => Value::U32(text.parse().ok()?),
        ValueType::I32 => Value::I32(text.parse().ok()?),
        ValueType::U64 => Value::U64(text.parse().ok()?),
        ValueType::I64 => Value::I64(text.parse().ok()?),
        ValueType::F32 => Value::F32(float(text)?),
        ValueType::F64 => {
            Value::F64(text.parse().ok().filter(|value: &f64| value.is_finite() || has_no_digit(text))?)
        }
        ValueType::Bool => Value::Bool(text.parse().ok()?),
        ValueType::String => Value::String(text.as_bytes().to_vec()),
        ValueType::Array => return None,
    })
}

/// Reads a number in the range of `float32`: 1e60 is refused instead of rounded to infinity.
fn float(text: &str) -> Option<f32> {
    text.parse().ok().filter(|value: &f32| value.is_finite() || has_no_digit(text))
}

fn has_no_digit(text: &str) -> bool {
    !text.contains(|c: char| c.is_ascii_digit())
}

impl FromStr for EditType {
    type Err = EditTypeError;

    fn from_str(text: &str) -> Result<Self, EditTypeError> {
        let inner = text.strip_prefix("array<").and_then(|text| text.strip_suffix('>'));
        let element =
            ValueType::from_name(inner.unwrap_or(text)).filter(|element| *element != ValueType::Array);
        let found = element.map(|element| Self { element, is_array: inner.is_some() });
        found.ok_or_else(|| EditTypeError { text: printable(text.as_bytes()) })
    }
}

impl fmt::Display for EditType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.is_array {
            true => write!(f, "array<{}>", self.element),
            false => self.element.fmt(f),
        }
    }
}
