//! The weights of a model by layer, and the memory in which engines keep them.

use std::collections::BTreeMap;

use super::rule::{block_of, is_input};
use crate::layers::Layer;

/// The weights of a layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerWeights {
    /// Its name, such as `blk.0` or `output`.
    pub layer: String,
    /// The size of its tensors in bytes.
    pub bytes: u64,
    /// The bytes in it that belong to experts of a mixture.
    pub expert_bytes: u64,
    /// The bytes in it that belong to tables, from which engines read single rows on the disk.
    pub table_bytes: u64,
    /// The role of the layer.
    pub part: Part,
}

/// The role of a layer in its model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// A block.
    Block(u64),
    /// The output.
    Output,
    /// The input, such as the embedding of a model with a separate output. It stays in the machine's memory.
    Input,
    /// The vision tower.
    Vision,
    /// Any other role.
    Other,
}

/// The weights of a model and their sums, each at most 2^64 - 1. Tables count only in their own sum and in the total.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Weights {
    pub(super) layers: Vec<LayerWeights>,
    pub(super) total: u64,
    /// The weights of each block.
    pub(super) blocks: Vec<u64>,
    /// The experts of each block.
    pub(super) experts: Vec<u64>,
    pub(super) output: u64,
    pub(super) input: u64,
    pub(super) others: u64,
    pub(super) tables: u64,
}

impl Weights {
    pub(super) fn read(layers: &BTreeMap<&str, Layer<'_>>, blocks: usize, has_vision: bool) -> Self {
        let has_output = layers.contains_key("output");
        let part = |name: &str| match block_of(name) {
            Some(block) if block < blocks as u64 => Part::Block(block),
            _ if name == "output" || name == "output_norm" => Part::Output,
            // A model without a separate output uses the embedding.
            _ if name == "token_embd" && !has_output => Part::Output,
            _ if is_input(name) => Part::Input,
            _ if has_vision && (name == "v" || name.starts_with("v.")) => Part::Vision,
            _ => Part::Other,
        };
        let mut weights = Self { blocks: vec![0; blocks], experts: vec![0; blocks], ..Self::default() };
        for (name, layer) in layers {
            weights.add(LayerWeights {
                layer: (*name).to_owned(),
                bytes: layer.size_bytes(),
                expert_bytes: bytes_of(layer, is_expert),
                table_bytes: bytes_of(layer, |tensor| is_table(name, tensor)),
                part: part(name),
            });
        }
        weights.layers.sort_by(|a, b| natural_order(&a.layer).cmp(&natural_order(&b.layer)));
        weights
    }

    fn add(&mut self, layer: LayerWeights) {
        let LayerWeights { bytes, expert_bytes, table_bytes, part, .. } = layer;
        let kept = bytes.saturating_sub(table_bytes);
        let add = |sum: &mut u64, bytes: u64| *sum = sum.saturating_add(bytes);
        add(&mut self.total, bytes);
        add(&mut self.tables, table_bytes);
        match part {
            Part::Block(block) => {
                let block = usize::try_from(block).unwrap_or(usize::MAX);
                let sums = self.blocks.get_mut(block).zip(self.experts.get_mut(block));
                if let Some((block, experts)) = sums {
                    add(block, kept);
                    add(experts, expert_bytes);
                }
            }
            Part::Output => add(&mut self.output, kept),
            Part::Input => add(&mut self.input, kept),
            // Counted with the graph of the vision tower.
            Part::Vision => {}
            Part::Other => add(&mut self.others, kept),
        }
        self.layers.push(layer);
    }
}

fn bytes_of(layer: &Layer<'_>, is_counted: impl Fn(&str) -> bool) -> u64 {
    let counted = layer.tensors().filter(|(name, _)| is_counted(name));
    counted.filter_map(|(_, tensor)| tensor.size_bytes()).fold(0, u64::saturating_add)
}

/// Whether a tensor contains all experts of a projection along its last dimension, such as `ffn_gate_exps.weight`.
fn is_expert(tensor: &str) -> bool {
    let name = tensor.split('.').next().unwrap_or_default();
    name.starts_with("ffn_") && (name.ends_with("_exps") || name.ends_with("_chexps"))
}

/// Whether engines read single rows of a tensor from the disk on demand: a table with hundreds of millions of rows, of
/// which a token needs a few.
fn is_table(layer: &str, tensor: &str) -> bool {
    let is_embedding = tensor.contains("embd") || tensor.contains("embed");
    layer == "per_layer_token_embd"
        || tensor.split('.').any(|part| part.starts_with("engram"))
        || (is_embedding && tensor.split(['.', '_']).any(|part| part == "ple"))
}

/// Splits the number off the end of a name, to sort names in numeric order.
fn natural_order(name: &str) -> (&str, Option<u64>) {
    let text = name.trim_end_matches(|c: char| c.is_ascii_digit());
    (text, name.get(text.len()..).and_then(|number| number.parse().ok()))
}
