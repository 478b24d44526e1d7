//! HTTP on the socket, as from `curl --unix-socket`, with valid and malformed requests.

use std::io::{Read as _, Write as _};
use std::time::Duration;

use blobd_tests::daemon::TestDaemon;
use blobd_tests::http::{connect, get, post, read_answer, send};
use blobd_tests::model::ModelFile;
use blobd_tests::wait::eventually;
use serde_json::Value as Json;

fn daemon() -> TestDaemon {
    let daemon = TestDaemon::start();
    let path = ModelFile::dense(1).write_to(daemon.scratch(), "tiny.gguf");
    daemon.command().run(["import".as_ref(), path.as_os_str()]).succeeds();
    daemon
}

fn code(json: &Json) -> &str {
    json["error"]["code"].as_str().unwrap_or("none")
}

#[test]
fn every_query_has_a_json_response() {
    let daemon = daemon();
    let version = get(&daemon.socket(), "/v1/version").json();
    assert_eq!((version["protocol"].as_u64(), version["pid"].as_u64()), (Some(1), Some(daemon.pid().into())));
    assert_eq!(version["root"], daemon.root().to_str().unwrap());
    assert_eq!(get(&daemon.socket(), "/v1/models").json()["models"][0]["name"], "tiny:latest");
    assert_eq!(get(&daemon.socket(), "/v1/models/tiny").json()["architecture"], "llama");
    let manifest = get(&daemon.socket(), "/v1/manifests/tiny").json();
    assert_eq!(manifest["schemaVersion"], 2);
    let summary = &daemon.client().models().unwrap().models[0];
    assert_eq!(daemon.client().manifest(&"tiny".parse().unwrap()).unwrap().digest(), summary.digest);
    assert_eq!(code(&get(&daemon.socket(), "/v1/manifests/nobody").json()), "not_found");
    assert!(get(&daemon.socket(), "/v1/df").json()["physical_bytes"].as_u64().unwrap() > 0);
    assert_eq!(get(&daemon.socket(), "/v1/ps").json()["sessions"], Json::Array(Vec::new()));
}

#[test]
fn verbs_take_json_bodies() {
    let daemon = daemon();
    let socket = daemon.socket();
    assert_eq!(post(&socket, "/v1/gc", r#"{"dry_run":true}"#).json()["dry_run"], true);
    let tagged = post(&socket, "/v1/tag", r#"{"source":"tiny","target":"me/x:1"}"#);
    assert_eq!(tagged.json()["name"], "me/x:1");
    assert_eq!(get(&socket, "/v1/models/me%2Fx%3A1").json()["name"], "me/x:1");
    let removed = post(&socket, "/v1/remove", r#"{"references":["tiny","me/x:1"]}"#).json();
    assert_eq!(removed["removed"].as_array().unwrap().len(), 2);
    assert!(removed["freed_bytes"].as_u64().unwrap() > 0 && removed["kept"].as_array().unwrap().is_empty());
}

#[test]
fn unknown_requests_are_refused_with_an_error() {
    let daemon = daemon();
    for (method, path) in [
        ("GET", "/"),
        ("GET", "/v1"),
        ("GET", "/v2/models"),
        ("DELETE", "/v1/models"),
        ("POST", "/v1/models"),
        ("GET", "/v1/tag"),
        ("OPTIONS", "*"),
        ("BREW", "/coffee"),
        ("GET", "/v1/models/../../etc/passwd"),
        ("GET", "/v1/models/%2e%2e%2f%2e%2e%2fetc%2fpasswd"),
        ("GET", "/v1/models/%00"),
        ("GET", "/v1/models/%zz"),
    ] {
        let request = format!("{method} {path} HTTP/1.1\r\nHost: blobd\r\nConnection: close\r\n\r\n");
        let response = send(&daemon.socket(), request.as_bytes());
        assert_eq!((response.status, code(&response.json())), (400, "invalid_request"), "{method} {path}");
    }
    let missing = get(&daemon.socket(), "/v1/models/nobody");
    assert_eq!((missing.status, code(&missing.json())), (404, "not_found"));
}

#[test]
fn invalid_bodies_are_refused_with_an_error() {
    let daemon = daemon();
    let deep = format!("{{\"references\":{}", "[".repeat(100_000));
    for (path, body) in [
        ("/v1/remove", ""),
        ("/v1/remove", "{}"),
        ("/v1/remove", "null"),
        ("/v1/remove", r#"{"references":"tiny"}"#),
        ("/v1/remove", r#"{"references":["../../x"]}"#),
        ("/v1/remove", r#"{"references":["tiny"],"force":true}"#),
        ("/v1/remove", deep.as_str()),
        ("/v1/gc", r#"{"dry_run":"yes"}"#),
        ("/v1/tag", r#"{"source":"tiny","target":"a/../b"}"#),
        ("/v1/tag", r#"{"source":"tiny","source":"tiny","target":"x"}"#),
        ("/v1/pull", "\u{0}"),
        ("/v1/pull", r#"{"reference":"file:///etc/passwd"}"#),
        ("/v1/open", r#"{"reference":"tiny"}"#),
        ("/v1/import", r#"{"file_name":"x"}"#),
    ] {
        let response = post(&daemon.socket(), path, body);
        let shown = &body[..body.len().min(80)];
        assert_eq!((response.status, code(&response.json())), (400, "invalid_request"), "{path} {shown}");
    }
    assert_eq!(get(&daemon.socket(), "/v1/models").json()["models"][0]["name"], "tiny:latest");
}

#[test]
fn body_that_is_too_long_is_refused() {
    let daemon = daemon();
    let response = post(&daemon.socket(), "/v1/remove", &" ".repeat((1 << 20) + 1));
    assert!([0, 400].contains(&response.status), "{response:?}");
    // A body that is announced and never sent must not be allocated.
    let mut stream = connect(&daemon.socket());
    let head = "POST /v1/remove HTTP/1.1\r\nHost: x\r\nContent-Length: 18446744073709551615\r\n\r\n";
    stream.write_all(head.as_bytes()).unwrap();
    assert_eq!(get(&daemon.socket(), "/v1/version").status, 200);
}

#[test]
fn head_that_is_too_long_or_malformed_is_refused() {
    let daemon = daemon();
    let long = format!("GET /v1/models HTTP/1.1\r\nHost: x\r\nX: {}\r\n\r\n", "x".repeat(1 << 20));
    let many = format!("GET /v1/models HTTP/1.1\r\n{}\r\n", "A: b\r\n".repeat(10_000));
    let path = format!("GET /{} HTTP/1.1\r\nHost: x\r\n\r\n", "x".repeat(100_000));
    for request in [
        &long,
        &many,
        &path,
        "\r\n\r\n\r\n\r\n",
        "GET\r\n\r\n",
        "\u{16}\u{3}\u{1}\u{0}",
        "GET / HTTP/9.9\r\n\r\n",
    ] {
        let mut stream = connect(&daemon.socket());
        let _ = stream.write_all(request.as_bytes());
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let response = read_answer(&mut stream);
        assert!(response.status == 0 || response.status >= 400, "{response:?}");
    }
    assert_eq!(get(&daemon.socket(), "/v1/version").status, 200);
}

#[test]
fn incomplete_head_has_a_time_limit() {
    let daemon = daemon();
    let mut slow: Vec<_> = (0..20).map(|_| connect(&daemon.socket())).collect();
    for stream in &mut slow {
        stream.write_all(b"GET /v1/models HTTP/1.1\r\nHo").unwrap();
    }
    assert_eq!(get(&daemon.socket(), "/v1/version").status, 200);
    for stream in &mut slow {
        let response = read_answer(stream);
        assert!([0, 408].contains(&response.status), "{response:?}");
    }
}

#[test]
fn one_connection_carries_several_requests() {
    let daemon = daemon();
    let mut stream = connect(&daemon.socket());
    for _ in 0..3 {
        stream.write_all(b"GET /v1/version HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
        let mut response = Vec::new();
        let mut buffer = [0; 4096];
        while !response.ends_with(b"}") {
            let count = stream.read(&mut buffer).unwrap();
            assert!(count > 0, "{}", String::from_utf8_lossy(&response));
            response.extend(&buffer[..count]);
        }
        assert!(response.starts_with(b"HTTP/1.1 200 "));
    }
}

#[test]
fn client_that_does_not_read_its_response_delays_no_other_client() {
    let daemon = daemon();
    let request = b"GET /v1/models/tiny HTTP/1.1\r\nHost: x\r\n\r\n".repeat(2000);
    let mut deaf = connect(&daemon.socket());
    deaf.set_nonblocking(true).unwrap();
    let mut sent = 0;
    while let Ok(count @ 1..) = deaf.write(&request[sent..]) {
        sent += count;
    }
    let rounds = std::cell::Cell::new(0);
    eventually("others are served", || {
        rounds.set(rounds.get() + 1);
        get(&daemon.socket(), "/v1/models").status == 200 && rounds.get() > 10
    });
    assert!(deaf.set_read_timeout(Some(Duration::from_secs(1))).is_ok());
}

#[test]
fn pull_that_fails_says_so_in_its_last_line() {
    let daemon = daemon();
    // Nothing listens on port 1.
    let response = post(&daemon.socket(), "/v1/pull", r#"{"reference":"http://127.0.0.1:1/a/b:c"}"#);
    assert_eq!(response.status, 200);
    let last = response.body.lines().rfind(|line| line.starts_with('{')).unwrap_or_default();
    let last: Json = serde_json::from_str(last).unwrap_or_else(|error| panic!("{error}: {response:?}"));
    assert_eq!(code(&last), "upstream");
}
