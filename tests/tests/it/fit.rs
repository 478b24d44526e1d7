//! `fit`: the memory that a model needs, and how much of it fits.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use blobd_model::estimate::{Basis, Model, ModelSet, Settings};
use blobd_store_format::gguf::{GgmlType, Header, Value};
use blobd_tests::command::{Blobd, Run, run};
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::{Dimensions, ModelFile};
use blobd_tests::registry::FakeRegistry;
use blobd_tests::store_dir::snapshot;
use blobd_tests::temp_dirs::tmpfs_directory;
use serde_json::{Value as Json, json};

const MODEL: &str = "application/vnd.ollama.image.model";
const PROJECTOR: &str = "application/vnd.ollama.image.projector";
const DRAFT: &str = "application/vnd.ollama.image.draft";
const TEMPLATE: &str = "application/vnd.ollama.image.template";

/// Files and a store that is opened by the command itself.
struct Desk {
    folder: tempfile::TempDir,
}

impl Desk {
    fn new() -> Self {
        Self { folder: tmpfs_directory() }
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }

    /// A file of only a header, which is all that `fit` reads.
    fn header(&self, name: &str, model: &ModelFile) -> PathBuf {
        let path = self.path().join(name);
        fs::write(&path, model.header().unwrap()).unwrap();
        path
    }

    fn fit(&self, model: &Path, options: &str) -> Run {
        let store = Blobd::at_root(&self.path().join("store"));
        let words = ["fit", model.to_str().unwrap()].into_iter().chain(options.split_whitespace());
        store.run(words)
    }
}

/// The keys without which llama.cpp does not load a model of this width.
fn with_keys(model: ModelFile, blocks: u32, width: u32) -> ModelFile {
    let numbers = [
        ("block_count", blocks),
        ("embedding_length", width),
        ("attention.head_count", 4),
        ("expert_used_count", 2),
    ];
    numbers.into_iter().fold(model, |model, (key, number)| model.with(&format!("llama.{key}"), number))
}

fn llama3(desk: &Desk) -> PathBuf {
    desk.header("llama3.gguf", &ModelFile::llama("Llama 3 8B", Dimensions::LLAMA3_8B))
}

#[test]
fn numbers_are_those_of_the_formulas() {
    let desk = Desk::new();
    let answer = desk.fit(&llama3(&desk), "--basis ollama --ctx 4096 --json").succeeds().json();
    assert_eq!(answer["basis"], "ollama-2025-08:llama");
    let settings = ["context", "batch", "parallel", "cache_type_k", "cache_type_v"].map(|key| &answer[key]);
    assert_eq!(settings, [&json!(4096), &json!(512), &json!(1), &json!("f16"), &json!("f16")]);
    // 4096 tokens of 8 heads of 128 keys and 128 values of 2 bytes.
    assert_eq!(answer["kv_bytes"], json!(vec![16_777_216; 32]));
    assert_eq!(answer["kv_total_bytes"], 536_870_912);
    // 4 * 512 * (1 + 4 * 4096 + 4096 * (1 + 32)).
    assert_eq!(answer["graph_full_bytes"], 310_380_544);
    // 4 * 512 * 4096 + 4 * 512 * (4096 + 128256) + 4096 * 128256 * 105 / 128.
    assert_eq!(answer["graph_partial_bytes"], 710_385_664);
    assert_eq!(answer["context_length"], 8192);
    let layers: Vec<&str> =
        answer["weights"].as_array().unwrap().iter().map(|row| row["layer"].as_str().unwrap()).collect();
    assert_eq!((layers.len(), layers[2], layers[10]), (35, "blk.2", "blk.10"));
    let weights: u64 =
        answer["weights"].as_array().unwrap().iter().map(|row| row["bytes"].as_u64().unwrap()).sum();
    assert_eq!(answer["weights_bytes"], weights);
    let header = answer["header_bytes"].as_u64().unwrap();
    assert_eq!(answer["file_bytes"], weights + header, "every byte of the file is in a row");
}

#[test]
fn exit_code_says_whether_everything_fits_to_the_byte() {
    let desk = Desk::new();
    let path = llama3(&desk);
    let required = desk.fit(&path, "--json").succeeds().json()["required_bytes"].as_u64().unwrap();
    let enough = desk.fit(&path, &format!("--json --vram {required}B")).succeeds().json();
    assert_eq!(
        (&enough["fits"], &enough["layers"], &enough["layers_of"]),
        (&json!(true), &json!(33), &json!(33))
    );
    assert_eq!(enough["vram_bytes"], required);
    let less = desk.fit(&path, &format!("--json --vram {}B", required - 1)).exits_with(1).json();
    assert_eq!((&less["fits"], &less["layers"]), (&json!(false), &json!(32)));
    let text = desk.fit(&path, "--vram 3GiB").exits_with(1).text();
    assert!(text.contains("fits             no, "), "{text}");
}

#[test]
fn largest_context_fits_and_the_next_does_not() {
    let desk = Desk::new();
    let model =
        ModelFile::llama("Llama 3 8B", Dimensions::LLAMA3_8B).with("llama.context_length", 1_u32 << 20);
    let path = desk.header("long.gguf", &model);
    for basis in ["ollama", "llama.cpp"] {
        let options = format!("--json --basis {basis} --vram 8GiB");
        let largest = desk.fit(&path, &options).succeeds().json()["max_context"].as_u64().unwrap();
        assert!(largest > 4096, "{largest}");
        desk.fit(&path, &format!("{options} --ctx {largest}")).succeeds();
        desk.fit(&path, &format!("{options} --ctx {}", largest + 1)).exits_with(1);
    }
    let short = desk.fit(&llama3(&desk), "--json --vram 1TiB").succeeds().json();
    assert_eq!(short["max_context"], 8192, "at most the trained one");
    let text = desk.fit(&llama3(&desk), "--vram 1TiB").succeeds().text();
    assert!(text.contains("largest context  8192, as trained\n"), "{text}");
    let text = desk.fit(&llama3(&desk), "--vram 1TiB --ctx 100000").succeeds().text();
    assert!(text.contains("largest context  8192, as trained, or more\n"), "{text}");
    let none = desk.fit(&path, "--json --vram 1MiB").exits_with(1).json();
    assert_eq!((&none["max_context"], &none["layers"]), (&json!(0), &json!(0)));
}

#[test]
fn several_devices_are_listed() {
    let desk = Desk::new();
    let path = llama3(&desk);
    let answer =
        desk.fit(&path, "--basis ollama --ctx 4096 --json --vram 4GiB --vram 6GiB").succeeds().json();
    assert_eq!(answer["vram_bytes"], 10_u64 << 30);
    let layers =
        answer["devices"].as_array().unwrap().iter().map(|device| device["layers"].as_u64().unwrap());
    assert_eq!(layers.collect::<Vec<_>>(), [17, 16]);
    let answer = desk.fit(&path, "--json --vram 4GiB --vram 6GiB").succeeds().json();
    let layers: Vec<u64> = answer["devices"]
        .as_array()
        .unwrap()
        .iter()
        .map(|device| device["layers"].as_u64().unwrap())
        .collect();
    assert_eq!(layers.iter().sum::<u64>(), 33);
    let split = format!("{},{}", layers[0], layers[1]);
    assert_eq!(answer["options"], json!(["-c", "8192", "-ngl", "33", "-ts", split]));
    let text = desk.fit(&path, "--vram 4GiB --vram 6GiB --layers").succeeds().text();
    assert!(text.contains("DEVICE    MEMORY  LAYERS      USED\n0       4.00 GiB"), "{text}");
    assert!(text.contains("largest context  "), "{text}");
    assert!(text.contains("\nblk.31 "), "{text}");
}

#[test]
fn rows_say_where_the_layers_are() {
    let desk = Desk::new();
    let path = llama3(&desk);
    for (options, code) in
        [("--vram 1MiB", 1), ("--vram 3GiB", 1), ("--vram 1TiB", 0), ("--vram 3GiB --vram 4GiB", 0)]
    {
        let answer = desk.fit(&path, &format!("{options} --json")).exits_with(code).json();
        let rows = answer["weights"].as_array().unwrap();
        let is_layer = |row: &&Json| row["layer"] != "output_norm" && row["place"] == "device";
        assert_eq!(answer["layers"], rows.iter().filter(is_layer).count(), "{options}");
        for (number, device) in answer["devices"].as_array().unwrap().iter().enumerate() {
            let here = rows.iter().filter(|row| is_layer(row) && row["device"] == number);
            assert_eq!(device["layers"], here.count(), "{options}");
        }
    }
    let small = desk.fit(&path, "--vram 1MiB --layers").exits_with(1).text();
    let places = |text: &str, place: &str| text.lines().filter(|line| line.ends_with(place)).count();
    assert_eq!((places(&small, "  memory"), places(&small, "  device")), (35, 0), "{small}");
    let several = desk.fit(&path, "--vram 3GiB --vram 4GiB --layers").succeeds().text();
    assert!(places(&several, "  device 0") > 0 && places(&several, "  device 1") > 0, "{several}");
}

#[test]
fn basis_is_llama_cpp_unless_another_is_named_or_only_ollama_has_a_formula() {
    let desk = Desk::new();
    let path = llama3(&desk);
    let basis = |options: &str| {
        let answer = desk.fit(&path, &format!("{options} --ctx 4096 --json")).succeeds().json();
        assert_eq!(answer["basis"], answer["graph_basis"]);
        (answer["basis"].clone(), answer["kv_total_bytes"].as_u64().unwrap())
    };
    let llama_cpp = json!("llama.cpp-2026-10:llama");
    let elements = 536_870_912 / 2;
    assert_eq!(basis(""), (llama_cpp.clone(), elements * 2));
    assert_eq!(basis("--cache-type-k q8_0"), (llama_cpp, elements / 2 * 34 / 32 + elements));
    assert_eq!(
        basis("--basis ollama --cache-type-k q8_0 --cache-type-v q8_0"),
        (json!("ollama-2025-08:llama"), elements)
    );
    let mut converted =
        ModelFile::empty().with("general.architecture", "gptoss").with("gptoss.block_count", 1_u32);
    converted.add_noise(1, "blk.0.attn_q.weight", GgmlType::F16, &[64, 64]);
    let answer = desk.fit(&desk.header("gptoss.gguf", &converted), "--json").succeeds().json();
    assert_eq!(answer["basis"], "ollama-2025-08:gptoss", "llama.cpp does not know this name");
    let refused = desk.fit(&path, "--basis ollama --cache-type-k q5_1").exits_with(2);
    assert!(refused.stderr.contains("cache types q5_1 and f16"), "{}", refused.stderr);
    desk.fit(&path, "--cache-type-k q2_k").exits_with(2);
    desk.fit(&path, "--vram much").exits_with(2);
}

#[test]
fn architecture_that_llama_cpp_does_not_know_has_no_rule_and_ollamas_fallback_if_that_is_named() {
    let desk = Desk::new();
    let model = ModelFile::dense(1).with("general.architecture", "news").with("news.block_count", 2_u32);
    let path = desk.header("news.gguf", &model);
    let answer = desk.fit(&path, "--json").succeeds().json();
    assert_eq!(
        (&answer["basis"], &answer["fits"]),
        (&json!("weights only: no rule for `news`"), &json!(false))
    );
    let answer = desk.fit(&path, "--basis ollama --json").succeeds().json();
    assert_eq!(answer["basis"], "ollama-2025-08:fallback");
    let text = desk.fit(&path, "--basis ollama").succeeds().text();
    assert!(text.contains("missing") && text.contains("news.embedding_length"), "{text}");
}

#[test]
fn stored_model_has_the_numbers_of_its_file() {
    let daemon = TestDaemon::start();
    let model = with_keys(ModelFile::stacked_experts(1, 4), 1, 32);
    let path = model.write_to(daemon.scratch(), "moe-F16.gguf");
    daemon.command().run(["import".as_ref(), path.as_os_str()]).succeeds();
    let of = |blobd: Blobd, model: &str| -> Json {
        let mut answer = blobd.run(["fit", model, "--vram", "1GiB", "--json"]).succeeds().json();
        let removed = ["name", "digest"].map(|key| answer.as_object_mut().unwrap().remove(key));
        assert!(removed.iter().all(Option::is_some));
        answer
    };
    let in_file = of(daemon.command(), path.to_str().unwrap());
    assert_eq!(of(daemon.command(), "moe:F16"), in_file);
    assert_eq!(of(daemon.embedded(), "moe:F16"), in_file);
    assert!(in_file["weights_bytes"].as_u64().unwrap() > 0);
    daemon.command().line("fit nobody:1 --stored").exits_with(3);
}

#[test]
fn only_the_header_of_a_model_that_is_not_pulled_is_fetched_and_nothing_is_stored() {
    let registry = FakeRegistry::start().unwrap();
    let model = ModelFile::dense_of(1, 4, 1024);
    let file = model.bytes();
    registry.add_model("me/big:1", b"{}", &[(MODEL, &file)]).unwrap();
    let daemon = TestDaemon::start();
    let files =
        || ["blobs", "recipes", "manifests", "staging"].map(|part| snapshot(&daemon.root().join(part)));
    let before = files();
    let name = registry.name("me/big:1");
    let answer = daemon.command().run(["fit", &name, "--json"]).succeeds().json();
    let header = model.header().unwrap().len() as u64;
    let served = registry.bytes_served();
    assert!(served <= header + (1 << 20) && served < file.len() as u64, "{served} bytes served");
    assert_eq!(files(), before);
    assert_eq!(answer["weights_bytes"], model.tensor_bytes().len());
}

#[test]
fn shards_are_one_model() {
    let desk = Desk::new();
    let whole = ModelFile::llama("Llama 3 8B", Dimensions::LLAMA3_8B);
    let (mut first, mut second) = (whole.clone(), ModelFile::empty());
    second.tensors = first.tensors.split_off(100);
    let path = desk.header("shards-00001-of-00002.gguf", &first);
    desk.header("shards-00002-of-00002.gguf", &second);
    let expected = desk.fit(&desk.header("whole.gguf", &whole), "--json").succeeds().json();
    let found = desk.fit(&path, "--json").succeeds().json();
    for key in ["weights", "weights_bytes", "kv_bytes", "graph_full_bytes", "required_bytes"] {
        assert_eq!(found[key], expected[key], "{key}");
    }
}

#[test]
fn projector_and_draft_model_of_a_manifest_have_bases_of_their_own() {
    let registry = FakeRegistry::start().unwrap();
    let model = with_keys(ModelFile::dense_of(1, 4, 256), 4, 256);
    let draft = with_keys(ModelFile::dense(2), 4, 32);
    let mut projector = ModelFile::empty().with("general.architecture", "clip");
    projector.add_noise(3, "v.patch_embd.weight", GgmlType::F32, &[1024, 64]);
    let files = [model.bytes(), projector.bytes(), draft.bytes()];
    let layers = [(MODEL, &files[0][..]), (PROJECTOR, &files[1]), (DRAFT, &files[2])];
    registry.add_model("me/eyes:1", b"{}", &layers).unwrap();
    let daemon = TestDaemon::start();
    let name = registry.name("me/eyes:1");
    daemon.command().run(["pull", &name]).succeeds();
    let answer = daemon.command().run(["fit", &name, "--json"]).succeeds().json();
    let projector = |basis: &str| json!({"basis": basis, "weights_bytes": 1024 * 64 * 4});
    assert_eq!(answer["projector"], projector("weights only: no rule for the graph of a projector"));
    let notes = answer["notes"].as_array().unwrap();
    assert!(notes.contains(&json!("the compute buffer of the projector is not counted")), "{notes:?}");
    let by_ollama = daemon.command().run(["fit", &name, "--json", "--basis", "ollama"]).succeeds().json();
    assert_eq!(by_ollama["projector"], projector("ollama-2025-08:projector"));
    assert_eq!(answer["draft"]["basis"], "llama.cpp-2026-10:llama");
    assert_eq!(answer["draft"]["weights_bytes"], draft.tensor_bytes().len());
    let alone = Desk::new();
    let alone = alone.fit(&alone.header("alone.gguf", &model), "--json").succeeds().json();
    assert!(answer["required_bytes"].as_u64() > alone["required_bytes"].as_u64());
    let text = daemon.command().run(["fit", &name]).succeeds().text();
    assert!(
        text.contains("projector        256 KiB") && text.contains("draft model      weights "),
        "{text}"
    );
}

#[test]
fn model_without_a_file_with_tensors_is_refused() {
    let registry = FakeRegistry::start().unwrap();
    registry.add_model("me/text:1", b"{}", &[(TEMPLATE, b"{{ .Prompt }}")]).unwrap();
    let daemon = TestDaemon::start();
    let run = daemon.command().run(["fit", &registry.name("me/text:1")]).exits_with(1);
    assert!(run.stderr.contains("expected files of GGUF or safetensors"), "{}", run.stderr);
}

#[test]
fn extreme_settings_are_answered_or_refused_by_name() {
    let desk = Desk::new();
    let path = llama3(&desk);
    let refused = desk.fit(&path, "--ctx 9223372036854775808").exits_with(2);
    assert!(refused.stderr.contains("more than 2^64 - 1 bytes"), "{}", refused.stderr);
    for zero in ["--batch 0", "--parallel 0"] {
        let refused = desk.fit(&path, zero).exits_with(2);
        assert!(refused.stderr.contains(zero.split(' ').next().unwrap()), "{}", refused.stderr);
    }
    desk.fit(&path, "--vram 0").exits_with(1);
    let huge = ModelFile::empty().with("llama.block_count", u32::MAX);
    let refused = desk.fit(&desk.header("huge.gguf", &huge), "").exits_with(1);
    assert!(refused.stderr.contains("expected at most 4096, found 4294967295"), "{}", refused.stderr);
}

#[test]
fn extreme_settings_take_less_than_100_milliseconds() {
    let keys = ["embedding_length", "attention.head_count", "attention.head_count_kv"];
    let model = keys
        .iter()
        .fold(ModelFile::empty(), |model, key| model.with(&format!("llama.{key}"), Value::U32(u32::MAX)));
    let model = model.with("llama.block_count", 4096_u32);
    let headers = [
        Header::parse(&model.header().unwrap()).unwrap(),
        Header::parse(&ModelFile::empty().header().unwrap()).unwrap(),
        Header::parse(&ModelFile::llama("", Dimensions::LLAMA3_8B).header().unwrap()).unwrap(),
    ];
    for header in &headers {
        for (context, batch) in [(1 << 63, 512), (u64::MAX, u64::MAX), (0, 0), (4096, 0), (1, 1 << 63)] {
            let settings = Settings { context, batch, ..Settings::default() };
            let estimate = |_attempt| {
                let start = Instant::now();
                let models = ModelSet::from(Model::new(header, []).unwrap());
                for basis in [Basis::Ollama, Basis::LlamaCpp] {
                    let _answer =
                        models.estimate(&settings, basis).map(|estimate| estimate.place(&[1 << 40]));
                }
                start.elapsed()
            };
            // The shortest of several attempts, because other programs use the processors too.
            let took = (0..5).map(estimate).min().unwrap();
            assert!(took < Duration::from_millis(100), "context {context}, batch {batch}: {took:?}");
        }
    }
}

#[test]
fn file_without_a_rule_never_fits_and_its_tensors_are_counted() {
    let desk = Desk::new();
    let mut image = ModelFile::empty().with("general.architecture", "flux");
    image.add_noise(1, "double_blocks.0.img_mod.lin.weight", GgmlType::F16, &[64, 64]);
    let mut adapter = ModelFile::empty().with("general.type", "adapter").with("llama.block_count", 1_u32);
    adapter.add_noise(1, "blk.0.attn_q.weight.lora_a", GgmlType::F16, &[64, 64]);
    for (model, reason) in
        [(image, "no rule for `flux`"), (adapter, "no rule for `llama` of the kind `adapter`")]
    {
        let path = desk.header("file.gguf", &model);
        let answer = desk.fit(&path, "--vram 1TiB --json").exits_with(1).json();
        assert_eq!(answer["basis"], format!("weights only: {reason}"));
        assert_eq!((&answer["weights_bytes"], &answer["fits"]), (&json!(64 * 64 * 2), &json!(false)));
        let text = desk.fit(&path, "").succeeds().text();
        assert!(text.contains("note: only the weights are known"), "{text}");
    }
}

#[test]
fn context_is_the_models_own_else_the_trained_one_up_to_8192() {
    let desk = Desk::new();
    let model = ModelFile::llama("Llama 3 8B", Dimensions::LLAMA3_8B);
    let context = |trained: Option<u32>, options: &str| {
        let model = match trained {
            Some(trained) => model.clone().with("llama.context_length", trained),
            None => ModelFile::dense(1).with("llama.block_count", 4_u32),
        };
        let path = desk.header("model.gguf", &model);
        let answer = desk.fit(&path, &format!("{options} --json")).succeeds().json();
        (answer["context"].as_u64().unwrap(), answer["context_source"].as_str().unwrap().to_owned())
    };
    let found = |context: u64, source: &str| (context, source.to_owned());
    assert_eq!(context(Some(131_072), ""), found(8192, "default"));
    assert_eq!(context(Some(2048), ""), found(2048, "default"));
    assert_eq!(context(None, ""), found(4096, "default"));
    assert_eq!(context(Some(131_072), "--ctx 0"), found(131_072, "trained"));
    assert_eq!(context(Some(131_072), "--ctx 100"), found(100, "option"));
    let path = desk.header("model.gguf", &ModelFile::dense(1));
    let refused = desk.fit(&path, "--ctx 0").exits_with(2);
    assert!(refused.stderr.contains("--ctx TOKENS"), "{}", refused.stderr);
}

#[test]
fn num_ctx_and_adapters_of_a_manifest_are_used() {
    let registry = FakeRegistry::start().unwrap();
    let model = ModelFile::llama("Llama", TINY);
    let mut adapter = ModelFile::empty().with("general.type", "adapter");
    adapter.add_noise(1, "blk.0.attn_q.weight.lora_a", GgmlType::F32, &[64, 16]);
    let (model, adapter) = (model.bytes(), adapter.bytes());
    let params = "application/vnd.ollama.image.params";
    let layers = [
        (MODEL, &model[..]),
        ("application/vnd.ollama.image.adapter", &adapter),
        (params, br#"{"num_ctx":3000}"#),
    ];
    registry.add_model("me/tuned:1", b"{}", &layers).unwrap();
    let daemon = TestDaemon::start();
    let name = registry.name("me/tuned:1");
    let answer = daemon.command().run(["fit", &name, "--json"]).succeeds().json();
    assert_eq!((&answer["context"], &answer["context_source"]), (&json!(3000), &json!("model")));
    assert_eq!(answer["adapters"], json!([64 * 16 * 4]));
    let text = daemon.command().run(["fit", &name]).succeeds().text();
    assert!(
        text.contains("3000, the model's num_ctx") && text.contains("adapter          4.00 KiB"),
        "{text}"
    );
}

const TINY: Dimensions = Dimensions { block_count: 2, vocabulary_length: 512, ..Dimensions::SMALL_MIXTRAL };

#[test]
fn experts_stay_in_memory_if_told_so() {
    let desk = Desk::new();
    let model = with_keys(ModelFile::stacked_experts(1, 4), 1, 32);
    let path = desk.header("experts.gguf", &model);
    let all = desk.fit(&path, "--vram 1TiB --json").succeeds().json();
    let split = desk.fit(&path, "--vram 1TiB --cpu-moe --json").succeeds().json();
    let bytes = |answer: &Json, key: &str| answer[key].as_u64().unwrap();
    let moved = bytes(&all, "required_bytes") - bytes(&split, "required_bytes");
    assert!(moved > 0);
    assert_eq!(bytes(&split, "memory_bytes") - bytes(&all, "memory_bytes"), moved);
    assert_eq!(split["options"].as_array().unwrap().last(), Some(&json!("--cpu-moe")));
    let text = desk.fit(&path, "--vram 1TiB --cpu-moe --layers").succeeds().text();
    assert!(text.contains("device, experts in memory"), "{text}");
}

#[test]
fn tables_that_are_read_by_row_need_no_memory() {
    let desk = Desk::new();
    let model = ModelFile::llama("Llama 3 8B", Dimensions::LLAMA3_8B);
    let plain = desk.fit(&desk.header("plain.gguf", &model), "--json").succeeds().json();
    let mut with_table = model.clone();
    with_table.add_noise(1, "per_layer_token_embd.weight", GgmlType::F16, &[512, 1 << 20]);
    let path = desk.header("table.gguf", &with_table);
    let answer = desk.fit(&path, "--json").succeeds().json();
    assert_eq!(answer["table_bytes"], 1_u64 << 30);
    let more = answer["needed_bytes"].as_u64().unwrap() - plain["needed_bytes"].as_u64().unwrap();
    assert!(more < 64 << 20, "only the rows of a batch: {more}");
    let text = desk.fit(&path, "--layers").succeeds().text();
    assert!(
        text.contains("1.00 GiB read from disk row by row") && text.contains("disk, not resident"),
        "{text}"
    );
}

#[test]
fn layers_that_a_gpu_does_not_hold_are_in_memory() {
    let desk = Desk::new();
    let path = desk.header("small.gguf", &ModelFile::llama("Small", Dimensions::SMALL_LLAMA));
    let with_gpu = |mebibytes: u64, options: &[&str]| {
        let script = desk.path().join("nvidia-smi");
        fs::write(&script, format!("#!/bin/sh\necho 'Stand-in, {mebibytes}'\n")).unwrap();
        fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
        let mut command = Blobd::at_root(&desk.path().join("store")).command();
        command.env("PATH", format!("{}:/usr/bin:/bin", desk.path().display()));
        run(command.arg("fit").arg(&path).args(options))
    };
    let required = desk.fit(&path, "--json").succeeds().json()["required_bytes"].as_u64().unwrap();
    // One GiB stays free on each GPU.
    let (half, all) = (1024 + (required >> 21), 1025 + (required >> 20));
    for (mebibytes, fits_in) in [(1024, "memory"), (half, "devices_and_memory"), (all, "devices")] {
        let answer = with_gpu(mebibytes, &["--json"]).succeeds().json();
        assert_eq!((&answer["fits"], &answer["fits_in"]), (&json!(true), &json!(fits_in)), "{answer}");
        assert_eq!(answer["max_context"], 8192, "{answer}");
        let (layers, layers_of) = (answer["layers"].as_u64(), answer["layers_of"].as_u64());
        let expected = [layers == Some(0), layers > Some(0) && layers < layers_of, layers == layers_of];
        let names = ["memory", "devices_and_memory", "devices"];
        assert_eq!(expected, names.map(|name| name == fits_in), "{answer}");
    }
    let text = with_gpu(half, &["--layers"]).succeeds().text();
    assert!(
        text.contains(" layers on this machine's GPUs and the rest, ") && text.contains("  memory\n"),
        "{text}"
    );
    let none = with_gpu(half, &["--json", "--ctx", "1000000000"]).succeeds().json();
    assert_eq!((&none["fits"], &none["fits_in"]), (&json!(false), &Json::Null));
}

#[test]
fn without_devices_the_answer_is_for_this_machine() {
    let desk = Desk::new();
    let path = llama3(&desk);
    let answer = desk.fit(&path, "--json").succeeds().json();
    assert!(answer["machine"]["available_bytes"].as_u64().is_some_and(|bytes| bytes > 0), "{answer}");
    let text = desk.fit(&path, "").succeeds().text();
    assert!(text.contains("this machine's"), "{text}");
    assert!(desk.fit(&path, "--vram 1GiB --json").exits_with(1).json().get("machine").is_none());
    // More than any machine has: the answer is no, and the exit code is for --vram only.
    let huge = desk.fit(&path, "--ctx 1000000000 --json").succeeds().json();
    assert_eq!(huge["fits"], false);
}
