//! `fit` of every kind of GGUF file: it never fits where it does not, and its rows are the file.

use std::fs;
use std::path::Path;

use blobd_store_format::gguf::GgmlType;
use blobd_tests::command::Blobd;
use blobd_tests::model::ModelFile;
use blobd_tests::temp_dirs::tmpfs_directory;

/// Architectures of llama.cpp's models.
const MODELS: [&str; 40] = [
    "llama",
    "llama4",
    "mllama",
    "gpt2",
    "gptneox",
    "mpt",
    "falcon",
    "bloom",
    "starcoder2",
    "qwen2",
    "qwen2moe",
    "qwen3",
    "qwen3moe",
    "qwen3next",
    "qwen35",
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3n",
    "gemma4",
    "phi2",
    "phi3",
    "command-r",
    "cohere2",
    "deepseek2",
    "deepseek4",
    "gpt-oss",
    "gptoss",
    "glm4moe",
    "mamba",
    "mamba2",
    "jamba",
    "falcon-h1",
    "granitehybrid",
    "nemotron_h",
    "lfm2",
    "rwkv7",
    "olmo2",
    "grok",
    "t5",
];
/// Architectures that make embeddings or rank texts.
const ENCODERS: [&str; 6] =
    ["bert", "nomic-bert", "modern-bert", "jina-bert-v3", "gemma-embedding", "t5encoder"];
/// Architectures of pictures, films and sound, of which llama.cpp runs none.
const MEDIA: [&str; 7] = ["flux", "sd3", "sdxl", "wan", "ltxv", "qwen_image", "whisper"];
const DRAFTS: [&str; 2] = ["eagle3", "dflash"];
/// The types of files that are no model.
const TYPES: [&str; 4] = ["adapter", "imatrix", "mmproj", "vocab"];

/// The blocks of a small model whose graph is larger than a mebibyte.
fn model(architecture: &str) -> ModelFile {
    let numbers = [
        ("block_count", 2),
        ("context_length", 2048),
        ("embedding_length", 256),
        ("feed_forward_length", 512),
        ("attention.head_count", 4),
        ("ssm.conv_kernel", 4),
        ("ssm.inner_size", 512),
        ("ssm.state_size", 16),
        ("ssm.group_count", 1),
        ("wkv.head_size", 64),
        ("shortconv.l_cache", 3),
    ];
    let with =
        |file: ModelFile, (name, number): (&str, u32)| file.with(&format!("{architecture}.{name}"), number);
    let named = ModelFile::empty().with("general.architecture", architecture);
    let mut file = numbers.into_iter().fold(named, with);
    let blocks = if matches!(architecture, "t5" | "t5encoder") { "enc.blk" } else { "blk" };
    file.add_noise(1, "token_embd.weight", GgmlType::F16, &[256, 64]);
    for block in 0..2 {
        for (name, shape) in [
            ("attn_q", [256, 256]),
            ("attn_output", [256, 256]),
            ("ffn_up", [256, 512]),
            ("ffn_down", [512, 256]),
        ] {
            file.add_noise(block, &format!("{blocks}.{block}.{name}.weight"), GgmlType::F16, &shape);
        }
    }
    file
}

/// A file without blocks.
fn media(architecture: &str) -> ModelFile {
    let mut file = ModelFile::empty().with("general.architecture", architecture);
    file.add_noise(1, "double_blocks.0.img_attn.qkv.weight", GgmlType::F16, &[64, 192]);
    file.add_noise(2, "encoder.blocks.0.attn.query.weight", GgmlType::F32, &[64, 3]);
    file
}

fn files() -> Vec<(String, ModelFile)> {
    let named = |names: &[&str], file: fn(&str) -> ModelFile| -> Vec<(String, ModelFile)> {
        names.iter().map(|name| ((*name).to_owned(), file(name))).collect()
    };
    let typed = |name: &str| model("llama").with("general.type", name);
    let mut projector =
        ModelFile::empty().with("general.architecture", "clip").with("clip.has_vision_encoder", true);
    projector.add_noise(1, "v.blk.0.attn_q.weight", GgmlType::F16, &[64, 64]);
    projector.add_noise(2, "mm.0.weight", GgmlType::F16, &[64, 64]);
    let mut control = ModelFile::empty().with("general.architecture", "controlvector");
    control.add_noise(1, "direction.1", GgmlType::F32, &[64]);
    let vocabulary = ModelFile { tensors: Vec::new(), ..model("llama") };
    // Files of other kinds that declare no type, with the architecture of their model.
    let mut adapter = model("llama").with("adapter.type", "lora");
    adapter.add_noise(1, "blk.0.attn_q.weight.lora_a", GgmlType::F16, &[256, 16]);
    let mut statistics = ModelFile { tensors: Vec::new(), ..model("llama") };
    statistics.add_noise(1, "blk.0.attn_q.weight.in_sum2", GgmlType::F32, &[256, 1]);
    statistics.add_noise(1, "blk.0.attn_q.weight.counts", GgmlType::F32, &[1, 1]);
    let without_heads = ModelFile {
        metadata: model("llama")
            .metadata
            .into_iter()
            .filter(|(key, _)| !key.contains("head_count"))
            .collect(),
        ..model("llama")
    };
    let reranker = model("qwen3").with("qwen3.pooling_type", 4_u32);
    let mut files = named(&MODELS, model);
    files.extend(named(&ENCODERS, model));
    files.extend(named(&DRAFTS, model));
    files.extend(named(&MEDIA, media));
    files.extend(named(&TYPES, typed));
    let others = [
        ("projector", projector),
        ("control vector", control),
        ("vocabulary", vocabulary),
        ("reranker", reranker),
        ("adapter without a type", adapter),
        ("imatrix without a type", statistics),
        ("without heads", without_heads),
    ];
    files.extend(others.map(|(name, file)| (name.to_owned(), file)));
    files
}

fn fit(store: &Path, path: &Path, options: &[&str]) -> blobd_tests::command::Run {
    let words = ["fit", path.to_str().unwrap()].into_iter().chain(options.iter().copied());
    Blobd::at_root(store).run(words)
}

#[test]
fn no_kind_of_file_fits_a_mebibyte_and_the_rows_are_the_file() {
    let folder = tmpfs_directory();
    let store = folder.path().join("store");
    let files = files();
    assert!(files.len() >= 60, "{}", files.len());
    for (number, (name, file)) in files.iter().enumerate() {
        let path = file.write_to(folder.path(), &format!("{number}.gguf"));
        let answer = fit(&store, &path, &["--vram", "1MiB", "--json"]).exits_with(1).json();
        assert_eq!(answer["fits"], false, "{name}");
        let rows = answer["weights"].as_array().unwrap().iter().map(|row| row["bytes"].as_u64().unwrap());
        let sum = rows.sum::<u64>() + answer["header_bytes"].as_u64().unwrap();
        assert_eq!(sum, fs::metadata(&path).unwrap().len(), "{name}");
        assert_eq!(answer["file_bytes"], sum, "{name}");
    }
}

#[test]
fn files_without_a_rule_fit_nowhere_and_say_why() {
    let folder = tmpfs_directory();
    let store = folder.path().join("store");
    for (name, file) in files() {
        let path = file.write_to(folder.path(), "file.gguf");
        let run = fit(&store, &path, &["--vram", "1TiB", "--json"]);
        let answer = run.json();
        let has_rule = answer["has_rule"].as_bool().unwrap();
        assert_eq!(run.code, i32::from(!has_rule), "{name}: {answer}");
        let is_model =
            MODELS.contains(&name.as_str()) || ENCODERS.contains(&name.as_str()) || name == "reranker";
        let is_special = ["mllama", "deepseek4", "grok"].contains(&name.as_str());
        if !is_model {
            assert!(!has_rule || name == "eagle3", "{name}: {answer}");
        } else if !is_special {
            assert!(has_rule, "{name}: {answer}");
        }
        let text = fit(&store, &path, &["--layers"]).succeeds().text();
        assert!(text.contains("header, padding"), "{text}");
        assert_eq!(text.contains("not known"), !has_rule, "{text}");
    }
}
