//! Reuses stored tensors of similar files instead of downloading them.
//!
//! A registry gives only the digest of the whole file. But the head lists the tensors; where a stored file has a tensor of
//! the same name, type and shape, a few of its bytes are fetched and compared. If they agree, the stored tensor is reused
//! provisionally, and the digest of the whole file decides. If that is wrong, reused tensors are downloaded after all, the
//! least certain first ([`ReusedTensors::next_to_fetch`]).
//!
//! Samples that agree do not show that the user has the tensor: a fine-tune agrees with its public base nearly
//! everywhere. So only files of models that the user may read are similar files ([`Job::may_read`]).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use blobd_registry::{RegistryClient, RegistryError, RemoteFile};
use blobd_store::leases::Lease;
use blobd_store::{Assembler, CHUNK_BYTES, FileReader, Store, StoreError, TagSummary};
use blobd_store_format::digest::Digest;
use blobd_store_format::recipe::{Recipe, TensorEntry};
use blobd_store_format::reference::Reference;
use blobd_store_format::split::{BlobPlaces, SplitPlan, Target};
use tokio::task::JoinSet;
use tracing::Instrument as _;

use super::{Job, RateLimit, Silence, TransferError, rate_limit};

/// A planned blob and the stored blob that may be the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Candidate {
    pub(super) blob: usize,
    pub(super) digest: Digest,
    pub(super) size: u64,
    /// Where the planned blob is in the stored one, if that is longer. The bytes are copied then.
    pub(super) part_at: Option<u64>,
    /// The manifest of a model that has it.
    model: Digest,
    samples: usize,
}

impl Candidate {
    /// One that the store has in `stored`, a blob and the offset in it. `sizes` are its own size and that of the blob; `None` if
    /// it is not inside. `model` is the manifest of a model that has the blob.
    pub(super) fn within(
        planned: usize,
        (digest, offset): (Digest, u64),
        (size, stored): (u64, u64),
        model: Digest,
    ) -> Option<Self> {
        let is_inside = size > 0 && offset.checked_add(size).is_some_and(|end| end <= stored);
        let part_at = Some(offset).filter(|_| size != stored);
        is_inside.then_some(Self { blob: planned, digest, size, part_at, model, samples: 0 })
    }
}

/// A stored file that may share tensors with the one to download.
#[derive(Clone, Debug)]
pub(super) struct SimilarFile {
    pub(super) recipe: Arc<Recipe>,
    /// The manifest of the model that the user may read.
    pub(super) model: Digest,
}

/// Stored blobs that are reused until the digest of the whole file is checked.
#[derive(Debug, Default)]
pub(super) struct ReusedTensors {
    /// Sorted, the least certain last.
    candidates: Vec<Candidate>,
    /// How many bytes are downloaded after all if the digest differs the next time.
    batch_bytes: u64,
}

/// How many stored files are compared: those of the most similar models, each with all its shards, because a tensor may
/// be in another shard.
const MAX_SIMILAR_FILES: usize = 32;
/// Tensors up to this size are not sampled: they are reused if the large ones of the same file agree.
const UNSAMPLED_BYTES: u64 = 4 << 10;
const SAMPLE_BYTES: u64 = 64;
/// The largest number of sampled tensors; in a model with more, only the largest are sampled.
const MAX_SAMPLED: usize = 4096;
const SAMPLES_AT_ONCE: usize = 8;
/// After this many failed requests, no more are sent.
const MAX_FAILURES: usize = 8;
/// If none of this many tensors agrees, nothing is reused.
const PROBES: usize = 8;
/// Fewer bytes are downloaded as fast as they are compared.
const MIN_REUSED_BYTES: u64 = 1 << 20;

/// Finds the planned blobs that the store may have, not yet compared, and leases them.
pub(super) fn candidates(
    store: &Store,
    lease: &Lease,
    similar_files: &[SimilarFile],
    plan: &SplitPlan,
) -> Result<Vec<Candidate>, StoreError> {
    let mut found: BTreeMap<usize, (Digest, u64, Digest)> = BTreeMap::new();
    for SimilarFile { recipe, model } in similar_files {
        // A more similar file has priority.
        for (blob, (digest, offset)) in same_tensors(plan, recipe) {
            found.entry(blob).or_insert((digest, offset, *model));
        }
    }
    let mut candidates = Vec::new();
    for (blob, (digest, offset, model)) in found {
        let size = plan.blobs().get(blob).map_or(0, |planned| planned.size);
        // Before the check, so that no collection deletes it in between.
        lease.protect(digest);
        let stored = store.content().blob_size(digest)?.unwrap_or_default();
        candidates.extend(Candidate::within(blob, (digest, offset), (size, stored), model));
    }
    let all = candidates.iter().map(|candidate| candidate.size).fold(0, u64::saturating_add);
    Ok(if all < MIN_REUSED_BYTES { Vec::new() } else { candidates })
}

/// Finds stored files that may share tensors and that the user may read, the most similar first: other tags of the model,
/// then files of about the same size.
pub(super) fn similar_files(store: &Store, job: &Job<'_>) -> Result<Vec<SimilarFile>, StoreError> {
    if job.file.digest().is_none() {
        // Without an expected digest, reuse could not be verified.
        return Ok(Vec::new());
    }
    let mut seen = BTreeSet::new();
    let mut similar_files = Vec::new();
    for model in &models_by_similarity(store, job.file)? {
        let Ok(manifest) = &model.manifest else { continue };
        let is_known = manifest.files.iter().all(|other| seen.contains(other));
        if is_known || !(job.may_read)(&model.reference, manifest.digest) {
            continue;
        }
        for other in manifest.files.iter().filter(|other| seen.insert(**other)) {
            // Damaged ones are skipped here; `verify` reports them.
            if let Ok(Some(recipe)) = store.content().recipe(*other) {
                similar_files.push(SimilarFile { recipe, model: manifest.digest });
            }
        }
        if similar_files.len() >= MAX_SIMILAR_FILES {
            break;
        }
    }
    Ok(similar_files)
}

/// The stored models, the most similar first: other tags of the model, then those of about the same size.
pub(super) fn models_by_similarity(
    store: &Store,
    file: &RemoteFile,
) -> Result<Vec<Arc<TagSummary>>, StoreError> {
    let mut models = store.names().all_summaries()?;
    let is_sibling = |reference: &Reference| file.model().is_some_and(|own| own.is_sibling_of(reference));
    models.sort_by_cached_key(|model| {
        let size = model.manifest.as_ref().map_or(u64::MAX, |manifest| manifest.size);
        (!is_sibling(&model.reference), size.abs_diff(file.size()))
    });
    Ok(models)
}

/// Finds the planned blobs whose tensors a stored file has too, with the same names, types and shapes, all in one blob and
/// there at the same distances. Returns that blob, and the offset of the planned one in it: a group of experts that shards
/// have parts of is one blob.
fn same_tensors(plan: &SplitPlan, recipe: &Recipe) -> BTreeMap<usize, (Digest, u64)> {
    let stored: BTreeMap<&str, TensorEntry<'_>> =
        recipe.tensors().names().zip(recipe.tensors().iter()).collect();
    let mut found: BTreeMap<usize, Option<(Digest, u64)>> = BTreeMap::new();
    for tensor in plan.tensors() {
        let Some(blob) = tensor.blob else { continue };
        let same = stored.get(tensor.name).filter(|entry| {
            entry.type_name == tensor.type_name && *entry.shape == *tensor.shape && entry.size == tensor.size
        });
        let place =
            same.and_then(|entry| Some((entry.digest, entry.offset.checked_sub(tensor.offset_in_blob)?)));
        let common = found.entry(blob).or_insert(place);
        if *common != place {
            *common = None;
        }
    }
    found.into_iter().filter_map(|(blob, place)| Some((blob, place?))).collect()
}

impl ReusedTensors {
    /// Keeps the candidates whose samples agree. A sample that cannot be fetched is not an error: its tensor is downloaded.
    /// Fails if the store fails or the client disconnects.
    pub(super) fn new(
        job: &Job<'_>,
        store: &Arc<Store>,
        plan: &SplitPlan,
        candidates: Vec<Candidate>,
    ) -> Result<Self, TransferError> {
        let (mut sampled, unsampled): (Vec<_>, Vec<_>) =
            candidates.into_iter().partition(|candidate| candidate.size > UNSAMPLED_BYTES);
        sampled.sort_by_key(|candidate| std::cmp::Reverse(candidate.size));
        sampled.truncate(MAX_SAMPLED);
        let step = (sampled.len() / PROBES).max(1);
        let (probes, rest): (Vec<_>, Vec<_>) =
            sampled.into_iter().enumerate().partition(|(index, _)| index % step == 0);
        let bare =
            |indexed: Vec<(usize, Candidate)>| indexed.into_iter().map(|(_, candidate)| candidate).collect();
        let mut agreeing = compare(job, store, plan, bare(probes))?;
        if agreeing.is_empty() {
            return Ok(Self::default());
        }
        agreeing.extend(compare(job, store, plan, bare(rest))?);
        agreeing.extend(unsampled);
        // A tensor is less certain the smaller the compared part is.
        agreeing.sort_by_key(|candidate| {
            let compared = candidate.samples as u64 * SAMPLE_BYTES;
            std::cmp::Reverse((compared > 0, compared.saturating_mul(1 << 20) / candidate.size))
        });
        let batch_bytes = (plan.file_size() / 64).max(MIN_REUSED_BYTES);
        Ok(Self { candidates: agreeing, batch_bytes })
    }

    /// Uses all that a tensor index names. If the digest of the file is wrong, all of them are downloaded.
    pub(super) const fn indexed(candidates: Vec<Candidate>) -> Self {
        Self { candidates, batch_bytes: u64::MAX }
    }

    pub(super) fn candidates(&self) -> &[Candidate] {
        &self.candidates
    }

    /// Copies the bytes of those that are parts of longer blobs, as if they had been downloaded.
    pub(super) fn copy_parts(
        &self,
        job: &Job<'_>,
        store: &Store,
        assembler: &Assembler,
    ) -> Result<(), TransferError> {
        let (plan, places) = (assembler.plan(), BlobPlaces::new(assembler.plan()));
        let parts = self.candidates.iter().filter_map(|candidate| Some((candidate, candidate.part_at?)));
        for (Candidate { blob, digest, size, .. }, part_at) in parts {
            let mut stored = FileReader::for_blob(store.content(), *digest, part_at.saturating_add(*size));
            for segment in places.segments(plan, *blob) {
                let Target::Blob { offset_in_blob, .. } = segment.target else { continue };
                let mut done = 0;
                while done < segment.length {
                    let length = (segment.length - done).min(CHUNK_BYTES as u64);
                    let start = part_at.saturating_add(offset_in_blob).saturating_add(done);
                    let bytes = stored.read_range(start..start.saturating_add(length))?;
                    assembler.write(segment.offset_in_file.saturating_add(done), &bytes)?;
                    done = done.saturating_add(length);
                }
            }
            if !(job.report)(assembler.arrived_bytes()) {
                return Err(TransferError::Unwanted);
            }
        }
        Ok(())
    }

    /// The manifests of the models whose tensors are reused.
    pub(super) fn models(&self) -> impl Iterator<Item = Digest> {
        self.candidates.iter().map(|candidate| candidate.model)
    }

    pub(super) fn bytes(&self) -> u64 {
        self.candidates.iter().map(|candidate| candidate.size).fold(0, u64::saturating_add)
    }

    /// Removes the tensors to download because the digest of the whole file differs: each time about twice as many bytes,
    /// so that there are few passes. Empty if nothing is reused.
    pub(super) fn next_to_fetch(&mut self) -> Vec<Candidate> {
        let (mut batch, mut bytes) = (Vec::new(), 0u64);
        while bytes < self.batch_bytes
            && let Some(candidate) = self.candidates.pop()
        {
            bytes = bytes.saturating_add(candidate.size);
            batch.push(candidate);
        }
        self.batch_bytes = self.batch_bytes.saturating_mul(2);
        batch
    }
}

/// A position in the file, and the stored bytes to compare there.
#[derive(Debug)]
struct Sample {
    offset_in_file: u64,
    stored: Vec<u8>,
}

fn compare(
    job: &Job<'_>,
    store: &Arc<Store>,
    plan: &SplitPlan,
    candidates: Vec<Candidate>,
) -> Result<Vec<Candidate>, TransferError> {
    let (mut waiting, places) = (Vec::new(), BlobPlaces::new(plan));
    for candidate in candidates {
        let _held = store.content().hold_lower_stores();
        let samples = samples(store, (plan, &places), &candidate)?;
        waiting.push((candidate, samples));
    }
    job.wait_for(async {
        let (mut running, mut agreeing) = (JoinSet::new(), Vec::new());
        let mut failures = 0;
        let source = (job.registry.clone(), job.file.clone(), job.limits.clone(), job.silence.clone());
        let source = Arc::new(source);
        loop {
            while running.len() < SAMPLES_AT_ONCE
                && let Some((candidate, samples)) = waiting.pop()
            {
                running.spawn(agrees(Arc::clone(&source), candidate, samples).in_current_span());
            }
            match running.join_next().await {
                Some(Ok(Ok(Some(candidate)))) => agreeing.push(candidate),
                Some(Ok(Err(error))) => {
                    tracing::debug!("no sample: {error}");
                    failures += 1;
                    if failures == MAX_FAILURES {
                        // The rest is downloaded: the server may be overloaded.
                        waiting.clear();
                    }
                }
                Some(_) => {}
                None => return agreeing,
            }
        }
    })
}

/// Fetches samples and compares them; `None` if one differs.
async fn agrees(
    source: Arc<(RegistryClient, RemoteFile, Vec<RateLimit>, Silence)>,
    mut candidate: Candidate,
    samples: Vec<Sample>,
) -> Result<Option<Candidate>, RegistryError> {
    let (registry, file, limits, silence) = &*source;
    for sample in samples {
        let range = sample.offset_in_file..sample.offset_in_file.saturating_add(sample.stored.len() as u64);
        let mut stream = silence.until(registry.open_part(file, range)).await?;
        let mut found = Vec::new();
        // A server without ranges would send the whole file for each sample.
        while !stream.is_whole()
            && let Some(bytes) = silence.until(stream.next()).await?
        {
            rate_limit::wait(limits, bytes.len()).await;
            found.extend_from_slice(&bytes);
        }
        if found != sample.stored {
            return Ok(None);
        }
        candidate.samples += 1;
    }
    Ok(Some(candidate))
}

/// Chooses samples of a blob at positions spread over its segments, which cannot be predicted without knowing the file.
fn samples(
    store: &Store,
    (plan, places): (&SplitPlan, &BlobPlaces),
    candidate: &Candidate,
) -> Result<Vec<Sample>, StoreError> {
    let part_at = candidate.part_at.unwrap_or_default();
    let end = part_at.saturating_add(candidate.size);
    let mut blob = FileReader::for_blob(store.content(), candidate.digest, end);
    let own = places.segments(plan, candidate.blob).filter_map(|segment| match segment.target {
        Target::Blob { offset_in_blob, .. } => Some((segment.offset_in_file, segment.length, offset_in_blob)),
        Target::Literal { .. } => None,
    });
    let own: Vec<_> = own.collect();
    let count = sample_count(candidate.size).max(own.len().min(4));
    let step = own.len().div_ceil(count).max(1);
    let mut samples = Vec::new();
    for number in 0..count {
        let Some((offset_in_file, length, offset_in_blob)) = own.get(number * step % own.len().max(1)) else {
            break;
        };
        let wanted = SAMPLE_BYTES.min(*length);
        let seed = Digest::of(format!("{} {number}", candidate.digest).as_bytes());
        let random = seed.as_bytes().first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        let within = random % (length - wanted + 1);
        let start = part_at.saturating_add(offset_in_blob + within);
        let stored = blob.read_range(start..start.saturating_add(wanted))?;
        samples.push(Sample { offset_in_file: offset_in_file + within, stored });
    }
    Ok(samples)
}

const fn sample_count(size: u64) -> usize {
    match size {
        0..=0xf_ffff => 1,
        0x10_0000..=0x3ff_ffff => 2,
        _ => 4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(blob: usize, size: u64) -> Candidate {
        Candidate { blob, digest: Digest::of(&[0]), size, part_at: None, model: Digest::of(&[1]), samples: 1 }
    }

    #[test]
    fn candidates_come_in_batches_that_double() {
        let candidates = (0..100).map(|blob| candidate(blob, 10)).collect();
        let mut reused = ReusedTensors { candidates, batch_bytes: 20 };
        let mut batches = Vec::new();
        loop {
            let batch = reused.next_to_fetch();
            if batch.is_empty() {
                break;
            }
            batches.push(batch.len());
        }
        assert_eq!(batches, [2, 4, 8, 16, 32, 38]);
    }
}
