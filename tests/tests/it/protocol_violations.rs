//! Clients that violate the protocol: other clients are not affected.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::net::UnixStream;

use blobd_client::protocol::connection::send_all;
use blobd_client::protocol::event::ImportProgress;
use blobd_client::protocol::frame::{Frame, FrameDecoder};
use blobd_store_format::gguf::GgmlType;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::http;
use blobd_tests::memory::status_bytes;
use blobd_tests::model::ModelFile;
use blobd_tests::store_dir::{check_empty, names, staged};
use blobd_tests::temp_dirs::tmpfs_directory;
use blobd_tests::wait::eventually;
use rustix::fs::{CWD, Mode, OFlags, openat};

/// A daemon with a model of more tensors than one batch of descriptors holds.
pub(super) fn daemon() -> TestDaemon {
    let daemon = TestDaemon::start();
    let mut file = ModelFile::empty();
    for index in 0..100 {
        file.add_noise(1, &format!("blk.{index}.attn_q.weight"), GgmlType::I8, &[5000]);
    }
    let path = file.write_to(daemon.scratch(), "m.gguf");
    daemon.command().run(["import".as_ref(), path.as_os_str()]).succeeds();
    daemon
}

/// Requests an upgrade and reads the head of the response byte by byte, because frames follow.
pub(super) fn upgrade(daemon: &TestDaemon, path: &str, body: &str) -> UnixStream {
    let mut stream = http::connect(&daemon.socket());
    let head = format!(
        "POST {path} HTTP/1.1\r\nHost: blobd\r\nConnection: upgrade\r\nUpgrade: blobd-fd/1\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all((head + body).as_bytes()).unwrap();
    let mut response = Vec::new();
    let mut byte = [0];
    while !response.ends_with(b"\r\n\r\n") {
        stream.read_exact(&mut byte).unwrap();
        response.extend(byte);
    }
    assert!(response.starts_with(b"HTTP/1.1 101 "), "{}", String::from_utf8_lossy(&response));
    stream
}

pub(super) fn open(daemon: &TestDaemon) -> UnixStream {
    upgrade(daemon, "/v1/open", r#"{"reference":"m"}"#)
}

fn import(daemon: &TestDaemon) -> UnixStream {
    upgrade(daemon, "/v1/import", r#"{"file_name":"evil.gguf"}"#)
}

/// Reads until the daemon closes the connection. Returns the received frames.
fn drain(stream: &mut UnixStream) -> Vec<Frame> {
    let (mut decoder, mut frames, mut buffer) = (FrameDecoder::new(), Vec::new(), [0; 4096]);
    // If the daemon closes a connection with unread bytes, the connection is reset.
    while let Ok(count @ 1..) = stream.read(&mut buffer) {
        decoder.push(&buffer[..count]);
        while let Ok(Some(frame)) = decoder.next_frame() {
            frames.push(frame);
        }
    }
    frames
}

/// Reads until the first batch of descriptors.
pub(super) fn read_to_first_batch(stream: &mut UnixStream) {
    let (mut decoder, mut buffer) = (FrameDecoder::new(), [0; 1]);
    loop {
        stream.read_exact(&mut buffer).unwrap();
        decoder.push(&buffer);
        if let Some(Frame::Fds { first: 0, .. }) = decoder.next_frame().unwrap() {
            return;
        }
    }
}

fn check_serves_others(daemon: &TestDaemon) {
    let model = daemon.client().open(&"m".parse().unwrap()).unwrap();
    assert_eq!(model.map_all().unwrap().len(), 100);
}

/// Asserts that no session keeps the model's bytes.
fn check_no_lease(daemon: &TestDaemon) {
    daemon.command().line("rm m").succeeds();
    eventually("the lease ends", || names(&daemon.root().join("blobs")).is_empty());
}

#[test]
fn client_that_never_acknowledges_is_disconnected_and_delays_no_other_client() {
    let daemon = daemon();
    let before = daemon.idle_descriptors();
    let mut silent: Vec<_> = (0..20).map(|_| open(&daemon)).collect();
    for _ in 0..5 {
        check_serves_others(&daemon);
    }
    for stream in &mut silent {
        drain(stream);
    }
    daemon.wait_for_descriptors(before);
    drop(silent);
    check_no_lease(&daemon);
}

#[test]
fn acknowledgement_of_anything_else_ends_the_session() {
    let daemon = daemon();
    for response in [
        Frame::Ack { received: 0 },
        Frame::Ack { received: 63 },
        Frame::Ack { received: u32::MAX },
        Frame::Fds { first: 0, count: 1 },
        Frame::Progress(ImportProgress { completed: 1, total: 1, ..ImportProgress::default() }),
    ] {
        let mut stream = open(&daemon);
        read_to_first_batch(&mut stream);
        stream.write_all(&response.encode().unwrap()).unwrap();
        assert_eq!(drain(&mut stream), [], "{response:?}");
    }
    check_serves_others(&daemon);
    check_no_lease(&daemon);
}

#[test]
fn invalid_frames_end_the_session() {
    let daemon = daemon();
    // The response comes when the index is complete. Building it takes memory.
    daemon.client().disk_usage().unwrap();
    let peak = status_bytes(daemon.pid(), "VmHWM");
    for garbage in [
        &b"\xff\xff\xff\xff"[..],
        b"\x01\x00\x10\x00",
        b"\x00\x00\x00\x00",
        b"\x05\x00\x00\x00hello",
        b"\x02\x00\x00\x00{}",
        b"\x10\x00\x00\x00[[[[[[[[[[[[[[[[",
        b"GET / HTTP/1.1\r\n\r\n",
    ] {
        let mut stream = open(&daemon);
        read_to_first_batch(&mut stream);
        stream.write_all(garbage).unwrap();
        assert_eq!(drain(&mut stream), [], "{garbage:?}");
    }
    // Threads take some memory on a busy machine; the frames announce gigabytes.
    assert!(status_bytes(daemon.pid(), "VmHWM") < peak + (64 << 20));
    check_serves_others(&daemon);
}

#[test]
fn client_that_disconnects_in_the_middle_leaves_nothing() {
    let daemon = daemon();
    let before = daemon.idle_descriptors();
    for _ in 0..30 {
        drop(open(&daemon));
        read_to_first_batch(&mut open(&daemon));
    }
    check_serves_others(&daemon);
    daemon.wait_for_descriptors(before);
    check_no_lease(&daemon);
}

#[test]
fn any_byte_sent_on_an_open_session_ends_it() {
    let daemon = daemon();
    let mut stream = open(&daemon);
    read_to_first_batch(&mut stream);
    stream.write_all(&Frame::Ack { received: 64 }.encode().unwrap()).unwrap();
    let mut buffer = [0; 4096];
    assert!(stream.read(&mut buffer).unwrap() > 0, "the second batch");
    stream.write_all(&Frame::Ack { received: 102 }.encode().unwrap()).unwrap();
    let sessions = || daemon.client().sessions().unwrap().sessions.len();
    eventually("the session begins", || sessions() == 1);
    stream.write_all(b"x").unwrap();
    eventually("the session ends", || sessions() == 0);
    assert_eq!(drain(&mut stream), []);
}

#[test]
fn frames_before_the_upgrade_are_not_served() {
    let daemon = daemon();
    let mut stream = http::connect(&daemon.socket());
    let body = r#"{"reference":"m"}"#;
    let head = format!(
        "POST /v1/open HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: blobd-fd/1\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    let early = Frame::Ack { received: 64 }.encode().unwrap();
    stream.write_all(&[head.as_bytes(), &early].concat()).unwrap();
    let mut response = Vec::new();
    let _ = stream.read_to_end(&mut response);
    assert!(
        !String::from_utf8_lossy(&response).contains("fd_count"),
        "{}",
        String::from_utf8_lossy(&response)
    );
    check_serves_others(&daemon);
}

#[test]
fn import_needs_exactly_one_file() {
    let daemon = TestDaemon::start();
    let path = ModelFile::dense(1).write_to(daemon.scratch(), "good.gguf");
    let good = File::open(&path).unwrap();
    let one = Frame::Fds { first: 0, count: 1 }.encode().unwrap();
    let two = Frame::Fds { first: 0, count: 2 }.encode().unwrap();
    let second = Frame::Fds { first: 1, count: 1 }.encode().unwrap();
    let ack = Frame::Ack { received: 1 }.encode().unwrap();
    let fd = good.as_fd();
    for (what, bytes, fds) in [
        ("none", &one, &[][..]),
        ("two promised", &two, &[fd, fd]),
        ("numbered wrongly", &second, &[fd]),
        ("another frame", &ack, &[fd]),
    ] {
        let mut stream = import(&daemon);
        send_all(&stream, bytes, fds).unwrap();
        assert_eq!(drain(&mut stream), [], "{what}");
        check_empty(daemon.root());
    }
    // More descriptors than announced are refused, too, and none stays open.
    let before = daemon.idle_descriptors();
    let mut stream = import(&daemon);
    send_all(&stream, &one, &[fd; 60]).unwrap();
    assert_eq!(drain(&mut stream), [], "sixty");
    check_empty(daemon.root());
    daemon.wait_for_descriptors(before);
}

#[test]
fn descriptor_that_cannot_be_read_is_refused() {
    let daemon = TestDaemon::start();
    let path = ModelFile::dense(1).write_to(daemon.scratch(), "good.gguf");
    let write_only = File::options().write(true).open(&path).unwrap();
    let path_only = openat(CWD, &path, OFlags::PATH, Mode::empty()).unwrap();
    let (socket, _other) = UnixStream::pair().unwrap();
    let (pipe, _writer) = std::io::pipe().unwrap();
    for (what, fd) in [
        ("write-only", write_only.as_fd()),
        ("a bare path", path_only.as_fd()),
        ("a socket", socket.as_fd()),
        ("a pipe", pipe.as_fd()),
    ] {
        let frames = import_fd(&daemon, fd);
        assert!(matches!(frames.last(), Some(Frame::Error(_))), "{what}: {frames:?}");
        check_empty(daemon.root());
    }
}

fn import_fd(daemon: &TestDaemon, fd: BorrowedFd<'_>) -> Vec<Frame> {
    let mut stream = import(daemon);
    send_all(&stream, &Frame::Fds { first: 0, count: 1 }.encode().unwrap(), &[fd]).unwrap();
    drain(&mut stream)
}

#[test]
fn file_that_is_opened_elsewhere_is_read_from_its_start() {
    let daemon = TestDaemon::start();
    let model = ModelFile::dense(1);
    let mut file = File::open(model.write_to(daemon.scratch(), "m.gguf")).unwrap();
    // The file offset of the client is neither used nor changed.
    let mut start = [0; 100];
    file.read_exact(&mut start).unwrap();
    assert!(matches!(import_fd(&daemon, file.as_fd()).last(), Some(Frame::Imported(_))));
    let mut rest = Vec::new();
    file.read_to_end(&mut rest).unwrap();
    assert!(rest == model.bytes()[100..]);
}

#[test]
fn import_ends_if_its_client_disconnects_before_sending_a_file() {
    let daemon = TestDaemon::start();
    let before = daemon.idle_descriptors();
    for _ in 0..20 {
        drop(import(&daemon));
    }
    daemon.wait_for_descriptors(before);
    assert_eq!(staged(daemon.root()), [""; 0]);
    check_empty(daemon.root());
}

/// The usual soft limit is 1024 open files. With it, one client with as many connections could block the
/// daemon.
#[test]
fn daemon_raises_its_soft_limit_of_descriptors() {
    let limited = ["sh", "-c", "ulimit -Sn 100; exec \"$0\" \"$@\""];
    let daemon = TestDaemon::start_under(&limited, tmpfs_directory());
    let held: Vec<_> = (0..200).map(|_| http::connect(&daemon.socket())).collect();
    let path = ModelFile::dense(1).write_to(daemon.scratch(), "m.gguf");
    daemon.command().run(["import".as_ref(), path.as_os_str()]).succeeds();
    assert!(daemon.client().open(&"m".parse().unwrap()).is_ok());
    drop(held);
}

#[test]
fn idle_connections_do_not_affect_other_clients() {
    let daemon = daemon();
    let held: Vec<_> = (0..300).map(|_| http::connect(&daemon.socket())).collect();
    check_serves_others(&daemon);
    assert_eq!(http::get(&daemon.socket(), "/v1/models").status, 200);
    drop(held);
}
