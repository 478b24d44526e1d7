//! `show` of models with a layer for each tensor.

use blobd_store_format::safetensors::{Dtype, HeaderWriter};
use blobd_tests::daemon::TestDaemon;
use blobd_tests::oracle::sha256;
use blobd_tests::registry::FakeRegistry;
use serde_json::{Value as Json, json};

/// A safetensors file of zeros.
fn file(metadata: &[(&str, &str)], tensors: &[(&str, Dtype, &[u64])]) -> Vec<u8> {
    let (mut writer, mut bits) = (HeaderWriter::new(), 0);
    for (key, value) in metadata {
        writer.metadata(*key, *value);
    }
    for (name, dtype, shape) in tensors {
        writer.tensor(name, *dtype, shape).unwrap();
        bits += shape.iter().product::<u64>() * dtype.bits();
    }
    let mut bytes = writer.header().unwrap();
    bytes.resize(bytes.len() + usize::try_from(bits / 8).unwrap(), 0);
    bytes
}

/// The end of the media type, the name, and the content.
type Layer = (&'static str, &'static str, Vec<u8>);

/// A daemon that has pulled models of these layers, and their names.
fn pulled(models: &[&[Layer]]) -> (TestDaemon, Vec<String>) {
    let (daemon, registry) = (TestDaemon::start(), FakeRegistry::start().unwrap());
    let describe = |media_type: String, name: &str, bytes: &[u8]| -> Json {
        registry.add_blob(bytes);
        let digest = format!("sha256:{}", sha256(bytes));
        json!({ "mediaType": media_type, "digest": digest, "size": bytes.len(), "name": name })
    };
    let config = describe("application/vnd.docker.container.image.v1+json".to_owned(), "", b"{}");
    let of_layer =
        |(kind, name, bytes): &Layer| describe(format!("application/vnd.ollama.image.{kind}"), name, bytes);
    let pull = |(number, layers): (usize, &&[Layer])| {
        let layers: Vec<Json> = layers.iter().map(of_layer).collect();
        let manifest = json!({ "schemaVersion": 2, "config": config, "layers": layers });
        registry.add_manifest(&format!("library/mlx{number}:latest"), manifest.to_string().as_bytes());
        let name = registry.name(&format!("library/mlx{number}"));
        daemon.command().run(["pull", &name]).succeeds();
        name
    };
    let names = models.iter().enumerate().map(pull).collect();
    (daemon, names)
}

/// What `show --json` says about a model of these layers, with a daemon and without one.
fn shown(layers: &[Layer]) -> Json {
    let (mut daemon, names) = pulled(&[layers]);
    let name = &names[0];
    let shown = daemon.command().run(["show", name, "--json"]).succeeds().json();
    daemon.command().run(["show", name, "--tensors"]).succeeds();
    assert!(daemon.stop().success());
    assert_eq!(daemon.embedded().run(["show", name, "--json"]).succeeds().json(), shown, "without a daemon");
    shown
}

fn model() -> Vec<Layer> {
    let experts = "model.layers.0.mlp.experts";
    let (up, down) = (format!("{experts}.up_proj.weight"), format!("{experts}.down_proj.weight"));
    let up_scale = format!("{up}.scale");
    let packed = file(
        &[(&format!("{up}.quant_type"), "mxfp8"), (&format!("{up}.group_size"), "32")],
        &[
            (&up, Dtype::U32, &[4, 2, 8]),
            (&up_scale, Dtype::U8, &[4, 2, 1]),
            (&down, Dtype::BF16, &[4, 16, 2]),
        ],
    );
    let attention = "model.layers.0.self_attn.q_proj.weight";
    let (scale, bias) = (format!("{attention}.scale"), format!("{attention}.bias"));
    let quantised = file(
        &[("quant_type", "int4"), ("group_size", "64")],
        &[(attention, Dtype::U32, &[16, 8]), (&scale, Dtype::BF16, &[16, 1]), (&bias, Dtype::BF16, &[16, 1])],
    );
    let norm = file(&[], &[("model.norm.weight", Dtype::F32, &[64])]);
    let config = json!({
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 64,
        "num_hidden_layers": 1, "max_position_embeddings": 4096,
    });
    vec![
        ("tensor", "model.layers.0.mlp.experts", packed),
        ("tensor", "model.layers.0.self_attn.q_proj.weight", quantised),
        ("tensor", "model.norm.weight", norm),
        ("json", "config.json", config.to_string().into_bytes()),
    ]
}

#[test]
fn model_with_a_layer_for_each_tensor_has_ollamas_model_information() {
    let shown = shown(&model());
    assert_eq!(shown["architecture"], "qwen3_moe");
    // Unpacked: two stacks of four experts, a matrix of 16 rows of 64, and a norm.
    assert_eq!(shown["parameters"], 4 * 2 * 32 + 4 * 16 * 2 + 16 * 64 + 64);
    assert_eq!(shown["quantization"], "INT4", "the lowest precision");
    let metadata = json!({
        "general.architecture": "qwen3_moe", "general.parameter_count": 4 * 2 * 32 + 4 * 16 * 2 + 16 * 64 + 64,
        "qwen3_moe.embedding_length": 64, "qwen3_moe.block_count": 1, "qwen3_moe.context_length": 4096,
    });
    assert_eq!(shown["metadata"], metadata);
    assert_eq!((&shown["embedding_length"], &shown["context_length"]), (&json!(64), &json!(4096)));
    let types: Vec<_> = shown["types"].as_array().unwrap().iter().map(|row| row["type"].clone()).collect();
    assert_eq!(types, ["INT4", "BF16", "F32", "MXFP8"], "by size, then by name");
    let bytes: u64 = model().iter().take(3).map(|(.., file)| file.len() as u64).sum();
    let bits = shown["bits_per_weight"].as_f64().unwrap();
    assert!((bits * 1472.0 - bytes as f64 * 8.0).abs() < 1e-6, "{bits}");
}

#[test]
fn tensors_are_listed_singly_with_their_place() {
    let layers = model();
    let shown = shown(&layers);
    let entries = shown["tensors"].as_array().unwrap();
    let fields = |key: &str| entries.iter().map(|entry| entry[key].clone()).collect::<Vec<_>>();
    let group = "model.layers.0.mlp.experts";
    let names = [
        &format!("{group}.down_proj.weight"),
        &format!("{group}.up_proj.weight"),
        "model.layers.0.self_attn.q_proj.weight",
        "model.norm.weight",
    ];
    assert_eq!(fields("name"), names);
    assert_eq!(fields("format"), ["safetensors"; 4]);
    assert_eq!(fields("type"), ["BF16", "MXFP8", "INT4", "F32"]);
    // The slowest dimension first, of unpacked elements.
    assert_eq!(fields("shape"), [json!([4, 16, 2]), json!([4, 2, 32]), json!([16, 64]), json!([64])]);
    assert_eq!(fields("size"), [256, 256, 512, 256]);
    let digest = |layer: usize| format!("sha256:{}", sha256(&layers[layer].2));
    assert_eq!(fields("digest"), [digest(0), digest(0), digest(1), digest(2)]);
    assert_eq!(entries[1]["experts"], json!({ "count": 4, "stride": 64 }));
    assert_eq!(entries[2]["experts"], Json::Null);
    // The header of each file is before its tensors; the stack with scales is before the one without.
    let place = |index: usize| entries[index]["offset"].as_u64().unwrap();
    assert_eq!(place(0), place(1) + 256 + 8);
    assert_eq!(place(3) + 256, layers[2].2.len() as u64);
}

#[test]
fn image_model_is_named_by_its_index() {
    let layers = [
        ("tensor", "vae/conv", file(&[], &[("data", Dtype::BF16, &[2, 2])])),
        ("json", "model_index.json", br#"{"_class_name":"ZImagePipeline"}"#.to_vec()),
        ("json", "vae/config.json", br#"{"model_type":"vae"}"#.to_vec()),
    ];
    let shown = shown(&layers);
    assert_eq!((&shown["architecture"], &shown["parameters"]), (&json!("ZImagePipeline"), &json!(4)));
    assert_eq!((&shown["quantization"], &shown["tensors"][0]["name"]), (&json!("BF16"), &json!("vae/conv")));
}

#[test]
fn files_that_cannot_be_read_are_left_out() {
    let norm = file(&[], &[("norm", Dtype::F32, &[3])]);
    let cut = norm[..norm.len() - 1].to_vec();
    let mut long = (2_u64 << 20).to_le_bytes().to_vec();
    long.resize(3 << 20, b' ');
    let layers = [
        ("tensor", "norm", norm),
        ("tensor", "cut", cut),
        ("tensor", "short", b"{}".to_vec()),
        ("tensor", "long", long),
        ("json", "config.json", b"{".to_vec()),
    ];
    let shown = shown(&layers);
    assert_eq!((&shown["architecture"], &shown["parameters"]), (&Json::Null, &json!(3)));
    assert_eq!(shown["tensors"].as_array().unwrap().len(), 1);
}

#[test]
fn names_that_two_layers_have_leave_the_list_empty() {
    let single = |elements| file(&[], &[("w", Dtype::F32, &[elements])]);
    let layers = [("tensor", "w", single(1)), ("tensor", "group", single(2))];
    let shown = shown(&layers);
    assert_eq!((&shown["tensors"], &shown["parameters"]), (&json!([]), &json!(0)));
}

#[test]
fn diff_names_the_tensors_that_changed() {
    let (base, mut changed) = (model(), model());
    // The last byte of the down projection, of a group of two tensors.
    *changed[0].2.last_mut().unwrap() = 1;
    let (daemon, names) = pulled(&[&base, &changed]);
    let report = daemon.command().run(["diff", &names[0], &names[1], "--json"]).succeeds().json();
    let changes = report["tensors"].as_array().unwrap().iter();
    let changes: Vec<_> = changes.map(|entry| (entry["name"].as_str().unwrap(), &entry["change"])).collect();
    let group = "model.layers.0.mlp.experts";
    assert!(changes.contains(&(&format!("{group}.down_proj.weight"), &json!("changed"))), "{changes:?}");
    assert!(changes.contains(&("model.norm.weight", &json!("shared"))), "{changes:?}");
}
