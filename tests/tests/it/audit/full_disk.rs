//! The log on a real disk without space.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use blobd_fixtures::skipped::skipped;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::temp_dirs::tmpfs_directory;
use blobd_tests::wait::eventually;
use serde_json::Value as Json;

use super::{config, import, records};

const MOUNT: &str = "mount -t tmpfs -o size=64k,mode=700 none \"$0\" && exec \"$@\"";

/// A daemon whose log is on a file system of 64 KiB in its own namespace, and the log's directory as this process sees
/// it. Prints the reason and returns `None` if that is not possible here.
fn daemon(folder: &Path) -> Option<(TestDaemon, PathBuf)> {
    let directory = folder.join("log");
    fs::create_dir(&directory).unwrap();
    let wrapper = ["unshare", "--mount", "sh", "-c", MOUNT, directory.to_str().unwrap()];
    let mounted = Command::new(wrapper[0]).args(&wrapper[1..]).arg("true").output();
    if !mounted.is_ok_and(|output| output.status.success()) {
        skipped("a mount in a private namespace takes root");
        return None;
    }
    let config = config(folder, &format!("[audit]\ndirectory = \"{}\"\n", directory.display()));
    let daemon = TestDaemon::start_at_under(&wrapper, &folder.join("store"), Some(&config));
    let seen = PathBuf::from(format!("/proc/{}/root{}", daemon.pid(), directory.display()));
    Some((daemon, seen))
}

fn fill(path: &Path) {
    let mut file = File::create(path).unwrap();
    while file.write_all(&[0; 512]).is_ok() {}
}

/// The check of `doctor`.
fn check(daemon: &TestDaemon) -> Json {
    let report: Json = serde_json::from_slice(&daemon.command().line("doctor --json").stdout).unwrap();
    let checks = report["checks"].as_array().unwrap();
    checks.iter().find(|check| check["name"] == "audit log").unwrap().clone()
}

#[test]
fn full_disk_drops_records_but_no_requests_and_the_log_says_how_many() {
    let folder = tmpfs_directory();
    let Some((daemon, directory)) = daemon(folder.path()) else { return };
    let blobd = daemon.command();
    import(&blobd, folder.path(), 1, "m");
    eventually("the record is written", || records(&blobd, "").len() == 1);
    fill(&directory.join("fill"));
    let mut requests = 1;
    let mut request = || {
        requests += 1;
        blobd.line(&format!("tag m name-{requests}")).succeeds();
    };
    // The rest of the file's last block has room for some.
    eventually("a record does not fit", || {
        request();
        daemon.log().contains("cannot be written, records are dropped")
    });
    let failing = check(&daemon);
    assert_eq!(failing["status"], "failure", "{failing}");
    assert!(failing["detail"].as_str().unwrap().contains("No space left"), "{failing}");
    request();
    fs::remove_file(directory.join("fill")).unwrap();
    request();
    eventually("the log is written again", || daemon.log().contains("are written again"));
    let all = records(&blobd, "");
    let dropped = all.iter().filter(|record| record["result"] == "dropped");
    let dropped: u64 = dropped.map(|record| record["details"]["records"].as_u64().unwrap()).sum();
    let written = all.iter().filter(|record| record["result"] == "ok").count() as u64;
    assert!(dropped >= 2, "{all:#?}");
    assert_eq!(written + dropped, requests, "{all:#?}");
    assert_eq!(all.last().unwrap()["model"], format!("name-{requests}:latest"));
    let after = check(&daemon);
    assert_eq!(after["status"], "note", "{after}");
}
