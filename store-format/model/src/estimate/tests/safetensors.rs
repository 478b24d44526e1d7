//! Safetensors models: the KV cache of real configurations, and models of which only the weights are known.

use blobd_store_format::safetensors::{self, Dtype, HeaderWriter};
use serde_json::{Value as Json, json};

use super::*;

/// A tensor in each block, and others.
fn header(blocks: u64, more: &[(&str, Dtype, &[u64])]) -> safetensors::Header {
    let mut writer = HeaderWriter::new();
    for block in 0..blocks {
        writer.tensor(&format!("model.layers.{block}.mlp.up_proj.weight"), Dtype::BF16, &[8, 4]).unwrap();
    }
    for (name, dtype, shape) in more {
        writer.tensor(name, *dtype, shape).unwrap();
    }
    safetensors::Header::parse_start(&writer.header().unwrap()).unwrap()
}

fn model(header: &safetensors::Header, config: &Json) -> SafetensorsModel {
    SafetensorsModel::new([header], Some(config.to_string().as_bytes()), None)
}

/// The KV cache at a context, of a model without projections of keys.
fn kv_of(config: &Json, settings: &Settings) -> (String, u64) {
    let header = header(config["num_hidden_layers"].as_u64().unwrap(), &[]);
    let model = model(&header, config);
    let estimate = model.estimate(settings).unwrap();
    (estimate.basis, estimate.kv_total_bytes)
}

fn llama3() -> Json {
    json!({
        "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "max_position_embeddings": 131_072,
    })
}

fn with(mut config: Json, key: &str, value: impl Into<Json>) -> Json {
    config[key] = value.into();
    config
}

#[test]
fn caches_of_known_configurations() {
    let at = |context| settings(context, 1, CacheType::F16);
    let basis = |name: &str| format!("safetensors-2026-11:{name}");
    // Llama 3.1 8B: 2 * 32 blocks * 8 heads * 128 * 8192 tokens * 2 bytes.
    assert_eq!(kv_of(&llama3(), &at(8192)), (basis("llama"), 1_073_741_824));
    // Qwen3 30B A3B: 2 * 48 * 4 * 128 * 4096 * 2; its window is off.
    let qwen3 = json!({
        "model_type": "qwen3_moe", "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "hidden_size": 2048, "use_sliding_window": false, "sliding_window": 1024,
        "max_window_layers": 0,
    });
    assert_eq!(kv_of(&qwen3, &at(4096)), (basis("qwen3_moe"), 402_653_184));
    // With the window in blocks 40 to 47: 2048 bytes * (40 * 4096 + 8 * (1024 + 512)).
    let windowed = with(with(qwen3, "use_sliding_window", true), "max_window_layers", 40);
    assert_eq!(kv_of(&windowed, &at(4096)).1, 360_710_144);
    // DeepSeek V3: 61 * (512 + 64) * 4096 * 2.
    let deepseek = json!({
        "model_type": "deepseek_v3", "num_hidden_layers": 61, "num_attention_heads": 128,
        "num_key_value_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "hidden_size": 7168,
    });
    assert_eq!(kv_of(&deepseek, &at(4096)), (basis("deepseek_v3"), 287_834_112));
    // gpt-oss 20B: 12 blocks with all 4096 tokens, 12 with 128 + 512, of 2 * 8 * 64 * 2 bytes.
    let types: Vec<_> = (0..24).map(|block| ["sliding_attention", "full_attention"][block % 2]).collect();
    let gpt_oss = json!({
        "model_type": "gpt_oss", "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 64, "hidden_size": 2880, "sliding_window": 128, "layer_types": types,
    });
    assert_eq!(kv_of(&gpt_oss, &at(4096)), (basis("gpt_oss"), 116_391_936));
    // GPT-2: 2 * 12 * 768 * 1024 * 2.
    let gpt2 = json!({"model_type": "gpt2", "num_hidden_layers": 12, "n_head": 12, "n_embd": 768});
    assert_eq!(kv_of(&gpt2, &at(1024)), (basis("gpt2"), 37_748_736));
}

#[test]
fn cache_has_the_sequences_and_the_types_that_are_asked_for() {
    let one = kv_of(&llama3(), &settings(1000, 1, CacheType::BF16)).1;
    assert_eq!(one, 2 * 32 * 8 * 128 * 1000 * 2, "without padding");
    assert_eq!(kv_of(&llama3(), &settings(1000, 3, CacheType::F16)).1, 3 * one);
    let mixed = Settings { cache_type_k: CacheType::F32, ..settings(1000, 1, CacheType::F16) };
    assert_eq!(kv_of(&llama3(), &mixed).1, one / 2 * 3);
    let header = header(32, &[]);
    let model = model(&header, &llama3());
    let error = model.estimate(&settings(1000, 1, CacheType::Q8_0)).unwrap_err();
    assert_eq!(error.to_string(), "cache type q8_0: expected f32, f16 or bf16 for a safetensors model");
}

#[test]
fn shapes_of_the_projections_replace_missing_settings_and_must_agree_with_given_ones() {
    // Gemma 3 4B, whose configuration leaves out the heads: 29 blocks with a window of 1024, 5 without.
    let gemma3 = json!({"model_type": "gemma3", "text_config": {
        "model_type": "gemma3_text", "num_hidden_layers": 34, "hidden_size": 2560, "sliding_window": 1024,
    }});
    let projections: [(&str, Dtype, &[u64]); 3] = [
        ("language_model.model.layers.0.self_attn.k_proj.weight", Dtype::BF16, &[1024, 2560]),
        ("language_model.model.layers.33.self_attn.v_proj.weight", Dtype::BF16, &[1024, 2560]),
        ("vision_tower.vision_model.encoder.layers.0.self_attn.k_proj.weight", Dtype::BF16, &[1152, 1152]),
    ];
    let tensors = header(34, &projections);
    let found = model(&tensors, &gemma3);
    let estimate = found.estimate(&settings(8192, 1, CacheType::F16)).unwrap();
    assert_eq!(estimate.basis, "safetensors-2026-11:gemma3_text");
    assert_eq!(estimate.kv_total_bytes, 2 * 1024 * 2 * (5 * 8192 + 29 * (1024 + 512)));
    let without = model(&header(34, &[]), &gemma3);
    let estimate = without.estimate(&Settings::default()).unwrap();
    assert_eq!(estimate.basis, "weights only: `num_key_value_heads`, `head_dim` are missing in config.json");
    let other = with(with(llama3(), "head_dim", 128), "num_key_value_heads", 4);
    let tensors = header(32, &[("model.layers.0.self_attn.k_proj.weight", Dtype::BF16, &[1024, 4096])]);
    let basis = model(&tensors, &other).estimate(&Settings::default()).unwrap().basis;
    assert_eq!(
        basis,
        "weights only: config.json says 512 elements for the keys of a token, the weights have 1024"
    );
    // The length of a packed row does not show how many elements it has.
    let packed = header(32, &[("model.layers.0.self_attn.k_proj.weight", Dtype::U8, &[7, 4096])]);
    assert!(model(&packed, &llama3()).estimate(&Settings::default()).unwrap().has_rule);
}

#[test]
fn without_a_rule_only_the_weights_are_known_and_nothing_fits() {
    let only = |config: Option<&Json>, kind| {
        let header = header(32, &[("model.embed_tokens.weight", Dtype::F32, &[10])]);
        let text = config.map(Json::to_string);
        let model = SafetensorsModel::new([&header], text.as_ref().map(String::as_bytes), kind);
        let estimate = model.estimate(&Settings::default()).unwrap();
        assert!(!estimate.has_rule && !estimate.place(&[1 << 60]).fits(), "{}", estimate.basis);
        assert_eq!((estimate.weights_bytes, estimate.kv_total_bytes), (32 * 64 + 40, 0));
        estimate.basis.strip_prefix("weights only: ").unwrap().to_owned()
    };
    assert_eq!(only(None, None), "the model has no config.json");
    assert_eq!(only(Some(&llama3()), Some("an adapter")), "no rule for an adapter");
    for (config, reason) in [
        (json!([]), "config.json names no model_type"),
        (with(llama3(), "model_type", "mamba2"), "no rule for `mamba2`"),
        (with(llama3(), "num_hidden_layers", Json::Null), "`num_hidden_layers` is missing in config.json"),
        (with(llama3(), "num_hidden_layers", 33), "there are no weights of block 32"),
        (with(llama3(), "num_hidden_layers", 5000), "num_hidden_layers is too large"),
        (
            with(llama3(), "num_key_value_heads", Json::Null),
            "`num_key_value_heads` is missing in config.json",
        ),
        (with(llama3(), "num_kv_shared_layers", 2), "no rule for this form of `llama`"),
        (
            with(llama3(), "layer_types", ["full_attention"]),
            "layer_types lists 1 blocks, num_hidden_layers 32",
        ),
        (
            with(llama3(), "layer_types", vec!["linear_attention"; 32]),
            "no rule for blocks with `linear_attention`",
        ),
    ] {
        assert_eq!(only(Some(&config), None), reason, "{config}");
    }
}

#[test]
fn weights_are_summed_by_layer_and_experts_can_stay_in_memory() {
    let tensors: [(&str, Dtype, &[u64]); 4] = [
        ("model.embed_tokens.weight", Dtype::BF16, &[16, 4]),
        ("model.layers.1.mlp.experts.7.up_proj.weight", Dtype::F8_E4M3, &[100]),
        ("model.layers.1.mlp.shared_expert.up_proj.weight", Dtype::F8_E4M3, &[10]),
        ("lm_head.weight", Dtype::BF16, &[16, 4]),
    ];
    let header = header(2, &tensors);
    let config = with(with(llama3(), "num_hidden_layers", 2), "model_type", "mixtral");
    let model = model(&header, &config);
    let in_memory = Settings { experts_in_memory: true, ..settings(1, 1, CacheType::F16) };
    let estimate = model.estimate(&in_memory).unwrap();
    let layers: Vec<_> = estimate.weights.iter().map(|layer| (layer.layer.as_str(), layer.bytes)).collect();
    assert_eq!(
        layers,
        [("lm_head", 128), ("model.embed_tokens", 128), ("model.layers.0", 64), ("model.layers.1", 174)]
    );
    let parts: Vec<_> = estimate.weights.iter().map(|layer| layer.part).collect();
    assert_eq!(parts, [Part::Output, Part::Other, Part::Block(0), Part::Block(1)]);
    let placement = estimate.place(&[1 << 30]);
    assert!(placement.fits());
    assert_eq!(placement.memory_bytes, 100, "the experts, but not the embedding");
    assert_eq!(estimate.required_bytes(), 128 + 128 + 64 + 74 + 2 * 4096);
}
