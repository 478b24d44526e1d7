//! A minimal HTTP/1.1 client for the daemon.
//!
//! There is one request per connection. All data is received with `recvmsg`, because frames with
//! descriptors may directly follow the head of an upgrade response. Head, body and lines are limited, so
//! that a faulty daemon cannot exhaust this process's memory.

mod body;

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use serde::de::DeserializeOwned;

use self::body::BodyDecoder;
use crate::error::{ClientError, ProtocolError};
use crate::protocol::connection::{Connection, receive_message, send_all};
use crate::protocol::error::ErrorResponse;
use crate::protocol::request_id::{REQUEST_ID_HEADER, RequestId};
use crate::protocol::route::{self, AnswerKind, Encoded, Route};
use crate::protocol::{MAX_FDS_PER_BATCH, UPGRADE};

pub(crate) const MAX_HEAD_BYTES: usize = 16 << 10;
/// The longest body; the details of a model with 131,072 tensors are shorter.
pub(crate) const MAX_BODY_BYTES: usize = 256 << 20;
pub(crate) const MAX_LINE_BYTES: usize = 1 << 20;

pub(crate) struct Request {
    /// Without the ID and the end.
    head: String,
    body: Vec<u8>,
    max_fds: usize,
}

impl Request {
    /// The request of a route with these parameters.
    pub(crate) fn of<R: route::Request>(params: &R::Params) -> Result<Self, ClientError> {
        let Encoded { target, body } = R::encode(params).map_err(io::Error::from)?;
        Ok(Self::new(R::ROUTE, &target, body))
    }

    /// The request of a route with this path and query, and this JSON body.
    pub(crate) fn new(route: Route, target: &str, body: Option<Vec<u8>>) -> Self {
        let (headers, max_fds) = match route.answer() {
            AnswerKind::Frames => (format!("connection: upgrade\r\nupgrade: {UPGRADE}"), MAX_FDS_PER_BATCH),
            _ => ("connection: close".to_owned(), 0),
        };
        let mut head = format!("{} {target} HTTP/1.1\r\nhost: blobd\r\n{headers}\r\n", route.method().name());
        if let Some(body) = &body {
            head += &format!("content-type: application/json\r\ncontent-length: {}\r\n", body.len());
        }
        Self { head, body: body.unwrap_or_default(), max_fds }
    }

    pub(crate) fn send(self, stream: UnixStream, id: &RequestId) -> Result<Response, ClientError> {
        let mut bytes = format!("{}{REQUEST_ID_HEADER}: {id}\r\n\r\n", self.head).into_bytes();
        bytes.extend_from_slice(&self.body);
        let is_unread = match send_all(&stream, &bytes, &[]) {
            // The daemon may refuse the request and close early; its response can still be received.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => true,
            sent => sent.map(|()| false)?,
        };
        let mut wire = SocketReader::new(stream, self.max_fds);
        loop {
            let received = match wire.receive() {
                // Before the first byte of a response it says that the daemon has not read the request.
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset && wire.pending().is_empty() => {
                    return Err(ClientError::Io(error));
                }
                received => received?,
            };
            if !received {
                let reset = || io::Error::from(io::ErrorKind::ConnectionReset);
                return Err(if is_unread { ClientError::Io(reset()) } else { ClientError::Closed });
            }
            if let Some((head, length)) = parse_head(wire.pending())? {
                wire.consume(length);
                return Ok(Response { head, wire });
            }
        }
    }
}

/// A response whose head has been read.
pub(crate) struct Response {
    head: Head,
    wire: SocketReader,
}

impl Response {
    pub(crate) fn json<T: DeserializeOwned>(self) -> Result<T, ClientError> {
        let body = self.expect_status(200)?.body()?;
        from_json(&body)
    }

    pub(crate) fn bytes(self) -> Result<Vec<u8>, ClientError> {
        self.expect_status(200)?.body()
    }

    pub(crate) fn lines(self) -> Result<Lines, ClientError> {
        let Self { head, wire } = self.expect_status(200)?;
        Ok(Lines { decoder: head.body.ok_or_else(no_length)?, wire, text: Vec::new() })
    }

    pub(crate) fn into_connection(self) -> Result<Connection, ClientError> {
        let SocketReader { stream, received, start, fds, .. } = self.expect_status(101)?.wire;
        Ok(Connection::resume(stream, received.get(start..).unwrap_or_default(), fds))
    }

    /// Fails with the daemon's error unless the response has this status.
    fn expect_status(self, expected: u16) -> Result<Self, ClientError> {
        let found = self.head.status;
        if found == expected {
            return Ok(self);
        }
        let error = if found >= 400 { from_json::<ErrorResponse>(&self.body()?).ok() } else { None };
        Err(error.map_or(ProtocolError::Status { found, expected }.into(), |response| response.error.into()))
    }

    fn body(mut self) -> Result<Vec<u8>, ClientError> {
        let mut decoder = self.head.body.ok_or_else(no_length)?;
        let mut body = Vec::new();
        while !self.wire.decode(&mut decoder, &mut body)? {
            if body.len() > MAX_BODY_BYTES {
                return Err(ProtocolError::TooLong { what: "body", limit: MAX_BODY_BYTES as u64 }.into());
            }
        }
        Ok(body)
    }
}

/// A body that is read line by line.
pub(crate) struct Lines {
    decoder: BodyDecoder,
    wire: SocketReader,
    text: Vec<u8>,
}

impl Lines {
    /// The next line parsed as JSON; `None` after the last.
    pub(crate) fn next_json<T: DeserializeOwned>(&mut self) -> Result<Option<T>, ClientError> {
        let mut searched = 0;
        let mut complete = self.decoder.is_done();
        loop {
            let unsearched = self.text.get(searched..).unwrap_or_default();
            if let Some(end) = unsearched.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.text.drain(..=searched + end).collect();
                return from_json(&line).map(Some);
            }
            if complete {
                let rest = std::mem::take(&mut self.text);
                return if rest.is_empty() { Ok(None) } else { from_json(&rest).map(Some) };
            }
            searched = self.text.len();
            if searched > MAX_LINE_BYTES {
                return Err(ProtocolError::TooLong { what: "line", limit: MAX_LINE_BYTES as u64 }.into());
            }
            complete = self.wire.decode(&mut self.decoder, &mut self.text)?;
        }
    }
}

struct SocketReader {
    stream: UnixStream,
    received: Vec<u8>,
    start: usize,
    fds: VecDeque<OwnedFd>,
    max_fds: usize,
}

impl SocketReader {
    fn new(stream: UnixStream, max_fds: usize) -> Self {
        Self { stream, received: Vec::new(), start: 0, fds: VecDeque::new(), max_fds }
    }

    fn pending(&self) -> &[u8] {
        self.received.get(self.start..).unwrap_or_default()
    }

    fn consume(&mut self, length: usize) {
        self.start += length;
    }

    /// Waits for more bytes; `false` when the daemon has closed.
    fn receive(&mut self) -> io::Result<bool> {
        self.received.drain(..self.start);
        self.start = 0;
        let filled = self.received.len();
        self.received.resize(filled + RECEIVE_BYTES, 0);
        let free = self.received.get_mut(filled..).unwrap_or_default();
        let result = receive_message(&self.stream, free, &mut self.fds, self.max_fds);
        self.received.truncate(filled + result.as_ref().map_or(0, |count| *count));
        Ok(result? > 0)
    }

    /// Decodes received bytes into `out`, or waits for more; `true` when the body is complete.
    fn decode(&mut self, decoder: &mut BodyDecoder, out: &mut Vec<u8>) -> Result<bool, ClientError> {
        if decoder.is_done() {
            return Ok(true);
        }
        if self.pending().is_empty() && !self.receive()? {
            return Err(ClientError::Closed);
        }
        let used = decoder.decode(self.pending(), out)?;
        self.consume(used);
        Ok(decoder.is_done())
    }
}

#[derive(Debug, PartialEq, Eq)]
struct Head {
    status: u16,
    /// Absent when the head announces no body.
    body: Option<BodyDecoder>,
}

/// The head at the start of `bytes` and how long it is; `None` while it is not complete.
fn parse_head(bytes: &[u8]) -> Result<Option<(Head, usize)>, ProtocolError> {
    let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut response = httparse::Response::new(&mut headers);
    let parsed = response.parse(bytes);
    let parsed = parsed.map_err(|error| ProtocolError::NotHttp { reason: error.to_string() })?;
    let (httparse::Status::Complete(length), Some(status)) = (parsed, response.code) else {
        return if bytes.len() < MAX_HEAD_BYTES {
            Ok(None)
        } else {
            Err(ProtocolError::TooLong { what: "head", limit: MAX_HEAD_BYTES as u64 })
        };
    };
    Ok(Some((Head { status, body: announced_body(response.headers)? }, length)))
}

fn announced_body(headers: &[httparse::Header<'_>]) -> Result<Option<BodyDecoder>, ProtocolError> {
    let value = |name: &str| {
        let header = headers.iter().find(|header| header.name.eq_ignore_ascii_case(name))?;
        Some(String::from_utf8_lossy(header.value).trim().to_ascii_lowercase())
    };
    match (value("transfer-encoding"), value("content-length")) {
        (Some(encoding), _) if encoding == "chunked" => Ok(Some(BodyDecoder::chunked())),
        (Some(_), _) => Err(ProtocolError::Chunks),
        (None, Some(length)) => match length.parse() {
            Ok(length) if length <= MAX_BODY_BYTES as u64 => Ok(Some(BodyDecoder::counted(length))),
            Ok(_) => Err(ProtocolError::TooLong { what: "body", limit: MAX_BODY_BYTES as u64 }),
            Err(_) => Err(ProtocolError::NotHttp { reason: "content-length is not a number".to_owned() }),
        },
        (None, None) => Ok(None),
    }
}

fn from_json<T: DeserializeOwned>(json: &[u8]) -> Result<T, ClientError> {
    let malformed = |error: serde_json::Error| ProtocolError::Json { reason: error.to_string() };
    Ok(serde_json::from_slice(json).map_err(malformed)?)
}

fn no_length() -> ProtocolError {
    ProtocolError::NotHttp { reason: "neither content-length nor chunks".to_owned() }
}

/// The most header fields read; the daemon sends about five.
const MAX_HEADERS: usize = 32;

/// The receive size of one system call; the tables of an ordinary model take one or two.
const RECEIVE_BYTES: usize = 64 << 10;

#[cfg(test)]
mod tests;
