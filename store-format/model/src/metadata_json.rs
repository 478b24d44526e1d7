//! Metadata values as JSON, whole or abridged.
//!
//! JSON has no NaN and no infinities: they are the strings `NaN`, `Infinity` and `-Infinity`. A string that is
//! not UTF-8 is `{"base64":…}`.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use blobd_store_format::file_format::MetadataValue;
use serde_json::{Value as Json, json};

/// Limit for the metadata strings of one model. Templates and licences of real models have about 100 KiB; a header may
/// have 32 MiB, which can grow sixfold in JSON.
const MAX_TEXT_BYTES: usize = 1 << 20;

/// The longest array that is listed in an abridged value.
const MAX_LISTED: usize = 64;
/// How many elements of a longer array are listed.
const FIRST_LISTED: usize = 4;

/// Abridges values. An array of more than 64 elements, such as a vocabulary, is replaced by its type, its length and
/// its first elements. A string that exceeds the rest of the text budget is replaced by its length.
#[derive(Debug)]
pub struct Abridger {
    text_budget: usize,
}

impl Default for Abridger {
    fn default() -> Self {
        Self::new()
    }
}

impl Abridger {
    /// An abridger for the values of one model.
    pub const fn new() -> Self {
        Self { text_budget: MAX_TEXT_BYTES }
    }

    /// The value, abridged if it is long.
    pub fn json(&mut self, value: &MetadataValue<'_>) -> Json {
        match value {
            MetadataValue::Array(array) if array.len() > MAX_LISTED => {
                let first = array.iter().take(FIRST_LISTED).map(|element| self.json(&element));
                let first: Vec<Json> = first.collect();
                json!({"type": array.element_type().to_string(), "count": array.len(), "first": first})
            }
            MetadataValue::Array(array) => array.iter().map(|element| self.json(&element)).collect(),
            MetadataValue::String(bytes) => match self.text_budget.checked_sub(bytes.len()) {
                Some(left) => {
                    self.text_budget = left;
                    string_json(bytes)
                }
                None => json!({"type": "string", "bytes": bytes.len()}),
            },
            scalar => scalar_json(scalar),
        }
    }
}

/// The whole value.
pub fn whole_json(value: &MetadataValue<'_>) -> Json {
    match *value {
        MetadataValue::Array(array) => array.iter().map(|element| scalar_json(&element)).collect(),
        ref scalar => scalar_json(scalar),
    }
}

/// A short text for a table: the start of a long text, or the first elements and the count of a long array.
pub fn short_text(value: &Json) -> String {
    const MAX_CHARS: usize = 200;
    let long_list = || {
        let (count, first) = (value.get("count")?.as_u64()?, value.get("first")?.as_array()?);
        Some(list_text(first, usize::try_from(count).unwrap_or(usize::MAX)))
    };
    let text = match value {
        Json::Array(elements) => list_text(elements, elements.len()),
        other => long_list().unwrap_or_else(|| other.to_string()),
    };
    match text.char_indices().nth(MAX_CHARS) {
        Some((end, _)) => text.get(..end).unwrap_or_default().to_owned() + "…",
        None => text,
    }
}

/// `[1, 2, 3]`, or `[1, 2, 3, 4, …] of 32000`.
fn list_text(elements: &[Json], count: usize) -> String {
    const MAX_ELEMENTS: usize = 8;
    let is_short = count <= MAX_ELEMENTS && elements.len() == count;
    let shown = elements.iter().take(if is_short { count } else { FIRST_LISTED }).map(Json::to_string);
    let shown = shown.collect::<Vec<_>>().join(", ");
    if is_short { format!("[{shown}]") } else { format!("[{shown}, …] of {count}") }
}

/// The type as `show --full` names it: `array<uint32>`.
pub fn type_name(value: &MetadataValue<'_>) -> String {
    match value {
        MetadataValue::Array(array) => format!("array<{}>", array.element_type()),
        scalar => scalar.value_type().to_string(),
    }
}

/// Text, or `{"base64":…}` for bytes that are not UTF-8.
fn string_json(bytes: &[u8]) -> Json {
    match std::str::from_utf8(bytes) {
        Ok(text) => text.into(),
        Err(_binary) => json!({"base64": STANDARD.encode(bytes)}),
    }
}

fn scalar_json(value: &MetadataValue<'_>) -> Json {
    match *value {
        MetadataValue::String(bytes) => string_json(bytes),
        MetadataValue::Bool(value) => value.into(),
        MetadataValue::F32(value) => float_json(shortest(value)),
        MetadataValue::F64(value) => float_json(value),
        MetadataValue::I8(value) => value.into(),
        MetadataValue::I16(value) => value.into(),
        MetadataValue::I32(value) => value.into(),
        MetadataValue::I64(value) => value.into(),
        MetadataValue::U8(value) => value.into(),
        MetadataValue::U16(value) => value.into(),
        MetadataValue::U32(value) => value.into(),
        MetadataValue::U64(value) => value.into(),
        // Arrays cannot be nested.
        MetadataValue::Array(_) => Json::Null,
    }
}

/// The decimal number with the fewest digits that reads as this `f32`: 1e-5 instead of 9.999999747378752e-6.
fn shortest(value: f32) -> f64 {
    value.to_string().parse().unwrap_or_else(|_error| value.into())
}

fn float_json(value: f64) -> Json {
    match value {
        value if value.is_nan() => "NaN".into(),
        f64::INFINITY => "Infinity".into(),
        f64::NEG_INFINITY => "-Infinity".into(),
        value => value.into(),
    }
}

#[cfg(test)]
mod tests {
    use blobd_store_format::gguf::{GgufWriter, Header, Value};

    use super::*;

    #[test]
    fn numbers_that_json_cannot_express_are_strings() {
        let json = |value| scalar_json(&MetadataValue::F32(value));
        assert_eq!(json(f32::NAN), "NaN");
        assert_eq!(json(f32::INFINITY), "Infinity");
        assert_eq!(json(f32::NEG_INFINITY), "-Infinity");
        assert_eq!(json(1.5), 1.5);
    }

    #[test]
    fn numbers_of_four_bytes_have_no_more_digits_than_needed() {
        let json = |value| scalar_json(&MetadataValue::F32(value)).to_string();
        assert_eq!(json(1e-5), "0.00001");
        assert_eq!(json(0.1), "0.1");
        for value in [f32::MIN_POSITIVE, f32::from_bits(1), f32::MAX, -7.1, 1_000_000.0] {
            assert_eq!(json(value).parse::<f32>().unwrap().to_bits(), value.to_bits());
        }
    }

    #[test]
    fn texts_are_abridged_when_those_of_the_model_are_too_long() {
        let (mut abridger, text) = (Abridger::new(), "x".repeat(MAX_TEXT_BYTES - 1));
        let mut json = |text: &str| abridger.json(&MetadataValue::String(text.as_bytes()));
        assert_eq!(json(&text), text);
        assert_eq!(json("y"), "y");
        assert_ne!(json("z"), "z");
    }

    /// The value as a header has it, its JSON, and the name of its type.
    fn read(value: impl Into<Value>) -> (Json, String) {
        let mut writer = GgufWriter::new();
        writer.metadata("k", value).unwrap();
        let header = Header::parse(&writer.header().unwrap()).unwrap();
        let value = header.value("k").unwrap();
        assert_eq!(whole_json(&value).as_array().map(Vec::len), value.as_array().map(|array| array.len()));
        (Abridger::new().json(&value), type_name(&value))
    }

    #[test]
    fn arrays_of_more_than_64_elements_are_abridged() {
        let numbers = |count: u32| (0..count).collect::<Vec<u32>>();
        assert_eq!(read(numbers(64)).0, json!(numbers(64)));
        assert_eq!(read(numbers(3)), (json!([0, 1, 2]), "array<uint32>".to_owned()));
        let abridged = json!({"type": "uint32", "count": 65, "first": [0, 1, 2, 3]});
        assert_eq!(read(numbers(65)), (abridged, "array<uint32>".to_owned()));
        assert_eq!(read("a"), (json!("a"), "string".to_owned()));
        assert_eq!(read(1_u16), (json!(1), "uint16".to_owned()));
    }

    #[test]
    fn strings_that_are_not_text_are_base64() {
        assert_eq!(scalar_json(&MetadataValue::String(b"\xff\0")), json!({"base64": "/wA="}));
    }

    #[test]
    fn long_arrays_and_texts_are_short_in_tables() {
        assert_eq!(short_text(&json!([1, 2, 3])), "[1, 2, 3]");
        assert_eq!(short_text(&json!((0..9).collect::<Vec<_>>())), "[0, 1, 2, 3, …] of 9");
        let long = json!({"type": "string", "count": 32000, "first": ["a", "b"]});
        assert_eq!(short_text(&long), r#"["a", "b", …] of 32000"#);
        assert_eq!(short_text(&json!({"base64": "/w=="})), r#"{"base64":"/w=="}"#);
        assert_eq!(short_text(&json!("ä".repeat(5000))).chars().count(), 201);
    }

    #[test]
    fn text_beyond_the_budget_is_replaced_by_its_length() {
        let long = vec![b'x'; MAX_TEXT_BYTES];
        let mut abridger = Abridger::new();
        assert!(abridger.json(&MetadataValue::String(&long)).is_string());
        let more = abridger.json(&MetadataValue::String(b"y"));
        assert_eq!(more, json!({"type": "string", "bytes": 1}));
    }
}
