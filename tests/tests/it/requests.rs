//! The IDs and the verbs of requests: in responses, errors, the log and the metrics.

use blobd_client::protocol::route::Route;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::http::{Answer, connect, get, read_answer};
use blobd_tests::model::ModelFile;
use blobd_tests::routes::{Models, request};
use blobd_tests::temp_dirs::tmpfs_directory;
use blobd_tests::wait::eventually;
use std::io::{Read as _, Write as _};

/// The head and body of the response to a request with these headers.
fn response(daemon: &TestDaemon, request: &str, headers: &str) -> String {
    let mut stream = connect(&daemon.socket());
    let request = format!(
        "{request} HTTP/1.1\r\nHost: blobd\r\nConnection: close\r\nContent-Length: 2\r\n{headers}\r\n{{}}"
    );
    stream.write_all(request.as_bytes()).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

fn id_of(response: &str) -> &str {
    let line = response.lines().find_map(|line| line.strip_prefix("x-request-id: "));
    line.unwrap_or_else(|| panic!("no ID: {response}"))
}

#[test]
fn response_has_the_id_of_its_request() {
    let daemon = TestDaemon::start();
    for id in ["a", "123e4567-e89b-12d3-a456-426614174000"] {
        let header = format!("X-Request-ID: {id}\r\n");
        assert_eq!(id_of(&response(&daemon, "GET /v1/models", &header)), id);
        let refused = response(&daemon, "POST /v1/tag", &header);
        assert_eq!(id_of(&refused), id);
        assert!(refused.contains(&format!("\"request\":\"{id}\"")), "{refused}");
    }
}

#[test]
fn malformed_or_missing_id_is_replaced() {
    let daemon = TestDaemon::start();
    let long = format!("X-Request-ID: {}\r\n", "a".repeat(65));
    let mut found = Vec::new();
    for header in ["", "X-Request-ID: a b\r\n", "X-Request-ID: \"\r\n", "X-Request-ID:\r\n", &long] {
        let text = response(&daemon, "GET /v1/version", header);
        let id = id_of(&text).to_owned();
        assert!(id.contains('.') && id.len() < 40 && !header.contains(&id), "{id}");
        found.push(id);
    }
    found.sort();
    found.dedup();
    assert_eq!(found.len(), 5, "each request has another ID: {found:?}");
}

/// The IDs in the lines of the log that contain `text`.
fn logged(daemon: &TestDaemon, text: &str) -> Vec<String> {
    let log = daemon.log();
    let lines = log.lines().filter(|line| line.contains(text));
    let ids = lines.filter_map(|line| Some(line.split_once("request{id=")?.1.split_once('}')?.0.to_owned()));
    ids.collect()
}

#[test]
fn lines_of_the_log_have_the_id_of_the_request_that_caused_them() {
    let daemon = TestDaemon::start_under(&["env", "BLOBD_LOG=debug"], tmpfs_directory());
    let model = ModelFile::dense(1).write_to(daemon.scratch(), "tiny.gguf");
    daemon.command().run(["import".as_ref(), model.as_os_str()]).succeeds();
    eventually("the import is logged", || logged(&daemon, "verb=\"import\"").len() == 1);
    // The import itself is logged on a blocking thread.
    assert_eq!(logged(&daemon, ": import uid="), logged(&daemon, "verb=\"import\""));
    daemon.command().line("export tiny -o -").succeeds();
    eventually("the open is logged", || logged(&daemon, "verb=\"export\"").len() == 1);
    assert_eq!(logged(&daemon, "opens tiny"), logged(&daemon, "verb=\"export\""));
    let error = daemon.command().line("tag nobody other --json").exits_with(3).error();
    assert_eq!(logged(&daemon, "verb=\"tag\""), [error.request.expect("errors of the daemon have an ID")]);
}

#[test]
fn requests_of_one_command_have_related_ids() {
    let daemon = TestDaemon::start_under(&["env", "BLOBD_LOG=debug"], tmpfs_directory());
    let files: Vec<_> = (0..2)
        .map(|seed| ModelFile::dense(seed).write_to(daemon.scratch(), &format!("m{seed}.gguf")))
        .collect();
    daemon.command().run(["import".as_ref(), files[0].as_os_str(), files[1].as_os_str()]).succeeds();
    eventually("both imports are logged", || logged(&daemon, "verb=\"import\"").len() == 2);
    let ids = logged(&daemon, "verb=\"import\"");
    let command = |id: &str| id.rsplit_once('.').expect("a number").0.to_owned();
    assert_eq!(command(&ids[0]), command(&ids[1]));
    assert_ne!(ids[0], ids[1]);
}

#[test]
fn id_is_in_the_last_line_of_a_stream() {
    let daemon = TestDaemon::start();
    let mut stream = connect(&daemon.socket());
    let body = r#"{"reference":"nobody"}"#;
    let request = format!(
        "POST /v1/verify HTTP/1.1\r\nHost: blobd\r\nConnection: close\r\nX-Request-ID: v-1\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(request.as_bytes()).unwrap();
    let Answer { status, body } = read_answer(&mut stream);
    assert_eq!(status, 200);
    assert!(body.contains("\"not_found\"") && body.contains("\"request\":\"v-1\""), "{body}");
}

#[test]
fn every_request_has_its_verb_in_the_log_and_in_the_metrics() {
    let daemon = TestDaemon::start_under(&["env", "BLOBD_LOG=debug"], tmpfs_directory());
    let model = ModelFile::dense(1).write_to(daemon.scratch(), "tiny.gguf");
    daemon.command().run(["import".as_ref(), model.as_os_str()]).succeeds();
    // Nothing listens there.
    let models = Models { stored: "tiny", source: "127.0.0.1:1/library/none" };
    for route in Route::ALL {
        let mut stream = connect(&daemon.socket());
        stream.write_all(request(&route.to_string(), models).as_bytes()).unwrap();
        let read = stream.read(&mut [0; 64]).unwrap();
        assert!(read > 0, "{route}: no response");
    }
    for route in Route::ALL {
        let logged_verb = format!("verb=\"{}\"", route.verb());
        eventually("the request is logged", || daemon.log().contains(&logged_verb));
        let counted = format!("verb=\"{}\"}}", route.verb().replace(' ', "_"));
        let counts = |text: &str| {
            text.lines().any(|line| line.starts_with("blobd_requests_total{") && line.contains(&counted))
        };
        eventually("the request is counted", || counts(&get(&daemon.socket(), Route::Metrics.path()).body));
    }
    assert!(!daemon.log().contains("verb=\"unknown\""));
    assert_eq!(get(&daemon.socket(), "/v1/no-such-request").status, 400);
    eventually("another one is unknown", || daemon.log().contains("verb=\"unknown\""));
}
