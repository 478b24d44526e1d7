//! The inputs of an estimate that come from a model's headers and do not depend on the settings.

use super::compute::Computation;
use super::graph::{GraphNumbers, Scope};
use super::hyperparameters::Hyperparameters;
use super::keys::Keys;
use super::llama_cpp::{self, CacheLayout};
use super::number::Number;
use super::ollama;
use super::rule::{Rule, weights_only};
use super::vision::vision;
use super::weights::Weights;
use super::{Basis, Estimate, EstimateError, Settings, Vision};
use crate::layers::group_layers;
use crate::metadata::Metadata;
use blobd_store_format::gguf::Header;

/// A model of one or several files.
#[derive(Clone, Debug)]
pub struct Model<'a> {
    metadata: Metadata<'a>,
    hyperparameters: Hyperparameters,
    /// llama.cpp's cache layout, or the reason why it cannot be calculated.
    cache: Result<CacheLayout, EstimateError>,
    computation: Computation,
    weights: Weights,
    rule: Rule,
    vision: Vision,
    vision_missing: Vec<String>,
    unsized_tensors: u64,
}

impl<'a> Model<'a> {
    /// The most blocks of a model; llama.cpp allows 512.
    pub const MAX_BLOCKS: u64 = 4096;

    /// Reads a model from the header of its file. For a sharded model, `other_shards` are the headers of the other shards,
    /// which contain only tensors.
    ///
    /// # Errors
    /// [`EstimateError::TooManyBlocks`], [`EstimateError::Overflow`].
    pub fn new(
        header: &'a Header,
        other_shards: impl IntoIterator<Item = &'a Header>,
    ) -> Result<Self, EstimateError> {
        let metadata = Metadata::new(header);
        let others = other_shards.into_iter().flat_map(Header::tensors);
        let layers = group_layers(header.tensors().chain(others));
        let hyperparameters = Hyperparameters::read(Keys::new(metadata), &layers);
        let blocks = block_count(hyperparameters.blocks)?;
        let mut vision_keys = Keys::new(metadata);
        let vision = vision(&mut vision_keys, &layers)?;
        Ok(Self {
            metadata,
            hyperparameters,
            cache: CacheLayout::read(Keys::new(metadata), blocks),
            computation: Computation::read(&layers, blocks, metadata),
            weights: Weights::read(&layers, blocks, vision != Vision::default()),
            rule: Rule::read(metadata, blocks),
            vision,
            vision_missing: vision_keys.into_missing(),
            unsized_tensors: layers.values().map(|layer| layer.unsized_tensors() as u64).sum(),
        })
    }

    /// The metadata.
    #[must_use]
    pub const fn metadata(&self) -> Metadata<'a> {
        self.metadata
    }

    /// The most suitable basis: llama.cpp's, unless only Ollama's formulas cover the architecture.
    #[must_use]
    pub fn default_basis(&self) -> Basis {
        let is_named = || ollama::has_formula(&self.hyperparameters);
        if self.rule == Rule::Ollama && is_named() { Basis::Ollama } else { Basis::LlamaCpp }
    }

    pub(super) const fn weights_bytes(&self) -> u64 {
        self.weights.total
    }

    /// The estimate of this model alone.
    pub(super) fn estimate<'m>(
        &'m self,
        settings: &Settings,
        basis: Basis,
    ) -> Result<Estimate<'m>, EstimateError> {
        let (holds, basis_of_rules) = (self.rule.holds(basis), basis);
        // A file without weights, such as a vocabulary, says nothing about a model's memory.
        let has_rule = holds && self.weights.blocks.iter().any(|bytes| *bytes > 0);
        let memory = match basis {
            _ if !holds => self.weights_only(),
            Basis::Ollama => self.ollama(settings)?,
            Basis::LlamaCpp => self.llama_cpp(settings)?,
        };
        let Memory { basis, graph_basis, kv_bytes, graph, missing_keys } = memory;
        Ok(Estimate {
            basis,
            graph_basis,
            settings: *settings,
            kv_total_bytes: total(&kv_bytes)?,
            kv_bytes,
            graph_partial_bytes: graph.partial.bytes("partial graph")?,
            graph_full_bytes: graph.full.bytes("full graph")?,
            weights: &self.weights.layers,
            weights_bytes: self.weights.total,
            input_weights_bytes: self.weights.input,
            other_weights_bytes: self.weights.others,
            table_bytes: self.weights.tables,
            vision: self.vision,
            missing_keys,
            unsized_tensors: self.unsized_tensors,
            projector: None,
            draft: None,
            adapters: Vec::new(),
            has_rule,
            rules: basis_of_rules,
            parts: &self.weights,
        })
    }

    fn weights_only(&self) -> Memory {
        let (basis, zero) = (weights_only(self.metadata), Number::from(0));
        Memory {
            graph_basis: basis.clone(),
            basis,
            kv_bytes: vec![0; self.weights.blocks.len()],
            graph: GraphNumbers { partial: zero, full: zero },
            missing_keys: merged([&self.hyperparameters.missing, &self.vision_missing]),
        }
    }

    fn ollama(&self, settings: &Settings) -> Result<Memory, EstimateError> {
        let (model, scope) = (&self.hyperparameters, Scope::new(settings));
        let cache = ollama::kv_cache(model, &scope, settings)?;
        let basis = ollama::basis(model, &scope);
        Ok(Memory {
            graph_basis: basis.clone(),
            basis,
            kv_bytes: bytes(&cache.blocks)?,
            graph: ollama::graph_or_fallback(model, &scope, cache.plain_total),
            missing_keys: merged([&model.missing, &self.vision_missing]),
        })
    }

    fn llama_cpp(&self, settings: &Settings) -> Result<Memory, EstimateError> {
        let cache = self.cache.as_ref().map_err(EstimateError::clone)?;
        let graph = Number::from_saturated(self.computation.buffer_bytes(&cache.sizes(settings)));
        let basis = format!("{}:{}", llama_cpp::NAME, cache.architecture);
        Ok(Memory {
            graph_basis: basis.clone(),
            basis,
            kv_bytes: bytes(&cache.kv_cache(settings)?)?,
            graph: GraphNumbers { partial: graph, full: graph },
            missing_keys: merged([&cache.missing, &self.vision_missing]),
        })
    }
}

/// The memory that depends on the settings.
struct Memory {
    basis: String,
    graph_basis: String,
    kv_bytes: Vec<u64>,
    graph: GraphNumbers,
    missing_keys: Vec<String>,
}

fn block_count(found: u64) -> Result<usize, EstimateError> {
    let count = usize::try_from(found).ok().filter(|_| found <= Model::MAX_BLOCKS);
    count.ok_or(EstimateError::TooManyBlocks { found })
}

fn bytes(kv: &[Number]) -> Result<Vec<u64>, EstimateError> {
    kv.iter().map(|block| block.bytes("KV cache")).collect()
}

fn total(kv_bytes: &[u64]) -> Result<u64, EstimateError> {
    kv_bytes.iter().copied().map(Number::from).sum::<Number>().bytes("KV cache")
}

fn merged<const N: usize>(lists: [&Vec<String>; N]) -> Vec<String> {
    let mut merged: Vec<String> = Vec::new();
    for key in lists.into_iter().flatten() {
        if !merged.contains(key) {
            merged.push(key.clone());
        }
    }
    merged
}
