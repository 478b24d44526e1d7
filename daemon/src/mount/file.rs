//! A mounted file that is open.
//!
//! It holds the model's descriptors and with them a lease, so that it can be read whatever becomes
//! of the daemon and the model. The kernel keeps what is read in the mount's page cache; the same
//! bytes in the page cache of the store would be a second copy, and are dropped behind the reader.

use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use blobd_client::error::ModelError;
use blobd_client::model::OpenModel;
use blobd_client::protocol::response::OpenPiece;
use blobd_store_format::digest::Digest;
use blobd_store_format::manifest::Manifest;
use rustix::fs::{Advice, fadvise};

/// A file's bytes.
#[derive(Debug)]
pub(super) struct OpenFile {
    body: Body,
    size: u64,
    /// Whether its bytes have come through this process, not by passthrough alone.
    was_read: AtomicBool,
}

#[derive(Debug)]
enum Body {
    Manifest(Arc<Manifest>),
    Layer { model: Arc<OpenModel>, layer: usize },
}

impl OpenFile {
    /// A manifest as a file.
    pub(super) fn of_manifest(manifest: Arc<Manifest>) -> Self {
        Self::new(manifest.raw().len() as u64, Body::Manifest(manifest))
    }

    /// The layer with this digest; `None` if the model has none, or it comes without its pieces.
    pub(super) fn of_layer(model: Arc<OpenModel>, digest: Digest) -> Option<Self> {
        // Of a file that is named many times, the first has the pieces.
        let layer = model.layers().iter().position(|layer| layer.digest == digest)?;
        let size = model.file(layer).ok()?.size();
        Some(Self::new(size, Body::Layer { model, layer }))
    }

    const fn new(size: u64, body: Body) -> Self {
        Self { body, size, was_read: AtomicBool::new(false) }
    }

    /// The file's length.
    pub(super) const fn size(&self) -> u64 {
        self.size
    }

    /// The descriptor of the whole file, if it is stored as one blob.
    pub(super) fn whole(&self) -> Option<std::os::fd::BorrowedFd<'_>> {
        match &self.body {
            Body::Layer { model, layer } => model.fd(model.layers().get(*layer)?.fd?),
            Body::Manifest(_) => None,
        }
    }

    /// Fills `buffer` from `offset` on, or the start of it where the file ends; how much that is.
    ///
    /// # Errors
    /// [`ModelError`]: a blob cannot be read or is too short.
    pub(super) fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<usize, ModelError> {
        match &self.body {
            Body::Manifest(manifest) => {
                let start = usize::try_from(offset).unwrap_or(usize::MAX);
                let left = manifest.raw().get(start..).unwrap_or_default();
                buffer.iter_mut().zip(left).for_each(|(to, from)| *to = *from);
                Ok(left.len().min(buffer.len()))
            }
            Body::Layer { model, layer } => {
                self.was_read.store(true, Ordering::Relaxed);
                model.file(*layer)?.read_at(offset, buffer, |fd, offset, bytes| {
                    model.read_at(fd, offset, bytes)?;
                    drop_behind(model, fd, offset, bytes.len() as u64);
                    Ok(())
                })
            }
        }
    }
}

/// What reading has left in the page cache of the store goes with the last user: the mount has it.
/// What the kernel has read by passthrough stays: nobody else has that.
impl Drop for OpenFile {
    fn drop(&mut self) {
        let Body::Layer { model, layer } = &self.body else { return };
        let Some(file) = model.file(*layer).ok().filter(|_| self.was_read.load(Ordering::Relaxed)) else {
            return;
        };
        for piece in file.iter() {
            if let OpenPiece::Fd { fd, .. } = piece {
                forget(model, *fd, 0, None);
            }
        }
    }
}

/// Drops a blob's pages some way behind a reader: requests that were made one after the other are
/// answered by several threads, and what one of them is about to read must still be there. The
/// range is long enough for the largest folios, which are dropped whole or not at all. Once for each
/// such range: to look for pages that are gone takes as long as to drop them.
fn drop_behind(model: &OpenModel, fd: u32, offset: u64, count: u64) {
    let into_range = offset % DROPPED_BYTES;
    if into_range >= count {
        return;
    }
    let end = (offset - into_range).saturating_sub(LAG_BYTES);
    let start = end.saturating_sub(DROPPED_BYTES);
    if let Some(length) = NonZeroU64::new(end - start) {
        forget(model, fd, start, Some(length));
    }
}

/// Pages that somebody has mapped stay: the kernel drops none that is in use.
fn forget(model: &OpenModel, fd: u32, offset: u64, length: Option<NonZeroU64>) {
    if let Some(fd) = model.fd(fd) {
        // It is advice: a file system that does not take it keeps its pages.
        let _ = fadvise(fd, offset, length, Advice::DontNeed);
    }
}

/// More than is read at a time by all threads together.
const LAG_BYTES: u64 = 4 << 20;
/// Two of the largest folios.
const DROPPED_BYTES: u64 = 4 << 20;
