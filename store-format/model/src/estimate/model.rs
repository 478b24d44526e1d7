//! The inputs of an estimate that come from a model's headers and do not depend on the settings.

use blobd_store_format::gguf::Header;

use super::compute::Computation;
use super::hyperparameters::{Hyperparameters, Keys};
use super::llama_cpp::{self, CacheLayout};
use super::number::Number;
use super::ollama::{self, GraphNumbers, Scope, vision};
use super::rule::Rule;
use super::weights::{TensorSizes, Weights};
use super::{Basis, Estimate, EstimateError, Settings, Vision};
use crate::layers::group_layers;
use crate::metadata::Metadata;

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
    pub fn new(
        header: &'a Header,
        other_shards: impl IntoIterator<Item = &'a Header>,
    ) -> Result<Self, EstimateError> {
        Self::of_files((header, None), other_shards.into_iter().map(|shard| (shard, None)))
    }

    /// [`Self::new`] with the size of each file, if it is known. It bounds the size of a last tensor of an unknown type.
    ///
    /// # Errors
    /// Those of [`Self::new`].
    pub fn of_files(
        first: (&'a Header, Option<u64>),
        other_shards: impl IntoIterator<Item = (&'a Header, Option<u64>)>,
    ) -> Result<Self, EstimateError> {
        let (header, _) = first;
        let metadata = Metadata::new(header);
        let mut sizes = TensorSizes::default();
        let mut tensors = Vec::new();
        for (header, file_size) in [first].into_iter().chain(other_shards) {
            sizes.add(header, file_size);
            tensors.extend(header.tensors());
        }
        let layers = group_layers(tensors);
        let hyperparameters = Hyperparameters::read(Keys::new(metadata), &layers);
        let blocks = block_count(hyperparameters.blocks)?;
        let mut vision_keys = Keys::new(metadata);
        let vision = vision(&mut vision_keys, &layers, &sizes)?;
        Ok(Self {
            metadata,
            hyperparameters,
            cache: CacheLayout::read(Keys::new(metadata), blocks),
            computation: Computation::read(&layers, blocks, metadata),
            weights: Weights::read(&layers, &sizes, blocks, vision != Vision::default()),
            rule: Rule::read(header, blocks),
            vision,
            vision_missing: vision_keys.into_missing(),
            unsized_tensors: sizes.unknown(),
        })
    }

    pub const fn metadata(&self) -> Metadata<'a> {
        self.metadata
    }

    /// The most suitable basis: llama.cpp's, unless only Ollama's formulas cover the architecture.
    pub fn default_basis(&self) -> Basis {
        let is_named = || ollama::has_formula(&self.hyperparameters);
        if self.rule.is_ollama() && is_named() { Basis::Ollama } else { Basis::LlamaCpp }
    }

    pub(super) const fn weights_bytes(&self) -> u64 {
        self.weights.total
    }

    pub(super) const fn unsized_tensors(&self) -> u64 {
        self.unsized_tensors
    }

    /// The estimate of this model alone.
    pub(super) fn estimate<'m>(
        &'m self,
        settings: &Settings,
        basis: Basis,
    ) -> Result<Estimate<'m>, EstimateError> {
        let basis_of_rules = basis;
        let missing_rule = self.missing_rule(basis);
        // A file without weights, such as a vocabulary, says nothing about a model's memory.
        let has_rule = missing_rule.is_none() && self.weights.blocks.iter().any(|bytes| *bytes > 0);
        let memory = match (missing_rule, basis) {
            (Some(reason), _) => self.weights_only(&reason, basis),
            (None, Basis::Ollama) => self.ollama(settings)?,
            (None, Basis::LlamaCpp) => self.llama_cpp(settings)?,
        };
        let is_compared = basis_of_rules == Basis::Ollama || self.rule.is_compared();
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
            is_compared,
            unknown_companions: Vec::new(),
            rules: basis_of_rules,
            parts: &self.weights,
        })
    }

    /// Why only the weights are known.
    fn missing_rule(&self, basis: Basis) -> Option<String> {
        let of_types = || match self.unsized_tensors {
            0 => None,
            1 => Some("1 tensor has an unknown type".to_owned()),
            count => Some(format!("{count} tensors have unknown types")),
        };
        let of_keys = || {
            let keys = self.missing_keys(basis);
            let is_needed = basis == Basis::LlamaCpp && !keys.is_empty();
            let verb = if keys.len() == 1 { "is" } else { "are" };
            is_needed.then(|| format!("`{}` {verb} missing", keys.join("`, `")))
        };
        self.rule.missing(basis, self.metadata).or_else(of_types).or_else(of_keys)
    }

    /// The keys that the formulas need. llama.cpp does not load a model without them; Ollama's formulas have defaults.
    fn missing_keys(&self, basis: Basis) -> Vec<String> {
        let of_basis = match (basis, &self.cache) {
            (Basis::Ollama, _) | (_, Err(_)) => {
                [&self.hyperparameters.missing, &self.vision_missing, &Vec::new()]
            }
            (Basis::LlamaCpp, Ok(cache)) => [&cache.missing, &self.vision_missing, &self.computation.missing],
        };
        let mut merged: Vec<String> = Vec::new();
        for key in of_basis.into_iter().flatten() {
            if !merged.contains(key) {
                merged.push(key.clone());
            }
        }
        merged
    }

    fn weights_only(&self, reason: &str, basis_of_rules: Basis) -> Memory {
        let (basis, zero) = (format!("weights only: {reason}"), Number::from(0));
        Memory {
            graph_basis: basis.clone(),
            basis,
            kv_bytes: vec![0; self.weights.blocks.len()],
            graph: GraphNumbers { partial: zero, full: zero },
            missing_keys: self.missing_keys(basis_of_rules),
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
            missing_keys: self.missing_keys(Basis::Ollama),
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
            missing_keys: self.missing_keys(Basis::LlamaCpp),
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
