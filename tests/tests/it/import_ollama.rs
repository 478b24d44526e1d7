//! Imports of the models in Ollama's own store.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use blobd_tests::command::Blobd;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::folders::safetensors;
use blobd_tests::model::ModelFile;
use blobd_tests::oracle::sha256;
use blobd_tests::registry::FakeRegistry;
use blobd_tests::store_dir::{check_blobs, check_empty, flip_byte};
use blobd_tests::temp_dirs::tmpfs_directory;
use serde_json::{Value as Json, json};

const LIBRARY: &str = "registry.ollama.ai/library";

/// A models folder as Ollama writes it.
struct Ollama(PathBuf);

impl Ollama {
    fn new(scratch: &Path) -> Self {
        let folder = scratch.join("ollama-models");
        fs::create_dir_all(folder.join("blobs")).unwrap();
        fs::create_dir_all(folder.join("manifests")).unwrap();
        Self(folder)
    }

    fn blob(&self, bytes: &[u8]) -> PathBuf {
        self.0.join("blobs").join(format!("sha256-{}", sha256(bytes)))
    }

    fn add_blob(&self, kind: &str, bytes: &[u8]) -> Json {
        fs::write(self.blob(bytes), bytes).unwrap();
        let media_type = format!("application/vnd.{kind}");
        json!({ "mediaType": media_type, "digest": format!("sha256:{}", sha256(bytes)), "size": bytes.len() })
    }

    /// Adds a model with these weights and this template, and returns the path of its manifest.
    fn add(&self, place: &str, weights: &ModelFile, template: &str) -> PathBuf {
        let config = self.add_blob("docker.container.image.v1+json", br#"{"model_format":"gguf"}"#);
        let mut model = self.add_blob("ollama.image.model", &weights.bytes());
        model["from"] = "/home/ann/weights.gguf".into();
        let template = self.add_blob("ollama.image.template", template.as_bytes());
        let manifest = json!({ "schemaVersion": 2, "config": config, "layers": [model, template] });
        let path = self.0.join("manifests").join(place);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, serde_json::to_vec_pretty(&manifest).unwrap()).unwrap();
        path
    }

    /// Adds a model with a file for each tensor, and returns these files by their names.
    fn add_of_tensors(&self, place: &str) -> [(String, Vec<u8>); 2] {
        let tensors = ["a.weight", "b.weight"].map(|name| (name, safetensors(&[(1, name)])));
        let config = self.add_blob("docker.container.image.v1+json", br#"{"model_format":"safetensors"}"#);
        let mut layers = vec![self.add_blob("ollama.image.json", b"{}")];
        layers[0]["name"] = "config.json".into();
        for (name, file) in &tensors {
            let mut layer = self.add_blob("ollama.image.tensor", file);
            layer["name"] = (*name).into();
            layers.push(layer);
        }
        let manifest = json!({ "schemaVersion": 2, "config": config, "layers": layers });
        let path = self.0.join("manifests").join(place);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, serde_json::to_vec(&manifest).unwrap()).unwrap();
        tensors.map(|(name, file)| (format!("{name}.safetensors"), file))
    }

    fn import(&self, blobd: &Blobd, more: &[&str]) -> blobd_tests::command::Run {
        let from = format!("--from-ollama={}", self.0.display());
        blobd.run(["import", &from, "--json"].iter().chain(more))
    }
}

fn states(listed: &Json) -> Vec<(String, String)> {
    let text = |value: &Json| value.as_str().unwrap().to_owned();
    let models = listed["models"].as_array().unwrap();
    models.iter().map(|model| (text(&model["name"]), text(&model["state"]))).collect()
}

/// Runs a check with a daemon and without one.
fn with_and_without_daemon(check: impl Fn(&Blobd, &Path, &Path)) {
    let daemon = TestDaemon::start();
    check(&daemon.command(), daemon.scratch(), daemon.root());
    let scratch = tmpfs_directory();
    let root = scratch.path().join("store");
    check(&Blobd::at_root(&root), scratch.path(), &root);
}

#[test]
fn model_with_a_file_for_each_tensor_is_exported_bit_for_bit() {
    with_and_without_daemon(|blobd, scratch, _root| {
        let ollama = Ollama::new(scratch);
        let files = ollama.add_of_tensors(&format!("{LIBRARY}/tensors/1"));
        ollama.import(blobd, &[]).succeeds();
        let out = scratch.join("exported");
        blobd.run(["export", "tensors:1", "-o", &format!("{}/", out.display())]).succeeds();
        for (name, file) in files {
            assert!(fs::read(out.join(&name)).unwrap() == file, "{name}");
        }
        assert_eq!(fs::read(out.join("config.json")).unwrap(), b"{}");
        blobd.run(["export", "tensors:1", "-o", "-"]).exits_with(2);
    });
}

#[test]
fn models_keep_names_manifests_and_files_and_share_their_tensors() {
    with_and_without_daemon(|blobd, scratch, root| {
        let ollama = Ollama::new(scratch);
        let (base, tuned) = (ModelFile::dense(1), ModelFile::dense(1).with_changed("output.weight"));
        let manifest = ollama.add(&format!("{LIBRARY}/base/8b"), &base, "{{ .Prompt }}");
        ollama.add("registry.ollama.ai/ann/tuned/latest", &tuned, "{{ .Prompt }}!");
        let listed = ollama.import(blobd, &["--list"]).succeeds().json();
        let expected = [("ann/tuned:latest", "new"), ("base:8b", "new")];
        assert_eq!(states(&listed), expected.map(|(name, state)| (name.to_owned(), state.to_owned())));
        ollama.import(blobd, &[]).succeeds();
        let shown = blobd.line("show base:8b --json").succeeds().json();
        assert_eq!(shown["digest"], format!("sha256:{}", sha256(&fs::read(manifest).unwrap())));
        assert_eq!(shown["origin"], format!("copy {LIBRARY}/base:8b in ollama"));
        assert!(blobd.line("export base:8b -o -").succeeds().stdout == base.bytes());
        assert!(blobd.line("export ann/tuned -o -").succeeds().stdout == tuned.bytes());
        let usage = blobd.line("df --json").succeeds().json();
        let of_base = |key: &str| usage["models"][1][key].as_u64().unwrap();
        assert!(of_base("shared_bytes") > 3 * of_base("unique_bytes"), "{usage}");
        check_blobs(root);
        let again = ollama.import(blobd, &["--list"]).succeeds().json();
        assert!(states(&again).iter().all(|(_, state)| state == "stored"), "{again}");
        assert_eq!(again["read_bytes"], 0);
        assert_eq!(ollama.import(blobd, &[]).succeeds().json(), json!({ "imported": [] }));
    });
}

#[test]
fn models_are_selected_by_name_and_pattern() {
    let daemon = TestDaemon::start();
    let ollama = Ollama::new(daemon.scratch());
    for (seed, tag) in (1..).zip(["a/1", "a/2", "b/1"]) {
        ollama.add(&format!("{LIBRARY}/{tag}"), &ModelFile::dense(seed), "");
    }
    let listed = ollama.import(&daemon.command(), &["--list", "a:*"]).succeeds().json();
    assert_eq!(states(&listed).len(), 2, "{listed}");
    let imported = ollama.import(&daemon.command(), &["b:1"]).succeeds().json();
    assert_eq!(imported["imported"][0]["name"], "b:1");
    let error = ollama.import(&daemon.command(), &["c*"]).exits_with(2).stderr;
    assert!(error.contains("--list"), "{error}");
}

#[test]
fn unusable_models_are_reported_and_the_others_imported() {
    let daemon = TestDaemon::start();
    let ollama = Ollama::new(daemon.scratch());
    let place = |model: &str| format!("{LIBRARY}/{model}/latest");
    let (missing, damaged, short) = (ModelFile::dense(1), ModelFile::dense(2), ModelFile::dense(3));
    for (name, weights) in [("missing", &missing), ("damaged", &damaged), ("short", &short)] {
        ollama.add(&place(name), weights, name);
    }
    ollama.add(&place("good"), &ModelFile::dense(4), "good");
    fs::remove_file(ollama.blob(&missing.bytes())).unwrap();
    flip_byte(&ollama.blob(&damaged.bytes()), damaged.bytes().len() as u64 - 1);
    fs::write(ollama.blob(&short.bytes()), b"GGUF").unwrap();
    fs::write(ollama.0.join("manifests").join(place("good")).with_file_name("broken"), b"{").unwrap();
    let outside = daemon.scratch().join("outside");
    fs::write(&outside, b"secret").unwrap();
    symlink(&outside, ollama.0.join("manifests").join(place("good")).with_file_name("link")).unwrap();
    let run = ollama.import(&daemon.command(), &[]).exits_with(1);
    let imported = run.json();
    assert_eq!(imported["imported"].as_array().unwrap().len(), 1, "{imported}");
    let failed: Vec<_> = imported["failed"].as_array().unwrap().iter().map(ToString::to_string).collect();
    for (name, what) in [
        ("missing:latest", "is missing: expected a file of"),
        ("damaged:latest", "wrong digest"),
        ("short:latest", "found 4"),
        ("good:broken", "manifest"),
        ("good:link", "found a link to a file outside of it"),
    ] {
        let of_name = |text: &&String| text.contains(&format!("\"name\":\"{name}\""));
        let error = failed.iter().find(of_name).unwrap_or_else(|| panic!("{name}: {failed:?}"));
        assert!(error.contains(what) && !error.contains("secret"), "{error}");
        assert!(error.contains(ollama.0.to_str().unwrap()) && error.contains("\"hint\""), "{error}");
    }
    check_blobs(daemon.root());
}

#[test]
fn old_blob_file_names_and_links_between_tags_are_read() {
    let daemon = TestDaemon::start();
    let ollama = Ollama::new(daemon.scratch());
    let model = ModelFile::dense(1);
    let manifest = ollama.add(&format!("{LIBRARY}/old/1"), &model, "");
    for entry in fs::read_dir(ollama.0.join("blobs")).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().replacen('-', ":", 1);
        fs::rename(&path, path.with_file_name(name)).unwrap();
    }
    symlink(&manifest, manifest.with_file_name("2")).unwrap();
    let imported = ollama.import(&daemon.command(), &[]).succeeds().json();
    assert_eq!(imported["imported"].as_array().unwrap().len(), 2, "{imported}");
    assert!(daemon.command().line("export old:2 -o -").succeeds().stdout == model.bytes());
}

#[test]
fn pull_of_an_imported_model_downloads_nothing_and_records_its_origin() {
    let daemon = TestDaemon::start();
    let (ollama, registry) = (Ollama::new(daemon.scratch()), FakeRegistry::start().unwrap());
    let host = registry.url().replace("http://", "");
    let model = ModelFile::dense(1);
    let manifest = ollama.add(&format!("{host}/ann/m/1"), &model, "{{ .Prompt }}");
    registry.add_manifest("ann/m:1", &fs::read(&manifest).unwrap());
    for blob in fs::read_dir(ollama.0.join("blobs")).unwrap() {
        registry.add_blob(fs::read(blob.unwrap().path()).unwrap());
    }
    ollama.import(&daemon.command(), &[]).succeeds();
    let listed = || daemon.command().line("ls --json").succeeds().json()["models"][0].clone();
    assert_eq!(listed()["follows"], Json::Null);
    let done = daemon.command().run(["pull", &registry.name("ann/m:1"), "--json"]).succeeds();
    let done = done.json_lines().pop().unwrap();
    assert_eq!(done["downloaded_bytes"], 0, "{done}");
    assert!(listed()["follows"].as_str().is_some_and(|source| source.contains("ann/m:1")), "{}", listed());
    daemon.command().line("outdated").succeeds();
}

#[test]
fn pull_of_an_imported_model_updates_it_when_its_tag_has_moved() {
    let daemon = TestDaemon::start();
    let (ollama, registry) = (Ollama::new(daemon.scratch()), FakeRegistry::start().unwrap());
    let place = format!("{}/ann/m/1", registry.url().replace("http://", ""));
    let publish = || {
        registry.add_manifest("ann/m:1", &fs::read(ollama.0.join("manifests").join(&place)).unwrap());
        for blob in fs::read_dir(ollama.0.join("blobs")).unwrap() {
            registry.add_blob(fs::read(blob.unwrap().path()).unwrap());
        }
    };
    let [old, new] = [ModelFile::dense(1), ModelFile::dense(2)];
    ollama.add(&place, &old, "one");
    ollama.import(&daemon.command(), &[]).succeeds();
    ollama.add(&place, &new, "two");
    publish();
    let blobd = daemon.command();
    let done =
        blobd.run(["pull", &registry.name("ann/m:1"), "--json"]).succeeds().json_lines().pop().unwrap();
    assert!(done["displaced"] != Json::Null, "{done}");
    let name = done["name"].as_str().unwrap();
    assert!(blobd.run(["export", name, "-o", "-"]).succeeds().stdout == new.bytes());
    blobd.run(["undelete", name, "--force"]).succeeds();
    assert!(blobd.run(["export", name, "-o", "-"]).succeeds().stdout == old.bytes());
}

/// Some installations keep the manifest as a blob, and make the tag a link to it.
#[test]
fn tag_that_is_a_link_to_a_blob_of_the_store_is_read() {
    let daemon = TestDaemon::start();
    let ollama = Ollama::new(daemon.scratch());
    let manifest = ollama.add(&format!("{LIBRARY}/x/latest"), &ModelFile::dense(1), "");
    let bytes = fs::read(&manifest).unwrap();
    fs::write(ollama.blob(&bytes), &bytes).unwrap();
    fs::remove_file(&manifest).unwrap();
    symlink(format!("../../../../blobs/sha256-{}", sha256(&bytes)), &manifest).unwrap();
    // A later layout has a folder of its own for such links, and another host.
    let later = ollama.0.join("manifests-v2/ollama.com/library/y/latest");
    fs::create_dir_all(later.parent().unwrap()).unwrap();
    symlink(format!("../../../../blobs/sha256-{}", sha256(&bytes)), &later).unwrap();
    let imported = ollama.import(&daemon.command(), &[]).succeeds().json();
    let names = [&imported["imported"][0]["name"], &imported["imported"][1]["name"]];
    assert_eq!(names, ["x:latest", "y:latest"], "{imported}");
}

#[test]
fn folder_without_a_store_is_named() {
    let daemon = TestDaemon::start();
    let run = daemon.command().run(["import", "--from-ollama=/nonexistent/models"]).exits_with(3);
    assert!(run.stderr.contains("/nonexistent/models"), "{}", run.stderr);
    check_empty(daemon.root());
}

#[test]
fn each_name_has_its_own_origin() {
    let daemon = TestDaemon::start();
    let ollama = Ollama::new(daemon.scratch());
    let model = ModelFile::dense(1);
    ollama.add(&format!("{LIBRARY}/aaa/1"), &model, "");
    ollama.add("hf.co/ann/bbb/Q4", &model, "");
    ollama.import(&daemon.command(), &[]).succeeds();
    let listed = daemon.command().line("ls --json").succeeds().json();
    let origin = |name: &str| {
        let models = listed["models"].as_array().unwrap();
        models.iter().find(|model| model["name"] == name).unwrap()["origin"].clone()
    };
    assert_eq!(origin("aaa:1"), format!("copy {LIBRARY}/aaa:1 in ollama"));
    assert_eq!(origin("hf.co/ann/bbb:Q4"), "copy hf.co/ann/bbb:Q4 in ollama");
    assert_eq!(listed["models"][0]["digest"], listed["models"][1]["digest"]);
}

#[test]
fn links_out_of_the_store_are_followed_only_on_request() {
    let daemon = TestDaemon::start();
    let ollama = Ollama::new(daemon.scratch());
    let (blob, tags) = (ModelFile::dense(1), ModelFile::dense(2));
    ollama.add(&format!("{LIBRARY}/blob/1"), &blob, "");
    let place = ollama.blob(&blob.bytes());
    let outside = daemon.scratch().join("outside");
    fs::create_dir(&outside).unwrap();
    fs::rename(&place, outside.join("x.gguf")).unwrap();
    symlink(outside.join("x.gguf"), &place).unwrap();
    let manifest = ollama.add(&format!("{LIBRARY}/tags/1"), &tags, "");
    let folder = manifest.parent().unwrap();
    fs::rename(folder, outside.join("tags")).unwrap();
    symlink(outside.join("tags"), folder).unwrap();
    let run = ollama.import(&daemon.command(), &[]).exits_with(1).json();
    let failed = run["failed"].as_array().unwrap();
    let is_named = |name: &str, what: &str| {
        let text = failed.iter().find(|one| one["name"] == name).unwrap().to_string();
        text.contains(what) && text.contains("--follow")
    };
    assert!(is_named("blob:1", "found a link to a file outside of it"), "{run}");
    assert!(is_named(&format!("{LIBRARY}/tags"), "expected a directory of manifests"), "{run}");
    check_empty(daemon.root());
    let run = ollama.import(&daemon.command(), &["--follow"]).succeeds().json();
    assert_eq!(run["imported"].as_array().unwrap().len(), 2, "{run}");
}

#[test]
fn models_that_run_elsewhere_are_left_out_and_no_pattern_chooses_files() {
    let daemon = TestDaemon::start();
    let ollama = Ollama::new(daemon.scratch());
    let config =
        ollama.add_blob("docker.container.image.v1+json", br#"{"remote_host":"https://ollama.example"}"#);
    let manifest = json!({ "schemaVersion": 2, "config": config, "layers": [] });
    let place = ollama.0.join("manifests").join(LIBRARY).join("remote");
    fs::create_dir_all(&place).unwrap();
    fs::write(place.join("cloud"), manifest.to_string()).unwrap();
    let listed = ollama.import(&daemon.command(), &["--list"]).succeeds().json();
    assert_eq!(states(&listed), [("remote:cloud".to_owned(), "left_out".to_owned())]);
    let run = ollama.import(&daemon.command(), &[]).succeeds().json();
    assert!(
        run["left_out"][0]["reason"].as_str().unwrap().contains("runs at https://ollama.example"),
        "{run}"
    );
    check_empty(daemon.root());
    let run = ollama.import(&daemon.command(), &["--include", "*"]).exits_with(2);
    assert!(run.stderr.contains("--include and --exclude"), "{}", run.stderr);
}
