//! The inputs of Ollama's formulas that come from the model, and the keys that a formula needed but did not find.

use std::collections::{BTreeMap, BTreeSet};

use crate::layers::Layer;
use crate::metadata::{Metadata, Range};

/// The numbers of a model that do not depend on the settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Hyperparameters {
    pub(super) architecture: String,
    pub(super) blocks: u64,
    pub(super) embedding: u64,
    pub(super) heads_max: u64,
    pub(super) kv_heads_max: u64,
    pub(super) kv_heads_min: u64,
    /// The embedding length divided by the fewest heads.
    pub(super) head_size: u64,
    pub(super) head_size_k: u64,
    pub(super) head_size_v: u64,
    pub(super) vocabulary: u64,
    pub(super) experts: Experts,
    /// chatglm only: the elements of the query, key and value bias of block 0.
    pub(super) qkv_bias: Option<u64>,
    /// mllama only: the elements of `rope_freqs.weights`.
    pub(super) rope_freqs: u64,
    /// mllama only: the blocks with cross attention.
    pub(super) cross_attention: BTreeSet<u64>,
    /// gemma3 only.
    pub(super) sliding_window: u64,
    /// Keys that the formulas need but the file lacks.
    pub(super) missing: Vec<String>,
}

/// How block 0 of a llama stores experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Experts {
    None,
    /// One tensor per projection. Contains the bytes of the gate's tensor, and `feed_forward_length`.
    Stacked {
        gate_bytes: u64,
        feed_forward: u64,
    },
    /// One tensor per projection and expert. Contains the second dimension of the first gate.
    Separate {
        rows: u64,
    },
}

impl Hyperparameters {
    pub(super) fn read(mut keys: Keys<'_>, layers: &BTreeMap<&str, Layer<'_>>) -> Self {
        let metadata = keys.metadata();
        let architecture = metadata.architecture().to_owned();
        let experts = Experts::read(&mut keys, layers);
        let embedding = keys.number("embedding_length", 0);
        let mut heads = keys.range("attention.head_count").map(|range| (range.min.into(), range.max.into()));
        // The formulas for separate experts divide by the number of heads.
        if matches!(experts, Experts::Separate { .. }) && heads.is_some_and(|(_, max)| max == 0) {
            keys.add_missing("attention.head_count");
            heads = None;
        }
        let (heads_min, heads_max) = heads.unwrap_or((1, 1));
        let kv_heads = keys.range("attention.head_count_kv");
        let kv_heads = kv_heads.map_or((1, 1), |range| (range.min.into(), range.max.into()));
        let head_size = embedding.checked_div(heads_min).unwrap_or(0);
        let vocabulary = metadata.vocabulary_size();
        if vocabulary.is_none() {
            keys.add_missing("tokenizer.ggml.tokens");
        }
        let blocks = keys.number("block_count", counted_blocks(layers));
        let is_gemma3 = architecture == "gemma3";
        let sliding_window = if is_gemma3 { keys.number("attention.sliding_window", 0) } else { 0 };
        Self {
            blocks,
            embedding,
            heads_max,
            kv_heads_max: kv_heads.1,
            kv_heads_min: kv_heads.0,
            head_size,
            head_size_k: keys.optional("attention.key_length").unwrap_or(head_size),
            head_size_v: keys.optional("attention.value_length").unwrap_or(head_size),
            vocabulary: vocabulary.unwrap_or(0),
            experts,
            qkv_bias: first_dimension(layers, "attn_qkv.bias"),
            rope_freqs: rope_freqs(layers),
            cross_attention: cross_attention(&mut keys, &architecture),
            sliding_window,
            architecture,
            missing: keys.into_missing(),
        }
    }
}

impl Experts {
    fn read(keys: &mut Keys<'_>, layers: &BTreeMap<&str, Layer<'_>>) -> Self {
        let is_llama = matches!(keys.metadata().architecture(), "llama" | "llama4");
        let Some(block) = layers.get("blk.0").filter(|_| is_llama) else { return Self::None };
        if let Some(gate) = block.tensor("ffn_gate_exps.weight") {
            let gate_bytes = gate.size_bytes().unwrap_or(0);
            return Self::Stacked { gate_bytes, feed_forward: keys.number("feed_forward_length", 0) };
        }
        let Some(gate) = block.tensor("ffn_gate.0.weight") else { return Self::None };
        // In ggml, missing dimensions of a shape are 1.
        Self::Separate { rows: gate.shape().dimensions().get(1).copied().unwrap_or(1) }
    }
}

/// The number of blocks, counted from the names of the file's tensors.
fn counted_blocks(layers: &BTreeMap<&str, Layer<'_>>) -> u64 {
    (0..).take_while(|block: &u64| layers.contains_key(format!("blk.{block}").as_str())).count() as u64
}

fn first_dimension(layers: &BTreeMap<&str, Layer<'_>>, name: &str) -> Option<u64> {
    let tensor = layers.get("blk.0")?.tensor(name)?;
    Some(tensor.shape().dimensions().first().copied().unwrap_or(1))
}

fn rope_freqs(layers: &BTreeMap<&str, Layer<'_>>) -> u64 {
    let tensor = layers.get("rope_freqs").and_then(|layer| layer.tensor("weights"));
    tensor.map_or(0, |tensor| tensor.shape().element_count())
}

fn cross_attention(keys: &mut Keys<'_>, architecture: &str) -> BTreeSet<u64> {
    const KEY: &str = "attention.cross_attention_layers";
    if architecture != "mllama" {
        return BTreeSet::new();
    }
    // Ollama reads an array of exactly this type.
    match keys.metadata().array::<i32>(KEY) {
        Some(blocks) => blocks.filter_map(|block| u64::try_from(block).ok()).collect(),
        None => {
            keys.add_missing(KEY);
            BTreeSet::new()
        }
    }
}

/// Metadata with a list of the keys that were needed but missing.
#[derive(Debug)]
pub(super) struct Keys<'a> {
    metadata: Metadata<'a>,
    missing: Vec<String>,
}

impl<'a> Keys<'a> {
    pub(super) fn new(metadata: Metadata<'a>) -> Self {
        Self { metadata, missing: Vec::new() }
    }

    pub(super) fn metadata(&self) -> Metadata<'a> {
        self.metadata
    }

    /// A required number; the default if it is missing.
    pub(super) fn number(&mut self, key: &str, default: u64) -> u64 {
        let value = self.optional(key);
        self.or_missing(key, value).unwrap_or(default)
    }

    /// A required number above 0; 0 if it is missing, and 0 counts as missing.
    pub(super) fn positive(&mut self, key: &str) -> u64 {
        let value = self.optional(key).filter(|number| *number > 0);
        self.or_missing(key, value).unwrap_or(0)
    }

    /// An optional number.
    pub(super) fn optional(&self, key: &str) -> Option<u64> {
        self.metadata.get::<u32>(key).map(u64::from)
    }

    /// Minimum and maximum of a required number, or of one required number per block.
    pub(super) fn range(&mut self, key: &str) -> Option<Range> {
        let value = self.metadata.range(key);
        self.or_missing(key, value)
    }

    /// One number per block: a single number for all blocks, or an array. Blocks beyond the end of an array get its
    /// largest number, and a negative element counts as 0. `None` if the key is missing.
    pub(super) fn per_block(&self, key: &str, blocks: usize) -> Option<Vec<u64>> {
        if let Some(value) = self.optional(key) {
            return Some(vec![value; blocks]);
        }
        let mut values: Vec<u64> = match self.metadata.array::<u32>(key) {
            Some(values) => values.take(blocks).map(u64::from).collect(),
            None => {
                let values = self.metadata.array::<i32>(key)?.take(blocks);
                values.map(|value| u64::try_from(value).unwrap_or(0)).collect()
            }
        };
        let rest = values.iter().copied().max()?;
        values.resize(blocks, rest);
        Some(values)
    }

    /// One flag per block: an array of booleans, or of numbers where 0 means false. Blocks beyond its end get `false`.
    pub(super) fn flags(&self, key: &str, blocks: usize) -> Option<Vec<bool>> {
        let mut flags: Vec<bool> = match self.metadata.array::<bool>(key) {
            Some(flags) => flags.take(blocks).collect(),
            None => match self.metadata.array::<u32>(key) {
                Some(numbers) => numbers.take(blocks).map(|number| number != 0).collect(),
                None => self.metadata.array::<i32>(key)?.take(blocks).map(|number| number != 0).collect(),
            },
        };
        flags.resize(blocks, false);
        Some(flags)
    }

    /// Lists a key as missing.
    pub(super) fn add_missing(&mut self, key: &str) {
        let key = self.metadata.full_key(key).into_owned();
        if !self.missing.contains(&key) {
            self.missing.push(key);
        }
    }

    /// The missing keys under their full names, as the file would have them.
    pub(super) fn into_missing(self) -> Vec<String> {
        self.missing
    }

    fn or_missing<T>(&mut self, key: &str, value: Option<T>) -> Option<T> {
        if value.is_none() {
            self.add_missing(key);
        }
        value
    }
}
