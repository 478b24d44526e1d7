//! A file that passes from one registry to another, without being stored: received in order, from where the other registry wants
//! it, and hashed on its way.
//!
//! The last bytes are not passed on if the digest is wrong, so no registry gets such a file wholly. Bytes that are received
//! again, because the other registry has kept fewer, are not hashed again: that registry checks the digest too.

use std::ops::Range;

use blobd_registry::{ByteStream, RegistryClient, RegistryError, RemoteFile, Retry};
use blobd_store_format::descriptor::Descriptor;
use blobd_store_format::digest::{Digest, Hasher};
use bytes::Bytes;

use super::super::OpError;

#[derive(Debug)]
pub(super) struct PassingFile<'p> {
    registry: &'p RegistryClient,
    remote: &'p RemoteFile,
    name: &'p str,
    file: &'p Descriptor,
    /// The open stream, and the offset of its next bytes.
    open: Option<(u64, ByteStream)>,
    hasher: Hasher,
    /// How many bytes are hashed.
    hashed: u64,
    retry: Retry,
}

impl<'p> PassingFile<'p> {
    pub(super) fn new(
        registry: &'p RegistryClient,
        remote: &'p RemoteFile,
        (name, file): (&'p str, &'p Descriptor),
    ) -> Self {
        let (hasher, retry) = (Hasher::new(), registry.retry());
        Self { registry, remote, name, file, open: None, hasher, hashed: 0, retry }
    }

    /// The next bytes from `offset` on, at least one. If the source breaks, the rest is requested from there.
    pub(super) async fn read(&mut self, offset: u64) -> Result<Bytes, OpError> {
        loop {
            let error = match self.next(offset).await {
                Ok(bytes) => {
                    self.retry.note_progress(bytes.len() as u64);
                    self.hash(offset, &bytes)?;
                    return Ok(bytes);
                }
                Err(error) => error,
            };
            let received = self.open.take().map_or(0, |(_, stream)| stream.received_bytes());
            let wait = self.retry.wait_after(&error, received);
            self.registry.note_failure(&error, wait.is_some());
            let Some(wait) = wait else { return Err(error.into()) };
            tracing::debug!("{error}; next attempt in {wait:?}");
            tokio::time::sleep(wait).await;
        }
    }

    async fn next(&mut self, offset: u64) -> Result<Bytes, RegistryError> {
        let (at, stream) = match &mut self.open {
            Some(open) if open.0 == offset => open,
            open => {
                // Before the next one is requested.
                *open = None;
                let wanted: Range<u64> = offset..self.file.size;
                let stream = self.registry.open_range(self.remote, wanted).await?;
                open.insert((offset, stream))
            }
        };
        let bytes = stream.next().await?.unwrap_or_default();
        *at = at.saturating_add(bytes.len() as u64);
        Ok(bytes)
    }

    fn hash(&mut self, offset: u64, bytes: &[u8]) -> Result<(), OpError> {
        let known = usize::try_from(self.hashed.saturating_sub(offset)).unwrap_or(usize::MAX);
        let Some(new) = bytes.get(known..).filter(|new| !new.is_empty()) else { return Ok(()) };
        self.hasher.update(new);
        self.hashed = self.hashed.saturating_add(new.len() as u64);
        if self.hashed < self.file.size {
            return Ok(());
        }
        let found = std::mem::take(&mut self.hasher).finish();
        if found == self.file.digest {
            return Ok(());
        }
        self.registry.note_wrong_file();
        Err(self.wrong(found))
    }

    fn wrong(&self, found: Digest) -> OpError {
        let sender = self.open.as_ref().map(|(_, stream)| stream.sender().to_string());
        OpError::WrongFile {
            name: self.name.to_owned(),
            sender: sender.unwrap_or_default(),
            found,
            expected: self.file.digest,
        }
    }
}
