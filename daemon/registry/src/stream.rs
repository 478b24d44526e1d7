//! The body of a response, limited in length and in the time spent waiting.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf as _, Bytes};
use http_body_util::BodyExt;
use hyper::body::{Body, Incoming};
use tokio::time::{Instant, timeout, timeout_at};

use super::connect_failure::innermost;
use super::content_encoding::{ContentEncoding, GzipStream};
use super::error::{RegistryError, Result};
use super::peers::{PATIENCE, PeerNumber, Peers};
use super::policy::Limits;
use super::retry::Counts;

/// The bytes of one response's body, as they arrive.
#[derive(Debug)]
pub(super) struct BodyStream {
    body: ResponseBody,
    /// The file's name in errors.
    subject: String,
    /// The expected length of the body.
    length: u64,
    /// The range of the body that the caller requested.
    wanted: Range<u64>,
    /// The `Content-Range` of the part, if it is not the whole file.
    content_range: Option<String>,
    /// The encodings that the response announces.
    encoding: ContentEncoding,
    sender: Arc<Sender>,
    stall: StallTimer,
    counts: Arc<Counts>,
    /// The peer that sends it, which is set aside if it fails.
    peer: Option<(Arc<Peers>, PeerNumber)>,
}

/// The source of received bytes: a registry, a mirror of it, or a host to which it redirected.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Sender {
    /// The server that was requested, with its port if that is not the default.
    server: String,
    /// The host that sent the bytes.
    host: String,
}

impl Sender {
    pub(super) const fn new(server: String, host: String) -> Self {
        Self { server, host }
    }

    /// The server that was requested, which may have redirected to another host.
    pub fn server(&self) -> &str {
        &self.server
    }
}

impl fmt::Display for Sender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.server == self.host {
            true => f.write_str(&self.server),
            false => write!(f, "{} (redirected by {})", self.host, self.server),
        }
    }
}

impl BodyStream {
    /// Starts reading the body of a response from `server`. Fails if it announces another length than `length`.
    pub(super) fn open(
        body: ResponseBody,
        server: &str,
        (subject, length): (String, u64),
        content_range: Option<String>,
        (limits, counts): (&Limits, &Arc<Counts>),
    ) -> Result<Self> {
        let announced = body.decoded_length();
        let encoding = body.encoding.clone();
        let (wanted, stall, counts) = (0..length, StallTimer::new(limits), Arc::clone(counts));
        let sender = Arc::new(Sender::new(server.to_owned(), body.host.clone()));
        let stream = Self {
            body,
            subject,
            length,
            wanted,
            content_range,
            encoding,
            sender,
            stall,
            counts,
            peer: None,
        };
        match announced.filter(|announced| *announced != length) {
            Some(announced) => Err(stream.length_differs(announced)),
            None => Ok(stream),
        }
    }

    /// The stream of a peer, for which the registry is there: it may not pause for long.
    pub(super) fn of_peer(mut self, peers: Arc<Peers>, number: PeerNumber) -> Self {
        self.stall.longest_silence = PATIENCE;
        Self { peer: Some((peers, number)), ..self }
    }

    /// Restricts a whole file to `range`: skips the bytes before it, and does not wait for those after it.
    pub(super) fn only(self, range: Range<u64>) -> Self {
        let wanted = if self.content_range.is_some() { self.wanted } else { range };
        Self { wanted, ..self }
    }

    /// The next bytes, at least one; `None` after exactly the requested number.
    ///
    /// # Errors
    /// [`RegistryError::SizeDiffers`] and [`RegistryError::RangeDiffers`] when there are more or
    /// fewer, [`RegistryError::Broken`] and [`RegistryError::Stalled`] when the connection fails.
    pub(super) async fn next(&mut self) -> Result<Option<Bytes>> {
        // If the wanted range reaches the end of the body, read on to check that nothing follows.
        while self.body.received < self.wanted.end || self.wanted.end == self.length {
            let start = self.body.received;
            let Some(mut bytes) = self.receive().await? else { return Ok(None) };
            bytes.truncate(as_index(self.wanted.end.saturating_sub(start)));
            bytes.advance(as_index(self.wanted.start.saturating_sub(start)).min(bytes.len()));
            if !bytes.is_empty() {
                return Ok(Some(bytes));
            }
        }
        Ok(None)
    }

    /// Whether this is the whole file rather than a part of it.
    pub(super) fn is_whole(&self) -> bool {
        self.content_range.is_none() && self.wanted == (0..self.length)
    }

    /// The server and host that send the bytes.
    pub(super) const fn sender(&self) -> &Arc<Sender> {
        &self.sender
    }

    /// Bytes received over the network, including bytes before the range from a server that ignores ranges.
    pub(super) const fn received_bytes(&self) -> u64 {
        self.body.received
    }

    async fn receive(&mut self) -> Result<Option<Bytes>> {
        let received = self.receive_next().await;
        if let (Err(error), Some((peers, number))) = (&received, &self.peer) {
            tracing::debug!("peer {}: {error}", self.sender);
            peers.set_aside(*number, None);
        }
        received
    }

    async fn receive_next(&mut self) -> Result<Option<Bytes>> {
        let Some(received) = self.stall.wait(self.body.next()).await else {
            let (host, seconds) = (self.body.host.clone(), self.stall.limit().as_secs());
            return Err(RegistryError::Stalled { host, seconds });
        };
        let bytes = received?;
        let length = bytes.as_ref().map_or(0, Bytes::len);
        self.stall.received(length);
        self.counts.note_received(length);
        let received = self.body.received;
        let is_right = if bytes.is_none() { received == self.length } else { received <= self.length };
        if is_right { Ok(bytes) } else { Err(self.length_differs(received)) }
    }

    fn length_differs(&self, found_bytes: u64) -> RegistryError {
        let (subject, host, expected_bytes) = (self.subject.clone(), self.body.host.clone(), self.length);
        match self.content_range.clone() {
            Some(expected) => {
                RegistryError::RangeDiffers { subject, host, found: format!("{found_bytes} bytes"), expected }
            }
            None if !self.encoding.is_none() => {
                let what = format!("{}: expected none, as blobd has requested", self.encoding);
                RegistryError::unusable(host, what)
            }
            None => RegistryError::SizeDiffers { subject, host, found_bytes, expected_bytes },
        }
    }
}

fn as_index(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

#[derive(Debug)]
pub(super) struct ResponseBody {
    incoming: Incoming,
    host: String,
    received: u64,
    /// The encodings that the response announces, if the body is a file's.
    encoding: ContentEncoding,
    /// Set if the file is decompressed.
    gzip: Option<GzipStream>,
}

impl ResponseBody {
    /// The body as it is.
    pub(super) fn new(host: String, incoming: Incoming) -> Self {
        Self { incoming, host, received: 0, encoding: ContentEncoding::default(), gzip: None }
    }

    /// Sets the encoding of a file's body. `length` is the length of the decoded file: if the response announces
    /// exactly that length, the body is not encoded, whatever its label says.
    pub(super) fn with_encoding(self, encoding: ContentEncoding, length: u64, may_decode: bool) -> Self {
        let is_plain = encoding.is_none() || self.incoming.size_hint().exact() == Some(length);
        let gzip = (!is_plain && may_decode && encoding.is_gzip()).then(GzipStream::new);
        Self { encoding, gzip, ..self }
    }

    /// The announced length, unless the body is compressed.
    fn decoded_length(&self) -> Option<u64> {
        self.incoming.size_hint().exact().filter(|_| self.gzip.is_none())
    }

    /// Reads the whole body. Fails if it has more than `max_bytes`, and never buffers more, whatever length is
    /// announced.
    pub(super) async fn read(mut self, what: &'static str, max_bytes: u64) -> Result<Vec<u8>> {
        let mut document = Vec::new();
        let mut length = self.incoming.size_hint().lower();
        while length <= max_bytes {
            let Some(bytes) = self.next().await? else { return Ok(document) };
            length = self.received;
            if length <= max_bytes {
                document.extend_from_slice(&bytes);
            }
        }
        Err(RegistryError::TooLong { host: self.host, what, max_bytes })
    }

    /// The start of the body: at most `max_bytes`, as far as they arrive in time and before an error.
    pub(super) async fn beginning(mut self, max_bytes: u64, time_limit: Duration) -> Vec<u8> {
        let (mut beginning, end) = (Vec::new(), Instant::now() + time_limit);
        while self.received < max_bytes
            && let Ok(Ok(Some(bytes))) = timeout_at(end, self.next()).await
        {
            beginning.extend_from_slice(&bytes);
        }
        beginning.truncate(as_index(max_bytes));
        beginning
    }

    /// Counts bytes before checking them, so that a caller that continues after an error gets the error again.
    async fn next(&mut self) -> Result<Option<Bytes>> {
        loop {
            if let Some(bytes) = self.unpack(false)? {
                return Ok(Some(bytes));
            }
            let Some(frame) = self.incoming.frame().await else { return self.unpack(true) };
            let frame = frame.map_err(|error| RegistryError::Broken {
                host: self.host.clone(),
                received_bytes: self.received,
                reason: innermost(&error).to_string(),
            })?;
            // Trailers are not used.
            let Ok(bytes) = frame.into_data() else { continue };
            match &mut self.gzip {
                Some(gzip) => gzip.push(bytes),
                None => return Ok(Some(self.count(bytes))),
            }
        }
    }

    /// Decompresses the next bytes from what has arrived.
    fn unpack(&mut self, is_end: bool) -> Result<Option<Bytes>> {
        let Some(gzip) = &mut self.gzip else { return Ok(None) };
        let unpacked = gzip.next(is_end).map_err(|error| {
            RegistryError::unusable(&self.host, format!("{}: damaged: {error}", self.encoding))
        })?;
        Ok(unpacked.map(|bytes| self.count(bytes)))
    }

    fn count(&mut self, bytes: Bytes) -> Bytes {
        self.received = self.received.saturating_add(bytes.len() as u64);
        bytes
    }
}

/// Detects a body that has stopped or arrives too slowly, by the time spent waiting for it. A server that sends a byte
/// now and then is stalled too. The time between two calls, when the caller is busy, does not count.
#[derive(Debug)]
struct StallTimer {
    longest_silence: Duration,
    window: Duration,
    slowest_bytes: u64,
    waited: Waited,
    received_bytes: u64,
}

/// The time spent waiting since the last byte, and in this window.
#[derive(Clone, Copy, Debug, Default)]
struct Waited {
    silent: Duration,
    in_window: Duration,
}

impl StallTimer {
    fn new(limits: &Limits) -> Self {
        let Limits { silence: longest_silence, stall: window, slowest_bytes, .. } = *limits;
        Self { longest_silence, window, slowest_bytes, waited: Waited::default(), received_bytes: 0 }
    }

    /// Waits for `event`; `None` if nothing arrives for too long, or too few bytes arrive in the window.
    async fn wait<T>(&mut self, event: impl Future<Output = T>) -> Option<T> {
        let mut event = std::pin::pin!(event);
        loop {
            let left = self.window.saturating_sub(self.waited.in_window);
            let left = left.min(self.longest_silence.saturating_sub(self.waited.silent));
            let charge = Charge { waited: &mut self.waited, since: Instant::now() };
            let happened = timeout(left, event.as_mut()).await;
            drop(charge);
            if let Ok(happened) = happened {
                return Some(happened);
            }
            if self.is_silent() {
                return None;
            }
            if self.waited.in_window >= self.window {
                if self.received_bytes < self.slowest_bytes {
                    return None;
                }
                (self.waited.in_window, self.received_bytes) = (Duration::ZERO, 0);
            }
        }
    }

    fn received(&mut self, bytes: usize) {
        self.received_bytes = self.received_bytes.saturating_add(bytes as u64);
        if bytes > 0 {
            self.waited.silent = Duration::ZERO;
        }
    }

    fn is_silent(&self) -> bool {
        self.waited.silent >= self.longest_silence
    }

    /// The time limit that expired.
    fn limit(&self) -> Duration {
        if self.is_silent() { self.longest_silence } else { self.window }
    }
}

/// Records the time of a wait on drop, so that a cancelled wait counts too.
struct Charge<'p> {
    waited: &'p mut Waited,
    since: Instant,
}

impl Drop for Charge<'_> {
    fn drop(&mut self) {
        let elapsed = self.since.elapsed();
        let Waited { silent, in_window } = self.waited;
        for waited in [silent, in_window] {
            *waited = waited.saturating_add(elapsed);
        }
    }
}
