//! `blobd release` ends leases and keeps maps.

use blobd_tests::daemon::TestDaemon;
use blobd_tests::http;
use blobd_tests::model::ModelFile;
use blobd_tests::reader::Reader;
use blobd_tests::store_dir::names;

use super::multi_user::{USERS, can_be_others, run_as, shared_daemon};

fn import(daemon: &TestDaemon, name: &str) {
    let path = ModelFile::dense(1).write_to(daemon.scratch(), "m.gguf");
    let words = ["import", path.to_str().unwrap(), "--name", name];
    daemon.command().run(words).succeeds();
}

fn sessions(daemon: &TestDaemon) -> usize {
    daemon.client().sessions().unwrap().sessions.len()
}

/// A process of another user that has the model open.
fn reader_of(uid: u32, daemon: &TestDaemon) -> Reader {
    let (reuid, regid) = (format!("--reuid={uid}"), format!("--regid={uid}"));
    let wrapper = ["setpriv", &reuid, &regid, "--clear-groups", "--"];
    Reader::try_open(&wrapper, &daemon.socket(), &["m"]).unwrap()
}

#[test]
fn process_whose_leases_are_ended_keeps_its_maps_and_what_was_removed_is_freed() {
    let daemon = TestDaemon::start();
    import(&daemon, "m");
    let mut reader = Reader::open(&daemon.socket(), "m");
    let digest = reader.touch();
    daemon.command().line("rm m").succeeds();
    assert!(!names(&daemon.root().join("blobs")).is_empty(), "held by the lease");
    let released = daemon.command().line(&format!("release {}", reader.pid())).succeeds();
    let table = String::from_utf8(released.stdout).unwrap();
    assert!(table.contains("ENDED LEASE OF") && table.contains("m:latest"), "{table}");
    assert!(table.contains(&reader.pid().to_string()), "{table}");
    assert_eq!(sessions(&daemon), 0, "ended when the command is done");
    assert_eq!(reader.touch(), digest);
    let again = daemon.command().line(&format!("release {}", reader.pid()));
    assert_eq!(again.code, 3, "{}", again.stderr);
    drop(reader);
    // A mapped file stays on disk until it is unmapped.
    let freed = || names(&daemon.root().join("blobs")).is_empty();
    blobd_tests::wait::eventually("the bytes are freed", freed);
}

#[test]
fn leases_of_a_model_end_together_and_those_of_others_stay() {
    let daemon = TestDaemon::start();
    import(&daemon, "m");
    import(&daemon, "other");
    let readers = [Reader::open(&daemon.socket(), "m"), Reader::open(&daemon.socket(), "m")];
    let _other = Reader::open(&daemon.socket(), "other");
    let released = daemon.command().line("release M:latest --json").succeeds().json();
    let mut pids: Vec<_> =
        released["released"].as_array().unwrap().iter().map(|lease| lease["pid"].as_u64().unwrap()).collect();
    pids.sort_unstable();
    let mut expected: Vec<_> = readers.iter().map(|reader| u64::from(reader.pid())).collect();
    expected.sort_unstable();
    assert_eq!(pids, expected);
    assert_eq!(released["released"][0]["model"], "m:latest");
    let left = daemon.client().sessions().unwrap().sessions;
    assert_eq!(left.len(), 1);
    assert_eq!(left[0].model, "other:latest");
}

#[test]
fn release_of_a_model_that_is_not_open_is_not_found() {
    let daemon = TestDaemon::start();
    import(&daemon, "m");
    for (what, code) in [("m", 3), ("no-such-model", 3), ("1", 3), ("0", 2), ("../x", 2)] {
        let run = daemon.command().line(&format!("release {what}"));
        assert_eq!(run.code, code, "{what}: {}", run.stderr);
    }
    for body in ["{}", r#"{"pid":1,"reference":"m"}"#, r#"{"pid":0}"#, r#"{"pid":-1}"#, r#"{"x":1}"#] {
        assert_eq!(http::post(&daemon.socket(), "/v1/release", body).status, 400, "{body}");
    }
}

#[test]
fn leases_of_other_users_are_ended_only_by_an_administrator() {
    if !can_be_others() {
        return;
    }
    let daemon = shared_daemon();
    import(&daemon, "m");
    let [first, second] = USERS;
    let readers = [reader_of(first, &daemon), reader_of(second, &daemon)];
    let pid = readers[0].pid().to_string();
    let denied = run_as(second, &daemon, &["release", &pid]);
    assert_eq!(denied.code, 7, "{}", denied.stderr);
    assert_eq!(sessions(&daemon), 2);
    let own = run_as(second, &daemon, &["release", "m", "--json"]).succeeds().json();
    assert_eq!(own["released"].as_array().unwrap().len(), 1, "{own}");
    assert_eq!(own["released"][0]["uid"], second);
    assert_eq!(sessions(&daemon), 1);
    daemon.command().line(&format!("release {pid}")).succeeds();
    assert_eq!(sessions(&daemon), 0);
}
