//! Finds the parts of a file that the store has, before anything is written.

use std::collections::BTreeMap;
use std::ops::Range;

use blobd_store::{CHUNK_BYTES, Ingest, RangeSource as _};
use blobd_store_format::digest::{Digest, Hasher};
use blobd_store_format::split::{BlobPlaces, SplitPlan, Target};

use super::{Content, IngestError};

/// Hashes those planned blobs whose length a stored blob has, and leases those that are stored. Reads nothing of a file
/// that shares no length with the store.
pub(super) fn find_stored(
    ingest: &Ingest,
    plan: &SplitPlan,
    content: &mut Content<'_>,
) -> Result<BTreeMap<usize, Digest>, IngestError> {
    let store = ingest.store();
    let mut possible = Vec::new();
    for (blob, planned) in plan.blobs().iter().enumerate() {
        if store.content().may_have_blob_of(planned.size)? {
            possible.push((blob, planned.size));
        }
    }
    content.begin_comparison(
        possible.iter().map(|(_, size)| size).fold(0, |sum, size| sum.saturating_add(*size)),
    );
    let (places, mut stored) = (BlobPlaces::of(plan), BTreeMap::new());
    for (blob, size) in possible {
        let digest = hash(&ranges(plan, &places, blob), content)?;
        // Before the check, or a collection could delete it in between.
        ingest.lease().protect(digest);
        if store.content().blob_size(digest)? == Some(size) {
            stored.insert(blob, digest);
        }
    }
    content.end_comparison();
    Ok(stored)
}

/// The ranges of the file that a blob consists of, in the order of the blob.
fn ranges(plan: &SplitPlan, places: &BlobPlaces, blob: usize) -> Vec<Range<u64>> {
    let mut segments: Vec<_> = places.segments(plan, blob).collect();
    segments.sort_by_key(|segment| match segment.target {
        Target::Blob { offset_in_blob, .. } => offset_in_blob,
        Target::Literal { .. } => 0,
    });
    let mut ranges = Vec::new();
    for segment in segments {
        let (mut start, end) =
            (segment.offset_in_file, segment.offset_in_file.saturating_add(segment.length));
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
