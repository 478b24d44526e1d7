//! Models that are not in the store, described before the download.

use std::fs;

use blobd_store_format::digest::Digest;
use blobd_store_format::gguf::GgmlType;
use blobd_tests::command::Blobd;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::http;
use blobd_tests::model::ModelFile;
use blobd_tests::registry::{FakeRegistry, Fault};
use blobd_tests::store_dir::{names, snapshot};
use blobd_tests::temp_dirs::tmpfs_directory;

const MODEL: &str = "application/vnd.ollama.image.model";
const TEMPLATE: &str = "application/vnd.ollama.image.template";
const LICENSE: &str = "application/vnd.ollama.image.license";

/// A model whose header has megabytes, with tensors of 8 MiB.
fn large_header() -> ModelFile {
    let tokens: Vec<String> = (0..200_000).map(|number| format!("token-{number}")).collect();
    ModelFile::dense_of(1, 4, 512).with("tokenizer.ggml.tokens", tokens)
}

fn publish(registry: &FakeRegistry, model: &ModelFile) -> String {
    let layers: [(&str, &[u8]); 3] =
        [(TEMPLATE, b"{{ .Prompt }}"), (MODEL, &model.bytes()), (LICENSE, b"MIT License")];
    registry.add_model("me/big:1", b"{}", &layers).unwrap();
    registry.name("me/big:1")
}

#[test]
fn only_the_header_of_a_model_that_is_not_pulled_is_fetched_and_nothing_is_stored() {
    let registry = FakeRegistry::start().unwrap();
    let model = large_header();
    let name = publish(&registry, &model);
    let header = model.header().unwrap().len() as u64;
    let daemon = TestDaemon::start();
    let files =
        || ["blobs", "recipes", "manifests", "staging"].map(|part| snapshot(&daemon.root().join(part)));
    let before = files();
    let shown = daemon.command().run(["show", &name, "--json"]).succeeds().json();
    let served = registry.bytes_served();
    assert!(served <= header + (1 << 20), "{served} bytes served, the header has {header}");
    assert_eq!(files(), before);
    assert!(names(&daemon.root().join("partial")).is_empty());
    assert!(daemon.command().line("ls --json").succeeds().json()["models"].as_array().unwrap().is_empty());
    assert_eq!(shown["stored"], false);
    assert_eq!(shown["vocabulary_size"], 200_000);
    assert_eq!(shown["tensors"].as_array().unwrap().len(), model.tensors.len());

    daemon.command().run(["pull", &name]).succeeds();
    let stored = daemon.command().run(["show", &name, "--json"]).succeeds().json();
    for key in ["digest", "architecture", "parameters", "types", "metadata", "capabilities", "size"] {
        assert_eq!(shown[key], stored[key], "{key}");
    }
    assert_eq!(stored["stored"], true);
}

#[test]
fn texts_of_a_model_that_is_not_pulled_are_printed() {
    let registry = FakeRegistry::start().unwrap();
    let name = publish(&registry, &ModelFile::dense(1));
    let daemon = TestDaemon::start();
    let text = |option: &str| daemon.embedded().run(["show", &name, option]).succeeds().text();
    assert_eq!(text("--template"), "{{ .Prompt }}\n");
    assert_eq!(text("--license"), "MIT License\n");
    assert!(daemon.command().run(["show", &name]).succeeds().text().contains("not pulled; read from http"));
}

/// What only the daemon can read, at the place to which a registry redirects.
const SECRET: &[u8] = b"password=hunter2";

#[test]
fn text_with_a_wrong_digest_is_not_returned() {
    let (registry, other) = (FakeRegistry::start().unwrap(), FakeRegistry::start().unwrap());
    other.add_page("/secret", SECRET, &[]);
    let daemon = TestDaemon::start();
    for component in ["config", "template", "system", "params", "license", "messages", "json"] {
        // Of the same length, so that only the digest is wrong.
        let named = format!("{component:.<16}");
        let text = format!("application/vnd.ollama.image.{component}");
        let layers: [(&str, &[u8]); 2] = [(MODEL, &ModelFile::dense(1).bytes()), (&text, named.as_bytes())];
        let config = if component == "config" { named.as_bytes() } else { b"{}" };
        registry.add_model("me/model:1", config, &layers).unwrap();
        let digest = Digest::of(named.as_bytes());
        registry.add_fault(
            &digest.to_hex(),
            usize::MAX,
            Fault::RedirectTo(format!("{}/secret", other.url())),
        );
        let name = registry.name("me/model:1");
        let body = format!(r#"{{"reference":"{name}"}}"#);
        let response = http::post(&daemon.socket(), "/v1/inspect", &body);
        assert_eq!(response.status, 502, "{component}: {}", response.body);
        assert!(response.body.contains(&digest.to_string()), "{component}: {}", response.body);
        for words in [["show", &name, "--json"].as_slice(), &["fit", &name], &["diff", &name, &name]] {
            let run = daemon.command().run(words);
            assert_ne!(run.code, 0, "{component}: {words:?}");
            assert!(!format!("{}{}", run.text(), run.stderr).contains("hunter2"), "{component}: {words:?}");
        }
        assert!(!response.body.contains("hunter2") && !response.body.contains("cGFzc3dvcmQ"), "{component}");
        registry.clear_faults();
    }
}

#[test]
fn header_whose_parts_are_redirected_to_another_server_is_read_from_one() {
    let (registry, other) = (FakeRegistry::start().unwrap(), FakeRegistry::start().unwrap());
    let model = large_header();
    let name = publish(&registry, &model);
    let digest = Digest::of(&model.bytes());
    let mut changed = model.bytes();
    let at = model.header().unwrap().len() / 2;
    changed[at..at + SECRET.len()].copy_from_slice(SECRET);
    other.add_page("/secret", &changed, &[]);
    let location = format!("{}/secret", other.url());
    registry.add_fault(&digest.to_hex(), usize::MAX, Fault::RedirectRange(1, location));
    let daemon = TestDaemon::start();
    let run = daemon.command().run(["show", &name, "--json", "--full"]).succeeds();
    assert!(!run.text().contains("hunter2"));
}

#[test]
fn header_of_a_completely_downloaded_file_is_verified() {
    let registry = FakeRegistry::start().unwrap();
    let small = |seed| {
        let mut model = ModelFile::empty();
        model.add_noise(seed, "tensor", GgmlType::F32, &[64]);
        model
    };
    let (model, other) = (small(1), small(2));
    let name = publish(&registry, &model);
    registry.add_fault(&Digest::of(&model.bytes()).to_hex(), usize::MAX, Fault::Body(other.bytes()));
    let daemon = TestDaemon::start();
    let error = daemon.command().run(["show", &name, "--json"]).exits_with(3).error();
    assert!(error.message.contains("wrong digest"), "{error}");
}

#[test]
fn response_that_is_not_a_manifest_is_not_quoted() {
    let (registry, other) = (FakeRegistry::start().unwrap(), FakeRegistry::start().unwrap());
    let name = publish(&registry, &ModelFile::dense(1));
    let daemon = TestDaemon::start();
    for document in [r#""hunter2""#, r#"{"schemaVersion":"hunter2"}"#, r#"{"layers":["hunter2"]}"#, "hunter2"]
    {
        other.add_page("/secret", document.as_bytes(), &[]);
        registry.add_fault("/manifests/", usize::MAX, Fault::RedirectTo(format!("{}/secret", other.url())));
        let run = daemon.command().run(["show", &name, "--json"]);
        assert_ne!(run.code, 0);
        assert!(!format!("{}{}", run.text(), run.stderr).contains("hunter2"), "{document}: {}", run.stderr);
        registry.clear_faults();
    }
}

#[test]
fn server_that_ignores_ranges_can_be_inspected() {
    let registry = FakeRegistry::start().unwrap();
    let name = publish(&registry, &large_header());
    registry.add_fault("/blobs/", usize::MAX, Fault::IgnoreRange);
    let daemon = TestDaemon::start();
    let shown = daemon.command().run(["show", &name, "--json"]).succeeds().json();
    assert_eq!(shown["vocabulary_size"], 200_000);
}

#[test]
fn file_at_hugging_face_is_described_before_the_download() {
    let registry = FakeRegistry::start().unwrap();
    let weights = ModelFile::dense(1).bytes();
    let commit = "0123456789abcdef0123456789abcdef01234567";
    registry.add_repository("me/tiny-GGUF", commit, &[("tiny-Q8_0.gguf", &weights)]);
    let folder = tmpfs_directory();
    let config = folder.path().join("config.toml");
    fs::write(&config, format!("[mirrors]\n\"hf.co\" = \"{}\"\n", registry.url())).unwrap();
    let blobd = Blobd::at_root(&folder.path().join("store")).configured_by(&config);
    let shown = blobd.line("show hf.co/me/tiny-GGUF/tiny-Q8_0.gguf --json").succeeds().json();
    assert_eq!(shown["architecture"], "llama");
    assert!(shown["tensors"][0]["file_offset"].is_u64(), "{shown}");
}

#[test]
fn model_that_is_neither_stored_nor_published_is_not_found() {
    let registry = FakeRegistry::start().unwrap();
    let daemon = TestDaemon::start();
    let name = registry.name("me/nobody:1");
    let run = daemon.command().run(["show", &name]).exits_with(3);
    assert!(run.stderr.contains("not in the store; not at its registry either"), "{}", run.stderr);
    daemon.command().line("show http://127.0.0.1:1/me/nobody:1").exits_with(3);
}

#[test]
fn registry_of_a_name_without_a_host_is_asked_only_if_wanted() {
    let registry = FakeRegistry::start().unwrap();
    registry.add_model("library/tiny:1", b"{}", &[(MODEL, &ModelFile::dense(1).bytes())]).unwrap();
    let folder = tmpfs_directory();
    let config = folder.path().join("config.toml");
    fs::write(&config, format!("[mirrors]\n\"registry.ollama.ai\" = \"{}\"\n", registry.url())).unwrap();
    let blobd = Blobd::at_root(&folder.path().join("store")).configured_by(&config);
    for command in ["show", "fit", "diff tiny:1"] {
        let run = blobd.line(&format!("{command} tiny:1")).exits_with(3);
        assert!(run.stderr.contains("--remote asks its registry, registry.ollama.ai"), "{}", run.stderr);
        assert!(registry.requests().is_empty(), "{command}");
        blobd.line(&format!("{command} tiny:1 --stored")).exits_with(3);
        blobd.line(&format!("{command} tiny:1 --stored --remote")).exits_with(2);
    }
    for command in ["show tiny:1 --remote", "show registry.ollama.ai/library/tiny:1", "fit --remote tiny:1"] {
        let shown = blobd.line(&format!("{command} --json")).succeeds().json();
        assert!(shown.is_object(), "{command}");
    }
}

#[test]
fn registry_is_not_asked_for_a_stored_model_nor_if_only_the_store_is_wanted() {
    let registry = FakeRegistry::start().unwrap();
    let name = publish(&registry, &ModelFile::dense(1));
    let daemon = TestDaemon::start();
    daemon.command().run(["show", &name, "--stored"]).exits_with(3);
    assert!(registry.requests().is_empty());
    daemon.command().run(["pull", &name]).succeeds();
    let requests = registry.requests().len();
    daemon.command().run(["show", &name]).succeeds();
    assert_eq!(registry.requests().len(), requests);
}

#[test]
fn invalid_header_at_a_registry_is_refused() {
    let registry = FakeRegistry::start().unwrap();
    let mut file = ModelFile::dense(1).bytes();
    file[24..32].fill(0xff);
    registry.add_model("me/bad:1", b"{}", &[(MODEL, &file)]).unwrap();
    let daemon = TestDaemon::start();
    let run = daemon.command().run(["show", &registry.name("me/bad:1")]).exits_with(1);
    assert!(run.stderr.contains("model of "), "{}", run.stderr);
}
