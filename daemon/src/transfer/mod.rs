//! Transfers: a file of a registry becomes blobs, in ranges that come at once and in any order.
//!
//! The file's head says how it is split; then every byte is written straight into the file that
//! becomes its blob ([`blobd_store::Assembler`]), and the whole is hashed from the front while the
//! rest still comes. It becomes part of the store only when its digest is the one the registry
//! named. Whatever ends a transfer early, what has arrived stays for the next one.
//!
//! One file is transferred once at a time, however many ask for it: the others wait and see how far
//! it is ([`Transfers::board`]).

// Files of the store are reached through its root alone, see `clippy.toml`.
#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

use std::collections::BTreeMap;
use std::fmt;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use blobd_registry::{ByteStream, RegistryClient, RegistryError, RemoteFile};
use blobd_store::leases::Lease;
use blobd_store::{Assembler, Ingest, PartialFile, Store, StoreError};
use blobd_store_format::descriptor::Descriptor;
use blobd_store_format::digest::Digest;
use blobd_store_format::model_facts::ModelFacts;
use blobd_store_format::recipe::Recipe;
use bytes::Bytes;
use tokio::runtime::Handle;
use tokio::time::timeout;

use crate::intake::announce;
use crate::permits::{Limits, PermitPool};

mod error;
mod fetch;
mod file_transfer;
mod head;
mod head_reuse;
mod policy;
mod rate_limit;
mod schedule;
mod shared_assembler;
mod single_flight;
mod speed;
mod start;
mod tensor_reuse;

pub use error::TransferError;
use file_transfer::{Recheck, Transfer};
use head::Head;
pub use policy::TransferPolicy;
pub use rate_limit::RateLimit;
use shared_assembler::SharedAssembler;
use single_flight::SingleFlight;
pub use single_flight::TransferGuard;
use start::Start;
use tensor_reuse::ReusedTensors;

/// What the transfers of one daemon share.
#[derive(Clone, Debug, Default)]
pub struct Transfers {
    policy: TransferPolicy,
    /// How fast all of them together may be.
    pub limit: RateLimit,
    single_flight: SingleFlight,
    /// What has come over the network in bytes, ever.
    received: Arc<AtomicU64>,
    /// How many connections each host may still get.
    hosts: Arc<Mutex<BTreeMap<String, Arc<PermitPool>>>>,
}

/// What to transfer, and who wants it.
pub struct Job<'j> {
    /// Who fetches it.
    pub registry: &'j RegistryClient,
    /// The file.
    pub file: &'j RemoteFile,
    /// The runtime on which the network is.
    pub handle: &'j Handle,
    /// Who wants it: the share of connections that counts.
    pub uid: u32,
    /// How fast it may come: all of them hold.
    pub limits: Vec<RateLimit>,
    /// Is told now and then how many bytes are there; returns whether it is still wanted.
    pub report: &'j (dyn Fn(u64) -> bool + Sync),
}

impl Job<'_> {
    /// Fetches a file that is small enough for memory.
    ///
    /// # Errors
    /// [`TransferError::Registry`] and [`TransferError::Unwanted`].
    pub fn read_small(&self) -> Result<Vec<u8>, TransferError> {
        let read = || async {
            let mut stream = self.registry.open(self.file).await?;
            let mut bytes = Vec::new();
            while let Some(more) = self.next_of(&mut stream).await? {
                bytes.extend_from_slice(&more);
            }
            Ok::<_, RegistryError>(bytes)
        };
        // What has come of so little is nothing to go on with.
        self.retried(|_came| Ok(self.wait_for(read())??))
    }

    /// The next bytes of a stream, as fast as the limits let them come.
    async fn next_of(&self, stream: &mut ByteStream) -> Result<Option<Bytes>, RegistryError> {
        let bytes = stream.next().await?;
        rate_limit::wait(&self.limits, bytes.as_ref().map_or(0, Bytes::len)).await;
        Ok(bytes)
    }

    /// Makes attempts by the registry client's policy as long as somebody wants the file. An attempt
    /// says how many bytes it has brought that need not come again.
    fn retried<T>(
        &self,
        mut attempt: impl FnMut(&mut u64) -> Result<T, TransferError>,
    ) -> Result<T, TransferError> {
        let mut retry = self.registry.retry();
        loop {
            let mut came = 0;
            let error = match attempt(&mut came) {
                Err(TransferError::Registry(error)) => error,
                outcome => return outcome,
            };
            let Some(wait) = retry.wait_after(&error, came) else { return Err(error.into()) };
            // The timer is made inside, where the runtime is: the thread may be none of the runtime's.
            self.wait_for(async { tokio::time::sleep(wait).await })?;
        }
    }

    /// Waits for `future` as long as somebody wants the file.
    fn wait_for<T>(&self, future: impl Future<Output = T>) -> Result<T, TransferError> {
        const NOW_AND_THEN: Duration = Duration::from_millis(200);
        self.handle.block_on(async {
            let mut future = pin!(future);
            loop {
                match timeout(NOW_AND_THEN, future.as_mut()).await {
                    Ok(done) => return Ok(done),
                    Err(_elapsed) if !(self.report)(0) => return Err(TransferError::Unwanted),
                    Err(_elapsed) => {}
                }
            }
        })
    }
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
    /// What its header says, if it is of a known format.
    pub facts: Option<ModelFacts>,
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

impl Transfers {
    /// None yet, to be made by this policy.
    #[must_use]
    pub fn new(policy: TransferPolicy) -> Self {
        Self { policy, limit: RateLimit::new(policy.bytes_per_second), ..Self::default() }
    }

    /// Takes the right to transfer a file; waits while somebody else has it, and tells `report` how
    /// far that one is. When `report` returns false, the wait ends. Meanwhile the file comes as fast as
    /// the least limited of all who want it would have it.
    ///
    /// # Errors
    /// [`TransferError::Unwanted`] then.
    pub fn acquire(
        &self,
        file: Digest,
        limit: &RateLimit,
        report: impl FnMut(u64) -> bool,
    ) -> Result<TransferGuard, TransferError> {
        self.single_flight.acquire(file, limit, report).ok_or(TransferError::Unwanted)
    }

    /// What has come over the network since the daemon started, in bytes.
    #[must_use]
    pub fn received_bytes(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }

    /// What a pull with this limit of its own has to keep to.
    #[must_use]
    pub fn limits(&self, own: &RateLimit) -> Vec<RateLimit> {
        vec![self.limit.clone(), own.clone()]
    }

    /// Transfers a file into the ingest, durably, so that nothing of it has to come again even if
    /// the ingest is never committed.
    ///
    /// # Errors
    /// [`TransferError`]. What has arrived is kept, unless it proved to be wrong.
    pub fn receive(
        &self,
        guard: &TransferGuard,
        ingest: &mut Ingest,
        job: &Job<'_>,
    ) -> Result<Received, TransferError> {
        ingest.lease().pin(job.file.identity());
        if !job.file.is_resumable() {
            ingest.store().remove_partial(job.file.identity())?;
        }
        let received = self.receive_all(guard, ingest, job);
        if received.as_ref().is_err_and(TransferError::is_final) {
            ingest.store().remove_partial(job.file.identity())?;
        }
        match received {
            Err(TransferError::Unwanted) if guard.should_yield() => Err(TransferError::HandedOver),
            received => received,
        }
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
        let resumed_bytes = if job.file.is_resumable() { home.claimed_bytes() } else { 0 };
        let relatives = tensor_reuse::relatives(store, job.file)?;
        let near = relatives.first().map(|relative| &**relative);
        let Start { head: Head { plan, whole, .. }, .. } = Start::of(job, store, &home, near)?;
        if whole.is_some() {
            return Ok(TransferPlan { resumed_bytes, similar_bytes: 0 });
        }
        let mut candidates = tensor_reuse::candidates(store, lease, &relatives, &plan)?;
        candidates.retain(|candidate| !home.has_begun(candidate.blob));
        let reused = ReusedTensors::of(job, store, &plan, candidates)?;
        Ok(TransferPlan { resumed_bytes, similar_bytes: reused.bytes() })
    }

    fn receive_all(
        &self,
        guard: &TransferGuard,
        ingest: &mut Ingest,
        job: &Job<'_>,
    ) -> Result<Received, TransferError> {
        let mut may_reuse_head = true;
        loop {
            let mut transfer = self.begin(guard, ingest, job, may_reuse_head)?;
            loop {
                let hashed = transfer.run()?;
                match job.file.digest() {
                    Some(expected) if expected != hashed.file.digest => {
                        if transfer.recheck(hashed.file.digest, expected)? == Recheck::All {
                            break;
                        }
                    }
                    _ => return transfer.finish(ingest, hashed),
                }
            }
            tracing::debug!("{}: what was there is not part of it; begun anew", job.file.label());
            drop(transfer);
            ingest.store().remove_partial(job.file.identity())?;
            may_reuse_head = false;
        }
    }

    fn begin<'t>(
        &'t self,
        guard: &'t TransferGuard,
        ingest: &Ingest,
        job: &'t Job<'t>,
        may_reuse_head: bool,
    ) -> Result<Transfer<'t>, TransferError> {
        let size = job.file.size();
        let home = PartialFile::open(ingest.store(), job.file.identity(), size)?;
        let relatives = tensor_reuse::relatives(ingest.store(), job.file)?;
        let near = relatives.first().filter(|_| may_reuse_head).map(|relative| &**relative);
        let Start { head: Head { plan, facts, whole }, bytes, fetched, has_reused_head } =
            Start::of(job, ingest.store(), &home, near)?;
        let assembler = home.follow(plan, ingest.staging())?;
        for (blob, digest) in assembler.stored() {
            // Pinned before the look that counts: until then a collection could take it.
            ingest.lease().pin(digest);
            if ingest.store().blob_size(digest)?.is_none() {
                assembler.forget_stored(blob);
            }
        }
        let resumed_bytes = assembler.arrived_bytes();
        // Who sends everything at once cannot be asked for samples.
        let reused = if whole.is_some() {
            ReusedTensors::default()
        } else {
            self.reused(ingest, job, &relatives, &assembler)?
        };
        admit(ingest, &assembler)?;
        start::write_head(&assembler, &bytes)?;
        let media_type = job.file.media_type().clone();
        let file = Descriptor { media_type, digest: job.file.identity(), size };
        let received = Received { file, facts, downloaded_bytes: fetched, resumed_bytes, reused_bytes: 0 };
        let whole = whole.map(|stream| (stream, bytes.len() as u64));
        let shared = SharedAssembler::new(assembler);
        let refetched = Vec::new();
        Ok(Transfer {
            transfers: self,
            guard,
            job,
            shared,
            whole,
            has_reused_head,
            reused,
            refetched,
            received,
        })
    }

    /// Takes provisionally what the store may have of the rest.
    fn reused(
        &self,
        ingest: &Ingest,
        job: &Job<'_>,
        relatives: &[Arc<Recipe>],
        assembler: &Assembler,
    ) -> Result<ReusedTensors, TransferError> {
        let store = ingest.store();
        // What does not agree is given up at once: it may have to make room for this file.
        let lease = store.leases().grant(format!("comparison with {}", job.file.label()));
        let mut candidates = tensor_reuse::candidates(store, &lease, relatives, assembler.plan())?;
        candidates.retain(|candidate| assembler.is_untouched(candidate.blob));
        let reused = ReusedTensors::of(job, store, assembler.plan(), candidates)?;
        for candidate in reused.candidates() {
            ingest.lease().pin(candidate.digest);
            assembler.take_stored(candidate.blob, candidate.digest);
        }
        Ok(reused)
    }

    /// The connections that a host may get: one user may have them all, and the next one has one
    /// beside them.
    fn connections(&self, host: &str) -> Arc<PermitPool> {
        let mut hosts = self.hosts.lock().unwrap_or_else(PoisonError::into_inner);
        // A host that nobody has or waits for a connection to is forgotten: they are all free.
        hosts.retain(|_, connections| Arc::strong_count(connections) > 1);
        let most = u32::try_from(self.policy.max_connections).unwrap_or(u32::MAX);
        let limits = Limits { per_principal: most, total: most };
        let connections = || Arc::new(PermitPool::with_first_for_each(limits));
        Arc::clone(hosts.entry(host.to_ascii_lowercase()).or_insert_with(connections))
    }
}

/// Room for the blobs that are neither provisionally reused nor begun; those that are begun have theirs.
fn admit(ingest: &Ingest, assembler: &Assembler) -> Result<(), StoreError> {
    let blobs = assembler.plan().blobs().iter().enumerate();
    let new = blobs.filter(|(blob, _)| assembler.is_untouched(*blob)).map(|(_, planned)| planned.size);
    announce(ingest, assembler.plan(), new.clone());
    ingest.admit(new)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_that_nobody_is_connected_to_is_forgotten() {
        let transfers = Transfers::default();
        let used = transfers.connections("used.example");
        for number in 0..100 {
            transfers.connections(&format!("host-{number}.example"));
        }
        assert!(Arc::ptr_eq(&used, &transfers.connections("USED.example")));
        assert!(transfers.hosts.lock().unwrap().len() <= 2);
    }
}
