//! `partial ls` and `partial rm`: unfinished downloads have names, and can be dropped.

use std::fs;

use blobd_client::protocol::space::{DiskUsage, UsageKind, UsageRow};
use blobd_tests::command::Blobd;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::oracle::sha256;
use blobd_tests::registry::{FakeRegistry, Fault};
use blobd_tests::store_dir::{check_empty, check_rows, names, remove_downloads, staged};
use blobd_tests::temp_dirs::tmpfs_directory;
use blobd_tests::wait::eventually;
use serde_json::Value as Json;

use super::registry_with;

const ALWAYS: usize = usize::MAX;

/// Interrupts a pull in the middle of the weights.
fn pull_part(blobd: &Blobd, model: &ModelFile) -> FakeRegistry {
    let registry = registry_with(model);
    let weights = format!("/cdn/sha256:{}", sha256(&model.bytes()));
    registry.add_fault(&weights, 1, Fault::CutAfter(model.bytes().len() / 2));
    registry.add_fault(&weights, ALWAYS, Fault::Status(404));
    blobd.run(["pull", &registry.name("library/tiny:latest")]).exits_with(1);
    registry.clear_faults();
    registry
}

fn downloads(blobd: &Blobd) -> Vec<Json> {
    blobd.line("partial ls --json").succeeds().json()["downloads"].as_array().unwrap().clone()
}

fn usage(daemon: &TestDaemon) -> DiskUsage {
    let client = daemon.client();
    check_rows(daemon.root(), || client.disk_usage())
}

fn download_row(usage: &DiskUsage) -> Option<&UsageRow> {
    usage.rows.iter().find(|row| row.kind == UsageKind::Download)
}

#[test]
fn unfinished_download_has_a_name_and_can_be_dropped_by_it() {
    let daemon = TestDaemon::start();
    let (blobd, model) = (daemon.command(), ModelFile::dense(1));
    assert_eq!(blobd.line("partial ls").succeeds().text(), "no unfinished downloads\n");
    let registry = pull_part(&blobd, &model);
    let name = registry.name("library/tiny:latest");
    let [download] = downloads(&blobd).try_into().unwrap();
    let before = usage(&daemon);
    let row = download_row(&before).unwrap();
    assert_eq!(download["name"].as_str(), row.name.as_deref());
    assert!(name.ends_with(download["name"].as_str().unwrap()), "{download}");
    assert_eq!(download["disk_bytes"].as_u64(), Some(row.bytes));
    assert_eq!(download["size"].as_u64(), Some(model.bytes().len() as u64));
    let received = download["received_bytes"].as_u64().unwrap();
    assert!(received > 0 && received < model.bytes().len() as u64, "{download}");
    assert_eq!(download["uid"].as_u64(), Some(rustix::process::getuid().as_raw().into()));
    assert_eq!(download["running"], false);
    assert!(download["last_received"].is_string() && download["started"].is_string(), "{download}");
    let text = blobd.line("partial ls").succeeds().text();
    assert!(text.contains("% of") && text.lines().all(|line| line.chars().count() <= 100), "{text}");
    let text = blobd.line("df").succeeds().text();
    assert!(text.contains("download of "), "{text}");
    let dropped =
        blobd.run(["partial", "rm", download["name"].as_str().unwrap(), "--json"]).succeeds().json();
    assert_eq!(dropped["freed_bytes"].as_u64(), Some(row.bytes));
    assert_eq!(dropped["removed"][0]["digest"], download["digest"]);
    assert!(download_row(&usage(&daemon)).is_none() && downloads(&blobd).is_empty());
    check_empty(daemon.root());
    blobd.run(["pull", &name]).succeeds();
    assert!(blobd.run(["export", &name, "-o", "-"]).stdout == model.bytes());
}

/// Its blobs are published, and only the download keeps them.
#[test]
fn complete_file_of_an_incomplete_model_is_dropped_with_its_blobs() {
    let daemon = TestDaemon::start();
    let (blobd, model) = (daemon.command(), ModelFile::dense(1));
    let registry = registry_with(&model);
    registry.add_fault(&format!("/cdn/sha256:{}", sha256(b"{{ .Prompt }}")), ALWAYS, Fault::Status(404));
    blobd.run(["pull", &registry.name("library/tiny:latest")]).exits_with(1);
    eventually("the pull is cleared away", || staged(daemon.root()).is_empty());
    let [download] = downloads(&blobd).try_into().unwrap();
    assert_eq!(download["received_bytes"], download["size"]);
    assert_eq!(download["disk_bytes"].as_u64(), Some(download_row(&usage(&daemon)).unwrap().bytes));
    let id = download["digest"].as_str().unwrap().trim_start_matches("sha256:")[..12].to_owned();
    let dropped = blobd.run(["partial", "rm", &id, "--json"]).succeeds().json();
    assert_eq!(dropped["freed_bytes"], download["disk_bytes"]);
    assert!(names(&daemon.root().join("blobs")).is_empty());
    usage(&daemon);
}

#[test]
fn running_download_is_busy_and_kept() {
    let daemon = TestDaemon::start();
    // The whole would take a minute.
    let (blobd, registry) = (daemon.command(), registry_with(&ModelFile::dense_of(1, 2, 512)));
    blobd.line("limit 256KiB").succeeds();
    let name = registry.name("library/tiny:latest");
    let mut pull = blobd.command().args(["pull", &name]).spawn().unwrap();
    eventually("it is listed", || downloads(&blobd).iter().any(|download| download["running"] == true));
    let [download] = downloads(&blobd).try_into().unwrap();
    let error =
        blobd.run(["partial", "rm", download["name"].as_str().unwrap(), "--json"]).exits_with(4).error();
    assert!(error.message.contains("pull") && error.hint.is_some(), "{error:?}");
    let kept = blobd.line("partial rm --all --json").succeeds().json();
    assert_eq!(
        (&kept["removed"], &kept["kept"][0]["digest"]),
        (&Json::Array(Vec::new()), &download["digest"])
    );
    pull.kill().unwrap();
    pull.wait().unwrap();
    eventually("the pull ends", || downloads(&blobd).iter().all(|download| download["running"] == false));
    let dropped = blobd.line("partial rm --all --json").succeeds().json();
    assert_eq!(dropped["removed"][0]["digest"], download["digest"]);
    check_empty(daemon.root());
}

/// As an earlier version leaves it.
#[test]
fn download_without_a_recorded_name_is_listed_by_its_digest_and_continues() {
    let daemon = TestDaemon::start();
    let (blobd, model) = (daemon.command(), ModelFile::dense(1));
    let registry = pull_part(&blobd, &model);
    let directory = daemon.root().join("partial");
    let [partial] = names(&directory).try_into().unwrap();
    fs::remove_file(directory.join(&partial).join("about.json")).unwrap();
    let [download] = downloads(&blobd).try_into().unwrap();
    assert!(download["name"].is_null() && download["digest"].is_string(), "{download}");
    assert!(blobd.line("partial ls").succeeds().text().contains(&partial[7..19]));
    let name = registry.name("library/tiny:latest");
    let pulled = blobd.run(["pull", &name, "--json"]).succeeds().json_lines().pop().unwrap();
    assert!(pulled["already_stored_bytes"].as_u64().unwrap() > 0, "it was resumed: {pulled}");
    assert!(blobd.run(["export", &name, "-o", "-"]).stdout == model.bytes());
}

#[test]
fn unknown_download_is_not_found_and_none_is_dropped() {
    let daemon = TestDaemon::start();
    let blobd = daemon.command();
    let registry = pull_part(&blobd, &ModelFile::dense(1));
    let name = registry.name("library/tiny:latest");
    let error = blobd.run(["partial", "rm", &name, "nobody", "--json"]).exits_with(3).error();
    assert!(error.message.contains("nobody") && error.hint.unwrap().contains("partial ls"));
    assert_eq!(downloads(&blobd).len(), 1);
    blobd.line("partial rm --json").exits_with(2);
    let kept = blobd.line("partial rm --older-than 1d --json").succeeds().json();
    assert_eq!(kept["removed"], Json::Array(Vec::new()), "it is not old: {kept}");
    assert_eq!(downloads(&blobd).len(), 1);
    remove_downloads(daemon.root());
}

#[test]
fn downloads_are_listed_and_dropped_without_a_daemon() {
    let folder = tmpfs_directory();
    let root = folder.path().join("store");
    let blobd = Blobd::at_root(&root);
    let _registry = pull_part(&blobd, &ModelFile::dense(1));
    assert_eq!(downloads(&blobd).len(), 1);
    let dropped = blobd.line("partial rm --all").succeeds().text();
    assert!(dropped.contains("dropped ") && dropped.contains("freed "), "{dropped}");
    assert!(downloads(&blobd).is_empty());
    check_empty(&root);
}
