//! Which requests have records, with what, and who can read them.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead as _, BufReader};

use blobd_client::protocol::audit::LogParams;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::reader::Reader;
use blobd_tests::temp_dirs::tmpfs_directory;
use serde_json::Value as Json;

use super::super::access::{
    ADMIN, CONFIG, READER, STRANGER, Shared, can_be_others, documented_requests, harmless,
};
use super::{config, files, import, records, results};

/// Requests without a record: they change nothing, give out no descriptors and control nothing.
const READING: [&str; 4] = ["POST /v1/pull/plan", "POST /v1/resolve", "POST /v1/inspect", "POST /v1/log"];

/// A new request must be here or have a record.
#[test]
fn every_request_that_can_change_something_has_a_record_even_if_it_is_refused() {
    if !can_be_others() {
        return;
    }
    let shared = Shared::start(CONFIG);
    let table = documented_requests();
    let requests: Vec<String> = table.keys().map(|request| harmless(request)).collect();
    let responses = shared.requests(STRANGER, &requests);
    let client = shared.daemon.client();
    let mut found = Vec::new();
    client.log(&LogParams::default(), |record| found.push(record)).unwrap();
    assert!(found.iter().all(|record| record.uid == 64001 && record.result == "denied"), "{found:#?}");
    let messages: BTreeSet<_> = found.iter().filter_map(|record| record.message.clone()).collect();
    for (request, (_, body)) in table.keys().zip(&responses) {
        let is_recorded = messages.contains(body["error"]["message"].as_str().unwrap_or_default());
        let expected = request.starts_with("POST ") && !READING.contains(&request.as_str());
        assert_eq!(is_recorded, expected, "{request}: {body}: {messages:#?}");
    }
}

#[test]
fn record_says_who_did_what_to_which_model_with_what_result() {
    let daemon = TestDaemon::start();
    let blobd = daemon.command();
    import(&blobd, daemon.scratch(), 1, "m");
    for line in [
        "tag m n",
        "rename n o",
        "pin o",
        "unpin o",
        "edit m e --set a=b",
        "rm --keep 1d e",
        "undelete e",
        "rm e",
        "gc --dry-run",
        "gc",
        "verify",
        "reindex",
        "limit 20MB",
        "partial rm --all",
    ] {
        blobd.line(line).succeeds();
    }
    blobd.line("rm absent").exits_with(3);
    let reader = Reader::open(&daemon.socket(), "m");
    blobd.run(["release", &reader.pid().to_string()]).succeeds();
    let all = records(&blobd, "");
    let expected = [
        "import ok",
        "tag ok",
        "rename ok",
        "pin ok",
        "unpin ok",
        "edit ok",
        "rm ok",
        "undelete ok",
        "rm ok",
        "gc ok",
        "gc ok",
        "verify ok",
        "reindex ok",
        "limit ok",
        "partial rm ok",
        "rm not_found",
        "open ok",
        "release ok",
    ];
    assert_eq!(results(&all), expected);
    let imported = &all[0];
    assert_eq!(imported["uid"], rustix::process::geteuid().as_raw());
    assert_eq!((&imported["model"], &imported["command"]), (&"m:latest".into(), &"blobd".into()));
    assert!(imported["bytes"].as_u64().unwrap() > 0 && imported["pid"].as_u64().is_some(), "{imported}");
    assert!(imported["digest"].as_str().unwrap().starts_with("sha256:"), "{imported}");
    assert!(humantime_has_milliseconds(imported["time"].as_str().unwrap()), "{imported}");
    assert_eq!(all[9]["dry_run"], true);
    assert_eq!(all[15]["model"], "registry.ollama.ai/library/absent:latest");
    assert!(all[15]["message"].as_str().unwrap().contains("absent"));
    assert_eq!(all[16]["pid"], reader.pid());
    assert!(all[16]["bytes"].as_u64().unwrap() > 0, "{}", all[16]);
}

fn humantime_has_milliseconds(time: &str) -> bool {
    time.len() == "2026-11-24T10:00:00.500Z".len() && time.ends_with('Z')
}

#[test]
fn filters_apply_together() {
    let daemon = TestDaemon::start();
    let blobd = daemon.command();
    import(&blobd, daemon.scratch(), 1, "m");
    import(&blobd, daemon.scratch(), 2, "n");
    blobd.line("tag m copy").succeeds();
    blobd.line("rm n copy").succeeds();
    blobd.line("rm absent").exits_with(3);
    let found = |options: &str| results(&records(&blobd, options));
    assert_eq!(found("--model n"), ["import ok", "rm ok"], "one of several that were removed");
    assert_eq!(found("--verb rm"), ["rm ok", "rm not_found"]);
    assert_eq!(found("--verb rm --failed"), ["rm not_found"]);
    assert_eq!(found("--since 1h").len(), 5);
    assert!(found("--since 2100-01-01").is_empty() && found("--user 4242424").is_empty());
    assert_eq!(results(&records(&blobd, "")[..1]), ["import ok"]);
    let last = blobd.line("log -n 1 --json").succeeds().json();
    assert_eq!(last["result"], "not_found");
    let digest =
        records(&blobd, "--model m")[0]["digest"].as_str().unwrap()["sha256:".len()..][..12].to_owned();
    assert_eq!(found(&format!("--model {digest}")), ["import ok", "tag ok", "rm ok"]);
    blobd.line("log --since yesterday").exits_with(2);
    let table = blobd.line("log --failed -v").succeeds().text();
    assert!(
        table.starts_with("TIME ") && table.contains("not_found") && table.contains("process "),
        "{table}"
    );
}

#[test]
fn user_without_administration_reads_its_own_records_only() {
    if !can_be_others() {
        return;
    }
    let shared = Shared::start(CONFIG);
    shared.import();
    shared.run(READER, "rm m").exits_with(7);
    shared.run(ADMIN, "tag m n").succeeds();
    let own = shared.run(READER, "log --json").succeeds().text();
    assert_eq!(own.lines().count(), 1, "{own}");
    let own: Json = serde_json::from_str(&own).unwrap();
    assert_eq!((&own["uid"], &own["result"]), (&READER.uid.into(), &"denied".into()));
    assert_eq!(own["model"], Json::Null, "the rights are checked before the body is read");
    assert!(shared.run(READER, "log --user 64004 --json").succeeds().text().is_empty());
    assert_eq!(shared.run(ADMIN, "log --json").succeeds().text().lines().count(), 3);
    shared.run(STRANGER, "log").exits_with(7);
}

#[test]
fn follower_sees_records_as_they_are_written_over_rotations() {
    let folder = tmpfs_directory();
    let config = config(folder.path(), "[audit]\nmax_bytes = \"64 KiB\"\nkeep = 2\n");
    let daemon = TestDaemon::start_at(&folder.path().join("store"), Some(&config));
    let blobd = daemon.command();
    import(&blobd, folder.path(), 1, "m");
    let mut command = blobd.command();
    let mut follower = command.args(["log", "--follow", "--json", "--verb", "pin"]).spawn().unwrap();
    let mut lines = BufReader::new(follower.stdout.take().unwrap()).lines();
    let client = daemon.client();
    let reference = "m".parse().unwrap();
    let mut pinned = 0;
    while files(&folder.path().join("store/audit"))
        .last()
        .is_none_or(|file| !file.ends_with("audit-00000004.jsonl"))
    {
        client
            .pin(&blobd_client::protocol::request::PinParams {
                reference: Clone::clone(&reference),
                pinned: true,
            })
            .unwrap();
        pinned += 1;
    }
    for _ in 0..pinned {
        let record: Json = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
        assert_eq!(record["verb"], "pin");
    }
    follower.kill().unwrap();
    follower.wait().unwrap();
    assert_eq!(files(&folder.path().join("store/audit")).len(), 2);
}

#[test]
fn log_that_is_off_leaves_no_files_and_says_so() {
    let folder = tmpfs_directory();
    let config = config(folder.path(), "[audit]\nenabled = false\n");
    let daemon = TestDaemon::start_at(&folder.path().join("store"), Some(&config));
    import(&daemon.command(), folder.path(), 1, "m");
    let error = daemon.command().line("log --json").exits_with(3).error();
    assert!(error.hint.unwrap().contains("audit.enabled"));
    assert!(!folder.path().join("store/audit").exists());
}

#[test]
fn command_without_a_daemon_writes_and_reads_the_same_log() {
    let folder = tmpfs_directory();
    let blobd = blobd_tests::command::Blobd::at_root(&folder.path().join("store"));
    let path = ModelFile::dense(1).write_to(folder.path(), "m.gguf");
    blobd.run(["import", path.to_str().unwrap(), "--name", "m"]).succeeds();
    blobd.line("ls").succeeds();
    assert_eq!(results(&records(&blobd, "")), ["import ok"]);
    blobd.line("log --follow").exits_with(2);
    let usage = blobd.line("df --json").succeeds().json();
    let row = usage["rows"].as_array().unwrap().iter().find(|row| row["kind"] == "audit").unwrap().clone();
    let files = files(&folder.path().join("store/audit"));
    assert!(row["bytes"].as_u64().unwrap() >= fs::metadata(&files[0]).unwrap().len(), "{row}");
}
