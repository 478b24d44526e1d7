//! Checks what administrators read: the example in `docs/CONFIGURATION.md` is valid, and `docs/OPERATIONS.md` explains all
//! checks of `doctor` and has commands for backups that work.

use std::os::unix::fs::chown;
use std::path::Path;
use std::process::Command;
use std::{env, fs};

use blobd_tests::command::{self, Blobd};
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::programs;
use blobd_tests::temp_dirs::tmpfs_directory;

use super::foreign_store::{GROUP, OWNER, foreign};
use super::multi_user::can_be_others;

const OPERATIONS: &str = include_str!("../../../docs/OPERATIONS.md");
const CONFIGURATION: &str = include_str!("../../../docs/CONFIGURATION.md");

#[test]
fn example_is_a_configuration() {
    let example = CONFIGURATION.split("<!-- test: configuration -->\n```toml\n").nth(1).unwrap();
    let folder = tmpfs_directory();
    let path = folder.path().join("config.toml");
    fs::write(&path, example.split("```").next().unwrap()).unwrap();
    let blobd = Blobd::at_root(&folder.path().join("store"));
    blobd.run(["ls", "--config", path.to_str().unwrap()]).succeeds();
}

#[test]
fn every_check_of_doctor_is_explained() {
    let folder = tmpfs_directory();
    let blobd = Blobd::at_root(&folder.path().join("store"));
    blobd.line("ls").succeeds();
    let report = blobd.line("doctor --json").json();
    let checks = report["checks"].as_array().unwrap();
    let names: Vec<_> = checks.iter().map(|check| check["name"].as_str().unwrap()).collect();
    let rows = OPERATIONS.lines().skip_while(|line| !line.starts_with("| check |")).skip(2);
    let rows = rows.take_while(|line| line.starts_with('|'));
    let mut explained: Vec<_> = rows.map(|row| row.split('`').nth(1).expect("a name")).collect();
    explained.sort_unstable();
    let mut sorted = names.clone();
    sorted.sort_unstable();
    assert_eq!(sorted, explained, "in docs/OPERATIONS.md");
}

/// The sentence is in the README too.
#[test]
fn documents_name_all_commands_that_need_a_daemon() {
    let sentence = "`health`, `limit RATE`, `log --follow` and `mount` need a daemon";
    let readme = include_str!("../../../README.md").replace('\n', " ");
    assert!(readme.contains(sentence) && OPERATIONS.contains(sentence));
    let folder = tmpfs_directory();
    let blobd = Blobd::at_root(&folder.path().join("store"));
    let model = ModelFile::dense(1).write_to(folder.path(), "m.gguf");
    blobd.run(["import", model.to_str().unwrap()]).succeeds();
    for line in
        ["health", "limit 1MB", "limit off", "log --follow", &format!("mount {}", folder.path().display())]
    {
        let run = blobd.line(line);
        assert!(run.code != 0 && run.stderr.contains("daemon"), "{line}: {}", run.stderr);
    }
    for line in [
        "ps",
        "limit",
        "log",
        "df --users",
        "warm m",
        "verify",
        "reindex",
        "history m",
        "partial ls",
        "outdated",
    ] {
        blobd.line(line).succeeds();
    }
}

/// Runs the commands below `<!-- test: NAME -->`, with these variables.
fn run_block(name: &str, variables: &[(&str, &Path)]) {
    let after = OPERATIONS.split(&format!("<!-- test: {name} -->\n```sh\n")).nth(1).expect(name);
    let script = after.split("```").next().unwrap();
    let mut command = Command::new("sh");
    Blobd::at_root(Path::new("/nonexistent/store")).prepare(&mut command);
    let directory = programs::blobd().parent().unwrap();
    let path = format!("{}:{}", directory.display(), env::var("PATH").unwrap());
    command.args(["-euc", script]).env("PATH", path).envs(variables.iter().copied());
    command::run(&mut command).succeeds();
}

#[test]
fn store_is_backed_up_restored_and_moved_as_described() {
    let folder = tmpfs_directory();
    let [old, restored, moved] = ["old store", "restored", "moved"].map(|name| folder.path().join(name));
    let backup = folder.path().join("backup.tar");
    let model = ModelFile::dense(1).write_to(folder.path(), "m.gguf");
    Blobd::at_root(&old).run(["import", model.to_str().unwrap()]).succeeds();
    run_block("backup", &[("STORE", &old), ("BACKUP", &backup)]);
    run_block("restore", &[("STORE", &restored), ("BACKUP", &backup)]);
    run_block("move", &[("STORE", &old), ("NEW", &moved)]);
    assert!(!old.exists());
    for root in [&restored, &moved] {
        let blobd = Blobd::at_root(root);
        assert!(blobd.line("export m -o -").succeeds().stdout == fs::read(&model).unwrap());
        blobd.line("gc").succeeds();
        blobd.line("rm m").succeeds();
    }
}

#[test]
fn backup_restore_and_move_by_root_leave_a_store_that_the_services_user_can_change() {
    const AS_OWNER: [&str; 6] =
        ["setpriv", "--pdeathsig=KILL", "--reuid=65534", "--regid=65533", "--clear-groups", "--"];
    if !can_be_others() {
        return;
    }
    let owned = || {
        let folder = tmpfs_directory();
        chown(folder.path(), Some(OWNER), Some(GROUP)).unwrap();
        folder
    };
    let [old, restored, moved] = [owned(), owned(), owned()];
    let [store, copy, new] = [&old, &restored, &moved].map(|folder| folder.path().join("store"));
    let backup = old.path().join("backup.tar");
    let model = ModelFile::dense(1).write_to(old.path(), "m.gguf");
    Blobd::at_root(&store).run(["import", model.to_str().unwrap()]).succeeds();
    run_block("backup", &[("STORE", &store), ("BACKUP", &backup)]);
    run_block("restore", &[("STORE", &copy), ("BACKUP", &backup)]);
    run_block("move", &[("STORE", &store), ("NEW", &new)]);
    for folder in [restored, moved] {
        assert_eq!(foreign(&folder.path().join("store")), [""; 0]);
        let daemon = TestDaemon::start_under(&AS_OWNER, folder);
        daemon.command().line("rm m").succeeds();
        daemon.command().run(["import", model.to_str().unwrap()]).succeeds();
        assert!(!daemon.log().contains("WARN"), "{}", daemon.log());
    }
}
