//! Transfers: a file of a registry becomes blobs, in ranges that come at once and in any order.
//!
//! The file's head says how it is split; then every byte is written straight into the file that
//! becomes its blob ([`crate::store::Partial`]), and the whole is hashed from the front while the
//! rest still comes. It becomes part of the store only when its digest is the one the registry
//! named. Whatever ends a transfer early, what has arrived stays for the next one.
//!
//! One file is transferred once at a time, however many ask for it: the others wait and see how far
//! it is ([`Transfers::board`]).

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use blobd_store_format::descriptor::Descriptor;
use blobd_store_format::digest::Digest;
use blobd_store_format::gguf::{GgufError, Header};
use blobd_store_format::recipe::{Recipe, RecipeError};
use blobd_store_format::split::{BlobContent, SplitError, SplitPlan};
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, mpsc};

use crate::intake::announce;
use crate::registry::{RegistryClient, RegistryError, RemoteFile, RemoteStream};
use crate::store::leases::Lease;
use crate::store::{Ingest, Partial, PartialFile, Store, StoreError};

mod arrival;
mod fetch;
mod flights;
mod guess;
mod hash;
mod head;
mod pace;
mod schedule;
mod trial;

use arrival::Arrival;
use fetch::{Failures, Fetch, write_pieces};
pub use flights::Flight;
use flights::Flights;
use guess::Guess;
use hash::Hashed;
use head::Head;
pub use pace::RateLimit;
use trial::Trial;

/// What the transfers of one daemon share.
#[derive(Clone, Debug, Default)]
pub struct Transfers {
    policy: TransferPolicy,
    /// How fast all of them together may be.
    pub limit: RateLimit,
    flights: Flights,
    /// How many connections each host may still get.
    hosts: Arc<Mutex<BTreeMap<String, Arc<Semaphore>>>>,
}

/// How files are transferred.
#[derive(Clone, Copy, Debug)]
pub struct TransferPolicy {
    /// The most connections to one host, of all transfers together.
    pub max_connections: usize,
    /// The least that is asked for at once in bytes, unless less is missing.
    pub min_range_bytes: u64,
    /// The most.
    pub max_range_bytes: u64,
    /// How long a range should take.
    pub range_takes: Duration,
    /// How often it is considered whether one more connection would help.
    pub tick: Duration,
    /// How long to wait after the first failure; doubled after each that follows.
    pub backoff: Duration,
    /// The longest such wait.
    pub longest_backoff: Duration,
    /// After how many failures in a row that bring nothing a transfer fails.
    pub max_failures: u32,
}

impl Default for TransferPolicy {
    fn default() -> Self {
        Self {
            // Registries' networks serve one connection at 10 to 100 MB/s; more than eight are
            // taken for abuse by some.
            max_connections: 8,
            // A round trip around the world costs less than a tenth of it at 10 MB/s.
            min_range_bytes: 4 << 20,
            max_range_bytes: 64 << 20,
            range_takes: Duration::from_secs(2),
            tick: Duration::from_millis(500),
            backoff: Duration::from_millis(500),
            longest_backoff: Duration::from_secs(15),
            // About half a minute of them: a router restarts in that time.
            max_failures: 6,
        }
    }
}

impl TransferPolicy {
    /// How much to ask for next, after `length` bytes have taken this long.
    fn next_length(&self, length: u64, took: Duration) -> u64 {
        let next = if took < self.range_takes / 2 {
            length.saturating_mul(2)
        } else if took > self.range_takes * 2 {
            length / 2
        } else {
            length
        };
        next.clamp(self.min_range_bytes, self.max_range_bytes)
    }
}

/// What to transfer, and who wants it.
pub struct Job<'j> {
    /// Who fetches it.
    pub registry: &'j RegistryClient,
    /// The file.
    pub file: &'j RemoteFile,
    /// The runtime on which the network is.
    pub handle: &'j Handle,
    /// How fast this pull may be.
    pub limit: &'j RateLimit,
    /// Is told now and then how many bytes are there; returns whether it is still wanted.
    pub look: &'j (dyn Fn(u64) -> bool + Sync),
}

impl fmt::Debug for Job<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Job").field("file", &self.file).finish_non_exhaustive()
    }
}

/// What a transfer did.
#[derive(Clone, Debug)]
pub struct Received {
    /// The file, which is part of the ingest now.
    pub file: Descriptor,
    /// Its header, if it is a GGUF file.
    pub header: Option<Header>,
    /// What has come over the network in bytes.
    pub downloaded_bytes: u64,
    /// What had come before.
    pub resumed_bytes: u64,
    /// What the store had.
    pub reused_bytes: u64,
}

/// How much of a file there is before it is transferred.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TransferPlan {
    /// What has come before.
    pub resumed_bytes: u64,
    /// What tensors of a relative seem to be.
    pub similar_bytes: u64,
}

/// Why a file could not be transferred.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TransferError {
    /// The registry failed.
    #[error(transparent)]
    Registry(#[from] RegistryError),
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Its header is refused.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// Its tensors are refused.
    #[error(transparent)]
    Split(#[from] SplitError),
    /// Its recipe is refused.
    #[error(transparent)]
    Recipe(#[from] RecipeError),
    /// What came is not the file that was named. It has been thrown away.
    #[error("digest {found}, {expected} expected; what came was thrown away")]
    Digest {
        /// The digest of what came.
        found: Digest,
        /// The digest that was named.
        expected: Digest,
    },
    /// The rest never came, and nobody said why.
    #[error("transfer ended early; what has arrived is kept, pull again to go on")]
    Incomplete,
    /// Nobody wants it any more.
    #[error("the client that asked for it has gone; what has arrived is kept, pull again to go on")]
    Unwanted,
}

impl TransferError {
    /// Whether what has arrived is of no use to a next try.
    const fn is_final(&self) -> bool {
        matches!(self, Self::Gguf(_) | Self::Split(_) | Self::Recipe(_) | Self::Digest { .. })
    }
}

impl Transfers {
    /// Takes the right to transfer a file; waits while somebody else has it, and tells `look` how
    /// far that one is. When `look` returns false, the wait ends.
    ///
    /// # Errors
    /// [`TransferError::Unwanted`] then.
    pub fn board(&self, file: Digest, look: impl FnMut(u64) -> bool) -> Result<Flight, TransferError> {
        self.flights.board(file, look).ok_or(TransferError::Unwanted)
    }

    /// Transfers a file into the ingest, durably, so that nothing of it has to come again even if
    /// the ingest is never committed.
    ///
    /// # Errors
    /// [`TransferError`]. What has arrived is kept, unless it proved to be wrong.
    pub fn receive(
        &self,
        flight: &Flight,
        ingest: &mut Ingest,
        job: &Job<'_>,
    ) -> Result<Received, TransferError> {
        ingest.lease().pin(job.file.identity());
        let received = self.receive_all(flight, ingest, job);
        if received.as_ref().is_err_and(TransferError::is_final) {
            ingest.store().remove_partial(job.file.identity())?;
        }
        received
    }

    /// How much of a file there is, without keeping anything of what is fetched to know it.
    ///
    /// # Errors
    /// [`TransferError`].
    pub fn plan(
        &self,
        store: &Arc<Store>,
        lease: &Lease,
        job: &Job<'_>,
    ) -> Result<TransferPlan, TransferError> {
        let home = PartialFile::open(store, job.file.identity(), job.file.size())?;
        let resumed_bytes = home.claimed_bytes();
        let relatives = trial::relatives(store, job.file)?;
        let near = relatives.first().map(|relative| &**relative);
        let Start { head: Head { plan, whole, .. }, .. } = self.start(job, store, &home, near)?;
        if whole.is_some() {
            return Ok(TransferPlan { resumed_bytes, similar_bytes: 0 });
        }
        let mut candidates = trial::candidates(store, lease, &relatives, &plan)?;
        candidates.retain(|candidate| !home.has_begun(candidate.blob));
        let trial = Trial::of(job, store, &plan, candidates)?;
        Ok(TransferPlan { resumed_bytes, similar_bytes: trial.bytes() })
    }

    fn receive_all(
        &self,
        flight: &Flight,
        ingest: &mut Ingest,
        job: &Job<'_>,
    ) -> Result<Received, TransferError> {
        let mut may_guess = true;
        loop {
            let mut transfer = self.begin(flight, ingest, job, may_guess)?;
            loop {
                let hashed = transfer.run()?;
                match job.file.digest() {
                    Some(expected) if expected != hashed.file => {
                        if transfer.doubt(hashed.file, expected)? == Doubt::All {
                            break;
                        }
                    }
                    _ => return transfer.finish(ingest, hashed),
                }
            }
            tracing::warn!("{}: what was there is not part of it; begun anew", job.file.label());
            drop(transfer);
            ingest.store().remove_partial(job.file.identity())?;
            may_guess = false;
        }
    }

    fn begin<'t>(
        &'t self,
        flight: &'t Flight,
        ingest: &Ingest,
        job: &'t Job<'t>,
        may_guess: bool,
    ) -> Result<Transfer<'t>, TransferError> {
        let size = job.file.size();
        let home = PartialFile::open(ingest.store(), job.file.identity(), size)?;
        let relatives = trial::relatives(ingest.store(), job.file)?;
        let near = relatives.first().filter(|_| may_guess).map(|relative| &**relative);
        let Start { head: Head { plan, header, whole }, bytes, fetched, is_guess } =
            self.start(job, ingest.store(), &home, near)?;
        let partial = home.follow(plan, ingest.staging())?;
        let resumed_bytes = partial.arrived_bytes();
        admit(ingest, partial.plan(), resumed_bytes)?;
        // Who sends everything at once cannot be asked for samples.
        let trial =
            if whole.is_some() { Trial::default() } else { self.trial(ingest, job, &relatives, &partial)? };
        write_head(&partial, &bytes)?;
        let media_type = job.file.media_type().clone();
        let file = Descriptor { media_type, digest: job.file.identity(), size };
        let received = Received { file, header, downloaded_bytes: fetched, resumed_bytes, reused_bytes: 0 };
        let whole = whole.map(|stream| (stream, bytes.len() as u64));
        let arrival = Arrival::new(partial);
        Ok(Transfer { transfers: self, flight, job, arrival, whole, is_guess, trial, received })
    }

    /// The head and the plan: what is there of it is read, the rest guessed or fetched.
    fn start(
        &self,
        job: &Job<'_>,
        store: &Store,
        home: &PartialFile,
        near: Option<&Recipe>,
    ) -> Result<Start, TransferError> {
        let size = job.file.size();
        if !job.file.media_type().is_gguf() {
            return Ok(Start { head: Head::of_any(size), bytes: Vec::new(), fetched: 0, is_guess: false });
        }
        let mut bytes = home.head(Header::MAX_BYTES);
        let known = bytes.len();
        if known == 0
            && let Some(relative) = near
            && let Some(Guess { header, mut bytes, fetched }) = guess::guess(job, store, relative)?
            && let Ok(plan) = SplitPlan::new(&header, size)
        {
            // What follows the relative's head is not what follows this one's.
            let length = plan.blobs().first().map_or(0, |head| head.size);
            bytes.truncate(usize::try_from(length).unwrap_or(usize::MAX));
            let head = Head { plan, header: Some(header), whole: None };
            return Ok(Start { head, bytes, fetched, is_guess: true });
        }
        let head = self.head(job, &mut bytes)?;
        let fetched = (bytes.len() - known) as u64;
        Ok(Start { head, bytes, fetched, is_guess: false })
    }

    /// Takes on trial what the store may have of the rest.
    fn trial(
        &self,
        ingest: &Ingest,
        job: &Job<'_>,
        relatives: &[Arc<Recipe>],
        partial: &Partial,
    ) -> Result<Trial, TransferError> {
        let store = ingest.store();
        let mut candidates = trial::candidates(store, ingest.lease(), relatives, partial.plan())?;
        candidates.retain(|candidate| partial.is_untouched(candidate.blob));
        let trial = Trial::of(job, store, partial.plan(), candidates)?;
        for suspect in trial.suspects() {
            partial.take_stored(suspect.blob, suspect.digest);
        }
        Ok(trial)
    }

    /// The head, tried again as the rest is.
    fn head(&self, job: &Job<'_>, bytes: &mut Vec<u8>) -> Result<Head, TransferError> {
        let mut failures = Failures::default();
        loop {
            let before = bytes.len();
            let error = match head::fetch(job, bytes) {
                Err(TransferError::Registry(error)) => error,
                head => return head,
            };
            let came = (bytes.len() - before) as u64;
            let Some(wait) = failures.wait_after(&error, came, &self.policy) else {
                return Err(error.into());
            };
            thread::sleep(wait);
            if !(job.look)(0) {
                return Err(TransferError::Unwanted);
            }
        }
    }

    fn slots(&self, host: &str) -> Arc<Semaphore> {
        let mut hosts = self.hosts.lock().unwrap_or_else(PoisonError::into_inner);
        let slots = || Arc::new(Semaphore::new(self.policy.max_connections));
        Arc::clone(hosts.entry(host.to_ascii_lowercase()).or_insert_with(slots))
    }
}

/// Where a transfer starts.
struct Start {
    head: Head,
    /// The file's first bytes, as far as they are there.
    bytes: Vec<u8>,
    /// How many of them came over the network just now.
    fetched: u64,
    /// Whether some of them are a relative's.
    is_guess: bool,
}

/// What has to be looked at again when the whole is not what was named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Doubt {
    /// What is missing now.
    Some,
    /// Everything.
    All,
}

/// Writes what of the file's first bytes is missing.
fn write_head(partial: &Partial, bytes: &[u8]) -> Result<(), StoreError> {
    for gap in partial.missing().into_iter().filter(|gap| gap.start < bytes.len() as u64) {
        let place = usize::try_from(gap.start).unwrap_or_default();
        let end = usize::try_from(gap.end).unwrap_or(usize::MAX).min(bytes.len());
        partial.write(gap.start, bytes.get(place..end).unwrap_or_default())?;
    }
    Ok(())
}

/// Room for what is still to be written.
fn admit(ingest: &Ingest, plan: &SplitPlan, arrived: u64) -> Result<(), StoreError> {
    announce(ingest, plan);
    if arrived == 0 {
        return ingest.admit(plan.blobs().iter().map(|blob| blob.size));
    }
    // Files that have begun have their room already.
    ingest.admit(std::iter::once(plan.file_size().saturating_sub(arrived)))
}

/// One file on its way.
struct Transfer<'t> {
    transfers: &'t Transfers,
    flight: &'t Flight,
    job: &'t Job<'t>,
    arrival: Arc<Arrival>,
    /// A stream of the whole file, and how far it is.
    whole: Option<(RemoteStream, u64)>,
    /// Whether some of the head is a relative's.
    is_guess: bool,
    /// What is taken from the store until the digest says otherwise.
    trial: Trial,
    received: Received,
}

impl Transfer<'_> {
    /// Fetches what is missing and hashes all of it meanwhile.
    fn run(&mut self) -> Result<Hashed, TransferError> {
        const PIECES_WAITING: usize = 4;
        let (job, arrival, flight) = (self.job, &self.arrival, self.flight);
        let fetch = Fetch::new(
            (job.registry.clone(), job.file.clone()),
            Arc::clone(arrival),
            self.transfers.policy,
            vec![self.transfers.limit.clone(), job.limit.clone()],
            self.transfers.slots(job.file.host()),
        );
        let (to_writer, pieces) = mpsc::channel(PIECES_WAITING);
        let mut look = || {
            let arrived = arrival.partial().arrived_bytes();
            flight.note(arrived);
            (job.look)(arrived)
        };
        arrival.begin();
        let hashed = thread::scope(|scope| {
            scope.spawn(|| write_pieces(arrival, pieces));
            let task = job.handle.spawn(Arc::clone(&fetch).run(self.whole.take(), to_writer));
            let hashed = hash::hash(arrival, &mut look);
            arrival.end();
            // The thread that writes ends with what is left of it.
            task.abort();
            hashed
        });
        self.received.downloaded_bytes += fetch.received_bytes();
        match hashed? {
            Some(hashed) => Ok(hashed),
            None => Err(arrival.take_failure().unwrap_or(TransferError::Unwanted)),
        }
    }

    /// It is not the file. The head may have been guessed wrong, or what is on trial is not its own,
    /// or what came before is not; what came just now is to blame if there was nothing else.
    fn doubt(&mut self, found: Digest, expected: Digest) -> Result<Doubt, TransferError> {
        if std::mem::take(&mut self.is_guess)
            && let Some(doubt) = self.check_head()?
        {
            return Ok(doubt);
        }
        let suspects = self.trial.next_suspects();
        if !suspects.is_empty() {
            tracing::info!("{expected}: {} tensors of a relative are not its own", suspects.len());
            suspects.iter().for_each(|suspect| self.arrival.partial().forget_stored(suspect.blob));
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
        let head = self.transfers.head(self.job, &mut bytes)?;
        self.received.downloaded_bytes += bytes.len() as u64;
        let partial = self.arrival.partial();
        if head.plan != *partial.plan() {
            return Ok(Some(Doubt::All));
        }
        let length = head.plan.blobs().first().map_or(0, |head| head.size);
        bytes.truncate(usize::try_from(length).unwrap_or(usize::MAX));
        let mut guessed = vec![0; bytes.len()];
        partial.read(0, &mut guessed)?;
        if guessed == bytes {
            return Ok(None);
        }
        partial.write(0, &bytes)?;
        self.received.header = head.header;
        Ok(Some(Doubt::Some))
    }

    fn finish(mut self, ingest: &mut Ingest, hashed: Hashed) -> Result<Received, TransferError> {
        let partial = self.arrival.partial();
        partial.note_digests(&hashed.blobs)?;
        partial.seal()?;
        for blob in hashed.staged {
            ingest.add_blob(blob)?;
        }
        let plan = partial.plan();
        if plan.blobs().iter().all(|blob| blob.content != BlobContent::File) {
            ingest.add_recipe(plan.recipe(hashed.file, &hashed.blobs, hashed.literals)?);
        }
        ingest.publish()?;
        self.received.reused_bytes = self.trial.bytes();
        self.received.file.digest = hashed.file;
        Ok(self.received)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_grow_with_the_speed_of_the_link() {
        let policy = TransferPolicy::default();
        let slow = policy.next_length(4 << 20, Duration::from_secs(60));
        assert_eq!(slow, policy.min_range_bytes);
        assert_eq!(policy.next_length(8 << 20, Duration::from_millis(100)), 16 << 20);
        assert_eq!(policy.next_length(64 << 20, Duration::from_millis(100)), policy.max_range_bytes);
        assert_eq!(policy.next_length(16 << 20, policy.range_takes), 16 << 20);
    }
}
