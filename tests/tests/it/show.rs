//! `show`: what it says about a model.

use std::fs;

use blobd_store_format::digest::Digest;
use blobd_store_format::safetensors::{Dtype, HeaderWriter};
use blobd_tests::daemon::TestDaemon;
use blobd_tests::folders::ModelFolder;
use blobd_tests::model::ModelFile;
use blobd_tests::raw_gguf::{RawGguf, id, string};
use serde_json::{Value as Json, json};

fn import(daemon: &TestDaemon, name: &str, file: &[u8]) {
    let path = daemon.scratch().join(format!("{name}.gguf"));
    fs::write(&path, file).unwrap();
    let path = path.to_str().unwrap();
    daemon.command().run(["import", path, "--name", name]).succeeds();
}

#[test]
fn keys_and_values_that_json_cannot_represent_stay_distinct() {
    let daemon = TestDaemon::start();
    let file = RawGguf::new()
        .key(b"k\xff", id::U32, 1_u32.to_le_bytes())
        .key(b"k\xfe", id::U32, 2_u32.to_le_bytes())
        .key(b"k\\xff", id::U32, 3_u32.to_le_bytes())
        .key("nan", id::FLOAT32, f32::NAN.to_le_bytes())
        .key("low", id::FLOAT32, f32::NEG_INFINITY.to_le_bytes())
        .key("bytes", id::STRING, string(b"\xff\x00"))
        .with_data(&[]);
    import(&daemon, "odd", &file);
    let shown = daemon.command().line("show odd --json").succeeds().json();
    let expected = json!({
        "k\\xff": 1, "k\\xfe": 2, "k\\\\xff": 3, "nan": "NaN", "low": "-Infinity", "bytes": {"base64": "/wA="},
    });
    assert_eq!(shown["metadata"], expected);
}

fn moe(daemon: &TestDaemon) -> String {
    let path = ModelFile::stacked_experts(1, 4).write_to(daemon.scratch(), "moe-F16.gguf");
    path.to_str().unwrap().to_owned()
}

#[test]
fn overview_says_what_the_header_says() {
    let daemon = TestDaemon::start();
    let path = moe(&daemon);
    daemon.command().run(["import", &path]).succeeds();
    let shown = daemon.command().line("show moe:F16 --full --json").succeeds().json();
    let in_file = daemon.command().run(["show", &path, "--json"]).succeeds().json();
    for key in ["architecture", "parameters", "quantization", "types", "bits_per_weight", "metadata"] {
        assert_eq!(shown[key], in_file[key], "{key}");
    }
    assert_eq!(shown["architecture"], "llama");
    assert_eq!((&shown["stored"], &in_file["stored"]), (&json!(true), &json!(false)));
    let types = shown["types"].as_array().unwrap();
    let sum: u64 = types.iter().map(|row| row["bytes"].as_u64().unwrap()).sum();
    let tensors = shown["tensors"].as_array().unwrap();
    assert_eq!(sum, tensors.iter().map(|tensor| tensor["size"].as_u64().unwrap()).sum::<u64>());
    let file = fs::read(&path).unwrap();
    for (tensor, same) in tensors.iter().zip(in_file["tensors"].as_array().unwrap()) {
        for key in ["name", "type", "shape", "size", "file_offset", "experts"] {
            assert_eq!(tensor[key], same[key], "{key} of {tensor}");
        }
        let start = usize::try_from(tensor["file_offset"].as_u64().unwrap()).unwrap();
        let end = start + usize::try_from(tensor["size"].as_u64().unwrap()).unwrap();
        assert_eq!(tensor["digest"], Digest::of(&file[start..end]).to_string(), "the offset in the file");
    }
}

#[test]
fn layers_and_tensors_are_listed_as_tables() {
    let daemon = TestDaemon::start();
    daemon.command().run(["import", &moe(&daemon)]).succeeds();
    let layers = daemon.command().line("show moe:F16 --layers").succeeds().text();
    assert!(layers.contains("blk.0 ") && layers.contains("LAYER"), "{layers}");
    let shown = daemon.command().line("show moe:F16 --layers --json").succeeds().json();
    let bytes = |rows: &serde_json::Value, key: &str| -> u64 {
        rows.as_array().unwrap().iter().map(|row| row[key].as_u64().unwrap()).sum()
    };
    assert_eq!(shown["network_layers"][0]["layer"], "blk.0");
    assert_eq!(bytes(&shown["network_layers"], "bytes"), bytes(&shown["tensors"], "size"));
    let tensors = daemon.command().line("show moe:F16 --tensors").succeeds().text();
    assert!(tensors.contains("OFFSET") && tensors.contains("blk.0.ffn_up_exps.weight"), "{tensors}");
}

#[test]
fn full_header_has_every_key_in_order_with_its_type_and_complete_value() {
    let daemon = TestDaemon::start();
    let long: Vec<u8> = (0..300_u32).flat_map(u32::to_le_bytes).collect();
    let list = [&id::U32.to_le_bytes()[..], &300_u64.to_le_bytes(), &long].concat();
    let file = RawGguf::new()
        .key("z", id::FLOAT32, f32::INFINITY.to_le_bytes())
        .key("a", id::ARRAY, list)
        .key(b"\xfe", id::STRING, string(b"\xff"))
        .alignment(64);
    let mut file = file.bytes();
    file.resize(file.len().next_multiple_of(64), 0);
    import(&daemon, "full", &file);
    let shown = daemon.command().line("show full --full --json").succeeds().json();
    let form = json!({"version": 3, "byte_order": "little", "alignment": 64, "data_offset": file.len()});
    assert_eq!(shown["header"], form);
    let expected = json!([
        {"key": "z", "type": "float32", "value": "Infinity"},
        {"key": "a", "type": "array<uint32>", "value": (0..300).collect::<Vec<u32>>()},
        {"key": {"base64": "/g=="}, "type": "string", "value": {"base64": "/w=="}},
        {"key": "general.alignment", "type": "uint32", "value": 64},
    ]);
    assert_eq!(shown["keys"], expected);
    let text = daemon.command().line("show full --full").succeeds().text();
    assert!(text.contains("array<uint32>") && text.contains("[0, 1, 2, 3, …] of 300"), "{text}");
}

#[test]
fn shared_bytes_are_named_with_the_models_that_share_them() {
    let daemon = TestDaemon::start();
    let path = moe(&daemon);
    daemon.command().run(["import", &path]).succeeds();
    daemon.command().run(["import", &path, "--name", "same:1"]).succeeds();
    let shown = daemon.command().line("show moe:F16 --json").succeeds().json();
    assert_eq!(shown["shared_with"][0]["name"], "same:1");
    assert_eq!(shown["shared_with"][0]["bytes"], shown["shared_bytes"]);
    assert_eq!(shown["unique_bytes"], 0);
    let text = daemon.command().line("show moe:F16").succeeds().text();
    assert!(text.contains("SHARES WITH") && text.contains("same:1"), "{text}");
}

#[test]
fn show_does_not_delay_the_eviction_of_a_model() {
    let daemon = TestDaemon::start();
    daemon.command().run(["import", &moe(&daemon)]).succeeds();
    let last_opened =
        || daemon.command().line("df --json").succeeds().json()["models"][0]["last_opened"].clone();
    let before = last_opened();
    daemon.command().line("show moe:F16 --full").succeeds();
    assert_eq!(last_opened(), before);
}

#[test]
fn texts_that_a_model_lacks_are_not_found() {
    let daemon = TestDaemon::start();
    daemon.command().run(["import", &moe(&daemon)]).succeeds();
    for text in ["template", "license", "system", "parameters"] {
        let run = daemon.command().line(&format!("show moe:F16 --{text}")).exits_with(3);
        assert!(run.stderr.contains(&format!("has no {text}")), "{}", run.stderr);
    }
    let modelfile = daemon.command().line("show moe:F16 --modelfile").succeeds().text();
    assert!(modelfile.contains("\nFROM moe:F16\n"), "{modelfile}");
}

#[test]
fn local_file_that_is_not_a_model_is_refused() {
    let daemon = TestDaemon::start();
    let path = daemon.scratch().join("no.gguf");
    fs::write(&path, b"<html>").unwrap();
    let run = daemon.command().run(["show", path.to_str().unwrap()]).exits_with(1);
    assert!(
        run.stderr.contains("no.gguf: wrong format: expected a GGUF or safetensors file, found a web page"),
        "{}",
        run.stderr
    );
    let folder = daemon.scratch().join("folder");
    fs::create_dir(&folder).unwrap();
    daemon.command().run(["show", folder.to_str().unwrap()]).exits_with(2);
    daemon.command().run(["show", "/nonexistent.gguf"]).exits_with(3);
}

/// A folder with a safetensors file of these tensors and a configuration.
fn folder(daemon: &TestDaemon, name: &str, config: &Json, tensors: &[(&str, Dtype, &[u64])]) {
    let mut writer = HeaderWriter::new();
    writer.metadata("format", "pt").metadata("author", "nobody");
    let mut data = Vec::new();
    for (name, dtype, shape) in tensors {
        writer.tensor(name, *dtype, shape).unwrap();
        let bytes = shape.iter().product::<u64>() * dtype.bits() / 8;
        data.resize(data.len() + usize::try_from(bytes).unwrap(), 7);
    }
    let mut files = ModelFolder::default();
    files.add("model.safetensors", [writer.header().unwrap(), data].concat());
    files.add("config.json", config.to_string());
    let path = files.write_to(daemon.scratch().join(name));
    daemon.command().run(["import", path.to_str().unwrap(), "--name", name]).succeeds();
}

#[test]
fn quantisation_of_a_folder_is_that_of_its_configuration() {
    let daemon = TestDaemon::start();
    let gptq = json!({"model_type": "llama", "quantization_config": {"quant_method": "gptq", "bits": 4}});
    folder(
        &daemon,
        "gptq",
        &gptq,
        &[
            ("model.layers.0.q_proj.qweight", Dtype::I32, &[16, 128]),
            ("model.layers.0.q_proj.qzeros", Dtype::I32, &[1, 16]),
            ("model.layers.0.q_proj.scales", Dtype::F16, &[1, 128]),
        ],
    );
    let mlx = json!({"model_type": "llama", "quantization": {"group_size": 64, "bits": 4}});
    folder(
        &daemon,
        "mlx",
        &mlx,
        &[
            ("model.layers.0.q_proj.weight", Dtype::U32, &[128, 16]),
            ("model.layers.0.q_proj.scales", Dtype::BF16, &[128, 2]),
            ("model.layers.0.q_proj.biases", Dtype::BF16, &[128, 2]),
        ],
    );
    let plain = json!({"model_type": "llama"});
    folder(&daemon, "plain", &plain, &[("model.layers.0.q_proj.weight", Dtype::BF16, &[128, 128])]);
    // Recorded when they were stored, so that lists read no headers.
    let list = daemon.command().line("ls --json").succeeds().json();
    let listed = list["models"].as_array().unwrap().iter();
    let listed: Vec<_> =
        listed.map(|model| [&model["name"], &model["quantization"], &model["architecture"]]).collect();
    let expected = [("gptq", "GPTQ 4-bit"), ("mlx", "MLX 4-bit"), ("plain", "BF16")]
        .map(|(name, quantization)| [format!("{name}:latest"), quantization.to_owned(), "llama".to_owned()]);
    assert_eq!(json!(listed), json!(expected));
    for (name, quantization, bits) in [
        ("gptq", "GPTQ 4-bit", 8.0 * f64::from(8192 + 64 + 256) / 16384.0),
        ("mlx", "MLX 4-bit", 4.5),
        ("plain", "BF16", 16.0),
    ] {
        let shown = daemon.command().run(["show", name, "--json"]).succeeds().json();
        let found = (&shown["quantization"], &shown["parameters"], &shown["bits_per_weight"]);
        assert_eq!(found, (&json!(quantization), &json!(16384), &json!(bits)), "{name}");
    }
}

#[test]
fn whole_header_of_safetensors_files_is_shown() {
    let daemon = TestDaemon::start();
    folder(
        &daemon,
        "m",
        &json!({"model_type": "llama"}),
        &[("a", Dtype::F32, &[64]), ("b", Dtype::F8_E4M3, &[64])],
    );
    let shown = daemon.command().line("show m --full --json").succeeds().json();
    let start = shown["header"]["data_offset"].as_u64().unwrap();
    assert_eq!(
        shown["header"],
        json!({"format": "safetensors", "byte_order": "little", "data_offset": start})
    );
    let keys = json!([
        {"key": "author", "type": "string", "value": "nobody"},
        {"key": "format", "type": "string", "value": "pt"},
    ]);
    assert_eq!(shown["keys"], keys);
    let offsets: Vec<_> =
        shown["tensors"].as_array().unwrap().iter().map(|tensor| tensor["file_offset"].clone()).collect();
    assert_eq!(offsets, [json!(start), json!(start + 256)]);
    let text = daemon.command().line("show m --full").succeeds().text();
    assert!(text.contains("nobody") && !text.contains("alignment"), "{text}");
    let short = daemon.command().line("show m --json").succeeds().json();
    assert_eq!((&short["header"], &short["tensors"][0]["file_offset"]), (&Json::Null, &Json::Null));
    let error = daemon.command().line("export m --merge -o - --json").exits_with(1).error();
    assert!(
        error.message.contains("expected a model of GGUF files, found one with safetensors files"),
        "{error}"
    );
    assert!(error.hint.unwrap().contains("without --merge"));
}
