//! The graph of a model for one batch.

use super::Computation;
use super::allocator::{Graph, Id};
use super::shape::{Attention, BlockShape, Experts, FeedForward, Latent};

/// How many consecutive identical blocks are simulated. From the third one on, the allocations repeat.
const ALIKE_BLOCKS: usize = 3;

/// How many tensors of an embedding's size the streams of gemma3n need in addition to a plain block.
const STREAM_TENSORS: usize = 8;
/// How many tensors of an embedding's size are added for the architectures that need a margin.
const MARGIN_TENSORS: usize = 2;

/// The lengths that depend on the settings.
#[derive(Clone, Debug)]
pub(in crate::estimate) struct Sizes {
    /// The tokens of a batch.
    pub(in crate::estimate) tokens: u128,
    /// The cells that a token attends to.
    pub(in crate::estimate) cells: u128,
    /// The cells that a token attends to in blocks with a sliding window.
    pub(in crate::estimate) window_cells: u128,
    /// Which blocks have a window.
    pub(in crate::estimate) windowed: Vec<bool>,
    /// Whether the result is an embedding instead of a prediction of tokens.
    pub(in crate::estimate) is_embedding: bool,
}

impl Computation {
    /// The bytes of the buffer.
    pub(in crate::estimate) fn buffer_bytes(&self, sizes: &Sizes) -> u128 {
        let mut plan = Plan::new(self, sizes);
        let mut last = None;
        let mut alike = 0;
        let windowed = sizes.windowed.iter().copied().chain(std::iter::repeat(false));
        let mut following = self.blocks.iter().zip(windowed).peekable();
        while let Some(block) = following.next() {
            let is_last = following.peek().is_none();
            alike = if last == Some(block) { alike + 1 } else { 1 };
            last = Some(block);
            if alike <= ALIKE_BLOCKS || is_last {
                plan.block(block.0, block.1, is_last);
            }
        }
        plan.end(if sizes.is_embedding { 0 } else { self.output });
        plan.graph.buffer_bytes()
    }
}

struct Plan<'a> {
    graph: Graph,
    sizes: &'a Sizes,
    embedding: u64,
    experts_used: u64,
    positions: Id,
    /// The indices of the cache cells for keys and values.
    cells: Id,
    mask: Option<Id>,
    window_mask: Option<Id>,
    /// The result of the previous block.
    stream: Id,
}

impl<'a> Plan<'a> {
    /// Adds the inputs and the embedding of the batch. llama.cpp reserves memory for batches of tokens, of embeddings
    /// and of both; the tensors for batches of both are kept to the end.
    fn new(model: &Computation, sizes: &'a Sizes) -> Self {
        let mut graph = Graph::default();
        let row = |elements: u64| elements_bytes(sizes, elements);
        let embedding = row(model.embedding);
        let tokens = graph.input(row(1));
        graph.input(embedding);
        let mixed_tokens = graph.input(row(1));
        let slots = graph.input(row(2));
        let mixed = graph.input(embedding);
        let (positions, cells) = (graph.input(row(1)), graph.input(row(4)));
        let mut mask = |is_needed: bool, cells: u128| {
            is_needed.then(|| graph.input(cells.saturating_mul(sizes.tokens).saturating_mul(2)))
        };
        let has_attention = |(number, block): (usize, &BlockShape)| {
            let is_windowed = sizes.windowed.get(number).copied().unwrap_or(false);
            (block.attention != Attention::default()).then_some(is_windowed)
        };
        let kinds: Vec<bool> = model.blocks.iter().enumerate().filter_map(has_attention).collect();
        let window_mask = mask(kinds.contains(&true), sizes.window_cells);
        let mask = mask(kinds.contains(&false), sizes.cells);
        let stream = graph.tensor(embedding, &[tokens]);
        let from_tokens = graph.tensor(embedding, &[mixed_tokens]);
        let from_embeddings = graph.kept(embedding, &[mixed]);
        graph.used(&[from_tokens, slots, from_embeddings]);
        graph.kept(row(model.block_inputs), &[tokens]);
        let streams = if model.has_streams { STREAM_TENSORS } else { 0 };
        let margin = if model.needs_margin { MARGIN_TENSORS } else { 0 };
        for _ in 0..streams + margin {
            graph.kept(embedding, &[stream]);
        }
        let Computation { embedding, experts_used, .. } = *model;
        Self { graph, sizes, embedding, experts_used, positions, cells, mask, window_mask, stream }
    }

    fn block(&mut self, block: &BlockShape, is_windowed: bool, is_last: bool) {
        let residual = self.stream;
        let input = if block.has_attention_norm { self.norm(residual) } else { residual };
        let result = self
            .attention(&block.attention, input, is_windowed)
            .or_else(|| self.recurrent(block.recurrent, input));
        let Some(result) = result else {
            let feed_forward = self.feed_forward(block, input);
            self.stream = self.in_place(self.embedding, &[feed_forward, residual]);
            return;
        };
        if block.is_parallel {
            // A bias is added immediately, so the projection is computed before the feed-forward part.
            let early = block.attention.has_output_bias.then(|| self.tensor(self.embedding, &[result]));
            let residual = if is_last { self.tensor(self.embedding, &[residual]) } else { residual };
            let feed_forward = self.feed_forward(block, input);
            let attention = early.unwrap_or_else(|| self.tensor(self.embedding, &[result]));
            let sum = self.in_place(self.embedding, &[feed_forward, attention]);
            self.stream = self.in_place(self.embedding, &[sum, residual]);
            return;
        }
        let mut attention = self.tensor(self.embedding, &[result]);
        if block.has_post_attention_norm {
            attention = self.norm(attention);
        }
        let sum = self.in_place(self.embedding, &[attention, residual]);
        let input = if block.has_feed_forward_norm { self.norm(sum) } else { sum };
        let mut feed_forward = self.feed_forward(block, input);
        if block.has_post_feed_forward_norm {
            feed_forward = self.norm(feed_forward);
        }
        self.stream = self.in_place(self.embedding, &[feed_forward, sum]);
    }

    /// The result of the attention before its output projection.
    fn attention(&mut self, attention: &Attention, input: Id, is_windowed: bool) -> Option<Id> {
        if let Some(latent) = &attention.latent {
            return Some(self.latent_attention(latent, input));
        }
        let mask = if is_windowed { self.window_mask } else { self.mask };
        if attention.query == 0 && attention.fused == 0 {
            return None;
        }
        let (query, key, value) = if attention.fused > 0 {
            let fused = self.tensor(attention.fused, &[input]);
            let keys = attention.fused.saturating_sub(attention.result) / 2;
            let query = self.tensor(attention.result, &[fused, self.positions]);
            (query, self.tensor(keys, &[fused, self.positions]), fused)
        } else {
            let query = self.head(attention.query, attention.has_query_norm, input);
            let value = self.tensor(attention.value, &[input]);
            (query, self.head(attention.key, attention.has_key_norm, input), value)
        };
        self.graph.used(&[key, self.cells]);
        self.graph.used(&[value, self.cells]);
        let sources: Vec<Id> = [query].into_iter().chain(mask).collect();
        Some(self.tensor(attention.result, &sources))
    }

    /// Queries or keys with their positions.
    fn head(&mut self, elements: u64, has_norm: bool, input: Id) -> Id {
        let projected = self.tensor(elements, &[input]);
        if !has_norm {
            return self.tensor(elements, &[projected, self.positions]);
        }
        // The norm reads a view, which cannot be overwritten.
        let normed = self.tensor(elements, &[projected]);
        self.in_place(elements, &[normed, self.positions])
    }

    fn latent_attention(&mut self, latent: &Latent, input: Id) -> Id {
        let source = match latent.compressed_query {
            0 => input,
            compressed => self.tensor(compressed, &[input]),
        };
        let query = self.tensor(latent.query, &[source]);
        let absorbed = self.tensor(latent.absorbed, &[query]);
        let rotated = self.tensor(latent.rotated, &[query, self.positions]);
        let query = self.tensor(latent.absorbed.saturating_add(latent.rotated), &[absorbed, rotated]);
        let compressed = self.tensor(latent.key, &[input]);
        let normed = self.tensor(latent.compressed_key, &[compressed]);
        let rotated =
            self.tensor(latent.key.saturating_sub(latent.compressed_key), &[compressed, self.positions]);
        let key = self.tensor(latent.key, &[normed, rotated]);
        self.graph.used(&[key, self.cells]);
        let sources: Vec<Id> = [query].into_iter().chain(self.mask).collect();
        let result = self.tensor(latent.absorbed, &sources);
        let values = self.tensor(latent.values, &[result]);
        self.tensor(latent.values, &[values])
    }

    fn recurrent(&mut self, elements: u64, input: Id) -> Option<Id> {
        (elements > 0).then(|| {
            let results = self.tensor(elements, &[input]);
            self.tensor(elements, &[results])
        })
    }

    fn feed_forward(&mut self, block: &BlockShape, input: Id) -> Id {
        match &block.experts {
            Some(experts) => self.experts(experts, input),
            None => self.dense(&block.dense, input).unwrap_or(input),
        }
    }

    fn dense(&mut self, part: &FeedForward, input: Id) -> Option<Id> {
        if part.up == 0 {
            return None;
        }
        let hidden = if part.has_gate {
            let gate = self.tensor(part.hidden, &[input]);
            let up = self.tensor(part.up, &[input]);
            self.tensor(part.hidden, &[gate, up])
        } else {
            let up = self.tensor(part.up, &[input]);
            // If `up` contains the gate, the activation needs a tensor; otherwise it overwrites `up`.
            self.in_place(part.hidden, &[up])
        };
        Some(self.tensor(self.embedding, &[hidden]))
    }

    fn experts(&mut self, experts: &Experts, input: Id) -> Id {
        let used = |elements: u64| elements.saturating_mul(self.experts_used);
        let (up, all) = (used(experts.up), used(self.embedding));
        let logits = self.tensor(experts.count, &[input]);
        let probabilities = self.in_place(experts.count, &[logits]);
        let chosen = self.tensor(experts.count, &[probabilities]);
        let weights = self.tensor(self.experts_used, &[probabilities, chosen]);
        let hidden = if experts.is_fused {
            let both = self.tensor(up, &[input, chosen]);
            self.tensor(up / 2, &[both])
        } else if experts.has_gate {
            let gate = self.tensor(up, &[input, chosen]);
            let projected = self.tensor(up, &[input, chosen]);
            self.tensor(up, &[gate, projected])
        } else {
            let projected = self.tensor(up, &[input, chosen]);
            self.in_place(up, &[projected])
        };
        let results = self.tensor(all, &[hidden, chosen]);
        let weighted = self.in_place(all, &[results, weights]);
        let sum = match self.experts_used {
            0 | 1 => weighted,
            _ => self.sum_of_experts(weighted),
        };
        match self.dense(&experts.shared, input) {
            Some(shared) => self.in_place(self.embedding, &[sum, shared]),
            None => sum,
        }
    }

    /// Sums the experts' results: the first two into a new tensor, to which the others are added.
    fn sum_of_experts(&mut self, weighted: Id) -> Id {
        let first = self.tensor(self.embedding, &[weighted]);
        match self.experts_used {
            2 => first,
            _ => self.in_place(self.embedding, &[first, weighted]),
        }
    }

    /// The norm at the end and the output.
    fn end(&mut self, output: u64) {
        let normed = self.norm(self.stream);
        let bytes = elements_bytes(self.sizes, output);
        self.graph.kept(bytes, &[normed]);
    }

    fn norm(&mut self, source: Id) -> Id {
        self.in_place(self.embedding, &[source])
    }

    fn tensor(&mut self, elements: u64, sources: &[Id]) -> Id {
        self.graph.tensor(elements_bytes(self.sizes, elements), sources)
    }

    fn in_place(&mut self, elements: u64, sources: &[Id]) -> Id {
        self.graph.in_place(elements_bytes(self.sizes, elements), sources)
    }
}

/// The bytes of `elements` 32-bit numbers for each token of a batch.
fn elements_bytes(sizes: &Sizes, elements: u64) -> u128 {
    u128::from(elements).saturating_mul(4).saturating_mul(sizes.tokens)
}
