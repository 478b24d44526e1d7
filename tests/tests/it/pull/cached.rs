//! Models that were imported from a cache of the hub: their files at the hub, for repairs and for `outdated`.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;

use blobd_tests::oracle::sha256;
use blobd_tests::registry::FakeRegistry;
use blobd_tests::store_dir::{blob_path, check_blobs, flip_byte};
use serde_json::{Value as Json, json};

use super::files::{COMMIT, Commands};

const LATER: &str = "abcdef0123456789abcdef0123456789abcdef01";

/// A safetensors file with one tensor of four bytes.
fn safetensors() -> Vec<u8> {
    let header = br#"{"t":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#;
    [&(header.len() as u64).to_le_bytes(), &header[..], &1_f32.to_le_bytes()].concat()
}

/// The small files have one size, so that only their paths tell them apart.
fn files(weights: &[u8]) -> [(&'static str, &[u8]); 4] {
    [
        ("README.md", b"# not downloaded"),
        ("config.json", br#"{"a":1}"#),
        ("generation_config.json", br#"{"b":2}"#),
        ("model.safetensors", weights),
    ]
}

/// Writes the cache of a repository at `COMMIT` without its README.
fn cache(commands: &Commands, repository: &str, weights: &[u8]) -> PathBuf {
    let hub = commands.root().with_file_name("hub");
    let folder = hub.join(format!("models--{}", repository.replace('/', "--")));
    let snapshot = folder.join("snapshots").join(COMMIT);
    for place in [folder.join("refs"), folder.join("blobs"), snapshot.clone()] {
        fs::create_dir_all(place).unwrap();
    }
    fs::write(folder.join("refs/main"), COMMIT).unwrap();
    for (path, bytes) in files(weights).into_iter().skip(1) {
        let etag = sha256(bytes);
        fs::write(folder.join("blobs").join(&etag), bytes).unwrap();
        symlink(format!("../../blobs/{etag}"), snapshot.join(path)).unwrap();
    }
    hub
}

/// Imports a repository from a cache.
fn imported(repository: &str) -> (FakeRegistry, Commands) {
    let (registry, weights) = (FakeRegistry::start().unwrap(), safetensors());
    registry.add_folder(repository, COMMIT, &files(&weights));
    let commands = Commands::with_hub(&registry);
    let from = format!("--from-hf={}", cache(&commands, repository, &weights).display());
    commands.run(&["import", &from]).succeeds();
    (registry, commands)
}

fn status(commands: &Commands) -> Json {
    let run = commands.run(&["outdated"]);
    let models = run.json()["models"].clone();
    assert_eq!(models.as_array().unwrap().len(), 1, "{models}");
    models[0]["status"].clone()
}

#[test]
fn damaged_small_files_of_an_imported_model_are_fetched_again() {
    for repository in ["org/cached", "gpt2"] {
        let (_registry, commands) = imported(repository);
        let weights = safetensors();
        for (path, bytes) in files(&weights).into_iter().skip(1).take(2) {
            flip_byte(&blob_path(&commands.root(), &format!("sha256:{}", sha256(bytes))), 2);
            let repaired = commands.run(&["verify", "--repair"]).json();
            assert_eq!(repaired["corrupt"][0]["repaired"], json!(true), "{path}: {repaired}");
            assert_eq!(repaired["corrupt"][0]["fetched_bytes"], json!(bytes.len()), "{path}");
        }
        check_blobs(&commands.root());
        commands.run(&["verify"]).succeeds();
    }
}

#[test]
fn imported_model_is_outdated_when_one_of_its_files_has_changed() {
    let (registry, commands) = imported("org/cached");
    assert_eq!(status(&commands), "current");
    let weights = safetensors();
    let mut later = files(&weights);
    // The model does not have this file.
    later[0].1 = b"# other text";
    registry.add_folder("org/cached", LATER, &later);
    assert_eq!(status(&commands), "current");
    registry.add_folder("org/cached", LATER, &[later[0], later[1], later[3]]);
    assert_eq!(status(&commands), "outdated", "a file was removed");
    later[1].1 = br#"{"a":3}"#;
    registry.add_folder("org/cached", LATER, &later);
    assert_eq!(status(&commands), "outdated");
    commands.run(&["pull", "hf.co/org/cached"]).succeeds();
    assert_eq!(status(&commands), "current");
}

#[test]
fn repository_without_an_owner_has_the_name_that_the_hub_gives_it() {
    let (registry, commands) = imported("gpt2");
    let models = commands.models();
    assert_eq!(models[0]["name"], "hf.co/gpt2:latest");
    let origin = format!("copy https://huggingface.co/gpt2/resolve/{COMMIT}/model.safetensors in hf");
    assert_eq!(models[0]["origin"], json!(origin));
    assert_eq!(status(&commands), "current");
    // A pull of the name updates it.
    let weights = safetensors();
    let mut later = files(&weights);
    later[1].1 = br#"{"a":3}"#;
    registry.add_folder("gpt2", LATER, &later);
    assert_eq!(status(&commands), "outdated");
    commands.run(&["pull", "hf.co/gpt2"]).succeeds();
    assert_eq!(status(&commands), "current");
}

#[test]
fn wrong_entry_of_the_list_of_files_is_named() {
    let (registry, weights) = (FakeRegistry::start().unwrap(), safetensors());
    let listed = [("config.json", &b"{}"[..]), ("model.safetensors", &weights)];
    registry.add_folder("org/wrong", COMMIT, &listed);
    let commands = Commands::with_hub(&registry);
    for (path, entry, expected) in [
        (
            "model.safetensors",
            json!({ "type": "file", "oid": "1f", "size": 10, "lfs": { "oid": "12", "size": 10 } }),
            "model.safetensors: wrong lfs.oid: expected the 64 hexadecimal digits of a SHA-256, found \"12\"",
        ),
        (
            "config.json",
            json!({ "type": "file", "oid": "12", "size": 2 }),
            "config.json: wrong oid: expected 40 hexadecimal digits, found \"12\"",
        ),
    ] {
        let mut tree = registry.tree_of(&listed);
        let mut entry = entry;
        entry["path"] = json!(path);
        tree.retain(|known| known["path"] != path);
        tree.push(entry);
        let page = Json::from(tree).to_string();
        registry.add_page(&format!("/api/models/org/wrong/tree/{COMMIT}"), page.as_bytes(), &[]);
        let error = commands.run(&["pull", "hf.co/org/wrong"]).exits_with(1).error();
        assert!(error.message.contains(expected), "{error}");
    }
}
