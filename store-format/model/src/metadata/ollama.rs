//! Ollama's rules by architecture: flash attention, cache types, and the engine that runs the model. The rules have
//! changed over time, so each version is identified by its date.
//!
//! Sources: `fs/ggml/ggml.go` of revision d5a0d8d904 (August 2025), and of release 0.33.0 (25 August 2026), the last one
//! that has this file.

use super::Metadata;

/// A version of Ollama's rules.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OllamaRules {
    /// The rules of August 2025, which the basis `ollama-2025-08` uses.
    August2025,
    /// The rules of August 2026.
    #[default]
    August2026,
}

/// The cache types that Ollama supports.
const KV_CACHE_TYPES: [&str; 3] = ["f16", "q8_0", "q4_0"];
const GPT_OSS: [&str; 2] = ["gptoss", "gpt-oss"];

/// The architectures that need Ollama's own engine instead of llama.cpp's.
const OWN_ENGINE_2025: [&str; 8] =
    ["gemma3", "gemma3n", "mistral3", "llama4", "mllama", "qwen25vl", "gptoss", "gpt-oss"];
const OWN_ENGINE_2026: [&str; 29] = [
    "bert",
    "deepseek2",
    "deepseekocr",
    "gemma3",
    "gemma3n",
    "gemma4",
    "glm4moelite",
    "glmocr",
    "gpt-oss",
    "gptoss",
    "laguna",
    "lfm2",
    "lfm2moe",
    "llama4",
    "mistral3",
    "mllama",
    "nemotron_h",
    "nemotron_h_moe",
    "nemotron_h_omni",
    "nomic-bert",
    "olmo3",
    "qwen25vl",
    "qwen3",
    "qwen35",
    "qwen35moe",
    "qwen3moe",
    "qwen3next",
    "qwen3vl",
    "qwen3vlmoe",
];

/// The architectures for which Ollama uses flash attention by default.
const FLASH_ATTENTION_2026: [&str; 21] = [
    "bert",
    "gemma3",
    "gemma4",
    "glm4moelite",
    "glmocr",
    "gpt-oss",
    "gptoss",
    "lfm2",
    "lfm2moe",
    "mistral3",
    "nemotron_h",
    "nemotron_h_moe",
    "nemotron_h_omni",
    "olmo3",
    "qwen3",
    "qwen35",
    "qwen35moe",
    "qwen3moe",
    "qwen3next",
    "qwen3vl",
    "qwen3vlmoe",
];
/// Architectures that support flash attention, and architectures that do not, regardless of the sizes of their heads.
const WITH_FLASH_ATTENTION_2026: [&str; 3] = ["qwen35", "qwen35moe", "qwen3next"];
const WITHOUT_FLASH_ATTENTION_2026: [&str; 2] = ["gemma2", "grok"];

impl Metadata<'_> {
    /// Whether flash attention can be used by today's rules: see
    /// [`supports_flash_attention_by`](Self::supports_flash_attention_by).
    pub fn supports_flash_attention(&self) -> bool {
        self.supports_flash_attention_by(OllamaRules::default())
    }

    /// Whether flash attention can be used: the model does not pool its embeddings, and its key and value heads
    /// have the same size. From 2026 on some architectures always can, and some never.
    pub fn supports_flash_attention_by(&self, rules: OllamaRules) -> bool {
        let is_of = |list: &[&str]| rules == OllamaRules::August2026 && list.contains(&self.architecture);
        if self.value("pooling_type").is_some() || is_of(&WITHOUT_FLASH_ATTENTION_2026) {
            return false;
        }
        let (key, value) = (self.head_size_k(), self.head_size_v());
        is_of(&WITH_FLASH_ATTENTION_2026) || key == value && key != 0
    }

    /// Whether Ollama uses flash attention unless it is turned off.
    pub fn uses_flash_attention_by_default(&self, rules: OllamaRules) -> bool {
        match rules {
            OllamaRules::August2025 => GPT_OSS.contains(&self.architecture),
            OllamaRules::August2026 => FLASH_ATTENTION_2026.contains(&self.architecture),
        }
    }

    /// Whether Ollama supports a KV cache of this type by today's rules: see
    /// [`supports_kv_cache_type_by`](Self::supports_kv_cache_type_by).
    pub fn supports_kv_cache_type(&self, name: &str) -> bool {
        self.supports_kv_cache_type_by(OllamaRules::default(), name)
    }

    /// Whether Ollama supports a KV cache of this type: `f16`, `q8_0` and `q4_0`; in 2025 only `f16` for gpt-oss, whose
    /// attention sinks excluded quantised caches. The default type, which has no name, is `f16`.
    pub fn supports_kv_cache_type_by(&self, rules: OllamaRules, name: &str) -> bool {
        match rules {
            OllamaRules::August2025 if GPT_OSS.contains(&self.architecture) => matches!(name, "" | "f16"),
            _ => name.is_empty() || KV_CACHE_TYPES.contains(&name),
        }
    }

    /// Whether Ollama runs the model with its own engine only, by today's list: see
    /// [`requires_ollama_engine_by`](Self::requires_ollama_engine_by).
    pub fn requires_ollama_engine(&self) -> bool {
        self.requires_ollama_engine_by(OllamaRules::default())
    }

    /// Whether Ollama ran the model with its own engine only. Since version 0.30, llama.cpp runs every GGUF file.
    pub fn requires_ollama_engine_by(&self, rules: OllamaRules) -> bool {
        match rules {
            OllamaRules::August2025 => OWN_ENGINE_2025.contains(&self.architecture),
            OllamaRules::August2026 => OWN_ENGINE_2026.contains(&self.architecture),
        }
    }
}

/// Whether a cache of this type is quantised; the default type, which has no name, is `f16`.
pub fn is_quantized_kv_cache_type(name: &str) -> bool {
    !matches!(name, "" | "f16" | "f32" | "bf16")
}
