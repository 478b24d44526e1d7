use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use blobd_store_format::gguf::{GgufWriter, Value};

/// A header with these keys.
fn header(keys: &[(&str, Value)]) -> Header {
    let mut writer = GgufWriter::new();
    for (key, value) in keys {
        writer.metadata(key, value.clone()).unwrap();
    }
    Header::parse(&writer.header().unwrap()).unwrap()
}

fn llama(keys: &[(&str, Value)]) -> Header {
    header(&[&[("general.architecture", Value::from("llama"))], keys].concat())
}

#[test]
fn keys_get_the_architecture_unless_they_are_general() {
    let header = llama(&[]);
    let metadata = Metadata::new(&header);
    for (key, full) in [
        ("block_count", "llama.block_count"),
        ("general.name", "general.name"),
        ("tokenizer.ggml.tokens", "tokenizer.ggml.tokens"),
        ("llama.block_count", "llama.llama.block_count"),
        ("general", "llama.general"),
        ("", "llama."),
    ] {
        assert_eq!(metadata.full_key(key), full);
    }
}

#[test]
fn values_of_another_type_count_as_missing() {
    let header = llama(&[
        ("llama.a", Value::U64(7)),
        ("llama.b", Value::I32(7)),
        ("llama.c", Value::F64(7.0)),
        ("llama.d", Value::from(vec![7_u16])),
        ("llama.e", Value::strings([b"\xff".to_vec(), b"x".to_vec()])),
        ("llama.f", Value::String(b"\xff".to_vec())),
    ]);
    let metadata = Metadata::new(&header);
    assert_eq!(metadata.get::<u32>("a"), None);
    assert_eq!(metadata.get::<u64>("a"), Some(7));
    assert_eq!(metadata.get::<u32>("b"), None);
    assert_eq!(metadata.get::<f32>("c"), None);
    assert!(metadata.array::<u32>("d").is_none());
    assert!(metadata.array::<u16>("a").is_none());
    assert_eq!(metadata.array::<u16>("d").map(Vec::from_iter), Some(vec![7]));
    assert_eq!(metadata.array::<&str>("e").map(Vec::from_iter), Some(vec!["x"]));
    assert_eq!(metadata.get::<&str>("f"), None);
    assert!(metadata.value("f").is_some());
}

#[test]
fn every_scalar_type_is_read() {
    let header = llama(&[
        ("llama.u8", Value::U8(u8::MAX)),
        ("llama.i8", Value::I8(i8::MIN)),
        ("llama.u16", Value::U16(u16::MAX)),
        ("llama.i16", Value::I16(i16::MIN)),
        ("llama.i64", Value::I64(i64::MIN)),
        ("llama.f32", Value::F32(0.5)),
        ("llama.f64", Value::F64(0.25)),
        ("llama.bool", Value::Bool(true)),
        ("llama.string", Value::from("text")),
    ]);
    let metadata = Metadata::new(&header);
    assert_eq!(metadata.get::<u8>("u8"), Some(u8::MAX));
    assert_eq!(metadata.get::<i8>("i8"), Some(i8::MIN));
    assert_eq!(metadata.get::<u16>("u16"), Some(u16::MAX));
    assert_eq!(metadata.get::<i16>("i16"), Some(i16::MIN));
    assert_eq!(metadata.get::<i64>("i64"), Some(i64::MIN));
    assert_eq!(metadata.get::<f32>("f32"), Some(0.5));
    assert_eq!(metadata.get::<f64>("f64"), Some(0.25));
    assert_eq!(metadata.get::<bool>("bool"), Some(true));
    assert_eq!(metadata.get::<&str>("string"), Some("text"));
}

#[test]
fn accessors_of_an_empty_header_give_the_defaults() {
    let header = header(&[]);
    let metadata = Metadata::new(&header);
    assert_eq!((metadata.architecture(), metadata.kind()), ("unknown", "unknown"));
    assert_eq!(
        (metadata.file_type(), metadata.chat_template(), metadata.vocabulary_size()),
        (None, None, None)
    );
    assert_eq!((metadata.block_count(), metadata.embedding_length(), metadata.context_length()), (0, 0, 0));
    assert_eq!((metadata.head_count_max(), metadata.head_count_min()), (1, 1));
    assert_eq!((metadata.head_count_kv_max(), metadata.head_count_kv_min()), (1, 1));
    assert_eq!((metadata.head_size_max(), metadata.head_size_k(), metadata.head_size_v()), (0, 0, 0));
    assert!(!metadata.supports_flash_attention());
    assert!(!metadata.requires_ollama_engine());
}

#[test]
fn accessors_of_a_llama_give_its_numbers() {
    let header = llama(&[
        ("general.type", Value::from("model")),
        ("general.file_type", Value::U32(15)),
        ("llama.block_count", Value::U32(32)),
        ("llama.embedding_length", Value::U32(4096)),
        ("llama.context_length", Value::U32(8192)),
        ("llama.attention.head_count", Value::U32(32)),
        ("llama.attention.head_count_kv", Value::U32(8)),
        ("llama.attention.key_length", Value::U32(192)),
        ("tokenizer.chat_template", Value::from("{{ x }}")),
        ("tokenizer.ggml.tokens", Value::from(vec!["a", "b", "c"])),
    ]);
    let metadata = Metadata::new(&header);
    assert_eq!((metadata.kind(), metadata.file_type()), ("model", Some(15)));
    assert_eq!((metadata.block_count(), metadata.embedding_length()), (32, 4096));
    assert_eq!((metadata.context_length(), metadata.vocabulary_size()), (8192, Some(3)));
    assert_eq!((metadata.head_count_max(), metadata.head_count_kv_min()), (32, 8));
    assert_eq!((metadata.head_size_max(), metadata.head_size_k(), metadata.head_size_v()), (128, 192, 128));
    assert_eq!(metadata.chat_template(), Some("{{ x }}"));
}

#[test]
fn file_type_zero_is_unknown() {
    for (value, expected) in [(Value::U32(0), None), (Value::U32(1), Some(1)), (Value::U64(1), None)] {
        let header = llama(&[("general.file_type", value)]);
        assert_eq!(Metadata::new(&header).file_type(), expected);
    }
}

#[test]
fn head_size_without_heads_is_zero() {
    let header =
        llama(&[("llama.embedding_length", Value::U32(64)), ("llama.attention.head_count", Value::U32(0))]);
    assert_eq!(Metadata::new(&header).head_size_max(), 0);
}

#[test]
fn ranges_of_numbers_and_arrays() {
    for (value, expected) in [
        (Value::U32(5), Some((5, 5))),
        (Value::from(vec![8_u32, 0, 4]), Some((0, 8))),
        (Value::from(vec![8_i32, 2]), Some((2, 8))),
        (Value::from(vec![-1_i32, 2]), Some((u32::MAX, 2))),
        (Value::from(Vec::<u32>::new()), None),
        (Value::from(Vec::<i32>::new()), None),
        (Value::from(vec![8_u64]), None),
        (Value::I32(5), None),
    ] {
        let header = llama(&[("llama.x", value.clone())]);
        let range = Metadata::new(&header).range("x").map(|range| (range.min, range.max));
        assert_eq!(range, expected, "{value:?}");
    }
}

#[test]
fn flash_attention_takes_equal_heads_and_no_pooling() {
    let heads =
        [("llama.attention.key_length", Value::U32(64)), ("llama.attention.value_length", Value::U32(64))];
    let pooling = [("llama.pooling_type", Value::U8(0))];
    let other =
        [("llama.attention.key_length", Value::U32(64)), ("llama.attention.value_length", Value::U32(32))];
    let supports = |keys: &[_]| Metadata::new(&llama(keys)).supports_flash_attention();
    assert!(supports(&heads));
    assert!(!supports(&[&heads[..], &pooling].concat()));
    assert!(!supports(&other));
}

#[test]
fn rules_of_ollama_are_known_by_their_date() {
    use OllamaRules::{August2025, August2026};
    for (architecture, quantised, own_engine, flash) in [
        ("llama", [true, true], [false, false], [false, false]),
        ("gemma3", [true, true], [true, true], [false, true]),
        ("gptoss", [false, true], [true, true], [true, true]),
        ("gpt-oss", [false, true], [true, true], [true, true]),
        ("qwen3", [true, true], [false, true], [false, true]),
        ("nomic-bert", [true, true], [false, true], [false, false]),
    ] {
        let header = header(&[("general.architecture", Value::from(architecture))]);
        let metadata = Metadata::new(&header);
        for (rules, place) in [(August2025, 0), (August2026, 1)] {
            let supported = ["", "f16", "q8_0", "q4_0", "q4_1", "F16"]
                .map(|name| metadata.supports_kv_cache_type_by(rules, name));
            let expected = [true, true, quantised[place], quantised[place], false, false];
            assert_eq!(supported, expected, "{architecture} {rules:?}");
            assert_eq!(metadata.requires_ollama_engine_by(rules), own_engine[place], "{architecture}");
            assert_eq!(metadata.uses_flash_attention_by_default(rules), flash[place], "{architecture}");
        }
        assert_eq!(metadata.supports_kv_cache_type("q8_0"), quantised[1], "today's rules");
    }
    let heads = |architecture: &str| {
        let key = |name: &str| format!("{architecture}.attention.{name}");
        let (key, value) = (key("key_length"), key("value_length"));
        let keys = [
            ("general.architecture", Value::from(architecture)),
            (&key, 64_u32.into()),
            (&value, 32_u32.into()),
        ];
        header(&keys)
    };
    for (architecture, supported) in [("qwen35", [false, true]), ("llama", [false, false])] {
        let header = heads(architecture);
        let found =
            [August2025, August2026].map(|rules| Metadata::new(&header).supports_flash_attention_by(rules));
        assert_eq!(found, supported, "{architecture}");
    }
    let quantized = ["", "f16", "bf16", "f32", "q8_0", "q4_0"].map(is_quantized_kv_cache_type);
    assert_eq!(quantized, [false, false, false, false, true, true]);
}

#[test]
fn numbers_per_block_are_those_of_an_array_or_of_all() {
    for (value, expected) in [
        (None, vec![1, 1, 1]),
        (Some(Value::U32(8)), vec![8, 8, 8]),
        (Some(Value::from(vec![8_u32])), vec![8, 8, 8]),
        (Some(Value::from(vec![8_u32, 0])), vec![8, 0, 1]),
        (Some(Value::from(vec![8_i32, 0, 4, 9])), vec![8, 0, 4]),
        (Some(Value::from(vec![-1_i32, 2])), vec![u64::from(u32::MAX), 2, 1]),
        (Some(Value::U64(8)), vec![1, 1, 1]),
        (Some(Value::from(Vec::<u32>::new())), vec![1, 1, 1]),
    ] {
        let count = value.clone().map(|value| ("llama.attention.head_count_kv", value));
        let keys: Vec<_> = count.into_iter().chain([("llama.block_count", Value::U32(3))]).collect();
        let header = llama(&keys);
        assert_eq!(Vec::from_iter(Metadata::new(&header).head_counts_kv()), expected, "{value:?}");
    }
    let header =
        llama(&[("llama.feed_forward_length", Value::U32(9)), ("llama.block_count", Value::U32(u32::MAX))]);
    let metadata = Metadata::new(&header);
    assert_eq!(metadata.feed_forward_lengths().next(), Some(9));
    assert_eq!(metadata.head_counts().nth(1000), Some(1), "no allocation for a claimed number of blocks");
}

#[test]
fn sizes_of_state_space_models_are_read() {
    let header = llama(&[
        ("llama.ssm.conv_kernel", Value::U32(4)),
        ("llama.ssm.inner_size", Value::U32(5120)),
        ("llama.ssm.state_size", Value::U32(16)),
        ("llama.ssm.group_count", Value::U64(1)),
    ]);
    let metadata = Metadata::new(&header);
    let sizes = (metadata.ssm_conv_kernel(), metadata.ssm_inner_size(), metadata.ssm_state_size());
    assert_eq!((sizes, metadata.ssm_group_count()), ((4, 5120, 16), 0));
}

proptest! {
    #[test]
    fn unsigned_ranges_hold_every_element(values in vec(any::<u32>(), 0..20)) {
        let header = llama(&[("llama.x", Value::from(values.clone()))]);
        let metadata = Metadata::new(&header);
        let range = metadata.range("x");
        prop_assert_eq!(range.map(|range| range.min), values.iter().copied().min());
        prop_assert_eq!(range.map(|range| range.max), values.iter().copied().max());
        prop_assert_eq!(metadata.array::<u32>("x").map(Vec::from_iter), Some(values.clone()));
    }

    #[test]
    fn signed_ranges_are_ordered_as_signed(values in vec(any::<i32>(), 1..20)) {
        let header = llama(&[("llama.x", Value::from(values.clone()))]);
        let range = Metadata::new(&header).range("x").unwrap();
        prop_assert_eq!(range.min.cast_signed(), *values.iter().min().unwrap());
        prop_assert_eq!(range.max.cast_signed(), *values.iter().max().unwrap());
    }

    #[test]
    fn numbers_are_read_in_their_own_type_only(number in any::<u32>()) {
        let header = llama(&[("llama.x", Value::U32(number))]);
        let metadata = Metadata::new(&header);
        prop_assert_eq!(metadata.get::<u32>("x"), Some(number));
        prop_assert_eq!(metadata.get::<u64>("x"), None);
        prop_assert_eq!(metadata.get::<i32>("x"), None);
        prop_assert_eq!(metadata.get::<&str>("x"), None);
        prop_assert_eq!(metadata.get::<bool>("x"), None);
    }
}

#[test]
fn heads_of_all_blocks_are_counted_from_the_fewest_to_the_most() {
    let header = llama(&[
        ("llama.attention.head_count", Value::from(vec![8_u32, 32, 16])),
        ("llama.attention.head_count_kv", Value::from(vec![4_u32, 0, 2])),
    ]);
    let metadata = Metadata::new(&header);
    assert_eq!((metadata.head_count_min(), metadata.head_count_max()), (8, 32));
    assert_eq!((metadata.head_count_kv_min(), metadata.head_count_kv_max()), (0, 4));
    let (empty, none) = (llama(&[]), 1);
    assert_eq!(Metadata::new(&empty).head_count_kv_max(), none);
}

#[test]
fn cache_types_that_ollama_supports() {
    let header = llama(&[]);
    let metadata = Metadata::new(&header);
    for (name, is_supported) in
        [("", true), ("f16", true), ("q8_0", true), ("q4_0", true), ("q5_1", false), ("f64", false)]
    {
        assert_eq!(metadata.supports_kv_cache_type(name), is_supported, "{name}");
    }
}
