//! Where the bytes of an answer come from: a stored file, or one that is still being pulled.
//!
//! What arrives is sent before it is verified, except for the last bytes of the file: those are read from the store, after the
//! whole file had its digest. If it has not, or other bytes have replaced some that were sent, the connection is closed.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use blobd_store_format::descriptor::Descriptor;
use blobd_store_format::digest::Digest;
use bytes::Bytes;
use tracing_mutex::stdsync::Mutex;

use crate::arriving::Arriving;
use crate::locks::lock;
use crate::ops::{OpError, ServedFile, arrived_file};
use crate::state::Daemon;
use crate::transfer::Attempt;

/// How often it is looked for more bytes.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

pub(super) enum Source {
    Stored(Arc<ServedFile>),
    Arriving(Box<ArrivingFile>),
    /// Only the headers of a file of this size were requested.
    Announced(u64),
}

/// A file of a model that is being pulled.
pub(super) struct ArrivingFile {
    model: Arc<Arriving>,
    file: Descriptor,
    doubted: Arc<Doubted>,
    /// What the bytes belong to that were sent so far.
    attempt: Option<Arc<Attempt>>,
    /// Set when the file is complete.
    stored: Option<Arc<ServedFile>>,
}

/// Files of which a client has received bytes that were not verified. The client must not combine them with a range of the
/// verified file.
#[derive(Debug, Default)]
pub(super) struct Doubted(Mutex<Vec<Sent>>);

#[derive(Debug)]
struct Sent {
    file: Digest,
    attempt: Arc<Attempt>,
    at: Instant,
}

impl Doubted {
    /// How long a client may try to continue.
    const AGE: Duration = Duration::from_secs(900);
    const MAX: usize = 4096;

    fn add(&self, file: Digest, attempt: Arc<Attempt>) {
        let mut sent = lock(&self.0);
        let is_known = |known: &Sent| known.file == file && Arc::ptr_eq(&known.attempt, &attempt);
        sent.retain(|known| {
            !known.attempt.is_verified() && known.at.elapsed() < Self::AGE && !is_known(known)
        });
        if sent.len() >= Self::MAX {
            sent.remove(0);
        }
        sent.push(Sent { file, attempt, at: Instant::now() });
    }

    /// Whether a client may have bytes of the file that are wrong. `now` is the attempt in which it arrives.
    pub(super) fn includes(&self, file: Digest, now: Option<&Arc<Attempt>>) -> bool {
        let is_doubtful = |sent: &Sent| {
            let is_current = now.is_some_and(|now| Arc::ptr_eq(now, &sent.attempt));
            sent.file == file && !is_current && !sent.attempt.is_verified() && sent.at.elapsed() < Self::AGE
        };
        lock(&self.0).iter().any(is_doubtful)
    }
}

impl Drop for ArrivingFile {
    fn drop(&mut self) {
        if let Some(attempt) = self.attempt.take().filter(|attempt| !attempt.is_verified()) {
            self.doubted.add(self.file.digest, attempt);
        }
    }
}

impl From<ServedFile> for Source {
    fn from(file: ServedFile) -> Self {
        Self::Stored(Arc::new(file))
    }
}

impl From<ArrivingFile> for Source {
    fn from(file: ArrivingFile) -> Self {
        Self::Arriving(Box::new(file))
    }
}

impl Source {
    pub(super) fn size(&self) -> u64 {
        match self {
            Self::Stored(file) => file.size(),
            Self::Arriving(arriving) => arriving.file.size,
            Self::Announced(size) => *size,
        }
    }

    /// Reads a range, or the first bytes of it, in the turn of a client.
    pub(super) async fn read(
        &mut self,
        daemon: &Arc<Daemon>,
        client: u32,
        range: Range<u64>,
    ) -> Result<Bytes, OpError> {
        match self {
            Self::Stored(file) => read_stored(daemon, client, file, range).await,
            Self::Arriving(arriving) => arriving.read(daemon, client, range).await,
            Self::Announced(_) => {
                Err(OpError::Internal("only the headers of this file are known".to_owned()))
            }
        }
    }
}

async fn read_stored(
    daemon: &Arc<Daemon>,
    client: u32,
    file: &Arc<ServedFile>,
    range: Range<u64>,
) -> Result<Bytes, OpError> {
    let file = Arc::clone(file);
    let turn = daemon.work.served_reads.acquire(client).await.into();
    daemon.blocking(turn, move |daemon| file.read(&daemon.store, range)).await.map(Bytes::from)
}

impl ArrivingFile {
    pub(super) const fn new(model: Arc<Arriving>, file: Descriptor, doubted: Arc<Doubted>) -> Self {
        Self { model, file, doubted, attempt: None, stored: None }
    }

    async fn read(&mut self, daemon: &Arc<Daemon>, client: u32, range: Range<u64>) -> Result<Bytes, OpError> {
        let is_last = range.end >= self.file.size;
        loop {
            if let Some(stored) = &self.stored {
                return read_stored(daemon, client, stored, range).await;
            }
            let end = self.model.end();
            let transfer = self.model.want(self.file.digest);
            if self.model.is_complete(self.file.digest)
                || end.as_ref().is_some_and(|end| end.failure.is_none())
            {
                self.open_stored(daemon, client).await?;
                continue;
            }
            if let Some(failure) = end.and_then(|end| end.failure) {
                return Err(self.given_up(&failure.message));
            }
            if let Some(transfer) = transfer.filter(|_| !is_last)
                && let Some(bytes) = self.read_arrived(daemon, client, transfer, &range).await?
            {
                return Ok(bytes);
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Bytes that have arrived, if there are any.
    async fn read_arrived(
        &mut self,
        daemon: &Arc<Daemon>,
        client: u32,
        transfer: Digest,
        range: &Range<u64>,
    ) -> Result<Option<Bytes>, OpError> {
        let (start, most) = (range.start, range.end.saturating_sub(range.start));
        if daemon.transfers.arrived_bytes(transfer, start) == 0 {
            return Ok(None);
        }
        let turn = daemon.work.served_reads.acquire(client).await.into();
        // A file that has just got its place in the store cannot be read in the old one.
        let read = move |daemon: &Daemon| Ok(daemon.transfers.arrived(transfer, start, most).ok().flatten());
        let Some((attempt, bytes)) = daemon.blocking(turn, read).await? else { return Ok(None) };
        let known = self.attempt.get_or_insert_with(|| Arc::clone(&attempt));
        match Arc::ptr_eq(known, &attempt) {
            true => Ok(Some(bytes.into())),
            false => Err(self.given_up("some of its bytes were wrong and have been replaced")),
        }
    }

    async fn open_stored(&mut self, daemon: &Arc<Daemon>, client: u32) -> Result<(), OpError> {
        if self.attempt.as_ref().is_some_and(|attempt| !attempt.is_verified()) {
            return Err(self.given_up("some of its bytes were wrong and have been replaced"));
        }
        let file = self.file.clone();
        let turn = daemon.work.served_reads.acquire(client).await.into();
        let open = move |daemon: &Daemon| arrived_file(&daemon.store, &file);
        let stored = daemon.blocking(turn, open).await?;
        let stored = stored.ok_or_else(|| self.given_up("it is not stored"))?;
        self.stored = Some(Arc::new(stored));
        Ok(())
    }

    /// The error that closes the connection, so that no client takes what it has got for the file.
    fn given_up(&self, reason: &str) -> OpError {
        OpError::Internal(format!("{}: {reason}", self.file.digest))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_is_doubted_until_the_attempt_in_which_it_was_sent_is_verified() {
        let doubted = Doubted::default();
        let (one, other) = (Digest::of(b"one"), Digest::of(b"other"));
        let (attempt, next) = (Arc::default(), Arc::default());
        doubted.add(one, Arc::clone(&attempt));
        doubted.add(one, Arc::clone(&attempt));
        assert_eq!(lock(&doubted.0).len(), 1);
        assert!(doubted.includes(one, None) && doubted.includes(one, Some(&next)));
        assert!(!doubted.includes(one, Some(&attempt)), "it continues in the same attempt");
        assert!(!doubted.includes(other, None));
    }
}
