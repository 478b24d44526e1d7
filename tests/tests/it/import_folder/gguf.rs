//! `blobd import` of folders of GGUF files.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use blobd_tests::daemon::TestDaemon;
use blobd_tests::folders::safetensors;
use blobd_tests::model::ModelFile;
use blobd_tests::store_dir::{check_blobs, check_empty};
use serde_json::{Value as Json, json};

/// A folder with two quants of a model, one of them in shards, their projector, another model and an adapter.
fn folder(scratch: &Path) -> PathBuf {
    let folder = scratch.join("models");
    fs::create_dir_all(folder.join("nested")).unwrap();
    let files = ["see-Q4_K_M.gguf", "mmproj-see-F16.gguf", "nested/see-Q4_K_M.gguf", "lora-adapter.gguf"];
    for (seed, name) in (1..).zip(files) {
        fs::write(folder.join(name), ModelFile::dense(seed).bytes()).unwrap();
    }
    for (number, shard) in (1..).zip(ModelFile::dense(9).shards(2)) {
        fs::write(folder.join(format!("see-Q8_0-{number:05}-of-00002.gguf")), shard.bytes()).unwrap();
    }
    fs::write(folder.join("README.md"), "# See").unwrap();
    fs::write(folder.join("see-Q2_K.gguf.incomplete"), "GGUF").unwrap();
    folder
}

fn import(daemon: &TestDaemon, folder: &Path, more: &[&str]) -> Json {
    let words = ["import", folder.to_str().unwrap(), "--json"];
    daemon.command().run(words.iter().chain(more)).succeeds().json()
}

#[test]
fn each_file_and_each_set_of_shards_is_a_model_with_its_projector() {
    let daemon = TestDaemon::start();
    let folder = folder(daemon.scratch());
    let listed = import(&daemon, &folder, &["--list"]);
    let listed: BTreeMap<String, usize> = listed["models"]
        .as_array()
        .unwrap()
        .iter()
        .map(|model| {
            let path = Path::new(model["path"].as_str().unwrap()).strip_prefix(&folder).unwrap();
            (path.to_str().unwrap().to_owned(), model["files"].as_array().unwrap().len())
        })
        .collect();
    let expected = [
        ("lora-adapter.gguf", 1),
        ("nested/see-Q4_K_M.gguf", 2),
        ("see-Q4_K_M.gguf", 2),
        ("see-Q8_0-00001-of-00002.gguf", 3),
    ];
    assert_eq!(listed, expected.map(|(path, files)| (path.to_owned(), files)).into());
    check_empty(daemon.root());
    let imported = import(&daemon, &folder, &[]);
    let mut names: Vec<_> = imported["imported"]
        .as_array()
        .unwrap()
        .iter()
        .map(|model| model["name"].as_str().unwrap())
        .collect();
    names.sort_unstable();
    let expected = ["lora-adapter:latest", "nested-see:Q4_K_M", "see:Q4_K_M", "see:Q8_0"];
    assert_eq!(names, expected);
    let out = |name: &str, component: &str| {
        daemon.command().run(["export", name, "--component", component, "-o", "-"]).succeeds().stdout
    };
    assert!(out("see:Q4_K_M", "model") == ModelFile::dense(1).bytes());
    assert!(out("see:Q8_0", "projector") == ModelFile::dense(2).bytes());
    assert!(out("nested-see:Q4_K_M", "model") == ModelFile::dense(3).bytes());
    check_blobs(daemon.root());
    // The same model as that of its file.
    let file = folder.join("see-Q4_K_M.gguf");
    let alone = import(&daemon, &file, &["--with-sidecars"]);
    let of_folder =
        imported["imported"].as_array().unwrap().iter().find(|model| model["name"] == "see:Q4_K_M");
    assert_eq!((&alone["imported"][0]["unchanged"], of_folder.is_some()), (&json!(true), true));
    assert_eq!(alone["imported"][0]["digest"], of_folder.unwrap()["digest"]);
}

#[test]
fn invalid_model_of_a_folder_does_not_stop_the_others() {
    let daemon = TestDaemon::start();
    let folder = folder(daemon.scratch());
    fs::remove_file(folder.join("see-Q8_0-00002-of-00002.gguf")).unwrap();
    fs::write(folder.join("broken-Q4_0.gguf"), "no model").unwrap();
    let secret = daemon.scratch().join("secret.gguf");
    fs::write(&secret, ModelFile::dense(7).bytes()).unwrap();
    symlink(&secret, folder.join("linked-Q8_0.gguf")).unwrap();
    let run = daemon.command().run(["import", folder.to_str().unwrap(), "--json"]).exits_with(1);
    let document = run.json();
    assert_eq!(document["imported"].as_array().unwrap().len(), 3, "{document}");
    let failed = document["failed"].to_string();
    for words in ["00002-of-00002", "broken-Q4_0.gguf", "leads out of the folder"] {
        assert!(failed.contains(words), "{words}: {failed}");
    }
    assert_eq!(document["failed"].as_array().unwrap().len(), 3, "{failed}");
    let imported = import(&daemon, &folder, &["--follow", "--exclude", "broken*", "--exclude", "see-Q8_0*"]);
    let names = imported["imported"].to_string();
    assert!(names.contains("linked:Q8_0"), "{names}");
    check_blobs(daemon.root());
}

#[test]
fn gguf_files_beside_safetensors_are_named_as_left_out() {
    let daemon = TestDaemon::start();
    let folder = daemon.scratch().join("both");
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join("model.safetensors"), safetensors(&[(1, "t")])).unwrap();
    fs::write(folder.join("both-Q8_0.gguf"), ModelFile::dense(1).bytes()).unwrap();
    let listed = import(&daemon, &folder, &["--list"])["models"][0].clone();
    assert_eq!(listed["files"].as_array().unwrap().len(), 1);
    let reason = listed["left_out"][0].to_string();
    assert!(reason.contains("both-Q8_0.gguf") && reason.contains("import it by its name"), "{reason}");
    let two =
        daemon.command().run(["import", folder.to_str().unwrap(), "--include", "*.gguf", "--name", "one"]);
    two.succeeds();
    assert!(daemon.command().line("export one -o -").succeeds().stdout == ModelFile::dense(1).bytes());
}

#[test]
fn one_name_for_several_models_of_a_folder_is_refused() {
    let daemon = TestDaemon::start();
    let folder = folder(daemon.scratch());
    let run = daemon.command().run(["import", folder.to_str().unwrap(), "--name", "x"]).exits_with(2);
    assert!(run.stderr.contains("names one model, but several are given"), "{}", run.stderr);
    check_empty(daemon.root());
}
