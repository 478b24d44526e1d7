use std::fs::File;
use std::io::{Read as _, Seek as _, Write as _};

use super::*;
use crate::protocol::event::ImportProgress;

fn pair() -> (Connection, Connection) {
    let (a, b) = UnixStream::pair().unwrap();
    (Connection::new(a), Connection::new(b))
}

fn file_with(text: &str) -> File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    file.rewind().unwrap();
    file
}

#[test]
fn descriptors_arrive_in_order_with_their_frame() {
    let (mut daemon, mut client) = pair();
    let files: Vec<_> = (0..MAX_FDS_PER_BATCH).map(|i| file_with(&i.to_string())).collect();
    let fds: Vec<_> = files.iter().map(AsFd::as_fd).collect();
    daemon.send(&Frame::Progress(ImportProgress { total: 1, ..ImportProgress::default() }), &[]).unwrap();
    daemon.send(&Frame::Fds { first: 0, count: 64 }, &fds).unwrap();

    assert_eq!(
        client.receive().unwrap(),
        Frame::Progress(ImportProgress { total: 1, ..ImportProgress::default() })
    );
    assert_eq!(client.receive().unwrap(), Frame::Fds { first: 0, count: 64 });
    for (i, fd) in client.take_fds(64).unwrap().into_iter().enumerate() {
        let flags = rustix::io::fcntl_getfd(&fd).unwrap();
        assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
        let mut text = String::new();
        File::from(fd).read_to_string(&mut text).unwrap();
        assert_eq!(text, i.to_string());
    }
}

#[test]
fn too_many_descriptors_are_not_sent() {
    let (mut daemon, _client) = pair();
    let file = file_with("x");
    let fds = vec![file.as_fd(); MAX_FDS_PER_BATCH + 1];
    let error = daemon.send(&Frame::Fds { first: 0, count: 65 }, &fds).unwrap_err();
    assert!(matches!(error, ConnectionError::Io(e) if e.kind() == io::ErrorKind::InvalidInput));
}

#[test]
fn surplus_descriptors_are_closed() {
    let (a, b) = UnixStream::pair().unwrap();
    let (reader, writer) = std::io::pipe().unwrap();
    let fds = [writer.as_fd(), writer.as_fd(), writer.as_fd()];
    send_message(&a, b"x", &fds).unwrap();
    let (mut queue, mut buffer) = (VecDeque::new(), [0; 8]);
    assert_eq!(receive_message(&b, &mut buffer, &mut queue, 1).unwrap(), 1);
    assert_eq!(queue.len(), 1);
    // The reader gets end of file only when no copy of the writing end is open.
    drop((writer, queue));
    assert_eq!({ reader }.read(&mut buffer).unwrap(), 0);
}

#[test]
fn fd_count_that_differs_from_the_frame_is_an_error() {
    let (mut daemon, mut client) = pair();
    let file = file_with("x");
    daemon.send(&Frame::Fds { first: 0, count: 2 }, &[file.as_fd()]).unwrap();
    client.receive().unwrap();
    let error = client.take_fds(2).unwrap_err();
    assert_eq!(
        error.to_string(),
        "connection: wrong number of descriptors with a frame: expected 2, found 1"
    );
}

#[test]
fn close_inside_a_frame_and_between_frames_are_distinguished() {
    let (a, b) = UnixStream::pair().unwrap();
    let mut client = Connection::new(b);
    send_all(&a, &[9, 0, 0, 0, b'{'], &[]).unwrap();
    drop(a);
    assert!(matches!(client.receive(), Err(ConnectionError::Closed { inside_frame: true })));

    let (daemon, mut client) = pair();
    drop(daemon);
    assert!(matches!(client.receive(), Err(ConnectionError::Closed { inside_frame: false })));
    let error = client.send(&Frame::Ack { received: 0 }, &[]).unwrap_err();
    assert!(matches!(error, ConnectionError::Closed { .. }), "{error}");
}

#[test]
fn receiving_nothing_within_the_timeout_is_an_error() {
    let (_daemon, stream) = UnixStream::pair().unwrap();
    stream.set_read_timeout(Some(Duration::from_millis(10))).unwrap();
    assert!(matches!(Connection::new(stream).receive(), Err(ConnectionError::TimedOut)));
}

#[test]
fn too_long_frame_and_invalid_json_are_frame_errors() {
    for bytes in [&u32::MAX.to_le_bytes()[..], b"\x02\0\0\0{]"] {
        let (a, b) = UnixStream::pair().unwrap();
        send_all(&a, bytes, &[]).unwrap();
        let error = Connection::new(b).receive().unwrap_err();
        assert!(matches!(error, ConnectionError::Frame(_)), "{error}");
    }
}

#[test]
fn long_frame_with_an_fd_arrives_complete() {
    let (mut daemon, mut client) = pair();
    let message = "x".repeat(crate::protocol::frame::MAX_FRAME_BYTES - 100);
    let body = crate::protocol::error::ErrorBody::new(crate::protocol::error::ErrorCode::Busy, message);
    let frame = Frame::Error(body);
    let sent = frame.clone();
    let sender = std::thread::spawn(move || {
        let file = file_with("x");
        daemon.send(&sent, &[file.as_fd()]).unwrap();
    });
    assert_eq!(client.receive().unwrap(), frame);
    assert_eq!(client.take_fds(1).unwrap().len(), 1);
    sender.join().unwrap();
}
