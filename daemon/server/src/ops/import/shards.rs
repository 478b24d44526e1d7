//! The shards of a model that is imported, and the expert groups that several of them have tensors of.
//!
//! All headers are read before any shard is read in full, so that each expert is written to its place in the blob of its
//! group. Of a header, only the names of the groups and a digest are kept.

use std::collections::BTreeMap;

use blobd_store::{CHUNK_BYTES, Ingest, SharedBlobs};
use blobd_store_format::digest::{Digest, Hasher};
use blobd_store_format::file_format::ModelHeader;
use blobd_store_format::recipe::{Recipe, RecipeError};
use blobd_store_format::split::{PlaceInFiles, SharedGroups};

use super::source::{FileFacts, ImportSource};
use crate::ingest::{BegunFile, IngestError};
use crate::ops::shard_sets::ShardSets;

/// Reads the headers. Files are known by their numbers.
#[derive(Default)]
pub(super) struct ShardReader {
    sets: ShardSets,
    seen: BTreeMap<usize, Seen>,
}

/// A shard whose header was read.
struct Seen {
    facts: FileFacts,
    header: Digest,
}

/// The shards of a model, and what was stored of the blobs that they share.
pub(super) struct Shards {
    groups: SharedGroups,
    seen: BTreeMap<usize, Seen>,
    blobs: SharedBlobs,
}

impl ShardReader {
    pub(super) fn add(
        &mut self,
        (number, name): (usize, &str),
        facts: FileFacts,
        file: &BegunFile<'_>,
    ) -> Result<(), IngestError> {
        let Some(header) = file.header() else { return Ok(()) };
        if !self.sets.add((number, name), facts.size, header)? {
            return Ok(());
        }
        self.seen.insert(number, Seen { facts, header: header.digest() });
        Ok(())
    }

    pub(super) fn finish(self) -> Shards {
        Shards { groups: self.sets.shared(), seen: self.seen, blobs: SharedBlobs::default() }
    }
}

impl Shards {
    /// Reserves space for the blobs that the shards share, before any of them is read in full. If it does not suffice for
    /// all, finds those that are stored, and reserves space for the others only.
    pub(super) fn admit(
        &mut self,
        ingest: &mut Ingest,
        source: &mut dyn ImportSource,
    ) -> Result<(), IngestError> {
        let groups = || self.groups.blob_sizes().iter().copied().enumerate();
        let sizes = groups().map(|(_, size)| size);
        let bytes = sizes.clone().fold(0, u64::saturating_add);
        if bytes == 0 || ingest.admit_now(sizes.clone())? {
            ingest.staging().expect_instead(bytes, sizes);
            return Ok(());
        }
        ingest.reserve_certainly_new(sizes)?;
        let mut new = Vec::new();
        for (group, size) in groups() {
            match find_stored(ingest, self.groups.places_of(group), size, source)? {
                Some(digest) => {
                    self.blobs.take_stored(group, digest);
                    ingest.note_reused(size);
                }
                None => new.push(size),
            }
        }
        ingest.staging().expect_instead(bytes, new.iter().copied());
        Ok(ingest.admit_all(new.into_iter())?)
    }

    /// The file, planned with what it shares. Refuses one that is not as it was when its header was read first.
    pub(super) fn sharing<'f>(
        &self,
        number: usize,
        facts: FileFacts,
        file: BegunFile<'f>,
    ) -> Result<BegunFile<'f>, IngestError> {
        let Some(seen) = self.seen.get(&number) else { return Ok(file) };
        let header = file.header().map(ModelHeader::digest);
        if (facts, header) != (seen.facts, Some(seen.header)) {
            return Err(IngestError::Changed);
        }
        Ok(file.sharing(self.groups.parts_of(number)))
    }

    pub(super) const fn blobs(&mut self) -> &mut SharedBlobs {
        &mut self.blobs
    }

    /// The recipes of the shards that share something, after all were read.
    pub(super) fn into_recipes(self) -> Result<Vec<Recipe>, RecipeError> {
        self.blobs.into_recipes()
    }
}

/// The digest of the blob with these bytes of the files, if it is stored; it is leased then. Reads nothing if no stored blob
/// has this size.
fn find_stored(
    ingest: &Ingest,
    places: &[PlaceInFiles],
    size: u64,
    source: &mut dyn ImportSource,
) -> Result<Option<Digest>, IngestError> {
    let content = ingest.store().content();
    if !content.may_have_blob_of(size)? {
        return Ok(None);
    }
    let mut hash = Hasher::new();
    for PlaceInFiles { file, offset, size } in places {
        source.select(*file).map_err(IngestError::Source)?;
        let end = offset.saturating_add(*size);
        let mut start = *offset;
        while start < end {
            let next = end.min(start.saturating_add(CHUNK_BYTES as u64));
            source.request(start..next).map_err(IngestError::Source)?;
            let bytes = source.receive().map_err(IngestError::Source)?;
            if bytes.len() as u64 != next.saturating_sub(start) {
                return Err(IngestError::Changed);
            }
            hash.update(&bytes);
            start = next;
        }
    }
    let digest = hash.finish();
    // Before the check, or a collection could delete it in between.
    ingest.lease().protect(digest);
    Ok((content.blob_size(digest)? == Some(size)).then_some(digest))
}
