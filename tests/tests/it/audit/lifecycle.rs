//! Records of starts, stops, reloads and switches of the log, and of what a model is opened for.

use std::fs;

use blobd_fixtures::skipped::skipped;
use blobd_tests::command::Blobd;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::temp_dirs::tmpfs_directory;
use blobd_tests::wait::eventually;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value as Json;

use super::{audit, config, content, eventual_records, import, records, results};

const OF_DAEMON: &str = "--verb start --verb stop --verb reload --verb audit";

#[test]
fn start_stop_and_kill_can_be_told_apart() {
    let mut daemon = TestDaemon::start();
    eventual_records(&daemon.command(), OF_DAEMON, &["start ok"]);
    daemon.stop();
    daemon.restart();
    eventual_records(&daemon.command(), OF_DAEMON, &["start ok", "stop ok", "start ok"]);
    daemon.kill();
    daemon.restart();
    let expected = ["start ok", "stop ok", "start ok", "start ok"];
    let all = eventual_records(&daemon.command(), OF_DAEMON, &expected);
    let details = |number: usize| &all[number]["details"];
    assert_eq!(all[0]["uid"], rustix::process::geteuid().as_raw());
    assert_eq!(all[3]["pid"], daemon.pid());
    assert_eq!(details(0)["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(details(0)["store"], daemon.root().to_str().unwrap());
    assert_eq!(details(1)["signal"], "SIGTERM");
}

#[test]
fn command_without_a_daemon_records_no_start() {
    let folder = tmpfs_directory();
    let blobd = Blobd::at_root(&folder.path().join("store"));
    import(&blobd, folder.path(), 1, "m");
    assert!(records(&blobd, OF_DAEMON).is_empty());
}

fn reload(daemon: &TestDaemon) {
    kill_process(Pid::from_raw(daemon.pid().try_into().unwrap()).unwrap(), Signal::HUP).unwrap();
}

#[test]
fn reload_says_what_has_changed_and_what_needs_a_restart() {
    let folder = tmpfs_directory();
    let path = config(folder.path(), "");
    let daemon = TestDaemon::start_at(&folder.path().join("store"), Some(&path));
    let blobd = daemon.command();
    config(folder.path(), "[space]\nquota = \"1 GiB\"\n[audit]\nenabled = false\n");
    reload(&daemon);
    let record = eventual_records(&blobd, "--verb reload", &["reload ok"]).remove(0);
    let change = |key: &str| {
        let changes = record["details"]["changes"].as_array().unwrap();
        changes.iter().find(|change| change["key"] == key).unwrap_or_else(|| panic!("{record}")).clone()
    };
    let quota = change("space.quota");
    assert_eq!((&quota["from"], &quota["to"]), (&Json::Null, &"1 GiB".into()));
    assert_eq!(quota["takes_effect"], "now");
    let switched = change("audit.enabled");
    assert_eq!((&switched["from"], &switched["to"]), (&true.into(), &false.into()));
    assert_eq!(switched["takes_effect"], "restart");
    config(folder.path(), "[space]\nquota = 1.5\n");
    reload(&daemon);
    let refused =
        eventual_records(&blobd, "--verb reload", &["reload ok", "reload invalid_request"]).remove(1);
    assert!(refused["message"].as_str().unwrap().contains("quota"), "{refused}");
}

#[test]
fn log_that_is_switched_off_on_or_moved_records_that() {
    let folder = tmpfs_directory();
    let (root, moved) = (folder.path().join("store"), folder.path().join("moved"));
    let path = config(folder.path(), "");
    let mut daemon = TestDaemon::start_at(&root, Some(&path));
    let mut restart_with = |text: &str| {
        daemon.stop();
        config(folder.path(), text);
        daemon.restart();
        daemon.command()
    };
    let off = "[audit]\nenabled = false\n";
    let blobd = restart_with(off);
    let file = root.join("audit").join("audit-00000001.jsonl");
    let has_ended = || fs::read_to_string(&file).unwrap().trim_end().ends_with("\"result\":\"off\"}");
    assert!(has_ended());
    import(&blobd, folder.path(), 1, "m");
    restart_with(off);
    let blobd = restart_with("");
    let mut expected = vec!["start ok", "stop ok", "audit off", "audit on", "start ok"];
    eventual_records(&blobd, OF_DAEMON, &expected);
    let blobd = restart_with(&format!("[audit]\ndirectory = \"{}\"\n", moved.display()));
    eventual_records(&blobd, OF_DAEMON, &["start ok"]);
    assert!(has_ended(), "the log in the store says that it is not continued");
    let blobd = restart_with("");
    expected.extend(["stop ok", "audit off", "audit on", "start ok"]);
    eventual_records(&blobd, OF_DAEMON, &expected);
}

/// Copying a model is recorded as a use other than running it.
#[test]
fn record_says_what_a_model_was_opened_for() {
    let daemon = TestDaemon::start();
    let blobd = daemon.command();
    import(&blobd, daemon.scratch(), 1, "m");
    let copy = daemon.scratch().join("copy.gguf");
    blobd.run(["export", "m", "-o", copy.to_str().unwrap()]).succeeds();
    blobd.line("show m --residency").succeeds();
    blobd.line("export absent -o x").exits_with(3);
    let expected = ["import ok", "export ok", "open ok", "export not_found"];
    let all = eventual_records(&blobd, "", &expected);
    assert_eq!((&all[1]["model"], &all[3]["model"]), (&"m:latest".into(), &"absent:latest".into()));
    assert_eq!(all[1]["digest"], all[0]["digest"]);
    assert!(all[1]["bytes"].as_u64().unwrap() > 0, "{}", all[1]);
    assert!(all.iter().map(|record| record["seq"].as_u64().unwrap()).is_sorted(), "{all:#?}");
    let text = content(&audit(&daemon));
    eventually("all are in the files", || text.matches("\"export\"").count() == 2);
}

#[test]
fn journal_that_does_not_respond_does_not_affect_the_log() {
    if std::path::Path::new("/run/systemd/journal/socket").exists() {
        skipped("this machine has a journal");
        return;
    }
    let folder = tmpfs_directory();
    let path = config(folder.path(), "[audit]\njournal = true\n");
    let daemon = TestDaemon::start_at(&folder.path().join("store"), Some(&path));
    import(&daemon.command(), folder.path(), 1, "m");
    assert_eq!(results(&eventual_records(&daemon.command(), "", &["import ok"])).len(), 1);
    assert!(daemon.log().contains("records cannot be sent to the journal"), "{}", daemon.log());
    let report: Json = serde_json::from_slice(&daemon.command().line("doctor --json").stdout).unwrap();
    let checks = report["checks"].as_array().unwrap();
    let check = checks.iter().find(|check| check["name"] == "audit log").unwrap();
    assert!(check["detail"].as_str().unwrap().contains("not sent to the journal"), "{check}");
}
