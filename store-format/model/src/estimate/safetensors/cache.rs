//! The KV cache that follows from `config.json`.
//!
//! Sources: the configuration and cache classes of transformers 5 (`configuration_*.py`, `cache_utils.py`), and vLLM's
//! `v1/kv_cache_interface.py`.

use std::collections::BTreeMap;

use blobd_store_format::safetensors::{Dtype, Tensor};

use super::names::in_block;
use super::{EstimateError, Number, Settings, block_count};
use crate::config::{AttentionConfig, BlockType};

/// What each block keeps, independent of the settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct KvCache {
    architecture: String,
    blocks: Vec<BlockCache>,
    is_latent: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct BlockCache {
    /// The elements of a token's keys, and of its values.
    k: u64,
    v: u64,
    /// The tokens that it keeps, if it does not keep all.
    window: Option<u64>,
}

/// The attention of an architecture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Rule {
    heads: Heads,
    window: Window,
}

/// How an architecture tells the elements of a token's keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Heads {
    /// `num_key_value_heads`, and `head_dim` or else the hidden size divided by the heads.
    Grouped,
    /// `num_key_value_heads` and `head_dim`, whose default is a number of its own.
    Sized,
    /// The hidden size: every head has keys and values.
    All,
    /// One compressed key and value for all heads.
    Latent,
}

/// Which blocks have the window of `sliding_window`, unless `layer_types` lists them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Window {
    None,
    All,
    /// Those from `max_window_layers` on, if `use_sliding_window` is set.
    Flagged,
    /// All but the last of each group of this size, or of `sliding_window_pattern`.
    AllButLastOf(u64),
}

/// The first block with a window if `max_window_layers` is absent: the default of transformers.
const FIRST_WINDOWED: u64 = 28;

/// By `model_type`, sorted.
const RULES: [(&str, Heads, Window); 53] = {
    use Heads::{All, Grouped, Latent, Sized};
    use Window::{AllButLastOf, Flagged, None};
    [
        ("apertus", Grouped, None),
        ("arcee", Grouped, None),
        ("bitnet", Grouped, None),
        ("codegen", All, None),
        ("cohere", Grouped, None),
        ("cohere2", Grouped, AllButLastOf(4)),
        ("deepseek_v2", Latent, None),
        ("deepseek_v3", Latent, None),
        ("dots1", Grouped, None),
        ("ernie4_5", Grouped, None),
        ("ernie4_5_moe", Grouped, None),
        ("exaone4", Grouped, AllButLastOf(4)),
        ("gemma", Sized, None),
        ("gemma2", Sized, AllButLastOf(2)),
        ("gemma3_text", Sized, AllButLastOf(6)),
        ("glm", Sized, None),
        ("glm4", Sized, None),
        ("glm4_moe", Sized, None),
        ("gpt2", All, None),
        ("gpt_neox", All, None),
        ("gpt_oss", Sized, AllButLastOf(2)),
        ("gptj", All, None),
        ("granite", Grouped, None),
        ("granitemoe", Grouped, None),
        ("helium", Sized, None),
        ("kimi_k2", Latent, None),
        ("llama", Grouped, None),
        ("llama4_text", Sized, None),
        ("minimax_m2", Sized, None),
        ("ministral", Grouped, Window::All),
        ("mistral", Grouped, Window::All),
        ("mixtral", Grouped, Window::All),
        ("nemotron", Grouped, None),
        ("olmo", Grouped, None),
        ("olmo2", Grouped, None),
        ("olmoe", Grouped, None),
        ("phi", Grouped, None),
        ("phi3", Grouped, None),
        ("phimoe", Grouped, None),
        ("qwen2", Grouped, Flagged),
        ("qwen2_5_vl", Grouped, Flagged),
        ("qwen2_5_vl_text", Grouped, Flagged),
        ("qwen2_moe", Grouped, Flagged),
        ("qwen2_vl", Grouped, Flagged),
        ("qwen2_vl_text", Grouped, Flagged),
        ("qwen3", Sized, Flagged),
        ("qwen3_moe", Sized, Flagged),
        ("qwen3_vl_moe_text", Sized, None),
        ("qwen3_vl_text", Sized, None),
        ("seed_oss", Sized, None),
        ("smollm3", Grouped, Flagged),
        ("stablelm", Grouped, None),
        ("starcoder2", Grouped, None),
    ]
};

/// The projections of a token's keys and values in a block, as their architectures name them.
const KEYS: [&str; 3] = ["self_attn.k_proj.weight", "attention.k_proj.weight", "attn.k_proj.weight"];
const VALUES: [&str; 3] = ["self_attn.v_proj.weight", "attention.v_proj.weight", "attn.v_proj.weight"];
const LATENTS: [&str; 1] = ["self_attn.kv_a_proj_with_mqa.weight"];

impl KvCache {
    /// The error says why there is no rule.
    pub(super) fn new(config: &AttentionConfig, tensors: &BTreeMap<&str, &Tensor>) -> Result<Self, String> {
        let architecture = config.model_type.clone().ok_or("config.json names no model_type")?;
        let rule = rule(&architecture).ok_or_else(|| format!("no rule for `{architecture}`"))?;
        if config.is_encoder_decoder || config.shared_blocks.is_some() {
            return Err(format!("no rule for this form of `{architecture}`"));
        }
        let found = config.blocks.ok_or_else(|| missing(&["num_hidden_layers"]))?;
        let blocks = block_count(found).ok_or("num_hidden_layers is too large")?;
        let stored = stored_rows(tensors);
        let elements = match rule.heads {
            Heads::Latent => latent(config, &stored)?,
            heads => grouped(config, heads, &stored)?,
        };
        let windows = windows(config, rule.window, blocks)?;
        let block = |window| BlockCache { k: elements.0, v: elements.1, window };
        let is_latent = rule.heads == Heads::Latent;
        Ok(Self { architecture, blocks: windows.into_iter().map(block).collect(), is_latent })
    }

    pub(super) const fn blocks(&self) -> usize {
        self.blocks.len()
    }

    pub(super) fn architecture(&self) -> &str {
        &self.architecture
    }

    pub(super) const fn is_latent(&self) -> bool {
        self.is_latent
    }

    /// The bytes that each block keeps: no padding, since the engines' block sizes differ.
    pub(super) fn bytes(&self, settings: &Settings) -> Result<Vec<u64>, EstimateError> {
        let (of_k, of_v) =
            (settings.cache_type_k.safetensors_bytes()?, settings.cache_type_v.safetensors_bytes()?);
        let context = Number::from(settings.context);
        let batch = context.min(settings.batch.into());
        self.blocks
            .iter()
            .map(|block| {
                let tokens = block.window.map_or(context, |window| context.min(batch + window));
                let row = Number::from(block.k) * of_k + Number::from(block.v) * of_v;
                (row * tokens * settings.parallel).bytes("KV cache")
            })
            .collect()
    }
}

fn rule(architecture: &str) -> Option<Rule> {
    let place = RULES.binary_search_by_key(&architecture, |(name, ..)| name).ok()?;
    RULES.get(place).map(|(_, heads, window)| Rule { heads: *heads, window: *window })
}

/// The rows of the projections in the files, if they are the same in all blocks.
#[derive(Clone, Copy, Debug, Default)]
struct StoredRows {
    k: Rows,
    v: Rows,
    latent: Rows,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Rows {
    #[default]
    Unknown,
    Same(u64),
    Different,
}

impl Rows {
    fn add(&mut self, rows: u64) {
        *self = match *self {
            Self::Unknown => Self::Same(rows),
            Self::Same(known) if known == rows => *self,
            _ => Self::Different,
        };
    }
}

/// Reads the rows of tensors whose elements are not packed. The blocks of a vision tower are not among them.
fn stored_rows(tensors: &BTreeMap<&str, &Tensor>) -> StoredRows {
    let mut stored = StoredRows::default();
    for (name, tensor) in tensors.iter().filter(|(_, tensor)| is_plain(tensor.dtype())) {
        let (Some((_, name)), [rows, _columns]) = (in_block(name), tensor.shape()) else { continue };
        for (names, found) in
            [(&KEYS[..], &mut stored.k), (&VALUES[..], &mut stored.v), (&LATENTS[..], &mut stored.latent)]
        {
            if names.contains(&name) {
                found.add(*rows);
            }
        }
    }
    stored
}

fn is_plain(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F64 | Dtype::F32 | Dtype::F16 | Dtype::BF16 | Dtype::F8_E4M3 | Dtype::F8_E5M2)
}

/// The elements of a token's keys and values. What `config.json` says and the shapes of the projections must agree; the
/// shapes stand in for keys that it leaves out because they have their default.
fn grouped(config: &AttentionConfig, heads: Heads, stored: &StoredRows) -> Result<(u64, u64), String> {
    let derived = config.embedding.zip(config.heads).and_then(|(all, heads)| all.checked_div(heads));
    let all = config.heads.filter(|_| heads == Heads::All);
    let size = config.head_size.or_else(|| derived.filter(|_| heads != Heads::Sized));
    let is_said = config.head_size.is_some() && config.kv_heads.is_some();
    let said = all.or(config.kv_heads).zip(size).and_then(|(heads, size)| heads.checked_mul(size));
    let elements = |rows: Rows, name: &str| match (said, rows) {
        (_, Rows::Different) => Err(format!("the blocks have {name} of different sizes")),
        (Some(said), Rows::Same(rows)) if is_said && said != rows => Err(format!(
            "config.json says {said} elements for the {name} of a token, the weights have {rows}"
        )),
        (_, Rows::Same(rows)) => Ok(rows),
        (Some(said), Rows::Unknown) => Ok(said),
        (None, Rows::Unknown) => Err(missing(&missing_keys(config, heads))),
    };
    Ok((elements(stored.k, "keys")?, elements(stored.v, "values")?))
}

fn missing_keys(config: &AttentionConfig, heads: Heads) -> Vec<&'static str> {
    let is_derived = heads != Heads::Sized && config.head_size.is_none();
    let keys = [
        ("num_attention_heads", config.heads.is_none() && (is_derived || heads == Heads::All)),
        ("num_key_value_heads", config.kv_heads.is_none() && heads != Heads::All),
        ("hidden_size", config.embedding.is_none() && is_derived),
        ("head_dim", config.head_size.is_none() && heads == Heads::Sized),
    ];
    keys.into_iter().filter(|(_, is_missing)| *is_missing).map(|(key, _)| key).collect()
}

/// The elements of a token's compressed key, which has its value in it.
fn latent(config: &AttentionConfig, stored: &StoredRows) -> Result<(u64, u64), String> {
    let (Some(latent), Some(rope)) = (config.latent_size, config.rope_size) else {
        let keys = [
            ("kv_lora_rank", config.latent_size.is_none()),
            ("qk_rope_head_dim", config.rope_size.is_none()),
        ];
        let keys: Vec<_> =
            keys.into_iter().filter(|(_, is_missing)| *is_missing).map(|(key, _)| key).collect();
        return Err(missing(&keys));
    };
    let said = latent.saturating_add(rope);
    match stored.latent {
        Rows::Different => Err("the blocks have compressed keys of different sizes".to_owned()),
        Rows::Same(rows) if rows != said => Err(format!(
            "config.json says {said} elements for the compressed key of a token, the weights have {rows}"
        )),
        _ => Ok((said, 0)),
    }
}

/// The window of each block.
fn windows(config: &AttentionConfig, window: Window, blocks: usize) -> Result<Vec<Option<u64>>, String> {
    if let Some(types) = &config.block_types {
        let of_type = |block_type: &BlockType| match block_type {
            BlockType::Full => Ok(None),
            BlockType::Sliding => config.window.map(Some).ok_or_else(|| missing(&["sliding_window"])),
            // Some engines keep only the chunk, others all tokens.
            BlockType::Chunked => Ok(None),
            BlockType::Other(name) => Err(format!("no rule for blocks with `{name}`")),
        };
        if types.len() != blocks {
            return Err(format!("layer_types lists {} blocks, num_hidden_layers {blocks}", types.len()));
        }
        return types.iter().map(of_type).collect();
    }
    let is_windowed = |block: u64| match window {
        Window::None => false,
        Window::All => true,
        Window::Flagged => {
            config.uses_window == Some(true) && block >= config.first_windowed.unwrap_or(FIRST_WINDOWED)
        }
        Window::AllButLastOf(group) => {
            let group = config.window_pattern.unwrap_or(group).max(1);
            !(block + 1).is_multiple_of(group)
        }
    };
    Ok((0..).take(blocks).map(|block| config.window.filter(|_| is_windowed(block))).collect())
}

fn missing(keys: &[&str]) -> String {
    let verb = if keys.len() == 1 { "is" } else { "are" };
    format!("`{}` {verb} missing in config.json", keys.join("`, `"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn architectures_are_sorted() {
        assert!(RULES.is_sorted_by_key(|(name, ..)| name));
    }
}
