//! `gc --quarantine` empties the quarantine, and nothing else does.

use std::fs;
use std::path::PathBuf;

use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::store_dir::names;
use blobd_tests::wait::eventually;

use super::{TENSOR, daemon_with, damage_tensor, import, model_summary};

/// A daemon with a model of which one tensor was quarantined, and its digest.
fn quarantined() -> (TestDaemon, ModelFile, String) {
    let model = ModelFile::dense(1);
    let daemon = daemon_with(&model);
    let (digest, _) = damage_tensor(&daemon, TENSOR);
    daemon.command().line("verify").exits_with(5);
    (daemon, model, digest)
}

fn quarantine(daemon: &TestDaemon) -> PathBuf {
    daemon.root().join("quarantine")
}

#[test]
fn blob_that_was_replaced_is_shown_with_its_models_and_deleted_on_request() {
    let (daemon, model, digest) = quarantined();
    // Stores the blob again.
    import(&daemon, &model, "m");
    daemon.command().line("gc").succeeds();
    daemon.command().line("verify --repair").succeeds();
    assert_eq!(names(&quarantine(&daemon)).len(), 1, "nothing else deletes it");
    assert!(daemon.command().line("df").succeeds().text().contains("`blobd gc --quarantine` frees it"));
    let doctor = daemon.command().line("doctor").text();
    assert!(doctor.contains("of blobs that were replaced are in quarantine"), "{doctor}");

    let planned = daemon.command().line("gc --quarantine --dry-run --json").succeeds().json();
    let item = &planned["deleted"][0];
    assert_eq!((&item["digest"], &item["reason"]), (&digest.clone().into(), &"quarantined".into()));
    assert_eq!(item["models"], serde_json::json!(["m:latest"]));
    assert_eq!(item["is_needed"], false);
    assert!(item["since"].as_str().is_some_and(|since| since.starts_with("20")), "{item}");
    assert!(planned["freed_bytes"].as_u64().unwrap() > 0 && planned["freed_bytes"] == item["size"]);
    assert_eq!(names(&quarantine(&daemon)).len(), 1, "a dry run deletes nothing");

    let text = daemon.command().line("gc --quarantine").succeeds().text();
    assert!(text.contains("m:latest") && text.contains("freed "), "{text}");
    assert_eq!(names(&quarantine(&daemon)), [""; 0]);
    assert_eq!(daemon.client().disk_usage().unwrap().quarantine_bytes, 0);
    daemon.command().line("verify").succeeds();
    let recorded = || {
        let records = daemon.command().line("log --verb gc --json").succeeds().text();
        records.contains(&digest) && records.contains("\"quarantine\"") && records.contains("m:latest")
    };
    eventually("the audit log has what was deleted", recorded);
    let text = daemon.command().line("gc --quarantine").succeeds().text();
    assert_eq!(text, "nothing to delete\n");
}

#[test]
fn damage_stays_known_when_the_only_copy_is_deleted() {
    let (mut daemon, model, _) = quarantined();
    // A whole file too: without it, a collection could not tell that it had no recipe.
    let shown = daemon.command().line("show m --json").succeeds().json();
    let config = shown["layers"].as_array().unwrap().iter().find(|layer| layer["stored"] == "blob").unwrap();
    let config = blobd_tests::store_dir::blob_path(daemon.root(), config["digest"].as_str().unwrap());
    blobd_tests::store_dir::flip_byte(&config, 3);
    daemon.command().line("verify").exits_with(5);
    let text = daemon.command().line("gc --quarantine").succeeds().text();
    assert!(text.contains("m:latest is damaged and needs them: `blobd verify --repair m:latest`"), "{text}");
    let left = || {
        let files = names(&quarantine(&daemon)).into_iter().map(|name| quarantine(&daemon).join(name));
        files.map(|path| fs::metadata(path).unwrap().len()).collect::<Vec<_>>()
    };
    assert_eq!(left(), [0, 0], "only markers");
    daemon.stop();
    daemon.restart();
    assert!(model_summary(&daemon, "m:latest").is_some(), "the damage is known after a restart");
    daemon.command().line("gc").succeeds();
    assert_eq!(daemon.command().line("gc --quarantine").succeeds().text(), "nothing to delete\n");
    import(&daemon, &model, "m");
    assert_eq!(model_summary(&daemon, "m:latest"), None);
    daemon.command().line("gc --quarantine").succeeds();
    assert_eq!(names(&quarantine(&daemon)), [""; 0]);
    daemon.command().line("verify").succeeds();
}

#[test]
fn nothing_is_deleted_while_a_manifest_cannot_be_read() {
    let (daemon, _, _) = quarantined();
    import(&daemon, &ModelFile::dense(9), "other");
    let manifest = daemon.root().join("manifests/registry.ollama.ai/library/other/latest");
    fs::write(manifest, "{").unwrap();
    daemon.command().line("gc --quarantine").exits_with(5);
    assert_eq!(names(&quarantine(&daemon)).len(), 1);
}
