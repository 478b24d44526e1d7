//! `warm`, and the residency of a model in `ps` and `show`.

use std::io::{BufRead as _, BufReader};
use std::process::Stdio;

use blobd_fixtures::skipped::skipped;
use blobd_tests::reader::Reader;
use blobd_tests::wait::eventually;
use serde_json::Value;

use super::residency::{daemon, drop_cached};

const STACK_BYTES: u64 = 8 << 20;
const MODEL_BYTES: u64 = STACK_BYTES + (1 << 20);

#[test]
fn warm_reads_cold_bytes_and_reports_their_number() {
    let daemon = daemon();
    drop_cached(daemon.root());
    let warmed = daemon.command().line("warm m --json").succeeds().json();
    let number = |key: &str| warmed[key].as_u64().unwrap();
    assert!(number("bytes") > MODEL_BYTES && number("bytes") < MODEL_BYTES + 8192, "{warmed}");
    // Headers and configurations may be warm, because the daemon has read them.
    assert!(number("cold_bytes") >= MODEL_BYTES, "{warmed}");
    assert!(number("bytes_per_second") > 0 && warmed["seconds"].as_f64().unwrap() > 0.0);
    // Pages that the kernel is migrating count as absent, so both are retried.
    eventually("all is in memory", || {
        let warmed = daemon.command().line("warm m --json").succeeds().json();
        warmed["resident_bytes"] == warmed["bytes"]
    });
    eventually("the text says so", || {
        let again = daemon.command().line("warm m").succeeds().text();
        again.starts_with("m:latest: 9.0") && again.ends_with("were in memory already\n")
    });
}

#[test]
fn warm_works_without_a_daemon_and_on_one_component() {
    let mut daemon = daemon();
    daemon.stop();
    drop_cached(daemon.root());
    let warmed = daemon.embedded().line("warm m --component model --json").succeeds().json();
    assert!(warmed["cold_bytes"].as_u64().unwrap() >= MODEL_BYTES, "{warmed}");
    let error = daemon.embedded().line("warm m --component projector --json").exits_with(3).error();
    assert!(error.message.contains("component \"projector\""), "{error}");
    daemon.embedded().line("warm nothing").exits_with(3);
    daemon.embedded().line("warm m --lock much").exits_with(2);
}

#[test]
fn memory_stays_locked_until_the_command_ends() {
    let daemon = daemon();
    let mut command = daemon.command().command();
    command.args(["warm", "m", "--lock", "2MiB", "--json"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let warmed: Value = serde_json::from_str(&line).unwrap();
    let locked = warmed["locked_bytes"].as_u64().unwrap();
    assert!((1..=2 << 20).contains(&locked), "{warmed}");
    let held = blobd_tests::memory::status_bytes(child.id(), "VmLck");
    assert!(held >= locked && held < (2 << 20) + 8 * 4096, "{held}");
    rustix::process::kill_process(rustix::process::Pid::from_child(&child), rustix::process::Signal::TERM)
        .unwrap();
    assert!(child.wait().unwrap().success());
}

#[test]
fn lock_over_the_limit_reports_the_limit() {
    let daemon = daemon();
    // The limit does not apply to processes with CAP_IPC_LOCK.
    let script = "ulimit -l 0; exec setpriv --bounding-set -ipc_lock --inh-caps -ipc_lock \"$0\" \"$@\"";
    let mut command = std::process::Command::new("sh");
    command.args(["-c", script]).arg(blobd_tests::programs::blobd());
    command.args(["warm", "m", "--lock", "1MiB", "--json"]);
    daemon.command().prepare(&mut command);
    let run = blobd_tests::command::run(&mut command);
    if run.stderr.contains("setpriv") {
        skipped(format_args!("{}", run.stderr));
        return;
    }
    let error = run.exits_with(7).error();
    assert!(error.message.contains("RLIMIT_MEMLOCK is 0 B"), "{error}");
    assert!(error.hint.unwrap().contains("ulimit -l"));
}

#[test]
fn ps_and_show_report_what_is_in_memory() {
    let daemon = daemon();
    drop_cached(daemon.root());
    let reader = Reader::open(&daemon.socket(), "m");
    let session = || daemon.command().line("ps --json").succeeds().json()["sessions"][0].clone();
    let before = session();
    assert!(before["resident_bytes"].as_u64().unwrap() < 64 << 10, "{before}");
    assert!(before["model_bytes"].as_u64().unwrap() > MODEL_BYTES, "{before}");
    let shown = || daemon.command().line("show m --residency --json").succeeds().json();
    let stack = shown()["groups"][0].clone();
    assert_eq!((&stack["name"], &stack["experts"]), (&"blk.0.ffn_up_exps.weight".into(), &8.into()));
    assert_eq!((&stack["resident_experts"], &stack["bytes"]), (&0.into(), &STACK_BYTES.into()));
    // Pages that the kernel is migrating count as absent, so every check is retried.
    let warmed = |what: &str, holds: &dyn Fn() -> bool| {
        eventually(what, || {
            daemon.command().line("warm m").succeeds();
            holds()
        });
    };
    let is_all = |value: &Value, bytes: &str| value["resident_bytes"] == value[bytes];
    warmed("the session has all in memory", &|| is_all(&session(), "model_bytes"));
    warmed("all files are in memory", &|| is_all(&shown(), "bytes"));
    warmed("all experts are in memory", &|| shown()["groups"][0]["resident_experts"] == 8);
    assert_eq!(shown()["groups"][1]["name"], "other tensors");
    let contains = |line: &str, texts: [&str; 2]| {
        let table = daemon.command().line(line).succeeds().text();
        texts.iter().all(|text| table.contains(text))
    };
    warmed("show says so", &|| contains("show m --residency", ["8/8", "(100 %)"]));
    warmed("ps says so", &|| contains("ps", ["IN MEMORY", "(100 %)"]));
    drop(reader);
}
