//! Tests of the binary that need no store. Because of this file, `cargo test` builds the binary,
//! which the tests in `tests/` then run.

#![allow(clippy::unwrap_used)]

use std::io::Write as _;
use std::process::{Command, Output, Stdio};

fn blobd(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_blobd")).args(arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn version_and_help_are_printed_to_standard_output() {
    let version = blobd(&["--version"]);
    assert_eq!(text(&version.stdout), format!("blobd {}\n", env!("CARGO_PKG_VERSION")));
    let help = blobd(&["--help"]);
    assert!(help.status.success() && text(&help.stdout).contains("Exit codes"), "{help:?}");
}

#[test]
fn help_of_a_command_ends_with_examples() {
    for command in
        ["pull", "import", "export", "ls", "show", "ps", "df", "rm", "tag", "gc", "login", "logout", "serve"]
    {
        let help = text(&blobd(&[command, "--help"]).stdout);
        let (_, examples) = help.split_once("Examples:\n").unwrap_or_else(|| panic!("{command}: {help}"));
        assert!(examples.trim_start().starts_with(&format!("blobd {command}")), "{command}: {help}");
    }
}

#[test]
fn wrong_usage_exits_with_2_and_says_why() {
    for arguments in [
        &[][..],
        &["frobnicate"],
        &["ls", "--no-such-option"],
        &["show"],
        &["rm"],
        &["tag", "a"],
        &["import"],
        &["rm", "../../etc/passwd"],
        &["pull", "ftp://a/b/c"],
        &["import", "a.gguf", "b.gguf", "--name", "c"],
        &["login", "user@host"],
        &["login", "host", "--password-stdin"],
        &["login", "host", "-u", "me", "--token-stdin"],
        &["login", "host", "-u", "me", "--password", "secret"],
    ] {
        let output = blobd(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {output:?}");
        assert!(!output.stderr.is_empty() && output.stdout.is_empty(), "{arguments:?}: {output:?}");
    }
}

#[test]
fn socket_that_nobody_serves_is_a_failure_and_not_an_embedded_store() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("no.sock");
    let output = blobd(&["ls", "--json", "--socket", socket.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(8), "{output:?}");
    assert!(text(&output.stderr).starts_with(r#"{"error":{"code":"unavailable"#), "{output:?}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn login_keeps_a_secret_from_standard_input_and_logout_forgets_it() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("config.toml");
    std::fs::write(&config, "").unwrap();
    let run = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_blobd"));
        command.arg("--config").arg(&config).args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        // Fails if the command does not read its input and has ended already.
        let _ = child.stdin.take().unwrap().write_all(b"hunter2\n");
        child.wait_with_output().unwrap()
    };
    let login = run(&["login", "docker.io", "-u", "me", "--password-stdin"]);
    let kept = std::fs::read_to_string(folder.path().join("credentials.json")).unwrap();
    assert!(kept.contains("docker.io") && kept.contains("hunter2"), "{kept}");
    let logout = run(&["logout", "index.docker.io"]);
    let kept = std::fs::read_to_string(folder.path().join("credentials.json")).unwrap();
    assert!(!kept.contains("docker.io") && !kept.contains("hunter2"), "{kept}");
    let again = run(&["logout", "docker.io"]);
    assert_eq!([login.status.code(), logout.status.code(), again.status.code()], [Some(0), Some(0), Some(3)]);
    for output in [login, logout, again] {
        assert!(!format!("{output:?}").contains("hunter2"), "{output:?}");
    }
}
