//! Tensors that peers have, although none of them has the file: those that a tensor index names and that this store lacks.
//!
//! Each is requested by its own digest, and used only if it has that digest. What no peer has is downloaded with the rest of the
//! file.

use std::collections::BTreeMap;

use blobd_registry::ByteStream;
use blobd_store::Assembler;
use blobd_store_format::digest::{Digest, Hasher};
use blobd_store_format::split::{Segment, Target};

use super::indexed_blobs::IndexedBlobs;
use super::{Job, TransferError, rate_limit};

/// Shorter tensors are not worth a request of their own.
const LEAST_BYTES: u64 = 16 << 10;
/// If the peers lack this many tensors in a row, the others are not asked for.
const MAX_MISSES: usize = 8;

/// Downloads the missing tensors that peers have. Returns the number of bytes that were received.
///
/// # Errors
/// Those of the store; [`TransferError::Unwanted`].
pub(super) fn fetch(
    job: &Job<'_>,
    assembler: &Assembler,
    indexed: Option<&IndexedBlobs>,
) -> Result<u64, TransferError> {
    let has_peers = job.registry.has_peers();
    // Ranges of a whole file take fewer requests.
    let is_useful = |_: &&IndexedBlobs| has_peers && !job.registry.may_be_at_peer(job.file);
    let Some(indexed) = indexed.filter(is_useful) else { return Ok(0) };
    let mut places = places(assembler);
    let (mut received, mut misses) = (0_u64, 0);
    for (blob, digest, size) in indexed.missing(assembler) {
        if size < LEAST_BYTES {
            continue;
        }
        if misses == MAX_MISSES {
            break;
        }
        let tensor = job.file.part_with_digest(digest, size);
        match job.handle.block_on(job.registry.open_at_peer(&tensor, None)) {
            None => misses += 1,
            Some(stream) => {
                misses = 0;
                let tensor = Tensor { blob, digest, places: places.remove(&blob).unwrap_or_default() };
                received = received.saturating_add(tensor.receive(job, assembler, stream)?);
            }
        }
    }
    Ok(received)
}

/// A tensor that a peer sends.
struct Tensor {
    blob: usize,
    digest: Digest,
    places: Vec<Place>,
}

/// Where the file has a part of a planned blob.
struct Place {
    offset_in_blob: u64,
    offset_in_file: u64,
    length: u64,
}

/// The parts of each planned blob.
fn places(assembler: &Assembler) -> BTreeMap<usize, Vec<Place>> {
    let mut places: BTreeMap<usize, Vec<Place>> = BTreeMap::new();
    for Segment { target, offset_in_file, length } in assembler.plan().segments() {
        if let Target::Blob { blob, offset_in_blob } = *target {
            let (offset_in_file, length) = (*offset_in_file, *length);
            places.entry(blob).or_default().push(Place { offset_in_blob, offset_in_file, length });
        }
    }
    places
}

impl Tensor {
    /// Writes the tensor into the file. If the connection breaks or the digest is wrong, it is as if nothing had arrived.
    fn receive(
        &self,
        job: &Job<'_>,
        assembler: &Assembler,
        mut stream: ByteStream,
    ) -> Result<u64, TransferError> {
        let (mut hasher, mut position) = (Hasher::new(), 0_u64);
        let is_complete = loop {
            match job.handle.block_on(stream.next()) {
                Ok(Some(bytes)) => {
                    hasher.update(&bytes);
                    self.write(assembler, position, &bytes)?;
                    position = position.saturating_add(bytes.len() as u64);
                    job.handle.block_on(rate_limit::wait(&job.limits, bytes.len()));
                    if !(job.report)(assembler.arrived_bytes()) {
                        return Err(TransferError::Unwanted);
                    }
                }
                Ok(None) => break true,
                Err(_broken) => break false,
            }
        };
        if !is_complete || hasher.finish() != self.digest {
            if is_complete {
                job.registry.set_peers_aside([&**stream.sender()]);
            }
            assembler.forget_arrived(self.blob);
        }
        Ok(position)
    }

    /// Writes bytes of the tensor, from this position on, to where the file has them.
    fn write(&self, assembler: &Assembler, position: u64, bytes: &[u8]) -> Result<(), TransferError> {
        let end = position.saturating_add(bytes.len() as u64);
        for &Place { offset_in_blob, offset_in_file, length } in &self.places {
            let (start, stop) =
                (position.max(offset_in_blob), end.min(offset_in_blob.saturating_add(length)));
            if start >= stop {
                continue;
            }
            let index = |place: u64| usize::try_from(place.saturating_sub(position)).unwrap_or(usize::MAX);
            let part = bytes.get(index(start)..index(stop)).unwrap_or_default();
            assembler.write(offset_in_file.saturating_add(start.saturating_sub(offset_in_blob)), part)?;
        }
        Ok(())
    }
}
