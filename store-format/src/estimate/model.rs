//! A model as estimates see it: what its headers say, whatever the settings.

use std::collections::BTreeMap;

use super::graph::{GraphNumbers, Scope};
use super::hyperparameters::Hyperparameters;
use super::keys::Keys;
use super::llama_cpp::{self, CacheLayout};
use super::number::Number;
use super::ollama;
use super::rule::{Rule, block_of, is_input, weights_only};
use super::vision::vision;
use super::{Basis, Estimate, EstimateError, Settings, Vision};
use crate::gguf::Header;
use crate::layers::{Layer, group_layers};
use crate::metadata::Metadata;

/// A model of one or several files.
#[derive(Clone, Debug)]
pub struct Model<'a> {
    metadata: Metadata<'a>,
    hyperparameters: Hyperparameters,
    /// What llama.cpp keeps, or why that is not known.
    cache: Result<CacheLayout, EstimateError>,
    weights: Vec<LayerWeights>,
    weights_bytes: u64,
    block_weights: Vec<u64>,
    output_weights: u64,
    /// The weights that are nowhere else: neither in blocks nor in the output, the input or the vision tower.
    other_weights: u64,
    /// The weights that stay in the machine's memory.
    input_weights: u64,
    rule: Rule,
    vision: Vision,
    vision_missing: Vec<String>,
    unsized_tensors: u64,
}

/// The weights of a layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerWeights {
    /// Its name, such as `blk.0` or `output`.
    pub layer: String,
    /// The size of its tensors in bytes.
    pub bytes: u64,
}

impl<'a> Model<'a> {
    /// The most blocks of a model; llama.cpp allows 512.
    pub const MAX_BLOCKS: u64 = 4096;

    /// The model whose file has this header. The headers of its other shards follow: they have only tensors.
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
        let weights = layer_weights(&layers);
        let size = |name: &str| layers.get(name).map(Layer::size_bytes);
        let output = size("output").or_else(|| size("token_embd")).unwrap_or(0);
        Ok(Self {
            metadata,
            hyperparameters,
            cache: CacheLayout::read(Keys::new(metadata), blocks),
            weights_bytes: weights.iter().map(|layer| layer.bytes).fold(0, u64::saturating_add),
            other_weights: other_weights(&weights, blocks, vision != Vision::default()),
            input_weights: input_weights(&weights, layers.contains_key("output")),
            block_weights: block_weights(&weights, blocks),
            weights,
            output_weights: size("output_norm").unwrap_or(0).saturating_add(output),
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

    pub(super) const fn weights_bytes(&self) -> u64 {
        self.weights_bytes
    }

    /// The estimate of this model alone.
    pub(super) fn estimate<'m>(
        &'m self,
        settings: &Settings,
        basis: Basis,
    ) -> Result<Estimate<'m>, EstimateError> {
        let has_rule = self.rule.holds(basis);
        let memory = match basis {
            _ if !has_rule => self.weights_only(),
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
            weights: &self.weights,
            weights_bytes: self.weights_bytes,
            vision: self.vision,
            missing_keys,
            unsized_tensors: self.unsized_tensors,
            projector: None,
            draft: None,
            has_rule,
            input_weights_bytes: self.input_weights,
            other_weights_bytes: self.other_weights,
            block_weights: &self.block_weights,
            output_weights: self.output_weights,
        })
    }

    fn weights_only(&self) -> Memory {
        let (basis, zero) = (weights_only(self.metadata), Number::from(0));
        Memory {
            graph_basis: basis.clone(),
            basis,
            kv_bytes: vec![0; self.block_weights.len()],
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
        let (model, cache) = (&self.hyperparameters, self.cache.as_ref().map_err(EstimateError::clone)?);
        let kv = cache.kv_cache(settings)?;
        let context = CacheLayout::padded_context(settings) * settings.parallel;
        let scope = Scope { context, ..Scope::new(settings) };
        Ok(Memory {
            basis: format!("{}:{}", llama_cpp::NAME, cache.architecture),
            graph_basis: ollama::basis(model, &scope),
            kv_bytes: bytes(&kv)?,
            graph: ollama::graph_or_fallback(model, &scope, kv.into_iter().sum()),
            missing_keys: merged([&cache.missing, &model.missing, &self.vision_missing]),
        })
    }
}

/// The part that depends on the settings.
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

/// The layers by name, numbers in numeric order.
fn layer_weights(layers: &BTreeMap<&str, Layer<'_>>) -> Vec<LayerWeights> {
    let mut weights: Vec<_> = layers
        .iter()
        .map(|(name, layer)| LayerWeights { layer: (*name).to_owned(), bytes: layer.size_bytes() })
        .collect();
    weights.sort_by(|a, b| natural_order(&a.layer).cmp(&natural_order(&b.layer)));
    weights
}

/// The weights of each block.
fn block_weights(weights: &[LayerWeights], blocks: usize) -> Vec<u64> {
    let mut found = vec![0_u64; blocks];
    for LayerWeights { layer, bytes } in weights {
        let block = block_of(layer).and_then(|block| found.get_mut(usize::try_from(block).ok()?));
        if let Some(block) = block {
            *block = block.saturating_add(*bytes);
        }
    }
    found
}

/// The weights that no other part of an estimate contains. Those of a vision tower whose graph is estimated
/// are counted with it.
fn other_weights(weights: &[LayerWeights], blocks: usize, has_vision: bool) -> u64 {
    let is_block = |layer: &str| block_of(layer).is_some_and(|block| block < blocks as u64);
    let is_vision = |layer: &str| has_vision && (layer == "v" || layer.starts_with("v."));
    let is_output = |layer: &str| layer == "output" || layer == "output_norm";
    let is_other =
        |layer: &str| !(is_block(layer) || is_input(layer) || is_vision(layer) || is_output(layer));
    let others = weights.iter().filter(|weights| is_other(&weights.layer));
    others.map(|weights| weights.bytes).fold(0, u64::saturating_add)
}

/// The weights of the input. Without an output of its own, a model uses the embedding as output, where it is
/// counted.
fn input_weights(weights: &[LayerWeights], has_output: bool) -> u64 {
    let is_counted = |layer: &str| is_input(layer) && (has_output || layer != "token_embd");
    let inputs = weights.iter().filter(|weights| is_counted(&weights.layer));
    inputs.map(|weights| weights.bytes).fold(0, u64::saturating_add)
}

/// A name without the number at its end, and that number.
fn natural_order(name: &str) -> (&str, Option<u64>) {
    let text = name.trim_end_matches(|c: char| c.is_ascii_digit());
    (text, name.get(text.len()..).and_then(|number| number.parse().ok()))
}
