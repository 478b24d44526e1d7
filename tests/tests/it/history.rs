//! `history`: what a name has meant, and who changed that.

use std::fs;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;

use blobd_fixtures::skipped::skipped;
use blobd_tests::command::{self, Blobd};
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::temp_dirs::tmpfs_directory;
use serde_json::{Value as Json, json};

use super::sources::open_to_all;

fn file(daemon: &TestDaemon, seed: u64) -> PathBuf {
    ModelFile::dense(seed).write_to(daemon.scratch(), &format!("model-{seed}.gguf"))
}

fn import(daemon: &TestDaemon, seed: u64, name: &str) {
    let file = file(daemon, seed);
    daemon.command().run(["import", file.to_str().unwrap(), "--name", name, "--force"]).succeeds();
}

fn changes(daemon: &TestDaemon, name: &str) -> Vec<Json> {
    let history = daemon.command().line(&format!("history {name} --json")).succeeds().json();
    history["changes"].as_array().unwrap().clone()
}

fn verbs(daemon: &TestDaemon, name: &str) -> Vec<String> {
    let verb = |change: &Json| change["verb"].as_str().unwrap_or("no record").to_owned();
    changes(daemon, name).iter().map(verb).collect()
}

/// The cells of a table's row. Two spaces or more are between cells; a cell may contain single ones, such as a user
/// without a name, `uid 1007`.
fn cells(row: &str) -> Vec<&str> {
    row.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).collect()
}

#[test]
fn each_verb_that_moves_a_name_is_recorded() {
    let daemon = TestDaemon::start();
    import(&daemon, 1, "m");
    import(&daemon, 2, "m");
    for line in ["tag m n", "rename n o", "rm --keep 1d o", "undelete o", "edit m o --set a=b --force"] {
        daemon.command().line(line).succeeds();
    }
    assert_eq!(verbs(&daemon, "m"), ["import", "import"]);
    assert_eq!(verbs(&daemon, "n"), ["rename", "tag"]);
    assert_eq!(verbs(&daemon, "o"), ["edit", "undelete", "rm", "rename"]);
    let newest = &changes(&daemon, "m")[0];
    assert_eq!(newest["uid"], rustix::process::geteuid().as_raw());
    assert_eq!(newest["origin"], "import model-2.gguf");
    assert_eq!(newest["stored_as"], json!(["m:latest"]));
}

#[test]
fn history_outlives_its_name_and_a_restart() {
    let mut daemon = TestDaemon::start();
    import(&daemon, 1, "m");
    daemon.command().line("rm m").succeeds();
    daemon.kill();
    daemon.restart();
    assert_eq!(verbs(&daemon, "m"), ["rm", "import"]);
    let text = daemon.command().line("history m").succeeds().text();
    let rows: Vec<Vec<&str>> = text.lines().map(cells).collect();
    assert_eq!(rows[0], ["TIME", "USER", "VERB", "ID", "STORED", "ORIGIN"]);
    assert_eq!(rows[1][2..], ["rm", "removed", "-", "-"], "{text}");
    assert_eq!(rows[2][4..], ["no", "import model-1.gguf"], "{text}");
    let error = daemon.command().line("history n --json").exits_with(3).error();
    assert!(error.message.contains("n:latest"), "{error}");
}

#[test]
fn eviction_is_recorded() {
    let folder = tmpfs_directory();
    let config = folder.path().join("config.toml");
    let blobd = Blobd::at_root(&folder.path().join("store")).configured_by(&config);
    let import = |seed: u64, name: &str| {
        let file = ModelFile::dense(seed).write_to(folder.path(), &format!("model-{seed}.gguf"));
        blobd.run(["import", file.to_str().unwrap(), "--name", name]).succeeds();
    };
    fs::write(&config, "[space]\nevict = \"all\"\nquota = \"1 GiB\"\n").unwrap();
    import(1, "m");
    let used = blobd.line("df --json").succeeds().json()["used_bytes"].as_u64().unwrap();
    fs::write(&config, format!("[space]\nevict = \"all\"\nquota = \"{} B\"\n", used * 3 / 2)).unwrap();
    import(2, "n");
    let history = blobd.line("history m --json").succeeds().json();
    assert_eq!(history["changes"][0]["verb"], "evict", "{history}");
}

#[test]
fn other_user_is_named() {
    if !rustix::process::geteuid().is_root() {
        skipped("needs root to become another user");
        return;
    }
    let daemon = TestDaemon::start();
    open_to_all(&daemon);
    let file = file(&daemon, 1);
    let mut import = daemon.command().command();
    import.arg("import").arg(&file).args(["--name", "m"]).uid(54321).gid(54321);
    command::run(&mut import).succeeds();
    daemon.command().line("rename m n").succeeds();
    assert_eq!(changes(&daemon, "m")[1]["uid"], 54321);
    assert_eq!(changes(&daemon, "n")[0]["uid"], 0);
    assert!(daemon.command().line("history m").succeeds().text().contains("uid 54321  import"));
}
