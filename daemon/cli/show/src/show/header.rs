//! Headers: whole for `show --full`, and in one line for files of special kinds.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use blobd_model::kind::ModelKind;
use blobd_model::metadata::Metadata;
use blobd_model::metadata_json::{short_text, type_name, whole_json};
use blobd_store_format::gguf::{ByteOrder, Header, MetadataValue};
use blobd_store_format::safetensors;
use blobd_store_format::tensor::TensorFormat;
use serde::Serialize;
use serde_json::{Value as Json, json};

#[derive(Clone, Debug, Serialize)]
pub(super) struct HeaderForm {
    /// Absent for GGUF, whose header has the other fields.
    #[serde(skip_serializing_if = "TensorFormat::is_gguf")]
    pub(super) format: TensorFormat,
    /// safetensors has no version, and no alignment.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) version: Option<u32>,
    pub(super) byte_order: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) alignment: Option<u64>,
    pub(super) data_offset: u64,
}

#[derive(Clone, Debug, Serialize)]
pub(super) struct WholeKey {
    /// Text, or `{"base64":…}` for bytes that are not UTF-8.
    key: Json,
    #[serde(rename = "type")]
    type_name: String,
    value: Json,
}

#[derive(Clone, Debug, Serialize)]
pub(super) struct OtherHeader {
    /// The number of the file in `layers`.
    pub(super) layer: usize,
    pub(super) header: HeaderForm,
    pub(super) keys: Vec<WholeKey>,
}

impl HeaderForm {
    pub(super) fn new(header: &Header) -> Self {
        Self {
            format: TensorFormat::Gguf,
            version: Some(header.version()),
            byte_order: match header.byte_order() {
                ByteOrder::Little => "little",
                ByteOrder::Big => "big",
            },
            alignment: Some(header.alignment().into()),
            data_offset: header.data_offset(),
        }
    }

    pub(super) const fn of_safetensors(header: &safetensors::Header) -> Self {
        Self {
            format: TensorFormat::Safetensors,
            version: None,
            byte_order: "little",
            alignment: None,
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

/// The metadata of a safetensors file, which is text.
pub(super) fn keys_of_safetensors(header: &safetensors::Header) -> Vec<WholeKey> {
    let whole = |(key, value): (&String, &String)| WholeKey {
        key: key.as_str().into(),
        type_name: "string".to_owned(),
        value: value.as_str().into(),
    };
    header.metadata().iter().map(whole).collect()
}

impl WholeKey {
    /// Key, type and the value in short, for a table.
    pub(super) fn cells(&self) -> [String; 3] {
        let text = |json: &Json| json.as_str().map_or_else(|| json.to_string(), str::to_owned);
        [text(&self.key), self.type_name.clone(), short_text(&self.value)]
    }
}

/// The kind, with what its first header says about its use: `adapter (lora, alpha 16, for llama)`.
pub(super) fn kind_with_facts(kind: ModelKind, first: Option<&Header>) -> String {
    let facts = first.map(|header| facts(kind, header)).unwrap_or_default();
    if facts.is_empty() { kind.to_string() } else { format!("{kind} ({})", facts.join(", ")) }
}

fn facts(kind: ModelKind, header: &Header) -> Vec<String> {
    let text = |key: &str| header.value(key).and_then(|value| value.as_str().map(str::to_owned));
    let labelled = |label: &str, key: &str| header.value(key).map(|value| format!("{label} {value}"));
    let for_model = |name: Option<&str>| name.map(|name| format!("for {name}"));
    match kind {
        ModelKind::Adapter => {
            let alpha = labelled("alpha", "adapter.lora.alpha");
            some([text("adapter.type"), alpha, for_model(header.architecture())])
        }
        ModelKind::ControlVector => {
            let hint = text("controlvector.model_hint");
            some([labelled("layers", "controlvector.layer_count"), for_model(hint.as_deref())])
        }
        ModelKind::Imatrix => {
            let size = labelled("chunk size", "imatrix.chunk_size");
            some([labelled("chunks", "imatrix.chunk_count"), size, datasets(header)])
        }
        ModelKind::Projector => {
            let metadata = Metadata::new(header);
            let keys = ["vision.projector_type", "audio.projector_type", "projector_type"];
            some([keys.into_iter().find_map(|key| metadata.get::<&str>(key)).map(str::to_owned)])
        }
        ModelKind::Embedding | ModelKind::Reranker => some([pooling(header)]),
        _ => Vec::new(),
    }
}

fn some<const N: usize>(facts: [Option<String>; N]) -> Vec<String> {
    facts.into_iter().flatten().collect()
}

fn datasets(header: &Header) -> Option<String> {
    let names = header.value("imatrix.datasets")?.as_array()?;
    let names: Vec<_> = names.iter().filter_map(|name| name.as_str().map(str::to_owned)).collect();
    let more = names.len().checked_sub(2).map_or_else(String::new, |more| format!(" and {} more", more + 1));
    names.first().map(|name| format!("from {name}{more}"))
}

fn pooling(header: &Header) -> Option<String> {
    const NAMES: [&str; 5] = ["none", "mean", "cls", "last", "rank"];
    let number = Metadata::new(header).value("pooling_type")?.as_u64()?;
    let name = NAMES.get(usize::try_from(number).ok()?)?;
    Some(format!("pooling {name}"))
}
