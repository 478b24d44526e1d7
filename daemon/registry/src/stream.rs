//! Bodies: as long as they may be, and no slower than is worth waiting for.

use std::time::Duration;

use blobd_store_format::descriptor::Descriptor;
use blobd_store_format::digest::Digest;
use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::{Body, Incoming};
use tokio::time::{Instant, timeout};

use super::Limits;
use super::error::RegistryError;
use super::trouble::innermost;

/// The bytes of one file as they arrive. They are counted, not hashed: whoever stores them must
/// compare their digest.
#[derive(Debug)]
pub struct BlobStream {
    body: Incoming,
    host: String,
    digest: Digest,
    size_bytes: u64,
    received_bytes: u64,
    pace: Pace,
}

impl BlobStream {
    /// Takes the body of an answer of `host` that has not announced another length.
    pub(super) fn open(
        host: String,
        body: Incoming,
        file: &Descriptor,
        limits: &Limits,
    ) -> Result<Self, RegistryError> {
        let stream = Self {
            host,
            digest: file.digest,
            size_bytes: file.size,
            received_bytes: 0,
            pace: Pace::new(limits),
            body,
        };
        match stream.body.size_hint().exact() {
            Some(announced) if announced != file.size => Err(stream.size_differs(announced)),
            _ => Ok(stream),
        }
    }

    /// The next bytes, never none; nothing once exactly as many have come as the manifest says.
    ///
    /// # Errors
    /// [`RegistryError::SizeDiffers`] when there are more or fewer, [`RegistryError::Broken`] and
    /// [`RegistryError::Stalled`] when the connection fails.
    pub async fn next(&mut self) -> Result<Option<Bytes>, RegistryError> {
        loop {
            let Some(frame) = self.pace.wait(self.body.frame()).await.ok_or_else(|| self.stalled())? else {
                let complete = self.received_bytes == self.size_bytes;
                return if complete { Ok(None) } else { Err(self.size_differs(self.received_bytes)) };
            };
            let frame = frame.map_err(|error| broken(&self.host, self.received_bytes, &error))?;
            // Trailers say nothing that blobd needs.
            let Ok(bytes) = frame.into_data() else { continue };
            self.pace.received(bytes.len() as u64);
            // Counted before it is judged, so that a caller who goes on after an error gets it again.
            self.received_bytes = self.received_bytes.saturating_add(bytes.len() as u64);
            if self.received_bytes > self.size_bytes {
                return Err(self.size_differs(self.received_bytes));
            }
            if !bytes.is_empty() {
                return Ok(Some(bytes));
            }
        }
    }

    fn size_differs(&self, found_bytes: u64) -> RegistryError {
        let host = self.host.clone();
        RegistryError::SizeDiffers { digest: self.digest, host, found_bytes, expected_bytes: self.size_bytes }
    }

    fn stalled(&self) -> RegistryError {
        RegistryError::Stalled { host: self.host.clone(), seconds: self.pace.window.as_secs() }
    }
}

/// Tells a slow body from one that will never end, by the time spent waiting for it: a server
/// that sends a byte now and then is as stalled as one that sends nothing. Time that the caller
/// takes between two calls does not count.
#[derive(Debug)]
struct Pace {
    window: Duration,
    slowest_bytes: u64,
    waited: Duration,
    received_bytes: u64,
}

impl Pace {
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

    fn received(&mut self, bytes: u64) {
        self.received_bytes = self.received_bytes.saturating_add(bytes);
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

/// Reads a whole body of at most `max_bytes`; keeps no more than that, whatever is announced.
pub(super) async fn read_document(
    host: &str,
    mut body: Incoming,
    what: &'static str,
    max_bytes: u64,
) -> Result<Vec<u8>, RegistryError> {
    let too_long = || RegistryError::TooLong { host: host.to_owned(), what, max_bytes };
    if body.size_hint().lower() > max_bytes {
        return Err(too_long());
    }
    let mut document = Vec::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| broken(host, document.len() as u64, &error))?;
        let Ok(bytes) = frame.into_data() else { continue };
        if (document.len() as u64).saturating_add(bytes.len() as u64) > max_bytes {
            return Err(too_long());
        }
        document.extend_from_slice(&bytes);
    }
    Ok(document)
}

fn broken(host: &str, received_bytes: u64, error: &hyper::Error) -> RegistryError {
    RegistryError::Broken { host: host.to_owned(), received_bytes, reason: innermost(error).to_string() }
}
