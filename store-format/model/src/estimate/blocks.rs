//! Which blocks have a sliding window and which a recurrent state, as in llama.cpp.
//!
//! Sources, of llama.cpp 0c1e57098: `load_arch_hparams` of each architecture and `load_swa_pattern`;
//! `llm_arch_is_recurrent`, `llm_arch_is_hybrid`, `llama_hparams::n_embd_r` and `n_embd_s`.

use super::EstimateError;
use super::hyperparameters::Keys;
use super::number::Number;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Window {
    /// Its length.
    pub(super) tokens: u64,
    /// Which blocks have it; empty if none has.
    pub(super) blocks: Vec<bool>,
}

/// How an architecture uses `attention.sliding_window`.
#[derive(Clone, Copy)]
struct Rule {
    length: Length,
    blocks: Blocks,
}

#[derive(Clone, Copy)]
enum Length {
    /// The key's value; no window if the key is missing.
    Key,
    /// The key's value, or this default.
    KeyOr(u64),
    /// This length, unless the key is 0. With `needs_key`, there is no window if the key is missing.
    Fixed { tokens: u64, needs_key: bool },
}

/// The blocks with a window, unless `attention.sliding_window_pattern` is an array that lists them.
#[derive(Clone, Copy)]
enum Blocks {
    /// All except the last block of each group of this size.
    AllButLastOf(u64),
    /// All except the first block of each group of this size.
    AllButFirstOf(u64),
    /// The pattern must be an array.
    Listed,
    /// The blocks with attention.
    Attention,
}

const KEY: &str = "attention.sliding_window";
const PATTERN_KEY: &str = "attention.sliding_window_pattern";

/// The window of a model with this number of blocks. Only the first `trunk` blocks can have one.
pub(super) fn read_window(
    keys: &mut Keys<'_>,
    blocks: usize,
    trunk: usize,
    recurrent: &[Recurrent],
) -> Window {
    let Some(rule) = rule(keys.metadata().architecture(), trunk) else { return Window::default() };
    let found = keys.optional(KEY);
    let tokens = match (rule.length, found) {
        (Length::Fixed { .. }, Some(0)) | (Length::Fixed { needs_key: true, .. }, None) => 0,
        (Length::Fixed { tokens, .. }, _) | (Length::KeyOr(tokens), None) => tokens,
        (Length::Key | Length::KeyOr(_), Some(tokens)) => tokens,
        (Length::Key, None) => 0,
    };
    if tokens == 0 {
        return Window::default();
    }
    let listed = keys.flags(PATTERN_KEY, blocks).filter(|_| !matches!(rule.blocks, Blocks::Attention));
    if matches!(rule.blocks, Blocks::Listed) && listed.is_none() {
        keys.add_missing(PATTERN_KEY);
    }
    let blocks = listed.unwrap_or_else(|| {
        let every = keys.optional(PATTERN_KEY);
        let is_windowed = |block: u64, recurrent: &Recurrent| match rule.blocks {
            // With a group size of 0, all blocks have the window.
            Blocks::AllButLastOf(default) => {
                let every = every.unwrap_or(default);
                block.checked_rem(every).is_none_or(|place| place.saturating_add(1) < every)
            }
            Blocks::AllButFirstOf(default) => {
                block.checked_rem(every.unwrap_or(default)).is_none_or(|place| place != 0)
            }
            Blocks::Listed => false,
            Blocks::Attention => *recurrent == Recurrent::No,
        };
        let pattern = (0..).zip(recurrent).map(|(block, recurrent)| is_windowed(block, recurrent));
        let in_trunk = pattern.take(trunk).chain(std::iter::repeat(false));
        in_trunk.take(blocks).collect()
    });
    Window { tokens, blocks }
}

fn rule(architecture: &str, blocks: usize) -> Option<Rule> {
    let rule = |length, blocks| Some(Rule { length, blocks });
    match architecture {
        "gemma2" => rule(Length::KeyOr(4096), Blocks::AllButLastOf(2)),
        "gemma3" => rule(Length::Key, Blocks::AllButLastOf(6)),
        "gemma3n" => rule(Length::Key, Blocks::AllButLastOf(5)),
        "gpt-oss" => rule(Length::Key, Blocks::AllButLastOf(2)),
        "llama4" => rule(Length::Fixed { tokens: 8192, needs_key: false }, Blocks::AllButLastOf(4)),
        "smallthinker" => rule(Length::Fixed { tokens: 4096, needs_key: true }, Blocks::AllButFirstOf(4)),
        "cohere2" | "olmo2" | "afmoe" | "mellum" | "muse-glimmer" => {
            rule(Length::Key, Blocks::AllButLastOf(4))
        }
        "cohere2moe" | "laguna" => rule(Length::Key, Blocks::AllButFirstOf(4)),
        // Only the model of 32 billion parameters, which has 64 blocks, uses its window.
        "exaone4" if blocks == 64 => rule(Length::KeyOr(4096), Blocks::AllButLastOf(4)),
        "exaone-moe" => rule(Length::KeyOr(128), Blocks::AllButLastOf(4)),
        "plamo3" => rule(Length::Key, Blocks::AllButLastOf(8)),
        "gemma4" | "mimo2" | "step35" | "maple" | "granite_swa" | "spark2_5" => {
            rule(Length::Key, Blocks::Listed)
        }
        "lfm2" => rule(Length::Key, Blocks::Attention),
        _ => None,
    }
}

/// The default interval between blocks with attention in qwen3next and its successors.
const ATTENTION_INTERVAL: u64 = 4;
/// Architectures with a state for which llama.cpp does not read `ssm.group_count`, or reads 0.
const WITHOUT_GROUPS: [&str; 3] = ["mamba", "jamba", "plamo2"];
/// The default number of earlier tokens that RWKV keeps.
const TOKEN_SHIFTS: u64 = 2;

/// Whether a block keeps a recurrent state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Recurrent {
    /// The block has no state, only the cache of its attention.
    No,
    /// The block has a state and the cache of its attention.
    Beside,
    /// The block has a state instead of a cache.
    Instead,
    /// The block has neither a state nor a cache.
    Nothing,
}

/// Whether all blocks of an architecture are recurrent.
pub(super) fn is_recurrent_only(architecture: &str) -> bool {
    matches!(architecture, "mamba" | "mamba2") || is_rwkv(architecture)
}

/// Classifies each block. `kv_heads` is the number of its key and value heads.
pub(super) fn read_recurrent(keys: &mut Keys<'_>, kv_heads: &[u64]) -> Result<Vec<Recurrent>, EstimateError> {
    let architecture = keys.metadata().architecture();
    let without_heads = |heads: &u64| if *heads == 0 { Recurrent::Instead } else { Recurrent::No };
    Ok(match architecture {
        _ if is_recurrent_only(architecture) => vec![Recurrent::Instead; kv_heads.len()],
        "falcon-h1" => vec![Recurrent::Beside; kv_heads.len()],
        "jamba" | "granitehybrid" | "plamo2" | "lfm2" | "lfm2moe" => {
            kv_heads.iter().map(without_heads).collect()
        }
        "nemotron_h" | "nemotron_h_moe" => {
            let feed_forward = keys.per_block("feed_forward_length", kv_heads.len());
            let feed_forward = feed_forward.unwrap_or_else(|| vec![0; kv_heads.len()]);
            let of_block = |(heads, length): (&u64, u64)| match length {
                0 => without_heads(heads),
                _ => Recurrent::Nothing,
            };
            kv_heads.iter().zip(feed_forward).map(of_block).collect()
        }
        "qwen3next" | "qwen35" | "qwen35moe" => interleaved(keys, kv_heads.len()),
        _ => vec![Recurrent::No; kv_heads.len()],
    })
}

impl Recurrent {
    /// The bytes of the state of a sequence, in 32-bit floats.
    pub(super) fn bytes(self, keys: &mut Keys<'_>) -> Result<u64, EstimateError> {
        if !matches!(self, Self::Beside | Self::Instead) {
            return Ok(0);
        }
        let architecture = keys.metadata().architecture();
        let elements = if is_rwkv(architecture) {
            let shifts = keys.optional("token_shift_count").unwrap_or(TOKEN_SHIFTS);
            Number::from(keys.positive("embedding_length"))
                * (Number::from(shifts) + keys.positive("wkv.head_size"))
        } else if matches!(architecture, "lfm2" | "lfm2moe") {
            let earlier = keys.positive("shortconv.l_cache").saturating_sub(1);
            Number::from(keys.positive("embedding_length")) * earlier
        } else {
            let earlier = keys.positive("ssm.conv_kernel").saturating_sub(1);
            let inner = Number::from(keys.positive("ssm.inner_size"));
            let state = Number::from(keys.positive("ssm.state_size"));
            let groups = match WITHOUT_GROUPS.contains(&architecture) {
                true => keys.optional("ssm.group_count").unwrap_or(0),
                false => keys.positive("ssm.group_count"),
            };
            (inner + 2 * Number::from(groups) * state) * earlier + state * inner
        };
        (4 * elements).bytes("recurrent state")
    }
}

fn is_rwkv(architecture: &str) -> bool {
    matches!(architecture, "rwkv6" | "rwkv6qwen2" | "rwkv7" | "arwkv7")
}

fn interleaved(keys: &Keys<'_>, blocks: usize) -> Vec<Recurrent> {
    let state = |is_recurrent| if is_recurrent { Recurrent::Instead } else { Recurrent::No };
    if let Some(flags) = keys.flags("attention.recurrent_layers", blocks) {
        return flags.into_iter().map(state).collect();
    }
    let interval = keys.optional("full_attention_interval").unwrap_or(ATTENTION_INTERVAL).max(1);
    (1..).take(blocks).map(|number: u64| state(!number.is_multiple_of(interval))).collect()
}
