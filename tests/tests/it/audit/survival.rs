//! The log after crashes, on a full disk and in another directory.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;

use blobd_tests::command::Blobd;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::temp_dirs::tmpfs_directory;
use blobd_tests::wait::eventually;

use super::{audit, config, content, eventual_records, files, import, records, results};

#[test]
fn killed_daemon_leaves_a_log_that_can_be_read_and_continued() {
    let mut daemon = TestDaemon::start();
    import(&daemon.command(), daemon.scratch(), 1, "m");
    eventual_records(&daemon.command(), "", &["import ok"]);
    daemon.kill();
    let file = files(&audit(&daemon)).remove(0);
    let mut bytes = fs::read(&file).unwrap();
    bytes.extend(b"{\"time\":\"2026-");
    fs::write(&file, bytes).unwrap();
    daemon.restart();
    daemon.command().line("rm m").succeeds();
    eventual_records(&daemon.command(), "", &["import ok", "rm ok"]);
    let run = daemon.command().line("log").succeeds();
    assert!(run.stderr.contains("1 line of the log is not a record"), "{}", run.stderr);
    assert_eq!(files(&audit(&daemon)).len(), 1);
}

#[test]
fn records_around_a_hole_are_found_and_the_hole_is_not_read() {
    let mut daemon = TestDaemon::start();
    import(&daemon.command(), daemon.scratch(), 1, "m");
    eventual_records(&daemon.command(), "", &["import ok"]);
    daemon.kill();
    let file = files(&audit(&daemon)).remove(0);
    fs::File::options().write(true).open(&file).unwrap().set_len(1 << 40).unwrap();
    daemon.restart();
    // The file is larger than any that is continued, so what follows is in the next one.
    daemon.command().line("rm m").succeeds();
    eventual_records(&daemon.command(), "", &["import ok", "rm ok"]);
    let _ = daemon.command().line("doctor");
}

#[test]
fn stopped_daemon_has_written_all_records() {
    let mut daemon = TestDaemon::start();
    import(&daemon.command(), daemon.scratch(), 1, "m");
    for _ in 0..20 {
        daemon.command().line("tag m n").succeeds();
    }
    daemon.stop();
    let text = content(&audit(&daemon));
    // With those of the start and the stop.
    assert_eq!(text.lines().count(), 23, "{text}");
}

#[test]
fn requests_are_served_although_the_log_cannot_be_written_and_the_loss_is_visible() {
    let daemon = TestDaemon::start();
    let directory = audit(&daemon);
    eventually("the start is recorded", || directory.is_dir() && content(&directory).contains("start"));
    // In place of the directory of the log.
    fs::remove_dir_all(&directory).unwrap();
    fs::write(&directory, "").unwrap();
    import(&daemon.command(), daemon.scratch(), 1, "m");
    let check = || {
        let report = daemon.command().line("doctor --json").stdout;
        let report: serde_json::Value = serde_json::from_slice(&report).unwrap();
        let checks = report["checks"].as_array().unwrap();
        checks.iter().find(|check| check["name"] == "audit log").unwrap()["status"].clone()
    };
    eventually("doctor reports it", || check() == "failure");
    assert!(daemon.log().contains("audit log: "), "{}", daemon.log());
    fs::remove_file(&directory).unwrap();
    daemon.command().line("tag m n").succeeds();
    eventually("the log is written again", || {
        directory.is_dir() && results(&records(&daemon.command(), "")) == ["audit dropped", "tag ok"]
    });
    assert_eq!(check(), "note");
}

#[test]
fn log_is_private_and_in_the_directory_that_the_configuration_names() {
    let folder = tmpfs_directory();
    let directory = folder.path().join("log");
    let text = format!("[audit]\ndirectory = \"{}\"\n", directory.display());
    let config = config(folder.path(), &text);
    let daemon = TestDaemon::start_at(&folder.path().join("store"), Some(&config));
    import(&daemon.command(), folder.path(), 1, "m");
    eventual_records(&daemon.command(), "", &["import ok"]);
    let mode = |path: &std::path::Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&directory), mode(&files(&directory)[0])), (0o700, 0o600));
    assert!(!folder.path().join("store/audit").exists());
}

#[test]
fn daemon_whose_directory_of_the_log_cannot_be_used_does_not_start() {
    let folder = tmpfs_directory();
    let refusal = |directory: &Path| {
        let text = format!("[audit]\nkeep = 3\ndirectory = \"{}\"\n", directory.display());
        let config = config(folder.path(), &text);
        let blobd = Blobd::at_root(&folder.path().join("store")).configured_by(&config);
        let run = blobd.line("serve --json");
        let error = run.error();
        let place = format!("{}:3: audit.directory: {}: ", config.display(), directory.display());
        assert!(error.message.starts_with(&place), "{error}");
        (run.code, error.message)
    };
    let [other, link, file] = ["other", "link", "file"].map(|name| folder.path().join(name));
    fs::create_dir(&other).unwrap();
    symlink(&other, &link).unwrap();
    fs::write(&file, "").unwrap();
    // A service manager gets code 78 for each of these.
    for wrong in [link.clone(), file, folder.path().join("missing/log")] {
        assert_eq!(refusal(&wrong).0, 2, "{}", wrong.display());
    }
    fs::set_permissions(&other, fs::Permissions::from_mode(0o777)).unwrap();
    let (code, message) = refusal(&other);
    assert!(code == 7 && message.contains("mode 0777"), "{code}: {message}");
}

#[test]
fn names_with_control_characters_and_urls_with_secrets_are_safe_in_the_log() {
    let daemon = TestDaemon::start();
    let path = ModelFile::dense(1).write_to(daemon.scratch(), "a\nb.gguf");
    daemon.command().run(["import", path.to_str().unwrap(), "--name", "m"]).succeeds();
    let url = "https://127.0.0.1:1/m.gguf?token=secret";
    assert_ne!(daemon.command().run(["pull", url, "--json"]).code, 0);
    eventually("both records are written", || records(&daemon.command(), "").len() == 2);
    let text = content(&audit(&daemon));
    assert_eq!(text.lines().count(), 3, "{text}");
    assert!(!text.contains("secret"), "{text}");
}
