//! `blobd health` and `GET /v1/health`.

use blobd_tests::command::Blobd;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::http;
use blobd_tests::model::ModelFile;
use blobd_tests::store_dir::{blob_path, flip_byte};
use blobd_tests::temp_dirs::tmpfs_directory;

#[test]
fn daemon_that_works_is_ok_and_every_check_is_named() {
    let daemon = TestDaemon::start();
    let health = daemon.command().line("health --json").succeeds().json();
    assert_eq!(health["status"], "ok", "{health}");
    let checks = health["checks"].as_array().unwrap();
    let names: Vec<_> = checks.iter().map(|check| check["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["writes", "space", "index", "content", "disk"]);
    assert!(daemon.command().line("--quiet health").succeeds().stdout.is_empty());
    assert_eq!(http::get(&daemon.socket(), "/v1/health").json()["status"], "ok");
}

#[test]
fn damage_is_degraded_and_an_error_only_if_strict() {
    let daemon = TestDaemon::start();
    let path = ModelFile::dense(1).write_to(daemon.scratch(), "m.gguf");
    daemon.command().run(["import".as_ref(), path.as_os_str()]).succeeds();
    let shown = daemon.command().line("show m --json").succeeds().json();
    flip_byte(&blob_path(daemon.root(), shown["tensors"][0]["digest"].as_str().unwrap()), 3);
    daemon.command().line("verify m").exits_with(5);
    let text = daemon.command().line("health").succeeds().text();
    assert!(text.starts_with("degraded\n") && text.contains("damaged or missing blobs: 1"), "{text}");
    let strict = daemon.command().line("health --strict").exits_with(1);
    assert!(strict.stderr.contains("the daemon is degraded: content: damaged"), "{}", strict.stderr);
}

#[test]
fn without_a_daemon_the_exit_code_says_so_and_no_store_is_made() {
    let folder = tmpfs_directory();
    let root = folder.path().join("store");
    Blobd::at_root(&root).line("health").exits_with(3);
    assert!(!root.exists());
    // Where only the environment names the store, `gc` would create it.
    Blobd::at_root(&root).run(["--root", root.to_str().unwrap(), "gc"]).exits_with(3);
    let daemon = TestDaemon::start();
    let mut stopped = daemon;
    stopped.stop();
    let run = stopped.embedded().line("health").exits_with(3);
    assert!(run.stderr.contains("no daemon is running"), "{}", run.stderr);
}

#[test]
fn socket_on_which_nothing_listens_has_the_exit_code_of_no_daemon() {
    let folder = tmpfs_directory();
    let socket = folder.path().join("absent.sock");
    let by_variable = Blobd::at_socket(&socket).line("health").exits_with(3);
    let expected = format!("blobd: {}: nothing listens there\n", socket.display());
    assert!(by_variable.stderr.starts_with(&expected), "{}", by_variable.stderr);
    assert!(by_variable.stderr.contains("hint: start the daemon there"), "{}", by_variable.stderr);
    let named = ["--socket", socket.to_str().unwrap(), "health", "--quiet"];
    Blobd::at_root(&folder.path().join("store")).run(named).exits_with(3);
    let mut killed = TestDaemon::start();
    killed.kill();
    Blobd::at_socket(&killed.socket()).line("health").exits_with(3);
    Blobd::at_socket(&killed.socket()).line("ls").exits_with(8);
}
