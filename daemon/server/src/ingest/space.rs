//! The space of a file that is imported: it is reserved for what the store lacks, before anything is written.

use std::collections::BTreeMap;
use std::ops::Range;

use blobd_store::{CHUNK_BYTES, Ingest, RangeSource as _};
use blobd_store_format::digest::{Digest, Hasher};
use blobd_store_format::split::{BlobPlaces, PlannedBlob, SplitPlan, Target};

use super::{Content, IngestError};

/// Reserves space for the file. If it does not fit as a whole, finds the parts that are stored and reserves space for the
/// others only; returns the digests of the stored parts. A stream cannot be read for that: its parts take space one by one.
pub(super) fn admit(
    ingest: &Ingest,
    plan: &SplitPlan,
    content: &mut Content<'_>,
) -> Result<BTreeMap<usize, Digest>, IngestError> {
    let blobs = own_blobs(plan);
    let sizes = blobs.clone().map(|(_, blob)| blob.size);
    ingest.expect_record(recipe_bytes(plan));
    if content.is_stream {
        announce(ingest, plan, sizes.clone());
        ingest.admit(sizes)?;
        return Ok(BTreeMap::new());
    }
    if ingest.admit_now(sizes.clone())? {
        announce(ingest, plan, sizes);
        return Ok(BTreeMap::new());
    }
    // Before the file is read to be compared.
    ingest.reserve_certainly_new(sizes.clone())?;
    let stored = find_stored(ingest, plan, content)?;
    let new = blobs.filter(|(blob, _)| !stored.contains_key(blob)).map(|(_, blob)| blob.size);
    announce(ingest, plan, new.clone());
    ingest.admit_all(new)?;
    Ok(stored)
}

/// The planned blobs without those that other files have parts of too, for which space is reserved before all files.
fn own_blobs(plan: &SplitPlan) -> impl Iterator<Item = (usize, &PlannedBlob)> + Clone {
    plan.blobs().iter().enumerate().filter(|(_, blob)| blob.shared_group().is_none())
}

/// Hashes those planned blobs whose length a stored blob has, and leases those that are stored. Reads nothing of a file
/// that shares no length with the store.
fn find_stored(
    ingest: &Ingest,
    plan: &SplitPlan,
    content: &mut Content<'_>,
) -> Result<BTreeMap<usize, Digest>, IngestError> {
    let store = ingest.store();
    let mut possible = Vec::new();
    for (blob, planned) in own_blobs(plan) {
        if store.content().may_have_blob_of(planned.size)? {
            possible.push((blob, planned.size));
        }
    }
    content.is_comparing = true;
    content.to_compare = possible.iter().fold(0, |sum: u64, (_, size)| sum.saturating_add(*size));
    let (places, mut stored) = (BlobPlaces::new(plan), BTreeMap::new());
    for (blob, size) in possible {
        let digest = hash(&ranges(plan, &places, blob), content)?;
        // Before the check, or a collection could delete it in between.
        ingest.lease().protect(digest);
        if store.content().blob_size(digest)? == Some(size) {
            stored.insert(blob, digest);
        }
    }
    content.is_comparing = false;
    Ok(stored)
}

/// Lists the ranges of the file that make up a blob, in the blob's order.
fn ranges(plan: &SplitPlan, places: &BlobPlaces, blob: usize) -> Vec<Range<u64>> {
    let mut segments: Vec<_> = places.segments(plan, blob).collect();
    segments.sort_by_key(|segment| match segment.target {
        Target::Blob { offset_in_blob, .. } => offset_in_blob,
        Target::Literal { .. } => 0,
    });
    let mut ranges = Vec::new();
    for segment in segments {
        let mut start = segment.offset_in_file;
        let end = start.saturating_add(segment.length);
        while start < end {
            let next = end.min(start.saturating_add(CHUNK_BYTES as u64));
            ranges.push(start..next);
            start = next;
        }
    }
    ranges
}

/// Reads one range while another is hashed.
fn hash(ranges: &[Range<u64>], content: &mut Content<'_>) -> Result<Digest, IngestError> {
    let mut hash = Hasher::new();
    let mut ahead = ranges.iter().cloned();
    if let Some(first) = ahead.next() {
        content.request(first)?;
    }
    for _range in ranges {
        if let Some(next) = ahead.next() {
            content.request(next)?;
        }
        hash.update(&content.receive()?);
    }
    Ok(hash.finish())
}

/// Replaces the announced size of the whole file, without its parts of shared blobs, by the sizes of the blobs that may
/// have to be stored and an estimate of the recipe's.
pub(crate) fn announce(ingest: &Ingest, plan: &SplitPlan, blobs: impl Iterator<Item = u64>) {
    let is_shared = |target: Target| match target {
        Target::Blob { blob, .. } => plan.blobs().get(blob).is_some_and(|blob| blob.shared_group().is_some()),
        Target::Literal { .. } => false,
    };
    let shared = plan.segments().iter().filter(|segment| is_shared(segment.target));
    let shared_bytes = shared.fold(0, |sum: u64, segment| sum.saturating_add(segment.length));
    let own_bytes = plan.file_size().saturating_sub(shared_bytes);
    ingest.staging().expect_instead(own_bytes, blobs.chain([recipe_bytes(plan)]));
}

/// An estimate of the length of the recipe.
pub(crate) fn recipe_bytes(plan: &SplitPlan) -> u64 {
    /// Generous, and with the tensor's pieces.
    const RECIPE_BYTES_PER_TENSOR: u64 = 512;
    RECIPE_BYTES_PER_TENSOR.saturating_mul(plan.tensors().len() as u64)
}
