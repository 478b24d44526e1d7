//! Arguments: mistyped ones, words of other tools, and help.

use std::fs::File;
use std::process::Command;

use blobd_client::protocol::error::ErrorCode;
use blobd_tests::command::{self, Blobd};
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::programs;

/// Commands whose arguments are never accepted, so that no store is opened.
fn blobd() -> (tempfile::TempDir, Blobd) {
    let folder = blobd_tests::temp_dirs::tmpfs_directory();
    let blobd = Blobd::at_root(&folder.path().join("store"));
    (folder, blobd)
}

#[test]
fn usage_errors_are_json_with_a_code_and_a_hint_wherever_the_option_is() {
    let (folder, blobd) = blobd();
    for line in [
        "--json nope",
        "nope --json",
        "ls --nope --json",
        "--json ls --nope",
        "show --json",
        "tag a --json",
        "rm --json a/..b/c",
        "pull x --limit-rate much --json",
        "gc --dry-run --plan-eviction --json",
        "ls --sort colour --json",
        "ls --filter nope --json",
        "--json",
        "help nope --json",
        "completions csh --json",
        "man nope --json",
    ] {
        let run = blobd.line(line).exits_with(2);
        assert_eq!(run.text(), "", "{line}");
        assert_eq!(run.stderr.lines().count(), 1, "{line}: {}", run.stderr);
        let error = run.error();
        assert_eq!(error.code, ErrorCode::InvalidRequest, "{line}");
        assert!(error.hint.is_some_and(|hint| !hint.is_empty()), "{line}");
    }
    assert!(!folder.path().join("store").exists());
}

#[test]
fn usage_errors_have_the_form_of_all_errors() {
    let (_folder, blobd) = blobd();
    let run = blobd.line("ls --trahs").exits_with(2);
    assert_eq!(run.stderr, "blobd: --trahs: no option of `blobd ls`\nhint: did you mean --trash?\n");
    let run = blobd.line("tag llama3").exits_with(2);
    let expected = "blobd: tag: no argument given: expected DST\nhint: usage: blobd tag <SRC> <DST>; \
                    `blobd tag --help` explains it\n";
    assert_eq!(run.stderr, expected);
}

#[test]
fn hint_of_an_unknown_command_is_never_a_command_with_the_opposite_effect() {
    let (_folder, blobd) = blobd();
    for (line, part) in [
        ("pul llama3", "`blobd pull`"),
        ("upload llama3", "`blobd push MODEL DESTINATION`"),
        ("run llama3", "`blobd exec -- "),
        ("stop llama3", "`blobd release MODEL`"),
        ("create llama3 -f Modelfile", "`blobd edit SRC DST`"),
        ("system df", "`blobd df`"),
        ("search llama", "`blobd ls TEXT`"),
        ("info", "`blobd doctor`"),
        ("xyzzy", "`blobd help`"),
        ("help xyzzy", "`blobd help`"),
    ] {
        let run = blobd.line(line).exits_with(2);
        assert!(run.stderr.contains(part), "{line}: {}", run.stderr);
        for opposite in ["undelete", "unpin", "blobd ps"] {
            assert!(!run.stderr.contains(opposite), "{line}: {}", run.stderr);
        }
    }
}

#[test]
fn words_of_other_tools_with_the_same_meaning_are_commands() {
    let daemon = TestDaemon::start();
    let path = ModelFile::dense(1).write_to(daemon.scratch(), "m.gguf");
    daemon.command().run(["import".as_ref(), path.as_os_str()]).succeeds();
    let output = |line: &str| daemon.command().line(line).succeeds().text();
    assert_eq!(output("list"), output("ls"));
    assert_eq!(output("images --json"), output("ls --json"));
    assert_eq!(output("inspect m --json"), output("show m --json"));
    output("cp m n");
    for word in ["mv", "move"] {
        assert!(output(&format!("{word} n o")).contains("o:latest"));
        assert_eq!(output("ls -q"), "m:latest\no:latest\n", "{word}");
        output("rename o n");
    }
    for word in ["rmi", "remove", "delete"] {
        assert!(output(&format!("{word} n")).starts_with("removed n:latest"));
        output("cp m n");
    }
}

#[test]
fn help_of_a_command_is_that_of_its_option() {
    let (_folder, blobd) = blobd();
    let help = blobd.line("help pull").succeeds().text();
    assert_eq!(help, blobd.line("pull --help").succeeds().text());
    assert!(help.contains("Examples:"));
    assert_eq!(blobd.line("help").succeeds().text(), blobd.line("--help").succeeds().text());
    assert_eq!(blobd.line("help list").succeeds().text(), blobd.line("help ls").succeeds().text());
    assert_eq!(blobd.line("help pull --json").succeeds().json()["help"], help);
}

#[test]
fn command_without_arguments_prints_the_first_steps_and_fails() {
    let (_folder, blobd) = blobd();
    let run = command::run(&mut blobd.command()).exits_with(2);
    assert_eq!(run.text(), "");
    assert!(run.stderr.lines().count() <= 24, "{}", run.stderr);
    for part in ["get       blobd pull", "\nclean up  blobd df", "also diff, fit", "blobd help COMMAND"] {
        assert!(run.stderr.contains(part), "{}", run.stderr);
    }
    assert_eq!(blobd.line("-h").succeeds().text(), run.stderr);
}

#[test]
fn output_that_cannot_be_written_is_a_failure_of_every_command_that_prints() {
    let daemon = TestDaemon::start();
    let path = ModelFile::dense(1).write_to(daemon.scratch(), "m.gguf");
    daemon.command().run(["import".as_ref(), path.as_os_str()]).succeeds();
    for line in [
        "--help",
        "help",
        "pull --help",
        "help pull",
        "partial rm --help",
        "--version",
        "ls",
        "ls -q",
        "ls --json",
        "show m",
        "df",
        "ps",
        "outdated",
        "verify",
        "gc --dry-run",
        "partial ls",
        "doctor",
        "tag m n",
        "completions bash",
        "man",
        "man pull",
        "export m -o -",
        "tensor m output.weight",
    ] {
        let mut command = daemon.command().command();
        command.args(line.split(' ')).stdout(File::create("/dev/full").unwrap());
        let run = command::run(&mut command).exits_with(6);
        assert!(run.stderr.contains("standard output: "), "{line}: {}", run.stderr);
        assert_eq!(run.stderr.lines().count(), 1, "{line}: {}", run.stderr);
    }
}

#[test]
fn reader_that_closes_the_pipe_ends_a_command_quietly() {
    let daemon = TestDaemon::start();
    let path = ModelFile::dense_of(1, 2, 256).write_to(daemon.scratch(), "m.gguf");
    daemon.command().run(["import".as_ref(), path.as_os_str()]).succeeds();
    for line in ["--help", "ls", "ls --json", "completions bash", "man", "show m", "export m -o -"] {
        let mut shell = Command::new("sh");
        let script = format!("blobd {line} | head -c 1 >/dev/null");
        daemon.command().prepare(&mut shell);
        let directory = programs::blobd().parent().unwrap().display().to_string();
        shell.args(["-c", &script]).env("PATH", format!("{directory}:/usr/bin:/bin"));
        assert_eq!(command::run(&mut shell).succeeds().stderr, "", "{line}");
    }
}

#[test]
fn command_with_subcommands_lists_them_if_none_or_an_unknown_one_is_given() {
    let (folder, blobd) = blobd();
    for line in ["partial", "partial nothing", "help partial nothing", "man partial nothing"] {
        let run = blobd.line(line).exits_with(2);
        assert!(
            run.stderr.lines().next().is_some_and(|line| line.contains("partial")),
            "{line}: {}",
            run.stderr
        );
        assert!(run.stderr.contains("`blobd partial ls`, `blobd partial rm`"), "{line}: {}", run.stderr);
    }
    assert!(!folder.path().join("store").exists());
    assert_eq!(blobd.line("partial list").succeeds().text(), "no unfinished downloads\n");
}
