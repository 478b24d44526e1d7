//! Raw HTTP requests on the socket, valid and malformed.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use serde_json::Value as Json;

use crate::wait::DEADLINE;

/// The status and body of a response.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// The status; 0 if the connection was closed without a response.
    pub status: u16,
    /// The body as text.
    pub body: String,
}

impl Answer {
    /// The body as JSON.
    ///
    /// # Panics
    /// When it is not JSON.
    #[must_use]
    pub fn json(&self) -> Json {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }
}

/// Connects without sending anything.
///
/// # Panics
/// When no daemon listens.
#[must_use]
pub fn connect(socket: &Path) -> UnixStream {
    let stream = UnixStream::connect(socket).expect("the daemon listens");
    stream.set_read_timeout(Some(DEADLINE)).expect("a socket takes a timeout");
    stream.set_write_timeout(Some(DEADLINE)).expect("a socket takes a timeout");
    stream
}

/// Sends a request without a body.
///
/// # Panics
/// When there is no response in time.
#[must_use]
pub fn get(socket: &Path, path: &str) -> Answer {
    send(socket, format!("GET {path} HTTP/1.1\r\nHost: blobd\r\nConnection: close\r\n\r\n").as_bytes())
}

/// Sends a request with a body.
///
/// # Panics
/// As for [`get`].
#[must_use]
pub fn post(socket: &Path, path: &str, body: &str) -> Answer {
    let head = format!(
        "POST {path} HTTP/1.1\r\nHost: blobd\r\nConnection: close\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    send(socket, (head + body).as_bytes())
}

/// Sends bytes and reads until the daemon closes the connection.
///
/// # Panics
/// As for [`get`].
#[must_use]
pub fn send(socket: &Path, request: &[u8]) -> Answer {
    let mut stream = connect(socket);
    // The daemon may refuse a request without reading all of it.
    let _ = stream.write_all(request);
    read_answer(&mut stream)
}

/// Reads until the daemon closes the connection.
///
/// # Panics
/// When it does not in time.
#[must_use]
pub fn read_answer(stream: &mut UnixStream) -> Answer {
    let mut bytes = Vec::new();
    match stream.read_to_end(&mut bytes) {
        Ok(_) => {}
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => {}
        Err(error) => panic!("no response: {error}"),
    }
    let end = bytes.windows(4).position(|window| window == b"\r\n\r\n").unwrap_or(bytes.len());
    let head = String::from_utf8_lossy(&bytes[..end]);
    let body = bytes.get(end + 4..).unwrap_or_default();
    let body = match head.to_lowercase().contains("transfer-encoding: chunked") {
        true => String::from_utf8_lossy(&unchunked(body)).into_owned(),
        false => String::from_utf8_lossy(body).into_owned(),
    };
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
    Answer { status: status.unwrap_or(0), body }
}

/// The content of the chunks, up to the end of what has arrived.
fn unchunked(mut body: &[u8]) -> Vec<u8> {
    let mut content = Vec::new();
    while let Some(end) = body.windows(2).position(|window| window == b"\r\n") {
        let length = std::str::from_utf8(&body[..end]).ok();
        let Some(length @ 1..) = length.and_then(|length| usize::from_str_radix(length, 16).ok()) else {
            break;
        };
        let rest = &body[end + 2..];
        content.extend_from_slice(&rest[..length.min(rest.len())]);
        body = rest.get(length + 2..).unwrap_or_default();
    }
    content
}
