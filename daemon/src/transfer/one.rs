//! One file on its way: fetched, hashed, and doubted until its digest is right.

use std::sync::Arc;
use std::thread;

use blobd_registry::ByteStream;
use blobd_store::{HashedFile, Ingest, StagedBlob, Store};
use blobd_store_format::digest::Digest;
use tokio::sync::mpsc;

use super::arrival::Arrival;
use super::fetch::{Fetch, write_pieces};
use super::flights::Flight;
use super::start::{fetch_head, head_bytes};
use super::trial::{Candidate, Trial};
use super::{Job, Received, TransferError, Transfers};

/// One file on its way.
pub(super) struct Transfer<'t> {
    pub(super) transfers: &'t Transfers,
    pub(super) flight: &'t Flight,
    pub(super) job: &'t Job<'t>,
    pub(super) arrival: Arc<Arrival>,
    /// A stream of the whole file, and how far it is.
    pub(super) whole: Option<(ByteStream, u64)>,
    /// Whether some of the head is a relative's.
    pub(super) is_guess: bool,
    /// What is taken from the store until the digest says otherwise.
    pub(super) trial: Trial,
    /// What was on trial and has been fetched after all.
    pub(super) cleared: Vec<Candidate>,
    pub(super) received: Received,
}

/// A file that has arrived.
pub(super) struct Hashed {
    pub(super) file: HashedFile,
    /// Its blobs that are not in the store.
    staged: Vec<StagedBlob>,
}

impl Transfer<'_> {
    /// Fetches what is missing and hashes all of it meanwhile.
    pub(super) fn run(&mut self) -> Result<Hashed, TransferError> {
        const PIECES_WAITING: usize = 4;
        let (job, arrival, flight) = (self.job, &self.arrival, self.flight);
        let assembler = arrival.assembler();
        let fetch = Fetch::new(
            (job.registry.clone(), job.file.clone()),
            Arc::clone(arrival),
            self.transfers.policy,
            job.limits.clone(),
            (self.transfers.connections(job.file.host()), job.uid),
            Arc::clone(&self.transfers.received),
        );
        let (to_writer, pieces) = mpsc::channel(PIECES_WAITING);
        let look = |hashed| {
            let arrived = assembler.arrived_bytes();
            flight.note(arrived, hashed);
            (job.look)(arrived)
        };
        arrival.begin();
        let hashed = thread::scope(|scope| {
            scope.spawn(|| write_pieces(arrival, pieces));
            let task = job.handle.spawn(Arc::clone(&fetch).run(self.whole.take(), to_writer));
            let mut staged = Vec::new();
            let mut sink = |blob| {
                staged.push(blob);
                Ok(())
            };
            let mut wait = |offset| {
                if look(offset) { arrival.wait_for(offset, || look(offset)) } else { None }
            };
            let file = assembler.hash_as_it_arrives(&mut wait, &mut sink);
            arrival.end();
            fetch.stop();
            // An error means that the runtime is shutting down. The writer thread ends when the task's senders
            // are dropped.
            let _ = job.handle.block_on(task);
            file.map(|file| file.map(|file| Hashed { file, staged }))
        });
        self.received.downloaded_bytes += fetch.received_bytes();
        match hashed? {
            Some(hashed) => Ok(hashed),
            None => Err(arrival.take_failure().unwrap_or(TransferError::Unwanted)),
        }
    }

    /// It is not the file. The head may have been guessed wrong, or what is on trial is not its own,
    /// or what came before is not; what came just now is to blame if there was nothing else.
    pub(super) fn doubt(&mut self, found: Digest, expected: Digest) -> Result<Doubt, TransferError> {
        if std::mem::take(&mut self.is_guess)
            && let Some(doubt) = self.check_head()?
        {
            return Ok(doubt);
        }
        let suspects = self.trial.next_suspects();
        if !suspects.is_empty() {
            tracing::debug!("{expected}: {} tensors of a relative are not its own", suspects.len());
            suspects.iter().for_each(|suspect| self.arrival.assembler().forget_stored(suspect.blob));
            self.cleared.extend(suspects);
            return Ok(Doubt::Some);
        }
        match self.received.resumed_bytes {
            0 => Err(TransferError::Digest { found, expected }),
            _ => Ok(Doubt::All),
        }
    }

    /// Fetches the head that was guessed; nothing if the guess was right.
    fn check_head(&mut self) -> Result<Option<Doubt>, TransferError> {
        let mut bytes = Vec::new();
        let head = fetch_head(self.job, &mut bytes)?;
        self.received.downloaded_bytes += bytes.len() as u64;
        let assembler = self.arrival.assembler();
        if head.plan != *assembler.plan() {
            return Ok(Some(Doubt::All));
        }
        bytes.truncate(head_bytes(&head.plan));
        let mut guessed = vec![0; bytes.len()];
        assembler.read(0, &mut guessed)?;
        if guessed == bytes {
            return Ok(None);
        }
        assembler.forget_stored(0);
        assembler.replace(0, &bytes)?;
        self.received.facts = head.facts;
        Ok(Some(Doubt::Some))
    }

    /// What was fetched after all may be what the store claims to have: then it is the store's that is
    /// not what its name says, and the fresh one must take its place.
    fn set_aside_damaged(&self, store: &Store, blobs: &[Digest]) -> Result<(), TransferError> {
        let claimed = self.cleared.iter().filter(|suspect| blobs.get(suspect.blob) == Some(&suspect.digest));
        for suspect in claimed {
            if let Some(place) = store.set_aside_if_damaged(suspect.digest)? {
                tracing::warn!("blob {} was damaged; it is in {}", suspect.digest, place.display());
            }
        }
        Ok(())
    }

    pub(super) fn finish(mut self, ingest: &mut Ingest, hashed: Hashed) -> Result<Received, TransferError> {
        let Hashed { file, staged } = hashed;
        let (assembler, digest) = (self.arrival.assembler(), file.digest);
        assembler.note_digests(&file.blobs)?;
        self.set_aside_damaged(ingest.store(), &file.blobs)?;
        for blob in staged {
            ingest.add_blob(blob)?;
        }
        assembler.recipe(file)?.into_iter().for_each(|recipe| ingest.add_recipe(recipe));
        ingest.note_partial(self.job.file.identity());
        ingest.publish()?;
        self.received.reused_bytes = self.trial.bytes();
        self.received.file.digest = digest;
        Ok(self.received)
    }
}

/// What has to be looked at again when the whole is not what was named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Doubt {
    /// What is missing now.
    Some,
    /// Everything.
    All,
}
