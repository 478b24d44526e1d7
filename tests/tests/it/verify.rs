//! Damage is found, quarantined, reported, not served, and repaired.

mod concurrent;
mod disk;
mod quarantine;
mod repair;
mod scrub;

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;

use blobd_client::protocol::error::ErrorCode;
use blobd_client::protocol::request::{OpenParams, TensorSelection};
use blobd_store_format::recipe::Recipe;
use blobd_store_format::tensor::TensorFormat;
use blobd_tests::command::{Blobd, Run};
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::reader::Reader;
use blobd_tests::store_dir::{blob_path, check_blobs, flip_byte, names};
use blobd_tests::temp_dirs::tmpfs_directory;
use serde_json::Value as Json;

/// A tensor of the first block, of 4 KiB and more.
const TENSOR: &str = "blk.0.ffn_up.weight";

fn daemon_with(model: &ModelFile) -> TestDaemon {
    let daemon = TestDaemon::start();
    import(&daemon, model, "m");
    daemon
}

fn import(daemon: &TestDaemon, model: &ModelFile, name: &str) {
    let path = model.write_to(daemon.scratch(), "m.gguf");
    daemon.command().run(["import", path.to_str().unwrap(), "--name", name]).succeeds();
}

/// The digest of the blob with a tensor, according to `show`.
fn tensor_digest(blobd: &Blobd, model: &str, tensor: &str) -> String {
    let shown = blobd.run(["show", model, "--json"]).succeeds().json();
    let tensors = shown["tensors"].as_array().unwrap().clone();
    let found = tensors.iter().find(|found| found["name"] == tensor).expect(tensor);
    found["digest"].as_str().unwrap().to_owned()
}

fn damage_tensor(daemon: &TestDaemon, tensor: &str) -> (String, PathBuf) {
    let digest = tensor_digest(&daemon.command(), "m", tensor);
    let path = blob_path(daemon.root(), &digest);
    flip_byte(&path, 77);
    (digest, path)
}

/// The list of damage in the output of `verify --json`.
fn corrupt(run: &Run) -> Vec<Json> {
    run.json()["corrupt"].as_array().unwrap().clone()
}

fn model_summary(daemon: &TestDaemon, name: &str) -> Option<String> {
    let models = daemon.client().models().unwrap().models;
    models.into_iter().find(|model| model.name == name).unwrap().damage
}

#[test]
fn healthy_store_has_no_findings() {
    let daemon = daemon_with(&ModelFile::dense(1));
    import(&daemon, &ModelFile::separate_experts(2, 9), "moe");
    let blobs = check_blobs(daemon.root()).len();
    let run = daemon.command().line("verify --json").succeeds();
    let report = run.json();
    assert_eq!((&report["checked_blobs"], &report["corrupt"]), (&blobs.into(), &Json::Array(Vec::new())));
    let bytes: u64 = names(&daemon.root().join("blobs"))
        .iter()
        .map(|name| fs::metadata(daemon.root().join("blobs").join(name)).unwrap().len())
        .sum();
    assert_eq!(report["checked_bytes"], bytes);
    let text = daemon.command().line("verify m").succeeds().text();
    assert!(text.ends_with(": no damage found\n") && text.lines().count() == 1, "{text}");
    assert_eq!(names(&daemon.root().join("quarantine")), [""; 0]);
    daemon.command().line("verify nothing --json").exits_with(3);
}

#[test]
fn flipped_byte_is_found_quarantined_and_reported() {
    let model = ModelFile::dense(1);
    let daemon = daemon_with(&model);
    import(&daemon, &ModelFile::dense(1).with_changed("output.weight"), "sibling");
    import(&daemon, &ModelFile::dense(7), "other");
    let mut reader = Reader::open(&daemon.socket(), "m");
    let (digest, path) = damage_tensor(&daemon, TENSOR);
    let seen = reader.touch();
    assert_eq!(model_summary(&daemon, "m:latest"), None, "the damage is not yet known");

    let run = daemon.command().line("verify --json").exits_with(5);
    let [found] = corrupt(&run).try_into().unwrap();
    assert_eq!(found["digest"], digest);
    assert_eq!(found["models"], serde_json::json!(["m:latest", "sibling:latest"]));
    assert_eq!(found["repaired"], false);
    assert!(run.stderr.contains("--repair"), "{}", run.stderr);

    assert!(!path.exists());
    let [aside] = names(&daemon.root().join("quarantine")).try_into().unwrap();
    assert!(aside.starts_with(&digest.replace(':', "-")), "{aside}");
    assert_eq!(reader.touch(), seen, "the program that has it mapped keeps it");

    let damage = model_summary(&daemon, "m:latest").unwrap();
    assert_eq!(damage, "1 of its tensors is damaged: blobd verify --repair m:latest");
    assert_eq!(model_summary(&daemon, "other:latest"), None);
    let listed = daemon.command().line("ls").succeeds().text();
    assert!(listed.lines().filter(|line| line.contains("damaged")).count() == 2, "{listed}");
    assert!(daemon.client().disk_usage().unwrap().quarantine_bytes > 0);
    assert!(daemon.command().line("df").succeeds().text().contains("quarantine"));
}

#[test]
fn damaged_tensor_is_refused_and_all_others_open() {
    let daemon = daemon_with(&ModelFile::dense(1));
    let (digest, _) = damage_tensor(&daemon, TENSOR);
    daemon.command().line("verify --json").exits_with(5);
    let client = daemon.client();
    let error = client.open(&"m".parse().unwrap()).unwrap_err();
    assert_eq!(error.code(), ErrorCode::Corrupt);
    assert!(error.to_string().contains(TENSOR) && error.to_string().contains("--repair m:latest"), "{error}");
    let run = daemon.command().run(["export", "m", "-o", "-", "--json"]).exits_with(5);
    assert!(run.error().message.contains(TENSOR), "{}", run.stderr);
    let open = |tensors| client.open_with(&OpenParams { tensors, ..OpenParams::new("m".parse().unwrap()) });
    let others = open(TensorSelection::Prefix("blk.1.".into())).unwrap();
    assert_eq!(others.map_all().unwrap().len(), 9);
    assert!(open(TensorSelection::Names(vec![TENSOR.into()])).is_err());
    // The model can still be shown, and collecting stays safe.
    assert_eq!(tensor_digest(&daemon.command(), "m", TENSOR), digest);
    assert_eq!(daemon.command().line("gc --json").succeeds().json()["freed_bytes"], 0);
}

#[test]
fn damage_stays_known_until_the_file_is_imported_again() {
    let model = ModelFile::dense(1);
    let mut daemon = daemon_with(&model);
    let (digest, path) = damage_tensor(&daemon, TENSOR);
    daemon.command().line("verify").exits_with(5);
    daemon.stop();
    daemon.restart();
    assert!(model_summary(&daemon, "m:latest").is_some());
    let run = daemon.command().line("verify m --json --repair").exits_with(5);
    let [found] = corrupt(&run).try_into().unwrap();
    let reason = found["reason"].as_str().unwrap();
    assert!(reason.contains("found damaged before") && reason.contains("import m.gguf again"), "{reason}");
    assert_eq!(found["digest"], digest);

    import(&daemon, &model, "m");
    assert!(path.exists());
    assert_eq!(model_summary(&daemon, "m:latest"), None);
    daemon.command().line("verify").succeeds();
    assert!(daemon.command().run(["export", "m", "-o", "-"]).stdout == model.bytes());
    assert_eq!(names(&daemon.root().join("quarantine")).len(), 1, "it is the administrator's");
}

#[test]
fn damaged_whole_file_does_not_stop_collection() {
    let daemon = daemon_with(&ModelFile::dense(1));
    let shown = daemon.command().line("show m --json").json();
    let config = shown["layers"][0]["digest"].as_str().unwrap();
    flip_byte(&blob_path(daemon.root(), config), 3);
    daemon.command().line("verify").exits_with(5);
    assert_eq!(
        model_summary(&daemon, "m:latest").as_deref(),
        Some("its config is damaged: blobd verify --repair m:latest")
    );
    import(&daemon, &ModelFile::dense(2), "gone");
    let removed = daemon.command().line("rm gone --json").succeeds().json();
    assert!(removed["freed_bytes"].as_u64().unwrap() > 60_000, "{removed}");
    assert_eq!(daemon.command().line("gc --json").succeeds().json()["freed_bytes"], 0);
    // A file that is neither stored nor in quarantine may have had a recipe: then collections refuse.
    fs::remove_dir_all(daemon.root().join("quarantine")).unwrap();
    daemon.command().line("rm m --json").succeeds();
}

#[test]
fn missing_blob_is_reported_and_not_mistaken_for_a_missing_recipe() {
    let daemon = daemon_with(&ModelFile::dense(1));
    let digest = tensor_digest(&daemon.command(), "m", TENSOR);
    fs::remove_file(blob_path(daemon.root(), &digest)).unwrap();
    let [found] = corrupt(&daemon.command().line("verify m --json").exits_with(5)).try_into().unwrap();
    assert_eq!((&found["digest"], &found["reason"]), (&Json::from(digest), &Json::from("is missing")));
    assert!(model_summary(&daemon, "m:latest").unwrap().starts_with("1 of its tensors"));
    // A lost recipe is reported too, but still stops collection.
    let recipe = daemon.root().join("recipes").join(&names(&daemon.root().join("recipes"))[0]);
    fs::remove_file(&recipe).unwrap();
    let found = corrupt(&daemon.command().line("verify --repair --json").exits_with(5));
    assert!(
        found.iter().any(|found| found["reason"].as_str().unwrap().contains("nor its recipe")),
        "{found:?}"
    );
    let mut daemon = daemon;
    daemon.stop();
    daemon.restart();
    daemon.command().line("verify").exits_with(5);
    daemon.command().line("gc").exits_with(5);
}

#[test]
fn recipe_that_does_not_match_its_header_is_found() {
    let daemon = daemon_with(&ModelFile::dense(1));
    let file =
        daemon.command().line("show m --json").json()["layers"][1]["digest"].as_str().unwrap().to_owned();
    let path = daemon.root().join("recipes").join(format!("{}.json", file.replace(':', "-")));
    let honest = fs::read(&path).unwrap();
    let recipe = Recipe::parse(&honest).unwrap();
    let mut tensors: Vec<_> = recipe.tensors().iter().collect();
    let name = tensors[2].name.clone();
    tensors[2].name = tensors[3].name.clone();
    tensors[3].name = name;
    let swapped = Recipe::new(recipe.file(), TensorFormat::Gguf, recipe.pieces().to_vec(), tensors).unwrap();
    for (content, what) in
        [(swapped.to_json(), "header"), (b"{\"version\":1".to_vec(), "recipe: "), (Vec::new(), "recipe: ")]
    {
        fs::remove_file(&path).unwrap();
        fs::write(&path, content).unwrap();
        // The daemon has the correct one in memory, which does not matter.
        let [found] = corrupt(&daemon.command().line("verify m --json").exits_with(5)).try_into().unwrap();
        assert_eq!(
            (&found["digest"], &found["models"]),
            (&Json::from(file.as_str()), &serde_json::json!(["m:latest"]))
        );
        let reason = found["reason"].as_str().unwrap();
        assert!(reason.contains(what) && reason.contains("move it out of the store"), "{reason}");
    }
    // Following the advice repairs it.
    fs::remove_file(&path).unwrap();
    import(&daemon, &ModelFile::dense(1), "m");
    daemon.command().line("verify").succeeds();
    assert_eq!(Recipe::parse(fs::read(&path).unwrap()).unwrap(), recipe);
}

#[test]
fn writable_blob_is_reported_kept_and_made_read_only() {
    let daemon = daemon_with(&ModelFile::dense(1));
    let digest = tensor_digest(&daemon.command(), "m", TENSOR);
    let path = blob_path(daemon.root(), &digest);
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
    let [found] = corrupt(&daemon.command().line("verify --json").exits_with(5)).try_into().unwrap();
    assert_eq!(found["reason"], "wrong mode: expected 0444, found 0644");
    daemon.client().open(&"m".parse().unwrap()).unwrap();
    let [found] = corrupt(&daemon.command().line("verify --json --repair").succeeds()).try_into().unwrap();
    assert_eq!(found["repaired"], true);
    check_blobs(daemon.root());
}

#[test]
fn damaged_manifest_is_a_finding_of_verify_and_an_error_of_verify_model() {
    let daemon = daemon_with(&ModelFile::dense(1));
    import(&daemon, &ModelFile::dense(2), "bad");
    fs::write(daemon.root().join("manifests/registry.ollama.ai/library/bad/latest"), "x").unwrap();
    let [found] = corrupt(&daemon.command().line("verify --json").exits_with(5)).try_into().unwrap();
    assert_eq!(found["models"], serde_json::json!(["bad:latest"]));
    assert_eq!(daemon.command().line("verify bad --json").exits_with(5).error().code, ErrorCode::Corrupt);
    daemon.command().line("verify m").succeeds();
}

#[test]
fn damage_that_no_model_needs_is_reported_once() {
    let daemon = daemon_with(&ModelFile::dense(1));
    let name = format!("sha256-{}", "0".repeat(64));
    let path = daemon.root().join("blobs").join(name);
    fs::write(&path, "nobody's").unwrap();
    let [found] = corrupt(&daemon.command().line("verify --json --repair").exits_with(5)).try_into().unwrap();
    assert_eq!(found["models"], serde_json::json!([]));
    daemon.command().line("verify m").succeeds();
    daemon.command().line("verify").succeeds();
    assert_eq!(names(&daemon.root().join("quarantine")).len(), 1);
}

#[test]
fn verification_needs_no_daemon() {
    let folder = tmpfs_directory();
    let blobd = Blobd::at_root(&folder.path().join("store"));
    let path = ModelFile::dense(1).write_to(folder.path(), "m.gguf");
    blobd.run(["import", path.to_str().unwrap()]).succeeds();
    blobd.line("verify").succeeds();
    let digest = tensor_digest(&blobd, "m", TENSOR);
    flip_byte(&blob_path(&folder.path().join("store"), &digest), 0);
    let run = blobd.line("verify").exits_with(5);
    assert!(run.text().contains(&digest[7..19]) && run.text().contains("m:latest"), "{}", run.text());
    assert!(blobd.line("ls").succeeds().text().contains("damaged"));
    blobd.run(["export", "m", "-o", "-"]).exits_with(5);
}
