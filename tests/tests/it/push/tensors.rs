//! Models with a layer for each tensor (`push --tensors`): what they cost, and manifests that lie.

use std::collections::BTreeMap;

use blobd_store_format::digest::Digest;
use blobd_store_format::gguf::GgmlType;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::tensor_index::TensorIndex;
use blobd_store_format::tensor_layers::TensorLayers;
use blobd_tests::command::Blobd;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::folders::ModelFolder;
use blobd_tests::model::ModelFile;
use blobd_tests::registry::{FakeRegistry, Fault};
use blobd_tests::temp_dirs::tmpfs_directory;
use serde_json::{Value as Json, json};

use super::{push, with_model};
use crate::pull::third_party::{Access, ThirdPartyRegistry};
use crate::tensor_index::{direct_registry, pull};

const TENSORS: usize = 24;
const TENSOR_BYTES: u64 = 64 << 10;

fn base() -> ModelFile {
    let mut file = ModelFile::empty();
    for number in 0..TENSORS {
        file.add_noise(1, &format!("blk.{number}.ffn_up.weight"), GgmlType::I8, &[TENSOR_BYTES]);
    }
    file
}

/// The file with two other tensors.
fn sibling(file: &ModelFile) -> ModelFile {
    file.clone().with_changed("blk.3.ffn_up.weight").with_changed("blk.17.ffn_up.weight")
}

fn bytes(json: &Json) -> u64 {
    json.as_u64().unwrap()
}

/// The digest of the model that a name has in a store.
fn model_digest(daemon: &TestDaemon, name: &str) -> String {
    daemon.command().run(["show", name, "--json"]).succeeds().json()["digest"].as_str().unwrap().to_owned()
}

fn check_weights(daemon: &TestDaemon, name: &str, weights: &[u8]) {
    assert!(daemon.command().run(["export", name, "-o", "-"]).stdout == weights, "{name}: other weights");
    daemon.command().run(["verify"]).succeeds();
}

#[test]
fn model_keeps_its_manifest_and_a_sibling_costs_its_own_tensors() {
    let registry = direct_registry();
    let (first, weights) = with_model(&base());
    let name = registry.name("team/tunes:base");
    let planned = push(&first, "tiny", &name, &["--tensors", "--dry-run"]);
    assert_eq!((&planned["form"], registry.bytes_uploaded()), (&"tensors".into(), 0));
    let pushed = push(&first, "tiny", &name, &["--tensors"]);
    assert_eq!((&pushed["digest"], &pushed["sent_bytes"]), (&planned["digest"], &planned["sent_bytes"]));
    assert_eq!((bytes(&pushed["sent_bytes"]), pushed["index"].is_null()), (registry.bytes_uploaded(), true));
    let again = push(&first, "tiny", &name, &["--tensors"]);
    assert_eq!((&again["unchanged"], &again["sent_bytes"]), (&true.into(), &0.into()));

    let changed = sibling(&base());
    let (second, other_weights) = with_model(&changed);
    let (before, other) = (registry.bytes_uploaded(), registry.name("team/tunes:other"));
    let text = second.command().run(["push", "tiny", &other, "--tensors", "--dry-run"]).succeeds().text();
    assert!(text.contains(" as tensors: ") && text.contains("there before"), "{text}");
    let pushed = push(&second, "tiny", &other, &["--tensors"]);
    let sent = registry.bytes_uploaded() - before;
    let own = 2 * TENSOR_BYTES + 32 * 1024;
    assert!(sent > 2 * TENSOR_BYTES && sent < own, "{sent} bytes");
    assert_eq!(bytes(&pushed["sent_bytes"]), sent);

    let store = TestDaemon::start();
    let (done, served, requests) = pull(&store, &registry, &name);
    eprintln!("whole model: {served} bytes of {} in {requests} requests", weights.len());
    assert!(served < weights.len() as u64 + 32 * 1024 && requests <= TENSORS + 12, "{served}, {requests}");
    assert_eq!(done["digest"], model_digest(&first, "tiny"));
    check_weights(&store, &name, &weights);
    let (done, served, requests) = pull(&store, &registry, &other);
    eprintln!("sibling: {served} bytes in {requests} requests");
    assert!(served < own && requests <= 12, "{served} bytes in {requests} requests");
    assert_eq!(done["digest"], model_digest(&second, "tiny"));
    assert!(bytes(&done["index"]["spared_bytes"]) >= (TENSORS as u64 - 2) * TENSOR_BYTES, "{done}");
    check_weights(&store, &other, &other_weights);
    assert_eq!(pull(&store, &registry, &other).0["unchanged"], true);
    // It can be published in its ordinary form again.
    let ordinary = registry.name("team/plain:1");
    let passed = store.command().run(["transfer", &other, &ordinary, "--json"]).succeeds();
    assert_eq!(passed.json_lines().pop().unwrap()["digest"], done["digest"]);
    super::check_pulled(&ordinary, &other_weights);
}

#[test]
fn folder_has_all_its_files() {
    let (registry, daemon) = (direct_registry(), TestDaemon::start());
    let mut folder = ModelFolder::transformers(1);
    folder.add("first.json", "[1]");
    folder.add("second.json", "[1]");
    let path = folder.write_to(daemon.scratch().join("folder"));
    daemon.command().run(["import", path.to_str().unwrap(), "--name", "folder"]).succeeds();
    let name = registry.name("team/folder:1");
    push(&daemon, "folder", &name, &["--tensors"]);
    let other = TestDaemon::start();
    let (done, ..) = pull(&other, &registry, &name);
    assert_eq!(done["digest"], model_digest(&daemon, "folder"));
    other.command().run(["verify"]).succeeds();
}

#[test]
fn real_registry_has_each_tensor_once() {
    let Some(registry) = ThirdPartyRegistry::start(Access::Anonymous) else { return };
    let (first, _) = with_model(&base());
    let (second, weights) = with_model(&sibling(&base()));
    push(&first, "tiny", &registry.name("team/tunes:base"), &["--tensors"]);
    let name = registry.name("team/tunes:other");
    let pushed = push(&second, "tiny", &name, &["--tensors"]);
    assert!(bytes(&pushed["present_bytes"]) >= (TENSORS as u64 - 2) * TENSOR_BYTES, "{pushed}");
    // Another repository takes them from the first.
    second.command().run(["tag", "tiny", &name]).succeeds();
    let copied = push(&second, &name, &registry.name("team/copy:1"), &["--tensors"]);
    assert_eq!(copied["mounted_bytes"], copied["size"]);
    super::check_pulled(&name, &weights);
}

/// The manifest that a name has at the registry.
fn published(registry: &FakeRegistry, tag: &str) -> Json {
    serde_json::from_slice(&registry.manifest(&format!("/v2/team/tunes/manifests/{tag}")).unwrap()).unwrap()
}

fn layers_of<'j>(manifest: &'j mut Json, media_type: &str) -> Vec<&'j mut Json> {
    let layers = manifest["layers"].as_array_mut().unwrap();
    layers.iter_mut().filter(|layer| layer["mediaType"] == media_type).collect()
}

/// A largest blob that is a tensor.
fn tensor(manifest: &mut Json) -> &mut Json {
    let blobs = layers_of(manifest, TensorLayers::BLOB_TYPE).into_iter();
    blobs.max_by_key(|layer| layer["size"].as_u64()).unwrap()
}

fn add_blob(registry: &FakeRegistry, content: &[u8]) -> Json {
    json!({ "digest": registry.add_blob(content), "size": content.len() })
}

/// Publishes a manifest that lies, and returns the error of its pull, which leaves nothing.
fn refused(registry: &FakeRegistry, manifest: &Json) -> String {
    registry.add_manifest("team/tunes:lie", manifest.to_string().as_bytes());
    let store = TestDaemon::start();
    let run = store.command().run(["pull", &registry.name("team/tunes:lie"), "--json"]);
    assert_ne!(run.code, 0);
    assert_eq!(store.client().models().unwrap().models.len(), 0);
    run.error().message
}

#[test]
fn manifest_that_lies_is_refused_and_leaves_no_model() {
    let registry = direct_registry();
    let (daemon, _) = with_model(&base());
    push(&daemon, "tiny", &registry.name("team/tunes:base"), &["--tensors"]);
    let good = published(&registry, "base");
    let with = |change: &dyn Fn(&mut Json)| {
        let mut manifest = good.clone();
        change(&mut manifest);
        refused(&registry, &manifest)
    };
    let other = add_blob(&registry, &vec![7; usize::try_from(TENSOR_BYTES).unwrap()]);
    let cases: BTreeMap<&str, String> = BTreeMap::from([
        ("short blob", with(&|manifest| tensor(manifest)["size"] = 5.into())),
        ("long blob", with(&|manifest| tensor(manifest)["size"] = (TENSOR_BYTES + 1).into())),
        ("another blob", with(&|manifest| tensor(manifest)["digest"] = other["digest"].clone())),
        (
            "no recipe",
            with(&|manifest| {
                let layers = manifest["layers"].as_array_mut().unwrap();
                layers.retain(|layer| layer["mediaType"] != TensorIndex::RECIPE_TYPE);
            }),
        ),
        (
            "recipe of another file",
            with(&|manifest| {
                let junk = add_blob(&registry, b"no recipe");
                let recipe = layers_of(manifest, TensorIndex::RECIPE_TYPE).remove(0);
                recipe["digest"] = junk["digest"].clone();
                recipe["size"] = junk["size"].clone();
            }),
        ),
        (
            "long recipe",
            with(&|manifest| {
                layers_of(manifest, TensorIndex::RECIPE_TYPE).remove(0)["size"] = (1_u64 << 40).into();
            }),
        ),
        ("long model", with(&|manifest| manifest["config"]["size"] = (1_u64 << 40).into())),
        (
            "model that is none",
            with(&|manifest| {
                let junk = add_blob(&registry, b"{}");
                manifest["config"]["digest"] = junk["digest"].clone();
                manifest["config"]["size"] = junk["size"].clone();
            }),
        ),
        (
            "too many layers",
            with(&|manifest| {
                let layer = tensor(manifest).clone();
                manifest["layers"] = vec![layer; Manifest::MAX_LAYERS + 1].into();
            }),
        ),
    ]);
    for (case, expected) in [
        ("short blob", "expected a layer with it, found 5 bytes of the 65536"),
        ("another blob", "expected a layer with it, found none"),
        ("no recipe", "no recipe and no blob of file"),
        ("recipe of another file", "recipe: "),
        ("long recipe", "recipe: too long: expected at most"),
        ("long model", "manifest: too long: expected at most"),
        ("model that is none", "manifest: "),
        ("too many layers", "too many layers"),
    ] {
        assert!(cases[case].contains(expected), "{case}: {}", cases[case]);
    }
    assert!(!cases["long blob"].is_empty());
}

#[test]
fn unsigned_model_is_refused_before_a_tensor_is_requested() {
    let registry = direct_registry();
    let (daemon, weights) = with_model(&base());
    let name = registry.name("team/tunes:base");
    push(&daemon, "tiny", &name, &["--tensors"]);
    let keys = tmpfs_directory();
    let [private, public] = ["key.pem", "key.pub"].map(|file| keys.path().join(file));
    std::fs::write(&private, include_str!("../../../../daemon/keys/tests/p256.pem")).unwrap();
    std::fs::write(&public, include_str!("../../../../daemon/keys/tests/p256-public.pem")).unwrap();
    let config = keys.path().join("config.toml");
    let rule =
        format!("[[trust]]\npattern = \"*\"\nkeys = [{:?}]\nmode = \"enforce\"\n", public.to_str().unwrap());
    std::fs::write(&config, rule).unwrap();
    let blobd = Blobd::at_root(&keys.path().join("store")).configured_by(&config);
    let served = registry.bytes_served();
    let error = blobd.run(["pull", &name, "--json"]).error();
    assert!(error.message.contains("sign"), "{error}");
    assert!(registry.bytes_served() - served < TENSOR_BYTES, "{} bytes", registry.bytes_served() - served);
    daemon.command().run(["sign", "tiny", "--key", private.to_str().unwrap()]).succeeds();
    let pushed = push(&daemon, "tiny", &name, &["--tensors"]);
    assert_eq!(pushed["signatures"][0]["delivery"], "sent");
    blobd.run(["pull", &name]).succeeds();
    assert!(blobd.run(["export", &name, "-o", "-"]).stdout == weights);
}

#[test]
fn model_with_more_tensors_than_a_manifest_lists_is_refused_before_anything_is_sent() {
    let mut file = ModelFile::empty();
    for number in 0..Manifest::MAX_LAYERS {
        file.add_noise(1, &format!("blk.{number}.ffn_up.weight"), GgmlType::I8, &[32]);
    }
    let registry = direct_registry();
    let (daemon, _) = with_model(&file);
    let line = ["push", "tiny", &registry.name("team/tunes:many"), "--tensors", "--json"];
    let error = daemon.command().run(line).exits_with(2).error();
    assert!(error.message.contains("push it without --tensors"), "{error}");
    assert_eq!(registry.requests().len(), 0);
}

/// A registry that sends other bytes costs a download: the digest of the whole file decides.
#[test]
fn wrong_tensor_is_not_stored() {
    let registry = direct_registry();
    let (daemon, _) = with_model(&base());
    push(&daemon, "tiny", &registry.name("team/tunes:base"), &["--tensors"]);
    let mut good = published(&registry, "base");
    let digest: Digest = tensor(&mut good)["digest"].as_str().unwrap().parse().unwrap();
    registry.add_fault(&format!("/blobs/{digest}"), usize::MAX, Fault::FlipInFile(100));
    let store = TestDaemon::start();
    let run = store.command().run(["pull", &registry.name("team/tunes:base"), "--json"]);
    assert_ne!(run.code, 0);
    assert!(run.error().message.contains("digest"), "{}", run.error());
    assert_eq!(store.client().models().unwrap().models.len(), 0);
    registry.clear_faults();
    store.command().run(["pull", &registry.name("team/tunes:base")]).succeeds();
}

#[test]
fn digest_of_the_manifest_names_no_model_and_the_form_excludes_others() {
    let registry = direct_registry();
    let (daemon, _) = with_model(&base());
    let pushed = push(&daemon, "tiny", &registry.name("team/tunes:base"), &["--tensors"]);
    let pinned = registry.name(&format!("team/tunes@{}", pushed["digest"].as_str().unwrap()));
    let error = TestDaemon::start().command().run(["pull", &pinned, "--json"]).exits_with(1).error();
    assert!(error.message.contains("pull it by its tag"), "{error}");
    for more in [&["--as", "docker"][..], &["--no-index"]] {
        let mut line = vec!["push", "tiny", &pinned, "--tensors"];
        line.extend(more);
        daemon.command().run(line).exits_with(2);
    }
}
