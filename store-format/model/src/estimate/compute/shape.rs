//! Derives what a block of a model computes from its tensors.

use crate::layers::Layer;

/// The number of rows of each tensor in a block, which is the number of elements that it computes for a token; 0 if the
/// tensor is missing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct BlockShape {
    pub(super) attention: Attention,
    pub(super) has_attention_norm: bool,
    /// Whether attention and feed-forward part take the same input.
    pub(super) is_parallel: bool,
    pub(super) has_feed_forward_norm: bool,
    /// Whether the attention's result is normalised.
    pub(super) has_post_attention_norm: bool,
    /// Whether the result of the feed-forward part is normalised.
    pub(super) has_post_feed_forward_norm: bool,
    pub(super) dense: FeedForward,
    pub(super) experts: Option<Experts>,
    /// The sum of the widest results of a recurrent block.
    pub(super) recurrent: u64,
}

/// The attention's projections of query, key and value.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Attention {
    /// Query, key and value in one tensor.
    pub(super) fused: u64,
    pub(super) query: u64,
    pub(super) key: u64,
    pub(super) value: u64,
    /// The elements of the result before the output projection.
    pub(super) result: u64,
    pub(super) has_query_norm: bool,
    pub(super) has_key_norm: bool,
    pub(super) has_output_bias: bool,
    pub(super) latent: Option<Latent>,
}

/// Multi-head latent attention with the key's projection absorbed into the query.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Latent {
    /// The query of all heads.
    pub(super) query: u64,
    /// The compressed query, if there is one.
    pub(super) compressed_query: u64,
    /// The query of all heads in the space of the compressed key.
    pub(super) absorbed: u64,
    /// The compressed key and its rotated part.
    pub(super) key: u64,
    pub(super) compressed_key: u64,
    /// The rotated part of the query of all heads.
    pub(super) rotated: u64,
    /// The values of all heads.
    pub(super) values: u64,
}

/// A gate, a projection up and one down.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct FeedForward {
    pub(super) has_gate: bool,
    pub(super) up: u64,
    /// The elements that the down projection takes: half of `up` if that contains the gate.
    pub(super) hidden: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Experts {
    pub(super) count: u64,
    pub(super) has_gate: bool,
    /// Whether `up` contains the gate.
    pub(super) is_fused: bool,
    pub(super) up: u64,
    /// The expert that every token uses.
    pub(super) shared: FeedForward,
}

impl BlockShape {
    pub(super) fn read(layer: &Layer<'_>) -> Self {
        let has = |name: &str| layer.tensor(name).is_some();
        let attention = Attention::read(layer);
        let has_post_feed_forward_norm = has("post_ffw_norm.weight");
        let has_feed_forward_norm = has("ffn_norm.weight");
        // Without its own norm, the feed-forward part uses the one after the attention.
        let is_after_attention = has_feed_forward_norm || has_post_feed_forward_norm;
        let is_post = |name: &str| has(name) && is_after_attention;
        let is_feed_forward = has_feed_forward_norm
            || (has("post_attention_norm.weight") && !is_after_attention)
            || has("attn_output_norm.weight");
        let has_other_norm = is_after_attention || is_feed_forward || has("post_attention_norm.weight");
        Self {
            is_parallel: has("attn_norm.weight") && !has_other_norm,
            has_attention_norm: has("attn_norm.weight")
                || has("attn_norm_2.weight")
                || !has("post_attention_norm.weight"),
            has_feed_forward_norm: is_feed_forward,
            has_post_attention_norm: is_post("post_attention_norm.weight")
                || is_post("attn_post_norm.weight"),
            has_post_feed_forward_norm,
            dense: FeedForward::read(layer, ""),
            experts: Experts::read(layer),
            recurrent: if attention == Attention::default() { recurrent(layer) } else { 0 },
            attention,
        }
    }
}

impl Attention {
    fn read(layer: &Layer<'_>) -> Self {
        let has = |name: &str| layer.tensor(name).is_some();
        Self {
            fused: rows(layer, "attn_qkv.weight"),
            query: rows(layer, "attn_q.weight"),
            key: rows(layer, "attn_k.weight"),
            value: rows(layer, "attn_v.weight"),
            result: columns(layer, "attn_output.weight"),
            has_query_norm: has("attn_q_norm.weight"),
            has_key_norm: has("attn_k_norm.weight"),
            has_output_bias: has("attn_output.bias"),
            latent: Latent::read(layer),
        }
    }
}

impl Latent {
    fn read(layer: &Layer<'_>) -> Option<Self> {
        let keys = layer.tensor("attn_k_b.weight")?;
        let &[plain, compressed_key, heads] = keys.shape().dimensions() else { return None };
        let query = rows(layer, "attn_q_b.weight").max(rows(layer, "attn_q.weight"));
        let values = layer.tensor("attn_v_b.weight")?;
        let per_head = values.shape().dimensions().get(1).copied()?;
        Some(Self {
            query,
            compressed_query: rows(layer, "attn_q_a.weight"),
            absorbed: compressed_key.saturating_mul(heads),
            key: rows(layer, "attn_kv_a_mqa.weight"),
            compressed_key,
            rotated: query.saturating_sub(plain.saturating_mul(heads)),
            values: per_head.saturating_mul(heads),
        })
    }
}

impl FeedForward {
    fn read(layer: &Layer<'_>, suffix: &str) -> Self {
        let name = |part: &str| format!("ffn_{part}{suffix}.weight");
        Self {
            has_gate: layer.tensor(&name("gate")).is_some(),
            up: rows(layer, &name("up")),
            hidden: columns(layer, &name("down")),
        }
    }
}

impl Experts {
    fn read(layer: &Layer<'_>) -> Option<Self> {
        let router = layer.tensor("ffn_gate_inp.weight")?;
        let fused = rows(layer, "ffn_gate_up_exps.weight");
        Some(Self {
            count: router.shape().dimensions().get(1).copied().unwrap_or(1),
            has_gate: layer.tensor("ffn_gate_exps.weight").is_some(),
            is_fused: fused > 0,
            up: fused.max(rows(layer, "ffn_up_exps.weight")),
            shared: FeedForward::read(layer, "_shexp"),
        })
    }
}

/// The second dimension of a tensor.
fn rows(layer: &Layer<'_>, name: &str) -> u64 {
    layer.tensor(name).map_or(0, |tensor| tensor.shape().dimensions().get(1).copied().unwrap_or(1))
}

/// The first dimension of a tensor.
pub(super) fn columns(layer: &Layer<'_>, name: &str) -> u64 {
    layer.tensor(name).map_or(0, |tensor| tensor.shape().dimensions().first().copied().unwrap_or(1))
}

/// The sum of all results of a block without attention: llama.cpp's recurrent operations keep most of them alive.
fn recurrent(layer: &Layer<'_>) -> u64 {
    let is_dense = |name: &str| name.starts_with("ffn_");
    let matrices = layer.tensors().filter(|(name, tensor)| {
        !is_dense(name) && name.ends_with(".weight") && tensor.shape().dimensions().len() == 2
    });
    matrices.map(|(name, _)| rows(layer, name)).fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use blobd_store_format::gguf::{GgmlType, GgufWriter, Header};

    use super::*;
    use crate::layers::group_layers;

    /// The norms of a block with these tensors: before the attention, before the feed-forward part, after the attention, after
    /// the feed-forward part; and whether both take the same input.
    fn norms(names: &[&str]) -> ([bool; 4], bool) {
        let mut writer = GgufWriter::new();
        for name in names {
            writer.tensor(&format!("blk.0.{name}.weight"), GgmlType::F32, &[4]).unwrap();
        }
        let header = Header::parse(&writer.header().unwrap()).unwrap();
        let shape = BlockShape::read(&group_layers(header.tensors())["blk.0"]);
        let norms = [
            shape.has_attention_norm,
            shape.has_feed_forward_norm,
            shape.has_post_attention_norm,
            shape.has_post_feed_forward_norm,
        ];
        (norms, shape.is_parallel)
    }

    #[test]
    fn norm_after_the_attention_is_that_of_the_feed_forward_part_if_that_has_none() {
        for (names, expected) in [
            (&["attn_norm", "ffn_norm"][..], ([true, true, false, false], false)),
            (&["attn_norm"], ([true, false, false, false], true)),
            (&["attn_norm", "post_attention_norm"], ([true, true, false, false], false)),
            (&["attn_norm", "post_attention_norm", "ffn_norm"], ([true, true, true, false], false)),
            (&["post_attention_norm", "post_ffw_norm"], ([false, false, true, true], false)),
            (
                &["attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"],
                ([true, true, true, true], false),
            ),
            (&["attn_norm_2", "attn_output_norm"], ([true, true, false, false], false)),
        ] {
            assert_eq!(norms(names), expected, "{names:?}");
        }
    }
}
