//! Models with a layer for each tensor, from the pull to the tensors in a program's memory.

use blobd_client::protocol::error::ErrorCode;
use blobd_client::protocol::request::{OpenParams, TensorSelection};
use blobd_client::weights::{Dtype, ManifestWeights};
use blobd_store_format::reference::Reference;
use blobd_store_format::safetensors::HeaderWriter;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::folders::ModelFolder;
use blobd_tests::http;
use blobd_tests::oracle::sha256;
use blobd_tests::registry::FakeRegistry;
use serde_json::{Value as Json, json};

const TENSORS: [&str; 3] = ["vae/conv", "text_encoder/a", "text_encoder/b"];

/// A file with one BF16 tensor of two numbers: each is 1 plus the given number of 128ths.
fn tensor(key: &str, bytes: [u8; 2]) -> Vec<u8> {
    let mut writer = HeaderWriter::new();
    let mut file = writer.tensor(key, Dtype::BF16, &[2]).unwrap().header().unwrap();
    file.extend(bytes.map(|byte| [byte, 0x3f]).concat());
    file
}

/// Adds a model of these layers to a registry, with the component, name and content of each, and returns its name.
fn publish(registry: &FakeRegistry, layers: &[(&str, &str, Vec<u8>)]) -> String {
    let layer = |kind: &str, name: Option<&str>, bytes: &[u8]| -> Json {
        registry.add_blob(bytes);
        let digest = format!("sha256:{}", sha256(bytes));
        let mut layer = json!({ "digest": digest, "size": bytes.len() });
        layer["mediaType"] = format!("application/vnd.ollama.image.{kind}").into();
        layer["name"] = name.into();
        layer
    };
    let layers: Vec<Json> = layers.iter().map(|(kind, name, bytes)| layer(kind, Some(name), bytes)).collect();
    let mut config = layer("config", None, b"{}");
    config["mediaType"] = "application/vnd.docker.container.image.v1+json".into();
    let manifest = json!({ "schemaVersion": 2, "config": config, "layers": layers });
    registry.add_manifest("library/images:latest", manifest.to_string().as_bytes());
    registry.name("library/images")
}

/// A daemon that has pulled a model of two components, and the model's name.
fn daemon() -> (TestDaemon, Reference) {
    let (daemon, registry) = (TestDaemon::start(), FakeRegistry::start().unwrap());
    let tensors = (0..).zip(TENSORS);
    let tensors = tensors.map(|(number, name)| ("tensor", name, tensor(name, [0x80 + number, 0x90])));
    let index = ("json", "model_index.json", br#"{"quantization":"none"}"#.to_vec());
    let name = publish(&registry, &tensors.chain([index]).collect::<Vec<_>>());
    daemon.command().run(["pull", &name]).succeeds();
    (daemon, name.parse().unwrap())
}

#[test]
fn component_is_opened_alone_with_its_own_tensor_names() {
    let (daemon, name) = daemon();
    let client = daemon.client();
    let weights = ManifestWeights::open_component(&client, &name, "text_encoder").unwrap();
    assert_eq!(weights.names().collect::<Vec<_>>(), ["a", "b"]);
    assert_eq!(weights.tensor("b").unwrap()[..], [0x82, 0x3f, 0x90, 0x3f]);
    let wide = weights.tensor_as("b", Dtype::F32).unwrap();
    assert_eq!(wide[..], [1.015_625_f32.to_le_bytes(), 1.125_f32.to_le_bytes()].concat());
    assert_eq!(weights.quantization(), Some("NONE"), "files come with every component");
    assert_eq!(weights.model().fd_count(), 4, "configuration, index and two tensors");
    let all = ManifestWeights::open(&client, &name).unwrap();
    assert_eq!(all.names().count(), 3);
    assert!(all.has("vae/conv") && all.model().fd_count() == 5);
}

#[test]
fn layers_that_are_tensors_are_selected_like_tensors_of_a_file() {
    let (daemon, name) = daemon();
    let open = |component: Option<&str>, tensors| {
        let component = component.map(str::to_owned);
        let params = OpenParams { component, tensors, ..OpenParams::new(name.clone()) };
        let model = daemon.client().open_with(&params)?;
        let names = model.layers().iter().filter_map(|layer| layer.name.clone());
        Ok::<_, blobd_client::error::ClientError>(names.collect::<Vec<_>>())
    };
    let names = |names: &[&str]| TensorSelection::Names(names.iter().copied().map(str::to_owned).collect());
    let index = "model_index.json";
    assert_eq!(open(None, names(&["vae/conv"])).unwrap(), ["vae/conv", index]);
    assert_eq!(open(None, TensorSelection::Prefix("text".into())).unwrap(), [TENSORS[1], TENSORS[2], index]);
    assert_eq!(open(Some("text_encoder/"), TensorSelection::All).unwrap(), &TENSORS[1..]);
    assert_eq!(open(Some("tensor"), TensorSelection::All).unwrap(), TENSORS);
    assert_eq!(open(Some("tensor"), names(&["vae/conv"])).unwrap(), ["vae/conv"]);
    assert_eq!(open(None, TensorSelection::All).unwrap().len(), 4);
    let nothing = open(Some("tensor"), TensorSelection::Prefix("none".into()));
    assert_eq!(nothing.unwrap(), [""; 0], "a prefix may match nothing");
    for (component, tensors) in [
        (None, names(&["vae/conv", "vae/none"])),
        (None, names(&[index])),
        (Some("unet/"), TensorSelection::All),
        (Some("vae"), TensorSelection::All),
    ] {
        let error = open(component, tensors).unwrap_err();
        assert_eq!(error.code(), ErrorCode::NotFound, "{error}");
    }
}

#[test]
fn tensor_shows_the_numbers_of_a_layer() {
    let (daemon, name) = daemon();
    let tensor = |arguments: &[&str]| {
        let name = name.to_string();
        daemon.command().run(["tensor", &name, "text_encoder/b"].iter().chain(arguments))
    };
    let found = tensor(&["--json"]).succeeds().json();
    assert_eq!((&found["type"], &found["shape"]), (&json!("BF16"), &json!([2])));
    assert_eq!((&found["min"], &found["max"]), (&json!(1.015_625), &json!(1.125)));
    assert_eq!(tensor(&["--dump"]).succeeds().stdout, [0x82, 0x3f, 0x90, 0x3f]);
    let npy = tensor(&["--npy"]).succeeds().stdout;
    assert!(npy.ends_with(&[1.015_625_f32.to_le_bytes(), 1.125_f32.to_le_bytes()].concat()));
    let error = daemon.command().run(["tensor", &name.to_string(), "text_encoder/c", "--json"]);
    let error = error.exits_with(3).error();
    assert!(error.hint.unwrap().contains("text_encoder/a, text_encoder/b"), "the nearest names");
}

/// A daemon that has pulled a model of one tensor layer.
pub(crate) fn with_layer(name: &str, file: &[u8]) -> (TestDaemon, String) {
    let (daemon, registry) = (TestDaemon::start(), FakeRegistry::start().unwrap());
    let layer = |media_type: &str, bytes: &[u8]| {
        registry.add_blob(bytes);
        let digest = format!("sha256:{}", sha256(bytes));
        json!({ "mediaType": media_type, "digest": digest, "size": bytes.len(), "name": name })
    };
    let config = layer("application/vnd.docker.container.image.v1+json", b"{}");
    let layers = [layer("application/vnd.ollama.image.tensor", file)];
    let manifest = json!({ "schemaVersion": 2, "config": config, "layers": layers });
    registry.add_manifest("library/q:latest", manifest.to_string().as_bytes());
    let model = registry.name("library/q");
    daemon.command().run(["pull", &model]).succeeds();
    (daemon, model)
}

#[test]
fn tensor_unpacks_the_numbers_of_quantised_layers() {
    // Codes 0 to 15, twice, and one group of each 16.
    let codes = [0x7654_3210_u32, 0xfedc_ba98].repeat(2);
    let codes: Vec<u8> = codes.iter().flat_map(|word| word.to_le_bytes()).collect();
    let bf16 = |numbers: [f32; 2]| -> Vec<u8> {
        numbers.iter().flat_map(|number| number.to_le_bytes()[2..].to_vec()).collect()
    };
    let e2m1 = [0.0_f32, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];
    let affine: Vec<f32> = (0..16_u8).map(|code| f32::from(code) * 0.5 - 0.507_812_5).collect();
    let affine_next: Vec<f32> = (0..16_u8).map(|code| f32::from(code) * 2.0 + 1.0).collect();
    for (quant_type, scale_type, scales, biases, expected) in [
        (
            "int4",
            Dtype::BF16,
            bf16([0.5, 2.0]),
            Some(bf16([-0.507_812_5, 1.0])),
            [affine, affine_next].concat(),
        ),
        // E4M3: 1 and 2.
        (
            "nvfp4",
            Dtype::U8,
            vec![0x38, 0x40],
            None,
            [e2m1.to_vec(), e2m1.iter().map(|value| value * 2.0).collect()].concat(),
        ),
    ] {
        let mut writer = HeaderWriter::new();
        writer.metadata("quant_type", quant_type).metadata("group_size", "16");
        writer.tensor("w", Dtype::U32, &[2, 2]).unwrap().tensor("w.scale", scale_type, &[2, 1]).unwrap();
        if biases.is_some() {
            writer.tensor("w.bias", Dtype::BF16, &[2, 1]).unwrap();
        }
        let mut file = writer.header().unwrap();
        file.extend(codes.iter().chain(&scales).chain(biases.iter().flatten()));
        let (daemon, model) = with_layer("w", &file);
        let run =
            |words: &[&str]| daemon.command().run(["tensor", &model, "w"].iter().chain(words)).succeeds();
        let shown = run(&["--values", "0..32", "--json"]).json();
        assert_eq!((&shown["type"], &shown["shape"]), (&json!(quant_type.to_uppercase()), &json!([2, 16])));
        let values: Vec<f64> =
            shown["values"].as_array().unwrap().iter().map(|value| value.as_f64().unwrap()).collect();
        let exact: Vec<f64> = expected.iter().copied().map(f64::from).collect();
        assert_eq!(values, exact, "{quant_type}");
        assert_eq!(run(&["--dump"]).stdout, codes);
        let npy = run(&["--npy"]).stdout;
        let numbers: Vec<u8> = expected.iter().flat_map(|number| number.to_le_bytes()).collect();
        assert!(npy.ends_with(&numbers));
        let text = run(&[]).text();
        assert!(text.contains(&quant_type.to_uppercase()) && text.contains("elements   32"), "{text}");
    }
}

#[test]
fn fit_counts_the_weights_and_the_cache_of_layers() {
    let (daemon, registry) = (TestDaemon::start(), FakeRegistry::start().unwrap());
    let layer = |name: &'static str, dtype: Dtype, shape: &[u64]| {
        let mut writer = HeaderWriter::new();
        // A name of January 2026, of a file with one tensor.
        let mut file = writer.tensor("data", dtype, shape).unwrap().header().unwrap();
        let bytes = shape.iter().product::<u64>() * dtype.bits() / 8;
        file.resize(file.len() + usize::try_from(bytes).unwrap(), 1);
        ("tensor", name, file)
    };
    // As many heads as the weights of llama with 4 heads of 16 elements, 2 of them for keys.
    let layers = [
        layer("model.embed_tokens.weight", Dtype::BF16, &[128, 64]),
        layer("model.layers.0.self_attn.k_proj.weight", Dtype::BF16, &[32, 64]),
        layer("model.layers.0.self_attn.v_proj.weight", Dtype::BF16, &[32, 64]),
        layer("model.layers.0.mlp.up_proj.weight", Dtype::U32, &[128, 8]),
        layer("model.layers.0.mlp.up_proj.weight_scale", Dtype::BF16, &[128, 1]),
        ("json", "config.json", ModelFolder::transformers(1).0["config.json"].clone()),
    ];
    let name = publish(&registry, &layers);
    let fit = |options: &[&str]| daemon.command().run(["fit", &name, "--json"].iter().chain(options));
    let error = fit(&[]).exits_with(1).error();
    assert!(error.message.contains("layer \"model.embed_tokens.weight\": expected a header"), "{error:?}");
    assert!(error.hint.unwrap().contains("pull"));
    daemon.command().run(["pull", &name]).succeeds();
    let answer = fit(&["--ctx", "1000", "--vram", "1GiB"]).succeeds().json();
    assert_eq!(answer["basis"], "safetensors-2026-11:llama");
    let (embedding, block) = (128 * 64 * 2, 2 * 32 * 64 * 2 + 128 * 8 * 4 + 128 * 2);
    assert_eq!(answer["weights_bytes"], embedding + block);
    assert_eq!(answer["kv_total_bytes"], 2 * 32 * 1000 * 2, "keys and values of one block");
    let of_block = answer["weights"].as_array().unwrap().iter().find(|part| part["block"] == 0).unwrap();
    assert_eq!(of_block["bytes"], block);
    let path = format!("/v1/fit/{name}?context=1000&vram_bytes=1073741824");
    let asked = http::get(&daemon.socket(), &path);
    assert_eq!(serde_json::from_str::<Json>(&asked.body).unwrap(), answer, "the daemon answers the same");
}

#[test]
fn fit_of_a_pipeline_counts_only_its_weights() {
    let (daemon, name) = daemon();
    let answer = daemon.command().run(["fit", &name.to_string(), "--json"]).succeeds().json();
    assert_eq!(answer["basis"], "weights only: no rule for a pipeline of several models");
    assert_eq!(answer["weights_bytes"], 3 * 4);
}
