//! `blobd edit`: shards, template layers, files with values, models that cannot be edited.

use std::fs;
use std::sync::Arc;

use blobd_client::protocol::naming::{EditParams, KeyChange};
use blobd_server::ops;
use blobd_store::Store;
use blobd_store_format::gguf::Header;
use blobd_tests::command::Blobd;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::{ModelFile, noise};
use blobd_tests::oracle::sha256;
use blobd_tests::registry::FakeRegistry;
use blobd_tests::store_dir::{allocated_bytes, check_blobs, names, staged};
use blobd_tests::temp_dirs::tmpfs_directory;
use blobd_tests::verbs::{InProcess, Verbs as _};
use serde_json::{Value as Json, json};

const MODEL: &str = "application/vnd.ollama.image.model";
const TEMPLATE: &str = "application/vnd.ollama.image.template";
const LICENSE: &str = "application/vnd.ollama.image.license";

/// A daemon that has pulled these layers as the model `m`.
fn daemon_with(config: &[u8], layers: &[(&str, &[u8])]) -> TestDaemon {
    let registry = FakeRegistry::start().unwrap();
    registry.add_model("library/m:latest", config, layers).unwrap();
    let daemon = TestDaemon::start();
    let name = registry.name("library/m:latest");
    daemon.command().run(["pull", &name]).succeeds();
    daemon.command().run(["tag", &name, "m"]).succeeds();
    daemon.command().run(["rm", &name]).succeeds();
    daemon
}

fn component(commands: &Blobd, model: &str, component: &str) -> Vec<u8> {
    commands.run(["export", model, "--component", component, "-o", "-"]).succeeds().stdout
}

fn value(file: &[u8], key: &str) -> Option<String> {
    Header::parse(file).unwrap().value(key).map(|value| value.to_string())
}

#[test]
fn chat_template_and_template_layer_are_set_separately_and_reported() {
    let model = ModelFile::dense(1).bytes();
    let config = format!(
        r#"{{"model_format":"gguf","unknown":[1.50],"rootfs":{{"type":"layers","diff_ids":["sha256:{}","sha256:{}"]}}}}"#,
        sha256(&model),
        sha256(b"{{ .Prompt }}"),
    );
    let layers = [(MODEL, &model[..]), (TEMPLATE, b"{{ .Prompt }}"), (LICENSE, b"do what you want")];
    let daemon = daemon_with(config.as_bytes(), &layers);
    let commands = daemon.command();
    let jinja = daemon.scratch().join("t.jinja");
    fs::write(&jinja, "{% for m in messages %}\n").unwrap();
    let template = format!("@{}", jinja.display());
    let run = commands.run(["edit", "m", "n", "--template", &template]).succeeds();
    assert!(run.text().contains("template layer, which Ollama uses"), "{}", run.text());
    let edited = component(&commands, "n", "model");
    assert_eq!(value(&edited, "tokenizer.chat_template").unwrap(), r#""{% for m in messages %}\n""#);
    assert_eq!(component(&commands, "n", "template"), b"{{ .Prompt }}");
    assert_eq!(component(&commands, "n", "license"), b"do what you want");
    // Only the digest in the configuration differs.
    let expected = config.replace(&sha256(&model), &sha256(&edited));
    assert_eq!(String::from_utf8(component(&commands, "n", "config")).unwrap(), expected);
    let run = commands.run(["edit", "n", "o", "--template-layer", "{{ .Other }}", "--json"]).succeeds();
    assert_eq!((&run.json()["template_layer"], &run.json()["changed"]), (&json!("replaced"), &json!([])));
    assert_eq!(component(&commands, "o", "template"), b"{{ .Other }}");
    assert!(component(&commands, "o", "model") == edited, "the file is the same");
    commands.line("rm m n").succeeds();
    commands.line("verify").succeeds();
    assert!(component(&commands, "o", "model") == edited);
}

#[test]
fn template_layer_is_added_to_a_model_without_one() {
    let daemon = TestDaemon::start();
    let path = ModelFile::dense(1).write_to(daemon.scratch(), "m.gguf");
    daemon.command().run(["import", path.to_str().unwrap(), "--name", "m"]).succeeds();
    let run = daemon.command().run(["edit", "m", "n", "--template-layer", "{{ .A }}", "--json"]).succeeds();
    assert_eq!(run.json()["template_layer"], "added");
    assert_eq!(component(&daemon.command(), "n", "template"), b"{{ .A }}");
    let config: Json = serde_json::from_slice(&component(&daemon.command(), "n", "config")).unwrap();
    let digests =
        [sha256(&ModelFile::dense(1).bytes()), sha256(b"{{ .A }}")].map(|hex| format!("sha256:{hex}"));
    assert_eq!(config["rootfs"]["diff_ids"], json!(digests));
}

#[test]
fn only_the_first_shard_of_a_sharded_model_is_edited() {
    let shards: Vec<Vec<u8>> = ModelFile::dense(1).shards(3).iter().map(ModelFile::bytes).collect();
    // The first shard need not be the first layer.
    let layers = [(MODEL, &shards[2][..]), (MODEL, &shards[0]), (MODEL, &shards[1])];
    let daemon = daemon_with(b"{}", &layers);
    daemon.command().line("edit m n --set general.name=x").succeeds();
    let folder = tmpfs_directory();
    daemon.command().run(["export", "n", "-o", folder.path().to_str().unwrap()]).succeeds();
    let exported: Vec<Vec<u8>> =
        names(folder.path()).iter().map(|name| fs::read(folder.path().join(name)).unwrap()).collect();
    assert!(exported[0] == shards[2] && exported[2] == shards[1]);
    assert_eq!(value(&exported[1], "general.name").as_deref(), Some("\"x\""));
    assert_eq!(value(&exported[1], "split.count").as_deref(), Some("3"));
    let whole = daemon.command().line("export n --merge -o -").succeeds().stdout;
    assert_eq!(value(&whole, "general.name").as_deref(), Some("\"x\""));
}

#[test]
fn models_without_a_gguf_header_are_refused_with_the_reason() {
    let tensor = "application/vnd.ollama.image.tensor";
    let whole = noise(1, "whole", 1000);
    for (layers, reason) in [
        (vec![(tensor, &b"safetensors"[..])], "one layer per tensor"),
        (vec![(MODEL, &whole[..])], "stored whole"),
        (vec![(LICENSE, &b"free"[..])], "has no file of weights"),
    ] {
        let daemon = daemon_with(b"{}", &layers);
        let error = daemon.command().line("edit m n --set a=1 --json").exits_with(1).error();
        assert!(error.message.contains(reason), "{error}");
    }
}

#[test]
fn values_come_from_arguments_and_files_and_keep_their_types() {
    let folder = tmpfs_directory();
    let commands = Blobd::at_root(&folder.path().join("store"));
    let model = ModelFile::dense(1).with("llama.context_length", 4096_u64).with("tags", vec!["a", "b"]);
    let path = model.write_to(folder.path(), "m.gguf");
    commands.run(["import", path.to_str().unwrap(), "--name", "m"]).succeeds();
    let list = folder.path().join("list.json");
    fs::write(&list, r#"["x", "é"]"#).unwrap();
    let tags = format!("tags=@{}", list.display());
    let words = ["edit", "m", "n", "--set", "llama.context_length=8192", "--set", &tags, "--json"];
    let more = ["--set", "a.b:int8=-1", "--set", "flag=true", "--set", "list:array<float32>=[1,0.5]"];
    let run = commands.run(words.into_iter().chain(more)).succeeds();
    assert_eq!(run.json()["changed"][0], json!({"key": "llama.context_length", "from": 4096, "to": 8192}));
    let header = Header::parse(&commands.line("export n -o -").succeeds().stdout).unwrap();
    let typed = |key: &str| {
        let value = header.value(key).unwrap();
        format!("{} {value}", value.value_type())
    };
    assert_eq!(typed("llama.context_length"), "uint64 8192");
    assert_eq!(typed("a.b"), "int8 -1");
    assert_eq!(typed("flag"), "bool true");
    assert_eq!(typed("tags"), r#"array ["x", "é"]"#);
    assert_eq!(typed("list"), "array [1, 0.5]");
    fs::write(&list, [0xff]).unwrap();
    for (words, reason) in [
        (vec!["--set", &tags[..]], "not text in UTF-8"),
        (vec!["--set", "a"], "KEY=VALUE"),
        (vec!["--set", "flag:uint8=300"], "not a value of type uint8"),
        (vec![], "no change"),
    ] {
        let run = commands.run(["edit", "m", "x"].into_iter().chain(words));
        assert!(run.exits_with(2).stderr.contains(reason), "{reason}");
    }
    fs::write(&list, vec![b'x'; 1 << 20]).unwrap();
    let run = commands.run(["edit", "m", "x", "--set", &tags]);
    assert!(run.exits_with(2).stderr.contains("1048576 bytes, at most 786432"));
    commands.run(["edit", "m", "x", "--set", "a=@/absent"]).exits_with(3);
}

#[test]
fn store_grows_at_most_by_header_recipe_and_manifest() {
    let daemon = TestDaemon::start_on_disk();
    let model = ModelFile::dense_of(1, 4, 512);
    let path = model.write_to(daemon.scratch(), "m.gguf");
    daemon.command().run(["import", path.to_str().unwrap(), "--name", "m"]).succeeds();
    let before = allocated_bytes(daemon.root());
    daemon.command().line("edit m n --set general.name=x").succeeds();
    let grown = allocated_bytes(daemon.root()).saturating_sub(before);
    // Header, configuration, recipe, manifest, origin, and directories: a few blocks each.
    assert!(grown < 128 << 10, "{grown} bytes");
    assert!(model.bytes().len() > 10 << 20);
    check_blobs(daemon.root());
    daemon.command().line("verify").succeeds();
}

#[test]
fn cancelled_edit_leaves_nothing_behind() {
    let folder = tmpfs_directory();
    let verbs = InProcess::of(Arc::new(Store::open(folder.path().join("store")).unwrap()), folder.path());
    let path = ModelFile::dense(1).write_to(folder.path(), "m.gguf");
    verbs.import(&path, Some("m")).unwrap();
    let blobs = folder.path().join("store/blobs");
    let before = names(&blobs);
    let key = KeyChange { key: "a".to_owned(), value: Some("1".to_owned()), value_type: None };
    let params = EditParams {
        source: "m".parse().unwrap(),
        target: "n".parse().unwrap(),
        keys: vec![key],
        template_layer: None,
        files: Vec::new(),
        force: false,
        dry_run: false,
    };
    let error = ops::edit(
        &verbs.store,
        ops::Requester::own(),
        &ops::CallerPolicy::default(),
        &params,
        &mut |_read, _total| false,
    )
    .unwrap_err();
    assert!(error.to_string().contains("has disconnected"), "{error}");
    assert_eq!(names(&blobs), before);
    assert_eq!(staged(&folder.path().join("store")), [""; 0]);
    assert_eq!(verbs.list().unwrap().models.len(), 1);
}
