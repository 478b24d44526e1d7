//! An open file of the mount.
//!
//! It holds the model's descriptors and its lease, so that it stays readable if the daemon stops or the model
//! is removed. The kernel caches the data that is read in the mount's page cache. The same data in the page
//! cache of the store would be a second copy, so it is read past that cache.

use std::io::IoSliceMut;
use std::sync::Arc;

use blobd_client::error::ModelError;
use blobd_client::model::OpenModel;
use rustix::io::{Errno, ReadWriteFlags, preadv2};

use crate::Digest;

#[derive(Debug)]
pub(super) struct OpenFile {
    content: OpenContent,
    size: u64,
}

#[derive(Debug)]
enum OpenContent {
    Bytes(Arc<[u8]>),
    Layer { model: Arc<OpenModel>, layer: usize },
}

impl OpenFile {
    pub(super) fn of_bytes(bytes: Arc<[u8]>) -> Self {
        Self::new(bytes.len() as u64, OpenContent::Bytes(bytes))
    }

    /// `None` if the model has no layer with this digest, or the daemon has not sent the layer's pieces.
    pub(super) fn of_layer(model: Arc<OpenModel>, digest: Digest) -> Option<Self> {
        let layer = model.layers().iter().position(|layer| layer.digest == digest)?;
        let size = model.file(layer).ok()?.size();
        Some(Self::new(size, OpenContent::Layer { model, layer }))
    }

    const fn new(size: u64, content: OpenContent) -> Self {
        Self { content, size }
    }

    pub(super) const fn size(&self) -> u64 {
        self.size
    }

    pub(super) fn whole_blob(&self) -> Option<std::os::fd::BorrowedFd<'_>> {
        match &self.content {
            OpenContent::Layer { model, layer } => model.fd(model.layers().get(*layer)?.fd?),
            OpenContent::Bytes(_) => None,
        }
    }

    /// Fills `buffer` from `offset` on, up to the end of the file; returns the number of bytes.
    pub(super) fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<usize, ModelError> {
        match &self.content {
            OpenContent::Bytes(bytes) => {
                let start = usize::try_from(offset).unwrap_or(usize::MAX);
                let left = bytes.get(start..).unwrap_or_default();
                buffer.iter_mut().zip(left).for_each(|(to, from)| *to = *from);
                Ok(left.len().min(buffer.len()))
            }
            OpenContent::Layer { model, layer } => {
                model.file(*layer)?.read_at(offset, buffer, |fd, offset, bytes| {
                    read_without_caching(model, fd, offset, bytes)
                })
            }
        }
    }
}

/// Reads from a blob and leaves no page in the store's page cache that was not there before. Where the kernel or the file
/// system cannot do that, the pages stay: dropping them would also drop what `blobd warm` and other programs have read.
fn read_without_caching(model: &OpenModel, fd: u32, offset: u64, bytes: &mut [u8]) -> Result<(), ModelError> {
    /// `RWF_DONTCACHE`, since Linux 6.14.
    const DONT_CACHE: ReadWriteFlags = ReadWriteFlags::from_bits_retain(0x80);
    let mut done = 0;
    while let Some((file, rest)) = model.fd(fd).zip(bytes.get_mut(done..).filter(|rest| !rest.is_empty())) {
        let at = offset.saturating_add(done as u64);
        match preadv2(file, &mut [IoSliceMut::new(rest)], at, DONT_CACHE) {
            Ok(count) if count > 0 => done = done.saturating_add(count),
            Err(Errno::INTR) => {}
            // Not supported, or an error that the other way to read reports.
            _ => break,
        }
    }
    match bytes.get_mut(done..) {
        Some(rest) if !rest.is_empty() => model.read_at(fd, offset.saturating_add(done as u64), rest),
        _ => Ok(()),
    }
}
