//! A store written by an earlier blobd: every later version must read it.
//!
//! `golden/2146c82.tar.gz` was written by the daemon of that commit: three GGUF files were imported, of which
//! two share tensors and one has expert groups, one of them under a second name; one tag was pinned; a fourth
//! model was moved to the trash with `rm --keep`; then the daemon was stopped. The reserve, which is empty
//! space, is left out.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::process::Command;

use blobd_tests::command::Blobd;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::oracle::sha256_of;
use blobd_tests::store_dir::check_blobs;
use blobd_tests::temp_dirs::tmpfs_directory;
use blobd_tests::wait::eventually;
use serde_json::Value;
use tempfile::TempDir;

const ARCHIVE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/golden/2146c82.tar.gz");

/// The models, and the SHA-256 of the file that each was imported from.
const MODELS: [(&str, &str); 4] = [
    ("copy:latest", "e48a5fdde6f28663b5efafbfa949d0f2146db148f82e5eacae19e58e6e1e295d"),
    ("dense:latest", "e48a5fdde6f28663b5efafbfa949d0f2146db148f82e5eacae19e58e6e1e295d"),
    ("experts:latest", "7874dc38a29154a33ff6e9601fae7be7d08487509d710e793cbedfd7762dd34d"),
    ("relative:latest", "7b1ba525c953e2dace26751a5de4c203cc6cf1dbe0298b05404ac510b5481749"),
];
const REMOVED: (&str, &str) =
    ("removed:latest", "a3ea13b9dd8aa2da03976bc7dc9e2adbc923823240afd9f3813a5b1503b00470");

/// A copy of the store in `store`.
fn unpacked() -> TempDir {
    let folder = tmpfs_directory();
    let mut tar = Command::new("tar");
    tar.args(["--extract", "--gzip", "--preserve-permissions", "--no-same-owner", "--file", ARCHIVE]);
    let output = tar.arg("--directory").arg(folder.path()).output().unwrap();
    assert!(output.status.success(), "tar: {}", String::from_utf8_lossy(&output.stderr));
    folder
}

fn check_export(blobd: &Blobd, (name, digest): (&str, &str)) {
    let exported = blobd.run(["export", name, "-o", "-"]).succeeds().stdout;
    assert_eq!(sha256_of(&mut exported.as_slice()), digest, "{name}");
}

fn check_store(blobd: &Blobd, root: &Path) {
    let listed = blobd.line("ls --json").succeeds().json();
    let names = listed["models"].as_array().unwrap().iter().map(|model| model["name"].as_str().unwrap());
    assert!(names.eq(MODELS.map(|(name, _)| name)), "{listed}");
    for model in MODELS {
        check_export(blobd, model);
    }
    blobd.line("verify").succeeds();
    let digests = check_blobs(root);
    let plan = blobd.line("gc --dry-run --json").succeeds().json();
    assert_eq!(plan["freed_bytes"], 0, "{plan}");
    let shown = blobd.line("show experts --json").succeeds().json();
    let experts = |tensor: &Value| {
        tensor["name"].as_str().unwrap().contains("_exps.").then(|| tensor["experts"]["count"].clone())
    };
    let groups: Vec<Value> = shown["tensors"].as_array().unwrap().iter().filter_map(experts).collect();
    assert!(groups.len() == 3 && groups.iter().all(|count| count == 4), "{shown}");
    let pinned = blobd.line("rm dense --json").exits_with(7).error();
    assert!(pinned.message.contains("pinned"), "{pinned}");
    blobd.line("undelete removed").succeeds();
    check_export(blobd, REMOVED);
    assert_eq!(check_blobs(root), digests, "what was in the trash was there");
    blobd.line("rm copy relative removed").succeeds();
    check_export(blobd, MODELS[1]);
    assert!(check_blobs(root).len() < digests.len());
}

#[test]
fn store_of_an_earlier_version_is_read_by_commands() {
    let folder = unpacked();
    let root = folder.path().join("store");
    check_store(&Blobd::at_root(&root), &root);
}

#[test]
fn store_of_an_earlier_version_is_served() {
    let daemon = TestDaemon::start_in(unpacked());
    check_store(&daemon.command(), daemon.root());
}

/// The copy has other inodes and times, so the test writes them into the marker `CLEAN`.
#[test]
fn index_of_an_earlier_version_is_loaded() {
    let folder = unpacked();
    let root = folder.path().join("store");
    let mut marker: Value = serde_json::from_slice(&fs::read(root.join("index/CLEAN")).unwrap()).unwrap();
    for directory in ["blobs", "recipes"] {
        let status = fs::metadata(root.join(directory)).unwrap();
        marker["directories"][directory] =
            [status.ino().cast_signed(), status.ctime(), status.ctime_nsec()].into();
    }
    fs::write(root.join("index/CLEAN"), marker.to_string()).unwrap();
    let daemon = TestDaemon::start_in(folder);
    eventually("the index is ready", || daemon.log().contains("index: "));
    assert!(daemon.log().contains("index: loaded without a rebuild"), "{}", daemon.log());
    let report = daemon.command().line("reindex --json").succeeds().json();
    assert_eq!(report["differences"], 0, "{report}");
    check_store(&daemon.command(), daemon.root());
}
