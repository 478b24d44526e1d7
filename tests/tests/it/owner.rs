//! The owner of the blobs can change them. So the daemon warns about programs that open models as its own user, except
//! in a store for a single user.

use std::fs;
use std::os::unix::fs::chown;
use std::process::Command;

use blobd_fixtures::skipped::skipped;
use blobd_tests::command;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::programs;
use blobd_tests::reader::Reader;
use blobd_tests::temp_dirs::tmpfs_directory;
use serde_json::Value as Json;

const NOBODY: u32 = 65534;
const AS_NOBODY: [&str; 6] = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--", "env"];

/// A daemon that runs as the user `nobody` with this configuration; `None` if that is not possible.
fn daemon(config: &str) -> Option<TestDaemon> {
    let may = rustix::process::geteuid().is_root();
    if !may || !Command::new("setpriv").arg("--version").output().is_ok_and(|output| output.status.success())
    {
        skipped("only root with setpriv can start a daemon as another user");
        return None;
    }
    let folder = tmpfs_directory();
    let path = folder.path().join("config.toml");
    fs::write(&path, config).unwrap();
    chown(folder.path(), Some(NOBODY), Some(NOBODY)).unwrap();
    let variable = format!("BLOBD_CONFIG={}", path.display());
    Some(TestDaemon::start_under(&[&AS_NOBODY[..], &[&variable]].concat(), folder))
}

/// The check `owner` of `doctor`.
fn owner(daemon: &TestDaemon) -> Json {
    let report = daemon.command().line("doctor --json").succeeds().json();
    let checks = report["checks"].as_array().unwrap();
    checks.iter().find(|check| check["name"] == "owner").unwrap().clone()
}

fn run_as_nobody(daemon: &TestDaemon, line: &str) {
    let mut command = Command::new(AS_NOBODY[0]);
    command.args(&AS_NOBODY[1..]).arg(programs::blobd()).args(line.split(' '));
    daemon.command().prepare(&mut command);
    command::run(&mut command).succeeds();
}

fn open_as_nobody(daemon: &TestDaemon) {
    drop(Reader::try_open(&AS_NOBODY, &daemon.socket(), &["m"]).unwrap());
}

fn import(daemon: &TestDaemon) {
    let path = ModelFile::dense(1).write_to(daemon.scratch(), "m.gguf");
    daemon.command().run(["import".as_ref(), path.as_os_str()]).succeeds();
}

#[test]
fn program_that_opens_a_model_with_the_daemons_uid_causes_a_warning() {
    let Some(daemon) = daemon("single_user = false\n") else { return };
    import(&daemon);
    for line in ["ls", "health", "gc", "show m"] {
        run_as_nobody(&daemon, line);
    }
    assert_eq!(owner(&daemon)["status"], "ok", "nothing was opened: {}", owner(&daemon));
    assert!(!daemon.log().contains("owns the blobs"), "{}", daemon.log());
    for _ in 0..3 {
        open_as_nobody(&daemon);
    }
    let log = daemon.log();
    assert_eq!(log.matches("owns the blobs").count(), 1, "once is enough: {log}");
    assert!(log.contains("uid 65534") && log.contains("single_user"), "{log}");
    let owner = owner(&daemon);
    assert_eq!(owner["status"], "warning");
    assert!(owner["detail"].as_str().unwrap().contains("uid 65534"), "{owner}");
    assert!(owner["hint"].as_str().unwrap().contains("single_user = true"), "{owner}");
}

#[test]
fn only_user_of_a_store_causes_no_warning() {
    for config in ["single_user = true\n", ""] {
        let Some(daemon) = daemon(config) else { return };
        import(&daemon);
        open_as_nobody(&daemon);
        assert!(!daemon.log().contains("owns the blobs"), "{}", daemon.log());
        assert_eq!(owner(&daemon)["status"], "ok");
    }
}
