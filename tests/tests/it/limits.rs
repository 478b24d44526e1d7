//! Limits per client and per user: other clients are not affected, and resources are released.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd as _;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use blobd_client::protocol::connection::send_message;
use blobd_client::protocol::frame::Frame;
use blobd_store_format::gguf::GgmlType;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::http;
use blobd_tests::memory::status_bytes;
use blobd_tests::model::ModelFile;
use blobd_tests::raw_gguf::{RawGguf, id};
use blobd_tests::reader::Reader;
use blobd_tests::temp_dirs::tmpfs_directory;
use blobd_tests::wait::eventually;
use rustix::net::sockopt::set_socket_linger;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::multi_user::{USERS, can_be_others, run_as, shared_daemon};

/// More than a user may have.
const MANY_LEASES: &str = "1100";

fn import_small(daemon: &TestDaemon) {
    let path = ModelFile::dense(1).write_to(daemon.scratch(), "m.gguf");
    daemon.command().run(["import".as_ref(), path.as_os_str()]).succeeds();
}

/// A model with a long tensor table, whose tensors are all the same byte.
fn import_large(daemon: &TestDaemon, tensors: usize) {
    let mut gguf =
        RawGguf::new().key("general.architecture", id::STRING, blobd_tests::raw_gguf::string("llama"));
    for number in 0..tensors {
        gguf = gguf.tensor(format!("blk.{number}.w"), id::I8, &[1], number as u64 * 32);
    }
    let path = daemon.scratch().join("large.gguf");
    fs::write(&path, gguf.with_data(&vec![0; tensors * 32])).unwrap();
    daemon.command().run(["import".as_ref(), path.as_os_str()]).succeeds();
}

fn threads(daemon: &TestDaemon) -> usize {
    blobd_tests::memory::threads(daemon.pid())
}

/// Sends a request and reads nothing of the response.
fn ask(daemon: &TestDaemon, request: &str) -> UnixStream {
    let mut stream = http::connect(&daemon.socket());
    stream.write_all(request.as_bytes()).unwrap();
    stream
}

fn upgrade(path: &str, body: &str) -> String {
    format!(
        "POST {path} HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: blobd-fd/1\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
}

#[test]
fn user_with_all_its_leases_can_still_send_requests_and_end_them() {
    if !can_be_others() {
        return;
    }
    let daemon = shared_daemon();
    let mut file = ModelFile::empty();
    file.add_noise(1, "output.weight", GgmlType::I8, &[5000]);
    let path = file.write_to(daemon.scratch(), "m.gguf");
    daemon.command().run(["import".as_ref(), path.as_os_str()]).succeeds();
    let (descriptors, threads_before) = (daemon.idle_descriptors(), threads(&daemon));
    let user = USERS[0];
    let (reuid, regid) = (format!("--reuid={user}"), format!("--regid={user}"));
    let wrapper = ["setpriv", &reuid, &regid, "--clear-groups", "--"];
    let socket = daemon.socket();
    let arguments = [socket.to_str().unwrap(), "m", MANY_LEASES];
    let holder = Reader::try_open(&wrapper, "--lease".as_ref(), &arguments).unwrap();
    let count = |key: &str| holder.opened[key].as_u64().unwrap();
    assert!(count("leases") >= 100 && count("busy") > 0, "{}", holder.opened);
    for command in ["ps", "ls", "doctor", "show m"] {
        let words: Vec<_> = command.split(' ').collect();
        let run = run_as(user, &daemon, &words);
        assert!(run.code == 0 || command == "doctor", "{command}: {}", run.stderr);
        let run = daemon.command().line(command);
        assert!(run.code == 0 || command == "doctor", "{command} as root: {}", run.stderr);
    }
    let ended = run_as(user, &daemon, &["release", "m", "--json"]).succeeds().json();
    assert_eq!(ended["released"].as_array().unwrap().len() as u64, count("leases"));
    assert!(daemon.client().sessions().unwrap().sessions.is_empty());
    eventually("threads and descriptors are back", || {
        threads(&daemon) <= threads_before + 8 && daemon.open_descriptors() <= descriptors
    });
    drop(holder);
    assert!(Reader::try_open(&wrapper, &socket, &["m"]).is_ok());
}

/// 100 responses of 1.8 MB each, and 20 opens, none of which is read.
#[test]
fn unread_responses_use_little_memory_and_release_it() {
    let daemon = TestDaemon::start();
    import_large(&daemon, 12_000);
    import_small(&daemon);
    daemon.client().disk_usage().unwrap();
    let before = status_bytes(daemon.pid(), "VmRSS");
    let show = "GET /v1/models/large HTTP/1.1\r\nHost: x\r\n\r\n";
    let mut unread: Vec<_> = (0..100).map(|_| ask(&daemon, show)).collect();
    unread.extend((0..20).map(|_| ask(&daemon, &upgrade("/v1/open", r#"{"reference":"large"}"#))));
    let most = (0..20).map(|_| {
        assert!(!daemon.client().models().unwrap().models.is_empty());
        status_bytes(daemon.pid(), "VmRSS")
    });
    let most = most.max().unwrap();
    assert!(most < before + (80 << 20), "{} MiB, {} before", most >> 20, before >> 20);
    let small = daemon.client().model(&"m".parse().unwrap()).unwrap();
    assert!(!small.tensors.is_empty());
    drop(unread);
    eventually("the memory is given back", || status_bytes(daemon.pid(), "VmRSS") < before + (32 << 20));
    let large = daemon.client().model(&"large".parse().unwrap()).unwrap();
    assert_eq!(large.tensors.len(), 12_000);
    assert!(large.tensors.iter().enumerate().all(|(n, tensor)| tensor.name == format!("blk.{n}.w")));
    let open = daemon.client().open(&"large".parse().unwrap()).unwrap();
    assert_eq!(open.map_all().unwrap().len(), 12_000);
}

#[test]
fn client_that_reads_nothing_of_a_long_response_loses_its_connection() {
    let daemon = TestDaemon::start();
    import_large(&daemon, 6000);
    let mut slow = ask(&daemon, "GET /v1/models/large HTTP/1.1\r\nHost: x\r\n\r\n");
    let mut start = [0; 12];
    slow.read_exact(&mut start).unwrap();
    assert_eq!(&start, b"HTTP/1.1 200");
    eventually("it is closed", || daemon.connections() == 0);
    let mut rest = Vec::new();
    let _ = slow.read_to_end(&mut rest);
    assert!(!rest.ends_with(b"0\r\n\r\n"), "cut off");
}

/// A full TCP connection with `SO_LINGER`: the last close blocks.
fn lingering_socket() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut sender = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (receiver, _) = listener.accept().unwrap();
    sender.set_nonblocking(true).unwrap();
    while sender.write(&[0; 1 << 16]).is_ok() {}
    set_socket_linger(&sender, Some(Duration::from_secs(12))).unwrap();
    (sender, receiver)
}

fn check_answers_at_once(daemon: &TestDaemon) {
    let start = Instant::now();
    for _ in 0..5 {
        assert_eq!(http::get(&daemon.socket(), "/v1/version").status, 200);
    }
    assert!(start.elapsed() < Duration::from_secs(6), "{:?}", start.elapsed());
}

#[test]
fn descriptors_that_block_on_close_delay_no_other_client() {
    let daemon = TestDaemon::start();
    import_small(&daemon);
    let mut receivers = Vec::new();
    // In plain HTTP, where the kernel refuses them if it can.
    for _ in 0..4 {
        let (sender, receiver) = lingering_socket();
        let stream = http::connect(&daemon.socket());
        let sent = send_message(&stream, b"GET /v1/version HTTP/1.1\r\nHost: x\r\n\r\n", &[sender.as_fd()]);
        if let Err(error) = sent {
            assert_eq!(error.kind(), std::io::ErrorKind::PermissionDenied);
            // This process closes it last.
            set_socket_linger(&sender, None).unwrap();
        }
        drop(sender);
        receivers.push(receiver);
    }
    check_answers_at_once(&daemon);
    // After the upgrade of an import, which expects one descriptor: as that one, and as one too many.
    for extra in [false, true] {
        let (sender, receiver) = lingering_socket();
        let mut stream = ask(&daemon, &upgrade("/v1/import", r#"{"file_name":"x"}"#));
        let mut head = [0; 12];
        stream.read_exact(&mut head).unwrap();
        let frame = Frame::Fds { first: 0, count: 1 }.encode().unwrap();
        let fds = [sender.as_fd(), sender.as_fd()];
        let fds = if extra { &fds[..] } else { &fds[..1] };
        send_message(&stream, &frame, fds).unwrap();
        drop(sender);
        receivers.push(receiver);
        check_answers_at_once(&daemon);
    }
}

#[test]
fn sessions_that_break_the_protocol_log_one_line_per_second() {
    let daemon = TestDaemon::start();
    import_small(&daemon);
    let start = Instant::now();
    for _ in 0..200 {
        let mut stream = ask(&daemon, &upgrade("/v1/open", r#"{"reference":"m"}"#));
        let mut head = [0; 12];
        stream.read_exact(&mut head).unwrap();
        stream.write_all(b"\x05\x00\x00\x00hello").unwrap();
    }
    eventually("all have ended", || daemon.open_descriptors() < 60);
    let most = start.elapsed().as_secs() + 2;
    let lines = daemon.log().lines().filter(|line| line.contains("m:latest: ")).count() as u64;
    assert!((1..=most).contains(&lines), "{lines} lines in {most} s: {}", daemon.log());
}

/// A daemon that root starts as an ordinary user.
fn daemon_of_ordinary_user() -> TestDaemon {
    if !rustix::process::geteuid().is_root() {
        return TestDaemon::start();
    }
    let folder = tmpfs_directory();
    std::os::unix::fs::chown(folder.path(), Some(USERS[1]), Some(USERS[1])).unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let (reuid, regid) = (format!("--reuid={}", USERS[1]), format!("--regid={}", USERS[1]));
    let daemon = TestDaemon::start_under(&["setpriv", &reuid, &regid, "--clear-groups", "--"], folder);
    fs::set_permissions(daemon.scratch(), fs::Permissions::from_mode(0o777)).unwrap();
    daemon
}

/// An import as the daemon's own user, with the usual soft limit of open files: the kernel allows that
/// user as many descriptors in flight.
fn import_as_owner(daemon: &TestDaemon, path: &Path, name: &str) {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(1024), ..limit }).unwrap();
    let words = ["import", path.to_str().unwrap(), "--name", name];
    let run = if rustix::process::geteuid().is_root() {
        run_as(USERS[1], daemon, &words)
    } else {
        daemon.command().run(words)
    };
    setrlimit(Resource::Nofile, limit).unwrap();
    run.succeeds();
}

/// The kernel limits descriptors in flight per user: a client that does not receive its descriptors must not
/// make opens and imports of other clients fail.
#[test]
fn clients_that_receive_no_descriptors_leave_some_for_others_of_their_user() {
    if rustix::process::geteuid().is_root() && !can_be_others() {
        return;
    }
    let daemon = daemon_of_ordinary_user();
    let mut file = ModelFile::empty();
    for index in 0..100 {
        file.add_noise(1, &format!("blk.{index}.attn_q.weight"), GgmlType::I8, &[5000]);
    }
    let path = file.write_to(daemon.scratch(), "m.gguf");
    import_as_owner(&daemon, &path, "m");
    let body = r#"{"reference":"m"}"#;
    let silent: Vec<_> = (0..30).map(|_| ask(&daemon, &upgrade("/v1/open", body))).collect();
    for round in 0..3 {
        let model = daemon.client().open(&"m".parse().unwrap()).unwrap();
        assert_eq!(model.map_all().unwrap().len(), 100);
        import_as_owner(&daemon, &path, &format!("again-{round}"));
    }
    drop(silent);
    eventually("the sessions end", || daemon.client().sessions().unwrap().sessions.is_empty());
}
