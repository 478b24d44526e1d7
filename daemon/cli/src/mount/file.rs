//! An open file of the mount.
//!
//! It holds the model's descriptors and its lease, so that it stays readable if the daemon stops or the model
//! is removed. The kernel caches the data that is read in the mount's page cache. The same data in the page
//! cache of the store would be a second copy, and is dropped after it was read.

use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use blobd_client::error::ModelError;
use blobd_client::model::OpenModel;
use blobd_client::protocol::response::OpenPiece;
use blobd_store_format::digest::Digest;
use blobd_store_format::manifest::Manifest;
use rustix::fs::{Advice, fadvise};

#[derive(Debug)]
pub(super) struct OpenFile {
    content: OpenContent,
    size: u64,
    /// Whether this process has read it: with passthrough the kernel does.
    was_read: AtomicBool,
}

#[derive(Debug)]
enum OpenContent {
    Manifest(Arc<Manifest>),
    Layer { model: Arc<OpenModel>, layer: usize },
}

impl OpenFile {
    pub(super) fn of_manifest(manifest: Arc<Manifest>) -> Self {
        Self::new(manifest.raw().len() as u64, OpenContent::Manifest(manifest))
    }

    /// `None` if the model has no layer with this digest, or the daemon has not sent the layer's pieces.
    pub(super) fn of_layer(model: Arc<OpenModel>, digest: Digest) -> Option<Self> {
        let layer = model.layers().iter().position(|layer| layer.digest == digest)?;
        let size = model.file(layer).ok()?.size();
        Some(Self::new(size, OpenContent::Layer { model, layer }))
    }

    const fn new(size: u64, content: OpenContent) -> Self {
        Self { content, size, was_read: AtomicBool::new(false) }
    }

    pub(super) const fn size(&self) -> u64 {
        self.size
    }

    /// The descriptor of the blob, if the file is stored as one blob.
    pub(super) fn whole_blob(&self) -> Option<std::os::fd::BorrowedFd<'_>> {
        match &self.content {
            OpenContent::Layer { model, layer } => model.fd(model.layers().get(*layer)?.fd?),
            OpenContent::Manifest(_) => None,
        }
    }

    /// Fills `buffer` from `offset` on, up to the end of the file; returns the number of bytes.
    pub(super) fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<usize, ModelError> {
        match &self.content {
            OpenContent::Manifest(manifest) => {
                let start = usize::try_from(offset).unwrap_or(usize::MAX);
                let left = manifest.raw().get(start..).unwrap_or_default();
                buffer.iter_mut().zip(left).for_each(|(to, from)| *to = *from);
                Ok(left.len().min(buffer.len()))
            }
            OpenContent::Layer { model, layer } => {
                self.was_read.store(true, Ordering::Relaxed);
                model.file(*layer)?.read_at(offset, buffer, |fd, offset, bytes| {
                    model.read_at(fd, offset, bytes)?;
                    drop_pages_behind(model, fd, offset, bytes.len() as u64);
                    Ok(())
                })
            }
        }
    }
}

/// Drops the blobs' pages that reads by this process have left in the page cache: the mount has its own. Pages
/// that the kernel has read by passthrough are the only copy and stay.
impl Drop for OpenFile {
    fn drop(&mut self) {
        let OpenContent::Layer { model, layer } = &self.content else { return };
        let Some(file) = model.file(*layer).ok().filter(|_| self.was_read.load(Ordering::Relaxed)) else {
            return;
        };
        for piece in file.iter() {
            if let OpenPiece::Fd { fd, .. } = piece {
                drop_pages(model, *fd, 0, None);
            }
        }
    }
}

/// Drops pages at some distance behind the read position: several threads serve consecutive requests, and
/// another one may still read the pages just before. Whole ranges of [`DROPPED_BYTES`] are dropped, because
/// the kernel drops a large folio only as a whole, and each range once, because a second call takes as long as
/// the first.
fn drop_pages_behind(model: &OpenModel, fd: u32, offset: u64, count: u64) {
    let into_range = offset % DROPPED_BYTES;
    if into_range >= count {
        return;
    }
    let end = (offset - into_range).saturating_sub(LAG_BYTES);
    let start = end.saturating_sub(DROPPED_BYTES);
    if let Some(length) = NonZeroU64::new(end - start) {
        drop_pages(model, fd, start, Some(length));
    }
}

/// The kernel keeps pages that are mapped.
fn drop_pages(model: &OpenModel, fd: u32, offset: u64, length: Option<NonZeroU64>) {
    if let Some(fd) = model.fd(fd) {
        // Only advice: if the file system ignores it, the pages stay.
        let _ = fadvise(fd, offset, length, Advice::DontNeed);
    }
}

/// More than all threads together read at a time.
const LAG_BYTES: u64 = 4 << 20;
/// Twice the size of the largest folios.
const DROPPED_BYTES: u64 = 4 << 20;
