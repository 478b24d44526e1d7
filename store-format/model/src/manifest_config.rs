//! The configuration of an Ollama manifest: the JSON blob beside the layers.
//!
//! Configurations of other registries have none of these keys. A value of an unexpected type counts as missing, because
//! no configuration is needed to read a model.
//!
//! Source: `ConfigV2` and `Draft` in `types/model/config.go` of Ollama 0.34.2 (September 2026).

use serde::Serialize;
use serde_json::{Map, Value as Json};

/// The fields of a configuration that blobd shows.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ManifestConfig {
    /// `gguf` or `safetensors`.
    pub model_format: Option<String>,
    /// The architecture, as Ollama calls it.
    pub model_family: Option<String>,
    /// The number of parameters as text.
    pub model_type: Option<String>,
    /// The name of the quantisation.
    pub file_type: Option<String>,
    /// Ollama's renderer, which turns messages into a prompt in place of a template.
    pub renderer: Option<String>,
    /// Ollama's parser, which finds tool calls and thoughts in the output.
    pub parser: Option<String>,
    /// The oldest version of Ollama that runs the model.
    pub requires: Option<String>,
    /// The server on which a model without weights runs.
    pub remote_host: Option<String>,
    /// The name of the model on that server.
    pub remote_model: Option<String>,
    /// Capabilities that cannot be derived from the model's files.
    pub capabilities: Vec<String>,
    /// The context length of a model on another server.
    pub context_length: Option<u64>,
    /// The embedding length of a model on another server.
    pub embedding_length: Option<u64>,
    /// The model from which this one was made.
    pub base_name: Option<String>,
    /// The model for speculative decoding among the layers.
    pub draft: Option<ConfiguredDraft>,
    /// Sampling parameters that the model's author recommends, by name.
    pub generation_defaults: Map<String, Json>,
}

/// A draft model among the layers of a manifest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ConfiguredDraft {
    /// `gguf` or `safetensors`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model_format: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub architecture: Option<String>,
    /// The prefix of its tensors' names.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tensor_prefix: Option<String>,
    /// The name of the layer with its configuration.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub config: Option<String>,
}

/// The longest text of a field; longer texts count as missing. Names and versions are shorter.
const MAX_TEXT_BYTES: usize = 1024;
/// The most capabilities and sampling parameters that are read.
const MAX_ENTRIES: usize = 64;

impl ManifestConfig {
    /// Reads a configuration. Anything but a JSON object counts as empty.
    pub fn parse(json: &[u8]) -> Self {
        let object: Map<String, Json> = serde_json::from_slice(json).unwrap_or_default();
        let text = |key| text(&object, key);
        let number = |key| object.get(key).and_then(Json::as_u64).filter(|number| *number > 0);
        let capabilities = object.get("capabilities").and_then(Json::as_array).into_iter().flatten();
        let capabilities = capabilities.filter_map(|name| name.as_str().filter(|name| is_short(name)));
        let defaults = object.get("generation_defaults").and_then(Json::as_object).into_iter().flatten();
        let is_shown = |value: &Json| value.is_number() || value.is_boolean() || value.is_string();
        let defaults = defaults.filter(|(name, value)| is_short(name) && is_shown(value));
        Self {
            model_format: text("model_format"),
            model_family: text("model_family"),
            model_type: text("model_type"),
            file_type: text("file_type"),
            renderer: text("renderer"),
            parser: text("parser"),
            requires: text("requires"),
            remote_host: text("remote_host"),
            remote_model: text("remote_model"),
            capabilities: capabilities.map(str::to_owned).take(MAX_ENTRIES).collect(),
            context_length: number("context_length"),
            embedding_length: number("embedding_length"),
            base_name: text("base_name"),
            draft: object.get("draft").and_then(Json::as_object).map(ConfiguredDraft::from_object),
            generation_defaults: defaults
                .map(|(name, value)| (name.clone(), value.clone()))
                .take(MAX_ENTRIES)
                .collect(),
        }
    }
}

impl ConfiguredDraft {
    fn from_object(object: &Map<String, Json>) -> Self {
        let text = |key| text(object, key);
        Self {
            model_format: text("model_format"),
            architecture: text("architecture"),
            tensor_prefix: text("tensor_prefix"),
            config: text("config"),
        }
    }
}

fn text(object: &Map<String, Json>, key: &str) -> Option<String> {
    object.get(key).and_then(Json::as_str).filter(|text| is_short(text)).map(str::to_owned)
}

fn is_short(text: &str) -> bool {
    !text.is_empty() && text.len() <= MAX_TEXT_BYTES
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parse(config: &Json) -> ManifestConfig {
        ManifestConfig::parse(config.to_string().as_bytes())
    }

    #[test]
    fn fields_of_a_cloud_model_are_read() {
        let config = parse(&json!({
            "model_format": "", "remote_host": "https://ollama.com:443", "remote_model": "gpt-oss:120b",
            "capabilities": ["completion", "tools", 7, ""], "context_length": 131_072, "embedding_length": 2880,
        }));
        assert_eq!(config.remote_host.as_deref(), Some("https://ollama.com:443"));
        assert_eq!(config.remote_model.as_deref(), Some("gpt-oss:120b"));
        assert_eq!(config.capabilities, ["completion", "tools"]);
        assert_eq!((config.context_length, config.embedding_length), (Some(131_072), Some(2880)));
        assert_eq!(config.model_format, None, "an empty text says nothing");
    }

    #[test]
    fn fields_of_local_models_are_read() {
        let config = parse(&json!({
            "renderer": "qwen3.5", "parser": "qwen3.5", "requires": "0.19.0", "base_name": "qwen3.5",
            "draft": {"architecture": "qwen3_5_mtp", "tensor_prefix": "draft.", "model_format": "safetensors"},
            "generation_defaults": {"temperature": 0.6, "top_k": 20, "stop": ["x"]},
        }));
        assert_eq!(
            (config.renderer.as_deref(), config.parser.as_deref()),
            (Some("qwen3.5"), Some("qwen3.5"))
        );
        assert_eq!(
            (config.requires.as_deref(), config.base_name.as_deref()),
            (Some("0.19.0"), Some("qwen3.5"))
        );
        assert_eq!(config.draft.as_ref().unwrap().architecture.as_deref(), Some("qwen3_5_mtp"));
        assert_eq!(Json::Object(config.generation_defaults), json!({"temperature": 0.6, "top_k": 20}));
    }

    #[test]
    fn values_of_other_types_and_long_texts_count_as_missing() {
        let long = "x".repeat(MAX_TEXT_BYTES + 1);
        for config in [
            json!({"renderer": 7, "remote_host": long, "capabilities": "tools", "draft": [], "context_length": -1}),
            json!({"config": {"format": "gguf"}, "descriptor": {}}),
            json!([1]),
        ] {
            assert_eq!(parse(&config), ManifestConfig::default(), "{config}");
        }
        for bytes in [&b""[..], b"{", b"\xff", "[".repeat(100_000).as_bytes()] {
            assert_eq!(ManifestConfig::parse(bytes), ManifestConfig::default());
        }
    }

    #[test]
    fn lists_have_a_limit() {
        let config = parse(&json!({"capabilities": vec!["x"; 1000]}));
        assert_eq!(config.capabilities.len(), MAX_ENTRIES);
    }
}
