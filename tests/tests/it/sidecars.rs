//! Imports of a file with the projector and the draft beside it.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};

use blobd_client::client::Client;
use blobd_client::error::ClientError;
use blobd_client::protocol::error::ErrorCode;
use blobd_client::protocol::request::{ImportParams, Sidecar, SidecarComponent};
use blobd_tests::command::Blobd;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::registry::FakeRegistry;
use blobd_tests::store_dir::{check_blobs, check_empty};
use blobd_tests::temp_dirs::tmpfs_directory;
use serde_json::{Value as Json, json};

const MODEL: &str = "see-Q4_K_M.gguf";
const PROJECTOR: &str = "mmproj-F16.gguf";
const DRAFT: &str = "mtp-see.gguf";

/// A model with its sidecars and with a projector that is not the nearest.
fn folder(scratch: &Path) -> PathBuf {
    let folder = scratch.join("see");
    fs::create_dir(&folder).unwrap();
    for (seed, name) in (1..).zip([MODEL, PROJECTOR, DRAFT, "mmproj-F32.gguf"]) {
        let _path = ModelFile::dense(seed).write_to(&folder, name);
    }
    folder
}

fn layers(blobd: &Blobd, name: &str) -> Vec<(String, Json)> {
    let shown = blobd.line(&format!("show {name} --json")).succeeds().json();
    // The first is the configuration.
    let layers = &shown["layers"].as_array().unwrap()[1..];
    let layer = |layer: &Json| {
        let component = layer["media_type"].as_str().unwrap().rsplit('.').next().unwrap();
        (component.to_owned(), layer["name"].clone())
    };
    layers.iter().map(layer).collect()
}

#[test]
fn import_says_which_sidecars_are_beside_the_file() {
    let daemon = TestDaemon::start();
    let path = folder(daemon.scratch()).join(MODEL);
    let run = daemon.command().run(["import", path.to_str().unwrap(), "--json"]).succeeds();
    let imported = run.json()["imported"][0].clone();
    let expected = "mmproj-F16.gguf and mtp-see.gguf are in the same folder; --with-sidecars stores them in the same model";
    assert_eq!(imported["notes"], json!([expected]));
    assert_eq!(layers(&daemon.command(), "see:Q4_K_M"), [("model".to_owned(), Json::Null)]);
    let text = daemon.command().run(["import", path.to_str().unwrap()]).succeeds().text();
    assert!(text.contains("--with-sidecars"), "{text}");
    // A sidecar has none, and neither has a file in another folder.
    let alone = ModelFile::dense(9).write_to(daemon.scratch(), "alone.gguf");
    for path in [alone, path.with_file_name(PROJECTOR)] {
        let run = daemon.command().run(["import", path.to_str().unwrap(), "--json"]).succeeds();
        assert_eq!(run.json()["imported"][0]["notes"], Json::Null);
    }
}

#[test]
fn model_with_sidecars_is_the_one_that_a_pull_makes() {
    let daemon = TestDaemon::start();
    let folder = folder(daemon.scratch());
    let path = folder.join(MODEL);
    let run =
        daemon.command().run(["import", path.to_str().unwrap(), "--with-sidecars", "--json"]).succeeds();
    let imported = run.json()["imported"][0].clone();
    let names: Vec<_> =
        imported["sidecars"].as_array().unwrap().iter().map(|sidecar| sidecar["file_name"].clone()).collect();
    assert_eq!(names, [PROJECTOR, DRAFT]);
    assert_eq!(imported["notes"], Json::Null);
    let expected = [("model", MODEL), ("projector", PROJECTOR), ("draft", DRAFT)];
    let expected: Vec<_> =
        expected.into_iter().map(|(component, name)| (component.to_owned(), json!(name))).collect();
    assert_eq!(layers(&daemon.command(), "see:Q4_K_M"), expected);
    for (component, name) in [("model", MODEL), ("projector", PROJECTOR), ("draft", DRAFT)] {
        let out =
            daemon.command().run(["export", "see:Q4_K_M", "--component", component, "-o", "-"]).succeeds();
        assert!(out.stdout == fs::read(folder.join(name)).unwrap(), "{component}");
    }
    exported_with_sidecars(&daemon, &folder);
    daemon.command().line("verify").succeeds();
    check_blobs(daemon.root());
    // The same files from a repository are the same model.
    let registry = FakeRegistry::start().unwrap();
    let files: Vec<_> =
        [MODEL, PROJECTOR, DRAFT].map(|name| (name, fs::read(folder.join(name)).unwrap())).into();
    let files: Vec<_> = files.iter().map(|(name, bytes)| (*name, bytes.as_slice())).collect();
    registry.add_repository("me/see", &"0".repeat(40), &files);
    let other = tmpfs_directory();
    let config = other.path().join("config.toml");
    fs::write(&config, format!("[mirrors]\n\"hf.co\" = \"{}\"\n", registry.url())).unwrap();
    let pull = ["pull", "hf.co/me/see", "--config", config.to_str().unwrap(), "--json"];
    let pulled = Blobd::at_root(&other.path().join("store")).run(pull).succeeds().json_lines().pop().unwrap();
    assert_eq!(pulled["digest"], imported["digest"]);
}

/// Into a folder, the model is written with its sidecars; else a note names them.
fn exported_with_sidecars(daemon: &TestDaemon, folder: &Path) {
    let out = daemon.scratch().join("out");
    let into = |arguments: &[&str]| {
        daemon.command().run([&["export", "see:Q4_K_M", "-o"], arguments].concat()).succeeds()
    };
    into(&[&format!("{}/", out.display())]);
    let written: BTreeSet<_> =
        fs::read_dir(&out).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    assert_eq!(written, [MODEL, PROJECTOR, DRAFT].map(str::to_owned).into());
    for name in written {
        assert!(fs::read(out.join(&name)).unwrap() == fs::read(folder.join(&name)).unwrap(), "{name}");
    }
    let file = daemon.scratch().join("one.gguf");
    let run = into(&[file.to_str().unwrap()]);
    assert!(run.stderr.contains("the projector, the draft of see:Q4_K_M"), "{}", run.stderr);
    assert!(!into(&["-", "--component", "model"]).stderr.contains("not written"));
}

#[test]
fn sidecars_that_are_taken_are_not_models_of_their_own() {
    let folder = tmpfs_directory();
    let files = self::folder(folder.path());
    let blobd = Blobd::at_root(&folder.path().join("store"));
    let paths = [MODEL, PROJECTOR, DRAFT].map(|name| files.join(name).to_str().unwrap().to_owned());
    let paths = paths.iter().map(String::as_str);
    blobd.run(["import", "--with-sidecars", "--name", "see"].into_iter().chain(paths)).succeeds();
    let listed = blobd.line("ls --json").json();
    let names: Vec<_> = listed["models"].as_array().unwrap().iter().map(|model| &model["name"]).collect();
    assert_eq!(names, ["see:latest"]);
}

#[test]
fn import_with_a_sidecar_that_is_refused_leaves_nothing() {
    let daemon = TestDaemon::start();
    let folder = folder(daemon.scratch());
    fs::write(folder.join(DRAFT), "no model").unwrap();
    let path = folder.join(MODEL);
    let run = daemon.command().run(["import", path.to_str().unwrap(), "--with-sidecars", "--json"]);
    assert!(run.exits_with(1).error().message.starts_with("mtp-see.gguf: "));
    check_empty(daemon.root());
}

#[test]
fn request_with_a_wrong_number_of_descriptors_is_refused() {
    let daemon = TestDaemon::start();
    let folder = folder(daemon.scratch());
    let client = Client::connect(daemon.socket()).unwrap();
    let sidecar =
        |number: usize| Sidecar { component: SidecarComponent::Draft, file_name: format!("{number}.gguf") };
    let import = |sidecars: usize, files: &[&str]| {
        let sidecars = (0..sidecars).map(sidecar).collect();
        let params = ImportParams { sidecars, ..ImportParams::new(MODEL) };
        let files: Vec<File> = files.iter().map(|name| File::open(folder.join(name)).unwrap()).collect();
        client.import_files(&params, &files.iter().map(|file| file.as_fd()).collect::<Vec<_>>(), |_| ())
    };
    import(1, &[MODEL]).unwrap_err();
    import(0, &[MODEL, DRAFT]).unwrap_err();
    import(0, &[]).unwrap_err();
    let many = [&[MODEL][..], &[DRAFT; 16]].concat();
    match import(16, &many) {
        Err(ClientError::Daemon(error)) => assert_eq!(error.code, ErrorCode::InvalidRequest),
        other => panic!("{other:?}"),
    }
    check_empty(daemon.root());
    assert_eq!(import(2, &[MODEL, DRAFT, PROJECTOR]).unwrap().sidecars.len(), 2);
}
