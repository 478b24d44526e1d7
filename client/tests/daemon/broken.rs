//! Opening a model from a daemon that dies, sends wrong data or speaks another protocol.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use blobd_client::Client;
use blobd_client::error::{ClientError, ModelError, ProtocolError};
use blobd_client::model::OpenModel;
use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use blobd_client::protocol::frame::{Frame, FrameError};
use blobd_client::protocol::request::{OpenParams, RenameParams};
use blobd_client::protocol::response::{HeaderLocation, OpenPiece};
use blobd_store_format::tensor::Experts;

use crate::fake::{Call, FakeModel, client_of};

fn open_from(response: impl Fn(Call) + Clone + Send + Sync + 'static) -> Result<OpenModel, ClientError> {
    client_of(response).open(&"tiny".parse().unwrap())
}

/// One tensor of 64 bytes, broken by `change`.
fn open_broken(change: impl Fn(&mut FakeModel)) -> Result<OpenModel, ClientError> {
    let mut model = FakeModel::new();
    let fd = model.add_file(&[7; 64]);
    model.add_tensor("t", Some(fd), 0, 64);
    change(&mut model);
    model.client().open(&"tiny".parse().unwrap())
}

fn protocol_error(result: Result<OpenModel, ClientError>) -> ProtocolError {
    match result {
        Err(ClientError::Protocol(error)) => error,
        Err(other) => panic!("{other}"),
        Ok(model) => panic!("{model:?}"),
    }
}

#[test]
fn error_instead_of_the_upgrade_keeps_its_code() {
    let body = r#"{"error":{"code":"not_found","message":"no model tiny:latest","hint":"pull it"}}"#;
    let error = open_from(move |call| call.respond(404, body)).unwrap_err();
    assert_eq!(error.code(), ErrorCode::NotFound);
    assert_eq!(error.to_string(), "no model tiny:latest; pull it");
}

#[test]
fn error_in_the_middle_keeps_its_code() {
    let error = open_from(|call| {
        let body = ErrorBody::new(ErrorCode::Corrupt, "blob sha256:12ab: gone");
        call.upgrade().send(&Frame::Error(body), &[]).unwrap();
    });
    assert_eq!(error.unwrap_err().code(), ErrorCode::Corrupt);
}

#[test]
fn daemon_that_dies_is_reported_at_every_step() {
    let mut model = FakeModel::new();
    for i in 0..100 {
        let fd = model.add_file(b"0123");
        model.add_tensor(&i.to_string(), Some(fd), 0, 4);
    }
    let model = Arc::new(model);
    let params = OpenParams::new("tiny".parse().unwrap());
    let deaths: [Arc<dyn Fn(Call) + Send + Sync>; 4] = [
        Arc::new(drop),
        Arc::new(|call| drop(call.upgrade())),
        Arc::new({
            let (model, params) = (Arc::clone(&model), params.clone());
            move |call| model.send_tables(&mut call.upgrade(), &params)
        }),
        Arc::new(move |call| {
            let mut connection = call.upgrade();
            model.send_tables(&mut connection, &params);
            let fds = vec![std::os::fd::AsFd::as_fd(&model.files[0]); 64];
            connection.send(&Frame::Fds { first: 0, count: 64 }, &fds).unwrap();
            connection.receive().unwrap();
        }),
    ];
    for death in deaths {
        let error = open_from(move |call| death(call)).unwrap_err();
        assert!(matches!(error, ClientError::Closed), "{error}");
    }
}

/// A daemon that ends while it runs its first request, and is replaced by one that serves.
fn first_ends_then(serve: impl Fn(Call) + Clone + Send + Sync + 'static) -> (Client, Arc<AtomicU32>) {
    let calls = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&calls);
    let client = client_of(move |call| {
        if counted.fetch_add(1, Ordering::SeqCst) > 0 {
            serve(call);
        }
    });
    (client, calls)
}

#[test]
fn open_is_repeated_once_if_its_daemon_is_replaced() {
    let mut model = FakeModel::new();
    let fd = model.add_file(&[7; 64]);
    model.add_tensor("t", Some(fd), 0, 64);
    let model = Arc::new(model);
    let (client, calls) = first_ends_then(move |call| model.serve(call));
    client.open(&"tiny".parse().unwrap()).unwrap();
    assert_eq!(calls.load(Ordering::SeqCst), 2);
    let (client, calls) = first_ends_then(drop);
    assert!(matches!(client.open(&"tiny".parse().unwrap()), Err(ClientError::Closed)));
    assert_eq!(calls.load(Ordering::SeqCst), 2);
}

#[test]
fn request_that_gives_another_result_when_repeated_is_sent_once() {
    let rename = RenameParams { source: "a".parse().unwrap(), target: "b".parse().unwrap(), force: false };
    let (client, calls) = first_ends_then(drop);
    assert!(matches!(client.rename(&rename), Err(ClientError::Closed)));
    assert_eq!(calls.load(Ordering::SeqCst), 1);
}

#[test]
fn error_is_that_of_the_daemon_that_ended_if_no_other_replaces_it() {
    let is_first = AtomicBool::new(true);
    let client = Client::with_connector(Arc::new(move || {
        if !is_first.swap(false, Ordering::SeqCst) {
            return Err(std::io::ErrorKind::ConnectionRefused.into());
        }
        let (ours, theirs) = UnixStream::pair()?;
        std::thread::spawn(move || Call::read(theirs).map(drop));
        Ok(ours)
    }));
    assert!(matches!(client.open(&"tiny".parse().unwrap()), Err(ClientError::Closed)));
}

#[test]
fn silent_daemon_runs_into_the_timeout() {
    let client = client_of(|call| {
        std::thread::sleep(Duration::from_secs(1));
        drop(call);
    });
    let client = client.with_timeout(Duration::from_millis(20));
    let error = client.open(&"tiny".parse().unwrap()).unwrap_err();
    assert!(matches!(error, ClientError::TimedOut), "{error}");
}

#[test]
fn oversize_frame_and_garbage_are_refused() {
    let error = open_from(|call| call.upgrade().send_bytes(&[0xff; 4]).unwrap());
    let limit = ProtocolError::Frame(FrameError::TooLong { found: u32::MAX as usize, limit: 1 << 20 });
    assert_eq!(protocol_error(error), limit);

    let error = open_from(|call| call.upgrade().send_bytes(b"\x04\0\0\0{[}]").unwrap());
    assert!(matches!(protocol_error(error), ProtocolError::Frame(FrameError::Malformed { .. })));
}

#[test]
fn frame_out_of_place_is_refused() {
    let error = open_from(|call| call.upgrade().send(&Frame::Ack { received: 0 }, &[]).unwrap());
    assert_eq!(protocol_error(error), ProtocolError::UnexpectedFrame { found: "ack", expected: "open" });
    for (change, found, expected) in [
        ((|model| model.head.tensor_count += 1) as fn(&mut FakeModel), "fds", "tensors"),
        (|model| model.head.tensor_count -= 1, "tensors", "fds"),
        (|model| model.head.layers[0].piece_count += 1, "tensors", "pieces"),
    ] {
        let error = protocol_error(open_broken(change));
        assert_eq!(error, ProtocolError::UnexpectedFrame { found, expected });
    }
}

#[test]
fn list_longer_than_announced_is_refused() {
    let error = open_broken(|model| {
        model.add_tensor("u", Some(0), 0, 64);
        model.add_tensor("v", Some(0), 0, 64);
        model.head.tensor_count = 2;
    });
    assert_eq!(protocol_error(error), ProtocolError::Count { what: "tensors", found: 3, expected: 2 });
    let error = open_from(|call| {
        let mut connection = call.upgrade();
        let mut head = FakeModel::new().head;
        head.tensor_count = 1;
        connection.send(&Frame::Open(head), &[]).unwrap();
        connection.send(&Frame::Tensors(Vec::new()), &[]).unwrap();
    });
    assert_eq!(protocol_error(error), ProtocolError::Count { what: "tensors", found: 0, expected: 1 });
}

#[test]
fn counts_above_the_limits_are_refused_at_once() {
    for change in [
        (|model| model.head.tensor_count = u64::MAX) as fn(&mut FakeModel),
        |model| model.head.fd_count = u32::MAX,
        |model| model.head.layers[0].piece_count = u64::MAX,
        |model| {
            model.add_layer("text/plain", None, 1);
            model.head.layers[0].piece_count = u64::MAX;
            model.head.layers[1].piece_count = 1;
        },
        |model| model.head.layers = vec![model.head.layers[0].clone(); 4097],
    ] {
        let error = protocol_error(open_broken(change));
        assert!(matches!(error, ProtocolError::TooMany { .. }), "{error}");
    }
}

#[test]
fn fewer_descriptors_than_announced_are_an_error() {
    let error = open_from(|call| {
        let mut connection = call.upgrade();
        let mut head = FakeModel::new().head;
        head.fd_count = 2;
        let file = tempfile::tempfile().unwrap();
        connection.send(&Frame::Open(head), &[]).unwrap();
        connection.send(&Frame::Fds { first: 0, count: 2 }, &[std::os::fd::AsFd::as_fd(&file)]).unwrap();
    });
    assert_eq!(protocol_error(error), ProtocolError::FdCount { found: 1, expected: 2 });

    let error = open_broken(|model| model.head.fd_count = 0);
    assert!(matches!(protocol_error(error), ProtocolError::Tensor { .. }));
}

#[test]
fn batches_that_do_not_follow_each_other_are_refused() {
    for (first, count) in [(1, 1), (0, 0), (0, 3)] {
        let error = open_from(move |call| {
            let mut connection = call.upgrade();
            let mut head = FakeModel::new().head;
            head.fd_count = 2;
            connection.send(&Frame::Open(head), &[]).unwrap();
            connection.send(&Frame::Fds { first, count }, &[]).unwrap();
        });
        let expected = ProtocolError::Batch { first, count, received: 0, fd_count: 2 };
        assert_eq!(protocol_error(error), expected);
    }
}

#[test]
fn tensor_with_an_invalid_location_is_refused() {
    for change in [
        (|model| model.tensors[0].fd = Some(1)) as fn(&mut FakeModel),
        |model| model.tensors[0].fd = None,
        |model| model.tensors[0].layer = 1,
        |model| model.tensors[0].offset = u64::MAX,
        |model| model.tensors[0].experts = Some(Experts { count: 3, stride: 32 }),
        |model| model.tensors[0].experts = Some(Experts { count: u64::MAX, stride: 64 }),
    ] {
        let error = protocol_error(open_broken(change));
        assert!(matches!(error, ProtocolError::Tensor { .. }), "{error}");
    }
}

#[test]
fn layer_with_an_invalid_location_is_refused() {
    for change in [
        (|model| model.head.layers[0].fd = Some(1)) as fn(&mut FakeModel),
        |model| model.head.layers[0].header = Some(HeaderLocation { fd: 1, size: 1 }),
        |model| model.set_pieces(vec![OpenPiece::Fd { fd: 1, offset: 0, length: 64 }], 64),
        |model| model.set_pieces(vec![OpenPiece::Fd { fd: 0, offset: u64::MAX, length: 64 }], 64),
        |model| model.set_pieces(vec![OpenPiece::Fd { fd: 0, offset: 0, length: 63 }], 64),
        |model| model.set_pieces(vec![OpenPiece::Zeros { zeros: u64::MAX }; 2], 64),
        |model| {
            model.set_pieces(vec![OpenPiece::Zeros { zeros: 1 }], 1);
            model.pieces.push(model.pieces[0].clone());
            model.pieces[0].clear();
        },
    ] {
        let error = protocol_error(open_broken(change));
        assert!(matches!(error, ProtocolError::Layer { .. }), "{error}");
    }
}

#[test]
fn file_shorter_than_its_tensor_is_an_error_and_not_a_crash() {
    let model = open_broken(|model| {
        model.add_tensor("past", Some(0), 4096, 64);
        model.add_tensor("long", Some(0), 32, 33);
        let pieces = vec![OpenPiece::Fd { fd: 0, offset: 10, length: 60 }];
        model.set_pieces(pieces, 60);
        model.head.layers[0].header = Some(HeaderLocation { fd: 0, size: 65 });
    })
    .unwrap();
    assert_eq!(model.map("t").unwrap()[..], [7; 64]);
    for (name, expected) in [("past", 4160), ("long", 65)] {
        let error = model.map(name).unwrap_err();
        assert!(matches!(error, ModelError::Short { fd: 0, found: 64, expected: e } if e == expected));
        assert_eq!(error.code(), ErrorCode::Corrupt);
    }
    assert!(model.map_all().is_err());
    assert!(matches!(model.header(), Err(ModelError::Short { .. })));
    let error = model.write_layer(0, Vec::new()).unwrap_err();
    assert!(matches!(error, ModelError::Short { fd: 0, found: 64, expected: 70 }), "{error}");
}

#[test]
fn location_of_another_model_is_refused() {
    let model = open_broken(|_| {}).unwrap();
    let mut foreign = model.tensors()[0].clone();
    foreign.fd = Some(9);
    assert!(matches!(model.map_tensor(&foreign), Err(ModelError::NoFd { fd: 9, count: 1 })));
}
