//! Models that are no language models: what `show`, `ls` and an import say about them.

use std::fs;
use std::process::Stdio;

use blobd_model::kind::ModelKind;
use blobd_store_format::gguf::{GgmlType, Header, Value};
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::registry::FakeRegistry;
use blobd_tests::terminal::Terminal;
use serde_json::json;

/// A file with an architecture, metadata, and tensors.
fn file(architecture: &str, keys: &[(&str, Value)], tensors: &[&str]) -> ModelFile {
    let mut file = ModelFile::empty();
    if !architecture.is_empty() {
        file = file.with("general.architecture", architecture);
    }
    for (key, value) in keys {
        file = file.with(key, value.clone());
    }
    for name in tensors {
        file.add_noise(1, name, GgmlType::F32, &[32, 4]);
    }
    file
}

/// A file of each kind, with every fact that `show` lists on a line.
fn files() -> Vec<(ModelKind, ModelFile)> {
    let tensors = ["token_embd.weight", "blk.0.attn_q.weight"];
    let pooling = |number: u32| vec![("qwen3.pooling_type", Value::from(number))];
    let declared = |name: &str| ("general.type", Value::from(name));
    let adapter = [
        declared("adapter"),
        ("adapter.type", Value::from("lora")),
        ("adapter.lora.alpha", Value::from(0.1_f32)),
        ("general.base_model.count", Value::from(1_u32)),
        ("general.base_model.0.name", Value::from("Base")),
    ];
    let tokens = Value::strings((0..300).map(|number| format!("token{number}").into_bytes()));
    vec![
        (ModelKind::Model, full()),
        (ModelKind::Embedding, file("qwen3", &pooling(3), &tensors)),
        (ModelKind::Reranker, file("qwen3", &pooling(4), &tensors)),
        (ModelKind::Encoder, file("t5encoder", &[], &["token_embd.weight", "enc.blk.0.attn_q.weight"])),
        (ModelKind::Diffusion, file("flux", &[], &["double_blocks.0.img_attn.qkv.weight"])),
        (ModelKind::Vocabulary, file("llama", &[("tokenizer.ggml.tokens", tokens)], &[])),
        (ModelKind::Adapter, file("llama", &adapter, &["blk.0.attn_q.weight.lora_a"])),
        (ModelKind::ControlVector, file("controlvector", &[], &["direction.1", "direction.2"])),
        (ModelKind::Imatrix, file("", &[declared("imatrix")], &["blk.0.attn_q.weight.in_sum2"])),
        (ModelKind::Projector, file("clip", &[declared("mmproj")], &["v.patch_embd.weight"])),
        (ModelKind::Draft, file("eagle3", &[], &["blk.0.attn_q.weight"])),
    ]
}

/// A language model with every fact, and with many types of tensors.
fn full() -> ModelFile {
    let long = "A description that is longer than a line of a terminal. ".repeat(20);
    let mut file = ModelFile::dense(1)
        .with("general.name", "Tiny")
        .with("general.organization", "ACME")
        .with("general.author", "Jane Doe")
        .with("general.quantized_by", "someone")
        .with("general.license", "apache-2.0")
        .with("general.license.link", "https://example.org/LICENSE")
        .with("general.description", long.as_str())
        .with("general.base_model.count", 1_u32)
        .with("general.base_model.0.name", "Base")
        .with("general.sampling.temp", 0.6_f32)
        .with("llama.context_length", 8192_u32)
        .with("llama.expert_count", 8_u32)
        .with("tokenizer.chat_template", long.as_str());
    for ggml_type in [GgmlType::F16, GgmlType::Q8_0, GgmlType::Q4_0, GgmlType::Q5_1, GgmlType::BF16] {
        file.add_noise(2, &format!("extra.{ggml_type}"), ggml_type, &[32, 4]);
    }
    file
}

fn import(daemon: &TestDaemon, name: &str, model: &ModelFile) {
    let path = model.write_to(daemon.scratch(), &format!("{name}.gguf"));
    daemon.command().run(["import", path.to_str().unwrap(), "--name", name]).succeeds();
}

/// What a command shows on a terminal of 80 columns.
fn on_terminal(daemon: &TestDaemon, words: &[&str]) -> String {
    let terminal = Terminal::new(40, 80);
    let mut command = daemon.command().command();
    command.args(words).stdout(terminal.another()).stderr(Stdio::inherit());
    assert!(command.status().unwrap().success());
    // It keeps descriptors of the terminal.
    drop(command);
    terminal.shown()
}

/// The lines that a text takes on a terminal of 80 columns.
fn screen_lines(text: &str) -> usize {
    text.lines().map(|line| line.trim_end().chars().count().div_ceil(80).max(1)).sum()
}

#[test]
fn every_kind_is_shown_in_fewer_lines_than_a_screen_has() {
    let daemon = TestDaemon::start();
    for (kind, model) in files() {
        let name = format!("{kind}-x");
        import(&daemon, &name, &model);
        let path = daemon.scratch().join(format!("{name}.gguf"));
        for subject in [name.as_str(), path.to_str().unwrap()] {
            let shown = daemon.command().run(["show", subject, "--json"]).succeeds().json();
            assert_eq!(shown["kind"], kind.name(), "{subject}");
            let text = on_terminal(&daemon, &["show", subject]);
            assert!(screen_lines(&text) < 40, "{subject}: {} lines\n{text}", screen_lines(&text));
            assert!(text.contains(kind.name()), "{text}");
        }
    }
}

#[test]
fn many_files_types_and_sharers_do_not_fill_the_screen() {
    let daemon = TestDaemon::start();
    for number in 0..15 {
        let model = full().with("number", u32::try_from(number).unwrap());
        import(&daemon, &format!("sibling{number}"), &model);
    }
    let text = on_terminal(&daemon, &["show", "sibling0"]);
    assert!(screen_lines(&text) < 40, "{} lines\n{text}", screen_lines(&text));
    assert!(text.contains("SHARES WITH") && text.contains(" more"), "{text}");
    let shown = daemon.command().line("show sibling0 --json").succeeds().json();
    assert_eq!(shown["shared_with"].as_array().unwrap().len(), 14, "JSON has all");
}

#[test]
fn only_models_that_generate_text_have_completion() {
    let daemon = TestDaemon::start();
    for (kind, model) in files() {
        let name = format!("{kind}-x");
        import(&daemon, &name, &model);
        let shown = daemon.command().run(["show", &name, "--json"]).succeeds().json();
        let completes = shown["capabilities"].as_array().unwrap().contains(&json!("completion"));
        assert_eq!(completes, kind == ModelKind::Model, "{kind}: {}", shown["capabilities"]);
        let adapter =
            (kind == ModelKind::Adapter).then(|| json!({"type": "lora", "alpha": 0.1, "base": "Base"}));
        assert_eq!(shown.get("adapter"), adapter.as_ref(), "{kind}");
    }
}

#[test]
fn list_has_a_column_of_kinds_if_they_differ_and_filters_them() {
    let daemon = TestDaemon::start();
    import(&daemon, "plain", &ModelFile::dense(1));
    let text = daemon.command().line("ls").succeeds().text();
    assert!(!text.contains("KIND"), "all are models\n{text}");
    for (kind, model) in files() {
        import(&daemon, &format!("{kind}-x"), &model);
    }
    let text = daemon.command().line("ls").succeeds().text();
    assert!(text.contains("KIND") && text.contains("control-vector"), "{text}");
    let listed = daemon.command().line("ls --json").succeeds().json();
    for model in listed["models"].as_array().unwrap() {
        let name = model["name"].as_str().unwrap();
        let expected = if name == "plain:latest" { "model" } else { name.trim_end_matches("-x:latest") };
        assert_eq!(model["kind"], expected, "{name}");
    }
    let names = daemon.command().line("ls -q --filter kind=adapter").succeeds().text();
    assert_eq!(names, "adapter-x:latest\n");
    let names = daemon.command().line("ls -q --filter kind=adapter,draft").succeeds().text();
    assert_eq!(names, "adapter-x:latest\ndraft-x:latest\n");
    let line = daemon.command().run(["ls", "--format", "{kind} {name}", "draft"]).succeeds().text();
    assert_eq!(line, "draft draft-x:latest\n");
    let refused = daemon.command().line("ls --filter kind=lora").exits_with(2);
    assert!(refused.stderr.contains("control-vector"), "{}", refused.stderr);
}

#[test]
fn kind_of_a_model_is_kept_by_copies_edits_and_the_trash() {
    let daemon = TestDaemon::start();
    let (_, adapter) = files().remove(6);
    import(&daemon, "lora", &adapter);
    for line in ["tag lora copy", "edit lora edited --set general.name=new", "rename copy renamed"] {
        daemon.command().line(line).succeeds();
    }
    daemon.command().line("rm --keep 1d lora").succeeds();
    daemon.command().line("undelete lora").succeeds();
    let listed = daemon.command().run(["ls", "--format", "{name} {kind}"]).succeeds().text();
    assert_eq!(listed, "edited:latest adapter\nlora:latest adapter\nrenamed:latest adapter\n");
}

#[test]
fn import_of_one_file_has_the_media_type_of_its_kind() {
    let daemon = TestDaemon::start();
    for (kind, model) in files() {
        let name = format!("{kind}-x");
        import(&daemon, &name, &model);
        let shown = daemon.command().run(["show", &name, "--json"]).succeeds().json();
        assert_eq!(shown["layers"][1]["media_type"], kind.media_type(), "{kind}");
        let target = daemon.scratch().join(format!("{name}-exported"));
        daemon.command().run(["export", &name, "-o", target.to_str().unwrap()]).succeeds();
        assert!(fs::read(target).unwrap() == model.bytes(), "{kind}");
    }
}

#[test]
fn license_of_the_header_is_shown_where_the_manifest_has_none() {
    let daemon = TestDaemon::start();
    import(&daemon, "m", &full());
    let license = daemon.command().line("show m --license").succeeds().text();
    assert_eq!(license, "apache-2.0\nhttps://example.org/LICENSE\n");
    let shown = daemon.command().line("show m --json").succeeds().json();
    assert_eq!((&shown["about"]["organization"], &shown["about"]["name"]), (&json!("ACME"), &json!("Tiny")));
    assert_eq!(shown["about"]["base_models"], json!([{ "name": "Base" }]));
}

#[test]
fn model_that_runs_elsewhere_is_shown_with_its_host() {
    let (daemon, registry) = (TestDaemon::start(), FakeRegistry::start().unwrap());
    let config = json!({
        "model_format": "", "remote_host": "https://ollama.com:443", "remote_model": "gpt-oss:120b",
        "capabilities": ["completion", "tools"], "context_length": 131_072,
    });
    let config = config.to_string();
    let digest = registry.add_blob(config.as_bytes());
    let media_type = "application/vnd.docker.container.image.v1+json";
    let config = json!({ "mediaType": media_type, "digest": digest, "size": config.len() });
    let manifest = json!({ "schemaVersion": 2, "config": config, "layers": null });
    registry.add_manifest("library/cloud:latest", manifest.to_string().as_bytes());
    let name = registry.name("library/cloud:latest");
    for _stored in [false, true] {
        let text = daemon.command().run(["show", &name]).succeeds().text();
        assert!(text.contains("runs at https://ollama.com:443, has no weights"), "{text}");
        assert!(text.contains("completion, tools") && text.contains("131072"), "{text}");
        assert!(!text.contains("parameters"), "{text}");
        let shown = daemon.command().run(["show", &name, "--json"]).succeeds().json();
        assert_eq!(shown["config"]["remote_model"], "gpt-oss:120b");
        daemon.command().run(["pull", &name]).succeeds();
    }
}

#[test]
fn fields_of_the_configuration_are_shown() {
    let (daemon, registry) = (TestDaemon::start(), FakeRegistry::start().unwrap());
    let config = json!({
        "renderer": "qwen3.5", "parser": "qwen3.5", "requires": "0.19.0",
        "draft": {"architecture": "qwen3_5_mtp", "tensor_prefix": "draft."},
        "generation_defaults": {"temperature": 0.6},
    });
    let weights = full().bytes();
    let layers: [(&str, &[u8]); 1] = [("application/vnd.ollama.image.model", &weights)];
    registry.add_model("library/q:latest", config.to_string().as_bytes(), &layers).unwrap();
    let text = daemon.command().run(["show", &registry.name("library/q:latest")]).succeeds().text();
    for expected in [
        "renderer qwen3.5, parser qwen3.5, requires 0.19.0",
        "qwen3_5_mtp, tensors draft.…",
        "temperature 0.6 (recommended)",
        "completion, tools, thinking",
    ] {
        assert!(text.contains(expected), "{expected}\n{text}");
    }
}

#[test]
fn adapter_that_was_imported_by_itself_can_be_edited_and_run() {
    let daemon = TestDaemon::start();
    let (_, adapter) = files().remove(6);
    import(&daemon, "lora", &adapter);
    daemon.command().line("edit lora named --set general.name=new").succeeds();
    let shown = daemon.command().line("show named --json").succeeds().json();
    assert_eq!((&shown["about"]["name"], &shown["kind"]), (&json!("new"), &json!("adapter")));
    let run = daemon.command().run(["exec", "--", "cat", "/blobd/lora.gguf"]).succeeds();
    let seen = Header::parse(&run.stdout).unwrap();
    assert_eq!(seen.tensors().len(), adapter.tensors.len());
    assert_eq!(ModelKind::from_header(&seen), ModelKind::Adapter);
}
