//! `show`, `tensor`, `diff` and `fit` of models in files of this machine: a folder or a file, of safetensors or GGUF.

use std::fs;
use std::path::PathBuf;

use blobd_tests::command::{Blobd, run};
use blobd_tests::daemon::TestDaemon;
use blobd_tests::folders::{ModelFolder, safetensors};
use blobd_tests::model::ModelFile;
use serde_json::{Value as Json, json};

/// A folder, and the stored model of the same files.
fn stored_folder(daemon: &TestDaemon) -> PathBuf {
    let folder = ModelFolder::transformers(1).write_to(daemon.scratch().join("tiny"));
    daemon.command().run(["import", folder.to_str().unwrap()]).succeeds();
    folder
}

fn json(blobd: &Blobd, words: &[&str]) -> Json {
    blobd.run(words.iter().chain(&["--json"])).succeeds().json()
}

#[test]
fn folder_is_described_as_the_stored_model_of_its_files() {
    let daemon = TestDaemon::start();
    let (blobd, folder) = (daemon.command(), stored_folder(&daemon));
    let path = folder.to_str().unwrap();
    let (stored, local) = (json(&blobd, &["show", "tiny"]), json(&blobd, &["show", path]));
    assert_eq!((&local["stored"], &local["name"]), (&json!(false), &json!(path)));
    for key in [
        "kind",
        "architecture",
        "parameters",
        "quantization",
        "bits_per_weight",
        "types",
        "context_length",
        "embedding_length",
        "block_count",
        "head_count",
        "metadata",
    ] {
        assert_eq!(local[key], stored[key], "{key}");
    }
    let facts = |model: &Json| -> Vec<Json> {
        let tensors = model["tensors"].as_array().unwrap().iter();
        let keys = ["name", "type", "shape", "size", "format", "file"];
        tensors.map(|tensor| json!(keys.map(|key| &tensor[key]))).collect()
    };
    assert_eq!(facts(&local), facts(&json(&blobd, &["show", "tiny", "--full"])));
    let needs = |model: &str| json(&blobd, &["fit", model, "--vram", "1GiB"]);
    let (of_stored, of_local) = (needs("tiny"), needs(path));
    assert!(of_stored["weights_bytes"].as_u64().unwrap() > 0, "{of_stored}");
    for key in ["weights_bytes", "kv_total_bytes", "basis", "format", "weights"] {
        assert_eq!(of_local[key], of_stored[key], "{key}");
    }
}

#[test]
fn tensors_of_a_folder_are_those_of_the_stored_model() {
    let daemon = TestDaemon::start();
    let (blobd, folder) = (daemon.command(), stored_folder(&daemon));
    let path = folder.to_str().unwrap();
    let diff = json(&blobd, &["diff", "tiny", path]);
    assert_eq!((&diff["only_a_bytes"], &diff["only_b_bytes"]), (&json!(0), &json!(0)), "{diff}");
    let shown = json(&blobd, &["show", path]);
    let tensor = shown["tensors"][0]["name"].as_str().unwrap();
    let dump = |model: &str| blobd.run(["tensor", model, tensor, "--dump"]).succeeds().stdout;
    assert!(!dump(path).is_empty());
    assert_eq!(dump(path), dump("tiny"));
    let statistics = |model: &str| json(&blobd, &["tensor", model, tensor])["mean"].clone();
    assert_eq!(statistics(path), statistics("tiny"));
    // One of its files alone.
    let file = shown["tensors"][0]["file"].as_str().unwrap();
    let file = folder.join(file);
    assert_eq!(dump(file.to_str().unwrap()), dump("tiny"));
    let other = ModelFolder::transformers(2).write_to(daemon.scratch().join("other"));
    let other = other.to_str().unwrap();
    let (first, second) = (json(&blobd, &["diff", "tiny", other]), json(&blobd, &["diff", path, other]));
    assert_eq!(first["only_a_bytes"], second["only_a_bytes"]);
    assert_ne!(second["only_a_bytes"], json!(0));
}

#[test]
fn what_is_not_one_model_is_refused_with_what_can_be_named_instead() {
    let daemon = TestDaemon::start();
    let (blobd, scratch) = (daemon.command(), daemon.scratch());
    let refused = |path: &str, code| {
        let run = blobd.run(["show", &scratch.join(path).display().to_string()]).exits_with(code);
        run.stderr.replace(&scratch.display().to_string(), "DIR")
    };
    fs::create_dir(scratch.join("gguf")).unwrap();
    let _ = ModelFile::dense(1).write_to(&scratch.join("gguf"), "a-Q8_0.gguf");
    // The only model of a folder is meant.
    let shown = json(&blobd, &["show", scratch.join("gguf").to_str().unwrap()]);
    assert_eq!(shown["layers"][0]["name"], "a-Q8_0.gguf");
    let _ = ModelFile::dense(2).write_to(&scratch.join("gguf"), "b-Q8_0.gguf");
    assert_eq!(
        refused("gguf", 2),
        "blobd: DIR/gguf: expected one model, found several GGUF models\nhint: name one of them, such as DIR/gguf/a-Q8_0.gguf\n"
    );
    ModelFolder::transformers(1).write_to(scratch.join("several/one"));
    ModelFolder::transformers(2).write_to(scratch.join("several/two"));
    fs::write(scratch.join("several/stray.safetensors"), safetensors(&[(3, "t")])).unwrap();
    assert_eq!(
        refused("several", 2),
        "blobd: DIR/several: expected one model, found folders of models\n\
         hint: name one of them, such as DIR/several/one\n"
    );
    fs::create_dir_all(scratch.join("empty")).unwrap();
    let other = refused("empty", 2);
    assert!(
        other.starts_with("blobd: DIR/empty: expected a file, or the folder of a model, found another"),
        "{other}"
    );
    let mut cut = safetensors(&[(3, "t")]);
    cut.truncate(cut.len() - 1);
    fs::write(scratch.join("cut.safetensors"), cut).unwrap();
    assert!(refused("cut.safetensors", 1).starts_with("blobd: DIR/cut.safetensors: "));
    // The name of a folder can be that of a model.
    let mut command = blobd.command();
    let run = run(command.args(["show", "empty", "--stored"]).current_dir(scratch)).exits_with(3);
    assert!(run.stderr.contains("the folder of this name is ./empty"), "{}", run.stderr);
}
