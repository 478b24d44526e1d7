//! A file as it is downloaded from its first byte to its last, for readers that block.

use std::io::{self, BufRead, Read};

use blobd_registry::ByteStream;
use blobd_store_format::digest::{Digest, Hasher};
use bytes::{Buf as _, Bytes};

use super::{Job, TransferError, TransferGuard, Transfers};
use crate::permits::Permit;

/// The bytes of a file, which are hashed as they are read. A failed read leaves its cause in [`Self::failure`].
pub(super) struct Download<'j> {
    job: &'j Job<'j>,
    guard: &'j TransferGuard,
    stream: ByteStream,
    /// The bytes that have arrived and were not read yet.
    chunk: Bytes,
    hasher: Hasher,
    pub(super) arrived_bytes: u64,
    /// Why the last read failed, if the download did.
    pub(super) failure: Option<TransferError>,
    _connection: Permit,
}

impl<'j> Download<'j> {
    pub(super) fn begin(
        transfers: &Transfers,
        guard: &'j TransferGuard,
        job: &'j Job<'j>,
    ) -> Result<Self, TransferError> {
        let connections = transfers.connections(job.file.host());
        let connection = job.wait_for(connections.acquire(job.uid))?;
        let stream = job.wait_for(job.silence.until(job.registry.open(job.file)))??;
        Ok(Self {
            job,
            guard,
            stream,
            chunk: Bytes::new(),
            hasher: Hasher::new(),
            arrived_bytes: 0,
            failure: None,
            _connection: connection,
        })
    }

    /// Downloads the rest, and returns the digest of the whole file.
    pub(super) fn finish(mut self) -> Result<Digest, TransferError> {
        loop {
            let length = self.available()?.len();
            if length == 0 {
                return Ok(self.hasher.finish());
            }
            self.consume(length);
        }
    }

    /// The next bytes; none at the end of the file.
    fn available(&mut self) -> Result<&[u8], TransferError> {
        if self.chunk.is_empty() {
            self.chunk = self.job.wait_for(self.job.next_of(&mut self.stream))??.unwrap_or_default();
            let count = self.chunk.len() as u64;
            self.hasher.update(&self.chunk);
            self.arrived_bytes = self.arrived_bytes.saturating_add(count);
            self.guard.note(self.arrived_bytes, 0);
            if !(self.job.report)(self.arrived_bytes) {
                return Err(TransferError::Unwanted);
            }
        }
        Ok(&self.chunk)
    }
}

impl BufRead for Download<'_> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        if let Err(failure) = self.available() {
            self.failure = Some(failure);
            return Err(io::Error::other("the download has failed"));
        }
        Ok(&self.chunk)
    }

    fn consume(&mut self, count: usize) {
        self.chunk.advance(count.min(self.chunk.len()));
    }
}

impl Read for Download<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.fill_buf()?.read(buffer)?;
        self.consume(count);
        Ok(count)
    }
}
