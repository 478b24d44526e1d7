//! What people do while a pull runs: stop it, watch it, limit it.

use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use blobd_tests::command::Blobd;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::places::fast_folder;
use blobd_tests::programs;
use blobd_tests::registry::{FakeRegistry, Fault};
use blobd_tests::store_dir::staged;
use blobd_tests::wait::eventually;
use rustix::process::{Pid, Signal, kill_process};

use super::registry_with;

const MIB: u64 = 1 << 20;

/// A model of some 15 MiB.
fn large() -> ModelFile {
    ModelFile::dense_of(1, 2, 512)
}

/// A pull by somebody who can press Ctrl-C: whoever runs the tests may have it ignored.
fn start_pull(blobd: &Blobd, name: &str) -> Child {
    let mut command = Command::new("env");
    blobd.prepare(&mut command);
    command.args(["--default-signal=INT".as_ref(), programs::blobd().as_os_str()]).args(["pull", name]);
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

fn interrupted(registry: &FakeRegistry, pull: Child) -> Output {
    eventually("some has come", || registry.bytes_served() > 2 * MIB);
    kill_process(Pid::from_child(&pull), Signal::INT).unwrap();
    pull.wait_with_output().unwrap()
}

fn check_goodbye(output: &Output, name: &str) {
    assert_eq!(output.status.code(), Some(130), "{output:?}");
    let words = String::from_utf8_lossy(&output.stderr);
    assert_eq!(words.lines().count(), 1, "{words}");
    assert!(words.contains("stopped") && words.contains(&format!("`blobd pull {name}` goes on")), "{words}");
}

fn check_goes_on(blobd: &Blobd, name: &str, model: &ModelFile) {
    let done = blobd.run(["pull", name, "--json"]).succeeds().json_lines().pop().unwrap();
    assert!(done["reused_bytes"].as_u64().unwrap() > MIB / 2, "{done}");
    assert!(blobd.run(["export", name, "-o", "-"]).stdout == model.bytes());
}

#[test]
fn ctrl_c_says_how_to_go_on_and_the_daemon_stops_too() {
    let (daemon, model) = (TestDaemon::start(), large());
    let registry = registry_with(&model);
    registry.add_fault("/cdn/", usize::MAX, Fault::Slow(100_000, Duration::from_millis(10)));
    let name = registry.name("library/tiny:latest");
    check_goodbye(&interrupted(&registry, start_pull(&daemon.command(), &name)), &name);
    eventually("the pull has ended", || staged(daemon.root()).is_empty());
    registry.clear_faults();
    check_goes_on(&daemon.command(), &name, &model);
}

#[test]
fn ctrl_c_without_a_daemon_keeps_what_has_arrived() {
    let (folder, model) = (fast_folder(), large());
    let blobd = Blobd::at_root(&folder.path().join("store"));
    let registry = registry_with(&model);
    registry.add_fault("/cdn/", usize::MAX, Fault::Slow(100_000, Duration::from_millis(10)));
    let name = registry.name("library/tiny:latest");
    check_goodbye(&interrupted(&registry, start_pull(&blobd, &name)), &name);
    registry.clear_faults();
    check_goes_on(&blobd, &name, &model);
}

#[test]
fn limit_is_shown_set_and_lifted_while_a_pull_runs() {
    const SOON: Duration = Duration::from_secs(30);
    let (daemon, model) = (TestDaemon::start(), large());
    let registry = registry_with(&model);
    let (blobd, name) = (daemon.command(), registry.name("library/tiny:latest"));
    assert_eq!(blobd.line("limit").succeeds().text(), "no limit\n");
    // The whole would take four minutes.
    let set = blobd.line("limit 64KiB --json").succeeds().json();
    assert_eq!(set["bytes_per_second"], 64 << 10);
    assert_eq!(blobd.line("limit").succeeds().text(), "64.0 KiB per second\n");
    let mut pull = start_pull(&blobd, &name);
    std::thread::sleep(Duration::from_secs(2));
    assert!(pull.try_wait().unwrap().is_none(), "the limit holds");
    let lifted = Instant::now();
    assert_eq!(blobd.line("limit none").succeeds().text(), "no limit\n");
    let output = pull.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert!(lifted.elapsed() < SOON, "{:?}", lifted.elapsed());
}

#[test]
fn limit_is_refused_where_no_daemon_could_keep_to_it() {
    let folder = fast_folder();
    let blobd = Blobd::at_root(&folder.path().join("store"));
    let error = blobd.line("limit 1MB --json").exits_with(2).error();
    assert!(error.hint.unwrap().contains("limit_rate"));
    assert_eq!(blobd.line("limit --json").succeeds().json()["bytes_per_second"], serde_json::Value::Null);
}

#[test]
fn daemon_starts_with_the_limit_of_its_configuration() {
    let folder = fast_folder();
    let config = folder.path().join("config.toml");
    std::fs::write(&config, "[transfer]\nlimit_rate = \"1 MiB\"\nmax_connections = 2\n").unwrap();
    let variable = format!("BLOBD_CONFIG={}", config.display());
    let daemon = TestDaemon::start_under(&["env", &variable], folder);
    assert_eq!(daemon.client().limit().unwrap().bytes_per_second, Some(MIB));
}
