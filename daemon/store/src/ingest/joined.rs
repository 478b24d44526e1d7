//! Blobs that are made of stored blobs, such as an expert group whose experts are blobs of their own.

use std::collections::BTreeMap;

use blobd_sha256::Sha256;
use blobd_store_format::digest::Digest;
use blobd_store_format::layout;

use super::Ingest;
use crate::bounded_read::read_exact;
use crate::{Content, StoreError};

/// A range of a stored blob.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlobRange {
    pub blob: Digest,
    /// In bytes from the start of the blob.
    pub offset: u64,
    /// In bytes.
    pub length: u64,
}

/// The result of [`Ingest::join`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Joined {
    /// The blob with this digest was added or is stored.
    As(Digest),
    /// Nothing was added: there is no space for the blob now.
    NoSpace,
    /// Nothing was added: a lower store has some of these blobs, and none has them joined.
    Borrowed,
    /// Nothing was added: one of these blobs has other bytes than its digest says, or is not used as a whole and in order, so
    /// that its bytes cannot be verified.
    Unverified,
    /// Nothing was added: the caller has stopped it.
    Stopped,
}

impl Ingest {
    /// Adds the blob that consists of these ranges of stored blobs, unless it is stored. Reads them twice, and compares their
    /// digests before anything is written. Evicts nothing. The caller has leased them. `report` gets the number of bytes of
    /// each step and returns false to stop.
    pub fn join(
        &mut self,
        ranges: &[BlobRange],
        report: &mut dyn FnMut(u64) -> bool,
    ) -> Result<Joined, StoreError> {
        let size = ranges.iter().map(|range| range.length).fold(0, u64::saturating_add);
        let is_promised = self.admit_now(std::iter::once(size))?;
        if !is_promised && !self.store.content.may_have_blob_of(size)? {
            return Ok(Joined::NoSpace);
        }
        // A blob that cannot be read fails no transaction: it stays as it is.
        let verified = verified(&self.store.content, ranges, report).unwrap_or_else(|error| {
            tracing::warn!("{error}; not joined with others");
            Joined::Unverified
        });
        let joined = match verified {
            Joined::As(digest) if self.reuses(digest, size)? => Joined::As(digest),
            Joined::As(_) if !self.has_own(ranges)? => Joined::Borrowed,
            Joined::As(_) if !is_promised => Joined::NoSpace,
            Joined::As(digest) => return self.write_joined(ranges, (digest, size), report),
            other => other,
        };
        if is_promised {
            self.staging.pass_over(size);
        }
        Ok(joined)
    }

    /// Whether this store itself has all the blobs.
    fn has_own(&self, ranges: &[BlobRange]) -> Result<bool, StoreError> {
        for range in ranges {
            if self.store.content.own_blob_size(range.blob)?.is_none() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn write_joined(
        &mut self,
        ranges: &[BlobRange],
        (digest, size): (Digest, u64),
        report: &mut dyn FnMut(u64) -> bool,
    ) -> Result<Joined, StoreError> {
        let mut writer = self.staging.stage(size);
        let written = each_chunk(&self.store.content, ranges, |_, bytes| {
            writer.append(bytes)?;
            Ok(report(bytes.len() as u64))
        });
        match written {
            Ok(true) => {}
            Ok(false) => return writer.discard().map(|()| Joined::Stopped),
            Err(error) if error.is_no_space() => return writer.discard().map(|()| Joined::NoSpace),
            Err(error) => return Err(error),
        }
        let staged = writer.finish()?;
        if staged.digest != digest {
            return self.staging.discard(&staged).map(|()| Joined::Unverified);
        }
        self.add_blob(staged).map(Joined::As)
    }
}

/// The digest of the ranges together, if each blob has its digest.
fn verified(
    content: &Content,
    ranges: &[BlobRange],
    report: &mut dyn FnMut(u64) -> bool,
) -> Result<Joined, StoreError> {
    let (mut whole, mut parts) = (Sha256::new(), BTreeMap::<Digest, Part>::new());
    let is_complete = each_chunk(content, ranges, |range, bytes| {
        whole.update(bytes);
        parts.entry(range.blob).or_default().add(range.offset, bytes);
        Ok(report(bytes.len() as u64))
    })?;
    if !is_complete {
        return Ok(Joined::Stopped);
    }
    let digest = Digest::from_bytes(whole.finish());
    for (blob, part) in parts {
        // The blob may be the joined one already for some of its files.
        let is_right = blob == digest || part.digest() == Some(blob);
        if !is_right {
            tracing::warn!("blob {blob}: not joined with others: its bytes are not verified by its digest");
            return Ok(Joined::Unverified);
        }
    }
    Ok(Joined::As(digest))
}

/// What was read of a blob, as long as it was read in order.
#[derive(Default)]
struct Part {
    hash: Sha256,
    length: u64,
    has_gap: bool,
}

impl Part {
    fn add(&mut self, offset: u64, bytes: &[u8]) {
        self.has_gap |= offset != self.length;
        self.hash.update(bytes);
        self.length = self.length.saturating_add(bytes.len() as u64);
    }

    fn digest(self) -> Option<Digest> {
        (!self.has_gap).then(|| Digest::from_bytes(self.hash.finish()))
    }
}

/// Calls `visit` with the bytes of the ranges in order, in chunks that are ranges themselves, until it returns false. Returns
/// whether it has seen all.
fn each_chunk(
    content: &Content,
    ranges: &[BlobRange],
    mut visit: impl FnMut(BlobRange, &[u8]) -> Result<bool, StoreError>,
) -> Result<bool, StoreError> {
    let mut buffer = vec![0; crate::CHUNK_BYTES];
    for BlobRange { blob, offset: mut start, length } in ranges.iter().copied() {
        let end = start.saturating_add(length);
        let (file, root) = content.find_blob(blob, end)?;
        while start < end {
            let length = buffer.len().min(usize::try_from(end - start).unwrap_or(usize::MAX));
            let bytes = buffer.get_mut(..length).unwrap_or_default();
            read_exact(&file, bytes, start).map_err(root.failure("read", &layout::blob(blob)))?;
            let chunk = BlobRange { blob, offset: start, length: length as u64 };
            if !visit(chunk, bytes)? {
                return Ok(false);
            }
            start = start.saturating_add(length as u64);
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests;
