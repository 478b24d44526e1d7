//! What `config.json` says of the attention of a language model.

use blobd_store_format::python_json;
use serde_json::Value as Json;

/// The longest list of blocks that is read, as many as an estimate may have.
const MAX_BLOCKS: usize = 4096;

/// The keys of `config.json`, or of its section `text_config`, from which the size of a KV cache follows. A key that is
/// absent, null or of another type is `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AttentionConfig {
    /// The `model_type` of the language model, which has a name of its own in a model of several parts: `gemma3_text`.
    pub model_type: Option<String>,
    /// `is_encoder_decoder`.
    pub is_encoder_decoder: bool,
    /// `num_hidden_layers`.
    pub blocks: Option<u64>,
    /// `max_position_embeddings`.
    pub context_length: Option<u64>,
    /// `hidden_size`.
    pub embedding: Option<u64>,
    /// `num_attention_heads`.
    pub heads: Option<u64>,
    /// `num_key_value_heads`.
    pub kv_heads: Option<u64>,
    /// `head_dim`.
    pub head_size: Option<u64>,
    /// `kv_lora_rank`: the elements of a token's compressed key and value, with multi-head latent attention.
    pub latent_size: Option<u64>,
    /// `qk_rope_head_dim`: the elements of a token's rotated key beside the compressed one.
    pub rope_size: Option<u64>,
    /// `sliding_window`.
    pub window: Option<u64>,
    /// `use_sliding_window`.
    pub uses_window: Option<bool>,
    /// `max_window_layers`: the first block with a window.
    pub first_windowed: Option<u64>,
    /// `sliding_window_pattern`: the last block of each group of this many has no window.
    pub window_pattern: Option<u64>,
    /// `layer_types`: the attention of each block.
    pub block_types: Option<Vec<BlockType>>,
    /// `num_kv_shared_layers`: blocks that use the cache of another block.
    pub shared_blocks: Option<u64>,
}

/// The attention of a block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BlockType {
    Full,
    /// Only the tokens of the window.
    Sliding,
    /// Only the tokens of the same chunk.
    Chunked,
    /// Another kind, such as `linear_attention`.
    Other(String),
}

impl AttentionConfig {
    /// Reads `config.json`.
    ///
    /// # Errors
    /// That of the parser, when the text is not JSON.
    pub fn from_config(json: &[u8]) -> Result<Self, serde_json::Error> {
        let config = python_json::parse(json)?;
        let text = config.get("text_config");
        let find = |names: &[&str]| {
            let of = |object: &Json| names.iter().find_map(|name| object.get(*name).cloned());
            text.and_then(of).filter(|value| !value.is_null()).or_else(|| of(&config))
        };
        let number = |names: &[&str]| find(names)?.as_u64().filter(|number| *number > 0);
        let flag = |name: &str| find(&[name])?.as_bool();
        Ok(Self {
            model_type: find(&["model_type"]).as_ref().and_then(Json::as_str).and_then(super::name),
            is_encoder_decoder: flag("is_encoder_decoder").unwrap_or(false),
            blocks: number(&["num_hidden_layers", "n_layer"]),
            context_length: number(&["max_position_embeddings", "n_positions"]),
            embedding: number(&["hidden_size", "n_embd"]),
            heads: number(&["num_attention_heads", "n_head"]),
            kv_heads: number(&["num_key_value_heads"]),
            head_size: number(&["head_dim"]),
            latent_size: number(&["kv_lora_rank"]),
            rope_size: number(&["qk_rope_head_dim"]),
            window: number(&["sliding_window"]),
            uses_window: flag("use_sliding_window"),
            first_windowed: find(&["max_window_layers"]).as_ref().and_then(Json::as_u64),
            window_pattern: number(&["sliding_window_pattern", "_sliding_window_pattern"]),
            block_types: find(&["layer_types"]).as_ref().and_then(block_types),
            shared_blocks: number(&["num_kv_shared_layers"]),
        })
    }
}

fn block_types(list: &Json) -> Option<Vec<BlockType>> {
    let list = list.as_array().filter(|list| list.len() <= MAX_BLOCKS)?;
    let block_type = |name: &Json| match name.as_str() {
        Some("full_attention") => BlockType::Full,
        Some("sliding_attention") => BlockType::Sliding,
        Some("chunked_attention") => BlockType::Chunked,
        other => BlockType::Other(other.and_then(super::name).unwrap_or_else(|| "unknown".to_owned())),
    };
    Some(list.iter().map(block_type).collect())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn keys_of_the_language_model_come_first_and_null_is_absent() {
        let config = json!({
            "model_type": "gemma3", "num_attention_heads": 1, "hidden_size": 64, "sliding_window": 4096,
            "text_config": {
                "model_type": "gemma3_text", "num_attention_heads": 8, "hidden_size": null, "head_dim": "256",
                "layer_types": ["full_attention", "sliding_attention", "chunked_attention", "linear_attention", 7],
                "use_sliding_window": false, "max_window_layers": 0, "_sliding_window_pattern": 6,
            },
        });
        let found = AttentionConfig::from_config(config.to_string().as_bytes()).unwrap();
        let other = |name: &str| BlockType::Other(name.to_owned());
        let expected = AttentionConfig {
            model_type: Some("gemma3_text".to_owned()),
            heads: Some(8),
            embedding: Some(64),
            window: Some(4096),
            uses_window: Some(false),
            first_windowed: Some(0),
            window_pattern: Some(6),
            block_types: Some(vec![
                BlockType::Full,
                BlockType::Sliding,
                BlockType::Chunked,
                other("linear_attention"),
                other("unknown"),
            ]),
            ..AttentionConfig::default()
        };
        assert_eq!(found, expected);
    }

    #[test]
    fn any_json_is_read_and_other_text_is_an_error() {
        assert_eq!(AttentionConfig::from_config(b"[1]").unwrap(), AttentionConfig::default());
        assert!(AttentionConfig::from_config(b"{").is_err());
    }
}
