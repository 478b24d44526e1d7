//! What a file of a special kind is for, in one line.

use blobd_model::kind::ModelKind;
use blobd_model::metadata::Metadata;
use blobd_store_format::gguf::Header;

use super::document::Document;

/// The kind, with what its files say about their use: `adapter (lora, alpha 16, for llama)`.
pub(super) fn text(document: &Document) -> String {
    let first = document.files.iter().map(|file| &file.header).next();
    let facts = first.map(|header| facts(document.kind, header)).unwrap_or_default();
    match facts.is_empty() {
        true => document.kind.to_string(),
        false => format!("{} ({})", document.kind, facts.join(", ")),
    }
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

/// The pooling type by llama.cpp's name.
fn pooling(header: &Header) -> Option<String> {
    const NAMES: [&str; 5] = ["none", "mean", "cls", "last", "rank"];
    let number = Metadata::new(header).value("pooling_type")?.as_u64()?;
    let name = NAMES.get(usize::try_from(number).ok()?)?;
    Some(format!("pooling {name}"))
}
