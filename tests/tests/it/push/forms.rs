//! Models pushed in the forms of other publishers (`push --as`): what they cost, what is in them, and what is refused.

use std::fs;
use std::path::Path;

use blobd_store_format::digest::Digest;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::folders::ModelFolder;
use blobd_tests::model::ModelFile;
use blobd_tests::oracle::sha256;
use blobd_tests::registry::FakeRegistry;
use serde_json::{Value as Json, json};

use super::{MODEL, check_pulled, push, with_model};

const FORMS: [&str; 2] = ["modelpack", "docker"];
/// More than a configuration and a manifest of few files have.
const SMALL: u64 = 1024;

/// The manifest that a name has at the registry, and its configuration.
fn published(registry: &FakeRegistry, repository: &str, tag: &str) -> (Json, Json) {
    let raw = registry.manifest(&format!("/v2/{repository}/manifests/{tag}")).unwrap();
    let manifest: Json = serde_json::from_slice(&raw).unwrap();
    let config: Digest = manifest["config"]["digest"].as_str().unwrap().parse().unwrap();
    let config = serde_json::from_slice(&registry.blob(config).unwrap()).unwrap();
    (manifest, config)
}

#[test]
fn second_form_costs_a_manifest_and_a_configuration() {
    let registry = FakeRegistry::start().unwrap();
    let (daemon, weights) = with_model(&ModelFile::dense_of(1, 2, 128));
    push(&daemon, "tiny", &registry.name("team/tiny:1"), &["--no-index"]);
    for form in FORMS {
        let before = registry.bytes_uploaded();
        let name = registry.name(&format!("team/tiny:{form}"));
        let planned = push(&daemon, "tiny", &name, &["--as", form, "--dry-run"]);
        assert_eq!((&planned["form"], registry.bytes_uploaded()), (&form.into(), before));
        let pushed = push(&daemon, "tiny", &name, &["--as", form, "--no-index"]);
        assert_eq!((&pushed["digest"], &pushed["sent_bytes"]), (&planned["digest"], &planned["sent_bytes"]));
        assert_eq!(pushed["present_bytes"], weights.len());
        let sent = registry.bytes_uploaded() - before;
        assert!(sent > 0 && sent < SMALL && pushed["sent_bytes"] == sent, "{sent} bytes");
        check_pulled(&name, &weights);
        // The same bytes are made again.
        let again = push(&daemon, "tiny", &name, &["--as", form]);
        assert_eq!((&again["unchanged"], &again["sent_bytes"]), (&true.into(), &0.into()));
        let text = daemon.command().run(["push", "tiny", &name, "--as", form]).succeeds().text();
        assert!(text.contains(&format!(" as {form}: ")), "{text}");
    }
}

#[test]
fn manifests_and_configurations_are_those_of_the_form() {
    let registry = FakeRegistry::start().unwrap();
    let (daemon, weights) = with_model(&ModelFile::dense(1));
    for form in FORMS {
        push(&daemon, "tiny", &registry.name(&format!("team/tiny:{form}")), &["--as", form]);
    }
    let layer = |media_type: &str| {
        json!([{
            "mediaType": media_type,
            "digest": format!("sha256:{}", sha256(&weights)),
            "size": weights.len(),
            "annotations": { "org.cncf.model.filepath": "model.gguf" },
        }])
    };
    let digests = json!([format!("sha256:{}", sha256(&weights))]);
    let (manifest, config) = published(&registry, "team/tiny", "modelpack");
    assert_eq!(manifest["artifactType"], "application/vnd.cncf.model.manifest.v1+json");
    assert_eq!(manifest["config"]["mediaType"], "application/vnd.cncf.model.config.v1+json");
    assert_eq!(manifest["layers"], layer("application/vnd.cncf.model.weight.v1.raw"));
    assert_eq!(config["modelfs"], json!({ "type": "layers", "diffIds": digests }));
    assert_eq!(
        (&config["config"]["format"], &config["descriptor"]["family"]),
        (&"gguf".into(), &"llama".into())
    );
    let (manifest, config) = published(&registry, "team/tiny", "docker");
    assert_eq!(manifest["config"]["mediaType"], "application/vnd.docker.ai.model.config.v0.1+json");
    assert_eq!(manifest["layers"], layer("application/vnd.docker.ai.gguf.v3"));
    assert_eq!(config["rootfs"], json!({ "type": "rootfs", "diff_ids": digests }));
    assert_eq!(
        (&config["config"]["format"], &config["config"]["architecture"]),
        (&"gguf".into(), &"llama".into())
    );
}

#[test]
fn folder_has_all_its_files_in_each_form() {
    let (registry, daemon) = (FakeRegistry::start().unwrap(), TestDaemon::start());
    let mut folder = ModelFolder::transformers(1);
    folder.add("tokenizer/vocab.txt", "a\nb\n");
    // Two paths of one content.
    folder.add("first.json", "[1]");
    folder.add("second.json", "[1]");
    let path = folder.write_to(daemon.scratch().join("folder"));
    daemon.command().run(["import", path.to_str().unwrap(), "--name", "folder"]).succeeds();
    let exported = |daemon: &TestDaemon, name: &str| {
        let out = daemon.scratch().join("exported");
        fs::create_dir(&out).unwrap();
        daemon.command().run(["export", name, "-o", out.to_str().unwrap()]).succeeds();
        out
    };
    let expected = exported(&daemon, "folder");
    for form in FORMS {
        let name = registry.name(&format!("team/folder:{form}"));
        push(&daemon, "folder", &name, &["--as", form]);
        let other = TestDaemon::start();
        other.command().run(["pull", &name, "--name", "copy"]).succeeds();
        let found = exported(&other, "copy");
        for file in ["config.json", "tokenizer/vocab.txt", "first.json", "second.json"] {
            assert_eq!(read(&found, file), read(&expected, file), "{form}: {file}");
        }
        let weights = |folder: &Path| {
            let files = fs::read_dir(folder).unwrap().map(|file| file.unwrap().path());
            let mut weights: Vec<_> =
                files.filter(|file| file.extension().is_some_and(|end| end == "safetensors")).collect();
            weights.sort();
            weights.iter().map(|file| fs::read(file).unwrap()).collect::<Vec<_>>()
        };
        assert!(!weights(&found).is_empty() && weights(&found) == weights(&expected), "{form}");
    }
}

fn read(folder: &Path, file: &str) -> Vec<u8> {
    fs::read(folder.join(file)).unwrap_or_else(|error| panic!("{file}: {error}"))
}

#[test]
fn settings_go_as_files_and_files_without_a_media_type_are_refused() {
    let registry = FakeRegistry::start().unwrap();
    let (weights, projector) = (ModelFile::dense(1).bytes(), ModelFile::dense(2).bytes());
    let of_ollama = |kind: &str| format!("application/vnd.ollama.image.{kind}");
    let [template, params, license] = ["template", "params", "license"].map(of_ollama);
    let (projectors, adapters) = (of_ollama("projector"), of_ollama("adapter"));
    let settings: [(&str, &[u8]); 3] =
        [(&template, b"{{ .Prompt }}"), (&params, br#"{"top_k":3}"#), (&license, b"free")];
    let offer = |name: &str, more: &[(&str, &[u8])]| {
        let layers = [&[(MODEL, weights.as_slice())], &settings[..], more].concat();
        registry.add_model(name, b"{}", &layers).unwrap();
    };
    offer("me/plain:1", &[]);
    offer("me/seeing:1", &[(&projectors, &projector)]);
    offer("me/adapted:1", &[(&adapters, &projector)]);
    let daemon = TestDaemon::start();
    for (model, form, refused) in [
        ("plain", "modelpack", None),
        ("plain", "docker", None),
        ("seeing", "docker", None),
        ("seeing", "modelpack", Some("mmproj-model.gguf: the form modelpack has no media type")),
        ("adapted", "docker", Some("model-adapter.gguf: the form docker has no media type")),
        ("adapted", "modelpack", Some("model-adapter.gguf: the form modelpack has no media type")),
    ] {
        let (from, name) =
            (registry.name(&format!("me/{model}:1")), registry.name(&format!("me/{model}:{form}")));
        daemon.command().run(["pull", &from]).succeeds();
        let arguments = ["push", &from, &name, "--as", form, "--json"];
        if let Some(refused) = refused {
            let error = daemon.command().run(arguments).exits_with(2).error();
            assert!(error.message.contains(refused), "{error}");
            assert!(error.message.contains("without --as"), "{error}");
            continue;
        }
        daemon.command().run(arguments).succeeds();
        check_pulled(&name, &weights);
        let (manifest, _) = published(&registry, &format!("me/{model}"), form);
        let layers = manifest["layers"].as_array().unwrap();
        let has =
            |bytes: &[u8]| layers.iter().any(|layer| layer["digest"] == format!("sha256:{}", sha256(bytes)));
        assert!(settings.iter().all(|(_, bytes)| has(bytes)), "{manifest}");
        assert_eq!(has(&projector), model == "seeing");
    }
}

#[test]
fn model_that_has_the_form_already_keeps_its_manifest() {
    let registry = FakeRegistry::start().unwrap();
    let (daemon, _) = with_model(&ModelFile::dense(1));
    for form in FORMS {
        let first = registry.name(&format!("team/tiny:{form}"));
        let pushed = push(&daemon, "tiny", &first, &["--as", form]);
        daemon.command().run(["pull", &first, "--name", form]).succeeds();
        let second = push(&daemon, form, &registry.name(&format!("team/again:{form}")), &["--as", form]);
        assert_eq!((&second["digest"], &second["sent_bytes"]), (&pushed["digest"], &0.into()));
    }
    // From one form into the other.
    let crossed = push(&daemon, "docker", &registry.name("team/crossed:1"), &["--as", "modelpack"]);
    let direct = push(&daemon, "modelpack", &registry.name("team/crossed:1"), &[]);
    assert_eq!((&crossed["digest"], &crossed["sent_bytes"]), (&direct["digest"], &0.into()));
}
