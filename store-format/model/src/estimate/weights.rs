//! The weights of a model by layer, and the memory in which engines keep them.

use std::collections::BTreeMap;

use blobd_store_format::gguf::Header;
use blobd_store_format::tensor::TensorInfo;

use super::rule::{block_of, is_input};
use crate::layers::Layer;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerWeights {
    /// Its name, such as `blk.0` or `output`.
    pub layer: String,
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
    Block(u64),
    Output,
    /// The input, such as the embedding of a model with a separate output. It stays in the machine's memory.
    Input,
    Vision,
    Other,
}

/// The sizes of a model's tensors. A tensor of an unknown type is counted with all bytes up to the next tensor, or to the
/// end of the file.
#[derive(Clone, Debug, Default)]
pub(super) struct TensorSizes<'a> {
    /// The tensors of unknown types by name.
    of_unknown_types: BTreeMap<&'a str, u64>,
}

impl<'a> TensorSizes<'a> {
    /// Reads the sizes of the tensors of a file. Its last tensor counts as empty if the size of the file is not known.
    pub(super) fn add(&mut self, header: &'a Header, file_size: Option<u64>) {
        let mut offsets: Vec<u64> = header.tensors().map(|tensor| tensor.offset()).collect();
        offsets.sort_unstable();
        let data_size = file_size.map(|size| size.saturating_sub(header.data_offset()));
        for tensor in header.tensors().filter(|tensor| tensor.size_bytes().is_none()) {
            let start = tensor.offset();
            let next = offsets.get(offsets.partition_point(|offset| *offset <= start)).copied();
            let end = next.or(data_size).unwrap_or(start);
            self.of_unknown_types.insert(tensor.name(), end.saturating_sub(start));
        }
    }

    /// The number of tensors of unknown types.
    pub(super) fn unknown(&self) -> u64 {
        self.of_unknown_types.len() as u64
    }

    pub(super) fn layer(&self, layer: &Layer<'_>) -> u64 {
        self.some_of(layer, |_| true)
    }

    /// The size of the tensors whose names in the layer are counted.
    fn some_of(&self, layer: &Layer<'_>, is_counted: impl Fn(&str) -> bool) -> u64 {
        let counted = layer.tensors().filter(|(name, _)| is_counted(name));
        counted.map(|(_, tensor)| self.tensor(&tensor)).fold(0, u64::saturating_add)
    }

    fn tensor(&self, tensor: &TensorInfo<'_>) -> u64 {
        let of_unknown_type = || self.of_unknown_types.get(tensor.name()).copied();
        tensor.size_bytes().or_else(of_unknown_type).unwrap_or(0)
    }
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
    pub(super) fn read(
        layers: &BTreeMap<&str, Layer<'_>>,
        sizes: &TensorSizes<'_>,
        blocks: usize,
        has_vision: bool,
    ) -> Self {
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
        let layer = |(name, layer): (&&str, &Layer<'_>)| LayerWeights {
            layer: (*name).to_owned(),
            bytes: sizes.layer(layer),
            expert_bytes: sizes.some_of(layer, is_expert),
            table_bytes: sizes.some_of(layer, |tensor| is_table(name, tensor)),
            part: part(name),
        };
        Self::from_layers(layers.iter().map(layer), blocks)
    }

    /// Sums the weights of layers.
    pub(super) fn from_layers(layers: impl Iterator<Item = LayerWeights>, blocks: usize) -> Self {
        let mut weights = Self { blocks: vec![0; blocks], experts: vec![0; blocks], ..Self::default() };
        layers.for_each(|layer| weights.add(layer));
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
