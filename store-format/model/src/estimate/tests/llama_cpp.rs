//! The llama.cpp basis. The sizes were checked against its allocator: `tests/kv_oracle.py`.

use super::*;

fn kv(header: &Header, settings: &Settings) -> Vec<u64> {
    let models = set(header);
    models.estimate(settings, Basis::LlamaCpp).unwrap().kv_bytes
}

fn attention(blocks: u32, more: &[(&'static str, Value)]) -> Vec<(&'static str, Value)> {
    let plain = [
        ("block_count", Value::U32(blocks)),
        ("embedding_length", Value::U32(512)),
        ("attention.head_count", Value::U32(8)),
        ("attention.head_count_kv", Value::U32(2)),
    ];
    // A key given again replaces the first.
    let is_replaced = |key: &str| more.iter().any(|(other, _)| *other == key);
    plain.into_iter().filter(|(key, _)| !is_replaced(key)).chain(more.to_vec()).collect()
}

/// Bytes of keys and values of a token in a block of [`attention`] with 16-bit floats.
const TOKEN: u64 = (64 + 64) * 2 * 2;

#[test]
fn context_is_padded_to_256_in_total_and_for_each_sequence() {
    let header = header("llama", &attention(2, &[]), &[]);
    for (context, parallel, cells) in
        [(4096, 1, 4096), (4097, 1, 4352), (100, 3, 768), (384, 2, 1024), (1, 1, 256), (0, 1, 0), (1, 0, 0)]
    {
        assert_eq!(
            kv(&header, &settings(context, parallel, CacheType::F16)),
            [cells * TOKEN; 2],
            "{context}"
        );
    }
    let models = set(&header);
    let estimate = models.estimate(&Settings::default(), Basis::LlamaCpp).unwrap();
    assert_eq!(estimate.basis, "llama.cpp-2026-10:llama");
    assert_eq!(estimate.graph_basis, "llama.cpp-2026-10:llama");
    assert!(estimate.is_compared);
}

#[test]
fn keys_and_values_have_types_of_their_own() {
    let header = header("llama", &attention(1, &[("attention.value_length", Value::U32(32))]), &[]);
    // Bytes of a block of 32 elements.
    let block = [128, 64, 64, 34, 18, 20, 22, 24, 18];
    for (cache_type_k, k) in CacheType::ALL.into_iter().zip(block) {
        for (cache_type_v, v) in CacheType::ALL.into_iter().zip(block) {
            let settings = Settings { context: 256, cache_type_k, cache_type_v, ..Settings::default() };
            assert_eq!(kv(&header, &settings), [256 * (4 * k + 2 * v)], "{cache_type_k} {cache_type_v}");
        }
    }
}

#[test]
fn quantised_cache_that_does_not_divide_a_row_is_refused() {
    let header = header("llama", &attention(1, &[("attention.key_length", Value::U32(9))]), &[]);
    let error = set(&header).estimate(&settings(256, 1, CacheType::Q8_0), Basis::LlamaCpp).unwrap_err();
    assert_eq!(error, EstimateError::CacheRow { cache_type: CacheType::Q8_0, elements: 18, block: 32 });
    assert_eq!(kv(&header, &settings(256, 1, CacheType::F16)), [256 * (18 + 128) * 2]);
}

#[test]
fn heads_may_differ_by_block() {
    let keys = attention(4, &[("attention.head_count_kv", Value::from(vec![2_u32, 0, 8, 1]))]);
    let header = header("deci", &keys, &[]);
    let heads = [2, 0, 8, 1].map(|heads| 4096 * heads * TOKEN / 2);
    assert_eq!(kv(&header, &Settings::default()), heads);
}

#[test]
fn heads_of_keys_are_the_heads_if_the_file_has_none() {
    let keys: Vec<_> =
        attention(1, &[]).into_iter().filter(|(key, _)| *key != "attention.head_count_kv").collect();
    let header = header("llama", &keys, &[]);
    assert_eq!(kv(&header, &Settings::default()), [4096 * 4 * TOKEN]);
    assert_eq!(set(&header).estimate(&Settings::default(), Basis::LlamaCpp).unwrap().missing_keys, [""; 0]);
}

#[test]
fn blocks_with_a_window_keep_the_window_and_a_batch() {
    let window = ("attention.sliding_window", Value::U32(1024));
    for (architecture, windowed) in [
        ("gemma2", [true, false, true, false, true, false, true, false]),
        ("gemma3", [true, true, true, true, true, false, true, true]),
        ("gemma3n", [true, true, true, true, false, true, true, true]),
        ("gpt-oss", [true, false, true, false, true, false, true, false]),
        ("cohere2", [true, true, true, false, true, true, true, false]),
        ("olmo2", [true, true, true, false, true, true, true, false]),
        ("laguna", [false, true, true, true, false, true, true, true]),
        ("phi3", [false; 8]),
        ("llama", [false; 8]),
    ] {
        let header = header(architecture, &attention(8, std::slice::from_ref(&window)), &[]);
        for (parallel, cells) in [(1, 1536), (3, 3 * 1536)] {
            let expected = windowed.map(|windowed| TOKEN * if windowed { cells } else { 32768 * parallel });
            let settings = settings(32768, parallel, CacheType::F16);
            assert_eq!(kv(&header, &settings), expected, "{architecture}");
        }
        // At most as long as the context.
        assert_eq!(kv(&header, &settings(500, 1, CacheType::F16)), [512 * TOKEN; 8], "{architecture}");
    }
}

#[test]
fn windows_of_llama4_are_chunks_of_8192_unless_the_key_is_zero() {
    let found = |more: &[(&'static str, Value)]| {
        kv(&header("llama4", &attention(4, more), &[]), &settings(65536, 1, CacheType::F16))
    };
    let chunked = [8704, 8704, 8704, 65536].map(|cells| cells * TOKEN);
    assert_eq!(found(&[]), chunked);
    assert_eq!(found(&[("attention.sliding_window", Value::U32(77))]), chunked);
    assert_eq!(found(&[("attention.sliding_window", Value::U32(0))]), [65536 * TOKEN; 4]);
}

#[test]
fn pattern_key_changes_which_blocks_have_the_window() {
    let found = |architecture, pattern: Value| {
        let more =
            [("attention.sliding_window", Value::U32(256)), ("attention.sliding_window_pattern", pattern)];
        let kv = kv(&header(architecture, &attention(4, &more), &[]), &settings(8192, 1, CacheType::F16));
        kv.into_iter().map(|bytes| bytes < 8192 * TOKEN).collect::<Vec<_>>()
    };
    assert_eq!(found("gemma3", Value::U32(3)), [true, true, false, true]);
    assert_eq!(found("gemma3", Value::U32(1)), [false; 4]);
    assert_eq!(found("gemma3", Value::U32(0)), [true; 4]);
    assert_eq!(found("gemma3", Value::from(vec![false, false, true])), [false, false, true, false]);
    assert_eq!(found("mimo2", Value::from(vec![1_u32, 0, 1, 0])), [true, false, true, false]);
    assert_eq!(found("laguna", Value::U32(2)), [false, true, false, true]);
}

#[test]
fn windowed_blocks_may_have_heads_of_another_size() {
    let more = [
        ("attention.sliding_window", Value::U32(256)),
        ("attention.sliding_window_pattern", Value::from(vec![true, false])),
        ("attention.key_length_swa", Value::U32(32)),
        ("attention.value_length_swa", Value::U32(16)),
    ];
    let header = header("gemma4", &attention(2, &more), &[]);
    assert_eq!(kv(&header, &settings(8192, 1, CacheType::F16)), [768 * 48 * 2 * 2, 8192 * TOKEN]);
}

#[test]
fn later_blocks_share_the_cache_of_earlier_ones() {
    let window = ("attention.sliding_window", Value::U32(512));
    let header3 = header("gemma3n", &attention(35, std::slice::from_ref(&window)), &[]);
    let found = kv(&header3, &Settings::default());
    assert_eq!(found.iter().filter(|bytes| **bytes > 0).count(), 20);
    assert_eq!(found[20..], [0; 15]);
    let shared = [
        window,
        ("attention.sliding_window_pattern", Value::from(vec![true, false, true, false])),
        ("attention.shared_kv_layers", Value::U32(1)),
    ];
    let header4 = header("gemma4", &attention(4, &shared), &[]);
    assert_eq!(kv(&header4, &Settings::default())[3], 0);
}

#[test]
fn latent_attention_keeps_one_key_per_token_and_no_value() {
    let latent = [
        ("attention.head_count_kv", Value::U32(1)),
        ("attention.key_length", Value::U32(576)),
        ("attention.value_length", Value::U32(512)),
        ("attention.key_length_mla", Value::U32(192)),
        ("attention.value_length_mla", Value::U32(128)),
    ];
    let settings = Settings::default();
    let header_mla = header("deepseek2", &attention(2, &latent), &[]);
    assert_eq!(kv(&header_mla, &settings), [4096 * 576 * 2; 2]);
    // Files from before multi-head latent attention was supported keep whole keys and values.
    let header_plain = header("deepseek2", &attention(2, &latent[..3]), &[]);
    let whole = [4096 * (576 + 512) * 2; 2];
    assert_eq!(kv(&header_plain, &settings), whole);
    // Both lengths are needed, and only some architectures have such an attention.
    for missing in ["attention.key_length_mla", "attention.value_length_mla"] {
        let some: Vec<_> = latent.iter().filter(|(key, _)| *key != missing).cloned().collect();
        assert_eq!(kv(&header("deepseek2", &attention(2, &some), &[]), &settings), whole, "{missing}");
    }
    assert_eq!(kv(&header("llama", &attention(2, &latent), &[]), &settings), whole);
}

/// State of a mamba with these keys in bytes: ((4 - 1) * (128 + 2 * 1 * 16) + 16 * 128) * 4.
const STATE: u64 = (3 * (128 + 2 * 16) + 16 * 128) * 4;

fn state_keys() -> Vec<(&'static str, Value)> {
    vec![
        ("ssm.conv_kernel", Value::U32(4)),
        ("ssm.inner_size", Value::U32(128)),
        ("ssm.state_size", Value::U32(16)),
        ("ssm.group_count", Value::U32(1)),
    ]
}

#[test]
fn recurrent_blocks_keep_a_state_per_sequence() {
    let plain = [("block_count", Value::U32(2)), ("embedding_length", Value::U32(64))];
    let header = header("mamba2", &[&plain[..], &state_keys()].concat(), &[]);
    assert_eq!(kv(&header, &settings(4096, 1, CacheType::Q8_0)), [STATE; 2]);
    assert_eq!(kv(&header, &settings(1 << 40, 3, CacheType::F16)), [3 * STATE; 2]);
    let models = set(&header);
    let estimate = models.estimate(&Settings::default(), Basis::LlamaCpp).unwrap();
    assert!(!estimate.missing_keys.contains(&"mamba2.block_count".to_owned()));
}

#[test]
fn hybrid_models_have_recurrent_blocks_and_blocks_with_attention() {
    let attended = 4096 * TOKEN;
    let heads = ("attention.head_count_kv", Value::from(vec![0_u32, 2, 0, 2]));
    let feed_forward = ("feed_forward_length", Value::from(vec![0_u32, 0, 64, 64]));
    for (architecture, more, expected) in [
        ("jamba", vec![heads.clone()], [STATE, attended, STATE, attended]),
        ("granitehybrid", vec![heads.clone()], [STATE, attended, STATE, attended]),
        ("falcon-h1", vec![], [STATE + attended; 4]),
        ("nemotron_h", vec![heads, feed_forward], [STATE, attended, 0, 0]),
        ("qwen3next", vec![], [STATE, STATE, STATE, attended]),
        ("qwen3next", vec![("full_attention_interval", Value::U32(2))], [STATE, attended, STATE, attended]),
        (
            "qwen35",
            vec![("attention.recurrent_layers", Value::from(vec![true, false, false, true]))],
            [STATE, attended, attended, STATE],
        ),
    ] {
        let header = header(architecture, &attention(4, &[more, state_keys()].concat()), &[]);
        assert_eq!(kv(&header, &Settings::default()), expected, "{architecture}");
    }
}

#[test]
fn rwkv_and_lfm2_keep_states_of_their_own_size() {
    let keys = [
        ("block_count", Value::U32(1)),
        ("embedding_length", Value::U32(64)),
        ("wkv.head_size", Value::U32(32)),
    ];
    let rwkv = header("rwkv7", &keys, &[]);
    assert_eq!(kv(&rwkv, &Settings::default()), [(2 * 64 + 64 * 32) * 4]);
    let more =
        [("attention.head_count_kv", Value::from(vec![0_u32, 2])), ("shortconv.l_cache", Value::U32(3))];
    let lfm2 = header("lfm2", &attention(2, &more), &[]);
    assert_eq!(kv(&lfm2, &Settings::default()), [512 * 2 * 4, 4096 * TOKEN]);
}

#[test]
fn blocks_that_predict_further_tokens_keep_nothing() {
    let header = header("glm4moe", &attention(3, &[("nextn_predict_layers", Value::U32(1))]), &[]);
    assert_eq!(kv(&header, &Settings::default()), [4096 * TOKEN, 4096 * TOKEN, 0]);
}

#[test]
fn encoders_keep_nothing_and_caches_of_other_kinds_have_no_rule() {
    let bert = header("bert", &attention(2, &[]), &[]);
    assert_eq!(kv(&bert, &Settings::default()), [0; 2]);
    let header = header("deepseek4", &attention(2, &[]), &[]);
    let models = set(&header);
    let estimate = models.estimate(&Settings::default(), Basis::LlamaCpp).unwrap();
    assert_eq!(estimate.basis, "weights only: no rule for the cache and graph of `deepseek4`");
    assert!(!estimate.place(&[1 << 50]).fits());
    assert_eq!(
        models.estimate(&Settings::default(), Basis::Ollama).unwrap().basis,
        "ollama-2025-08:fallback"
    );
}

/// Blocks of 4 MiB and an output of 1 MiB, with a graph of a few hundred KiB.
fn four_blocks() -> Header {
    let names: Vec<String> = (0..4).map(|block| format!("blk.{block}.attn_q.weight")).collect();
    let shape: &[u64] = &[256, 4096];
    let mut tensors: Vec<_> = names.iter().map(|name| (name.as_str(), GgmlType::F32, shape)).collect();
    tensors.push(("output.weight", GgmlType::F32, &[256, 1024]));
    let keys = [
        ("block_count", Value::U32(4)),
        ("embedding_length", Value::U32(256)),
        ("attention.head_count", Value::U32(4)),
    ];
    header("llama", &keys, &tensors)
}

#[test]
fn everything_fits_on_a_device_of_the_required_size_and_not_on_a_smaller_one() {
    let header = four_blocks();
    let models = set(&header);
    let estimate = models.estimate(&settings(256, 1, CacheType::F16), Basis::LlamaCpp).unwrap();
    let required = estimate.required_bytes();
    assert_eq!(required, estimate.weights_bytes + estimate.kv_total_bytes + estimate.graph_full_bytes);
    let all = estimate.place(&[required]);
    assert!(all.fits());
    assert_eq!((all.layers, all.devices[0].used_bytes, all.memory_bytes), (5, required, 0));
    let less = estimate.place(&[required - 1]);
    assert_eq!((less.fits(), less.layers), (false, 4), "the first block stays in memory");
    assert_eq!(less.memory_bytes, (4 << 20) + estimate.kv_bytes[0]);
}

#[test]
fn devices_get_layers_that_follow_each_other_and_a_graph_each() {
    let header = four_blocks();
    let models = set(&header);
    let estimate = models.estimate(&settings(256, 1, CacheType::F16), Basis::LlamaCpp).unwrap();
    let (block, graph) = ((4 << 20) + estimate.kv_bytes[0], estimate.graph_full_bytes);
    let layers = |devices: &[u64]| -> Vec<u64> {
        estimate.place(devices).devices.iter().map(|device| device.layers).collect()
    };
    // The output is on the last device.
    assert_eq!(layers(&[2 * block + graph, 2 * block + graph + (1 << 20)]), [2, 3]);
    assert_eq!(layers(&[2 * block + graph - 1, 2 * block + graph + (1 << 20)]), [1, 3]);
    assert_eq!(layers(&[1 << 30, 1 << 30]), [5, 0], "as few devices as hold everything");
    assert_eq!(layers(&[graph, graph]), [0, 0]);
    assert_eq!(layers(&[]), [0; 0]);
    let placement = estimate.place(&[block + graph, 2 * block + graph + (1 << 20)]);
    assert_eq!(placement.places.blocks, [None, Some(0), Some(1), Some(1)]);
    let device_of = |part| placement.places.device_of(part);
    assert_eq!([Part::Output, Part::Input, Part::Block(9)].map(device_of), [Some(1), None, None]);
}

#[test]
fn a_graph_is_on_each_device_with_layers_or_else_in_memory() {
    let header = four_blocks();
    let models = set(&header);
    for basis in [Basis::LlamaCpp, Basis::Ollama] {
        let estimate = models.estimate(&settings(256, 1, CacheType::F16), basis).unwrap();
        for devices in [&[][..], &[1, 1]] {
            let placement = estimate.place(devices);
            assert_eq!(placement.memory_bytes, estimate.required_memory_bytes());
            assert_eq!(placement.total_bytes, placement.memory_bytes - estimate.graph_full_bytes);
        }
        assert_eq!(estimate.place(&[1 << 30]).memory_bytes, 0);
    }
}

#[test]
fn projector_draft_and_adapters_take_memory_of_the_first_device() {
    let header = four_blocks();
    let model = || Model::new(&header, []).unwrap();
    let settings = settings(256, 1, CacheType::F16);
    let alone = set(&header).estimate(&settings, Basis::LlamaCpp).unwrap().required_bytes();
    let models = ModelSet {
        model: model(),
        projector: Some(model()),
        draft: Some(model()),
        adapters: vec![model(); 2],
    };
    let estimate = models.estimate(&settings, Basis::LlamaCpp).unwrap();
    assert_eq!(estimate.required_bytes(), 2 * alone + 3 * estimate.weights_bytes);
    assert!(estimate.place(&[estimate.required_bytes()]).fits());
    let placement = estimate.place(&[alone]);
    assert!(!placement.companions_fit && !placement.fits());
}

#[test]
fn experts_and_tables_are_not_on_devices() {
    let shape: &[u64] = &[1 << 20];
    let names = [
        "blk.0.ffn_up_exps.weight",
        "blk.0.attn_q.weight",
        "per_layer_token_embd.weight",
        "blk.0.engram.0.weight",
    ];
    let tensors: Vec<_> = names.iter().map(|name| (*name, GgmlType::F32, shape)).collect();
    let header = header("llama", &attention(1, &[("expert_used_count", Value::U32(1))]), &tensors);
    let models = set(&header);
    let settings = Settings { experts_in_memory: true, ..settings(256, 1, CacheType::F16) };
    let estimate = models.estimate(&settings, Basis::LlamaCpp).unwrap();
    assert_eq!((estimate.weights_bytes, estimate.table_bytes), (16 << 20, 8 << 20));
    let needed = estimate.graph_full_bytes + estimate.kv_total_bytes;
    assert_eq!(estimate.required_bytes(), (4 << 20) + needed);
    assert_eq!(estimate.place(&[1 << 50]).memory_bytes, 4 << 20);
    assert_eq!(estimate.required_memory_bytes(), (8 << 20) + needed);
}

#[test]
fn required_keys_that_are_missing_leave_only_the_weights() {
    let block: &[(&str, GgmlType, &[u64])] = &[
        ("blk.0.attn_q.weight", GgmlType::F32, &[64, 64]),
        ("blk.0.ffn_gate_inp.weight", GgmlType::F32, &[64, 2]),
        ("blk.0.ffn_up_exps.weight", GgmlType::F32, &[64, 16, 2]),
    ];
    let window = [
        ("attention.sliding_window", Value::U32(64)),
        ("attention.sliding_window_pattern", Value::from(vec![false])),
    ];
    let no_heads = ("attention.head_count_kv", Value::from(vec![0_u32]));
    let cache = ("shortconv.l_cache", Value::U32(3));
    for (architecture, more, needed) in [
        ("llama", vec![], &["embedding_length", "attention.head_count"][..]),
        ("bert", vec![], &["embedding_length", "attention.head_count"]),
        ("mamba", state_keys(), &["ssm.conv_kernel", "ssm.inner_size", "ssm.state_size"]),
        ("mamba2", state_keys(), &["ssm.group_count"]),
        ("falcon-h1", state_keys(), &["ssm.state_size", "attention.head_count"]),
        ("rwkv7", vec![("wkv.head_size", Value::U32(32))], &["wkv.head_size", "embedding_length"]),
        ("lfm2", vec![no_heads, cache], &["shortconv.l_cache"]),
        ("gemma4", window.to_vec(), &["attention.sliding_window_pattern"]),
        ("llama", vec![], &["expert_used_count"]),
    ] {
        let more = [more, vec![("expert_used_count", Value::U32(1))]].concat();
        let complete = header(architecture, &attention(1, &more), block);
        let models = set(&complete);
        let estimate = models.estimate(&Settings::default(), Basis::LlamaCpp).unwrap();
        assert!(estimate.has_rule && estimate.missing_keys.is_empty(), "{architecture}: {}", estimate.basis);
        for key in needed {
            for value in [None, Some(Value::U32(0))] {
                let keys = attention(1, &more).into_iter().filter(|(name, _)| name != key);
                let keys: Vec<_> = keys.chain(value.map(|value| (*key, value))).collect();
                let incomplete = header(architecture, &keys, block);
                let models = set(&incomplete);
                let estimate = models.estimate(&Settings::default(), Basis::LlamaCpp).unwrap();
                assert_eq!(estimate.basis, format!("weights only: `{architecture}.{key}` is missing"));
                assert!(!estimate.place(&[1 << 50]).fits(), "{architecture}, {key}");
            }
        }
    }
}

#[test]
fn tensors_of_unknown_types_count_up_to_the_next_and_leave_only_the_weights() {
    let mut writer = GgufWriter::new();
    writer.metadata("general.architecture", "llama").unwrap();
    for (key, value) in attention(1, &[]) {
        writer.metadata(format!("llama.{key}"), value).unwrap();
    }
    let unknown = GgmlType::from_id(77);
    writer.tensor_at("blk.0.attn_q.weight", unknown, &[64, 64], 1024).unwrap();
    writer.tensor_at("blk.0.attn_k.weight", GgmlType::F32, &[16, 16], 0).unwrap();
    writer.tensor_at("output.weight", unknown, &[64, 64], 9216).unwrap();
    let header = Header::parse(&writer.header().unwrap()).unwrap();
    let bytes = |model: Model<'_>| {
        let models = ModelSet::from(model);
        for basis in [Basis::LlamaCpp, Basis::Ollama] {
            let estimate = models.estimate(&Settings::default(), basis).unwrap();
            assert_eq!(estimate.basis, "weights only: 2 tensors have unknown types");
            assert!(!estimate.place(&[1 << 50]).fits());
        }
        let estimate = models.estimate(&Settings::default(), Basis::LlamaCpp).unwrap();
        assert_eq!(estimate.unsized_tensors, 2);
        estimate.weights.iter().map(|layer| layer.bytes).collect::<Vec<_>>()
    };
    let end = header.data_offset() + 9216 + 500;
    assert_eq!(bytes(Model::of_files((&header, Some(end)), []).unwrap()), [1024 + 8192, 500]);
    assert_eq!(bytes(Model::new(&header, []).unwrap()), [1024 + 8192, 0]);
    assert_eq!(
        bytes(Model::of_files((&header, Some(1)), []).unwrap()),
        [1024 + 8192, 0],
        "an incomplete file"
    );
}

#[test]
fn companions_whose_memory_is_unknown_never_fit() {
    let known = four_blocks();
    let tensor: &[(&str, GgmlType, &[u64])] = &[("blk.0.attn_q.weight", GgmlType::F32, &[64, 64])];
    let unheard = header("unheard-of", &attention(1, &[]), tensor);
    let mut writer = GgufWriter::new();
    writer.metadata("general.architecture", "clip").unwrap();
    writer.tensor_at("v.blk.0.attn_q.weight", GgmlType::from_id(77), &[64], 0).unwrap();
    let future = Header::parse(&writer.header().unwrap()).unwrap();
    let model = |header| Model::new(header, []).unwrap();
    for (draft, projector, adapter, unknown) in [
        (&known, &known, &known, &[][..]),
        (&unheard, &known, &known, &["draft model"]),
        (&known, &future, &known, &["projector"]),
        (&known, &known, &future, &["adapter"]),
    ] {
        let models = ModelSet {
            model: model(&known),
            draft: Some(model(draft)),
            projector: Some(model(projector)),
            adapters: vec![model(adapter)],
        };
        let estimate = models.estimate(&Settings::default(), Basis::LlamaCpp).unwrap();
        assert_eq!((estimate.has_rule, &*estimate.unknown_companions), (unknown.is_empty(), unknown));
        assert_eq!(estimate.place(&[1 << 50]).fits(), unknown.is_empty());
        let projector = estimate.projector.unwrap();
        assert_eq!(projector.basis, "weights only: no rule for the graph of a projector");
    }
}
