//! Finds the recurrent blocks of a model as llama.cpp does, and the size of their state.
//!
//! Source: `llm_arch_is_recurrent`, `llm_arch_is_hybrid`, `llama_hparams::n_embd_r` and `n_embd_s` of
//! llama.cpp 0c1e57098.

use super::EstimateError;
use super::keys::Keys;
use super::number::Number;

/// The default interval between blocks with attention in qwen3next and its successors.
const ATTENTION_INTERVAL: u64 = 4;
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
///
/// # Errors
/// [`EstimateError::Overflow`].
pub(super) fn read(keys: &mut Keys<'_>, kv_heads: &[u64]) -> Result<Vec<Recurrent>, EstimateError> {
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
    ///
    /// # Errors
    /// [`EstimateError::Overflow`].
    pub(super) fn bytes(self, keys: &Keys<'_>) -> Result<u64, EstimateError> {
        if !matches!(self, Self::Beside | Self::Instead) {
            return Ok(0);
        }
        let key = |key: &str| Number::from(keys.optional(key).unwrap_or(0));
        let architecture = keys.metadata().architecture();
        let elements = if is_rwkv(architecture) {
            let shifts = Number::from(keys.optional("token_shift_count").unwrap_or(TOKEN_SHIFTS));
            key("embedding_length") * (shifts + key("wkv.head_size"))
        } else if matches!(architecture, "lfm2" | "lfm2moe") {
            key("embedding_length") * keys.optional("shortconv.l_cache").unwrap_or(0).saturating_sub(1)
        } else {
            let earlier = keys.optional("ssm.conv_kernel").unwrap_or(0).saturating_sub(1);
            let (inner, state) = (key("ssm.inner_size"), key("ssm.state_size"));
            (inner + 2 * key("ssm.group_count") * state) * earlier + state * inner
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
