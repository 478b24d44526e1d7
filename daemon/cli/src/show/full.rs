//! A header whole, for `show --full`: its form, and every key with its type and value.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use blobd_model::metadata_json::{short_text, type_name, whole_json};
use blobd_store_format::gguf::{ByteOrder, Header, MetadataValue};
use serde::Serialize;
use serde_json::{Value as Json, json};

#[derive(Clone, Debug, Serialize)]
pub(super) struct HeaderForm {
    pub(super) version: u32,
    pub(super) byte_order: &'static str,
    pub(super) alignment: u64,
    pub(super) data_offset: u64,
}

/// A metadata key with its whole value.
#[derive(Clone, Debug, Serialize)]
pub(super) struct WholeKey {
    /// Text, or `{"base64":…}` for bytes that are not UTF-8.
    key: Json,
    #[serde(rename = "type")]
    type_name: String,
    value: Json,
}

/// A file's header, beside that of the first file.
#[derive(Clone, Debug, Serialize)]
pub(super) struct OtherHeader {
    /// The number of the file in `layers`.
    pub(super) layer: usize,
    pub(super) header: HeaderForm,
    pub(super) keys: Vec<WholeKey>,
}

impl HeaderForm {
    pub(super) fn of(header: &Header) -> Self {
        Self {
            version: header.version(),
            byte_order: match header.byte_order() {
                ByteOrder::Little => "little",
                ByteOrder::Big => "big",
            },
            alignment: header.alignment().into(),
            data_offset: header.data_offset(),
        }
    }
}

pub(super) fn keys(header: &Header) -> Vec<WholeKey> {
    let whole = |(key, value): (&[u8], MetadataValue<'_>)| WholeKey {
        key: match std::str::from_utf8(key) {
            Ok(text) => text.into(),
            Err(_binary) => json!({"base64": STANDARD.encode(key)}),
        },
        type_name: type_name(&value),
        value: whole_json(&value),
    };
    header.metadata().map(whole).collect()
}

impl WholeKey {
    /// Key, type and the value in short, for a table.
    pub(super) fn cells(&self) -> [String; 3] {
        let text = |json: &Json| json.as_str().map_or_else(|| json.to_string(), str::to_owned);
        [text(&self.key), self.type_name.clone(), short_text(&self.value)]
    }
}
