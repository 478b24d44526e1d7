//! KV cache, graph and vision tower as Ollama estimated them in August 2025.
//!
//! Source: `GraphSize` and `VisionGraphSize` in Ollama's `fs/ggml/ggml.go`, revision d5a0d8d904. Divisions are integer
//! divisions, evaluated after the products as written.

use std::collections::BTreeMap;

use super::hyperparameters::{Experts, Hyperparameters, Keys};
use super::number::Number;
use super::weights::TensorSizes;
use super::{CacheType, EstimateError, Settings, Vision};
use crate::layers::Layer;

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

/// The settings in the form that the formulas use.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scope {
    pub(super) parallel: Number,
    /// At most the context of one sequence.
    pub(super) batch: Number,
    /// The context of all sequences.
    pub(super) context: Number,
}

/// The bytes of a graph when part of the model is on the device, and when all of it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct GraphNumbers {
    pub(super) partial: Number,
    pub(super) full: Number,
}

/// The numbers of the formulas under short names, as in the formulas.
struct Symbols {
    /// Batch.
    b: Number,
    /// Context of all sequences.
    c: Number,
    /// Embedding length.
    e: Number,
    /// Most heads.
    h: Number,
    /// Most key and value heads.
    k: Number,
    /// Size of a head: embedding length divided by heads, and size of a key head.
    d0: Number,
    d: Number,
    /// Vocabulary.
    v: Number,
}

/// The graph by the formula of the architecture; `None` without a formula. `kv_total` is the KV cache of all blocks in
/// bytes.
pub(super) fn graph(model: &Hyperparameters, scope: &Scope, kv_total: Number) -> Option<GraphNumbers> {
    let symbols = Symbols::new(model, scope);
    Some(match model.architecture.as_str() {
        "llama" | "llama4" => symbols.llama(model.experts),
        "mllama" => symbols.mllama(model.rope_freqs.into()),
        "gemma" | "gemma2" | "gemma3" => symbols.gemma(),
        "gemma3n" => {
            let graph = symbols.gemma();
            GraphNumbers { partial: 4 * graph.partial, full: 4 * graph.full }
        }
        "command-r" => symbols.command_r(),
        "qwen2" => symbols.qwen2(),
        "phi2" => symbols.phi2(),
        "stablelm" => symbols.stablelm(),
        "deepseek2" => symbols.deepseek2(),
        "chatglm" => symbols.chatglm(model.qkv_bias.map(Number::from)),
        "gptoss" | "gpt-oss" => gpt_oss(model, kv_total),
        _ => return None,
    })
}

/// Ollama's value for an architecture without a formula, and for a formula that gives 0.
pub(super) fn fallback(model: &Hyperparameters, kv_total: Number) -> Number {
    let groups = Number::from(model.heads_max) / model.kv_heads_min.max(1);
    groups * kv_total / 6
}

fn gpt_oss(model: &Hyperparameters, kv_total: Number) -> GraphNumbers {
    let groups = 2 * Number::from(model.heads_max) / model.kv_heads_min.max(1);
    GraphNumbers { partial: groups * kv_total / 6, full: 0.into() }
}

impl Scope {
    pub(super) fn new(settings: &Settings) -> Self {
        let Settings { context, batch, parallel, .. } = *settings;
        let parallel = Number::from(parallel);
        Self { parallel, batch: batch.min(context).into(), context: parallel * context }
    }
}

impl Symbols {
    fn new(model: &Hyperparameters, scope: &Scope) -> Self {
        Self {
            b: scope.batch,
            c: scope.context,
            e: model.embedding.into(),
            h: model.heads_max.into(),
            k: model.kv_heads_max.into(),
            d0: model.head_size.into(),
            d: model.head_size_k.into(),
            v: model.vocabulary.into(),
        }
    }

    /// The bytes of the output layer when it is on the device, and of its weights in 6-bit blocks when it is not.
    fn output(&self) -> Number {
        4 * self.b * (self.e + self.v)
    }

    fn output_weights(&self) -> Number {
        self.e * self.v * 105 / 128
    }

    fn llama(&self, experts: Experts) -> GraphNumbers {
        let Self { b, c, e, h, k, d0, .. } = *self;
        let attention = 4 * b * (1 + e + c.max(e)) + e * e * 9 / 16 + 4 * c * (b * h + d0 * k);
        let graph = GraphNumbers {
            full: (4 * b * (1 + 4 * e + c * (1 + h))).max(self.output()),
            partial: 4 * b * e + attention.max(self.output() + self.output_weights()),
        };
        match experts {
            Experts::None => graph,
            Experts::Stacked { gate_bytes, feed_forward } => {
                let gates = 3 * Number::from(gate_bytes)
                    + 4 * b * (2 * Number::from(feed_forward) + k + e + c + d0 * k);
                let attention = 4 * (c * b * h + c * d0 * k + b * 1024 + d0 * k * b);
                GraphNumbers { partial: gates.max(attention), ..graph }
            }
            Experts::Separate { rows } => self.separate_experts(rows.into()),
        }
    }

    fn separate_experts(&self, f: Number) -> GraphNumbers {
        let Self { b, c, e, h, k, d0, .. } = *self;
        let gates = 4 * b * (3 + d0 * k + e + c * (1 + h) + f) + (e * e + 3 * e * k * f) * 9 / 16;
        let attention = 4 * b * (1 + 2 * e + c * (1 + h)) + e * (6 * c * k / h + e * 9 / 16);
        GraphNumbers { full: 4 * b * (2 + 3 * e + c * (1 + h) + 2 * k + f), partial: gates.max(attention) }
    }

    fn mllama(&self, rope_freqs: Number) -> GraphNumbers {
        let Self { b, c, e, h, k, d, .. } = *self;
        let attention = 4 * (b * (2 * e + 1 + c * (1 + h) + d * h) + rope_freqs + d * c * k);
        GraphNumbers {
            full: (4 * b * (2 + 3 * e + d * h + c * (1 + h))).max(self.output()),
            partial: attention.max(self.output() + self.output_weights()),
        }
    }

    fn gemma(&self) -> GraphNumbers {
        let Self { b, c, e, h, d, v, .. } = *self;
        let attention = 4 * b * (2 * e + 1 + 2 * d * h + c + c * h) + 4 * d * c * 8 + e * d * h * 9 / 16;
        GraphNumbers {
            full: self.output().max(4 * b * (2 + c + c * h + 2 * e + 2 * d * h)),
            partial: (4 * e * b + self.output_weights() + 4 * v * b).max(attention),
        }
    }

    fn command_r(&self) -> GraphNumbers {
        let Self { b, c, e, h, .. } = *self;
        let attention = 4 * b * (1 + 2 * e + c * (1 + h)) + 4 * e * c + e * e * 9 / 16;
        GraphNumbers {
            full: self.output().max(4 * b * (2 + 4 * e + c * (1 + h))),
            partial: (self.output() + self.output_weights()).max(attention),
        }
    }

    fn qwen2(&self) -> GraphNumbers {
        let Self { b, c, e, h, .. } = *self;
        let attention = 4 * (b * (1 + 2 * e + c * (1 + h)) + e * (1 + c));
        GraphNumbers {
            full: self.output().max(4 * b * (1 + 2 * e + c + c * h)),
            partial: (self.output() + self.output_weights()).max(attention),
        }
    }

    fn phi2(&self) -> GraphNumbers {
        let Self { b, c, e, h, v, .. } = *self;
        GraphNumbers {
            full: self.output().max(4 * b * (1 + 4 * e + c + c * h)),
            partial: (4 * b * (2 * e + v) + self.output_weights()).max(4 * b * (2 + 3 * e + c + c * h)),
        }
    }

    fn stablelm(&self) -> GraphNumbers {
        let Self { b, c, e, h, v, .. } = *self;
        let full = 4 * b * (c * (1 + h) + 3 * e + 2);
        GraphNumbers { full, partial: (4 * b * (v + 2 * e)).max(full) }
    }

    fn deepseek2(&self) -> GraphNumbers {
        let Self { b, c, e, k, d, v, .. } = *self;
        let attention = 4 * b * (2 * e + 1 + 2 * d * k + c + c * k) + 4 * d * c * k + e * d * k * 9 / 16;
        GraphNumbers {
            full: (4 * b * (3 * e + v)).max(4 * b * (3 * e + 2 + c * (1 + k) + 2 * d * k)),
            partial: (4 * b * (3 * e + v) + self.output_weights()).max(attention),
        }
    }

    fn chatglm(&self, qkv_bias: Option<Number>) -> GraphNumbers {
        let Self { b, c, e, h, d, .. } = *self;
        let (full, partial) = (self.output(), self.output() + self.output_weights());
        let Some(q) = qkv_bias else { return GraphNumbers { partial, full } };
        let attention = 4 * b * (1 + 2 * e + d * h + c + c * h) + 4 * d * c + 4 * c * d + 4 * q;
        GraphNumbers {
            full: full.max(4 * b * (2 + 2 * e + c + c * h + d * h + q)),
            partial: partial.max(attention),
        }
    }
}

/// The default maximum number of pixels of qwen25vl.
const QWEN25VL_MAX_PIXELS: u64 = 28 * 28 * 1280;

/// The vision tower's weights and graph in bytes; both 0 if the model has none.
pub(super) fn vision(
    keys: &mut Keys<'_>,
    layers: &BTreeMap<&str, Layer<'_>>,
    sizes: &TensorSizes<'_>,
) -> Result<Vision, EstimateError> {
    if keys.optional("vision.block_count").unwrap_or(0) == 0 {
        return Ok(Vision::default());
    }
    let is_vision = |name: &&str| *name == "v" || name.starts_with("v.");
    let weights = layers.iter().filter(|(name, _)| is_vision(name)).map(|(_, layer)| sizes.layer(layer));
    let weights: Number = weights.map(Number::from).sum();
    let has_class = layers.get("v").is_some_and(|layer| layer.tensor("class_embd").is_some());
    Ok(Vision {
        weights_bytes: weights.bytes("vision weights")?,
        graph_bytes: vision_graph(keys, has_class).bytes("vision graph")?,
    })
}

fn vision_graph(keys: &mut Keys<'_>, has_class: bool) -> Number {
    let architecture = keys.metadata().architecture();
    if !matches!(architecture, "mllama" | "gemma3" | "mistral3" | "qwen25vl") {
        return 0.into();
    }
    let patch = keys.number("vision.patch_size", 0);
    if patch == 0 {
        keys.add_missing("vision.patch_size");
        return 0.into();
    }
    let channels = Number::from(keys.number("vision.num_channels", 0));
    let embedding = Number::from(keys.number("vision.embedding_length", 0));
    let heads = Number::from(keys.number("vision.attention.head_count", 0));
    if architecture == "qwen25vl" {
        let pixels = Number::from(keys.optional("vision.max_pixels").unwrap_or(QWEN25VL_MAX_PIXELS));
        let patch = Number::from(patch);
        let n = pixels / (patch * patch);
        let pixel_values = pixels * channels + pixels * channels + n * channels * patch * patch;
        return 4 * (pixel_values + n * n * heads + embedding * n);
    }
    let image = keys.number("vision.image_size", 0);
    // The quotient of two `u32` numbers, squared, fits 64 bits.
    let patches = (image / patch).saturating_mul(image / patch).saturating_add(u64::from(has_class));
    let (image, n) = (Number::from(image), Number::from(patches));
    if architecture == "mllama" {
        let tiles = Number::from(keys.number("vision.max_num_tiles", 0));
        let padded = n + (8 - patches % 8);
        let embeddings = embedding * n * tiles + 9 * embedding * padded * tiles;
        return 4
            * (8 + image * image * channels * tiles + embeddings + padded * tiles * padded * tiles * heads);
    }
    4 * (image * image * channels + embedding * patch + n * n * heads)
}
