//! Compares the Ollama basis with `tests/estimates.py`, an independent implementation of the formulas.

use serde::Deserialize;
use serde_json::Value as Json;

use super::*;

#[derive(Deserialize)]
struct Expected {
    name: String,
    basis: String,
    header: ExpectedHeader,
    vision_weights: u64,
    vision_graph: u64,
    weights: u64,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
pub(super) struct ExpectedHeader {
    architecture: String,
    keys: serde_json::Map<String, Json>,
    vocabulary: usize,
    /// The tensors of a block, and how many blocks in a row have them.
    blocks: Vec<(Vec<Tensor>, u64)>,
    others: Vec<Tensor>,
}

/// Name, type and shape.
type Tensor = (String, String, Vec<u64>);

#[derive(Deserialize)]
struct Case {
    context: u64,
    batch: u64,
    parallel: u64,
    cache_type: String,
    /// Bytes, and how many blocks in a row have them.
    kv: Vec<(u64, usize)>,
    partial: u64,
    full: u64,
    /// Memory of a device, the layers that fit, and the bytes of the whole model.
    #[serde(default)]
    boundaries: Vec<(u64, u64, u64)>,
}

fn expected() -> Vec<Expected> {
    serde_json::from_str(include_str!("../expected.json")).unwrap()
}

impl ExpectedHeader {
    pub(super) fn header(&self) -> Header {
        let mut writer = GgufWriter::new();
        writer.metadata("general.architecture", self.architecture.as_str()).unwrap();
        for (key, value) in &self.keys {
            let key = format!("{}.{key}", self.architecture);
            writer.metadata(&key, metadata_value(value)).unwrap();
        }
        let (key, tokens) = vocabulary(self.vocabulary);
        writer.metadata(key, tokens).unwrap();
        let mut add = |name: &str, (_, type_name, shape): &Tensor| {
            writer.tensor(name, GgmlType::from_name(type_name).unwrap(), shape).map(drop).unwrap();
        };
        let blocks = self.blocks.iter().flat_map(|(block, count)| (0..*count).map(move |_| block));
        for (number, block) in blocks.enumerate() {
            block.iter().for_each(|tensor| add(&format!("blk.{number}.{}", tensor.0), tensor));
        }
        self.others.iter().for_each(|tensor| add(&tensor.0, tensor));
        Header::parse(&writer.header().unwrap()).unwrap()
    }
}

fn metadata_value(value: &Json) -> Value {
    let number = |value: &Json| u32::try_from(value.as_u64().unwrap()).unwrap();
    match value {
        Json::Array(values) => {
            // Converters write such arrays as signed numbers.
            Value::from(values.iter().map(|value| number(value).cast_signed()).collect::<Vec<i32>>())
        }
        value => Value::U32(number(value)),
    }
}

impl Case {
    fn settings(&self) -> Settings {
        let cache_type = self.cache_type.parse().unwrap();
        Settings { batch: self.batch, ..settings(self.context, self.parallel, cache_type) }
    }
}

#[test]
fn every_number_equals_the_independent_calculation() {
    for Expected { name, basis, header, vision_weights, vision_graph, weights, cases } in expected() {
        let header = header.header();
        let models = set(&header);
        assert_eq!(cases.len(), 12, "{name}");
        for case in cases {
            let estimate = models.estimate(&case.settings(), Basis::Ollama).unwrap();
            let context = format!("{name}, {:?}", estimate.settings);
            let kv: Vec<u64> = case.kv.iter().flat_map(|(bytes, count)| vec![*bytes; *count]).collect();
            assert_eq!(estimate.kv_bytes, kv, "{context}");
            assert_eq!(estimate.kv_total_bytes, kv.iter().sum::<u64>(), "{context}");
            assert_eq!(estimate.graph_partial_bytes, case.partial, "{context}");
            assert_eq!(estimate.graph_full_bytes, case.full, "{context}");
            assert_eq!((&estimate.basis, &estimate.graph_basis), (&basis, &basis), "{context}");
            assert_eq!(estimate.weights_bytes, weights, "{context}");
            let vision = Vision { weights_bytes: vision_weights, graph_bytes: vision_graph };
            assert_eq!(estimate.vision, vision, "{context}");
            assert_eq!(estimate.missing_keys, [""; 0], "{context}");
        }
    }
}

#[test]
fn layers_that_fit_are_right_at_every_boundary_byte() {
    let mut rows = 0;
    for Expected { name, header, cases, .. } in expected() {
        let header = header.header();
        let models = set(&header);
        for case in cases {
            let estimate = models.estimate(&case.settings(), Basis::Ollama).unwrap();
            for (vram, layers, total) in &case.boundaries {
                let placement = estimate.place(&[*vram]);
                assert_eq!((placement.layers, placement.total_bytes), (*layers, *total), "{name}, {vram}");
                let all = placement.layers == placement.layers_of && placement.others_fit;
                assert_eq!(placement.fits(), all, "{name}, {vram}");
                assert!(placement.devices[0].used_bytes < *vram, "{name}, {vram}");
                rows += 1;
            }
            let required = estimate.required_bytes();
            assert!(estimate.place(&[required]).fits(), "{name}");
            assert!(!estimate.place(&[required - 1]).fits(), "{name}");
        }
    }
    // At the boundary of every block and of the output: one byte less, exactly, and one byte more. Two cases per model.
    assert!(rows > 4000, "{rows}");
}

#[test]
fn largest_context_fits_and_the_next_does_not() {
    for Expected { name, header, .. } in expected() {
        let header = header.header();
        let models = set(&header);
        for devices in [&[24 << 30][..], &[1 << 34, 1 << 34, 1 << 35], &[1 << 40]] {
            let settings = Settings { parallel: 2, ..Settings::default() };
            let Some(largest) = models.largest_context(&settings, Basis::Ollama, devices).unwrap() else {
                let estimate = models.estimate(&Settings { context: 1, ..settings }, Basis::Ollama).unwrap();
                assert!(!estimate.place(devices).fits(), "{name}");
                continue;
            };
            let fits = |context| {
                let estimate = models.estimate(&Settings { context, ..settings }, Basis::Ollama).unwrap();
                estimate.place(devices).fits()
            };
            assert!(fits(largest) && !fits(largest + 1), "{name}: {largest}");
        }
    }
}

#[test]
fn cache_types_that_ollama_does_not_know_are_refused() {
    let header = header("llama", &[("block_count", Value::U32(1))], &[]);
    for (cache_type_k, cache_type_v) in [
        (CacheType::F16, CacheType::Q8_0),
        (CacheType::F32, CacheType::F32),
        (CacheType::Q4_1, CacheType::Q4_1),
    ] {
        let settings = Settings { cache_type_k, cache_type_v, ..Settings::default() };
        let error = set(&header).estimate(&settings, Basis::Ollama).unwrap_err();
        assert_eq!(error, EstimateError::CacheTypes { cache_type_k, cache_type_v });
        assert!(!settings.is_known_to_ollama());
    }
}

#[test]
fn batch_is_at_most_the_context_of_a_sequence() {
    let keys = [("block_count", Value::U32(1)), ("embedding_length", Value::U32(64)), vocabulary(8)];
    let header = header("gemma", &keys, &[]);
    let models = set(&header);
    let graph = |context, batch| {
        let settings = Settings { context, batch, parallel: 4, ..Settings::default() };
        models.estimate(&settings, Basis::Ollama).unwrap().graph_partial_bytes
    };
    assert_eq!(graph(100, 512), graph(100, 100));
    assert!(graph(512, 512) > graph(512, 100));
}

/// With a short context, the weights and the result of the output layer take most of the memory.
#[test]
fn partial_graph_of_a_short_context_has_the_output() {
    let keys = [
        ("block_count", Value::U32(1)),
        ("embedding_length", Value::U32(64)),
        ("attention.head_count", Value::U32(1)),
        vocabulary(1000),
    ];
    let partial = |architecture: &str| {
        let header = header(architecture, &keys, &[]);
        let models = set(&header);
        models.estimate(&settings(8, 1, CacheType::F16), Basis::Ollama).unwrap().graph_partial_bytes
    };
    // A batch of 8 tokens, each with 2 * 64 + 1000 numbers of 4 bytes.
    let numbers = 4 * 8 * (2 * 64 + 1000);
    assert_eq!(partial("stablelm"), numbers);
    assert_eq!(partial("phi2"), numbers + 64 * 1000 * 105 / 128);
}

#[test]
fn missing_keys_are_named_and_defaults_hold() {
    let header = header("llama", &[("block_count", Value::U32(1))], &[]);
    let models = set(&header);
    let estimate = models.estimate(&Settings::default(), Basis::Ollama).unwrap();
    let missing = [
        "llama.embedding_length",
        "llama.attention.head_count",
        "llama.attention.head_count_kv",
        "tokenizer.ggml.tokens",
    ];
    assert_eq!(estimate.missing_keys, missing);
    // With E = V = 0 and H = 1: 4 * 512 * (1 + 4096 * 2).
    assert_eq!(estimate.graph_full_bytes, 2048 * 8193);
    assert_eq!((estimate.kv_total_bytes, estimate.place(&[1 << 30]).layers_of), (0, 1));
}

#[test]
fn files_without_a_rule_have_an_estimate_of_their_weights_that_never_fits() {
    let of_type = |kind: &str| {
        let mut writer = GgufWriter::new();
        writer.metadata("general.architecture", "llama").unwrap();
        writer.metadata("general.type", kind).unwrap();
        writer.metadata("llama.block_count", 1_u32).unwrap();
        writer.tensor("blk.0.attn_q.weight.lora_a", GgmlType::F32, &[64]).unwrap();
        Header::parse(&writer.header().unwrap()).unwrap()
    };
    let of_no_architecture = || {
        let mut writer = GgufWriter::new();
        writer.tensor("blk.0.attn_q.weight", GgmlType::F32, &[64]).unwrap();
        Header::parse(&writer.header().unwrap()).unwrap()
    };
    let tensor: &[(&str, GgmlType, &[u64])] = &[("double_blocks.0.img_mod.lin.weight", GgmlType::F32, &[64])];
    for (header, basis) in [
        (header("flux", &[], tensor), "weights only: no rule for `flux`"),
        (
            header("llama", &[], &[("new.weight", GgmlType::F32, &[64])]),
            "weights only: `llama.block_count` is missing",
        ),
        (header("llama", &[], tensor), "weights only: no rule for `llama` of the kind `diffusion`"),
        (of_no_architecture(), "weights only: the file names no architecture"),
        (of_type("adapter"), "weights only: no rule for `llama` of the kind `adapter`"),
        (of_type("imatrix"), "weights only: no rule for `llama` of the kind `imatrix`"),
    ] {
        let models = set(&header);
        for which in [Basis::Ollama, Basis::LlamaCpp] {
            let estimate = models.estimate(&Settings::default(), which).unwrap();
            assert_eq!((estimate.basis.as_str(), estimate.has_rule), (basis, false));
            assert_eq!((estimate.weights_bytes, estimate.required_bytes()), (256, 256), "{basis}");
            assert!(!estimate.place(&[1 << 50]).fits(), "{basis}");
            assert_eq!(models.largest_context(&Settings::default(), which, &[1 << 50]), Ok(None), "{basis}");
        }
    }
    // What is loaded beside it counts too.
    let (main, projector) =
        (header("flux", &[], tensor), header("clip", &[], &[("v.patch_embd.weight", GgmlType::F32, &[128])]));
    let projector = Some(Model::new(&projector, []).unwrap());
    let models = ModelSet { projector, ..ModelSet::from(Model::new(&main, []).unwrap()) };
    let estimate = models.estimate(&Settings::default(), Basis::Ollama).unwrap();
    assert_eq!((estimate.has_rule, estimate.required_bytes()), (false, 256 + 512));
    // llama.cpp does not know the architecture; Ollama's fallback applies to any.
    let tensor: &[(&str, GgmlType, &[u64])] = &[("blk.0.attn_q.weight", GgmlType::F32, &[64])];
    let header = header("unheard-of", &[("block_count", Value::U32(1))], tensor);
    let basis = |which| set(&header).estimate(&Settings::default(), which).unwrap().basis;
    assert_eq!(basis(Basis::Ollama), "ollama-2025-08:fallback");
    assert_eq!(basis(Basis::LlamaCpp), "weights only: no rule for `unheard-of`");
}

/// The keys that every model has.
const SIZES: [(&str, Value); 2] =
    [("embedding_length", Value::U32(64)), ("attention.head_count", Value::U32(1))];

#[test]
fn blocks_are_counted_if_the_file_does_not_say_how_many_it_has() {
    let shape: &[u64] = &[64];
    let names = ["blk.0.attn_q.weight", "blk.1.attn_q.weight", "blk.3.attn_q.weight"];
    let tensors: Vec<_> = names.iter().map(|name| (*name, GgmlType::F32, shape)).collect();
    let header = header("llama", &SIZES, &tensors);
    let models = set(&header);
    for basis in [Basis::Ollama, Basis::LlamaCpp] {
        let estimate = models.estimate(&Settings::default(), basis).unwrap();
        assert_eq!((estimate.kv_bytes.len(), estimate.has_rule), (2, true), "{basis:?}");
        assert_eq!(estimate.other_weights_bytes, 256, "the block after the missing one");
    }
}

/// Tensors that no formula mentions count too: blocks of encoders and decoders, and tensors outside of blocks.
#[test]
fn every_tensor_is_in_one_part_of_the_estimate() {
    let shape: &[u64] = &[1 << 18];
    let names = [
        "token_embd.weight",
        "enc.blk.0.attn_q.weight",
        "dec.blk.0.attn_q.weight",
        "blk.7.attn_q.weight",
        "enc.output_norm.weight",
        "output.weight",
        "mm.0.weight",
        "v.blk.0.attn_q.weight",
    ];
    let tensors: Vec<_> = names.iter().map(|name| (*name, GgmlType::F32, shape)).collect();
    let keys = [&[("block_count", Value::U32(1))], &SIZES[..]].concat();
    let header = header("t5", &keys, &tensors);
    let models = set(&header);
    let settings = Settings { context: 0, ..Settings::default() };
    for basis in [Basis::Ollama, Basis::LlamaCpp] {
        let estimate = models.estimate(&settings, basis).unwrap();
        // The embedding of 8 MiB stays in the machine's memory; the only block is 0, so blk.7 is outside of the blocks.
        assert_eq!((estimate.weights_bytes, estimate.input_weights_bytes), (8 << 20, 1 << 20));
        assert_eq!(estimate.other_weights_bytes, 4 << 20);
        assert!(!estimate.place(&[(7 << 20) - 1]).fits());
        let placed = estimate.place(&[1 << 30]);
        assert!(placed.fits() && placed.devices[0].used_bytes >= 7 << 20);
    }
}

#[test]
fn device_needs_the_larger_graph_and_two_layers_before_it_gets_one() {
    let header = four_blocks();
    let models = set(&header);
    let estimate = models.estimate(&settings(512, 1, CacheType::F16), Basis::Ollama).unwrap();
    let block = (4 << 20) + estimate.kv_bytes[0];
    let graph = estimate.graph_partial_bytes.max(estimate.graph_full_bytes);
    let least = graph + 2 * block;
    let layers = |devices: &[u64]| {
        estimate.place(devices).devices.iter().map(|device| device.layers).collect::<Vec<_>>()
    };
    assert_eq!(layers(&[least - 1]), [0]);
    assert_eq!(layers(&[least + 1]), [1]);
    // Several devices hold partial graphs.
    let least_of_two = estimate.graph_partial_bytes + 2 * block;
    assert_eq!(layers(&[least_of_two - 1, 1 << 30]), [0, 5]);
    assert_eq!(layers(&[least_of_two + 1, 1 << 30]), [1, 4]);
    let nothing = estimate.place(&[least - 1]);
    assert_eq!(nothing.total_bytes, 4 * block + (4 << 20), "without a graph and a layer kept free");
}

#[test]
fn values_of_another_integer_type_are_missing() {
    let keys = [("block_count", Value::U64(2)), ("attention.head_count", Value::from(Vec::<u32>::new()))];
    let header = header("llama", &keys, &[]);
    let models = set(&header);
    let estimate = models.estimate(&Settings::default(), Basis::Ollama).unwrap();
    assert!(estimate.kv_bytes.is_empty());
    for key in ["llama.block_count", "llama.attention.head_count"] {
        assert!(estimate.missing_keys.iter().any(|missing| missing == key), "{key}");
    }
}

#[test]
fn separate_experts_without_heads_take_one_head() {
    let gate: (&str, GgmlType, &[u64]) = ("blk.0.ffn_gate.0.weight", GgmlType::F32, &[4, 8]);
    let keys = |heads| [("embedding_length", Value::U32(64)), ("attention.head_count", Value::U32(heads))];
    let (none, one) = (header("llama", &keys(0), &[gate]), header("llama", &keys(1), &[gate]));
    let (none, one) = (set(&none), set(&one));
    let none = none.estimate(&Settings::default(), Basis::Ollama).unwrap();
    let one = one.estimate(&Settings::default(), Basis::Ollama).unwrap();
    assert_eq!(none.graph_partial_bytes, one.graph_partial_bytes);
    assert!(none.missing_keys.contains(&"llama.attention.head_count".to_owned()));
    assert!(!one.missing_keys.contains(&"llama.attention.head_count".to_owned()));
}

#[test]
fn vision_without_a_patch_size_counts_its_weights_only() {
    let keys = [("vision.block_count", Value::U32(1)), ("vision.image_size", Value::U32(224))];
    let header = header("gemma3", &keys, &[("v.blk.0.attn_q.weight", GgmlType::F32, &[8, 8])]);
    let models = set(&header);
    let estimate = models.estimate(&Settings::default(), Basis::Ollama).unwrap();
    assert_eq!(estimate.vision, Vision { weights_bytes: 256, graph_bytes: 0 });
    assert!(estimate.missing_keys.contains(&"gemma3.vision.patch_size".to_owned()));
}

/// A llama with four equal blocks.
fn four_blocks() -> Header {
    let blocks: Vec<String> = (0..4).map(|block| format!("blk.{block}.attn_q.weight")).collect();
    let shape: &[u64] = &[1024, 1024];
    let mut tensors: Vec<_> = blocks.iter().map(|name| (name.as_str(), GgmlType::F32, shape)).collect();
    tensors.push(("output.weight", GgmlType::F32, shape));
    let keys = [("block_count", Value::U32(4)), ("embedding_length", Value::U32(64)), vocabulary(16)];
    header("llama", &keys, &tensors)
}

#[test]
fn several_devices_take_blocks_in_turn_and_a_partial_graph_each() {
    let header = four_blocks();
    let models = set(&header);
    let estimate = models.estimate(&settings(512, 1, CacheType::F16), Basis::Ollama).unwrap();
    let block = (4 << 20) + estimate.kv_bytes[0];
    let placement = estimate.place(&[1 << 30, 1 << 30]);
    assert_eq!(placement.devices.iter().map(|device| device.layers).collect::<Vec<_>>(), [3, 2]);
    assert!(placement.fits());
    let second = placement.devices[1].used_bytes;
    assert_eq!(second, 3 * block + estimate.graph_partial_bytes);
    let total = placement.devices.iter().map(|device| device.used_bytes).sum::<u64>();
    assert_eq!(placement.total_bytes, total);
}

#[test]
fn device_without_room_leaves_its_turns_to_the_others() {
    let header = four_blocks();
    let models = set(&header);
    let estimate = models.estimate(&settings(512, 1, CacheType::F16), Basis::Ollama).unwrap();
    let placement = estimate.place(&[1, 1 << 30, 0]);
    assert_eq!(placement.devices.iter().map(|device| device.layers).collect::<Vec<_>>(), [0, 5, 0]);
    assert_eq!(placement.devices[0].used_bytes, 0);
    let nothing = estimate.place(&[1, 2]);
    assert_eq!((nothing.layers, nothing.layers_of, nothing.fits()), (0, 5, false));
    assert!(nothing.total_bytes > 5 * (4 << 20));
    assert_eq!(estimate.place(&[]).layers, 0);
}

#[test]
fn projector_and_draft_are_on_the_first_device_with_room() {
    let header = four_blocks();
    let weights: &[u64] = &[1 << 20, 4];
    let projector = super::header("clip", &[], &[("v.patch_embd.weight", GgmlType::F32, weights)]);
    let model = || Model::new(&header, []).unwrap();
    let projector = Model::new(&projector, []).unwrap();
    let models =
        ModelSet { model: model(), projector: Some(projector), draft: Some(model()), adapters: Vec::new() };
    let settings = settings(512, 1, CacheType::F16);
    let estimate = models.estimate(&settings, Basis::Ollama).unwrap();
    let projector = estimate.projector.clone().unwrap();
    assert_eq!((projector.basis.as_str(), projector.weights_bytes), ("ollama-2025-08:projector", 16 << 20));
    let draft = estimate.draft.as_deref().unwrap();
    assert_eq!((draft.basis.as_str(), draft.weights_bytes), ("ollama-2025-08:llama", 20 << 20));
    let companions = (16 << 20) + (20 << 20) + draft.kv_total_bytes + draft.graph_full_bytes;
    let alone = ModelSet::from(model());
    let alone = alone.estimate(&settings, Basis::Ollama).unwrap();
    assert_eq!(estimate.required_bytes(), alone.required_bytes() + companions);
    let placement = estimate.place(&[estimate.required_bytes()]);
    assert!(placement.fits());
    // The layers alone would fit on the second device.
    let placement = estimate.place(&[1, alone.required_bytes()]);
    assert!(!placement.fits());
    assert!(!placement.companions_fit || placement.layers < placement.layers_of);
}

#[test]
fn layers_are_listed_in_numeric_order_and_shards_are_added() {
    let name = |block: u64| format!("blk.{block}.x.weight");
    let shard = |blocks: std::ops::Range<u64>| {
        let names: Vec<String> = blocks.map(name).collect();
        let tensors: Vec<_> = names.iter().map(|name| (name.as_str(), GgmlType::F32, &[4][..])).collect();
        header("llama", &[("block_count", Value::U32(12))], &tensors)
    };
    let (first, second) = (shard(0..6), shard(6..12));
    let models = ModelSet::from(Model::new(&first, [&second]).unwrap());
    let estimate = models.estimate(&Settings::default(), Basis::Ollama).unwrap();
    let layers: Vec<&str> = estimate.weights.iter().map(|layer| layer.layer.as_str()).collect();
    assert_eq!(layers, (0..12).map(|block| format!("blk.{block}")).collect::<Vec<_>>());
    assert_eq!(estimate.weights_bytes, 12 * 16);
}
