//! `diff`: what two models share and how they differ.

use std::collections::BTreeMap;
use std::fs;

use blobd_store_format::gguf::{ByteOrder, GgmlType};
use blobd_store_format::safetensors::{Dtype, HeaderWriter};
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::{ModelFile, ModelTensor};
use blobd_tests::registry::FakeRegistry;
use serde_json::{Value as Json, json};

fn import(daemon: &TestDaemon, name: &str, model: &ModelFile) {
    let path = model.write_to(daemon.scratch(), &format!("{name}.gguf"));
    daemon.command().run(["import", path.to_str().unwrap(), "--name", name]).succeeds();
}

fn diff(daemon: &TestDaemon, a: &str, b: &str) -> Json {
    let by_socket = daemon.command().run(["diff", a, b, "--json"]).succeeds().json();
    check_sums(&by_socket);
    by_socket
}

/// The sums over tensors of each change.
fn check_sums(report: &Json) {
    let mut sums: BTreeMap<String, (u64, u64, u64)> = BTreeMap::new();
    for tensor in report["tensors"].as_array().unwrap() {
        let bytes = |side: &str| tensor[side]["bytes"].as_u64().unwrap_or(0);
        let sum = sums.entry(tensor["change"].as_str().unwrap().to_owned()).or_default();
        *sum = (sum.0 + 1, sum.1 + bytes("a"), sum.2 + bytes("b"));
    }
    for row in report["changes"].as_array().unwrap() {
        let number = |key: &str| row[key].as_u64().unwrap();
        let found = (number("tensors"), number("a_bytes"), number("b_bytes"));
        assert_eq!(sums.remove(row["change"].as_str().unwrap()), Some(found), "{row}");
    }
    assert!(sums.is_empty(), "{sums:?}");
}

fn changes(report: &Json) -> BTreeMap<String, String> {
    let tensors = report["tensors"].as_array().unwrap().iter();
    let differing = tensors.filter(|tensor| tensor["change"] != "shared");
    let text = |json: &Json| json.as_str().unwrap().to_owned();
    differing.map(|tensor| (text(&tensor["name"]), text(&tensor["change"]))).collect()
}

#[test]
fn model_does_not_differ_from_itself() {
    let daemon = TestDaemon::start();
    import(&daemon, "a", &ModelFile::dense(1));
    let report = diff(&daemon, "a", "a");
    assert!(changes(&report).is_empty());
    assert_eq!((&report["only_a_bytes"], &report["only_b_bytes"]), (&json!(0), &json!(0)));
    assert_eq!((&report["metadata"], &report["layers"]), (&json!([]), &json!([])));
}

#[test]
fn changed_tensors_and_keys_are_named_with_their_bytes() {
    let daemon = TestDaemon::start();
    let base = ModelFile::dense(1).with("general.name", "base").with("general.only_a", 1_u32);
    let name = base.tensors[1].name.clone();
    let tuned =
        ModelFile::dense(1).with_changed(&name).with("general.name", "tuned").with("general.only_b", true);
    import(&daemon, "base", &base);
    import(&daemon, "tuned", &tuned);
    let report = diff(&daemon, "base", "tuned");
    assert_eq!(changes(&report), [(name, "changed".to_owned())].into());
    assert_eq!(report["only_a_bytes"], report["only_b_bytes"]);
    assert_eq!(report["only_a_bytes"], base.tensors[1].size_bytes());
    let mut keys: Vec<_> = report["metadata"].as_array().unwrap().clone();
    keys.sort_by_key(|row| row["key"].as_str().map(str::to_owned));
    let expected = json!([
        {"key": "general.name", "a": "base", "b": "tuned"},
        {"key": "general.only_a", "a": 1, "b": null},
        {"key": "general.only_b", "a": null, "b": true},
    ]);
    assert_eq!(json!(keys), expected);
    let text = daemon.command().line("diff base tuned").succeeds().text();
    assert!(text.contains("changed") && text.contains("general.only_b"), "{text}");
}

#[test]
fn added_and_removed_tensors_are_named() {
    let daemon = TestDaemon::start();
    let large = ModelFile::dense(1);
    let mut small = ModelFile::dense(1);
    let gone = small.tensors.pop().unwrap().name;
    import(&daemon, "large", &large);
    import(&daemon, "small", &small);
    assert_eq!(changes(&diff(&daemon, "large", "small")), [(gone.clone(), "removed".to_owned())].into());
    assert_eq!(changes(&diff(&daemon, "small", "large")), [(gone, "added".to_owned())].into());
}

#[test]
fn experts_that_are_equal_in_different_groups_are_shared() {
    let daemon = TestDaemon::start();
    let name = "blk.0.ffn_up.1.weight";
    import(&daemon, "a", &ModelFile::separate_experts(1, 4));
    import(&daemon, "b", &ModelFile::separate_experts(1, 4).with_changed(name));
    let report = diff(&daemon, "a", "b");
    assert_eq!(changes(&report), [(name.to_owned(), "changed".to_owned())].into());
}

#[test]
fn unknown_model_is_not_found() {
    let daemon = TestDaemon::start();
    import(&daemon, "a", &ModelFile::dense(1));
    daemon.command().line("diff a nobody --stored").exits_with(3);
    daemon.command().line("diff nobody a --stored").exits_with(3);
}

#[test]
fn files_are_compared_with_models_and_with_each_other() {
    let daemon = TestDaemon::start();
    let changed = ModelFile::dense(1).with_changed("output.weight");
    import(&daemon, "a", &ModelFile::dense(1));
    let [same, other] = [("same", &ModelFile::dense(1)), ("other", &changed)].map(|(name, model)| {
        model.write_to(daemon.scratch(), &format!("file-{name}.gguf")).to_str().unwrap().to_owned()
    });
    let report = diff(&daemon, "a", &same);
    assert_eq!((&report["only_a_bytes"], &report["only_b_bytes"]), (&json!(0), &json!(0)));
    for first in ["a", &same] {
        let report = diff(&daemon, first, &other);
        assert_eq!(changes(&report), [("output.weight".to_owned(), "changed".to_owned())].into(), "{first}");
    }
    daemon.command().run(["diff", "a", "/nonexistent.gguf"]).exits_with(3);
    // Experts that the store packs into one blob.
    import(&daemon, "moe", &ModelFile::separate_experts(1, 4));
    let moe = ModelFile::separate_experts(1, 4).write_to(daemon.scratch(), "file-moe.gguf");
    let report = diff(&daemon, "moe", moe.to_str().unwrap());
    assert_eq!(changes(&report), [].into());
}

#[test]
fn model_that_is_not_pulled_is_compared_by_its_header() {
    let (daemon, registry) = (TestDaemon::start(), FakeRegistry::start().unwrap());
    import(&daemon, "a", &ModelFile::dense(1));
    let mut other = ModelFile::dense(1).with("general.name", "other");
    other.add_noise(9, "extra.weight", GgmlType::F32, &[8]);
    let bytes = other.bytes();
    let layers: [(&str, &[u8]); 1] = [("application/vnd.ollama.image.model", &bytes)];
    registry.add_model("library/b:latest", b"{}", &layers).unwrap();
    let name = registry.name("library/b:latest");
    let report = diff(&daemon, "a", &name);
    let found = changes(&report);
    assert_eq!((found["extra.weight"].as_str(), found["output.weight"].as_str()), ("added", "unknown"));
    assert_eq!((&report["only_a_bytes"], &report["only_b_bytes"]), (&json!(0), &json!(32)));
    assert!(report["unknown_bytes"].as_u64().unwrap() > 0);
    let text = daemon.command().run(["diff", "a", &name]).succeeds().text();
    assert!(text.contains("not compared") && !text.contains("output.weight"), "{text}");
    assert_eq!(daemon.command().line("ls -q").succeeds().text(), "a:latest\n", "nothing is stored");
}

#[test]
fn values_of_changed_and_retyped_tensors_are_compared() {
    let daemon = TestDaemon::start();
    let with = |ggml_type: GgmlType, bytes: Vec<u8>| {
        let mut model = ModelFile::empty();
        model.tensors.push(ModelTensor::of_bytes("w", ggml_type, &[64], bytes));
        model
    };
    let floats = |value: f32| (0..64).flat_map(|_| value.to_le_bytes()).collect::<Vec<u8>>();
    import(&daemon, "a", &with(GgmlType::F32, floats(2.0)));
    import(&daemon, "b", &with(GgmlType::F32, floats(2.5)));
    // 2.0 as a half.
    import(&daemon, "c", &with(GgmlType::F16, [0x00, 0x40].repeat(64)));
    let error = |a: &str, b: &str| {
        let report = daemon.command().run(["diff", a, b, "--values", "--json"]).succeeds().json();
        report["tensors"][0]["relative_error"].clone()
    };
    assert_eq!(error("a", "b"), 0.25);
    assert_eq!(error("a", "c"), 0.0);
    assert_eq!(error("b", "c"), 0.2);
    let file = daemon.scratch().join("a.gguf");
    assert_eq!(error(file.to_str().unwrap(), "b"), 0.25, "a local file");
    let text = daemon.command().line("diff a b --values").succeeds().text();
    assert!(text.contains("ERROR") && text.contains("0.25"), "{text}");
}

/// A safetensors file of these tensors.
fn safetensors(tensors: &[(&str, Dtype, &[u64], &[u8])]) -> Vec<u8> {
    let mut writer = HeaderWriter::new();
    for (name, dtype, shape, _) in tensors {
        writer.tensor(name, *dtype, shape).unwrap();
    }
    let data = tensors.iter().flat_map(|(.., bytes)| bytes.iter().copied());
    [writer.header().unwrap(), data.collect()].concat()
}

fn import_file(daemon: &TestDaemon, name: &str, file: &[u8]) {
    let path = daemon.scratch().join(format!("{name}.safetensors"));
    fs::write(&path, file).unwrap();
    daemon.command().run(["import", path.to_str().unwrap(), "--name", name]).succeeds();
}

#[test]
fn values_of_safetensors_and_between_formats_are_compared() {
    let daemon = TestDaemon::start();
    let floats = |value: f32| (0..64).flat_map(|_| value.to_le_bytes()).collect::<Vec<u8>>();
    import_file(&daemon, "a", &safetensors(&[("w", Dtype::F32, &[4, 16], &floats(2.0))]));
    import_file(&daemon, "b", &safetensors(&[("w", Dtype::F32, &[4, 16], &floats(2.5))]));
    // E4M3: 0x40 is 2.
    import_file(&daemon, "fp8", &safetensors(&[("w", Dtype::F8_E4M3, &[4, 16], &[0x40; 64])]));
    let mut gguf = ModelFile::empty();
    gguf.tensors.push(ModelTensor::of_bytes("w", GgmlType::F32, &[16, 4], floats(2.5)));
    import(&daemon, "gguf", &gguf);
    let report =
        |a: &str, b: &str| daemon.command().run(["diff", a, b, "--values", "--json"]).succeeds().json();
    for (a, b, change, error) in [
        ("a", "b", "changed", json!(0.25)),
        ("a", "fp8", "retyped", json!(0.0)),
        ("b", "fp8", "retyped", json!(0.2)),
        ("a", "gguf", "changed", json!(0.25)),
        ("gguf", "b", "shared", Json::Null),
    ] {
        let report = report(a, b);
        let tensor = &report["tensors"][0];
        assert_eq!((&tensor["change"], &tensor["relative_error"]), (&json!(change), &error), "{a} {b}");
        assert_eq!(report["without_error"], 0, "{a} {b}");
    }
    import_file(&daemon, "nan", &safetensors(&[("w", Dtype::F8_E4M3, &[4, 16], &[0x7f; 64])]));
    assert_eq!(report("a", "nan")["without_error"], 1);
    let text = daemon.command().line("diff a nan --values").succeeds().text();
    assert!(text.contains("1 tensor with other numbers has no error"), "{text}");
}

#[test]
fn contents_under_other_names_and_in_stacks_are_shared() {
    const EXPERT_BYTES: usize = 64 << 10;
    let daemon = TestDaemon::start();
    let experts: Vec<Vec<u8>> = (1..=4_u8).map(|number| vec![number; EXPERT_BYTES]).collect();
    let shape: &[u64] = &[128, 256];
    let names: Vec<String> =
        (0..4).map(|number| format!("model.layers.0.mlp.experts.{number}.gate_proj.weight")).collect();
    let separate: Vec<(&str, Dtype, &[u64], &[u8])> = names
        .iter()
        .zip(&experts)
        .map(|(name, bytes)| (name.as_str(), Dtype::BF16, shape, bytes.as_slice()))
        .collect();
    import_file(&daemon, "separate", &safetensors(&separate));
    let (stack, all) = ("model.layers.0.mlp.experts.gate_proj.weight", experts.concat());
    import_file(&daemon, "stack", &safetensors(&[(stack, Dtype::BF16, &[4, 128, 256], &all)]));
    import_file(&daemon, "other", &safetensors(&[("blk.0.w", Dtype::BF16, &[4, 128, 256], &all)]));
    let all = json!(all.len());
    for (a, b, tensors) in [("separate", "stack", 5), ("stack", "separate", 5)] {
        let report = diff(&daemon, a, b);
        let bytes = ["shared_bytes", "only_a_bytes", "only_b_bytes"].map(|key| report[key].clone());
        assert_eq!(bytes, [all.clone(), json!(0), json!(0)], "{report}");
        assert_eq!(
            (&report["changes"][0]["change"], &report["changes"][0]["tensors"]),
            (&json!("renamed"), &json!(tensors))
        );
        let shown = daemon.command().run(["show", a, "--json"]).succeeds().json();
        assert_eq!(shown["shared_bytes"], all, "as show counts it");
    }
    let report = diff(&daemon, "stack", "other");
    let tensor = &report["tensors"][0];
    assert_eq!((&tensor["change"], &tensor["b_name"]), (&json!("renamed"), &json!("blk.0.w")), "{report}");
    assert_eq!(report["tensors"].as_array().unwrap().len(), 1);
    let text = daemon.command().line("diff stack other").succeeds().text();
    assert!(text.contains("gate_proj.weight → blk.0.w"), "{text}");
}

#[test]
fn values_of_big_endian_models_are_compared() {
    let daemon = TestDaemon::start();
    let with = |order: ByteOrder, bytes: Vec<u8>| {
        let mut model = ModelFile { order, ..ModelFile::empty() };
        model.tensors.push(ModelTensor::of_bytes("w", GgmlType::F32, &[64], bytes));
        model
    };
    let little = (0..64_u8).flat_map(|number| f32::from(number).to_le_bytes()).collect();
    let big = (0..64_u8).flat_map(|number| f32::from(number).to_be_bytes()).collect();
    import(&daemon, "little", &with(ByteOrder::Little, little));
    import(&daemon, "big", &with(ByteOrder::Big, big));
    let report = daemon.command().line("diff little big --values --json").succeeds().json();
    assert_eq!(report["tensors"][0]["relative_error"], 0.0);
}

/// A pipeline whose components have tensors of one name: floats of these values.
fn pipeline(daemon: &TestDaemon, name: &str, variant: &str, values: [f32; 2]) -> String {
    let folder = daemon.scratch().join(name);
    for (component, value) in ["unet", "vae"].into_iter().zip(values) {
        fs::create_dir_all(folder.join(component)).unwrap();
        let bytes = (0..64).flat_map(|_| value.to_le_bytes()).collect::<Vec<u8>>();
        let file = safetensors(&[("conv.weight", Dtype::F32, &[4, 16], &bytes)]);
        fs::write(folder.join(component).join(format!("model{variant}.safetensors")), file).unwrap();
    }
    fs::write(folder.join("model_index.json"), r#"{"_class_name":"P","unet":["d","U"],"vae":["d","V"]}"#)
        .unwrap();
    daemon.command().run(["import", folder.to_str().unwrap(), "--name", name]).succeeds();
    folder.to_str().unwrap().to_owned()
}

#[test]
fn tensors_of_one_name_in_several_files_are_compared_file_by_file() {
    let daemon = TestDaemon::start();
    pipeline(&daemon, "a", "", [1.0, 2.0]);
    pipeline(&daemon, "b", ".fp16", [1.0, 2.5]);
    let report = daemon.command().line("diff a b --values --json").succeeds().json();
    let rows: Vec<_> = report["tensors"]
        .as_array()
        .unwrap()
        .iter()
        .map(|row| json!([row["change"], row["a"]["file"], row["b"]["file"], row["relative_error"]]))
        .collect();
    let expected = [
        json!(["shared", "unet/model.safetensors", "unet/model.fp16.safetensors", null]),
        json!(["changed", "vae/model.safetensors", "vae/model.fp16.safetensors", 0.25]),
    ];
    assert_eq!(rows, expected);
    assert_eq!(report["without_error"], 0);
    let text = daemon.command().line("diff a b").succeeds().text();
    assert!(text.contains("vae/model.safetensors → vae/model.fp16.safetensors"), "{text}");
}

#[test]
fn tensor_in_several_files_is_named_with_its_file() {
    let daemon = TestDaemon::start();
    pipeline(&daemon, "p", "", [1.0, 2.0]);
    let tensor = |arguments: &[&str]| {
        daemon.command().run(["tensor", "p"].iter().chain(arguments).chain(&["--values", "0..1", "--json"]))
    };
    let of_vae = [
        &["vae/conv.weight"][..],
        &["vae/model.safetensors/conv.weight"],
        &["conv.weight", "--file", "vae/model.safetensors"],
        &["conv.weight", "--file", "vae/"],
    ];
    for arguments in of_vae {
        let shown = tensor(arguments).succeeds().json();
        assert_eq!((&shown["file"], &shown["values"]), (&json!("vae/model.safetensors"), &json!([2.0])));
    }
    let error = tensor(&["conv.weight"]).exits_with(2).error();
    assert_eq!(
        error.hint.as_deref(),
        Some("choose one with --file: unet/model.safetensors, vae/model.safetensors")
    );
    let error = tensor(&["conv.weight", "--file", "text_encoder"]).exits_with(3).error();
    assert_eq!(error.hint.as_deref(), Some("it is in unet/model.safetensors, vae/model.safetensors"));
    let error = tensor(&["conv"]).exits_with(3).error();
    assert_eq!(error.hint.as_deref(), Some("the most similar names are conv.weight"));
    let shown = daemon.command().line("show p --json").succeeds().json();
    let files: Vec<_> = shown["tensors"]
        .as_array()
        .unwrap()
        .iter()
        .map(|tensor| {
            let layer = usize::try_from(tensor["layer"].as_u64().unwrap()).unwrap();
            assert_eq!(shown["layers"][layer]["name"], tensor["file"]);
            tensor["file"].clone()
        })
        .collect();
    assert_eq!(files, ["unet/model.safetensors", "vae/model.safetensors"]);
    let text = daemon.command().line("show p --tensors").succeeds().text();
    assert!(text.contains("FILE") && text.contains("vae/model.safetensors"), "{text}");
}
