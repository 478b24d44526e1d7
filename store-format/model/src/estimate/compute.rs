//! The buffer of llama.cpp's computation graph.
//!
//! llama.cpp builds the graph of a full batch, lets ggml's allocator place its tensors, and takes the buffer that
//! they need. This module imitates that for the large tensors: [`shape`] derives from the file's tensors what
//! each block computes, [`plan`] builds the graph, and [`allocator`] places its tensors. Flash attention is on,
//! as by default, so no tensor has the size of heads by context.
//!
//! Sources: `llama-graph.cpp`, `src/models` and `ggml-alloc.c` of llama.cpp b11434.

mod allocator;
mod plan;
mod shape;

use std::collections::BTreeMap;

use self::shape::BlockShape;
use crate::layers::Layer;
use crate::metadata::Metadata;

pub(super) use self::plan::Sizes;

/// Architectures whose graphs have additional tensors in the last block or beside the attention. This module does not
/// model them and adds a margin instead.
const NEEDS_MARGIN: [&str; 6] = ["cohere2", "falcon-h1", "hrm_text", "maple", "smallthinker", "talkie"];

/// What a model computes: its blocks, and the steps before and after them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Computation {
    /// One per block.
    blocks: Vec<BlockShape>,
    embedding: u64,
    /// The rows of the output: the vocabulary, unless the model has no output.
    output: u64,
    experts_used: u64,
    /// The elements of a token's inputs for all blocks.
    block_inputs: u64,
    /// Whether llama.cpp needs a little more than this graph, as measured.
    needs_margin: bool,
    /// The keys that the graph needs but the file lacks.
    pub(super) missing: Vec<String>,
    /// Whether every block works on several streams (alternating updates of gemma3n).
    has_streams: bool,
}

impl Computation {
    pub(super) fn read(layers: &BTreeMap<&str, Layer<'_>>, blocks: usize, metadata: Metadata<'_>) -> Self {
        let number = |key: &str| metadata.get::<u32>(key).map_or(0, u64::from);
        let shape = |block: usize| {
            let layer =
                ["blk", "dec.blk", "enc.blk"].map(|stem| layers.get(format!("{stem}.{block}").as_str()));
            layer.into_iter().flatten().next().map(BlockShape::read).unwrap_or_default()
        };
        let rows = |name: &str| {
            let tensor = layers.get(name)?.tensor("weight")?;
            tensor.shape().dimensions().get(1).copied()
        };
        let blocks: Vec<BlockShape> = (0..blocks).map(shape).collect();
        let experts_used = number("expert_used_count");
        let is_incomplete = experts_used == 0 && blocks.iter().any(|block| block.experts.is_some());
        Self {
            blocks,
            embedding: match number("embedding_length") {
                0 => layers.get("token_embd").map_or(0, |layer| shape::columns(layer, "weight")),
                embedding => embedding,
            },
            output: rows("output").or_else(|| rows("token_embd")).unwrap_or(0),
            experts_used,
            missing: is_incomplete
                .then(|| metadata.full_key("expert_used_count").into_owned())
                .into_iter()
                .collect(),
            block_inputs: layers
                .get("per_layer_token_embd")
                .map_or(0, |layer| shape::columns(layer, "weight")),
            needs_margin: NEEDS_MARGIN.contains(&metadata.architecture()),
            has_streams: layers.contains_key("altup_proj"),
        }
    }
}
