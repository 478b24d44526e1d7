//! The daemon's background scrub.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use blobd_tests::command::Blobd;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::store_dir::{flip_byte, names};
use blobd_tests::temp_dirs::tmpfs_directory;
use blobd_tests::wait::{eventually, eventually_some};
use serde_json::Value as Json;
use tempfile::TempDir;

/// A store with a model, created by a command without a daemon.
fn folder_with_store() -> TempDir {
    let folder = tmpfs_directory();
    let path = ModelFile::dense(1).write_to(folder.path(), "m.gguf");
    let blobd = Blobd::at_root(&folder.path().join("store"));
    blobd.run(["import", path.to_str().unwrap()]).succeeds();
    folder
}

/// The blobs in the order in which a pass reads them.
fn blobs(root: &Path) -> Vec<PathBuf> {
    names(&root.join("blobs")).iter().map(|name| root.join("blobs").join(name)).collect()
}

fn configure(folder: &Path, scrub: &str) -> String {
    let config = folder.join("config.toml");
    // The load of other tests must not pause the scrub.
    fs::write(&config, format!("[scrub]\npause_above_pressure_percent = 100\n{scrub}\n")).unwrap();
    format!("BLOBD_CONFIG={}", config.display())
}

fn start(folder: TempDir, scrub: &str) -> TestDaemon {
    let variable = configure(folder.path(), scrub);
    TestDaemon::start_under(&["env", &variable], folder)
}

fn cursor(root: &Path) -> Option<Json> {
    serde_json::from_slice(&fs::read(root.join("scrub.json")).ok()?).ok()
}

fn wait_for_the_end(root: &Path) -> Json {
    eventually_some("the pass ends", || cursor(root).filter(|cursor| cursor["ended"].is_u64()))
}

#[test]
fn scrub_finds_damage() {
    let folder = folder_with_store();
    let root = folder.path().join("store");
    flip_byte(&blobs(&root)[4], 20);
    let count = blobs(&root).len();
    let daemon = start(folder, "rate_bytes_per_second = 1000000000");
    assert_eq!(wait_for_the_end(&root)["blobs"], count);
    assert_eq!(names(&root.join("quarantine")).len(), 1);
    let listed = daemon.client().models().unwrap().models;
    assert!(listed[0].damage.is_some(), "{listed:?}");
    assert!(daemon.log().contains("damaged"), "{}", daemon.log());
}

#[test]
fn scrub_resumes_after_a_restart() {
    let folder = folder_with_store();
    let root = folder.path().join("store");
    let all = blobs(&root);
    let mut daemon = start(folder, "rate_bytes_per_second = 5000");
    // A busy machine may need more than one start until anything is verified.
    let stopped = eventually_some("the scrub records where it stopped", || {
        if !daemon.is_running() {
            daemon.restart();
        }
        std::thread::sleep(Duration::from_secs(1));
        daemon.stop();
        cursor(&root).filter(|cursor| cursor["blobs"].as_u64() > Some(0))
    });
    let done = usize::try_from(stopped["blobs"].as_u64().unwrap()).unwrap();
    assert!(done < all.len(), "{stopped}");
    // Damage in the part already verified is left to the next pass.
    flip_byte(&all[0], 1);
    flip_byte(&all[all.len() - 1], 1);
    configure(daemon.scratch(), "rate_bytes_per_second = 1000000000");
    daemon.restart();
    assert_eq!(wait_for_the_end(&root)["blobs"], all.len());
    let [aside] = names(&root.join("quarantine")).try_into().unwrap();
    assert!(aside.starts_with(all[all.len() - 1].file_name().unwrap().to_str().unwrap()), "{aside}");
    assert!(all[0].exists());
}

#[test]
fn scrub_can_be_turned_off_and_repeated() {
    let folder = folder_with_store();
    let root = folder.path().join("store");
    let mut daemon = start(folder, "rate_bytes_per_second = 0");
    daemon.command().line("ls").succeeds();
    daemon.stop();
    assert!(!root.join("scrub.json").exists());
    configure(daemon.scratch(), "rate_bytes_per_second = 1000000000\npass_days = 0");
    daemon.restart();
    wait_for_the_end(&root);
    flip_byte(&blobs(&root)[2], 9);
    eventually("a further pass finds it", || names(&root.join("quarantine")).len() == 1);
}

#[test]
fn removed_model_is_freed_while_the_daemon_reads_it() {
    let folder = folder_with_store();
    let root = folder.path().join("store");
    // A chunk takes longer than the test: the first blob is open from the start to its end.
    let daemon = start(folder, "rate_bytes_per_second = 1");
    eventually("a blob is being read", || is_open_in(daemon.pid(), &root.join("blobs")));
    let removed = daemon.command().line("rm m --json").succeeds().json();
    assert_eq!(removed["kept"], serde_json::json!([]), "{removed}");
    assert!(removed["freed_bytes"].as_u64().unwrap() > 0);
    assert_eq!(names(&root.join("blobs")), [""; 0]);
    assert!(!is_open_in(daemon.pid(), &root.join("blobs")), "the bytes are free");
}

fn is_open_in(pid: u32, folder: &Path) -> bool {
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
    let targets = descriptors.filter_map(|entry| fs::read_link(entry.path()).ok());
    targets.into_iter().any(|target| target.starts_with(folder) && target != folder)
}
