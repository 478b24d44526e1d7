//! Which names the models of a cache get, and which models of earlier imports they replace.

use std::fs;

use blobd_tests::daemon::TestDaemon;
use blobd_tests::folders::safetensors;
use blobd_tests::model::ModelFile;
use serde_json::{Value as Json, json};

use super::cache::{COMMIT, Cache};
use super::{OTHER, names};

/// The names and digests of all models.
fn stored(daemon: &TestDaemon) -> Vec<(String, Json)> {
    let listed = daemon.command().line("ls --json").succeeds().json()["models"].clone();
    let models = listed.as_array().unwrap().iter();
    models.map(|model| (model["name"].as_str().unwrap().to_owned(), model["digest"].clone())).collect()
}

#[test]
fn newer_commit_replaces_the_model_whatever_its_weights_are_called() {
    let daemon = TestDaemon::start();
    let cache = Cache::new(daemon.scratch());
    let set = |commit: &str, folder: &str, gguf: &str, seed: u64| {
        cache.add_to(("ann/folder", commit), folder, &safetensors(&[(seed, "t")]));
        cache.add_to(("ben/tiny", commit), gguf, &ModelFile::dense(seed).bytes());
        for name in ["ann/folder", "ben/tiny"] {
            fs::write(cache.repository(name).join("refs/main"), commit).unwrap();
        }
        cache.import(&daemon, &["hf.co/ann/folder:latest", "hf.co/ben/tiny:Q8_0"]).succeeds();
        stored(&daemon)
    };
    let first = set(COMMIT, "model.safetensors", "tiny-Q8_0.gguf", 1);
    let second = set(OTHER, "weights.safetensors", "small-v2-Q8_0.gguf", 2);
    let names = |models: &[(String, Json)]| models.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
    assert_eq!(names(&first), ["hf.co/ann/folder:latest", "hf.co/ben/tiny:Q8_0"]);
    assert_eq!(names(&second), names(&first));
    assert!(first.iter().zip(&second).all(|(first, second)| first.1 != second.1), "{first:?} {second:?}");
    let states = cache.import(&daemon, &["--list", "hf.co/ann/folder:latest"]).succeeds().json();
    assert_eq!(states["models"][0]["state"], "stored");
}

#[test]
fn model_that_has_become_complete_replaces_its_part() {
    let daemon = TestDaemon::start();
    let cache = Cache::new(daemon.scratch());
    cache.add("ann/pipe", "config.json", b"{}");
    cache.add("ann/pipe", "vae/model.safetensors", &safetensors(&[(1, "t")]));
    cache.import(&daemon, &[]).succeeds();
    let part = stored(&daemon);
    // The reference is as it was: only files have come, one of them before the first.
    cache.add_to(("ann/pipe", COMMIT), "unet/model.safetensors", &safetensors(&[(2, "t")]));
    cache.import(&daemon, &[]).succeeds();
    let whole = stored(&daemon);
    assert_eq!((part.len(), whole.len(), &whole[0].0), (1, 1, &part[0].0));
    assert_ne!(part[0].1, whole[0].1);
    assert_eq!(cache.import(&daemon, &[]).succeeds().json()["imported"], json!([]));
    // Fewer files of the commit never replace it, whenever they came.
    fs::remove_file(cache.snapshot("ann/pipe").join("vae/model.safetensors")).unwrap();
    fs::write(cache.repository("ann/pipe").join("refs/main"), COMMIT).unwrap();
    let imported = cache.import(&daemon, &[]).succeeds().json();
    assert!(names(&imported["imported"])[0].starts_with("hf.co/ann/pipe:latest-"), "{imported}");
    assert!(stored(&daemon).contains(&whole[0]));
}

#[test]
fn each_gguf_file_of_a_commit_is_another_model() {
    let daemon = TestDaemon::start();
    let cache = Cache::new(daemon.scratch());
    cache.add("ann/tiny", "b/tiny-Q8_0.gguf", &ModelFile::dense(1).bytes());
    cache.import(&daemon, &[]).succeeds();
    let before = stored(&daemon);
    fs::remove_dir_all(cache.snapshot("ann/tiny").join("b")).unwrap();
    cache.add("ann/tiny", "a/tiny-Q8_0.gguf", &ModelFile::dense(2).bytes());
    cache.import(&daemon, &[]).succeeds();
    let after = stored(&daemon);
    assert!(after.contains(&before[0]) && after.len() == 2, "{after:?}");
}

#[test]
fn name_of_a_second_reference_that_another_model_has_is_made_distinct() {
    let daemon = TestDaemon::start();
    let cache = Cache::new(daemon.scratch());
    cache.add("ann/tiny", "tiny-Q8_0.gguf", &ModelFile::dense(1).bytes());
    fs::write(cache.repository("ann/tiny").join("refs/v1"), COMMIT).unwrap();
    let own = ModelFile::dense(2).write_to(daemon.scratch(), "own.gguf");
    let taken = "hf.co/ann/tiny:Q8_0-v1";
    daemon.command().run(["import", own.to_str().unwrap(), "--name", taken]).succeeds();
    let listed = cache.import(&daemon, &["--list"]).succeeds().json();
    assert!(listed["models"][1]["notes"][0].as_str().unwrap().contains("has this name"), "{listed}");
    let imported = cache.import(&daemon, &[]).succeeds().json();
    let names = names(&imported["imported"]);
    assert!(names[0] == "hf.co/ann/tiny:Q8_0" && names[1].starts_with(&format!("{taken}-")), "{imported}");
    let listed = cache.import(&daemon, &["--list"]).succeeds().json();
    assert_eq!(listed["models"][1]["name"], names[1], "the name that it has: {listed}");
    assert_eq!(listed["models"][1]["state"], "stored");
}
