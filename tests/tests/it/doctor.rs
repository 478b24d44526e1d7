//! `blobd doctor`: it works where other commands do not, changes nothing, and prints commands that correct what it
//! finds.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;

use blobd_tests::command::{self, Blobd, Run};
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::registry::FakeRegistry;
use blobd_tests::temp_dirs::tmpfs_directory;
use serde_json::Value as Json;

fn check(run: &Run, name: &str) -> Json {
    let report = run.json();
    let checks = report["checks"].as_array().unwrap();
    checks.iter().find(|check| check["name"] == name).unwrap_or_else(|| panic!("{name}: {report}")).clone()
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

/// Runs the command that a check gives, without `sudo`.
fn mend(check: &Json) {
    let command = check["command"].as_str().unwrap();
    let command = command.strip_prefix("sudo ").unwrap_or(command);
    let status = Command::new("sh").args(["-c", command]).status().unwrap();
    assert!(status.success(), "{command}");
}

#[test]
fn doctor_without_a_store_says_so_and_creates_nothing() {
    let folder = tmpfs_directory();
    let root = folder.path().join("store");
    let run = Blobd::at_root(&root).line("doctor --json").succeeds();
    let connection = check(&run, "connection");
    assert_eq!(connection["status"], "note");
    assert!(connection["detail"].as_str().unwrap().contains("contains no store"), "{connection}");
    assert!(!root.exists());
}

#[test]
fn doctor_reports_a_proxy_that_is_not_understood_without_its_password() {
    let folder = tmpfs_directory();
    let mut command = Blobd::at_root(&folder.path().join("store")).command();
    command
        .args(["doctor", "--json"])
        .env("ALL_PROXY", "gopher://me:secret@h")
        .env("HTTPS_PROXY", "http://h");
    let run = command::run(&mut command).succeeds();
    let found = check(&run, "environment");
    assert_eq!(found["status"], "warning");
    let detail = found["detail"].as_str().unwrap();
    assert!(
        detail.starts_with("ALL_PROXY: not understood: ") && !run.json().to_string().contains("secret"),
        "{detail}"
    );
}

#[test]
fn doctor_with_a_wrong_configuration_reports_its_line_and_checks_the_rest() {
    let folder = tmpfs_directory();
    let config = folder.path().join("config.toml");
    fs::write(&config, "durability = \"auto\"\nquotas = 1\n").unwrap();
    let blobd = Blobd::at_root(&folder.path().join("store"));
    blobd.line("ls").succeeds();
    let blobd = blobd.configured_by(&config);
    blobd.line("ls").exits_with(2);
    let run = blobd.line("doctor --json").exits_with(1);
    let found = check(&run, "configuration");
    assert_eq!(found["status"], "failure");
    assert!(found["detail"].as_str().unwrap().contains("config.toml:2:1"), "{found}");
    assert_eq!(check(&run, "metadata")["status"], "ok", "the store is checked nevertheless");
    assert!(run.stderr.contains("checks failed: configuration"), "{}", run.stderr);
}

#[test]
fn doctor_with_a_socket_that_nobody_serves_says_which_variable_names_it() {
    let folder = tmpfs_directory();
    let run = Blobd::at_socket(&folder.path().join("s")).line("doctor --json").exits_with(1);
    let connection = check(&run, "connection");
    assert_eq!(
        (&connection["status"], &connection["command"]),
        (&"failure".into(), &"unset BLOBD_SOCKET".into())
    );
}

#[test]
fn commands_of_doctor_correct_permissions_of_paths_with_spaces() {
    let folder = tmpfs_directory();
    let root = folder.path().join("my store");
    let (config, credentials) =
        (folder.path().join("my config.toml"), folder.path().join("credentials.json"));
    fs::write(&config, "").unwrap();
    fs::write(&credentials, "{}").unwrap();
    let blobd = Blobd::at_root(&root).configured_by(&config);
    blobd.line("ls").succeeds();
    for (path, mode, name, status) in [
        (&root, 0o777, "directory", "failure"),
        (&root, 0o750, "directory", "warning"),
        (&config, 0o666, "configuration", "warning"),
        (&credentials, 0o644, "credentials", "failure"),
    ] {
        set_mode(path, mode);
        let found = check(&blobd.line("doctor --json"), name);
        assert_eq!(found["status"], status, "{found}");
        for key in ["detail", "why", "hint"] {
            assert!(!found[key].as_str().unwrap().is_empty(), "{key}: {found}");
        }
        mend(&found);
        assert_eq!(check(&blobd.line("doctor --json"), name)["status"], "ok", "{name}");
    }
}

#[test]
fn report_with_a_daemon_has_its_checks_and_those_of_the_command() {
    let daemon = TestDaemon::start();
    let run = daemon.command().line("doctor --json").succeeds();
    let connection = check(&run, "connection");
    assert_eq!(connection["status"], "ok");
    assert!(connection["detail"].as_str().unwrap().starts_with("daemon "), "{connection}");
    for name in ["configuration", "mount", "inodes", "clock", "kernel"] {
        assert!(!check(&run, name)["detail"].as_str().unwrap().is_empty());
    }
    let text = daemon.command().line("doctor").succeeds().text();
    assert!(text.contains("CHECK") && text.contains("connection"), "{text}");
}

#[test]
fn registries_are_contacted_only_on_request() {
    let registry = FakeRegistry::start().unwrap();
    let folder = tmpfs_directory();
    let config = folder.path().join("config.toml");
    // Nothing listens at the second one.
    let mirrors = format!(
        "[mirrors]\n\"registry.ollama.ai\" = \"{}\"\n\"example.org\" = \"http://127.0.0.1:1\"\n",
        registry.url()
    );
    fs::write(&config, mirrors).unwrap();
    let blobd = Blobd::at_root(&folder.path().join("store")).configured_by(&config);
    let model = ModelFile::dense(1).write_to(folder.path(), "m.gguf");
    blobd.run(["import", model.to_str().unwrap()]).succeeds();
    blobd.line("doctor").succeeds();
    assert_eq!(registry.requests().len(), 0);
    let run = blobd.line("doctor --registries --json").exits_with(1);
    assert!(!registry.requests().is_empty());
    assert_eq!(check(&run, "registry registry.ollama.ai")["status"], "ok");
    let unreachable = check(&run, "registry example.org");
    assert_eq!(unreachable["status"], "failure");
    assert!(unreachable["detail"].as_str().unwrap().contains("connection refused"), "{unreachable}");
}
