//! A file to transfer, and the request that needs it: retries, waiting, and the memory that the request uses.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use blobd_registry::{ByteStream, RegistryClient, RegistryError, RemoteFile, Sender};
use blobd_store::DownloadAbout;
use blobd_store_format::digest::Digest;
use blobd_store_format::file_format::MAX_HEADER_BYTES;
use blobd_store_format::recipe::Recipe;
use blobd_store_format::reference::Reference;
use bytes::Bytes;
use tokio::runtime::Handle;
use tokio::time::timeout;

use super::{RateLimit, Silence, TransferError, rate_limit};
use crate::limits::kib;
use crate::memory_gauge::{Covered, MemoryGauge};
use crate::permits::{Permit, PermitPool};

/// Whether the user of a transfer may read the stored model with this name and manifest.
pub(crate) type MayRead<'m> = dyn Fn(&Reference, Digest) -> bool + Sync + 'm;

/// A file to transfer, and the request that needs it.
#[derive(Clone)]
pub(crate) struct Job<'j> {
    pub(crate) registry: &'j RegistryClient,
    pub(crate) file: &'j RemoteFile,
    pub(crate) handle: &'j Handle,
    /// The user whose share of connections is used.
    pub(crate) uid: u32,
    /// The model and user of the pull, to be recorded with an unfinished download.
    pub(crate) about: Option<DownloadAbout>,
    /// Whether to use what has arrived earlier. Otherwise it is discarded.
    pub(crate) continues: bool,
    /// Stored data is used in place of a download only if it belongs to such a model.
    pub(crate) may_read: &'j MayRead<'j>,
    /// What the model's tensor index says that the file consists of. Not trusted.
    pub(crate) index: Option<&'j Recipe>,
    pub(crate) limits: Vec<RateLimit>,
    pub(crate) silence: Silence,
    pub(crate) again: Flag,
    /// Whether the file is received as one stream, so that an interruption loses what has arrived of it.
    pub(crate) as_stream: Flag,
    /// The memory of the tables of tensors, in KiB.
    pub(crate) tables: Option<&'j PermitPool>,
    pub(crate) gauge: Option<&'j MemoryGauge<'j>>,
    /// Called regularly with the number of bytes that have arrived; returns false to cancel.
    pub(crate) report: &'j (dyn Fn(u64) -> bool + Sync),
    /// Called in its place when all bytes have arrived, with the number of those that have been hashed.
    pub(crate) verified: Option<&'j (dyn Fn(u64) -> bool + Sync)>,
}

/// The memory of a tensor in the plan of a file, in the files that are written, and in the recipe.
const TABLE_BYTES: usize = 512;
/// Smaller tables are not counted: few models have more than 4,096 tensors.
const UNCOUNTED_TABLES: usize = 2 << 20;

/// A header is in memory as received, as parsed, and as base64 or as the plan that is made from it.
pub(crate) const HEADER_COPIES: usize = 3;

impl<'j> Job<'j> {
    /// Makes a transfer without limits that continues nothing and uses nothing of the store.
    pub(crate) fn new(
        registry: &'j RegistryClient,
        file: &'j RemoteFile,
        handle: &'j Handle,
        uid: u32,
        report: &'j (dyn Fn(u64) -> bool + Sync),
    ) -> Self {
        Self {
            registry,
            file,
            handle,
            uid,
            about: None,
            continues: false,
            may_read: &|_name, _manifest| false,
            index: None,
            limits: Vec::new(),
            silence: Silence::default(),
            again: Flag::default(),
            as_stream: Flag::default(),
            tables: None,
            gauge: None,
            report,
            verified: None,
        }
    }

    pub(super) fn is_continued(&self) -> bool {
        self.continues && self.file.is_resumable()
    }

    /// The length of the file's header, if its tensor index says it.
    pub(super) fn indexed_header_bytes(&self) -> Option<u64> {
        self.index.and_then(Recipe::header).map(|(_, size)| size)
    }

    pub(super) fn read_whole(&self) -> Result<(Vec<u8>, Arc<Sender>), TransferError> {
        let read = || async {
            let mut stream = self.silence.until(self.registry.open(self.file)).await?;
            Ok::<_, RegistryError>((self.rest_of(&mut stream).await?, Arc::clone(stream.sender())))
        };
        // Small files are not resumed.
        self.retried(|_received| Ok(self.wait_for(read())??))
    }

    /// The next bytes of a stream, within the rate limits.
    pub(super) async fn next_of(&self, stream: &mut ByteStream) -> Result<Option<Bytes>, RegistryError> {
        let bytes = self.silence.until(stream.next()).await?;
        rate_limit::wait(&self.limits, bytes.as_ref().map_or(0, Bytes::len)).await;
        Ok(bytes)
    }

    pub(super) async fn rest_of(&self, stream: &mut ByteStream) -> Result<Vec<u8>, RegistryError> {
        let mut bytes = Vec::new();
        while let Some(more) = self.next_of(stream).await? {
            bytes.extend_from_slice(&more);
        }
        Ok(bytes)
    }

    /// Counts the memory of a header of which `bytes` have arrived or will be read.
    pub(super) fn count_header(&self, bytes: usize) -> Result<(), TransferError> {
        let Some(gauge) = self.gauge else { return Ok(()) };
        match self.wait_for(gauge.cover(bytes.saturating_mul(HEADER_COPIES)))? {
            Covered::Yes => Ok(()),
            Covered::No => Err(TransferError::NoMemory { bytes }),
            Covered::AfterRestart => Err(TransferError::MemoryInUse),
        }
    }

    /// Reads headers again from their start if others use the memory that they need.
    pub(super) fn restarted<T>(
        &self,
        mut read: impl FnMut() -> Result<T, TransferError>,
    ) -> Result<T, TransferError> {
        loop {
            match (read(), self.gauge) {
                (Err(TransferError::MemoryInUse), Some(_)) => self.wait_for_longest_header()?,
                (read, _) => return read,
            }
        }
    }

    /// Waits for the memory for the longest header. Nothing that is counted is in memory.
    pub(super) fn wait_for_longest_header(&self) -> Result<(), TransferError> {
        let bytes = usize::try_from(MAX_HEADER_BYTES).unwrap_or(usize::MAX).saturating_mul(HEADER_COPIES);
        self.gauge.map_or(Ok(()), |gauge| self.wait_for(gauge.start_again(bytes)))
    }

    /// Makes a plan by `read`, and counts its tables, which stay in memory as long as the transfer. If others use that
    /// memory, discards the plan and makes it again later, so that a waiting pull holds nothing that others wait for.
    pub(super) fn counting_tables<T>(
        &self,
        tensors: impl Fn(&T) -> usize,
        mut read: impl FnMut() -> Result<T, TransferError>,
    ) -> Result<(T, Option<Permit>), TransferError> {
        let mut permit: Option<Permit> = None;
        loop {
            let made = self.restarted(&mut read)?;
            let bytes = tensors(&made).saturating_mul(TABLE_BYTES);
            let Some(pool) = self.tables.filter(|_| bytes > UNCOUNTED_TABLES) else {
                return Ok((made, None));
            };
            let units = kib(bytes).min(u32::try_from(pool.share()).unwrap_or(u32::MAX));
            let is_enough = |held: &Permit| u32::try_from(held.units()).is_ok_and(|held| held >= units);
            if permit.as_ref().is_some_and(is_enough) {
                return Ok((made, permit));
            }
            if permit.is_none()
                && let Ok(permit) = pool.try_acquire_many(self.uid, units)
            {
                return Ok((made, Some(permit)));
            }
            drop((made, permit.take()));
            self.release_headers();
            permit = Some(self.wait_for(pool.acquire_many(self.uid, units))?);
        }
    }

    /// Stops counting headers, which are no longer in memory.
    pub(super) fn release_headers(&self) {
        self.gauge.inspect(|gauge| gauge.release());
    }

    /// Retries by the registry client's policy until the request is cancelled. An attempt reports how many
    /// bytes it has received that need not be downloaded again.
    pub(super) fn retried<T>(
        &self,
        mut attempt: impl FnMut(&mut u64) -> Result<T, TransferError>,
    ) -> Result<T, TransferError> {
        let mut retry = self.registry.retry();
        loop {
            let mut received = 0;
            let error = match attempt(&mut received) {
                Err(TransferError::Registry(error)) => error,
                outcome => return outcome,
            };
            let wait = retry.wait_after(&error, received);
            self.registry.note_failure(&error, wait.is_some());
            let Some(wait) = wait else { return Err(error.into()) };
            // The timer is created inside the runtime, which this thread may not belong to.
            self.wait_for(async {
                let _waiting = self.silence.wait();
                tokio::time::sleep(wait).await;
            })?;
        }
    }

    pub(super) fn wait_for<T>(&self, future: impl Future<Output = T>) -> Result<T, TransferError> {
        const POLL_INTERVAL: Duration = Duration::from_millis(200);
        self.handle.block_on(async {
            let mut future = pin!(future);
            loop {
                match timeout(POLL_INTERVAL, future.as_mut()).await {
                    Ok(done) => return Ok(done),
                    Err(_elapsed) if !(self.report)(0) => return Err(TransferError::Unwanted),
                    Err(_elapsed) if self.gauge.is_some_and(MemoryGauge::is_overdue) => {
                        return Err(TransferError::MemoryInUse);
                    }
                    Err(_elapsed) => {}
                }
            }
        })
    }
}

/// A fact for the user: set once by the transfer, read by whoever reports its progress.
#[derive(Clone, Debug, Default)]
pub(crate) struct Flag(Arc<AtomicBool>);

impl Flag {
    pub(crate) fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    pub(super) fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
