use std::io::{Read as _, Write as _};

use super::*;
use crate::protocol::error::ErrorCode;

fn id() -> RequestId {
    "test.1".parse().unwrap()
}

/// Sends a request to a peer that has already sent `bytes` and closed its end.
fn response(bytes: &[u8]) -> Result<Response, ClientError> {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    theirs.write_all(bytes).unwrap();
    theirs.shutdown(std::net::Shutdown::Write).unwrap();
    Request::new(Route::Models, "/v1/x", None).send(ours, &id())
}

fn json(bytes: &[u8]) -> Result<serde_json::Value, ClientError> {
    response(bytes)?.json()
}

#[test]
fn upgrade_request_has_headers_and_body() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let request = Request::new(Route::Open, "/v1/open", Some(br#"["a"]"#.to_vec()));
    theirs.write_all(b"HTTP/1.1 101 Switching Protocols\r\n\r\n").unwrap();
    drop(request.send(ours, &id()).unwrap());
    let mut text = String::new();
    theirs.read_to_string(&mut text).unwrap();
    let expected = "POST /v1/open HTTP/1.1\r\nhost: blobd\r\nconnection: upgrade\r\nupgrade: blobd-fd/1\r\n\
                    content-type: application/json\r\ncontent-length: 5\r\nx-request-id: test.1\r\n\r\n[\"a\"]";
    assert_eq!(text, expected);
}

#[test]
fn response_of_a_daemon_that_refuses_early_is_read() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    theirs.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n7").unwrap();
    drop(theirs);
    let response = Request::new(Route::Models, "/v1/x", None).send(ours, &id()).unwrap();
    assert_eq!(response.json::<u32>().unwrap(), 7);
}

#[test]
fn body_is_read_by_its_length_or_its_chunks() {
    for text in [
        "HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n{\"a\":1}",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n3\r\n{\"a\r\n4\r\n\":1}\r\n0\r\n\r\n",
    ] {
        assert_eq!(json(text.as_bytes()).unwrap()["a"], 1);
    }
}

#[test]
fn error_of_the_daemon_keeps_its_code() {
    let body = r#"{"error":{"code":"denied","message":"no","hint":"ask"}}"#;
    let text = format!("HTTP/1.1 403 Forbidden\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    let error = json(text.as_bytes()).unwrap_err();
    assert_eq!((error.code(), error.to_string().as_str()), (ErrorCode::Denied, "no; ask"));
}

#[test]
fn protocol_violations_are_reported() {
    type Check = fn(&ProtocolError) -> bool;
    let cases: [(&[u8], Check); 8] = [
        (b"SSH-2.0-OpenSSH_9.6\r\n", |e| matches!(e, ProtocolError::NotHttp { .. })),
        (b"HTTP/1.1 200 OK\r\n\r\n", |e| matches!(e, ProtocolError::NotHttp { .. })),
        (b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n", |e| matches!(e, ProtocolError::NotHttp { .. })),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\n", |e| *e == ProtocolError::Chunks),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999\r\n\r\n", |e| {
            matches!(e, ProtocolError::TooLong { what: "body", .. })
        }),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{]", |e| matches!(e, ProtocolError::Json { .. })),
        (b"HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\n\r\nhi", |e| {
            *e == ProtocolError::Status { found: 404, expected: 200 }
        }),
        (b"HTTP/1.1 101 Switching Protocols\r\n\r\n", |e| {
            *e == ProtocolError::Status { found: 101, expected: 200 }
        }),
    ];
    for (bytes, check) in cases {
        let error = json(bytes).unwrap_err();
        assert!(matches!(&error, ClientError::Protocol(e) if check(e)), "{error}");
    }
}

#[test]
fn early_close_is_reported() {
    for text in [
        "",
        "HTTP/1.1 200 OK\r\n",
        "HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{\"a\":1}",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n7\r\n{\"a\":1}\r\n",
    ] {
        let error = json(text.as_bytes()).unwrap_err();
        assert!(matches!(error, ClientError::Closed), "{text:?}: {error}");
    }
}

#[test]
fn endless_head_and_endless_line_are_cut_off() {
    let head = format!("HTTP/1.1 200 OK\r\nx: {}", "x".repeat(MAX_HEAD_BYTES));
    let error = json(head.as_bytes()).unwrap_err();
    assert!(matches!(error, ClientError::Protocol(ProtocolError::TooLong { what: "head", .. })), "{error}");

    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let writer = std::thread::spawn(move || {
        let head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nffffff\r\n";
        let line = vec![b'x'; 2 * MAX_LINE_BYTES];
        // The reader closes early.
        let _outcome = theirs.write_all(&[&head[..], &line].concat());
    });
    let mut lines = Request::new(Route::Models, "/", None).send(ours, &id()).unwrap().lines().unwrap();
    let error = lines.next_json::<u32>().unwrap_err();
    assert!(matches!(error, ClientError::Protocol(ProtocolError::TooLong { what: "line", .. })), "{error}");
    drop(lines);
    writer.join().unwrap();
}

#[test]
fn last_line_may_lack_a_newline() {
    let text =
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\n1\n2\r\n3\r\n2\n3\r\n1\r\n4\r\n0\r\n\r\n";
    let mut lines = response(text.as_bytes()).unwrap().lines().unwrap();
    let mut numbers = Vec::new();
    while let Some(number) = lines.next_json::<u32>().unwrap() {
        numbers.push(number);
    }
    assert_eq!(numbers, [1, 22, 34]);
}
