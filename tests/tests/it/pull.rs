//! Pulls from a registry on a loopback port, with and without faults.

mod archives;
mod artifacts;
mod cached;
mod cut_experts;
mod faults;
mod files;
mod folders;
mod interactive;
mod large_headers;
mod long_names;
mod manifests;
mod partial;
mod repositories;
mod second_attempt;
mod servers;
mod slow_hosts;
pub(crate) mod third_party;
mod transfer;
mod unfinished;
mod versions;

use std::fs;
use std::path::Path;
use std::time::Duration;

use blobd_store_format::recipe::Recipe;
use blobd_tests::command::Blobd;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::oracle::sha256;
use blobd_tests::registry::{BlobDelivery, FakeRegistry, Fault};
use blobd_tests::store_dir::{
    blob_path, check_blobs, check_empty, flip_byte, names, remove_downloads, staged,
};
use blobd_tests::temp_dirs::tmpfs_directory;
use blobd_tests::wait::eventually;
use serde_json::Value as Json;

const MODEL: &str = "application/vnd.ollama.image.model";
const TEMPLATE: &str = "application/vnd.ollama.image.template";
const LICENSE: &str = "application/vnd.ollama.image.license";
const CONFIG: &[u8] = br#"{"model_format":"gguf","model_family":"llama"}"#;

/// Asserts that the store contains nothing but unfinished downloads, and removes these.
fn check_nothing_but_downloads(blobd: &Blobd, root: &Path) {
    for directory in ["manifests", "origins", "staging"] {
        assert!(is_empty(&root.join(directory)), "{directory}/");
    }
    remove_downloads(root);
    blobd.line("gc").succeeds();
    check_empty(root);
}

fn is_empty(directory: &Path) -> bool {
    fs::read_dir(directory).unwrap().next().is_none()
}

/// A registry with a model `library/tiny:latest`.
pub(super) fn registry_with(model: &ModelFile) -> FakeRegistry {
    let registry = FakeRegistry::start().unwrap();
    offer(&registry, "library/tiny:latest", &model.bytes());
    registry
}

fn offer(registry: &FakeRegistry, name: &str, weights: &[u8]) {
    let layers: [(&str, &[u8]); 3] =
        [(MODEL, weights), (TEMPLATE, b"{{ .Prompt }}"), (LICENSE, b"do what you want")];
    registry.add_model(name, CONFIG, &layers).unwrap();
}

#[test]
fn pulled_model_is_split_and_exported_bit_for_bit() {
    let model = ModelFile { padding: 7, ..ModelFile::separate_experts(1, 12) };
    let registry = registry_with(&model);
    let daemon = TestDaemon::start();
    let name = registry.name("library/tiny:latest");
    let lines = daemon.command().run(["pull", &name, "--json"]).succeeds().json_lines();
    let last = lines.last().unwrap();
    let all = (model.bytes().len() + 13 + 16 + CONFIG.len()) as u64;
    assert_eq!((&last["status"], &last["downloaded_bytes"]), (&Json::from("success"), &Json::from(all)));
    assert!(lines.iter().all(|line| line["status"].is_string()), "{lines:?}");
    assert!(lines.iter().any(|line| line["total"] == model.bytes().len()), "{lines:?}");
    check_blobs(daemon.root());
    let shown = daemon.command().run(["show", &name, "--json"]).succeeds().json();
    let stored = |component: &str| {
        let is_it = |layer: &&Json| layer["media_type"].as_str().unwrap().ends_with(component);
        shown["layers"].as_array().unwrap().iter().find(is_it).unwrap()["stored"].clone()
    };
    assert_eq!([stored("model"), stored("template"), stored("image.v1+json")], ["recipe", "blob", "blob"]);
    let listed = daemon.command().line("ls --json").json();
    assert_eq!(listed["models"][0]["size"], all);
    assert_eq!(listed["models"][0]["origin"], name);
    let manifest = format!("manifests/{}/library/tiny/latest", registry.url().trim_start_matches("http://"));
    let raw = fs::read(daemon.root().join(manifest)).unwrap();
    assert_eq!(listed["models"][0]["digest"], format!("sha256:{}", sha256(&raw)));
    assert!(daemon.command().run(["export", &name, "-o", "-"]).stdout == model.bytes());
    let template = daemon.command().run(["export", &name, "--component", "template", "-o", "-"]);
    assert_eq!(template.text(), "{{ .Prompt }}");
    let open = daemon.client().open(&name.parse().unwrap()).unwrap();
    assert_eq!(open.text("license").unwrap().as_deref(), Some("do what you want"));
}

/// A damaged recipe, or that of another file, is treated as missing. A pull or an import creates it again,
/// whether the daemon has the correct one in memory or not.
#[test]
fn pull_and_import_repair_a_damaged_recipe() {
    let model = ModelFile::dense(1);
    let registry = registry_with(&model);
    let mut daemon = TestDaemon::start();
    let name = registry.name("library/tiny:latest");
    daemon.command().run(["pull", &name]).succeeds();
    let path = model.write_to(daemon.scratch(), "m.gguf");
    let recipes = daemon.root().join("recipes");
    let recipe = recipes.join(format!("sha256-{}.json", sha256(&model.bytes())));
    let good = fs::read(&recipe).unwrap();
    let other = ModelFile::dense(2).write_to(daemon.scratch(), "other.gguf");
    daemon.command().run(["import".as_ref(), other.as_os_str()]).succeeds();
    let other =
        fs::read(recipes.join(format!("sha256-{}.json", sha256(&ModelFile::dense(2).bytes())))).unwrap();
    let again: [Vec<&std::ffi::OsStr>; 2] = [
        vec!["pull".as_ref(), name.as_ref()],
        // Damage that nothing has found yet is no reason to read a file again that has not changed.
        vec!["import".as_ref(), path.as_os_str(), "--name".as_ref(), "imported".as_ref(), "--force".as_ref()],
    ];
    for (restarts, damaged, command) in [
        (false, &good[..good.len() / 2], &again[0]),
        (true, &good[..good.len() / 2], &again[0]),
        (true, &other[..], &again[0]),
        (true, b"", &again[1]),
        (false, &other[..], &again[1]),
    ] {
        fs::remove_file(&recipe).unwrap();
        fs::write(&recipe, damaged).unwrap();
        if restarts {
            daemon.stop();
            daemon.restart();
            daemon.command().run(["export", &name, "-o", "-"]).exits_with(5);
        }
        daemon.command().run(command).succeeds();
        assert_eq!(fs::read(&recipe).unwrap(), good);
        daemon.stop();
        daemon.restart();
        daemon.client().open(&name.parse().unwrap()).unwrap();
        assert!(daemon.command().run(["export", &name, "-o", "-"]).stdout == model.bytes());
        daemon.command().line("gc").succeeds();
    }
}

#[test]
fn pull_and_repair_replace_a_damaged_header() {
    let model = ModelFile::dense(1);
    let registry = registry_with(&model);
    let daemon = TestDaemon::start();
    let name = registry.name("library/tiny:latest");
    daemon.command().run(["pull", &name]).succeeds();
    let recipe = daemon.root().join(format!("recipes/sha256-{}.json", sha256(&model.bytes())));
    let recipe = Recipe::parse(fs::read(recipe).unwrap()).unwrap();
    let header = blob_path(daemon.root(), &recipe.header().unwrap().0.to_string());
    for (number, command) in [["pull", name.as_str()], ["verify", "--repair"]].into_iter().enumerate() {
        // A byte of the magic number, so that it is no header.
        flip_byte(&header, 1);
        let shown = daemon.command().run(["show", &name]).exits_with(5);
        assert!(shown.stderr.contains("`blobd verify --repair`"), "{}", shown.stderr);
        daemon.command().run(command).succeeds();
        daemon.command().run(["show", &name]).succeeds();
        assert!(daemon.command().run(["export", &name, "-o", "-"]).stdout == model.bytes());
        check_blobs(daemon.root());
        assert_eq!(names(&daemon.root().join("quarantine")).len(), number + 1, "as it was found");
    }
    let again = daemon.command().run(["pull", &name, "--json"]).succeeds().json_lines();
    assert_eq!(again.last().unwrap()["downloaded_bytes"], 0);
}

#[test]
fn second_pull_fetches_only_what_is_missing() {
    let (base, sibling) = (ModelFile::dense(1), ModelFile::dense(1).with_changed("output.weight"));
    let registry = registry_with(&base);
    offer(&registry, "library/sibling:latest", &sibling.bytes());
    let daemon = TestDaemon::start();
    let pull = |model: &str| {
        let before = registry.bytes_served();
        let lines = daemon.command().run(["pull", &registry.name(model), "--json"]).succeeds().json_lines();
        (lines.last().unwrap().clone(), registry.bytes_served() - before)
    };
    pull("library/tiny");
    let (again, served) = pull("library/tiny");
    assert_eq!((again["downloaded_bytes"].as_u64(), served), (Some(0), 0));
    let blobs = check_blobs(daemon.root()).len();
    let (last, served) = pull("library/sibling");
    assert_eq!(last["downloaded_bytes"].as_u64(), Some(sibling.bytes().len() as u64));
    assert_eq!(served, sibling.bytes().len() as u64, "template, licence and configuration are there");
    assert_eq!(check_blobs(daemon.root()).len(), blobs + 1, "the tensor that differs");
    assert!(
        daemon.command().run(["export", &registry.name("library/sibling"), "-o", "-"]).stdout
            == sibling.bytes()
    );
}

#[test]
fn pull_needs_no_daemon_and_takes_mirrors_from_the_configuration() {
    let model = ModelFile::dense(1);
    let registry = registry_with(&model);
    let folder = tmpfs_directory();
    let config = folder.path().join("config.toml");
    fs::write(&config, format!("[mirrors]\n\"registry.ollama.ai\" = \"{}\"\n", registry.url())).unwrap();
    let blobd = Blobd::at_root(&folder.path().join("store"));
    let run = blobd.run(["pull", "tiny", "--config", config.to_str().unwrap()]).succeeds();
    assert!(run.text().starts_with("tiny:latest "), "{}", run.text());
    assert!(blobd.line("export tiny -o -").succeeds().stdout == model.bytes());
}

#[test]
fn model_can_be_pinned_to_its_manifest() {
    let registry = registry_with(&ModelFile::dense(1));
    let layers: [(&str, &[u8]); 1] = [(TEMPLATE, b"x")];
    let other = registry.add_model("library/tiny:other", CONFIG, &layers).unwrap().digest();
    let daemon = TestDaemon::start();
    let pinned = format!("{}@{other}", registry.name("library/tiny:other"));
    daemon.command().run(["pull", &pinned]).succeeds();
    daemon.command().run(["rm", &pinned]).succeeds();
    // The tag names another manifest, but the digest decides.
    let digest = format!("sha256:{}", sha256(b"nothing"));
    let missing = format!("{}@{digest}", registry.name("library/tiny:latest"));
    let run = daemon.command().run(["pull", &missing, "--json"]);
    assert!([1, 3].contains(&run.code), "{}", run.stderr);
    check_empty(daemon.root());
}

#[test]
fn every_kind_of_blob_delivery_works_and_tokens_are_not_leaked() {
    for delivery in [BlobDelivery::Redirect, BlobDelivery::Direct, BlobDelivery::RelativeLocation] {
        let model = ModelFile::dense(1);
        let registry = registry_with(&model);
        registry.set_blob_delivery(delivery);
        registry.require_token();
        let daemon = TestDaemon::start();
        let name = registry.name("library/tiny");
        daemon.command().run(["pull", &name]).succeeds();
        assert!(daemon.command().run(["export", &name, "-o", "-"]).stdout == model.bytes(), "{delivery:?}");
        assert!(!registry.credentials_leaked(), "{delivery:?}");
    }
}

#[test]
fn pull_stops_and_leaves_nothing_but_a_download_when_its_client_is_killed() {
    let daemon = TestDaemon::start();
    let slow = Fault::Slow(100, Duration::from_millis(20));
    for fault in [slow, Fault::StallAfter(1000, Duration::from_secs(600))] {
        let registry = registry_with(&ModelFile::dense(1));
        registry.add_fault("/cdn/", usize::MAX, fault);
        let mut pull =
            daemon.command().command().args(["pull", &registry.name("library/tiny")]).spawn().unwrap();
        eventually("the pull has begun", || registry.bytes_served() > 0 && !staged(daemon.root()).is_empty());
        pull.kill().unwrap();
        pull.wait().unwrap();
        eventually("the pull is cleared away", || staged(daemon.root()).is_empty());
        check_nothing_but_downloads(&daemon.command(), daemon.root());
    }
}

#[test]
fn two_pulls_of_one_model_at_once_both_succeed() {
    let model = ModelFile::dense(1);
    let registry = registry_with(&model);
    let daemon = TestDaemon::start();
    let name = registry.name("library/tiny");
    let pulls: Vec<_> =
        (0..3).map(|_| daemon.command().command().args(["pull", &name]).spawn().unwrap()).collect();
    for pull in pulls {
        let output = pull.wait_with_output().unwrap();
        assert!(output.status.success(), "{output:?}");
    }
    assert!(daemon.command().run(["export", &name, "-o", "-"]).stdout == model.bytes());
    assert_eq!(staged(daemon.root()), [""; 0]);
    let usage = daemon.client().disk_usage().unwrap();
    assert_eq!(usage.reclaimable_bytes, 0);
}
