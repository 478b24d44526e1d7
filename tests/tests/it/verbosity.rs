//! `--quiet` and `--verbose`.

use blobd_tests::command::Blobd;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;

fn daemon() -> TestDaemon {
    let daemon = TestDaemon::start();
    let path = ModelFile::dense(1).write_to(daemon.scratch(), "m.gguf");
    let run = daemon.command().run(["import".as_ref(), "-q".as_ref(), path.as_os_str()]).succeeds();
    assert_eq!((run.text(), run.stderr), (String::new(), String::new()));
    daemon
}

#[test]
fn quiet_commands_print_results_and_errors_but_no_reports_and_hints() {
    let daemon = daemon();
    let output = |line: &str| daemon.command().line(line).succeeds().text();
    assert_eq!(output("ls -q"), "m:latest\n");
    for line in ["tag -q m n", "--quiet pin n", "unpin -q n", "rm -q --keep 7d n", "undelete n -q", "gc -q"] {
        assert_eq!(output(line), "", "{line}");
    }
    for line in ["-q show m", "-q gc --dry-run", "df -q", "ps --quiet"] {
        assert_ne!(output(line), "", "{line}: is a result");
    }
    assert_eq!(output("rm -q --keep 7d n"), "");
    assert_eq!(output("ls -q --trash"), "n:latest\n");
    assert!(output("rm -q --json m").contains("freed_bytes"), "JSON is printed anyway");
    let run = daemon.command().line("-q export m -o -").exits_with(3);
    assert_eq!(run.stderr.lines().count(), 1, "{}", run.stderr);
}

#[test]
fn verbose_commands_log_what_they_use_on_standard_error() {
    let daemon = daemon();
    let run = daemon.command().line("-vv ps").succeeds();
    let socket = daemon.socket().display().to_string();
    assert!(run.stderr.contains("DEBUG") && run.stderr.contains(&socket), "{}", run.stderr);
    assert_eq!(run.text(), daemon.command().line("ps").succeeds().text());
    let root = daemon.scratch().join("other");
    let run = Blobd::at_root(&root).line("ls --verbose -v").succeeds();
    assert!(run.stderr.contains(&root.display().to_string()), "{}", run.stderr);
}

#[test]
fn commands_that_are_verbose_once_print_detail_without_a_log() {
    let run = daemon().command().line("-v ls").succeeds();
    assert!(run.text().contains("ORIGIN"), "{}", run.text());
    assert_eq!(run.stderr, "");
}

#[test]
fn verbose_df_is_a_table_of_models_without_a_log() {
    let daemon = daemon();
    let run = daemon.command().line("df -v").succeeds();
    assert!(run.text().contains("m:latest"), "{}", run.text());
    assert_eq!(run.stderr, "");
    let again = daemon.command().line("-v df").succeeds();
    assert_eq!(without_free_space(&again.text()), without_free_space(&run.text()));
}

/// A table of `df` without the line on the disk's free space: every other process on the machine changes it.
fn without_free_space(table: &str) -> Vec<&str> {
    table.lines().filter(|line| !line.starts_with("disk ")).collect()
}
