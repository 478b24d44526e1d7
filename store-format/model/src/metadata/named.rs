//! Accessors for the keys for which Ollama has a named function. Its rules by architecture are in `ollama`.
//!
//! Numbers have the default that Ollama uses when the key is missing.

use super::{Metadata, UNKNOWN};
use blobd_store_format::gguf::ValueType;

impl<'a> Metadata<'a> {
    /// What the file is, such as `model` or `adapter`: `general.type`, by default `unknown`.
    pub fn kind(&self) -> &'a str {
        self.get("general.type").unwrap_or(UNKNOWN)
    }

    /// llama.cpp's number of the file type, if it is above 0: Ollama treats 0 as unknown. See
    /// [`file_type_name`](blobd_store_format::file_type::file_type_name).
    pub fn file_type(&self) -> Option<u32> {
        self.get("general.file_type").filter(|id| *id > 0)
    }

    pub fn block_count(&self) -> u64 {
        self.number("block_count", 0)
    }

    pub fn embedding_length(&self) -> u64 {
        self.number("embedding_length", 0)
    }

    /// The longest context for which the model was trained, in tokens.
    pub fn context_length(&self) -> u64 {
        self.number("context_length", 0)
    }

    /// The most attention heads of a block; 1 if missing.
    pub fn head_count_max(&self) -> u64 {
        self.range("attention.head_count").map_or(1, |range| range.max.into())
    }

    /// The fewest attention heads of a block; 1 if missing.
    pub fn head_count_min(&self) -> u64 {
        self.range("attention.head_count").map_or(1, |range| range.min.into())
    }

    /// The most key and value heads of a block; 1 if missing.
    pub fn head_count_kv_max(&self) -> u64 {
        self.range("attention.head_count_kv").map_or(1, |range| range.max.into())
    }

    /// The fewest key and value heads of a block; 1 if missing.
    pub fn head_count_kv_min(&self) -> u64 {
        self.range("attention.head_count_kv").map_or(1, |range| range.min.into())
    }

    /// The largest size of a head in elements: the embedding length divided by the fewest heads, 0 if
    /// there are none.
    pub fn head_size_max(&self) -> u64 {
        self.embedding_length().checked_div(self.head_count_min()).unwrap_or(0)
    }

    /// The size of a key head in elements: `attention.key_length`, by default
    /// [`head_size_max`](Self::head_size_max).
    pub fn head_size_k(&self) -> u64 {
        self.number("attention.key_length", self.head_size_max())
    }

    /// The size of a value head in elements: `attention.value_length`, by default
    /// [`head_size_max`](Self::head_size_max).
    pub fn head_size_v(&self) -> u64 {
        self.number("attention.value_length", self.head_size_max())
    }

    /// The number of tokens in the vocabulary; `None` if the header has no list of texts.
    pub fn vocabulary_size(&self) -> Option<u64> {
        let tokens = self.value("tokenizer.ggml.tokens")?.as_array()?;
        (tokens.element_type() == ValueType::String).then_some(tokens.len() as u64)
    }

    /// The template of a chat, in Jinja.
    pub fn chat_template(&self) -> Option<&'a str> {
        self.get("tokenizer.chat_template")
    }

    /// The attention heads of each block, from a single number or an array; 1 for blocks beyond the end of the array.
    pub fn head_counts(&self) -> impl Iterator<Item = u64> + use<'a> {
        self.per_block("attention.head_count", 1)
    }

    /// The key and value heads of each block, read like [`head_counts`](Self::head_counts). A block with 0 has no KV
    /// cache.
    pub fn head_counts_kv(&self) -> impl Iterator<Item = u64> + use<'a> {
        self.per_block("attention.head_count_kv", 1)
    }

    /// The length of the feed-forward network of each block; 0 if missing.
    pub fn feed_forward_lengths(&self) -> impl Iterator<Item = u64> + use<'a> {
        self.per_block("feed_forward_length", 0)
    }

    /// The width of the convolution of a state-space model (SSM).
    pub fn ssm_conv_kernel(&self) -> u64 {
        self.number("ssm.conv_kernel", 0)
    }

    /// The inner size of an SSM.
    pub fn ssm_inner_size(&self) -> u64 {
        self.number("ssm.inner_size", 0)
    }

    /// The size of the state of an SSM.
    pub fn ssm_state_size(&self) -> u64 {
        self.number("ssm.state_size", 0)
    }

    /// The groups of an SSM.
    pub fn ssm_group_count(&self) -> u64 {
        self.number("ssm.group_count", 0)
    }

    /// A number for each block. A single number, or an array of one element, applies to all; blocks beyond the end of a
    /// longer array get `default`.
    fn per_block(&self, key: &str, default: u64) -> impl Iterator<Item = u64> + use<'a> {
        let number = self.get::<u32>(key).into_iter();
        let unsigned = self.array::<u32>(key).into_iter().flatten();
        // Negative numbers are read as unsigned, as by `range`.
        let signed = self.array::<i32>(key).into_iter().flatten().map(i32::cast_unsigned);
        let mut values = number.chain(unsigned).chain(signed).map(u64::from);
        let (first, second) = (values.next(), values.next());
        let rest = if second.is_none() { first.unwrap_or(default) } else { default };
        let blocks = usize::try_from(self.block_count()).unwrap_or(usize::MAX);
        first.into_iter().chain(second).chain(values).chain(std::iter::repeat(rest)).take(blocks)
    }

    /// A `u32`, as wide as the formulas calculate.
    fn number(&self, key: &str, default: u64) -> u64 {
        self.get::<u32>(key).map_or(default, u64::from)
    }
}
