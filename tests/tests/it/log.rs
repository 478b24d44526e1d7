//! The log of the daemon and of commands. Messages that cannot be written cause no failure.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};

use blobd_tests::command::{self, Blobd};
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::temp_dirs::tmpfs_directory;
use blobd_tests::wait::eventually;

fn daemon_with(variables: &[&str]) -> TestDaemon {
    TestDaemon::start_under(&[&["env"], variables].concat(), tmpfs_directory())
}

#[test]
fn log_level_is_set_by_the_environment() {
    assert!(daemon_with(&[]).log().contains("serving"));
    let quiet = daemon_with(&["BLOBD_LOG=warn"]);
    assert_eq!(quiet.log(), "");
    let quiet = daemon_with(&["RUST_LOG=error"]);
    assert_eq!(quiet.log(), "");
    let own_first = daemon_with(&["BLOBD_LOG=info", "RUST_LOG=off"]);
    assert!(own_first.log().contains("serving"), "{}", own_first.log());
}

#[test]
fn wrong_log_level_is_reported() {
    let daemon = daemon_with(&["RUST_LOG=debgu"]);
    let log = daemon.log();
    assert!(log.contains("RUST_LOG: expected off, error,") && log.contains("serving"), "{log}");
    let mut serve = daemon.embedded().command();
    let run = command::run(serve.arg("serve").env("BLOBD_LOG", "blobd=loud")).exits_with(2);
    assert!(run.stderr.contains("BLOBD_LOG: expected off, error, warn"), "{}", run.stderr);
}

/// A standard error that cannot be written.
fn unwritable() -> [(&'static str, Stdio); 3] {
    let full = File::options().write(true).open("/dev/full").unwrap();
    let (closed, other_end) = UnixStream::pair().unwrap();
    drop(other_end);
    let read_only = File::open("/dev/null").unwrap();
    [("full", full.into()), ("closed", OwnedFd::from(closed).into()), ("read-only", read_only.into())]
}

/// The exit code of a command whose standard error cannot be written, for each reason.
fn codes_without_messages(blobd: &Blobd, words: &[&str]) -> [i32; 3] {
    unwritable().map(|(reason, stderr)| {
        let mut command = blobd.command();
        let run = command::run(command.args(words).stderr(stderr));
        assert_ne!(run.code, 101, "{words:?}: standard error is {reason}");
        run.code
    })
}

#[test]
fn command_does_not_fail_if_its_messages_cannot_be_written() {
    let folder = tmpfs_directory();
    let blobd = Blobd::at_root(&folder.path().join("store"));
    let model = ModelFile::dense_of(1, 2, 128).write_to(folder.path(), "m.gguf");
    blobd.run(["import".as_ref(), model.as_os_str()]).succeeds();
    assert_eq!(codes_without_messages(&blobd, &["show", "absent"]), [3; 3]);
    assert_eq!(codes_without_messages(&blobd, &["show", "absent", "--json"]), [3; 3]);
    assert_eq!(codes_without_messages(&blobd, &["shwo"]), [2; 3]);
    assert_eq!(codes_without_messages(&blobd, &["--help"]), [0; 3]);
    assert_eq!(codes_without_messages(&blobd, &["ls"]), [0; 3]);
    assert_eq!(codes_without_messages(&blobd, &["verify"]), [0; 3]);
    let text = folder.path().join("notes.txt");
    std::fs::write(&text, "no model").unwrap();
    assert_eq!(codes_without_messages(&blobd, &["import", text.to_str().unwrap()]), [1; 3]);
}

#[test]
fn daemon_serves_if_its_log_cannot_be_written() {
    for redirection in ["2>/dev/full", "2>&-", "2>&1 | head -c 0"] {
        let folder = tmpfs_directory();
        // `head` ends before the first line of the log.
        let script = format!("\"$@\" {redirection}");
        let start = ["sh", "-c", &script, "sh", "env", "BLOBD_LOG=trace"];
        let daemon = TestDaemon::start_under(&start, folder);
        daemon.command().line("ls").succeeds();
        daemon.command().line("show absent").exits_with(3);
        end(daemon);
    }
}

/// Ends the daemon, which is a child of the shell that `daemon` knows.
fn end(mut daemon: TestDaemon) {
    let pid = daemon.client().version().unwrap().pid.to_string();
    Command::new("kill").arg(&pid).status().unwrap();
    eventually("the daemon has ended", || !Path::new("/proc").join(&pid).exists());
    daemon.kill_if_running();
}

#[test]
fn files_do_not_get_the_numbers_of_closed_standard_descriptors() {
    let folder = tmpfs_directory();
    let start = ["sh", "-c", "exec \"$@\" 0<&- 1>&- 2>&-", "sh"];
    let daemon = TestDaemon::start_under(&start, folder);
    let target = |fd: u32| std::fs::read_link(format!("/proc/{}/fd/{fd}", daemon.pid())).unwrap();
    assert_eq!([0, 1, 2].map(target), ["/dev/null"; 3].map(std::path::PathBuf::from));
}

#[test]
fn commands_log_only_on_request() {
    let folder = tmpfs_directory();
    let blobd = Blobd::at_root(&folder.path().join("store"));
    let model = ModelFile::dense_of(1, 2, 128).write_to(folder.path(), "m.gguf");
    blobd.run(["import".as_ref(), model.as_os_str(), "--name".as_ref(), "m".as_ref()]).succeeds();
    let stderr = |variable: &str| {
        let mut command = blobd.command();
        command::run(command.args(["export", "m", "-o", "-"]).env(variable, "debug")).succeeds().stderr
    };
    assert!(stderr("BLOBD_LOG").contains("opens m"), "{}", stderr("BLOBD_LOG"));
    assert_eq!(stderr("RUST_LOG"), "");
}

#[test]
fn log_is_one_json_object_per_line_if_that_is_requested() {
    let daemon = daemon_with(&["BLOBD_LOG_FORMAT=json"]);
    let model = ModelFile::dense_of(1, 2, 128).write_to(daemon.scratch(), "m.gguf");
    daemon.command().run(["import".as_ref(), model.as_os_str(), "--name".as_ref(), "m".as_ref()]).succeeds();
    let imported = || {
        let log = daemon.log();
        // The last line may be incomplete.
        let lines = log.split_inclusive('\n').filter(|line| line.ends_with('\n'));
        let entries = lines.map(|line| serde_json::from_str::<serde_json::Value>(line).expect(line));
        entries.filter(|entry| entry["message"] == "import").collect::<Vec<_>>()
    };
    eventually("the import is logged", || !imported().is_empty());
    let entry = &imported()[0];
    assert_eq!((&entry["level"], &entry["model"]), (&"INFO".into(), &"m:latest".into()), "{entry}");
    assert!(entry["uid"].is_u64() && entry["size"].is_u64() && entry["timestamp"].is_string(), "{entry}");
}

#[test]
fn log_format_that_does_not_exist_is_refused() {
    let folder = tmpfs_directory();
    let mut list = Blobd::at_root(&folder.path().join("store")).command();
    let run = command::run(list.args(["ls", "-vv"]).env("BLOBD_LOG_FORMAT", "xml")).exits_with(2);
    assert!(
        run.stderr.contains("BLOBD_LOG_FORMAT: expected text, json or journal, found \"xml\""),
        "{}",
        run.stderr
    );
}
