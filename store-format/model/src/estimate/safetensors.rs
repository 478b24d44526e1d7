//! Models of safetensors files with a `config.json`, as transformers, vLLM and their like load them, and Ollama's models with a
//! layer for each tensor.
//!
//! The weights are those of the files' headers. The KV cache follows from `config.json`, compared with the shapes of the
//! key and value projections. The memory of the computation is not counted: it depends on the engine and its kernels.

use std::collections::BTreeMap;

use blobd_store_format::safetensors::{Header, Tensor};

use self::cache::KvCache;
use self::names::TensorName;
use super::number::Number;
use super::weights::Weights;
use super::{Basis, CacheType, Estimate, EstimateError, LayerWeights, Model, Part, Settings, Vision};
use crate::config::AttentionConfig;
use crate::tensor_layers::TensorLayers;

mod cache;
mod names;

/// The name of this basis.
const NAME: &str = "safetensors-2026-11";
/// What the estimate says in place of the formulas of a graph.
const NO_GRAPH: &str = "not counted";

/// A model of safetensors files.
#[derive(Clone, Debug)]
pub struct SafetensorsModel {
    weights: Weights,
    context_length: u64,
    /// The cache with the name of its rule, or why there is none.
    cache: Result<KvCache, String>,
}

impl SafetensorsModel {
    /// Reads a model from the headers of its files. `kind` says what the folder is if it is not a language model with a
    /// `config.json`, such as `adapter`.
    pub fn new<'h>(
        headers: impl IntoIterator<Item = &'h Header>,
        config: Option<&[u8]>,
        other_kind: Option<&str>,
    ) -> Self {
        let mut tensors = BTreeMap::new();
        for tensor in headers.into_iter().flat_map(Header::tensors) {
            // A name in two files is one tensor.
            tensors.entry(tensor.name()).or_insert(tensor);
        }
        Self::from_tensors(&tensors, config, other_kind)
    }

    /// Reads a model with a layer for each tensor, or for a few, as Ollama has them.
    pub fn from_layers(layers: &TensorLayers, config: Option<&[u8]>, other_kind: Option<&str>) -> Self {
        let tensors = layers.tensors().map(|(name, tensor)| (name, &**tensor)).collect();
        Self::from_tensors(&tensors, config, other_kind)
    }

    fn from_tensors(
        tensors: &BTreeMap<&str, &Tensor>,
        config: Option<&[u8]>,
        other_kind: Option<&str>,
    ) -> Self {
        let config = config.map(AttentionConfig::from_config);
        let context_length = match &config {
            Some(Ok(config)) => config.context_length.unwrap_or(0),
            _ => 0,
        };
        let cache = match (other_kind, config) {
            (Some(kind), _) => Err(format!("no rule for {kind}")),
            (None, None) => Err("the model has no config.json".to_owned()),
            (None, Some(Err(_))) => Err("config.json is not JSON".to_owned()),
            (None, Some(Ok(config))) => KvCache::new(&config, tensors),
        };
        let blocks = cache.as_ref().map_or(0, KvCache::blocks);
        let weights = weights(tensors.iter().map(|(name, tensor)| (*name, tensor.size_bytes())), blocks);
        let without = || weights.blocks.iter().position(|bytes| *bytes == 0);
        let cache = match (cache, without()) {
            (Ok(_), Some(block)) => Err(format!("there are no weights of block {block}")),
            (cache, _) => cache,
        };
        Self { weights, context_length, cache }
    }

    /// The context for which the model was trained; 0 if `config.json` does not say.
    pub const fn context_length(&self) -> u64 {
        self.context_length
    }

    /// Whether the cache has compressed keys and values, as vLLM and SGLang keep them.
    pub fn has_latent_cache(&self) -> bool {
        self.cache.as_ref().is_ok_and(KvCache::is_latent)
    }

    /// The estimate.
    ///
    /// # Errors
    /// [`EstimateError`] when the cache types are not those of these engines, or a result does not fit 64 bits.
    pub fn estimate(&self, settings: &Settings) -> Result<Estimate<'_>, EstimateError> {
        let (basis, kv_bytes) = match &self.cache {
            Ok(cache) => (format!("{NAME}:{}", cache.architecture()), cache.bytes(settings)?),
            Err(reason) => (format!("weights only: {reason}"), Vec::new()),
        };
        let total: Number = kv_bytes.iter().copied().map(Number::from).sum();
        let has_rule = self.cache.is_ok();
        Ok(Estimate {
            graph_basis: if has_rule { NO_GRAPH.to_owned() } else { basis.clone() },
            basis,
            settings: *settings,
            kv_bytes,
            kv_total_bytes: total.bytes("KV cache")?,
            graph_partial_bytes: 0,
            graph_full_bytes: 0,
            weights: &self.weights.layers,
            weights_bytes: self.weights.total,
            has_rule,
            is_compared: true,
            unknown_companions: Vec::new(),
            input_weights_bytes: 0,
            other_weights_bytes: self.weights.others,
            table_bytes: 0,
            vision: Vision::default(),
            missing_keys: Vec::new(),
            unsized_tensors: 0,
            projector: None,
            draft: None,
            adapters: Vec::new(),
            rules: Basis::LlamaCpp,
            parts: &self.weights,
        })
    }
}

impl CacheType {
    /// The bytes of an element in the caches of these engines.
    fn safetensors_bytes(self) -> Result<u64, EstimateError> {
        match self {
            Self::F32 => Ok(4),
            Self::F16 | Self::BF16 => Ok(2),
            cache_type => Err(EstimateError::SafetensorsCacheType { cache_type }),
        }
    }
}

/// Sums the tensors by layer. All parts go on devices: the embedding too, which these engines do not leave in memory.
fn weights<'t>(tensors: impl Iterator<Item = (&'t str, u64)>, blocks: usize) -> Weights {
    let mut layers: BTreeMap<&str, LayerWeights> = BTreeMap::new();
    for (name, size) in tensors {
        let TensorName { layer, block, is_expert, is_output } = TensorName::new(name);
        let part = match block.filter(|block| *block < blocks as u64) {
            Some(block) => Part::Block(block),
            None if is_output => Part::Output,
            None => Part::Other,
        };
        let sums = layers.entry(layer).or_insert_with(|| LayerWeights {
            layer: layer.to_owned(),
            bytes: 0,
            expert_bytes: 0,
            table_bytes: 0,
            part,
        });
        sums.bytes = sums.bytes.saturating_add(size);
        sums.expert_bytes = sums.expert_bytes.saturating_add(if is_expert { size } else { 0 });
    }
    Weights::from_layers(layers.into_values(), blocks)
}

/// The number of blocks, if an estimate may have that many.
fn block_count(found: u64) -> Option<usize> {
    usize::try_from(found).ok().filter(|_| found <= Model::MAX_BLOCKS)
}
