//! Facts from the JSON files of a model in Hugging Face's layout: `config.json`, or `model_index.json` for a model of
//! several components.
//!
//! Source: `buildModelInfo` in Ollama's `x/server/show.go`, and `GetModelInfo` in its
//! `x/imagegen/manifest/manifest.go`.

mod attention;
mod quantization;

use blobd_store_format::python_json;
use serde_json::Value as Json;

pub use self::attention::{AttentionConfig, BlockType};
pub use self::quantization::{ConfigQuantization, QUANTIZATION_FILES};

/// The facts of one JSON file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelConfig {
    architecture: Option<String>,
    numbers: Vec<(&'static str, u64)>,
}

/// A GGUF key without its architecture, and the names of the same number in `config.json`.
const NUMBERS: [(&str, &[&str]); 10] = [
    ("block_count", &["num_hidden_layers", "n_layer"]),
    ("context_length", &["max_position_embeddings", "n_positions"]),
    ("embedding_length", &["hidden_size", "n_embd"]),
    ("feed_forward_length", &["intermediate_size"]),
    ("attention.head_count", &["num_attention_heads", "n_head"]),
    ("attention.head_count_kv", &["num_key_value_heads"]),
    ("attention.key_length", &["head_dim"]),
    ("expert_count", &["num_experts", "num_local_experts", "n_routed_experts"]),
    ("expert_used_count", &["num_experts_per_tok"]),
    ("vocab_size", &["vocab_size"]),
];

/// Suffixes of the class names in `architectures` that are removed to get the architecture.
const CLASS_SUFFIXES: [&str; 2] = ["forcausallm", "forconditionalgeneration"];
/// The longest name of an architecture, in bytes. It becomes part of each key.
const MAX_NAME_BYTES: usize = 64;

impl ModelConfig {
    /// Reads `config.json`. The architecture is `model_type`, else the first of `architectures` in lower case and
    /// without its suffix: `LlamaForCausalLM` gives `llama`. The numbers are those of the language model
    /// (`text_config`), if the file has that section.
    pub fn from_config(json: &[u8]) -> Result<Self, serde_json::Error> {
        let config = python_json::parse(json)?;
        let model_type = config.get("model_type").and_then(Json::as_str).and_then(name);
        let architecture = model_type.or_else(|| class_name(config.get("architectures")?.get(0)?.as_str()?));
        let number = |(key, names): (&'static str, &[&str])| {
            let in_object = |object: &Json| names.iter().find_map(|name| object.get(*name)?.as_u64());
            let of_text = config.get("text_config").and_then(in_object);
            of_text.or_else(|| in_object(&config)).filter(|number| *number > 0).map(|number| (key, number))
        };
        Ok(Self { architecture, numbers: NUMBERS.into_iter().filter_map(number).collect() })
    }

    /// Reads `model_index.json`: the architecture is `architecture`, else the class of the pipeline.
    pub fn from_model_index(json: &[u8]) -> Result<Self, serde_json::Error> {
        let index = python_json::parse(json)?;
        let text = |key| index.get(key).and_then(Json::as_str).and_then(name);
        Ok(Self { architecture: text("architecture").or_else(|| text("_class_name")), numbers: Vec::new() })
    }

    /// The architecture, such as `llama`.
    pub fn architecture(&self) -> Option<&str> {
        self.architecture.as_deref()
    }

    /// The metadata that a GGUF file of the model would have, as far as the JSON file contains it. Empty without an
    /// architecture, because keys need one.
    pub fn metadata(&self) -> impl Iterator<Item = (String, Json)> {
        let of_architecture = self.architecture.iter().flat_map(|architecture| {
            let numbers = self.numbers.iter();
            let numbers =
                numbers.map(move |(key, number)| (format!("{architecture}.{key}"), (*number).into()));
            let name = ("general.architecture".to_owned(), architecture.as_str().into());
            std::iter::once(name).chain(numbers)
        });
        of_architecture.into_iter()
    }
}

/// The text, if it is safe to show and to use as part of a key.
fn name(text: &str) -> Option<String> {
    let is_name = !text.is_empty() && text.len() <= MAX_NAME_BYTES && !text.chars().any(char::is_control);
    is_name.then(|| text.to_owned())
}

fn class_name(class: &str) -> Option<String> {
    let class = class.to_lowercase();
    let stripped = CLASS_SUFFIXES.into_iter().find_map(|suffix| class.strip_suffix(suffix));
    name(stripped.unwrap_or(&class))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn of_config(config: &Json) -> ModelConfig {
        ModelConfig::from_config(config.to_string().as_bytes()).unwrap()
    }

    #[test]
    fn architecture_is_the_model_type_or_the_first_class() {
        for (config, expected) in [
            (json!({"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}), Some("qwen3_moe")),
            (json!({"model_type": "", "architectures": ["Gemma3ForCausalLM"]}), Some("gemma3")),
            (json!({"architectures": ["Mistral3ForConditionalGeneration", "x"]}), Some("mistral3")),
            (json!({"architectures": ["BertModel"]}), Some("bertmodel")),
            (json!({"architectures": []}), None),
            (json!({"architectures": "LlamaForCausalLM"}), None),
            (json!({"model_type": 7}), None),
            (json!({"model_type": "a\u{1b}[2J"}), None),
            (json!({"model_type": "x".repeat(65)}), None),
            (json!([]), None),
        ] {
            assert_eq!(of_config(&config).architecture(), expected, "{config}");
        }
    }

    #[test]
    fn numbers_have_the_keys_of_gguf() {
        let config = of_config(&json!({
            "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "max_position_embeddings": 8192,
            "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128_256,
            "num_experts": 0, "head_dim": -1, "num_local_experts": "8",
        }));
        let metadata: serde_json::Map<_, _> = config.metadata().collect();
        let expected = json!({
            "general.architecture": "llama", "llama.embedding_length": 4096, "llama.block_count": 32,
            "llama.context_length": 8192, "llama.attention.head_count": 32, "llama.attention.head_count_kv": 8,
            "llama.feed_forward_length": 14336, "llama.vocab_size": 128_256,
        });
        assert_eq!(Json::Object(metadata), expected);
        let unnamed = of_config(&json!({"hidden_size": 4096}));
        assert_eq!(unnamed.metadata().count(), 0, "keys need an architecture");
    }

    #[test]
    fn numbers_of_the_language_model_come_first() {
        let config = of_config(&json!({
            "model_type": "gemma3", "hidden_size": 1, "vocab_size": 9,
            "text_config": {"model_type": "gemma3_text", "hidden_size": 2560},
        }));
        let metadata: serde_json::Map<_, _> = config.metadata().collect();
        let expected = json!({"general.architecture": "gemma3", "gemma3.embedding_length": 2560, "gemma3.vocab_size": 9});
        assert_eq!(Json::Object(metadata), expected);
    }

    #[test]
    fn model_index_names_the_architecture_or_the_pipeline() {
        for (index, expected) in [
            (json!({"architecture": "ZImage", "_class_name": "ZImagePipeline"}), Some("ZImage")),
            (json!({"_class_name": "ZImagePipeline"}), Some("ZImagePipeline")),
            (json!({"parameter_count": 6}), None),
        ] {
            let config = ModelConfig::from_model_index(index.to_string().as_bytes()).unwrap();
            assert_eq!(config.architecture(), expected);
        }
    }

    #[test]
    fn files_that_are_not_json_are_errors() {
        for bytes in [&b""[..], b"{", b"\xff", "[".repeat(100_000).as_bytes()] {
            assert!(ModelConfig::from_config(bytes).is_err());
            assert!(ModelConfig::from_model_index(bytes).is_err());
        }
    }
}
