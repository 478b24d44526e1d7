//! The bytes of a response as they arrive: as many as were promised, and no slower than is worth waiting for.

use std::ops::Range;
use std::time::Duration;

use bytes::{Buf as _, Bytes};
use http_body_util::BodyExt;
use hyper::body::{Body, Incoming};
use tokio::time::{Instant, timeout};

use super::Limits;
use super::connect_failure::innermost;
use super::error::RegistryError;

/// The bytes of a file or of a part of it as they arrive. They are counted, not hashed: whoever stores
/// them must compare their digest.
#[derive(Debug)]
pub struct ByteStream {
    body: ResponseBody,
    /// What the file is called in errors.
    subject: String,
    /// How long the body must be.
    length: u64,
    /// Which bytes of the body are wanted.
    wanted: Range<u64>,
    /// What the response said it is, if it is a part of the file.
    content_range: Option<String>,
    stall: StallTimer,
}

impl ByteStream {
    /// Takes a body that has not announced another length than `length`. `content_range` names the
    /// part of the file that it is, if it is not the whole.
    pub(super) fn open(
        body: ResponseBody,
        (subject, length): (String, u64),
        content_range: Option<String>,
        limits: &Limits,
    ) -> Result<Self, RegistryError> {
        let announced = body.incoming.size_hint().exact();
        let (wanted, stall) = (0..length, StallTimer::new(limits));
        let stream = Self { body, subject, length, wanted, content_range, stall };
        match announced.filter(|announced| *announced != length) {
            Some(announced) => Err(stream.length_differs(announced)),
            None => Ok(stream),
        }
    }

    /// Only `range` of the file. Of a whole file what comes before is skipped, and what comes behind
    /// is not waited for.
    pub(super) fn only(self, range: Range<u64>) -> Self {
        let wanted = if self.content_range.is_some() { self.wanted } else { range };
        Self { wanted, ..self }
    }

    /// The next bytes, never none; nothing once exactly as many have come as were asked for.
    ///
    /// # Errors
    /// [`RegistryError::SizeDiffers`] and [`RegistryError::RangeDiffers`] when there are more or fewer,
    /// [`RegistryError::Broken`] and [`RegistryError::Stalled`] when the connection fails.
    pub async fn next(&mut self) -> Result<Option<Bytes>, RegistryError> {
        // Of a body that is wanted to its end the end is looked at too: there must not be more.
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

    /// Whether this is all of the file and not a part of it.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.content_range.is_none() && self.wanted == (0..self.length)
    }

    /// How many bytes have come over the network, those included that a server without ranges sent
    /// in front of what was asked for.
    #[must_use]
    pub const fn received_bytes(&self) -> u64 {
        self.body.received
    }

    async fn receive(&mut self) -> Result<Option<Bytes>, RegistryError> {
        let Some(received) = self.stall.wait(self.body.next()).await else {
            let (host, seconds) = (self.body.host.clone(), self.stall.window.as_secs());
            return Err(RegistryError::Stalled { host, seconds });
        };
        let bytes = received?;
        self.stall.received(bytes.as_ref().map_or(0, Bytes::len));
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
            None => RegistryError::SizeDiffers { subject, host, found_bytes, expected_bytes },
        }
    }
}

fn as_index(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

/// The body of a response, counted.
#[derive(Debug)]
pub(super) struct ResponseBody {
    incoming: Incoming,
    host: String,
    received: u64,
}

impl ResponseBody {
    /// That of a response of `host`.
    pub(super) fn new(host: String, incoming: Incoming) -> Self {
        Self { incoming, host, received: 0 }
    }

    /// Reads all of it, if that is at most `max_bytes`; keeps no more, whatever is announced.
    pub(super) async fn read(mut self, what: &'static str, max_bytes: u64) -> Result<Vec<u8>, RegistryError> {
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

    /// The next bytes. Counted before anybody judges them, so that a caller who goes on after an error
    /// gets it again.
    async fn next(&mut self) -> Result<Option<Bytes>, RegistryError> {
        while let Some(frame) = self.incoming.frame().await {
            let frame = frame.map_err(|error| RegistryError::Broken {
                host: self.host.clone(),
                received_bytes: self.received,
                reason: innermost(&error).to_string(),
            })?;
            // Trailers say nothing that blobd needs.
            let Ok(bytes) = frame.into_data() else { continue };
            self.received = self.received.saturating_add(bytes.len() as u64);
            return Ok(Some(bytes));
        }
        Ok(None)
    }
}

/// Tells a slow body from one that will never end, by the time spent waiting for it: a server
/// that sends a byte now and then is as stalled as one that sends nothing. Time that the caller
/// takes between two calls does not count.
#[derive(Debug)]
struct StallTimer {
    window: Duration,
    slowest_bytes: u64,
    waited: Duration,
    received_bytes: u64,
}

impl StallTimer {
    fn new(limits: &Limits) -> Self {
        let Limits { stall: window, slowest_bytes, .. } = *limits;
        Self { window, slowest_bytes, waited: Duration::ZERO, received_bytes: 0 }
    }

    /// Waits for `event`; none if the window ends first and too little has come in it.
    async fn wait<T>(&mut self, event: impl Future<Output = T>) -> Option<T> {
        let mut event = std::pin::pin!(event);
        loop {
            let left = self.window.saturating_sub(self.waited);
            let charge = Charge { waited: &mut self.waited, since: Instant::now() };
            let happened = timeout(left, event.as_mut()).await;
            drop(charge);
            if let Ok(happened) = happened {
                return Some(happened);
            }
            if self.received_bytes < self.slowest_bytes {
                return None;
            }
            (self.waited, self.received_bytes) = (Duration::ZERO, 0);
        }
    }

    fn received(&mut self, bytes: usize) {
        self.received_bytes = self.received_bytes.saturating_add(bytes as u64);
    }
}

/// Counts a wait, also one that its caller breaks off.
struct Charge<'p> {
    waited: &'p mut Duration,
    since: Instant,
}

impl Drop for Charge<'_> {
    fn drop(&mut self) {
        *self.waited = self.waited.saturating_add(self.since.elapsed());
    }
}
