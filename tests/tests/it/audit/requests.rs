//! Which requests have records, what the records contain, and who can read them.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::time::Instant;

use blobd_client::protocol::request::PinParams;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::reader::Reader;
use blobd_tests::temp_dirs::tmpfs_directory;
use blobd_tests::wait::eventually;
use serde_json::Value as Json;

use super::super::access::{
    ADMIN, CONFIG, PULLER, READER, STRANGER, Shared, can_be_others, documented_requests, harmless,
};
use super::super::protocol_violations;
use super::{config, eventual_records, files, import, records, results};

/// Refused requests that only read are recorded too.
#[test]
fn every_request_that_is_refused_for_lack_of_a_right_has_a_record() {
    if !can_be_others() {
        return;
    }
    let shared = Shared::start(CONFIG);
    let table = documented_requests();
    let requests: Vec<String> = table.keys().map(|request| harmless(request)).collect();
    let responses = shared.requests(STRANGER, &requests);
    let refused = responses.iter().filter_map(|(_, body)| body["error"]["message"].as_str());
    let refused: BTreeSet<&str> = refused.collect();
    assert_eq!(refused.len(), table.values().filter(|right| *right != "none").count());
    let blobd = shared.daemon.command();
    eventually("each has a record", || records(&blobd, "").len() == refused.len());
    let found = records(&blobd, "");
    assert!(found.iter().all(|record| record["uid"] == 64001 && record["result"] == "denied"), "{found:#?}");
    let messages: BTreeSet<&str> = found.iter().filter_map(|record| record["message"].as_str()).collect();
    assert_eq!(messages, refused);
}

#[test]
fn unknown_verb_or_user_is_reported() {
    let daemon = TestDaemon::start();
    let blobd = daemon.command();
    let error = blobd.line("log --verb rmm --json").exits_with(2).error();
    assert_eq!(error.message, "log: verb: expected one such as pull, rm or evict, found \"rmm\"");
    assert_eq!(error.hint.as_deref(), Some("did you mean rm?"));
    for verb in ["evict", "scrub", "audit", "start", "export", "partial rm", "df users", "unpin", "unknown"] {
        blobd.run(["log", "--verb", verb]).succeeds();
    }
    let notes = blobd.line("log --user no-such-user").succeeds().stderr;
    assert_eq!(notes, "blobd: no user named no-such-user\nblobd: no such records\n");
    let notes = blobd.line("log --user 64999").succeeds().stderr;
    assert_eq!(notes, "blobd: no such records\n", "a number needs no name");
}

/// The test above cannot tell which requests have a record when they succeed.
#[test]
fn requests_that_read_have_no_record() {
    let daemon = TestDaemon::start();
    import(&daemon.command(), daemon.scratch(), 1, "m");
    for line in ["ls", "show m", "df", "ps", "doctor", "log", "history m", "pull --dry-run 127.0.0.1:1/a/b"] {
        assert!([0, 1, 5].contains(&daemon.command().line(line).code), "{line}");
    }
    daemon.command().line("rm m").succeeds();
    eventual_records(&daemon.command(), "", &["import ok", "rm ok"]);
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
        "promote m --dry-run",
        "gc",
        "verify",
        "reindex",
        "limit 20MB",
        "partial rm --all",
    ] {
        blobd.line(line).succeeds();
    }
    let key = daemon.scratch().join("key.pem");
    std::fs::write(&key, include_str!("../../../../daemon/keys/tests/p256.pem")).unwrap();
    blobd.run(["sign", "m", "--key", key.to_str().unwrap()]).succeeds();
    blobd.line("rm absent").exits_with(3);
    let reader = Reader::open(&daemon.socket(), "m");
    blobd.run(["release", &reader.pid().to_string()]).succeeds();
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
        "promote ok",
        "gc ok",
        "verify ok",
        "reindex ok",
        "limit ok",
        "partial rm ok",
        "sign ok",
        "rm not_found",
        "open ok",
        "release ok",
    ];
    let all = eventual_records(&blobd, "", &expected);
    let imported = &all[0];
    assert_eq!(imported["uid"], rustix::process::geteuid().as_raw());
    assert_eq!((&imported["model"], &imported["command"]), (&"m:latest".into(), &"blobd".into()));
    assert!(imported["bytes"].as_u64().unwrap() > 0 && imported["pid"].as_u64().is_some(), "{imported}");
    assert!(imported["digest"].as_str().unwrap().starts_with("sha256:"), "{imported}");
    assert!(humantime_has_milliseconds(imported["time"].as_str().unwrap()), "{imported}");
    assert_eq!(all[9]["dry_run"], true);
    assert_eq!(all[16]["model"], "absent:latest");
    assert!(all[16]["message"].as_str().unwrap().contains("absent"));
    assert_eq!(all[17]["pid"], reader.pid());
    assert!(all[17]["bytes"].as_u64().unwrap() > 0, "{}", all[17]);
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
    eventual_records(&blobd, "", &["import ok", "import ok", "tag ok", "rm ok", "rm not_found"]);
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
fn source_of_a_new_name_is_recorded_and_found() {
    let daemon = TestDaemon::start();
    let blobd = daemon.command();
    import(&blobd, daemon.scratch(), 1, "m");
    blobd.line("tag m t").succeeds();
    blobd.line("edit m e --set a=b").succeeds();
    blobd.line("rename t r").succeeds();
    blobd.line("tag absent x").exits_with(3);
    let expected = ["import ok", "tag ok", "edit ok", "rename ok", "tag not_found"];
    let all = eventual_records(&blobd, "", &expected);
    let from = |record: &Json| record["details"]["from"].as_str().unwrap_or_default().to_owned();
    assert_eq!(
        all.iter().map(from).collect::<Vec<_>>(),
        ["", "m:latest", "m:latest", "t:latest", "absent:latest"]
    );
    assert_eq!(results(&records(&blobd, "--model m")), ["import ok", "tag ok", "edit ok"]);
    assert_eq!(results(&records(&blobd, "--model absent")), ["tag not_found"]);
}

#[test]
fn requests_that_change_nothing_cannot_fill_the_log() {
    if !can_be_others() {
        return;
    }
    const REQUESTS: usize = 3000;
    let shared = Shared::start(CONFIG);
    shared.import();
    let requests = vec!["POST /v1/partials/remove {}".to_owned(); REQUESTS];
    let start = Instant::now();
    let responses = shared.requests(PULLER, &requests);
    assert!(responses.iter().all(|(status, _)| *status == 200));
    // 1000 in each period of 10 seconds, and the first one above that.
    let most = 1001 * (1 + usize::try_from(start.elapsed().as_secs() / 10).unwrap());
    shared.run(ADMIN, "pin m").succeeds();
    let blobd = shared.daemon.command();
    eventually("the change is recorded", || records(&blobd, "--verb pin").len() == 1);
    let found = records(&blobd, "").iter().filter(|record| record["verb"] == "partial rm").count();
    assert!(found <= most && (found > 0 || most > REQUESTS), "{found} of {REQUESTS}, {most} at most");
}

#[test]
fn response_says_if_nothing_was_changed() {
    let daemon = TestDaemon::start();
    let blobd = daemon.command();
    import(&blobd, daemon.scratch(), 1, "m");
    for line in ["edit m e --set a=b --json", "tag m t --json"] {
        assert_eq!(blobd.line(line).succeeds().json()["unchanged"], Json::Null, "{line}");
        assert_eq!(blobd.line(line).succeeds().json()["unchanged"], true, "{line}");
    }
    for line in ["pin m --json", "unpin m --json"] {
        assert_eq!(blobd.line(line).succeeds().json()["pins"][0]["unchanged"], Json::Null, "{line}");
        assert_eq!(blobd.line(line).succeeds().json()["pins"][0]["unchanged"], true, "{line}");
    }
    let path = daemon.scratch().join("m.gguf");
    let again = blobd.run(["import", path.to_str().unwrap(), "--name", "m", "--json"]).succeeds().json();
    assert_eq!(again["imported"][0]["unchanged"], true);
}

/// Such a client can keep the descriptors that it has received.
#[test]
fn open_without_an_acknowledgement_is_recorded_with_what_was_sent() {
    let daemon = protocol_violations::daemon();
    let blobd = daemon.command();
    let mut stream = protocol_violations::open(&daemon);
    protocol_violations::read_to_first_batch(&mut stream);
    drop(stream);
    let all = eventual_records(&blobd, "", &["import ok", "open unacknowledged"]);
    let (imported, opened) = (&all[0], &all[1]);
    assert_eq!(opened["digest"], imported["digest"]);
    let number = |name: &str| opened["details"][name].as_u64().unwrap();
    assert!(number("descriptors") > 0 && number("descriptors") < number("blobs"), "{opened}");
    let bytes = opened["bytes"].as_u64().unwrap();
    assert!(bytes > 0 && bytes < imported["bytes"].as_u64().unwrap(), "{opened}");
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
    eventual_records(&shared.daemon.command(), "", &["import ok", "rm denied", "tag ok"]);
    let own = shared.run(READER, "log --json").succeeds().text();
    assert_eq!(own.lines().count(), 1, "{own}");
    let own: Json = serde_json::from_str(&own).unwrap();
    assert_eq!((&own["uid"], &own["result"]), (&READER.uid.into(), &"denied".into()));
    assert_eq!(own["model"], "m:latest");
    assert!(shared.run(READER, "log --user 64004 --json").succeeds().text().is_empty());
    // With the start of the daemon.
    assert_eq!(shared.run(ADMIN, "log --json").succeeds().text().lines().count(), 4);
    shared.run(STRANGER, "log").exits_with(7);
}

#[test]
fn follower_sees_records_as_they_are_written_over_rotations() {
    let folder = tmpfs_directory();
    let config = config(folder.path(), "[audit]\nmax_bytes = \"64 KiB\"\nkeep = 4\n");
    let daemon = TestDaemon::start_at(&folder.path().join("store"), Some(&config));
    let blobd = daemon.command();
    import(&blobd, folder.path(), 1, "m");
    let mut command = blobd.command();
    let mut follower = command.args(["log", "--follow", "--json"]).spawn().unwrap();
    let mut lines = BufReader::new(follower.stdout.take().unwrap()).lines();
    let mut verb = || {
        let record: Json = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
        record["verb"].as_str().unwrap().to_owned()
    };
    assert_eq!(verb(), "start");
    // From now on it follows.
    assert_eq!(verb(), "import");
    let client = daemon.client();
    let mut changes = 0;
    while files(&folder.path().join("store/audit"))
        .last()
        .is_none_or(|file| !file.ends_with("audit-00000006.jsonl"))
    {
        let (reference, pinned) = ("m".parse().unwrap(), changes % 2 == 0);
        client.pin(&PinParams { reference, pinned }).unwrap();
        changes += 1;
    }
    for change in 0..changes {
        assert_eq!(verb(), if change % 2 == 0 { "pin" } else { "unpin" });
    }
    follower.kill().unwrap();
    follower.wait().unwrap();
    let files = files(&folder.path().join("store/audit"));
    let bytes: u64 = files.iter().map(|file| fs::metadata(file).unwrap().len()).sum();
    assert!(bytes <= 4 * (64 << 10), "{files:?}");
}

#[test]
fn disabled_log_leaves_no_files_and_says_so() {
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
    eventual_records(&blobd, "", &["import ok"]);
    blobd.line("log --follow").exits_with(3);
    let usage = blobd.line("df --json").succeeds().json();
    let row = usage["rows"].as_array().unwrap().iter().find(|row| row["kind"] == "audit").unwrap().clone();
    let files = files(&folder.path().join("store/audit"));
    assert!(row["bytes"].as_u64().unwrap() >= fs::metadata(&files[0]).unwrap().len(), "{row}");
}
