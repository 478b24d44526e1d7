//! Interactive use of a pull: interrupting it, its progress bar, changing its limit.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use blobd_tests::command::Blobd;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::programs;
use blobd_tests::registry::{FakeRegistry, Fault};
use blobd_tests::store_dir::staged;
use blobd_tests::temp_dirs::tmpfs_directory;
use blobd_tests::terminal::{Terminal, screen_after};
use blobd_tests::wait::eventually;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value as Json;

use super::{CONFIG, LICENSE, MODEL, registry_with};

const MIB: u64 = 1 << 20;

/// A model of some 15 MiB.
fn large() -> ModelFile {
    ModelFile::dense_of(1, 2, 512)
}

/// Starts a pull that Ctrl-C interrupts, even if SIGINT is ignored in the tests' own process.
fn start_pull(blobd: &Blobd, name: &str) -> Child {
    let mut command = Command::new("env");
    blobd.prepare(&mut command);
    command
        .args(["--default-signal=INT".as_ref(), programs::blobd().as_os_str()])
        .args(["pull", name, "--json"]);
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Sends SIGINT when the pull reports its first bytes.
fn interrupted(pull: Child) -> Output {
    let process = Pid::from_child(&pull);
    after_first_bytes(pull, || kill_process(process, Signal::INT).unwrap())
}

/// Runs `action` when the pull reports its first bytes, and waits for the pull's end.
fn after_first_bytes(mut pull: Child, action: impl FnOnce()) -> Output {
    let mut lines = BufReader::new(pull.stdout.take().unwrap()).lines();
    let some_has_come = |line: String| {
        let line: Json = serde_json::from_str(&line).unwrap();
        line["completed"].as_u64().is_some_and(|completed| completed > MIB)
    };
    assert!(lines.any(|line| some_has_come(line.unwrap())), "it ended before");
    action();
    lines.for_each(drop);
    pull.wait_with_output().unwrap()
}

fn check_interrupted_output(output: &Output) {
    assert_eq!(output.status.code(), Some(130), "{output:?}");
    let words = String::from_utf8_lossy(&output.stderr);
    assert_eq!(words.lines().count(), 1, "{words}");
    assert!(words.contains("stopped") && words.contains("the same command resumes"), "{words}");
}

fn check_resumes(blobd: &Blobd, name: &str, model: &ModelFile) {
    let done = blobd.run(["pull", name, "--json"]).succeeds().json_lines().pop().unwrap();
    assert!(done["already_stored_bytes"].as_u64().unwrap() > MIB / 2, "{done}");
    assert!(blobd.run(["export", name, "-o", "-"]).stdout == model.bytes());
}

#[test]
fn ctrl_c_prints_how_to_resume_and_stops_the_daemons_pull() {
    let (daemon, model) = (TestDaemon::start(), large());
    let registry = registry_with(&model);
    registry.add_fault("/cdn/", usize::MAX, Fault::Slow(100_000, Duration::from_millis(10)));
    let name = registry.name("library/tiny:latest");
    check_interrupted_output(&interrupted(start_pull(&daemon.command(), &name)));
    eventually("the pull has ended", || staged(daemon.root()).is_empty());
    registry.clear_faults();
    check_resumes(&daemon.command(), &name, &model);
}

#[test]
fn ctrl_c_without_a_daemon_keeps_what_has_arrived() {
    let (folder, model) = (tmpfs_directory(), large());
    let blobd = Blobd::at_root(&folder.path().join("store"));
    let registry = registry_with(&model);
    registry.add_fault("/cdn/", usize::MAX, Fault::Slow(100_000, Duration::from_millis(10)));
    let name = registry.name("library/tiny:latest");
    check_interrupted_output(&interrupted(start_pull(&blobd, &name)));
    registry.clear_faults();
    check_resumes(&blobd, &name, &model);
}

#[test]
fn pull_whose_daemon_dies_prints_how_to_resume() {
    let (mut daemon, model) = (TestDaemon::start(), large());
    let registry = registry_with(&model);
    registry.add_fault("/cdn/", usize::MAX, Fault::Slow(100_000, Duration::from_millis(10)));
    let name = registry.name("library/tiny:latest");
    let output = after_first_bytes(start_pull(&daemon.command(), &name), || daemon.kill());
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let error: Json = serde_json::from_slice(&output.stderr).unwrap();
    let hint = error["error"]["hint"].as_str().unwrap_or_default();
    assert!(hint.contains("the same command resumes"), "{error}");
    daemon.restart();
    registry.clear_faults();
    check_resumes(&daemon.command(), &name, &model);
}

/// Starts a pull on a terminal.
fn watch_pull(blobd: &Blobd, name: &str) -> (Child, Terminal) {
    let terminal = Terminal::new(24, 120);
    let mut command = blobd.command();
    command.args(["pull", name]).env("TERM", "xterm").stdout(Stdio::null()).stderr(terminal.another());
    (command.spawn().unwrap(), terminal)
}

/// The positions of the weights' progress bar, in MiB, each time it was drawn.
fn positions(shown: &str) -> Vec<f64> {
    let draws = shown.split(['\r', '\n']).map(|line| line.split_whitespace().collect::<Vec<_>>());
    let position = |words: Vec<&str>| {
        let slash = words.iter().position(|word| *word == "/")?;
        let number = |index: usize| words.get(index)?.parse::<f64>().ok();
        let unit_mib = match *words.get(slash.checked_sub(1)?)? {
            "MiB" => 1.0,
            "KiB" => 1.0 / 1024.0,
            _ => 0.0,
        };
        number(slash + 1).filter(|_| words.get(slash + 2) == Some(&"MiB"))?;
        Some(number(slash.checked_sub(2)?)? * unit_mib)
    };
    draws.filter_map(position).collect()
}

#[test]
fn progress_resumes_after_a_killed_daemon_and_never_decreases() {
    let (mut daemon, model) = (TestDaemon::start(), large());
    let registry = registry_with(&model);
    registry.add_fault("/cdn/", usize::MAX, Fault::Slow(20_000, Duration::from_millis(10)));
    let name = registry.name("library/tiny:latest");
    let mut all = Vec::new();
    for _ in 0..3 {
        let received = || daemon.client().disk_usage().unwrap().partial_bytes;
        let before = received();
        let (mut pull, shown) = watch_pull(&daemon.command(), &name);
        eventually("more has arrived", || received() > before + MIB / 2);
        eventually("it was shown", || !positions(&shown.shown_so_far()).is_empty());
        daemon.kill();
        assert!(!pull.wait().unwrap().success());
        all.push(positions(&shown.shown()));
        daemon.restart();
    }
    registry.clear_faults();
    let (mut pull, shown) = watch_pull(&daemon.command(), &name);
    assert!(pull.wait().unwrap().success());
    all.push(positions(&shown.shown()));
    // The last pull may end before anything is drawn.
    assert!(all[..3].iter().all(|positions| !positions.is_empty()), "{all:?}");
    assert!(all.concat().is_sorted() && all[1][0] > 0.0, "{all:?}");
}

#[test]
fn limit_is_shown_set_and_removed_while_a_pull_runs() {
    const SLOWLY: Duration = Duration::from_secs(3);
    let (daemon, model) = (TestDaemon::start(), large());
    let registry = registry_with(&model);
    let (blobd, name) = (daemon.command(), registry.name("library/tiny:latest"));
    assert_eq!(blobd.line("limit").succeeds().text(), "no limit\n");
    // The whole would take a minute.
    let set = blobd.line("limit 256KiB --json").succeeds().json();
    assert_eq!(set["bytes_per_second"], 256 << 10);
    assert_eq!(blobd.line("limit").succeeds().text(), "256 KiB/s\n");
    let (began, mut pull) = (Instant::now(), start_pull(&blobd, &name));
    thread::sleep(SLOWLY);
    assert!(pull.try_wait().unwrap().is_none(), "the limit holds");
    let (before, slow_for) = (daemon.client().disk_usage().unwrap().partial_bytes, began.elapsed());
    assert!(before < 6 * MIB, "{before} bytes at 256 KiB per second in {slow_for:?}");
    let lifted = Instant::now();
    assert_eq!(blobd.line("limit off").succeeds().text(), "no limit\n");
    let output = pull.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let rest = model.bytes().len() as u64 - before;
    let (slow, fast) = (before as f64 / slow_for.as_secs_f64(), rest as f64 / lifted.elapsed().as_secs_f64());
    assert!(fast > slow * 1.5, "{slow} and then {fast} bytes per second");
}

#[test]
fn limit_is_refused_without_a_daemon() {
    let folder = tmpfs_directory();
    let blobd = Blobd::at_root(&folder.path().join("store"));
    let error = blobd.line("limit 1MB --json").exits_with(3).error();
    assert!(error.hint.unwrap().contains("limit_rate"));
    assert_eq!(blobd.line("limit --json").succeeds().json()["bytes_per_second"], Json::Null);
}

#[test]
fn daemon_starts_with_the_limit_of_its_configuration() {
    let folder = tmpfs_directory();
    let config = folder.path().join("config.toml");
    std::fs::write(&config, "[transfer]\nlimit_rate = \"1 MiB\"\nmax_connections = 2\n").unwrap();
    let variable = format!("BLOBD_CONFIG={}", config.display());
    let daemon = TestDaemon::start_under(&["env", &variable], folder);
    assert_eq!(daemon.client().limit().unwrap().bytes_per_second, Some(MIB));
}

/// The license is small compared with the disk, so the message must not speak of that.
#[test]
fn message_names_the_quota_if_that_is_what_a_small_file_exceeds() {
    let folder = tmpfs_directory();
    let config = folder.path().join("config.toml");
    std::fs::write(&config, "[space]\nquota = \"512 KiB\"\n").unwrap();
    let variable = format!("BLOBD_CONFIG={}", config.display());
    let daemon = TestDaemon::start_under(&["env", &variable], folder);
    let registry = FakeRegistry::start().unwrap();
    let license = vec![b'x'; 480 << 10];
    let layers: [(&str, &[u8]); 2] = [(MODEL, &ModelFile::dense(1).bytes()), (LICENSE, &license)];
    registry.add_model("library/tiny:latest", CONFIG, &layers).unwrap();
    let run = daemon.command().run(["pull", &registry.name("library/tiny:latest"), "--json"]);
    let error = run.exits_with(6).error();
    let message = &error.message;
    assert!(
        message.contains("this needs 480 KiB, ") && message.contains("its quota is 512 KiB and "),
        "{message}"
    );
    assert!(message.contains(" are used; ") && !message.contains("on the disk"), "{message}");
}

#[test]
fn pull_that_does_not_fit_says_what_a_collection_would_free() {
    let folder = tmpfs_directory();
    let config = folder.path().join("config.toml");
    std::fs::write(&config, "[space]\nquota = \"4 MiB\"\n").unwrap();
    let variable = format!("BLOBD_CONFIG={}", config.display());
    let daemon = TestDaemon::start_under(&["env", &variable], folder);
    let registry = registry_with(&large());
    // The message needs a complete index.
    daemon.client().disk_usage().unwrap();
    let run = daemon.command().run(["pull", &registry.name("library/tiny:latest"), "--json"]);
    let error = run.exits_with(6).error();
    let hint = error.hint.unwrap();
    assert!(hint.contains("`blobd gc` would free nothing") && hint.contains("larger quota"), "{hint}");
}

/// Runs a pull that takes some time, with a line of progress every 50 ms.
fn stderr_of_slow_pull(words: &[&str]) -> String {
    let (folder, model) = (tmpfs_directory(), large());
    let registry = registry_with(&model);
    registry.add_fault("/cdn/", usize::MAX, Fault::Slow(100_000, Duration::from_millis(20)));
    let name = registry.name("library/tiny:latest");
    let mut command = Blobd::at_root(&folder.path().join("store")).command();
    command.args(["pull", &name]).args(words).env("BLOBD_PROGRESS_INTERVAL", "0.05");
    blobd_tests::command::run(&mut command).succeeds().stderr
}

#[test]
fn progress_without_a_terminal_is_lines_of_text() {
    let shown = stderr_of_slow_pull(&[]);
    let line = shown.lines().find(|line| line.contains("left")).unwrap_or_else(|| panic!("{shown}"));
    for part in ["/library/tiny:latest: ", "iB of 14.2 MiB (", "%), ", "iB/s, ", "s left"] {
        assert!(line.contains(part), "{line}");
    }
    assert!(!shown.contains('\r') && !shown.contains('\u{1b}'), "{shown:?}");
}

#[test]
fn json_and_quiet_have_no_lines_of_progress() {
    for option in ["--json", "--quiet"] {
        assert_eq!(stderr_of_slow_pull(&[option]), "", "{option}");
    }
}

#[test]
fn lines_of_progress_continue_while_nothing_arrives() {
    let (folder, model) = (tmpfs_directory(), large());
    let registry = registry_with(&model);
    registry.add_fault("/cdn/", usize::MAX, Fault::StallAfter(300_000, Duration::from_secs(600)));
    let name = registry.name("library/tiny:latest");
    let mut command = Blobd::at_root(&folder.path().join("store")).command();
    command.args(["pull", &name]).env("BLOBD_PROGRESS_INTERVAL", "0.2").stdout(Stdio::null());
    let mut pull = command.spawn().unwrap();
    let lines = BufReader::new(pull.stderr.take().unwrap()).lines().map(Result::unwrap);
    let silent = lines.filter(|line| line.contains("no progress for ") || line.contains("waiting for 127."));
    assert_eq!(silent.take(5).count(), 5);
    pull.kill().unwrap();
    pull.wait().unwrap();
}

#[test]
fn only_the_result_of_a_pull_stays_on_a_terminal() {
    for columns in [40, 80] {
        let (daemon, model) = (TestDaemon::start(), large());
        let registry = registry_with(&model);
        registry.add_fault("/cdn/", usize::MAX, Fault::Slow(100_000, Duration::from_millis(5)));
        let name = registry.name("library/tiny:latest");
        let terminal = Terminal::new(24, columns);
        let mut command = daemon.command().command();
        command.args(["pull", &name]).env("TERM", "xterm");
        command.stdout(terminal.another()).stderr(terminal.another());
        let mut pull = command.spawn().unwrap();
        drop(command);
        assert!(pull.wait().unwrap().success());
        let shown = terminal.shown();
        let host = registry.url().trim_start_matches("http://").to_owned();
        let screen = screen_after(&shown);
        assert!(screen[0].starts_with(&format!("{host}/library/tiny:latest")), "{columns}: {screen:?}");
        assert!(!screen.concat().contains(['█', '░']), "{columns}: {screen:?}");
        let bars = shown.split(['\r', '\n']).map(|bar| bar.trim_start_matches("\u{1b}[2K"));
        let too_wide = bars.clone().find(|bar| bar.chars().count() > usize::from(columns));
        assert_eq!(too_wide, None, "{columns}");
        assert!(bars.clone().any(|bar| bar.contains("iB/s")), "{columns}: {shown:?}");
    }
}

#[test]
fn terminal_that_cannot_show_bars_has_lines() {
    let (folder, model) = (tmpfs_directory(), large());
    let registry = registry_with(&model);
    registry.add_fault("/cdn/", usize::MAX, Fault::Slow(100_000, Duration::from_millis(20)));
    let name = registry.name("library/tiny:latest");
    let terminal = Terminal::new(24, 80);
    let mut command = Blobd::at_root(&folder.path().join("store")).command();
    command.args(["pull", &name]).env("TERM", "dumb").env("BLOBD_PROGRESS_INTERVAL", "0.05");
    let mut pull = command.stderr(terminal.another()).spawn().unwrap();
    drop(command);
    assert!(pull.wait().unwrap().success());
    let shown = terminal.shown();
    assert!(shown.contains("iB of 14.2 MiB (") && !shown.contains('\u{1b}'), "{shown:?}");
}

#[test]
fn json_of_a_pull_that_cannot_be_written_is_a_failure_although_the_model_is_stored() {
    let (folder, model) = (tmpfs_directory(), large());
    let registry = registry_with(&model);
    let blobd = Blobd::at_root(&folder.path().join("store"));
    let mut command = blobd.command();
    command.args(["pull", &registry.name("library/tiny:latest"), "--json"]);
    command.stdout(std::fs::File::create("/dev/full").unwrap());
    let error = blobd_tests::command::run(&mut command).exits_with(6).error();
    assert!(error.message.contains("standard output: cannot be written"), "{error:?}");
    assert_eq!(blobd.line("ls -q").succeeds().text().lines().count(), 1);
}
