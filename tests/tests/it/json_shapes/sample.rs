//! Model files and a registry, from which the runs make models of every kind.

use std::fs;
use std::path::PathBuf;

use blobd_store_format::gguf::{ByteOrder, GgmlType, Value};
use blobd_store_format::safetensors::{Dtype, HeaderWriter};
use blobd_tests::archives::{gzip, tar};
use blobd_tests::model::{Dimensions, ModelFile, ModelTensor};
use blobd_tests::oracle::sha256;
use blobd_tests::raw_gguf::{RawGguf, id};
use blobd_tests::registry::FakeRegistry;
use blobd_tests::temp_dirs::tmpfs_directory;
use blobd_tests::tensor_indexes::{IndexedModel, recipe_of};
use serde_json::{Value as Json, json};
use tempfile::TempDir;

pub(super) const MODEL: &str = "application/vnd.ollama.image.model";
/// A configuration with all fields that `show` lists.
const CONFIG: &str = r#"{"model_family":"llama","remote_host":"https://example.org","remote_model":"chat:70b",
    "capabilities":["completion"],"renderer":"qwen3.5","parser":"qwen3.5","requires":"0.19.0","base_name":"chat",
    "draft":{"model_format":"gguf","architecture":"eagle3","tensor_prefix":"draft.","config":"draft/config.json"},
    "generation_defaults":{"temperature":0.6}}"#;
/// Weights in a compressed archive.
const PACKED: &str = "application/vnd.cncf.model.weight.v1.tar+gzip";

/// A directory of files, and a registry on loopback.
#[derive(Debug)]
pub(super) struct Sample {
    folder: TempDir,
    pub(super) registry: FakeRegistry,
}

impl Sample {
    pub(super) fn new() -> Self {
        let sample = Self { folder: tmpfs_directory(), registry: FakeRegistry::start().unwrap() };
        for (name, model) in files() {
            let _path = model.write_to(sample.folder.path(), &format!("{name}.gguf"));
        }
        fs::create_dir(sample.path("seeing")).unwrap();
        for (name, model) in [("seeing", chat()), ("mmproj-F16", projector()), ("mtp-seeing", draft())] {
            let _path = model.write_to(&sample.folder.path().join("seeing"), &format!("{name}.gguf"));
        }
        fs::write(sample.path("broken.gguf"), b"GGUF and nothing else").unwrap();
        let raw = RawGguf::new().key(b"k\xff", id::U32, 1_u32.to_le_bytes()).with_data(&[]);
        fs::write(sample.path("raw.gguf"), raw).unwrap();
        sample.publish();
        sample
    }

    /// The path of a file in the directory.
    pub(super) fn path(&self, name: &str) -> String {
        self.folder.path().join(name).to_str().unwrap().to_owned()
    }

    /// Writes a configuration file.
    pub(super) fn config(&self, name: &str, content: &str) -> PathBuf {
        let path = self.folder.path().join(name);
        let credentials = self.path("credentials.json");
        fs::write(&path, format!("{content}\n[credentials]\nfile = \"{credentials}\"\n")).unwrap();
        path
    }

    fn publish(&self) {
        let [chat, projector, draft] = [chat(), projector(), draft()].map(|model| model.bytes());
        let layer = |kind: &str| format!("application/vnd.ollama.image.{kind}");
        let [license, template, system, params, messages] =
            ["license", "template", "system", "params", "messages"].map(layer);
        let (vision, speculative) = (layer("projector"), layer("draft"));
        let layers: [(&str, &[u8]); 9] = [
            (MODEL, &chat),
            (&vision, &projector),
            (&speculative, &draft),
            (&license, b"MIT License"),
            (&license, b"Another license"),
            (&template, b"{{ .System }}{{ .Prompt }}"),
            (&system, b"Answer in one word."),
            (&params, br#"{"stop":["<|end|>"],"temperature":0.5}"#),
            (&messages, br#"[{"role":"user","content":"Hi"}]"#),
        ];
        self.registry.add_model("me/chat:1", CONFIG.as_bytes(), &layers).unwrap();
        for (number, shard) in ModelFile::dense(3).shards(2).iter().enumerate() {
            self.registry.add_page(&format!("/big-{:05}-of-00002.gguf", number + 1), &shard.bytes(), &[]);
        }
        let seeing: [(&str, &[u8]); 3] =
            [("seeing-Q4_K_M.gguf", &chat), ("mmproj-F16.gguf", &projector), ("mtp-seeing.gguf", &draft)];
        self.registry.add_repository("me/seeing", &"0".repeat(40), &seeing);
        self.registry.add_page("/files/tiny.gguf", &ModelFile::dense(4).bytes(), &[]);
        let tagged = ModelFile::dense(12).bytes();
        self.registry.add_page("/files/tagged.gguf", &tagged, &[("ETag", "\"1\"")]);
        self.publish_layers();
        let packed = gzip(&tar(&[("packed.gguf", &ModelFile::dense(13).bytes())]));
        self.registry.add_model("me/packed:1", b"{}", &[(PACKED, &packed)]).unwrap();
        let layers: [(&str, &[u8]); 1] = [(MODEL, &large(7).bytes())];
        self.registry.add_model("me/damaged:1", br#"{"model_family":"damaged"}"#, &layers).unwrap();
        let weights = large(1).with("general.name", "indexed").bytes();
        let indexed = IndexedModel::new(&self.registry, ("me/indexed", "1"), &weights);
        indexed.publish(&recipe_of(&weights));
        for (name, seed) in [("relative", 1), ("half", 5), ("lost", 6)] {
            let file = large(seed).with("general.name", name);
            let config = br#"{"renderer":"qwen3.5"}"#;
            self.registry.add_model(&format!("me/{name}:1"), config, &[(MODEL, &file.bytes())]).unwrap();
        }
    }

    /// A model with a layer for each tensor.
    fn publish_layers(&self) {
        let layer = |kind: &str, name: Option<&str>, bytes: &[u8]| -> Json {
            self.registry.add_blob(bytes);
            let digest = format!("sha256:{}", sha256(bytes));
            let mut layer = json!({ "digest": digest, "size": bytes.len() });
            layer["mediaType"] = format!("application/vnd.ollama.image.{kind}").into();
            layer["name"] = name.into();
            layer
        };
        let tensors = ["vae/conv", "text_encoder/a"];
        let mut layers: Vec<Json> =
            tensors.map(|name| layer("tensor", Some(name), &safetensors(name))).into();
        layers.push(layer("json", Some("config.json"), br#"{"model_type":"llama","hidden_size":64}"#));
        let mut config = layer("config", None, br#"{"requires":"0.19.0","draft":{}}"#);
        config["mediaType"] = "application/vnd.docker.container.image.v1+json".into();
        let manifest = json!({ "schemaVersion": 2, "config": config, "layers": layers });
        self.registry.add_manifest("me/images:1", manifest.to_string().as_bytes());
    }
}

/// Files in the directory, by name without the ending.
fn files() -> Vec<(&'static str, ModelFile)> {
    let mut other = base().with_changed("output.weight").with("general.name", "other");
    other.tensors.retain(|tensor| !["output_norm.weight", "numbers.weight"].contains(&&*tensor.name));
    other.add_noise(9, "extra.weight", GgmlType::F32, &[8]);
    for (name, ggml_type, shape) in [
        ("blk.0.attn_norm.weight", GgmlType::F16, &[32][..]),
        ("blk.1.attn_norm.weight", GgmlType::F32, &[16, 2]),
    ] {
        other.tensors.retain(|tensor| tensor.name != name);
        other.add_noise(9, name, ggml_type, shape);
    }
    other.tensors.push(numbers([1.0, 2.0, 3.0, 5.0]));
    vec![
        ("base", base()),
        ("other", other),
        ("moe", mixture()),
        ("separate", ModelFile::separate_experts(1, 4)),
        ("odd", odd()),
        ("bare", ModelFile { metadata: Vec::new(), ..ModelFile::empty() }),
        ("llama", ModelFile::llama("Llama", TINY_LLAMA).with("tokenizer.chat_template", "{{ messages }}")),
        ("large", large(1)),
        ("fresh", ModelFile::dense(8)),
        ("spare", ModelFile::dense(9)),
        ("orphan", ModelFile::dense(10)),
    ]
}

const TINY_LLAMA: Dimensions = Dimensions {
    block_count: 2,
    embedding_length: 256,
    feed_forward_length: 256,
    head_count: 4,
    head_count_kv: 1,
    vocabulary_length: 256,
};

fn base() -> ModelFile {
    let list = |texts: &[&str]| Value::strings(texts.iter().map(|text| text.as_bytes().to_vec()));
    let mut file = ModelFile::dense_of(1, 2, 32)
        .with("general.url", "https://example.org")
        .with("general.author", "A")
        .with("general.organization", "O")
        .with("general.quantized_by", "Q")
        .with("general.description", "A small model.")
        .with("general.license", "other")
        .with("general.license.name", "own-1")
        .with("general.license.link", "https://example.org/LICENSE")
        .with("general.languages", list(&["en"]))
        .with("general.tags", list(&["text"]))
        .with("general.base_model.count", 2_u32)
        .with("general.base_model.0.name", "Base")
        .with("general.base_model.0.organization", "B")
        .with("general.base_model.1.url", "https://example.org/base");
    file.tensors.push(numbers([1.0, 2.0, 3.0, 4.0]));
    file
}

fn numbers(values: [f32; 4]) -> ModelTensor {
    let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    ModelTensor::of_bytes("numbers.weight", GgmlType::F32, &[4], bytes)
}

fn mixture() -> ModelFile {
    let file = ModelFile::stacked_experts(1, 4);
    file.with("llama.expert_count", 4_u32)
        .with("llama.expert_used_count", 2_u32)
        .with("llama.block_count", 1_u32)
        .with("llama.embedding_length", 32_u32)
        .with("llama.attention.head_count", 4_u32)
}

fn large(seed: u64) -> ModelFile {
    let mut file = ModelFile::empty();
    file.add_noise(seed, "token_embd.weight", GgmlType::F32, &[288 << 10]);
    file.add_noise(seed, "output.weight", GgmlType::F32, &[32]);
    file
}

/// Values that JSON cannot hold as they are, and tensors without finite values.
fn odd() -> ModelFile {
    let mut file = ModelFile::empty()
        .with("bytes", Value::String(vec![0xff, 0]))
        .with("nan", f32::NAN)
        .with("flag", true)
        .with("short", vec![1_u32, 2])
        .with("long", vec![0_u32; 65])
        .with("text", "x".repeat(1 << 20))
        .with("more.text", "y");
    file.order = ByteOrder::Big;
    let values: Vec<u8> = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::NAN]
        .iter()
        .flat_map(|value| value.to_be_bytes())
        .collect();
    file.tensors.push(ModelTensor::of_bytes("odd.weight", GgmlType::F32, &[4], values));
    file
}

fn chat() -> ModelFile {
    ModelFile::llama("Chat", TINY_LLAMA)
}

fn projector() -> ModelFile {
    let mut file = ModelFile::empty().with("general.architecture", "clip");
    file.add_noise(2, "v.patch_embd.weight", GgmlType::F32, &[32, 4]);
    file
}

fn draft() -> ModelFile {
    ModelFile::llama("Draft", Dimensions { block_count: 1, ..TINY_LLAMA })
}

fn safetensors(name: &str) -> Vec<u8> {
    let mut writer = HeaderWriter::new();
    let mut file = writer.tensor(name, Dtype::BF16, &[2]).unwrap().header().unwrap();
    file.extend([0x80, 0x3f, 0x90, 0x3f]);
    file
}
