//! What a tensor index says a file consists of, compared with the plan made from the file's own header.
//!
//! The index is not trusted. The header is always downloaded; only an index that has its digest is used, which leaves out
//! those of other files. What it says about a tensor is used as a sample that agrees is: a stored blob takes the place of a
//! download until the digest of the whole file decides. If that is wrong, all these blobs are downloaded, so that an index
//! can cost a download of the file, and nothing else.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use blobd_store::leases::Lease;
use blobd_store::{Assembler, Store, StoreError};
use blobd_store_format::digest::Digest;
use blobd_store_format::recipe::{Piece, Recipe};
use blobd_store_format::split::{BlobContent, Segment, SplitPlan, Target};
use blobd_store_format::stored_file::Source;

use super::Job;
use super::tensor_reuse::{Candidate, models_by_similarity};

/// The planned blobs and literals of a file, as its tensor index has them.
#[derive(Debug, Default)]
pub(super) struct IndexedBlobs {
    blobs: BTreeMap<usize, IndexedPart>,
    /// Bytes between tensors, with their offsets in the file.
    literals: Vec<(u64, Vec<u8>)>,
}

/// Where a planned blob is, according to the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct IndexedPart {
    blob: Digest,
    /// Its offset in that blob, which is longer if it has experts of other shards too.
    at: u64,
}

impl IndexedBlobs {
    /// `start` are the first bytes of the file. `None` if its header is not the one in the index.
    pub(super) fn new(recipe: &Recipe, plan: &SplitPlan, start: &[u8]) -> Option<Self> {
        let (digest, size) = recipe.header()?;
        let header = start.get(..usize::try_from(size).ok()?)?;
        let is_same = plan.blobs().first()?.size == size && Digest::of(header) == digest;
        if !is_same || recipe.size() != plan.file_size() {
            return None;
        }
        let (mut known, mut literals) = (KnownParts::default(), Vec::new());
        for Segment { target, offset_in_file, length } in plan.segments().iter().copied() {
            let source =
                recipe.pieces().sources(offset_in_file..offset_in_file.saturating_add(length)).next();
            let source = source.filter(|source| source.length() == length);
            match (target, source) {
                (Target::Blob { blob, offset_in_blob }, Some(Source::Blob { blob: digest, offset, .. })) => {
                    let at = offset.checked_sub(offset_in_blob);
                    known.add(blob, at.map(|at| IndexedPart { blob: digest, at }));
                }
                (Target::Blob { blob, .. }, _) => known.add(blob, None),
                (Target::Literal { .. }, Some(Source::Zeros { length })) => {
                    literals.push((offset_in_file, vec![0; usize::try_from(length).unwrap_or_default()]));
                }
                (Target::Literal { .. }, Some(Source::Literal { bytes })) => {
                    literals.push((offset_in_file, bytes.to_vec()));
                }
                (Target::Literal { .. }, _) => {}
            }
        }
        Some(Self { blobs: known.into_blobs(), literals })
    }

    /// The planned blobs that the store has in models that the user may read, leased.
    pub(super) fn candidates(
        &self,
        store: &Store,
        lease: &Lease,
        job: &Job<'_>,
        plan: &SplitPlan,
    ) -> Result<Vec<Candidate>, StoreError> {
        let mut stored = Vec::new();
        for (planned, part) in &self.blobs {
            // The header has been downloaded.
            let blob = plan.blobs().get(*planned).filter(|blob| blob.content != BlobContent::Header);
            let size = blob.map_or(0, |blob| blob.size);
            // Before the check, so that no collection deletes it in between.
            lease.protect(part.blob);
            if size > 0
                && let Some(found) = store.content().blob_size(part.blob)?
            {
                stored.push((*planned, *part, (size, found)));
            }
        }
        let models = models_with(store, job, stored.iter().map(|(_, part, _)| part.blob).collect())?;
        let candidate = |(planned, IndexedPart { blob, at }, sizes)| {
            Candidate::within(planned, (blob, at), sizes, *models.get(&blob)?)
        };
        Ok(stored.into_iter().filter_map(candidate).collect())
    }

    /// The planned blobs that have received no bytes yet, with their digests and sizes. Those that are known to be parts of
    /// longer blobs are left out.
    pub(super) fn missing(&self, assembler: &Assembler) -> Vec<(usize, Digest, u64)> {
        let stored = assembler.stored();
        let size = |blob: usize| assembler.plan().blobs().get(blob).map_or(0, |planned| planned.size);
        let is_missing = |blob: usize| !stored.contains_key(&blob) && assembler.is_untouched(blob);
        let missing = self.blobs.iter().filter(|(blob, part)| part.at == 0 && is_missing(**blob));
        missing.map(|(blob, part)| (*blob, part.blob, size(*blob))).collect()
    }

    /// Leaves out what is copied from longer blobs: its own digest is not in the index.
    pub(super) fn leave_out_parts(&mut self, candidates: &[Candidate]) {
        for part in candidates.iter().filter(|candidate| candidate.part_at.is_some()) {
            self.blobs.remove(&part.blob);
        }
    }

    /// Uses the bytes between tensors as they are in the index, so that none is requested for itself.
    pub(super) fn write_literals(&self, assembler: &Assembler) -> Result<(), StoreError> {
        self.literals.iter().try_for_each(|(offset, bytes)| assembler.write(*offset, bytes))
    }

    /// Undoes [`Self::write_literals`].
    pub(super) fn forget_literals(&self, assembler: &Assembler) {
        self.literal_ranges().for_each(|range| assembler.forget_literal(range));
    }

    /// The blobs that were downloaded and do not have the digests that the index names; `found` are those of all blobs. The
    /// second time none, and none if they are so much of the file that the index is more likely to be wrong.
    pub(super) fn take_damaged(&mut self, assembler: &Assembler, found: &[Digest]) -> Vec<usize> {
        let (planned, stored) = (assembler.plan().blobs(), assembler.stored());
        let is_other = |(blob, part): &(usize, IndexedPart)| {
            let is_comparable = part.at == 0 && found.len() == planned.len() && !stored.contains_key(blob);
            is_comparable && found.get(*blob) != Some(&part.blob)
        };
        let damaged: Vec<_> = std::mem::take(&mut self.blobs).into_iter().filter(is_other).collect();
        let damaged: Vec<usize> = damaged.into_iter().map(|(blob, _)| blob).collect();
        let sizes = damaged.iter().filter_map(|blob| planned.get(*blob)).map(|planned| planned.size);
        let is_little = sizes.fold(0, u64::saturating_add) <= assembler.plan().file_size() / 4;
        if is_little { damaged } else { Vec::new() }
    }

    fn literal_ranges(&self) -> impl Iterator<Item = Range<u64>> {
        self.literals.iter().map(|(offset, bytes)| *offset..offset.saturating_add(bytes.len() as u64))
    }
}

/// The places known so far; `None` for a blob if the index does not have all its segments at the same distances in one blob.
#[derive(Default)]
struct KnownParts(BTreeMap<usize, Option<IndexedPart>>);

impl KnownParts {
    fn add(&mut self, blob: usize, part: Option<IndexedPart>) {
        let known = self.0.entry(blob).or_insert(part);
        if *known != part {
            *known = None;
        }
    }

    fn into_blobs(self) -> BTreeMap<usize, IndexedPart> {
        self.0.into_iter().filter_map(|(blob, part)| Some((blob, part?))).collect()
    }
}

/// For each of these blobs the manifest of a stored model that has it and that the user may read.
fn models_with(
    store: &Store,
    job: &Job<'_>,
    mut wanted: BTreeSet<Digest>,
) -> Result<BTreeMap<Digest, Digest>, StoreError> {
    let (mut found, mut seen) = (BTreeMap::new(), BTreeSet::new());
    for model in models_by_similarity(store, job.file)? {
        if wanted.is_empty() {
            break;
        }
        let Ok(manifest) = &model.manifest else { continue };
        if !(job.may_read)(&model.reference, manifest.digest) {
            continue;
        }
        for file in manifest.files.iter().filter(|file| seen.insert(**file)) {
            let mut note = |blob: Digest| {
                if wanted.remove(&blob) {
                    found.insert(blob, manifest.digest);
                }
            };
            note(*file);
            // Damaged ones are skipped here; `verify` reports them.
            if let Ok(Some(recipe)) = store.content().recipe(*file) {
                for piece in recipe.pieces().iter() {
                    if let Piece::Blob { blob, .. } = piece {
                        note(*blob);
                    }
                }
            }
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use blobd_store_format::gguf::{GgmlType, GgufWriter, Header};
    use blobd_store_format::tensor::TensorFormat;

    use super::*;

    /// The plan and header of a file with three tensors of 100 bytes, and its recipe with the blobs `a`, `b` and `c`.
    fn file() -> (SplitPlan, Vec<u8>, Recipe) {
        let mut writer = GgufWriter::new();
        for name in ["a", "b", "c"] {
            writer.tensor(name, GgmlType::I8, &[100]).unwrap();
        }
        let header = writer.header().unwrap();
        let size = header.len() as u64 + 2 * 128 + 100;
        let plan = SplitPlan::new(Header::parse(&header).unwrap().file_layout(size).unwrap());
        let blobs = [&header[..], b"a", b"b", b"c"].map(Digest::of);
        let literals = vec![vec![0; 28]; plan.literal_count()];
        let recipe = plan.clone().recipe(Digest::of(b"file"), &blobs, literals).unwrap();
        (plan, header, recipe)
    }

    fn with(recipe: &Recipe, change: impl FnOnce(&mut Vec<Piece>)) -> Recipe {
        let mut pieces: Vec<Piece> = recipe.pieces().iter().cloned().collect();
        change(&mut pieces);
        Recipe::new(recipe.file(), TensorFormat::Gguf, pieces, Vec::new()).unwrap()
    }

    #[test]
    fn index_of_the_file_names_all_its_blobs_and_gaps() {
        let (plan, header, recipe) = file();
        let known = IndexedBlobs::new(&recipe, &plan, &header).unwrap();
        let whole = |blob| IndexedPart { blob: Digest::of(blob), at: 0 };
        let wanted = [&header[..], b"a", b"b", b"c"].map(whole).into_iter().enumerate().collect();
        assert_eq!(known.blobs, wanted);
        assert_eq!(known.literals.len(), 2);
        assert!(known.literals.iter().all(|(_, bytes)| *bytes == [0; 28]));
        let lengths: u64 = known.literal_ranges().map(|range| range.end - range.start).sum();
        assert_eq!(lengths, plan.literal_bytes());
    }

    #[test]
    fn index_with_another_header_is_not_used() {
        let (plan, header, recipe) = file();
        assert!(IndexedBlobs::new(&recipe, &plan, &header[1..]).is_none());
        let other = [&header[..header.len() - 1], b"x"].concat();
        assert!(IndexedBlobs::new(&recipe, &plan, &other).is_none());
        let short = with(&recipe, |pieces| drop(pieces.pop()));
        assert!(IndexedBlobs::new(&short, &plan, &header).is_none());
    }

    #[test]
    fn parts_that_are_not_as_planned_are_not_claimed() {
        let (plan, header, recipe) = file();
        // The second tensor moves into its padding.
        let moved = with(&recipe, |pieces| {
            pieces[3] = Piece::Blob { blob: Digest::of(b"b"), offset: 0, length: 90 };
            pieces[4] = Piece::Zeros { zeros: 38 };
        });
        let known = IndexedBlobs::new(&moved, &plan, &header).unwrap();
        assert_eq!(known.blobs.keys().collect::<Vec<_>>(), [&0, &1, &3]);
        assert_eq!(known.literals.len(), 2);
    }

    #[test]
    fn parts_of_longer_blobs_are_known_with_their_offsets() {
        let (plan, header, recipe) = file();
        let at = |known: &IndexedBlobs, blob: usize| known.blobs[&blob].at;
        let shifted = with(&recipe, |pieces| {
            pieces[3] = Piece::Blob { blob: Digest::of(b"b"), offset: 1, length: 100 };
        });
        let known = IndexedBlobs::new(&shifted, &plan, &header).unwrap();
        assert_eq!([1, 2, 3].map(|blob| at(&known, blob)), [0, 1, 0]);
        // All of the file is one piece.
        let whole = with(&recipe, |pieces| {
            pieces.truncate(1);
            pieces.push(Piece::Blob { blob: Digest::of(b"x"), offset: 0, length: 2 * 128 + 100 });
        });
        let known = IndexedBlobs::new(&whole, &plan, &header).unwrap();
        assert_eq!([1, 2, 3].map(|blob| at(&known, blob)), [0, 128, 256]);
        assert!(known.literals.is_empty());
    }
}
