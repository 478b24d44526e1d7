//! A mounted file that is open: which bytes of which blob it is made of.
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
    Layer { model: Arc<OpenModel>, parts: Vec<Part>, whole: Option<u32> },
}

/// A run of bytes in a file.
#[derive(Debug)]
struct Part {
    /// Where in the file it starts.
    start: u64,
    bytes: PartBytes,
}

#[derive(Debug)]
enum PartBytes {
    /// The bytes behind a descriptor from here on.
    Blob {
        fd: u32,
        offset: u64,
    },
    Literal(Box<[u8]>),
    Zeros,
}

impl OpenFile {
    /// A manifest as a file.
    pub(super) fn of_manifest(manifest: Arc<Manifest>) -> Self {
        Self::new(manifest.raw().len() as u64, Body::Manifest(manifest))
    }

    /// The layer with this digest; `None` if the model has none, or it comes without its pieces.
    pub(super) fn of_layer(model: Arc<OpenModel>, digest: Digest) -> Option<Self> {
        // Of a file that is named many times, the first has the pieces.
        let place = model.layers().iter().position(|layer| layer.digest == digest)?;
        let layer = model.layers().get(place)?;
        let (size, whole) = (layer.size, layer.fd);
        let parts = match whole {
            Some(fd) => vec![Part { start: 0, bytes: PartBytes::Blob { fd, offset: 0 } }],
            None => parts(model.pieces(place)),
        };
        let has_bytes = size == 0 || !parts.is_empty();
        has_bytes.then(|| Self::new(size, Body::Layer { model, parts, whole }))
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
            Body::Layer { model, whole, .. } => model.fd((*whole)?),
            Body::Manifest(_) => None,
        }
    }

    /// Fills `buffer` from `offset` on, or the start of it where the file ends; how much that is.
    ///
    /// # Errors
    /// [`ModelError`]: a blob cannot be read or is too short.
    pub(super) fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<usize, ModelError> {
        let left = self.size.saturating_sub(offset);
        let count = usize::try_from(left).unwrap_or(usize::MAX).min(buffer.len());
        let buffer = buffer.get_mut(..count).unwrap_or_default();
        match &self.body {
            Body::Manifest(manifest) => {
                let start = usize::try_from(offset).unwrap_or(usize::MAX);
                copy(manifest.raw().get(start..).unwrap_or_default(), buffer);
            }
            Body::Layer { model, parts, .. } => {
                self.was_read.store(true, Ordering::Relaxed);
                read_parts(model, parts, offset, buffer)?;
            }
        }
        Ok(count)
    }
}

/// What reading has left in the page cache of the store goes with the last user: the mount has it.
/// What the kernel has read by passthrough stays: nobody else has that.
impl Drop for OpenFile {
    fn drop(&mut self) {
        if let Body::Layer { model, parts, .. } = &self.body {
            for part in parts.iter().filter(|_part| self.was_read.load(Ordering::Relaxed)) {
                if let PartBytes::Blob { fd, .. } = part.bytes {
                    forget(model, fd, 0, None);
                }
            }
        }
    }
}

fn parts(pieces: &[OpenPiece]) -> Vec<Part> {
    let mut start = 0u64;
    let mut parts = Vec::with_capacity(pieces.len());
    for piece in pieces {
        let (bytes, length) = match piece {
            OpenPiece::Fd { fd, offset, length } => (PartBytes::Blob { fd: *fd, offset: *offset }, *length),
            OpenPiece::Zeros { zeros } => (PartBytes::Zeros, *zeros),
            OpenPiece::Literal { literal } => {
                (PartBytes::Literal(literal.as_slice().into()), literal.len() as u64)
            }
        };
        parts.push(Part { start, bytes });
        // The client has checked that they add up to the file's length.
        start = start.saturating_add(length);
    }
    parts
}

fn read_parts(
    model: &OpenModel,
    parts: &[Part],
    mut offset: u64,
    mut buffer: &mut [u8],
) -> Result<(), ModelError> {
    let first = parts.partition_point(|part| part.start <= offset).saturating_sub(1);
    let parts = parts.get(first..).unwrap_or_default();
    let ends = parts.iter().skip(1).map(|part| part.start).chain([u64::MAX]);
    for (part, end) in parts.iter().zip(ends) {
        let left = usize::try_from(end.saturating_sub(offset)).unwrap_or(usize::MAX);
        let (now, later) = buffer.split_at_mut(left.min(buffer.len()));
        read_part(model, part, offset.saturating_sub(part.start), now)?;
        offset = offset.saturating_add(now.len() as u64);
        buffer = later;
        if buffer.is_empty() {
            break;
        }
    }
    Ok(())
}

fn read_part(model: &OpenModel, part: &Part, skip: u64, buffer: &mut [u8]) -> Result<(), ModelError> {
    match &part.bytes {
        PartBytes::Blob { fd, offset } => {
            let offset = offset.saturating_add(skip);
            model.read_at(*fd, offset, buffer)?;
            drop_behind(model, *fd, offset, buffer.len() as u64);
        }
        PartBytes::Literal(bytes) => {
            copy(bytes.get(usize::try_from(skip).unwrap_or(usize::MAX)..).unwrap_or_default(), buffer);
        }
        PartBytes::Zeros => buffer.fill(0),
    }
    Ok(())
}

fn copy(from: &[u8], to: &mut [u8]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to = *from;
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
