//! Any header with any settings gives an estimate or a specific error.

use std::collections::BTreeMap;

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use blobd_store_format::gguf::generate::file;

const ARCHITECTURES: [&str; 24] = [
    "llama",
    "llama4",
    "mllama",
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3n",
    "command-r",
    "qwen2",
    "phi2",
    "stablelm",
    "deepseek2",
    "chatglm",
    "gptoss",
    "gpt-oss",
    "mistral3",
    "qwen25vl",
    "qwen3",
    "mamba2",
    "jamba",
    "falcon-h1",
    "nemotron_h",
    "qwen3next",
    "gemma4",
];

const KEYS: [&str; 26] = [
    "embedding_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.key_length_mla",
    "attention.value_length_mla",
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "attention.cross_attention_layers",
    "attention.shared_kv_layers",
    "attention.recurrent_layers",
    "nextn_predict_layers",
    "full_attention_interval",
    "feed_forward_length",
    "ssm.conv_kernel",
    "ssm.inner_size",
    "ssm.state_size",
    "ssm.group_count",
    "vision.block_count",
    "vision.patch_size",
    "vision.image_size",
    "vision.num_channels",
    "vision.embedding_length",
    "vision.attention.head_count",
    "vision.max_num_tiles",
];

/// A small number, a limit, or any number.
fn number() -> impl Strategy<Value = u32> {
    prop_oneof![0..9_u32, 9..10_000_u32, Just(u32::MAX), any::<u32>()]
}

fn value() -> impl Strategy<Value = Value> {
    prop_oneof![
        6 => number().prop_map(Value::U32),
        1 => vec(number(), 0..6).prop_map(Value::from),
        1 => vec(any::<i32>(), 0..6).prop_map(Value::from),
        1 => vec(any::<bool>(), 0..6).prop_map(Value::from),
        1 => any::<u64>().prop_map(Value::U64),
    ]
}

fn model() -> impl Strategy<Value = Header> {
    let keys = vec((0..KEYS.len(), value()), 0..40);
    (0..ARCHITECTURES.len(), 0..9_u32, keys, 0..40_usize, 0..3_usize).prop_map(
        |(architecture, blocks, keys, tokens, experts)| {
            let keys: BTreeMap<usize, Value> = keys.into_iter().collect();
            let mut keys: Vec<_> = keys.into_iter().map(|(place, value)| (KEYS[place], value)).collect();
            keys.extend([("block_count", Value::U32(blocks)), vocabulary(tokens)]);
            let names = ["blk.0.ffn_norm.weight", "blk.0.ffn_gate.0.weight", "blk.0.ffn_gate_exps.weight"];
            let shape: &[u64] = &[64, 3, 2];
            let tensors = [
                (names[experts], GgmlType::F32, shape),
                ("blk.1.attn_qkv.bias", GgmlType::from_id(2), shape),
                ("output.weight", GgmlType::F16, shape),
            ];
            header(ARCHITECTURES[architecture], &keys, &tensors)
        },
    )
}

fn any_settings() -> impl Strategy<Value = Settings> {
    let tokens = || prop_oneof![Just(0), 1..100_000_u64, Just(1 << 63), Just(u64::MAX), any::<u64>()];
    let cache_type = || (0..CacheType::ALL.len()).prop_map(|place| CacheType::ALL[place]);
    (tokens(), tokens(), tokens(), cache_type(), cache_type(), any::<bool>()).prop_map(
        |(context, batch, parallel, cache_type_k, other, equal)| {
            let cache_type_v = if equal { cache_type_k } else { other };
            Settings { context, batch, parallel, cache_type_k, cache_type_v, experts_in_memory: equal }
        },
    )
}

fn basis() -> impl Strategy<Value = Basis> {
    prop_oneof![Just(Basis::Ollama), Just(Basis::LlamaCpp)]
}

proptest! {
    #[test]
    fn any_model_with_any_settings_has_an_estimate_or_a_named_error(
        header in model(),
        settings in any_settings(),
        basis in basis(),
        devices in vec(prop_oneof![Just(0), Just(u64::MAX), any::<u64>()], 0..4),
    ) {
        let Ok(model) = Model::new(&header, []) else { return Ok(()) };
        let models = ModelSet {
            projector: Some(model.clone()),
            draft: Some(model.clone()),
            adapters: vec![model.clone()],
            model,
        };
        match models.estimate(&settings, basis) {
            Ok(estimate) => {
                let placement = estimate.place(&devices);
                prop_assert!(placement.layers <= placement.layers_of);
                let on_devices: u64 = placement.devices.iter().map(|device| device.layers).sum();
                prop_assert_eq!(placement.layers, on_devices);
                let places = &placement.places;
                for (number, device) in placement.devices.iter().enumerate() {
                    let here = places.blocks.iter().chain([&places.output]).filter(|place| **place == Some(number));
                    prop_assert_eq!(device.layers, here.count() as u64);
                }
                for device in &placement.devices {
                    prop_assert!(device.used_bytes <= device.vram_bytes);
                }
            }
            Err(error) => prop_assert!(!error.to_string().is_empty()),
        }
        let _context = models.largest_context(&settings, basis, &devices);
    }

    #[test]
    fn memory_grows_with_the_context(
        header in model(),
        parallel in 0..5_u64,
        batch in 0..1000_u64,
        contexts in (0..1_000_000_u64, 0..1_000_000_u64),
        basis in basis(),
        vram in any::<u64>(),
    ) {
        let Ok(model) = Model::new(&header, []) else { return Ok(()) };
        let models = ModelSet::from(model);
        let estimate = |context| {
            models.estimate(&Settings { batch, ..settings(context, parallel, CacheType::F16) }, basis)
        };
        let (small, large) = (contexts.0.min(contexts.1), contexts.0.max(contexts.1));
        let Ok(large) = estimate(large) else { return Ok(()) };
        let small = estimate(small).unwrap();
        prop_assert!(small.kv_bytes.iter().zip(&large.kv_bytes).all(|(small, large)| small <= large));
        prop_assert!(small.graph_partial_bytes <= large.graph_partial_bytes);
        prop_assert!(small.required_bytes() <= large.required_bytes());
        prop_assert!(small.place(&[vram]).layers >= large.place(&[vram]).layers);
    }

    #[test]
    fn largest_context_is_the_boundary_on_one_device(header in model(), basis in basis(), vram in any::<u64>()) {
        let Ok(model) = Model::new(&header, []) else { return Ok(()) };
        let models = ModelSet::from(model);
        let settings = Settings::default();
        let fits = |context| match models.estimate(&Settings { context, ..settings }, basis) {
            Ok(estimate) => estimate.place(&[vram]).fits(),
            Err(_) => false,
        };
        match models.largest_context(&settings, basis, &[vram]) {
            Ok(Some(ModelSet::MAX_CONTEXT)) => prop_assert!(fits(ModelSet::MAX_CONTEXT)),
            Ok(Some(largest)) => prop_assert!(fits(largest) && !fits(largest + 1)),
            Ok(None) => prop_assert!(!fits(1)),
            Err(error) => prop_assert!(!error.to_string().is_empty()),
        }
    }

    #[test]
    fn any_file_has_an_estimate_or_a_named_error(sample in file(), settings in any_settings()) {
        let header = Header::parse(&sample.file).unwrap();
        let Ok(model) = Model::new(&header, []) else { return Ok(()) };
        for basis in [Basis::Ollama, Basis::LlamaCpp] {
            let _estimate = ModelSet::from(model.clone()).estimate(&settings, basis).map(|e| e.required_bytes());
        }
    }
}

#[test]
fn more_blocks_than_any_model_has_are_refused() {
    for (blocks, expected) in [(4096, Ok(4096)), (4097, Err(4097)), (u32::MAX, Err(u64::from(u32::MAX)))] {
        let header = header("llama", &[("block_count", Value::U32(blocks))], &[]);
        let found = Model::new(&header, []).map(|model| {
            ModelSet::from(model).estimate(&Settings::default(), Basis::Ollama).unwrap().kv_bytes.len()
        });
        assert_eq!(found, expected.map_err(|found| EstimateError::TooManyBlocks { found }));
    }
}

#[test]
fn extreme_settings_are_answered_or_refused_by_name() {
    let keys: Vec<_> = KEYS.iter().map(|key| (*key, Value::U32(u32::MAX))).collect();
    let without_vision: Vec<_> =
        keys.iter().filter(|(key, _)| !key.starts_with("vision.")).cloned().collect();
    let blocks = [("block_count", Value::U32(4096)), vocabulary(1000)];
    for architecture in ARCHITECTURES {
        let with_vision = header(architecture, &[&keys[..], &blocks].concat(), &[]);
        if let Err(error) = Model::new(&with_vision, []) {
            assert_eq!(error, EstimateError::Overflow { what: "vision graph" });
        }
        let header = header(architecture, &[&without_vision[..], &blocks].concat(), &[]);
        let models = set(&header);
        for (context, batch) in [(1 << 63, 512), (4096, 0), (0, 0), (u64::MAX, u64::MAX)] {
            let settings = Settings { context, batch, ..Settings::default() };
            for basis in [Basis::Ollama, Basis::LlamaCpp] {
                let error = models.estimate(&settings, basis).err();
                let is_named = error.is_none_or(|error| matches!(error, EstimateError::Overflow { .. }));
                assert!(is_named, "{architecture}");
            }
        }
    }
}
