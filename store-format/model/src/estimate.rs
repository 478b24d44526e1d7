//! Estimates of the memory that a model needs to run.
//!
//! A [`ModelSet`] is a model with its projector and draft model. [`ModelSet::estimate`] gives the KV cache of
//! each block, the computation graph and the weights; [`Estimate::place`] the layers that fit on devices;
//! [`ModelSet::largest_context`] the longest context with which everything fits. An estimate names its
//! basis, which is the set of formulas and the architecture, and the metadata that was missing.
//!
//! There are two bases for GGUF files. [`Basis::LlamaCpp`] takes KV cache and graph as llama.cpp of October 2026 allocates them,
//! which is also what Ollama runs since 0.30. [`Basis::Ollama`] is Ollama's estimator of August 2025, which knows the
//! graphs of 15 architectures and has a fallback for others. A [`SafetensorsModel`] has weights and a KV cache, without a
//! graph. `docs/ESTIMATES.md` has all formulas.
//!
//! ```
//! use blobd_model::estimate::{Basis, Model, ModelSet, Settings};
//! use blobd_store_format::gguf::{GgmlType, GgufWriter, Header};
//!
//! let mut writer = GgufWriter::new();
//! writer.metadata("general.architecture", "llama")?;
//! writer.metadata("llama.block_count", 1_u32)?;
//! writer.metadata("llama.embedding_length", 64_u32)?;
//! writer.metadata("llama.attention.head_count", 4_u32)?;
//! writer.metadata("llama.attention.head_count_kv", 2_u32)?;
//! writer.metadata("tokenizer.ggml.tokens", vec!["a", "b"])?;
//! writer.tensor("blk.0.attn_q.weight", GgmlType::F32, &[64, 64])?;
//! writer.tensor("output.weight", GgmlType::F32, &[64, 2])?;
//! let header = Header::parse(&writer.header()?)?;
//! let models = ModelSet::from(Model::new(&header, [])?);
//! let estimate = models.estimate(&Settings::default(), Basis::Ollama)?;
//! assert_eq!(estimate.basis, "ollama-2025-08:llama");
//! assert_eq!(estimate.kv_total_bytes, 4096 * (16 + 16) * 2 * 2);
//! assert!(!estimate.place(&[1 << 20]).fits());
//! assert!(estimate.place(&[1 << 30]).fits());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod blocks;
mod cache_type;
mod compute;
mod hyperparameters;
mod llama_cpp;
mod model;
mod number;
mod ollama;
mod placement;
mod rule;
mod safetensors;
mod weights;

#[cfg(test)]
mod tests;

use self::weights::Weights;

pub use cache_type::CacheType;
pub use model::Model;
pub use placement::{Device, Placement, Places};
pub use safetensors::SafetensorsModel;
pub use weights::{LayerWeights, Part};

/// The formulas of an estimate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Basis {
    /// Ollama's estimator of August 2025: `ollama-2025-08`.
    Ollama,
    /// KV cache and graph as llama.cpp of October 2026 allocates them: `llama.cpp-2026-10`.
    LlamaCpp,
}

/// How a model is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The context of one sequence in tokens.
    pub context: u64,
    /// The tokens that are processed together.
    pub batch: u64,
    /// The sequences that are processed at the same time.
    pub parallel: u64,
    /// The type of the keys in the cache.
    pub cache_type_k: CacheType,
    /// The type of the values in the cache.
    pub cache_type_v: CacheType,
    /// Whether the experts of a mixture stay in the machine's memory, as with llama.cpp's `--cpu-moe`.
    pub experts_in_memory: bool,
}

/// Ollama's settings: a context of 4096, a batch of 512, one sequence, 16-bit floats in the cache.
impl Default for Settings {
    fn default() -> Self {
        let cache_type = CacheType::F16;
        Self {
            context: 4096,
            batch: 512,
            parallel: 1,
            cache_type_k: cache_type,
            cache_type_v: cache_type,
            experts_in_memory: false,
        }
    }
}

/// A model and the files that are loaded with it.
#[derive(Clone, Debug)]
pub struct ModelSet<'a> {
    pub model: Model<'a>,
    /// The file of its vision tower. Only its weights are counted, not its graph.
    pub projector: Option<Model<'a>>,
    /// The draft model for speculative decoding, which runs with the same settings.
    pub draft: Option<Model<'a>>,
    /// Its adapters. Only their weights are counted.
    pub adapters: Vec<Model<'a>>,
}

impl<'a> From<Model<'a>> for ModelSet<'a> {
    fn from(model: Model<'a>) -> Self {
        Self { model, projector: None, draft: None, adapters: Vec::new() }
    }
}

/// The memory that a model needs with certain settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Estimate<'m> {
    /// The formulas of the KV cache, such as `ollama-2025-08:llama`.
    pub basis: String,
    /// The formulas of the graph.
    pub graph_basis: String,
    pub settings: Settings,
    /// The KV cache of each block in bytes.
    pub kv_bytes: Vec<u64>,
    /// Its sum.
    pub kv_total_bytes: u64,
    /// The graph in bytes on each device if only part of the model is on devices.
    pub graph_partial_bytes: u64,
    /// The graph in bytes if all of the model is on one device.
    pub graph_full_bytes: u64,
    /// The weights of each layer.
    pub weights: &'m [LayerWeights],
    /// Their sum, at most 2^64 - 1.
    pub weights_bytes: u64,
    /// Whether the basis has a rule for the KV cache and the graph of this architecture, the file contains weights
    /// of blocks, and the sizes of the [companions](Self::unknown_companions) are known. If not, no placement
    /// [`fits`](Placement::fits).
    pub has_rule: bool,
    /// Whether the rule was compared with what llama.cpp allocates for the architecture.
    pub is_compared: bool,
    /// The files loaded with the model whose memory is not known: `draft model`, `projector` or `adapter`.
    pub unknown_companions: Vec<&'static str>,
    /// The weights that engines keep in the machine's memory, such as the embedding of a model with a separate output.
    /// Excludes tables.
    pub input_weights_bytes: u64,
    /// The weights outside the blocks, the output, the input and the vision tower. Excludes tables. They are placed
    /// last and do not count as a layer. Ollama's formulas for [`Placement::total_bytes`] omit them.
    pub other_weights_bytes: u64,
    /// The tables, which need no memory because engines read single rows from the disk.
    pub table_bytes: u64,
    /// The vision tower in the model's file. Zero if there is a projector, which is used instead.
    pub vision: Vision,
    /// The metadata keys that the formulas need but that the file lacks or has with another type. Defaults were used
    /// instead.
    pub missing_keys: Vec<String>,
    /// The number of tensors of unknown types. Each counts with the bytes up to the next tensor or to the end of the file.
    pub unsized_tensors: u64,
    pub projector: Option<Projector>,
    pub draft: Option<Box<Estimate<'m>>>,
    /// The weights of each adapter in bytes.
    pub adapters: Vec<u64>,
    rules: Basis,
    parts: &'m Weights,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Vision {
    pub weights_bytes: u64,
    pub graph_bytes: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Projector {
    /// The formulas: `ollama-2025-08:projector`, or `weights only` with the reason.
    pub basis: String,
    pub weights_bytes: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EstimateError {
    #[error("{what}: more than 2^64 - 1 bytes; use a smaller context, batch or number of sequences")]
    Overflow { what: &'static str },
    #[error(
        "block_count: too large: expected at most {}, found {found}; the file is damaged",
        Model::MAX_BLOCKS
    )]
    TooManyBlocks { found: u64 },
    #[error("cache type {found:?}: expected one of {}", CacheType::ALL.map(CacheType::name).join(", "))]
    UnknownCacheType { found: String },
    #[error(
        "cache types {cache_type_k} and {cache_type_v}: Ollama's estimate needs f16, q8_0 or q4_0 for both; \
         use the basis of llama.cpp"
    )]
    CacheTypes { cache_type_k: CacheType, cache_type_v: CacheType },
    #[error("cache type {cache_type}: its blocks of {block} do not divide {elements} elements; use f16")]
    CacheRow { cache_type: CacheType, elements: u64, block: u64 },
    #[error("cache type {cache_type}: expected f32, f16 or bf16 for a safetensors model")]
    SafetensorsCacheType { cache_type: CacheType },
}

/// The largest context of one sequence, in tokens, that meets a condition; `None` if even a context of 1 does not. Smaller
/// contexts should meet it if larger ones do, since the search is a bisection. An overflow does not meet it.
///
/// # Errors
/// Other errors of the condition.
pub fn largest_context(
    is_met: impl Fn(u64) -> Result<bool, EstimateError>,
) -> Result<Option<u64>, EstimateError> {
    let fits = |context| match is_met(context) {
        Err(EstimateError::Overflow { .. }) => Ok(false),
        result => result,
    };
    if !fits(1)? {
        return Ok(None);
    }
    let (mut fitting, mut failing) = (1, ModelSet::MAX_CONTEXT + 1);
    while failing - fitting > 1 {
        let middle = fitting + (failing - fitting) / 2;
        if fits(middle)? {
            fitting = middle;
        } else {
            failing = middle;
        }
    }
    Ok(Some(fitting))
}

impl ModelSet<'_> {
    /// The largest context that is tried.
    pub const MAX_CONTEXT: u64 = 1 << 63;

    /// Estimates the memory of the model, its projector and its draft model.
    ///
    /// # Errors
    /// [`EstimateError`] when the cache types or the architecture do not suit the basis, or a result does not
    /// fit 64 bits.
    pub fn estimate<'m>(&'m self, settings: &Settings, basis: Basis) -> Result<Estimate<'m>, EstimateError> {
        let projector = self.projector.as_ref().map(|projector| Projector {
            basis: match basis {
                Basis::Ollama => format!("{}:projector", ollama::NAME),
                Basis::LlamaCpp => "weights only: no rule for the graph of a projector".to_owned(),
            },
            weights_bytes: projector.weights_bytes(),
        });
        let mut estimate = self.model.estimate(settings, basis)?;
        if projector.as_ref().is_some_and(|projector| projector.weights_bytes > 0) {
            estimate.vision = Vision::default();
        }
        let draft = self.draft.as_ref().map(|draft| draft.estimate(settings, basis)).transpose()?;
        let adapters = self.adapters.iter().map(Model::weights_bytes).collect();
        let has_unknown_types = |model: &Model<'_>| model.unsized_tensors() > 0;
        let unknown = [
            ("draft model", draft.as_ref().is_some_and(|draft| !draft.has_rule)),
            ("projector", self.projector.as_ref().is_some_and(has_unknown_types)),
            ("adapter", self.adapters.iter().any(has_unknown_types)),
        ];
        let unknown_companions: Vec<_> =
            unknown.into_iter().filter(|(_, is_unknown)| *is_unknown).map(|(name, _)| name).collect();
        let has_rule = estimate.has_rule && unknown_companions.is_empty();
        let draft = draft.map(Box::new);
        Ok(Estimate { projector, draft, adapters, has_rule, unknown_companions, ..estimate })
    }

    /// The largest context of one sequence, in tokens, with which everything fits on the devices; `None` if
    /// even a context of 1 does not fit. [`ModelSet::MAX_CONTEXT`] if any context fits. With several devices,
    /// on which layers are placed in turn, a larger context may fit again.
    ///
    /// # Errors
    /// Those of [`ModelSet::estimate`], except overflow: a context with a result above 64 bits does not fit.
    pub fn largest_context(
        &self,
        settings: &Settings,
        basis: Basis,
        devices: &[u64],
    ) -> Result<Option<u64>, EstimateError> {
        largest_context(|context| {
            Ok(self.estimate(&Settings { context, ..*settings }, basis)?.place(devices).fits())
        })
    }
}

impl Estimate<'_> {
    /// The memory in bytes that a single device needs to hold everything.
    pub fn required_bytes(&self) -> u64 {
        let graph = u128::from(self.graph_partial_bytes.max(self.graph_full_bytes));
        let layers = self.block_bytes().sum::<u128>() + self.output_bytes() + self.companion_bytes();
        let placed = layers + u128::from(self.other_weights_bytes);
        let required = match self.rules {
            _ if !self.has_rule => u128::from(self.weights_bytes) + self.companion_bytes(),
            // The sum must be less than the memory.
            Basis::Ollama => self.buffer_bytes() + placed + graph + 1,
            Basis::LlamaCpp => placed + graph,
        };
        u64::try_from(required).unwrap_or(u64::MAX)
    }

    /// The machine's memory in bytes that is needed if nothing is on a device.
    pub fn required_memory_bytes(&self) -> u64 {
        self.memory_bytes(0, 0)
    }

    /// The bytes of each block that belong on a device: weights and KV cache.
    fn block_bytes(&self) -> impl DoubleEndedIterator<Item = u128> + ExactSizeIterator {
        let in_memory = self.settings.experts_in_memory;
        let weights = self.parts.blocks.iter().zip(&self.parts.experts);
        let weights =
            weights.map(move |(all, experts)| all.saturating_sub(if in_memory { *experts } else { 0 }));
        weights.zip(&self.kv_bytes).map(|(weights, kv)| u128::from(weights) + u128::from(*kv))
    }

    /// The experts that stay in the machine's memory.
    fn expert_bytes(&self) -> u128 {
        let experts = self.parts.experts.iter().map(|bytes| u128::from(*bytes));
        if self.settings.experts_in_memory { experts.sum() } else { 0 }
    }

    /// The bytes that a device keeps free, as many as one layer needs.
    fn buffer_bytes(&self) -> u128 {
        self.block_bytes().next().unwrap_or(0)
    }

    /// The bytes of the output layer, which follows the blocks.
    fn output_bytes(&self) -> u128 {
        let Vision { weights_bytes, graph_bytes } = self.vision;
        u128::from(self.parts.output) + u128::from(weights_bytes) + u128::from(graph_bytes)
    }

    /// The bytes of projector, draft model and adapters.
    fn companion_bytes(&self) -> u128 {
        let projector = self.projector.as_ref().map_or(0, |projector| projector.weights_bytes.into());
        let draft = self.draft.as_ref().map_or(0, |draft| {
            u128::from(draft.weights_bytes.saturating_sub(draft.table_bytes))
                + u128::from(draft.kv_total_bytes)
                + u128::from(draft.graph_full_bytes)
        });
        projector + draft + self.adapters.iter().map(|bytes| u128::from(*bytes)).sum::<u128>()
    }
}
