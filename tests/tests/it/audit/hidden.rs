//! A user cannot hide a request from the log, however many requests it sends.

use std::fs;

use blobd_tests::wait::eventually;
use serde_json::Value as Json;

use super::super::access::{ADMIN, CONFIG, READER, Shared, can_be_others};
use super::{records, results};

/// Sends a request `times` times; each is refused.
fn refuse(shared: &Shared, request: &str, times: usize) {
    // In parts that fit a pipe: the responses are read when all requests of a part were written.
    for part in vec![request.to_owned(); times].chunks(100) {
        assert!(shared.requests(READER, part).iter().all(|(status, _)| *status == 403));
    }
}

fn count(records: &[Json]) -> u64 {
    records.iter().map(|record| record["details"]["records"].as_u64().unwrap()).sum()
}

#[test]
fn open_after_a_thousand_refusals_is_recorded_and_the_refusals_are_counted_without_another_request() {
    if !can_be_others() {
        return;
    }
    const REFUSALS: usize = 1500;
    let shared = Shared::start(CONFIG);
    shared.import();
    refuse(&shared, "POST /v1/remove {\"references\":[\"m\"]}", REFUSALS);
    shared.run(READER, "export m -o -").succeeds();
    let blobd = shared.daemon.command();
    let options = format!("--user {}", READER.uid);
    eventually("the export is recorded", || {
        results(&records(&blobd, &format!("{options} --verb export"))) == ["export ok"]
    });
    let verb = |verb: &str| records(&blobd, &format!("{options} --verb {verb}"));
    eventually("each refusal is recorded or counted", || {
        verb("rm").len() as u64 + count(&verb("audit")) == REFUSALS as u64
    });
    let omitted = verb("audit").remove(0);
    assert_eq!((&omitted["result"], &omitted["details"]["class"]), (&"omitted".into(), &"attempts".into()));
    assert!(omitted["details"]["requests"]["rm denied"].as_u64() > Some(0), "{omitted}");
    // The user sees that too.
    let own = shared.run(READER, "log --verb audit --json").succeeds().text();
    assert!(own.contains("omitted"), "{own}");
}

#[test]
fn refusals_are_counted_when_the_daemon_stops() {
    if !can_be_others() {
        return;
    }
    const REFUSALS: usize = 1500;
    let mut shared = Shared::start(CONFIG);
    shared.import();
    refuse(&shared, "POST /v1/gc {}", REFUSALS);
    shared.daemon.stop();
    shared.daemon.restart();
    let verb = |verb: &str| records(&shared.daemon.command(), &format!("--failed --verb {verb}"));
    assert_eq!(verb("gc").len() as u64 + count(&verb("audit")), REFUSALS as u64);
}

/// With a log of the smallest size, which such requests would fill many times.
#[test]
fn refusals_and_opens_do_not_displace_changes_from_the_log() {
    if !can_be_others() {
        return;
    }
    let shared = Shared::start(&format!("{CONFIG}[audit]\nmax_bytes = \"64 KiB\"\nkeep = 2\n"));
    shared.import();
    shared.run(ADMIN, "tag m n").succeeds();
    let name = "x".repeat(120);
    refuse(&shared, &format!("POST /v1/remove {{\"references\":[\"{name}\"]}}"), 900);
    (0..20).for_each(|_| drop(shared.run(READER, "export m -o -").succeeds()));
    let directory = shared.daemon.root().join("audit");
    let bytes = || {
        let sizes = fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len());
        sizes.sum::<u64>()
    };
    let blobd = shared.daemon.command();
    eventually("the opens are recorded", || !records(&blobd, "--verb export").is_empty());
    assert_eq!(results(&records(&blobd, "--verb import --verb tag")), ["import ok", "tag ok"]);
    assert!(records(&blobd, "--verb rm").len() < 900, "the log is large enough for all of them");
    assert!(bytes() <= 2 * (64 << 10), "{}", bytes());
}
