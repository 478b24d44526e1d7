//! Malicious clients: the daemon, other clients and the model are not affected, and refusals have an error
//! code. Clients that only violate the protocol are in `protocol_violations`.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use blobd_client::protocol::connection::receive_message;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::http;
use blobd_tests::memory::status_bytes;
use blobd_tests::model::ModelFile;
use blobd_tests::oracle::sha256;
use blobd_tests::reader::Reader;
use blobd_tests::wait::eventually;
use serde_json::Value as Json;

use super::multi_user::{can_be_others, shared_daemon};

const AS_NOBODY: [&str; 5] = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--"];

/// Imports a model. Returns the digest of its tensors.
fn add_model(daemon: &TestDaemon) -> String {
    let model = ModelFile::dense(1);
    let path = model.write_to(daemon.scratch(), "m.gguf");
    daemon.command().run(["import".as_ref(), path.as_os_str()]).succeeds();
    sha256(&model.tensor_bytes())
}

/// Asserts that other clients can open the model quickly, with the right bytes.
fn check_serves_others(daemon: &TestDaemon, digest: &str) {
    let start = Instant::now();
    assert_eq!(Reader::open(&daemon.socket(), "m").touch(), digest);
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
}

fn check_refused(outcomes: &Json, ways: &[&str]) {
    for way in ways {
        let outcome = outcomes[*way].as_str().unwrap();
        let denied =
            ["Permission denied", "Operation not permitted", "Bad file descriptor", "Invalid argument"];
        assert!(denied.iter().any(|words| outcome.starts_with(words)), "{way}: {outcome}");
    }
}

#[test]
fn client_of_another_user_cannot_change_what_it_has_open() {
    if !can_be_others() {
        return;
    }
    let daemon = shared_daemon();
    let digest = add_model(&daemon);
    let mut rogue = Reader::try_open(&AS_NOBODY, &daemon.socket(), &["m"]).unwrap();
    let outcomes = rogue.tell("attack");
    assert!(outcomes.as_object().unwrap().len() == 10, "{outcomes}");
    let ways: Vec<_> = outcomes.as_object().unwrap().keys().map(String::as_str).collect();
    check_refused(&outcomes, &ways);
    assert_eq!(rogue.touch(), digest);
    check_serves_others(&daemon, &digest);
    daemon.command().line("verify m").succeeds();
}

/// A process of the daemon's own user, here root, can change its files by path. The descriptor alone gives no
/// way to write.
#[test]
fn passed_descriptor_gives_no_way_to_write() {
    let daemon = TestDaemon::start();
    let digest = add_model(&daemon);
    let model = daemon.client().open(&"m".parse().unwrap()).unwrap();
    for fd in (0..).map_while(|number| model.fd(number)) {
        assert!(rustix::io::write(fd, b"x").is_err());
        assert!(rustix::fs::ftruncate(fd, 0).is_err());
    }
    check_serves_others(&daemon, &digest);
}

#[test]
fn locks_on_descriptors_delay_no_other_client() {
    let daemon = TestDaemon::start();
    let digest = add_model(&daemon);
    let mut rogue = Reader::open(&daemon.socket(), "m");
    let locked = rogue.tell("lock");
    assert!(locked["flocked"].as_u64().unwrap() > 10 && locked["flocked"] == locked["locked"], "{locked}");
    check_serves_others(&daemon, &digest);
    daemon.command().line("verify m").succeeds();
    assert!(daemon.command().line("export m -o -").succeeds().stdout == ModelFile::dense(1).bytes());
    daemon.command().line("gc").succeeds();
    daemon.command().line("rm m").succeeds();
    drop(rogue);
    eventually("the bytes are freed", || daemon.client().disk_usage().unwrap().blob_count == 0);
}

#[test]
fn descriptors_passed_on_stay_readable_and_hold_no_lease() {
    let daemon = TestDaemon::start();
    let digest = add_model(&daemon);
    let path = daemon.scratch().join("fence.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let mut rogue = Reader::open(&daemon.socket(), "m");
    let passed = rogue.tell(&format!("pass {}", path.display()))["passed"].as_u64().unwrap();
    let (stream, _) = listener.accept().unwrap();
    let mut fds = VecDeque::new();
    receive_message(&stream, &mut [0], &mut fds, 64).unwrap();
    assert_eq!(fds.len() as u64, passed);
    rogue.kill();
    eventually("the lease ends with its client", || daemon.client().sessions().unwrap().sessions.is_empty());
    check_serves_others(&daemon, &digest);
    daemon.command().line("rm m").succeeds();
    for fd in fds {
        let mut bytes = Vec::new();
        File::from(fd).read_to_end(&mut bytes).unwrap();
        assert!(!bytes.is_empty());
    }
    eventually("descriptors without a lease keep nothing on disk for ever", || {
        daemon.command().line("gc").succeeds();
        daemon.client().disk_usage().unwrap().blob_count == 0
    });
}

/// Up to 10,000 connections, if the limit of open files permits it.
#[test]
fn ten_thousand_connections_of_one_user_do_not_affect_other_users() {
    if !can_be_others() {
        return;
    }
    let daemon = shared_daemon();
    let digest = add_model(&daemon);
    let socket = daemon.socket();
    let arguments = [socket.to_str().unwrap(), "10000"];
    let rogue = Reader::try_open(&AS_NOBODY, "--hold".as_ref(), &arguments).unwrap();
    println!("{}", rogue.opened);
    let count = |key: &str| rogue.opened[key].as_u64().unwrap();
    assert!(count("connected") > 1024, "{}", rogue.opened);
    assert!(count("connected") - count("refused") <= 1024, "{}", rogue.opened);
    assert_eq!(count("refused"), count("busy"), "each gets the reason");
    check_serves_others(&daemon, &digest);
    assert!(status_bytes(daemon.pid(), "VmRSS") < 128 << 20);
    let complaints = daemon.log().matches("too many connections").count();
    assert!(complaints < 10, "{complaints} lines in the log");
    let (code, error) = Reader::try_open(&AS_NOBODY, &socket, &["m"]).unwrap_err();
    assert_eq!(code, 4, "busy: {error}");
    assert!(error.contains("too many connections"), "{error}");
    drop(rogue);
    let open_again = || Reader::try_open(&AS_NOBODY, &socket, &["m"]).is_ok();
    eventually("the user can connect again after the connections are closed", open_again);
}

/// The start of an upgrade, up to the first frames.
fn open(daemon: &TestDaemon) -> UnixStream {
    let mut stream = http::connect(&daemon.socket());
    let body = r#"{"reference":"m"}"#;
    let length = body.len();
    let head = format!(
        "POST /v1/open HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: blobd-fd/1\r\nContent-Length: {length}\r\n\r\n{body}"
    );
    stream.write_all(head.as_bytes()).unwrap();
    let mut start = [0; 12];
    stream.read_exact(&mut start).unwrap();
    assert_eq!(&start, b"HTTP/1.1 101");
    stream
}

#[test]
fn half_closed_connection_ends_and_leaves_nothing() {
    let daemon = TestDaemon::start();
    let digest = add_model(&daemon);
    let before = daemon.idle_descriptors();
    // A client that has only shut down its read side still has a session.
    let halves = [Shutdown::Write, Shutdown::Both];
    let held: Vec<_> = halves
        .into_iter()
        .map(|half| {
            let stream = open(&daemon);
            stream.shutdown(half).unwrap();
            stream
        })
        .collect();
    check_serves_others(&daemon, &digest);
    // If a client still has descriptors in its receive queue, the daemon keeps only the connection: the
    // kernel counts these descriptors as the daemon's until they are received or the client closes its end.
    daemon.wait_for_descriptors(before + held.len());
    eventually("no session is left", || daemon.client().sessions().unwrap().sessions.is_empty());
    drop(held);
    daemon.wait_for_descriptors(before);
    let deaf = open(&daemon);
    deaf.shutdown(Shutdown::Read).unwrap();
    check_serves_others(&daemon, &digest);
    drop(deaf);
    daemon.wait_for_descriptors(before);
    // Before a request is complete, too.
    let mut early = http::connect(&daemon.socket());
    early.write_all(b"POST /v1/open HTTP/1.1\r\nHost: x\r\n").unwrap();
    early.shutdown(Shutdown::Write).unwrap();
    let mut rest = Vec::new();
    let _ = early.read_to_end(&mut rest);
    daemon.wait_for_descriptors(before);
}

#[test]
fn slow_frames_have_a_time_limit() {
    let daemon = TestDaemon::start();
    let digest = add_model(&daemon);
    let before = daemon.idle_descriptors();
    let (mut stream, start) = (open(&daemon), Instant::now());
    // A frame of the maximum length is announced, and sent byte by byte.
    let mut frame = 4096_u32.to_le_bytes().to_vec();
    frame.resize(1000, b' ');
    for byte in frame {
        if stream.write_all(&[byte]).is_err() {
            break;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    let time = start.elapsed();
    assert!(time > Duration::from_secs(5) && time < Duration::from_secs(30), "{time:?}");
    // As above: the connection itself is kept until the client receives its descriptors or closes its end.
    daemon.wait_for_descriptors(before + 1);
    check_serves_others(&daemon, &digest);
    drop(stream);
    daemon.wait_for_descriptors(before);
}

#[test]
fn oversized_frame_is_refused_before_its_content_arrives() {
    let daemon = TestDaemon::start();
    let digest = add_model(&daemon);
    let before = daemon.idle_descriptors();
    let mut streams: Vec<_> = (0..4).map(|_| open(&daemon)).collect();
    for stream in &mut streams {
        stream.write_all(&4097_u32.to_le_bytes()).unwrap();
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest);
    }
    daemon.wait_for_descriptors(before);
    check_serves_others(&daemon, &digest);
}

#[test]
fn garbage_requests_are_refused_with_a_code() {
    let daemon = TestDaemon::start();
    let digest = add_model(&daemon);
    let refused = |body: &str| {
        let response = http::post(&daemon.socket(), "/v1/open", body);
        (response.status, response.json()["error"]["code"].as_str().unwrap().to_owned())
    };
    for body in [
        "",
        "[]",
        "{",
        r#"{"reference":"../../etc/passwd"}"#,
        r#"{"reference":"m","tensors":{"experts":{"numbers":[-1]}}}"#,
        r#"{"reference":"m","tensors":{"experts":{"numbers":[0],"x":1}}}"#,
        r#"{"reference":"m","tensors":"some"}"#,
        r#"{"reference":"m","y":1}"#,
    ] {
        assert_eq!(refused(body), (400, "invalid_request".to_owned()), "{body}");
    }
    // As many expert numbers as fit: they must be looked up, not compared with every tensor.
    let many = vec!["18446744073709551615"; 40_000].join(",");
    let start = Instant::now();
    let body = format!(r#"{{"reference":"m","tensors":{{"experts":{{"numbers":[{many}]}}}}}}"#);
    let response = http::post(&daemon.socket(), "/v1/open", &body);
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    assert!(response.status == 101 || response.status >= 400, "{}", response.status);
    check_serves_others(&daemon, &digest);
}
