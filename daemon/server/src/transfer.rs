//! Transfers a file from a registry into blobs, in ranges that are downloaded concurrently.
//!
//! The file's head determines how it is split; each byte is then written directly into the file that becomes its blob
//! ([`blobd_store::Assembler`]), and the whole file is hashed from the front while the rest arrives. It becomes part of the
//! store only if its digest is the one that the registry named. If a transfer ends early, the next one continues it.
//!
//! Each file is transferred once at a time: concurrent requests for it wait and see its progress.

// Files of the store are accessed only through its root, see `clippy.toml`.
#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use blobd_client::protocol::pull::CorrectedFile;
use blobd_model::facts::ModelFacts;
use blobd_registry::RemoteFile;
use blobd_store::leases::Lease;
use blobd_store::{Assembler, Ingest, PartialFile, Store, StoreError};
use blobd_store_format::descriptor::{Archive, Compression, Descriptor};
use blobd_store_format::digest::Digest;
use blobd_store_format::split::SplitPlan;
use tracing_mutex::stdsync::{Mutex, RwLock};

use crate::ingest::{announce, recipe_bytes};
use crate::permits::{Limits, PermitPool};

mod archive;
mod archive_stream;
mod download;
mod error;
mod fetch;
mod file_transfer;
mod growth;
mod head;
mod head_reuse;
mod indexed_blobs;
mod job;
mod obtained_head;
mod peer_tensors;
mod pieces;
mod policy;
mod rate_limit;
mod schedule;
mod second_attempt;
mod shared_assembler;
mod silence;
mod single_flight;
mod speed;
mod tensor_reuse;
mod two_copies;

pub use error::TransferError;
use file_transfer::{Recheck, Transfer};
use head::Head;
use indexed_blobs::IndexedBlobs;
pub(crate) use job::{Flag, HEADER_COPIES, Job};
use obtained_head::ObtainedHead;
pub(crate) use policy::TransferPolicy;
pub(crate) use rate_limit::RateLimit;
use second_attempt::FirstCopy;
pub(crate) use second_attempt::SmallFile;
pub(crate) use shared_assembler::Attempt;
use shared_assembler::{Arrived, SharedAssembler};
pub(crate) use silence::Silence;
use single_flight::SingleFlight;
pub(crate) use single_flight::TransferGuard;
use tensor_reuse::{Candidate, ReusedTensors, SimilarFile};
pub use two_copies::TwoCopies;

/// The state that the transfers of one daemon share.
#[derive(Clone, Debug, Default)]
pub struct Transfers {
    policy: Arc<RwLock<TransferPolicy>>,
    /// The rate limit of all transfers together.
    pub(crate) limit: RateLimit,
    single_flight: SingleFlight,
    /// The permits for connections to each host.
    hosts: Arc<Mutex<BTreeMap<String, Arc<PermitPool>>>>,
}

/// The result of a transfer.
#[derive(Debug)]
pub(crate) struct Received {
    /// The file, which is now part of the ingest.
    pub(crate) file: Descriptor,
    /// From its header, if the format is known; of an archive, from the header of each file.
    pub(crate) facts: Vec<ModelFacts>,
    /// By this transfer.
    pub(crate) downloaded_bytes: u64,
    /// Received by earlier transfers.
    pub(crate) resumed_bytes: u64,
    /// Taken from the store.
    pub(crate) reused_bytes: u64,
    /// Those of them that a tensor index named.
    pub(crate) indexed_bytes: u64,
    /// Set if the first download had a wrong digest.
    pub(crate) corrected: Option<CorrectedFile>,
}

impl Received {
    const fn begun(
        file: Descriptor,
        facts: Vec<ModelFacts>,
        downloaded_bytes: u64,
        resumed_bytes: u64,
    ) -> Self {
        let (reused_bytes, indexed_bytes, corrected) = (0, 0, None);
        Self { file, facts, downloaded_bytes, resumed_bytes, reused_bytes, indexed_bytes, corrected }
    }
}

/// How much of a file need not be downloaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TransferPlan {
    /// Bytes received by earlier transfers.
    pub(crate) resumed_bytes: u64,
    /// Bytes of stored tensors that are probably the same.
    pub(crate) similar_bytes: u64,
    /// The disk space that the rest takes. What an earlier transfer has begun has its space already.
    pub(crate) needed_bytes: u64,
}

/// The disk space for the blobs that have none yet, and for the recipe.
fn needed_bytes(store: &Store, plan: &SplitPlan, partial: &PartialFile, reused: &ReusedTensors) -> u64 {
    let whole = reused.candidates().iter().filter(|candidate| candidate.part_at.is_none());
    let reused: BTreeSet<usize> = whole.map(|candidate| candidate.blob).collect();
    let blobs = plan.blobs().iter().enumerate();
    let new = blobs.filter(|(blob, _)| !reused.contains(blob) && !partial.has_begun(*blob));
    let sizes = new.map(|(_, planned)| planned.size).chain([recipe_bytes(plan)]);
    sizes.map(|size| store.ledger().size_on_disk(size)).fold(0, u64::saturating_add)
}

impl TransferPlan {
    /// For an archive that is received as one stream.
    const fn for_stream(size: u64) -> Self {
        Self { resumed_bytes: 0, similar_bytes: 0, needed_bytes: size }
    }
}

impl Transfers {
    pub(crate) fn new(policy: TransferPolicy) -> Self {
        let limit = RateLimit::new(policy.bytes_per_second);
        Self { policy: Arc::new(RwLock::new(policy)), limit, ..Self::default() }
    }

    /// Changes the policy of transfers that start from now on. Running ones keep theirs, and their connections are counted
    /// apart from those of later ones. The rate limit stays.
    pub(crate) fn set_policy(&self, policy: TransferPolicy) {
        *self.policy.write().unwrap_or_else(PoisonError::into_inner) = policy;
        self.hosts.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    fn policy(&self) -> TransferPolicy {
        *self.policy.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the right to transfer a file, see [`SingleFlight::acquire`].
    pub(crate) fn acquire(
        &self,
        file: Digest,
        limit: &RateLimit,
        report: impl FnMut(u64) -> bool,
    ) -> Result<TransferGuard, TransferError> {
        self.single_flight.acquire(file, limit, report).ok_or(TransferError::Unwanted)
    }

    /// The right to transfer a file; `None` if it is being transferred.
    pub(crate) fn try_acquire(&self, file: Digest) -> Option<TransferGuard> {
        self.single_flight.try_acquire(file)
    }

    pub(crate) fn is_running(&self, file: Digest) -> bool {
        self.single_flight.is_running(file)
    }

    /// The attempt in which a file arrives.
    pub(crate) fn attempt(&self, file: Digest) -> Option<Arc<Attempt>> {
        self.single_flight.assembler(file)?.attempt()
    }

    /// How many bytes have arrived from an offset of a file that is being transferred.
    pub(crate) fn arrived_bytes(&self, file: Digest, offset: u64) -> u64 {
        let assembler = self.single_flight.assembler(file);
        assembler.map_or(0, |shared| shared.assembler().end_of_run(offset).saturating_sub(offset))
    }

    /// Bytes that have arrived from an offset of a file that is being transferred, at most so many, and the attempt that they
    /// belong to. Not verified before the attempt is.
    pub(crate) fn arrived(
        &self,
        file: Digest,
        offset: u64,
        most: u64,
    ) -> Result<Option<Arrived>, StoreError> {
        self.single_flight.assembler(file).map_or(Ok(None), |assembler| assembler.arrived(offset, most))
    }

    /// The status to show if no `what` has come from a host for a while.
    pub(crate) fn waiting_status(&self, host: &str, what: &str, silence: Duration) -> Option<String> {
        let is_long = silence >= self.policy().silence_reported;
        is_long.then(|| format!("waiting for {host}: no {what} for {} s", silence.as_secs()))
    }

    /// The rate limits of a pull with the limit `own`.
    pub(crate) fn limits(&self, own: &RateLimit) -> Vec<RateLimit> {
        vec![self.limit.clone(), own.clone()]
    }

    /// Transfers a file into the ingest, durably: it need not be downloaded again even if the ingest is never committed.
    /// Received data is kept unless it proved to be wrong.
    pub(crate) fn receive(
        &self,
        guard: &TransferGuard,
        ingest: &mut Ingest,
        job: &Job<'_>,
    ) -> Result<Received, TransferError> {
        ingest.lease().protect(job.file.identity());
        if !job.is_continued() {
            ingest.store().ledger().remove_partial(job.file.identity())?;
        }
        let received = match compression_of(job.file) {
            None => match self.receive_all(guard, ingest, job) {
                Err(TransferError::NoRanges) => self.receive_stream(guard, ingest, job, None),
                received => received,
            },
            compression => self.receive_stream(guard, ingest, job, compression),
        };
        if received.as_ref().is_err_and(TransferError::is_final) {
            ingest.store().ledger().remove_partial(job.file.identity())?;
        }
        match received {
            Err(TransferError::Unwanted | TransferError::StreamEnded) if guard.should_yield() => {
                Err(TransferError::HandedOver)
            }
            received => received,
        }
    }

    /// Determines how much of a file need not be downloaded. Keeps none of the bytes that it fetches.
    pub(crate) fn plan(
        &self,
        store: &Arc<Store>,
        lease: &Lease,
        job: &Job<'_>,
    ) -> Result<TransferPlan, TransferError> {
        if compression_of(job.file).is_some() {
            return Ok(TransferPlan::for_stream(job.file.size()));
        }
        let partial = PartialFile::open(store, job.file.identity(), job.file.size())?;
        let partial = if job.is_continued() { partial } else { partial.discarded() };
        let resumed_bytes = partial.claimed_bytes();
        let similar_files = match job.index {
            Some(_) => Vec::new(),
            None => tensor_reuse::similar_files(store, job)?,
        };
        let near = similar_files.first().map(|similar| &*similar.recipe);
        let tensors = |obtained: &ObtainedHead| obtained.head.plan.tensors().len();
        let (obtained, _tables) =
            match job.counting_tables(tensors, || ObtainedHead::new(job, store, &partial, near)) {
                // All of the archive is downloaded.
                Err(TransferError::NoRanges) => return Ok(TransferPlan::for_stream(job.file.size())),
                obtained => obtained?,
            };
        let indexed = indexed(job, &obtained);
        let Head { plan, whole, .. } = obtained.head;
        job.release_headers();
        let reused = if whole.is_some() {
            ReusedTensors::default()
        } else if let Some(indexed) = indexed {
            let mut candidates = indexed.candidates(store, lease, job, &plan)?;
            candidates.retain(|candidate| !partial.has_begun(candidate.blob));
            ReusedTensors::indexed(candidates)
        } else {
            let similar_files = similar_or_found(store, job, similar_files)?;
            let mut candidates = tensor_reuse::candidates(store, lease, &similar_files, &plan)?;
            candidates.retain(|candidate| !partial.has_begun(candidate.blob));
            ReusedTensors::new(job, store, &plan, candidates)?
        };
        let needed_bytes = needed_bytes(store, &plan, &partial, &reused);
        Ok(TransferPlan { resumed_bytes, similar_bytes: reused.bytes(), needed_bytes })
    }

    fn receive_all(
        &self,
        guard: &TransferGuard,
        ingest: &mut Ingest,
        job: &Job<'_>,
    ) -> Result<Received, TransferError> {
        let (identity, size) = (job.file.identity(), job.file.size());
        let begun = PartialFile::open(ingest.store(), identity, size)?.first_copy();
        if let (Some(expected), Some(wrong)) = (job.file.digest(), begun) {
            let first = FirstCopy::from_earlier_pull(wrong);
            return self.receive_again(guard, ingest, job, expected, &first);
        }
        let mut reuse = Reuse::All;
        loop {
            let mut transfer = self.begin(guard, ingest, job, reuse)?;
            loop {
                let hashed = transfer.run()?;
                match job.file.digest() {
                    Some(expected) if expected != hashed.file.digest => {
                        match transfer.recheck(expected, &hashed)? {
                            Recheck::Some => {}
                            Recheck::All => break,
                            Recheck::Nothing => {
                                let first = transfer.into_first_copy(hashed.file.digest)?;
                                return self.receive_again(guard, ingest, job, expected, &first);
                            }
                        }
                    }
                    _ => return transfer.finish(ingest, hashed),
                }
            }
            tracing::debug!("{}: its head differs from the reused one, starting again", job.file.label());
            drop(transfer);
            ingest.store().ledger().remove_partial(job.file.identity())?;
            reuse = Reuse::NoHead;
        }
    }

    fn begin<'t>(
        &'t self,
        guard: &'t TransferGuard,
        ingest: &Ingest,
        job: &'t Job<'t>,
        reuse: Reuse,
    ) -> Result<Transfer<'t>, TransferError> {
        let size = job.file.size();
        let partial = PartialFile::open(ingest.store(), job.file.identity(), size)?;
        let similar_files = match reuse {
            Reuse::Nothing { .. } => Vec::new(),
            Reuse::All | Reuse::NoHead => similar_without_index(ingest.store(), job, reuse)?,
        };
        let near = similar_files.first().filter(|_| reuse == Reuse::All);
        let near_recipe = near.map(|similar| &*similar.recipe);
        let tensors = |obtained: &ObtainedHead| obtained.head.plan.tensors().len();
        let (obtained, tables) = job.counting_tables(tensors, || match reuse {
            Reuse::Nothing { .. } => ObtainedHead::again(job, ingest.store(), &partial),
            Reuse::All | Reuse::NoHead => ObtainedHead::new(job, ingest.store(), &partial, near_recipe),
        })?;
        let mut indexed = if reuse == Reuse::All { indexed(job, &obtained) } else { None };
        let ObtainedHead { head: Head { plan, facts, whole, sender }, parts, fetched, has_reused_head } =
            obtained;
        let partial = match reuse {
            Reuse::Nothing { wrong } => partial.receive_again(wrong),
            Reuse::All | Reuse::NoHead => partial,
        };
        let partial = match &job.about {
            Some(about) => partial.about(about.clone()),
            None => partial,
        };
        let assembler = partial.follow(plan, ingest.staging())?;
        keep_published(ingest, &assembler)?;
        let resumed_bytes = assembler.arrived_bytes();
        // A server without ranges cannot send samples.
        let reused = match (&whole, &mut indexed) {
            (Some(_), _) => ReusedTensors::default(),
            (None, Some(indexed)) => reused_by_index(ingest, job, indexed, &assembler)?,
            (None, None) if reuse == Reuse::All => {
                let similar_files = similar_or_found(ingest.store(), job, similar_files.clone())?;
                self.reused(ingest, job, &similar_files, &assembler)?
            }
            (None, None) => self.reused(ingest, job, &similar_files, &assembler)?,
        };
        // Before any of their bytes is used.
        let head_of = near.filter(|_| has_reused_head).map(|similar| similar.model);
        assembler.note_models(reused.models().chain(head_of).collect())?;
        admit(ingest, &assembler)?;
        reused.copy_parts(job, ingest.store(), &assembler)?;
        parts.iter().try_for_each(|(offset, bytes)| assembler.write(*offset, bytes))?;
        let from_peers = peer_tensors::fetch(job, &assembler, indexed.as_ref().filter(|_| whole.is_none()))?;
        let indexed = indexed.filter(|_| from_peers > 0 || !reused.candidates().is_empty());
        indexed.iter().try_for_each(|indexed| indexed.write_literals(&assembler))?;
        let media_type = job.file.media_type().clone();
        let file = Descriptor { media_type, digest: job.file.identity(), size };
        let received = Received::begun(file, facts, fetched.saturating_add(from_peers), resumed_bytes);
        // From a stream of the whole file, only the start has been read.
        let read = parts.first().map_or(0, |(_, bytes)| bytes.len() as u64);
        let whole = whole.map(|stream| (stream, read));
        let shared = SharedAssembler::new(
            assembler,
            obtained_head::senders(&parts, sender.filter(|_| !has_reused_head).as_ref()),
        );
        guard.show(&shared);
        drop(parts);
        job.release_headers();
        let refetched = Vec::new();
        Ok(Transfer {
            transfers: self,
            guard,
            job,
            shared,
            whole,
            has_reused_head,
            reused,
            indexed,
            refetched,
            received,
            _tables: tables,
        })
    }

    /// Reuses stored tensors for the missing parts, provisionally.
    fn reused(
        &self,
        ingest: &Ingest,
        job: &Job<'_>,
        similar_files: &[SimilarFile],
        assembler: &Assembler,
    ) -> Result<ReusedTensors, TransferError> {
        let store = ingest.store();
        // Candidates that do not agree are released at once: eviction may need their space for this file.
        let lease = store.liveness().leases().grant(format!("comparison with {}", job.file.label()));
        let mut candidates = tensor_reuse::candidates(store, &lease, similar_files, assembler.plan())?;
        candidates.retain(|candidate| assembler.is_untouched(candidate.blob));
        let reused = ReusedTensors::new(job, store, assembler.plan(), candidates)?;
        for candidate in reused.candidates() {
            ingest.lease().protect(candidate.digest);
        }
        take_stored(assembler, reused.candidates());
        Ok(reused)
    }

    /// The permits for connections to a host: one user may have all of them, and each other user gets one more.
    fn connections(&self, host: &str) -> Arc<PermitPool> {
        let mut hosts = self.hosts.lock().unwrap_or_else(PoisonError::into_inner);
        // A host without connections or waiting requests is forgotten: all its permits are free.
        hosts.retain(|_, connections| Arc::strong_count(connections) > 1);
        let most = u32::try_from(self.policy().max_connections).unwrap_or(u32::MAX);
        let limits = Limits { per_principal: most, total: most };
        let connections = || Arc::new(PermitPool::with_first_for_each(limits));
        Arc::clone(hosts.entry(host.to_ascii_lowercase()).or_insert_with(connections))
    }
}

/// The stored files to compare with a file, unless it has a tensor index to try first.
fn similar_without_index(store: &Store, job: &Job<'_>, reuse: Reuse) -> Result<Vec<SimilarFile>, StoreError> {
    let has_index = reuse == Reuse::All && job.index.is_some();
    if has_index { Ok(Vec::new()) } else { tensor_reuse::similar_files(store, job) }
}

/// The stored files to compare with a file whose tensor index could not be used.
fn similar_or_found(
    store: &Store,
    job: &Job<'_>,
    similar_files: Vec<SimilarFile>,
) -> Result<Vec<SimilarFile>, StoreError> {
    if job.index.is_some() { tensor_reuse::similar_files(store, job) } else { Ok(similar_files) }
}

/// What the tensor index says of a file, if the file has the header that it names.
fn indexed(job: &Job<'_>, obtained: &ObtainedHead) -> Option<IndexedBlobs> {
    let recipe = job.index?;
    let indexed = match obtained.parts.first() {
        Some((0, start)) => IndexedBlobs::new(recipe, &obtained.head.plan, start),
        _ => None,
    };
    if indexed.is_none() {
        tracing::debug!("{}: its tensor index is of another file", job.file.label());
    }
    indexed
}

/// Uses stored blobs as planned ones. Parts of longer blobs are copied later, when space is reserved.
fn take_stored(assembler: &Assembler, candidates: &[Candidate]) {
    for whole in candidates.iter().filter(|candidate| candidate.part_at.is_none()) {
        assembler.take_stored(whole.blob, whole.digest);
    }
}

/// Reuses the stored tensors that a tensor index names, provisionally.
fn reused_by_index(
    ingest: &Ingest,
    job: &Job<'_>,
    indexed: &mut IndexedBlobs,
    assembler: &Assembler,
) -> Result<ReusedTensors, TransferError> {
    let mut candidates = indexed.candidates(ingest.store(), ingest.lease(), job, assembler.plan())?;
    candidates.retain(|candidate| assembler.is_untouched(candidate.blob));
    indexed.leave_out_parts(&candidates);
    take_stored(assembler, &candidates);
    Ok(ReusedTensors::indexed(candidates))
}

/// The data that a transfer may reuse instead of downloading it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reuse {
    All,
    /// The head of a similar file was misleading.
    NoHead,
    /// Everything is downloaded, and compared with a first copy that has this digest.
    Nothing {
        wrong: Digest,
    },
}

/// How an archive is compressed; `None` for any other file.
fn compression_of(file: &RemoteFile) -> Option<Compression> {
    match file.media_type().archive_of_weights() {
        Some(Archive::Compressed(compression)) => Some(compression),
        _ => None,
    }
}

/// Leases the blobs that earlier transfers have published. Those that have been deleted since are received again.
fn keep_published(ingest: &Ingest, assembler: &Assembler) -> Result<(), StoreError> {
    for (blob, digest) in assembler.stored() {
        // Pinned before the check, so that no collection deletes it in between.
        ingest.lease().protect(digest);
        if ingest.store().content().blob_size(digest)?.is_none() {
            assembler.forget_stored(blob);
        }
    }
    Ok(())
}

/// Reserves space for the blobs that are neither reused nor begun; those that are begun have theirs already.
fn admit(ingest: &Ingest, assembler: &Assembler) -> Result<(), StoreError> {
    let blobs = assembler.plan().blobs().iter().enumerate();
    let new = blobs.filter(|(blob, _)| assembler.is_untouched(*blob)).map(|(_, planned)| planned.size);
    announce(ingest, assembler.plan(), new.clone());
    ingest.expect_record(recipe_bytes(assembler.plan()));
    ingest.admit(new)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_without_connections_is_forgotten() {
        let transfers = Transfers::default();
        let used = transfers.connections("used.example");
        for number in 0..100 {
            transfers.connections(&format!("host-{number}.example"));
        }
        assert!(Arc::ptr_eq(&used, &transfers.connections("USED.example")));
        assert!(transfers.hosts.lock().unwrap().len() <= 2);
    }
}
