//! Transfers one file, and retries with fewer assumptions until the digest matches.

use std::sync::Arc;
use std::thread;

use blobd_registry::ByteStream;
use blobd_store::{HashedFile, Ingest, StagedBlob};
use blobd_store_format::digest::{Digest, Hasher};
use blobd_store_format::file_layout::ArchiveMember;
use tokio::sync::mpsc;
use tracing::{Instrument as _, Span};

use super::fetch::Fetch;
use super::indexed_blobs::IndexedBlobs;
use super::obtained_head::{fetch_head, head_bytes};
use super::pieces::write_pieces;
use super::shared_assembler::SharedAssembler;
use super::single_flight::TransferGuard;
use super::tensor_reuse::{Candidate, ReusedTensors};
use super::{Job, Received, TransferError, Transfers};
use crate::permits::Permit;

pub(super) struct Transfer<'t> {
    pub(super) transfers: &'t Transfers,
    pub(super) guard: &'t TransferGuard,
    pub(super) job: &'t Job<'t>,
    pub(super) shared: Arc<SharedAssembler>,
    pub(super) whole: Option<(ByteStream, u64)>,
    pub(super) has_reused_head: bool,
    pub(super) reused: ReusedTensors,
    /// The tensor index, if it named stored tensors.
    pub(super) indexed: Option<IndexedBlobs>,
    /// Tensors that were reused and have then been downloaded after all.
    pub(super) refetched: Vec<Candidate>,
    pub(super) received: Received,
    pub(super) _tables: Option<Permit>,
}

pub(super) struct Hashed {
    pub(super) file: HashedFile,
    staged: Vec<StagedBlob>,
}

impl Transfer<'_> {
    /// Downloads the missing parts, and hashes the file at the same time.
    pub(super) fn run(&mut self) -> Result<Hashed, TransferError> {
        const PIECES_WAITING: usize = 4;
        let (job, shared, guard) = (self.job, &self.shared, self.guard);
        let assembler = shared.assembler();
        let fetch = Fetch::new(self.transfers, job, Arc::clone(shared));
        let (to_writer, pieces) = mpsc::channel(PIECES_WAITING);
        let report = |hashed| {
            let arrived = assembler.arrived_bytes();
            guard.note(arrived, hashed);
            match job.verified.filter(|_| arrived >= job.file.size()) {
                Some(verified) => verified(hashed),
                None => (job.report)(arrived),
            }
        };
        shared.begin();
        let span = Span::current();
        let hashed = thread::scope(|scope| {
            let _writer = scope.spawn(|| span.in_scope(|| write_pieces(shared, pieces)));
            let run = Arc::clone(&fetch).run(self.whole.take(), to_writer);
            let task = job.handle.spawn(run.in_current_span());
            let mut staged = Vec::new();
            let mut sink = |blob: StagedBlob| {
                staged.push(blob);
                Ok(())
            };
            let mut wait = |offset| {
                if report(offset) { shared.wait_for(offset, || report(offset)) } else { None }
            };
            let file = assembler.hash_as_it_arrives(&mut wait, &mut sink);
            shared.end();
            fetch.stop();
            // An error means that the runtime is shutting down. The writer thread ends when the task's senders
            // are dropped.
            let _ = job.handle.block_on(task);
            file.map(|file| file.map(|file| Hashed { file, staged }))
        });
        self.received.downloaded_bytes += fetch.received_bytes();
        match hashed? {
            Some(hashed) => Ok(hashed),
            None => Err(shared.take_failure().unwrap_or(TransferError::Unwanted)),
        }
    }

    /// Handles a wrong digest: drops the least certain assumption, first that downloaded tensors are right which have other
    /// digests in the tensor index, then a reused head, then reused tensors.
    pub(super) fn recheck(&mut self, expected: Digest, hashed: &Hashed) -> Result<Recheck, TransferError> {
        let assembler = self.shared.assembler();
        let damaged =
            self.indexed.as_mut().map(|indexed| indexed.take_damaged(assembler, &hashed.file.blobs()));
        let damaged = damaged.unwrap_or_default();
        if !damaged.is_empty() {
            self.job.registry.note_wrong_file();
            tracing::info!(
                "{expected}: {} tensors were damaged on their way, downloading them",
                damaged.len()
            );
            damaged.into_iter().for_each(|blob| assembler.forget_arrived(blob));
            return Ok(Recheck::Some);
        }
        if std::mem::take(&mut self.has_reused_head)
            && let Some(recheck) = self.check_head()?
        {
            return Ok(recheck);
        }
        let candidates = self.reused.next_to_fetch();
        if !candidates.is_empty() {
            tracing::debug!("{expected}: {} reused tensors may differ, downloading them", candidates.len());
            let assembler = self.shared.assembler();
            candidates.iter().for_each(|candidate| match candidate.part_at {
                None => assembler.forget_stored(candidate.blob),
                Some(_) => assembler.forget_arrived(candidate.blob),
            });
            self.indexed.iter().for_each(|indexed| indexed.forget_literals(assembler));
            self.refetched.extend(candidates);
            return Ok(Recheck::Some);
        }
        Ok(Recheck::Nothing)
    }

    /// Downloads the head that was reused; `None` if it was right.
    fn check_head(&mut self) -> Result<Option<Recheck>, TransferError> {
        let (head, mut bytes) = self.job.restarted(|| {
            let mut bytes = Vec::new();
            fetch_head(self.job, &mut bytes).map(|head| (head, bytes))
        })?;
        self.received.downloaded_bytes += bytes.len() as u64;
        let assembler = self.shared.assembler();
        if head.plan != *assembler.plan() {
            self.job.release_headers();
            return Ok(Some(Recheck::All));
        }
        bytes.truncate(head_bytes(&head.plan));
        let mut reused = vec![0; bytes.len()];
        assembler.read(0, &mut reused)?;
        let was_right = reused == bytes;
        if !was_right {
            assembler.forget_stored(0);
            assembler.replace(0, &bytes)?;
            self.received.facts = head.facts;
        }
        drop((reused, bytes));
        self.job.release_headers();
        Ok((!was_right).then_some(Recheck::Some))
    }

    /// A downloaded tensor may have the digest of the stored blob that was reused in its place. Then the stored blob is
    /// damaged and moves to quarantine, so that the new one replaces it. A blob in a lower store stays there, and this
    /// store keeps the new one.
    fn quarantine_damaged(&self, ingest: &mut Ingest, blobs: &[Digest]) -> Result<(), TransferError> {
        let claimed =
            self.refetched.iter().filter(|candidate| blobs.get(candidate.blob) == Some(&candidate.digest));
        for candidate in claimed {
            ingest.keep_own_copy(candidate.digest);
            if let Some(place) = ingest.store().content().quarantine_if_damaged(candidate.digest)? {
                tracing::warn!("blob {}: damaged, moved to {}", candidate.digest, place.display());
            }
        }
        Ok(())
    }

    /// The digests of the files in an archive, computed from what has arrived.
    fn members(&self) -> Result<Vec<Digest>, TransferError> {
        const CHUNK_BYTES: u64 = 1 << 20;
        let assembler = self.shared.assembler();
        let mut members = Vec::new();
        let mut buffer = Vec::new();
        for ArchiveMember { file, .. } in assembler.plan().members() {
            let (mut hasher, mut done) = (Hasher::new(), 0);
            while done < file.size {
                let length = CHUNK_BYTES.min(file.size.saturating_sub(done));
                buffer.resize(usize::try_from(length).unwrap_or_default(), 0);
                assembler.read(file.offset.saturating_add(done), &mut buffer)?;
                hasher.update(&buffer);
                done = done.saturating_add(length);
                if !(self.job.report)(assembler.arrived_bytes()) {
                    return Err(TransferError::Unwanted);
                }
            }
            members.push(hasher.finish());
        }
        Ok(members)
    }

    pub(super) fn finish(mut self, ingest: &mut Ingest, hashed: Hashed) -> Result<Received, TransferError> {
        if self.job.file.digest() == Some(hashed.file.digest) {
            self.shared.set_verified();
        }
        // Before the blobs are moved.
        let members = self.members()?;
        let Hashed { file, staged } = hashed;
        let (assembler, digest) = (self.shared.assembler(), file.digest);
        let blobs = file.blobs();
        assembler.note_digests(&blobs)?;
        self.quarantine_damaged(ingest, &blobs)?;
        ingest.expect_blobs(staged.len() as u64);
        for blob in staged {
            ingest.add_blob(blob)?;
        }
        if let Some(recipe) = assembler.recipe(file, &members)? {
            ingest.add_recipe(recipe);
        }
        ingest.note_partial(self.job.file.identity());
        ingest.publish()?;
        self.received.reused_bytes = self.reused.bytes();
        self.received.indexed_bytes = if self.indexed.is_some() { self.received.reused_bytes } else { 0 };
        self.received.file.digest = digest;
        Ok(self.received)
    }
}

/// The parts to download again when the digest of the file is wrong.
pub(super) enum Recheck {
    Some,
    All,
    Nothing,
}
