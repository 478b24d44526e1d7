//! KV cache and graph as Ollama estimated them in August 2025.

use super::graph::{GraphNumbers, Scope, fallback, graph};
use super::hyperparameters::Hyperparameters;
use super::number::Number;
use super::{CacheType, EstimateError, Settings};

/// The name of this basis.
pub(super) const NAME: &str = "ollama-2025-08";
/// The vision tokens that a cross-attention block of mllama keeps: 1601 for each of 4 tiles.
const CROSS_ATTENTION_TOKENS: u64 = 1601 * 4;
/// The window of every other block of gpt-oss, in tokens. The formula ignores the model's own value.
const GPT_OSS_WINDOW: u64 = 4096;
/// Every block of gemma3 with a number divisible by this (counted from 1) has global attention.
const GEMMA3_PATTERN: u64 = 6;

/// The name of the graph's basis for an architecture.
pub(super) fn basis(model: &Hyperparameters, scope: &Scope) -> String {
    match graph(model, scope, 0.into()) {
        Some(_) => format!("{NAME}:{}", model.architecture),
        None => format!("{NAME}:fallback"),
    }
}

/// Whether there is a formula for the graph of the model.
pub(super) fn has_formula(model: &Hyperparameters) -> bool {
    graph(model, &Scope::new(&Settings::default()), 0.into()).is_some()
}

/// The partial and the full graph. The fallback replaces a missing formula and a result of 0.
pub(super) fn graph_or_fallback(model: &Hyperparameters, scope: &Scope, kv_total: Number) -> GraphNumbers {
    let zero = Number::from(0);
    let found = graph(model, scope, kv_total).unwrap_or(GraphNumbers { partial: zero, full: zero });
    let partial = if found.partial == zero { fallback(model, kv_total) } else { found.partial };
    let full = if found.full == zero { partial } else { found.full };
    GraphNumbers { partial, full }
}

/// The KV cache of each block, and the total before exceptions for architectures, because some graphs depend on it.
#[derive(Debug)]
pub(super) struct Cache {
    pub(super) blocks: Vec<Number>,
    pub(super) plain_total: Number,
}

/// The KV cache of each block in bytes.
///
/// # Errors
/// [`EstimateError::CacheTypes`] when keys and values have different types, or a type that Ollama does not support.
pub(super) fn kv_cache(
    model: &Hyperparameters,
    scope: &Scope,
    settings: &Settings,
) -> Result<Cache, EstimateError> {
    let Settings { cache_type_k, cache_type_v, .. } = *settings;
    let half_bytes = cache_type_k.ollama_half_bytes().filter(|_| cache_type_k == cache_type_v);
    let half_bytes = half_bytes.ok_or(EstimateError::CacheTypes { cache_type_k, cache_type_v })?;
    let row = (Number::from(model.head_size_k) + model.head_size_v) * model.kv_heads_max;
    let bytes = |elements: Number| elements * half_bytes / 2;
    let plain = bytes(scope.context * row);
    let of_block = |block: u64| match model.architecture.as_str() {
        "mllama" if model.cross_attention.contains(&block) => row * 4 * CROSS_ATTENTION_TOKENS,
        "gemma3" if !(block + 1).is_multiple_of(GEMMA3_PATTERN) => {
            bytes((scope.parallel * model.sliding_window + scope.batch) * row)
        }
        "gptoss" | "gpt-oss" => {
            let tokens = match block.is_multiple_of(2) {
                true => scope.parallel * GPT_OSS_WINDOW + scope.batch,
                false => scope.context,
            };
            bytes(row) * tokens
        }
        _ => plain,
    };
    Ok(Cache { blocks: (0..model.blocks).map(of_block).collect(), plain_total: plain * model.blocks })
}

impl Settings {
    /// Whether Ollama's estimate covers these cache types.
    #[must_use]
    pub fn is_known_to_ollama(&self) -> bool {
        self.cache_type_k == self.cache_type_v && self.cache_type_k.ollama_half_bytes().is_some()
    }
}

impl CacheType {
    /// Twice the bytes of an element in Ollama's estimates; `None` for an unsupported type.
    const fn ollama_half_bytes(self) -> Option<u64> {
        match self {
            Self::F16 => Some(4),
            Self::Q8_0 => Some(2),
            Self::Q4_0 => Some(1),
            _ => None,
        }
    }
}
