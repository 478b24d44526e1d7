//! Requests read and answers made, honest and spoilt.

use std::io::{self, Read};
use std::net::TcpStream;
use std::sync::Arc;

use super::{Fault, Request, Side};

/// What goes over the wire.
pub(super) struct Answer {
    pub(super) status: u16,
    pub(super) headers: Vec<(&'static str, String)>,
    pub(super) body: Arc<Vec<u8>>,
    pub(super) is_blob: bool,
    pub(super) content_length: Option<u64>,
    pub(super) fault: Option<Fault>,
}

impl Answer {
    pub(super) fn new(status: u16, body: impl Into<Vec<u8>>) -> Self {
        let body = Arc::new(body.into());
        let content_length = Some(body.len() as u64);
        Self { status, headers: Vec::new(), body, is_blob: false, content_length, fault: None }
    }

    pub(super) fn with(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.headers.push((name, value.into()));
        self
    }
}

/// The whole blob, or the one range that the request asks for.
pub(super) fn blob_answer(blob: &Arc<Vec<u8>>, request: &Request) -> Answer {
    let size = blob.len();
    let answer = match request.headers.get("range").and_then(|range| parse_range(range, size)) {
        None => Answer { body: Arc::clone(blob), content_length: Some(size as u64), ..Answer::new(200, "") },
        Some((first, end)) => Answer::new(206, blob.get(first..end).unwrap_or_default())
            .with("Content-Range", format!("bytes {first}-{}/{size}", end.saturating_sub(1))),
    };
    Answer { is_blob: true, ..answer }
}

fn parse_range(range: &str, size: usize) -> Option<(usize, usize)> {
    let (first, last) = range.strip_prefix("bytes=")?.split_once('-')?;
    let end = if last.is_empty() { size } else { last.parse::<usize>().ok()?.saturating_add(1).min(size) };
    Some((first.parse().ok().filter(|first| *first < end)?, end))
}

pub(super) fn challenge(realm: &str) -> Answer {
    let header = format!(r#"Bearer realm="{realm}",service="fake",scope="repository:any:pull""#);
    Answer::new(401, "{}").with("WWW-Authenticate", header)
}

/// The answer of a fault that has nothing to do with what was asked for.
pub(super) fn replaced(fault: &Fault, request: &Request) -> Option<Answer> {
    Some(match fault {
        Fault::Status(status) => Answer::new(*status, ""),
        Fault::TooManyRequests(seconds) => Answer::new(429, "").with("Retry-After", seconds.to_string()),
        Fault::Unauthorized(realm) => challenge(realm),
        Fault::RedirectTo(location) => Answer::new(307, "").with("Location", location.as_str()),
        Fault::RedirectLoop => Answer::new(307, "").with("Location", request.path.as_str()),
        Fault::WebPage => {
            Answer::new(200, "<!doctype html><title>Welcome</title>").with("Content-Type", "text/html")
        }
        Fault::Body(bytes) => Answer::new(200, bytes.as_slice()),
        _ => return None,
    })
}

/// An honest answer, spoilt.
pub(super) fn altered(mut answer: Answer, fault: Fault) -> Answer {
    let size = answer.body.len();
    let body = Arc::make_mut(&mut answer.body);
    match &fault {
        Fault::ContentLength(length) => answer.content_length = Some(*length),
        Fault::ShortBy(count) => {
            body.truncate(size.saturating_sub(*count));
            answer.content_length = Some(body.len() as u64);
        }
        Fault::ExtraBytes(count) => {
            body.resize(size + count, 0);
            answer.content_length = None;
        }
        Fault::CutAfter(count) => body.truncate(*count),
        Fault::FlipByte(offset) => body.iter_mut().skip(*offset).take(1).for_each(|byte| *byte = !*byte),
        Fault::Gzip => answer.headers.push(("Content-Encoding", "gzip".to_owned())),
        Fault::Endless => answer.content_length = None,
        Fault::WrongRange => {
            let ranges = answer.headers.iter_mut().filter(|(name, _)| *name == "Content-Range");
            ranges.for_each(|(_, value)| *value = format!("bytes 1-{size}/{}", size + 1));
        }
        _ => {}
    }
    answer.fault = Some(fault);
    answer
}

/// Nothing if the client hung up before it asked, or begins to speak TLS.
pub(super) fn read_request(stream: &mut TcpStream, side: Side) -> io::Result<Option<Request>> {
    // The type of the TLS record that a handshake begins with.
    const HANDSHAKE: u8 = 22;
    let mut head = Vec::new();
    let mut received = [0; 4096];
    // Requests have no bodies, and no client sends a second one before the answer to the first.
    while !head.ends_with(b"\r\n\r\n") {
        let count = stream.read(&mut received)?;
        if count == 0 || received[0] == HANDSHAKE {
            return Ok(None);
        }
        head.extend_from_slice(&received[..count]);
    }
    let head = String::from_utf8_lossy(&head);
    let mut lines = head.lines();
    let mut line = lines.next().unwrap_or_default().split(' ').map(str::to_owned);
    let (method, path) = (line.next().unwrap_or_default(), line.next().unwrap_or_default());
    let headers = lines.filter_map(|line| line.split_once(": "));
    let headers = headers.map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned())).collect();
    Ok(Some(Request { side, method, path, headers }))
}
