use super::*;
use blobd_store_format::gguf::{GgmlType, GgufWriter, Header, Value};

mod llama_cpp;
mod measured;
mod ollama;
mod robustness;
mod safetensors;

/// A header with an architecture. The architecture is prepended to each key.
fn header(architecture: &str, keys: &[(&str, Value)], tensors: &[(&str, GgmlType, &[u64])]) -> Header {
    let mut writer = GgufWriter::new();
    writer.metadata("general.architecture", architecture).unwrap();
    for (key, value) in keys {
        let is_whole = key.starts_with("tokenizer.");
        let key = if is_whole { (*key).to_owned() } else { format!("{architecture}.{key}") };
        writer.metadata(&key, value.clone()).unwrap();
    }
    for (name, ggml_type, shape) in tensors {
        writer.tensor(name, *ggml_type, shape).unwrap();
    }
    Header::parse(&writer.header().unwrap()).unwrap()
}

/// A vocabulary of empty tokens.
fn vocabulary(tokens: usize) -> (&'static str, Value) {
    ("tokenizer.ggml.tokens", Value::from(vec![""; tokens]))
}

fn settings(context: u64, parallel: u64, cache_type: CacheType) -> Settings {
    Settings { context, parallel, cache_type_k: cache_type, cache_type_v: cache_type, ..Settings::default() }
}

fn set(header: &Header) -> ModelSet<'_> {
    Model::new(header, []).unwrap().into()
}
