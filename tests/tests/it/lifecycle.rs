//! Start and end of daemons, clients, and models in use.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Child;

use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::oracle::sha256;
use blobd_tests::raw_gguf::{RawGguf, id};
use blobd_tests::reader::Reader;
use blobd_tests::store_dir::{check_blobs, check_empty, names, snapshot, staged};
use blobd_tests::temp_dirs::disk_directory;
use blobd_tests::wait::eventually;
use serde_json::Value as Json;

/// A daemon with one model, and the SHA-256 of all its tensors in file order.
fn daemon_with_model(name: &str) -> (TestDaemon, String) {
    let daemon = TestDaemon::start_on_disk();
    let model = ModelFile::dense(1);
    import(&daemon, &model, name);
    let bytes = model.tensor_bytes();
    (daemon, sha256(&bytes))
}

fn import(daemon: &TestDaemon, model: &ModelFile, name: &str) {
    let path = model.write_to(daemon.scratch(), "model.gguf");
    daemon.command().run(["import".as_ref(), path.as_os_str(), "--name".as_ref(), name.as_ref()]).succeeds();
}

fn sessions(daemon: &TestDaemon) -> Vec<Json> {
    daemon.command().line("ps --json").succeeds().json()["sessions"].as_array().unwrap().clone()
}

#[test]
fn killed_daemon_leaves_maps_readable_and_loses_nothing() {
    let (mut daemon, digest) = daemon_with_model("m");
    let mut reader = Reader::open(&daemon.socket(), "m");
    let before = snapshot(&daemon.root().join("blobs"));
    daemon.kill();
    assert_eq!(reader.touch(), digest);
    daemon.restart();
    assert_eq!(snapshot(&daemon.root().join("blobs")), before);
    assert_eq!(daemon.command().line("ls --json").json()["models"][0]["name"], "m:latest");
    assert_eq!(Reader::open(&daemon.socket(), "m").touch(), digest);
    assert_eq!(reader.touch(), digest);
    assert_eq!(daemon.command().line("gc --json").json()["deleted"], Json::Array(Vec::new()));
}

#[test]
fn stopped_daemon_removes_its_socket_and_leaves_maps() {
    let (mut daemon, digest) = daemon_with_model("m");
    let mut reader = Reader::open(&daemon.socket(), "m");
    assert!(daemon.stop().success(), "{}", daemon.log());
    assert!(!daemon.socket().exists());
    assert_eq!(reader.touch(), digest);
    daemon.restart();
    assert_eq!(Reader::open(&daemon.socket(), "m").touch(), digest);
}

#[test]
fn removed_model_stays_mapped_and_is_freed_when_it_is_closed() {
    let (daemon, digest) = daemon_with_model("m");
    let blob_count = check_blobs(daemon.root()).len();
    let mut reader = Reader::open(&daemon.socket(), "m");
    let removed = daemon.command().line("rm m --json").succeeds().json();
    let by = removed["kept"][0]["by"][0].as_str().unwrap();
    assert_eq!(by, format!("process {} (test-client)", reader.pid()), "{removed}");
    assert!(removed["kept"][0]["bytes"].as_u64().unwrap() > 50_000, "{removed}");
    assert_eq!(daemon.command().line("ls --json").json()["models"], Json::Array(Vec::new()));
    assert_eq!(daemon.command().line("gc --json").json()["freed_bytes"], 0);
    assert_eq!(check_blobs(daemon.root()).len(), blob_count);
    assert_eq!(reader.touch(), digest);
    reader.close();
    eventually("the lease ends", || sessions(&daemon).is_empty());
    assert_eq!(reader.touch(), digest, "a map outlives its lease");
    // Unlinking a file that is mapped frees nothing.
    let kept = daemon.command().line("gc --json").succeeds().json()["kept"].clone();
    let by = kept[0]["by"][0].as_str().unwrap();
    assert!(by.starts_with(&format!("process {} (test-client)", reader.pid())), "{kept}");
    let held = daemon.client().disk_usage().unwrap();
    assert!(held.held_bytes > 50_000 && held.reclaimable_bytes < held.held_bytes, "{held:?}");
    reader.kill();
    eventually("the bytes go", || names(&daemon.root().join("blobs")).is_empty());
    check_empty(daemon.root());
}

#[test]
fn removed_model_stays_until_its_last_client_closes() {
    let (daemon, digest) = daemon_with_model("m");
    let mut readers = [(); 2].map(|()| Reader::open(&daemon.socket(), "m"));
    daemon.command().line("rm m").succeeds();
    readers[0].close();
    eventually("the first is gone", || sessions(&daemon).len() == 1);
    assert!(!check_blobs(daemon.root()).is_empty());
    assert_eq!(readers.each_mut().map(Reader::touch), [digest.clone(), digest]);
    readers.into_iter().for_each(Reader::kill);
    eventually("the bytes go", || names(&daemon.root().join("blobs")).is_empty());
}

#[test]
fn replaced_model_is_kept_while_it_is_open() {
    let (daemon, digest) = daemon_with_model("m");
    let mut reader = Reader::open(&daemon.socket(), "m");
    daemon.command().line("rm m --keep 0s").succeeds();
    import(&daemon, &ModelFile::dense(2), "m");
    let kept = check_blobs(daemon.root()).len();
    daemon.command().line("gc").succeeds();
    // The recipe has no reader: only blobs are mapped.
    assert_eq!(check_blobs(daemon.root()).len(), kept);
    reader.close();
    eventually("the lease ends", || sessions(&daemon).is_empty());
    let held = daemon.command().line("gc --json").succeeds().json()["kept"][0]["bytes"].as_u64().unwrap();
    assert!(held > 50_000, "{held}");
    assert_eq!(reader.touch(), digest);
    reader.kill();
    eventually("the bytes go", || check_blobs(daemon.root()).len() < kept);
}

#[test]
fn lease_of_a_killed_client_ends_at_once() {
    let (daemon, _) = daemon_with_model("m");
    let reader = Reader::open(&daemon.socket(), "m");
    let [session] = sessions(&daemon).try_into().expect("one session");
    assert_eq!(session["pid"], reader.pid());
    assert_eq!(session["uid"], rustix::process::getuid().as_raw());
    assert_eq!(session["command"], "test-client");
    assert_eq!(session["model"], "m:latest");
    assert!(session["bytes_mapped"].as_u64().unwrap() > 50_000 && session["since"].is_string(), "{session}");
    reader.kill();
    eventually("the lease ends", || sessions(&daemon).is_empty());
    let removed = daemon.command().line("rm m --json").succeeds().json();
    assert_eq!(removed["kept"], Json::Array(Vec::new()));
    check_empty(daemon.root());
}

#[test]
fn daemon_killed_while_importing_has_nothing_of_the_file_after_a_restart() {
    let mut daemon = TestDaemon::start_in(disk_directory());
    let path = slow_file(daemon.scratch());
    let mut import = start_import(&daemon, &path);
    daemon.kill();
    assert!(!import.wait().unwrap().success());
    daemon.restart();
    check_empty(daemon.root());
}

#[test]
fn import_stops_and_leaves_nothing_when_its_client_is_killed() {
    let daemon = TestDaemon::start_in(disk_directory());
    let path = slow_file(daemon.scratch());
    let mut import = start_import(&daemon, &path);
    import.kill().unwrap();
    import.wait().unwrap();
    eventually("the import is cleared away", || staged(daemon.root()).is_empty());
    check_empty(daemon.root());
}

#[test]
fn command_killed_while_importing_leaves_nothing_for_the_next_one() {
    let folder = disk_directory();
    let blobd = blobd_tests::command::Blobd::at_root(&folder.path().join("store"));
    let path = slow_file(folder.path());
    let mut import = blobd.command().arg("import").arg(path).spawn().unwrap();
    eventually("the import has begun", || has_written(&folder.path().join("store")));
    import.kill().unwrap();
    import.wait().unwrap();
    assert_eq!(blobd.line("ls --json").succeeds().json()["models"], Json::Array(Vec::new()));
    check_empty(&folder.path().join("store"));
}

/// A valid sparse file of one tensor of 4 GiB: it takes no time to write, and seconds to read.
fn slow_file(folder: &Path) -> PathBuf {
    let header = RawGguf::new().tensor("hole", id::I8, &[4 << 30], 0).with_data(&[]);
    let path = folder.join("slow.gguf");
    std::fs::write(&path, &header).unwrap();
    File::options().write(true).open(&path).unwrap().set_len(header.len() as u64 + (4 << 30)).unwrap();
    path
}

/// Starts an import and waits until the daemon is in the middle of it.
fn start_import(daemon: &TestDaemon, path: &Path) -> Child {
    let child = daemon.command().command().arg("import").arg(path).spawn().unwrap();
    eventually("the import has begun", || has_written(daemon.root()));
    child
}

fn has_written(root: &Path) -> bool {
    let files = staged(root).into_iter().flat_map(|txn| {
        let directory = root.join("staging").join(txn);
        names(&directory).into_iter().map(move |name| directory.join(name))
    });
    files.filter_map(|file| file.metadata().ok()).any(|metadata| metadata.len() > 1 << 20)
}
