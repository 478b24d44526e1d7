//! Which process may open a store, and which directories are accepted as one.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::thread;
use std::time::Duration;

use blobd_tests::command::Blobd;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::store_dir::{names, snapshot};
use blobd_tests::temp_dirs::tmpfs_directory;

#[test]
fn command_that_names_the_root_of_a_daemon_is_served_by_it() {
    let daemon = TestDaemon::start();
    let path = ModelFile::dense(1).write_to(daemon.scratch(), "m.gguf");
    let by_root = daemon.embedded();
    by_root.run(["import".as_ref(), path.as_os_str()]).succeeds();
    assert_eq!(daemon.client().models().unwrap().models.len(), 1);
    by_root.line("rm m").succeeds();
    assert!(daemon.client().models().unwrap().models.is_empty());
}

#[test]
fn second_daemon_on_a_store_is_refused() {
    let daemon = TestDaemon::start();
    let other = daemon.scratch().join("other.sock");
    let run = daemon.embedded().run(["serve", "--json", "--socket", other.to_str().unwrap()]).exits_with(4);
    let error = run.error();
    let holder = format!("process {}, which serves {}", daemon.pid(), daemon.socket().display());
    assert!(error.message.contains(&holder) && error.hint.is_some(), "{error}");
    assert!(!other.exists());
    daemon.command().line("ls").succeeds();
}

#[test]
fn second_daemon_on_a_socket_is_refused() {
    let daemon = TestDaemon::start();
    let folder = tmpfs_directory();
    let elsewhere = Blobd::at_root(&folder.path().join("store"));
    elsewhere.run(["serve", "--json", "--socket", daemon.socket().to_str().unwrap()]).exits_with(4);
    assert_eq!(daemon.client().version().unwrap().root, daemon.root().to_str().unwrap());
}

#[test]
fn file_in_place_of_the_socket_is_not_replaced() {
    let folder = tmpfs_directory();
    let precious = folder.path().join("precious");
    fs::write(&precious, "years of work").unwrap();
    let blobd = Blobd::at_root(&folder.path().join("store"));
    let run = blobd.run(["serve", "--socket", precious.to_str().unwrap()]);
    assert!([1, 2].contains(&run.code), "{}", run.stderr);
    assert_eq!(fs::read_to_string(&precious).unwrap(), "years of work");
}

#[test]
fn daemon_without_a_reachable_socket_is_reported_with_a_hint() {
    let daemon = TestDaemon::start();
    fs::remove_file(daemon.socket()).unwrap();
    let error = daemon.embedded().line("ls --json").exits_with(4).error();
    let holder = format!("process {}, which serves {}", daemon.pid(), daemon.socket().display());
    assert!(error.message.contains(&holder), "{error}");
    let hint = error.hint.unwrap();
    assert!(hint.contains("cannot be reached") && hint.contains("restart"), "{hint}");
}

#[test]
fn store_opened_by_a_command_is_busy_for_others() {
    let folder = tmpfs_directory();
    let root = folder.path().join("store");
    // Like a command without a daemon, which serves no socket.
    let _held = blobd_store::Store::open(&root).unwrap();
    let error = Blobd::at_root(&root).line("ls --json").exits_with(4).error();
    assert!(error.message.contains(&std::process::id().to_string()) && error.hint.is_some(), "{error}");
}

#[test]
fn command_waits_briefly_for_a_store_opened_by_another() {
    let folder = tmpfs_directory();
    let root = folder.path().join("store");
    let held = blobd_store::Store::open(&root).unwrap();
    thread::scope(|scope| {
        let listing = scope.spawn(|| Blobd::at_root(&root).line("ls --json"));
        thread::sleep(Duration::from_millis(200));
        drop(held);
        listing.join().unwrap().succeeds();
    });
}

#[test]
fn daemon_starts_while_its_killed_predecessor_ends() {
    let mut daemon = TestDaemon::start();
    for _ in 0..3 {
        daemon.kill_and_restart_at_once();
        daemon.command().line("ls").succeeds();
    }
}

#[test]
fn store_of_a_newer_format_is_refused_and_not_touched() {
    let folder = tmpfs_directory();
    let root = folder.path().join("store");
    fs::create_dir_all(root.join("staging/txn")).unwrap();
    fs::write(root.join("store.json"), r#"{"format":99,"id":"x","new":true}"#).unwrap();
    fs::write(root.join("staging/txn/0"), "of a later blobd").unwrap();
    let before = snapshot(&root);
    for line in ["ls --json", "gc --json", "serve --json"] {
        let run = Blobd::at_root(&root).line(line).exits_with(2);
        assert!(run.error().message.contains("format 99 is newer"), "{line}: {}", run.stderr);
    }
    assert_eq!(snapshot(&root), before);
}

#[test]
fn directory_with_other_files_is_refused_and_not_touched() {
    let folder = tmpfs_directory();
    fs::write(folder.path().join("letters.txt"), "private").unwrap();
    let before = snapshot(folder.path());
    let run = Blobd::at_root(folder.path()).line("ls --json").exits_with(2);
    assert!(run.error().message.contains("no store.json"), "{}", run.stderr);
    assert_eq!(snapshot(folder.path()), before);
}

#[test]
fn store_file_that_is_damaged_is_refused() {
    for content in ["", "{", "[]", r#"{"format":"1","id":"x"}"#, r#"{"format":-1,"id":"x"}"#] {
        let folder = tmpfs_directory();
        fs::write(folder.path().join("store.json"), content).unwrap();
        let run = Blobd::at_root(folder.path()).line("ls --json");
        assert_eq!(run.code, 2, "{content:?}: {}", run.stderr);
        assert_eq!(fs::read_to_string(folder.path().join("store.json")).unwrap(), content);
    }
}

/// The process was killed after it had created the first file of the store.
#[test]
fn store_whose_creation_was_interrupted_is_created_again() {
    let folder = tmpfs_directory();
    fs::write(folder.path().join("lock"), "").unwrap();
    fs::write(folder.path().join("store.json.new"), r#"{"for"#).unwrap();
    Blobd::at_root(folder.path()).line("ls").succeeds();
    assert!(names(folder.path()).contains(&"store.json".to_owned()));
}

#[test]
fn store_is_private_and_its_parent_directories_are_created() {
    let folder = tmpfs_directory();
    let root = folder.path().join("a/b/c/store");
    Blobd::at_root(&root).line("ls").succeeds();
    assert_eq!(fs::metadata(&root).unwrap().permissions().mode() & 0o777, 0o700);
    assert_eq!(fs::metadata(root.join("lock")).unwrap().permissions().mode() & 0o777, 0o600);
}

#[test]
fn root_that_cannot_be_a_directory_is_refused() {
    let folder = tmpfs_directory();
    let file = folder.path().join("file");
    fs::write(&file, "x").unwrap();
    for root in [&file, &file.join("store"), Path::new("/proc/store")] {
        let run = Blobd::at_root(root).line("ls --json");
        assert!([1, 2, 7].contains(&run.code), "{}: {} {}", root.display(), run.code, run.stderr);
    }
    assert_eq!(fs::read_to_string(&file).unwrap(), "x");
}

#[test]
fn commands_one_after_another_need_no_daemon() {
    let folder = tmpfs_directory();
    let blobd = Blobd::at_root(&folder.path().join("store"));
    let path = ModelFile::dense(1).write_to(folder.path(), "m.gguf");
    blobd.run(["import".as_ref(), path.as_os_str()]).succeeds();
    assert!(blobd.line("export m -o -").succeeds().stdout == ModelFile::dense(1).bytes());
    blobd.line("tag m n").succeeds();
    blobd.line("rm m n").succeeds();
    blobd_tests::store_dir::check_empty(&folder.path().join("store"));
}
