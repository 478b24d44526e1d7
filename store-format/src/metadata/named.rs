//! The accessors that Ollama gives a name, and what it derives from them.
//!
//! Numbers have the default that Ollama uses when the key is missing.

use super::{Metadata, UNKNOWN};
use crate::gguf::ValueType;

/// The architectures that need Ollama's own engine instead of llama.cpp's; August 2025.
const OLLAMA_ENGINE_ARCHITECTURES: [&str; 8] =
    ["gemma3", "gemma3n", "mistral3", "llama4", "mllama", "qwen25vl", "gptoss", "gpt-oss"];
/// The cache types that Ollama supports; August 2025.
const KV_CACHE_TYPES: [&str; 3] = ["f16", "q8_0", "q4_0"];

impl<'a> Metadata<'a> {
    /// What the file is, such as `model` or `adapter`: `general.type`, by default `unknown`.
    #[must_use]
    pub fn kind(&self) -> &'a str {
        self.get("general.type").unwrap_or(UNKNOWN)
    }

    /// llama.cpp's number of the file type, if it is above 0: Ollama takes 0 for unknown. See
    /// [`file_type_name`](crate::file_type::file_type_name).
    #[must_use]
    pub fn file_type(&self) -> Option<u32> {
        self.get("general.file_type").filter(|id| *id > 0)
    }

    /// The number of blocks.
    #[must_use]
    pub fn block_count(&self) -> u64 {
        self.number("block_count", 0)
    }

    /// The length of an embedding.
    #[must_use]
    pub fn embedding_length(&self) -> u64 {
        self.number("embedding_length", 0)
    }

    /// The longest context for which the model was trained, in tokens.
    #[must_use]
    pub fn context_length(&self) -> u64 {
        self.number("context_length", 0)
    }

    /// The most attention heads of a block; 1 if missing.
    #[must_use]
    pub fn head_count_max(&self) -> u64 {
        self.range("attention.head_count").map_or(1, |range| range.max.into())
    }

    /// The fewest attention heads of a block; 1 if missing.
    #[must_use]
    pub fn head_count_min(&self) -> u64 {
        self.range("attention.head_count").map_or(1, |range| range.min.into())
    }

    /// The most key and value heads of a block; 1 if missing.
    #[must_use]
    pub fn head_count_kv_max(&self) -> u64 {
        self.range("attention.head_count_kv").map_or(1, |range| range.max.into())
    }

    /// The fewest key and value heads of a block; 1 if missing.
    #[must_use]
    pub fn head_count_kv_min(&self) -> u64 {
        self.range("attention.head_count_kv").map_or(1, |range| range.min.into())
    }

    /// The largest size of a head in elements: the embedding length divided by the fewest heads, 0 if
    /// there are none.
    #[must_use]
    pub fn head_size_max(&self) -> u64 {
        self.embedding_length().checked_div(self.head_count_min()).unwrap_or(0)
    }

    /// The size of a key head in elements: `attention.key_length`, by default
    /// [`head_size_max`](Self::head_size_max).
    #[must_use]
    pub fn head_size_k(&self) -> u64 {
        self.number("attention.key_length", self.head_size_max())
    }

    /// The size of a value head in elements: `attention.value_length`, by default
    /// [`head_size_max`](Self::head_size_max).
    #[must_use]
    pub fn head_size_v(&self) -> u64 {
        self.number("attention.value_length", self.head_size_max())
    }

    /// The number of tokens in the vocabulary; `None` if the header has no list of texts.
    #[must_use]
    pub fn vocabulary_size(&self) -> Option<u64> {
        let tokens = self.value("tokenizer.ggml.tokens")?.as_array()?;
        (tokens.element_type() == ValueType::String).then_some(tokens.len() as u64)
    }

    /// The template of a chat, in Jinja.
    #[must_use]
    pub fn chat_template(&self) -> Option<&'a str> {
        self.get("tokenizer.chat_template")
    }

    /// Whether flash attention can be used, by the rule of August 2025: the model does not pool its
    /// embeddings, and its key and value heads have the same size.
    #[must_use]
    pub fn supports_flash_attention(&self) -> bool {
        self.value("pooling_type").is_none()
            && self.head_size_k() == self.head_size_v()
            && self.head_size_k() != 0
    }

    /// Whether Ollama supports a KV cache of this type, by the rule of August 2025: `f16`, `q8_0` and
    /// `q4_0`, but for gpt-oss, whose attention sinks exclude quantised caches, only `f16`.
    #[must_use]
    pub fn supports_kv_cache_type(&self, name: &str) -> bool {
        match self.architecture {
            "gptoss" | "gpt-oss" => name == "f16",
            _ => KV_CACHE_TYPES.contains(&name),
        }
    }

    /// Whether Ollama runs the model with its own engine only, by the list of August 2025.
    #[must_use]
    pub fn requires_ollama_engine(&self) -> bool {
        OLLAMA_ENGINE_ARCHITECTURES.contains(&self.architecture)
    }

    /// A `u32`, as wide as the formulas calculate.
    fn number(&self, key: &str, default: u64) -> u64 {
        self.get::<u32>(key).map_or(default, u64::from)
    }
}
