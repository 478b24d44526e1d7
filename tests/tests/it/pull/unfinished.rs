//! Blobs that an unfinished download keeps: `df`, `rm`, `gc` and the eviction plan agree about them.

use blobd_client::protocol::request::{GcParams, PinParams};
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::oracle::sha256;
use blobd_tests::registry::{FakeRegistry, Fault};
use blobd_tests::store_dir::names;
use blobd_tests::temp_dirs::tmpfs_directory;
use serde_json::Value as Json;

use super::registry_with;

/// For every request of the client.
const ALWAYS: usize = usize::MAX;

/// A model that shares all tensors but one with the one of seed 1.
fn sibling() -> ModelFile {
    ModelFile::dense(1).with_changed("output.weight")
}

/// Runs a pull that stores the weights and fails at the template, so that the model is incomplete.
fn pull_half(daemon: &TestDaemon, model: &ModelFile) -> FakeRegistry {
    let registry = registry_with(model);
    let template = format!("/cdn/sha256:{}", sha256(b"{{ .Prompt }}"));
    registry.add_fault(&template, ALWAYS, Fault::Status(404));
    daemon.command().run(["pull", &registry.name("library/tiny:latest")]).exits_with(1);
    assert!(!names(&daemon.root().join("partial")).is_empty());
    registry
}

fn import(daemon: &TestDaemon, model: &ModelFile, name: &str) {
    let path = model.write_to(daemon.scratch(), &format!("{name}.gguf"));
    daemon.command().run(["import", path.to_str().unwrap(), "--name", name]).succeeds();
}

/// Asserts that `df` reports as reclaimable what a collection plans and then frees. Returns the bytes.
fn check_reclaimable(daemon: &TestDaemon, what: &str) -> u64 {
    let client = daemon.client();
    let before = client.disk_usage().unwrap();
    let planned = client.gc(&GcParams { dry_run: true, ..GcParams::default() }).unwrap();
    assert_eq!(before.reclaimable_bytes, planned.freed_bytes, "{what}: {planned:?}");
    let freed = client.gc(&GcParams { dry_run: false, ..GcParams::default() }).unwrap();
    assert_eq!(before.reclaimable_bytes, freed.freed_bytes, "{what}: {freed:?}");
    let after = client.disk_usage().unwrap();
    assert_eq!(after.reclaimable_bytes, 0, "{what}");
    assert_eq!(before.physical_bytes - after.physical_bytes, freed.freed_bytes, "{what}");
    freed.freed_bytes
}

/// Adds an unneeded blob.
fn add_orphan(daemon: &TestDaemon, bytes: &[u8]) {
    std::fs::write(daemon.root().join(format!("blobs/sha256-{}", sha256(bytes))), bytes).unwrap();
}

#[test]
fn unfinished_download_keeps_the_bytes_that_df_and_rm_report() {
    let daemon = TestDaemon::start();
    let (mine, model) = (ModelFile::dense(1), sibling());
    import(&daemon, &mine, "mine");
    let alone = daemon.client().disk_usage().unwrap();
    let registry = pull_half(&daemon, &model);
    let with_download = daemon.client().disk_usage().unwrap();
    assert_eq!(with_download.reclaimable_bytes, 0);
    let removed = daemon.command().line("rm mine --json").succeeds().json();
    let kept = removed["kept"].as_array().unwrap();
    assert!(!kept.is_empty(), "{removed}");
    for kept in kept {
        let by = kept["by"][0].as_str().unwrap_or_else(|| panic!("{removed}"));
        assert!(by.contains("unfinished download"), "{removed}");
    }
    let kept_bytes: u64 = kept.iter().map(|kept| kept["bytes"].as_u64().unwrap()).sum();
    assert_eq!(removed["freed_bytes"].as_u64().unwrap() + kept_bytes, alone.physical_bytes);
    let usage = daemon.client().disk_usage().unwrap();
    assert!(usage.partial_bytes >= kept_bytes, "{usage:?}");
    assert_eq!(check_reclaimable(&daemon, "download alone"), 0);
    // The download is resumed: no byte of the weights is fetched twice.
    registry.clear_faults();
    let served = registry.bytes_served();
    daemon.command().run(["pull", &registry.name("library/tiny:latest")]).succeeds();
    assert!(registry.bytes_served() - served < model.bytes().len() as u64 / 2);
}

#[test]
fn reclaimable_bytes_are_those_a_collection_frees_whatever_is_kept() {
    let daemon = TestDaemon::start();
    let base = ModelFile::dense(1);
    let siblings = ["output.weight", "blk.0.ffn_up.weight", "blk.1.ffn_down.weight"];
    let [open, trashed, pulled] = siblings.map(|tensor| base.clone().with_changed(tensor));
    for (model, name) in [(&base, "base"), (&open, "open"), (&trashed, "trashed")] {
        import(&daemon, model, name);
    }
    let session = daemon.client().open(&"open".parse().unwrap()).unwrap();
    let _registry = pull_half(&daemon, &pulled);
    let mut kept = 0;
    for round in 0..4u8 {
        add_orphan(&daemon, &[round; 9000]);
        let words = match round {
            0 => "pin base --json",
            1 => "rm open --json",
            2 => "rm trashed --keep 1d --json",
            _ => "tag base again --json",
        };
        let response = daemon.command().line(words).succeeds().json();
        let nobodys = |kept: &&Json| kept["by"].as_array().is_some_and(Vec::is_empty);
        assert_eq!(response["kept"].as_array().into_iter().flatten().find(nobodys), None, "{response}");
        kept += response["kept"].as_array().map_or(0, Vec::len);
        assert!(check_reclaimable(&daemon, words) >= 9000);
    }
    assert!(kept > 0);
    daemon.client().pin(&PinParams { reference: "base".parse().unwrap(), pinned: false }).unwrap();
    daemon.command().line("rm base again").succeeds();
    check_reclaimable(&daemon, "rm base again");
    drop(session);
}

#[test]
fn evicting_a_model_frees_nothing_that_an_unfinished_download_keeps() {
    let folder = tmpfs_directory();
    let config = folder.path().join("config.toml");
    std::fs::write(&config, "[space]\nquota = \"1 GiB\"\nevict = \"all\"\n").unwrap();
    let variable = format!("BLOBD_CONFIG={}", config.display());
    let daemon = TestDaemon::start_under(&["env", &variable], folder);
    import(&daemon, &ModelFile::dense(1), "mine");
    let _registry = pull_half(&daemon, &sibling());
    let plan = daemon.command().line("gc --plan-eviction=1B --json").succeeds().json();
    assert_eq!(plan["evicted"][0]["name"], "mine:latest", "{plan}");
    let removed = daemon.command().line("rm mine --json").succeeds().json();
    assert_eq!(plan["freed_bytes"], removed["freed_bytes"], "{plan} {removed}");
}
