//! `blobd show --hash` and `--check`.

use std::fs;

use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::oracle::{sha256, tensor_ranges};
use blobd_tests::registry::FakeRegistry;
use blobd_tests::store_dir::{blob_path, flip_byte};
use serde_json::json;

fn daemon_with(model: &ModelFile) -> TestDaemon {
    let daemon = TestDaemon::start();
    let path = model.write_to(daemon.scratch(), "m.gguf");
    daemon.command().run(["import", path.to_str().unwrap(), "--name", "m"]).succeeds();
    daemon
}

#[test]
fn hashes_are_those_of_the_tensors_in_the_order_of_the_table() {
    for model in [
        ModelFile { reversed: true, gap: 2, padding: 7, ..ModelFile::dense(1) },
        ModelFile::separate_experts(1, 12),
        ModelFile::empty(),
    ] {
        let daemon = daemon_with(&model);
        let (file, mut expected) = (model.bytes(), String::new());
        let ranges = tensor_ranges(&file);
        for tensor in &model.tensors {
            let hash = sha256(&file[ranges[&tensor.name].clone()]);
            expected += &format!("sha256    {hash}  m-latest.gguf:{}\n", tensor.name);
        }
        expected += &format!("sha256    {}  m-latest.gguf\n", sha256(&model.tensor_bytes()));
        assert_eq!(daemon.command().line("show m --hash=sha256").succeeds().text(), expected);
    }
}

#[test]
fn algorithms_are_chosen_by_name() {
    let daemon = daemon_with(&ModelFile::dense(1));
    let algorithms = |words: &str| -> Vec<String> {
        let text = daemon.command().line(&format!("show m {words}")).succeeds().text().to_owned();
        let whole = text.lines().filter(|line| !line.contains(':'));
        whole.map(|line| line.split_whitespace().next().unwrap().to_owned()).collect()
    };
    assert_eq!(algorithms("--hash"), ["xxh64"]);
    assert_eq!(algorithms("--hash=all"), ["xxh64", "sha1", "sha256", "uuid"]);
    assert_eq!(algorithms("--hash=uuid,sha1"), ["sha1", "uuid"]);
    let json = daemon.command().line("show m --hash=uuid --json").succeeds().json();
    let only = &json["hashes"][0];
    assert_eq!(
        (&only["algorithm"], &only["file"], only.get("tensor")),
        (&json!("uuid"), &json!("m-latest.gguf"), None)
    );
    daemon.command().line("show m --hash=md5").exits_with(2);
    daemon.command().line("show m --hash=sha1 --tensors").exits_with(2);
}

#[test]
fn check_compares_with_a_file_that_gguf_hash_has_written() {
    let daemon = daemon_with(&ModelFile::dense(1));
    let manifest = daemon.scratch().join("manifest");
    let check = || daemon.command().run(["show", "m", "--check", manifest.to_str().unwrap()]);
    let text = daemon.command().line("show m --hash=all").succeeds().text().to_owned();
    fs::write(&manifest, &text).unwrap();
    let run = check().succeeds();
    assert!(run.text().contains("m-latest.gguf:output.weight  -  Ok\n"), "{}", run.text());
    assert!(run.text().ends_with("- Success\n"), "{}", run.text());
    // The file had another name.
    fs::write(&manifest, text.replace("m-latest.gguf", "../models/other.gguf")).unwrap();
    check().succeeds();
    // Another model.
    let other = daemon_with(&ModelFile::dense(1).with_changed("output.weight"));
    let run = other.command().run(["show", "m", "--check", manifest.to_str().unwrap(), "--json"]);
    let error = run.exits_with(5).error();
    // Three hashes of the tensor and four of the whole.
    assert!(error.message.contains("7 hashes differ"), "{error}");
    // A tensor that the model does not have, and a file about something else.
    let gone = format!("{text}sha1      00  m-latest.gguf:gone.weight\n");
    fs::write(&manifest, gone).unwrap();
    assert!(check().exits_with(5).stderr.contains("gone.weight"));
    fs::write(&manifest, "sha1      00  a.gguf:x\nsha1      00  b.gguf:y\n").unwrap();
    assert!(check().exits_with(1).stderr.contains("no hash of a tensor of model m"));
    fs::write(&manifest, "no manifest\n").unwrap();
    assert!(check().exits_with(1).stderr.contains("no line with the hash"));
    daemon.command().line("show m --check /absent").exits_with(3);
}

#[test]
fn hash_of_a_damaged_tensor_is_an_error() {
    let daemon = daemon_with(&ModelFile::dense(1));
    let tensor = daemon.command().line("show m --json").json()["tensors"][2]["digest"].clone();
    flip_byte(&blob_path(daemon.root(), tensor.as_str().unwrap()), 3);
    let run = daemon.command().line("show m --hash=sha256");
    assert_eq!(run.exits_with(5).text(), "");
}

#[test]
fn every_shard_is_hashed_as_a_file() {
    let registry = FakeRegistry::start().unwrap();
    let shards: Vec<Vec<u8>> = ModelFile::dense(1).shards(2).iter().map(ModelFile::bytes).collect();
    let layers: Vec<_> =
        shards.iter().map(|shard| ("application/vnd.ollama.image.model", &shard[..])).collect();
    registry.add_model("library/m:latest", b"{}", &layers).unwrap();
    let daemon = TestDaemon::start();
    let name = registry.name("library/m:latest");
    daemon.command().run(["pull", &name]).succeeds();
    let json = daemon.command().run(["show", &name, "--hash=sha256", "--json"]).succeeds().json();
    let lines = json["hashes"].as_array().unwrap();
    let whole: Vec<_> = lines.iter().filter(|line| line.get("tensor").is_none()).collect();
    for (shard, line) in ModelFile::dense(1).shards(2).iter().zip(&whole) {
        assert_eq!(line["hash"], sha256(&shard.tensor_bytes()));
    }
    assert_eq!(whole[1]["file"], "m-latest-00002-of-00002.gguf");
}
