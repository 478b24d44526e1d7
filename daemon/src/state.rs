//! What the daemon is made of: the store and what it remembers beside it.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use blobd_registry::{RegistryClient, RegistryError, RegistryPolicy};
use blobd_store::Store;
use blobd_store_format::reference::Reference;
use tokio::task::spawn_blocking;

use crate::large_models::LargeModels;
use crate::limits::RequestLimits;
use crate::open_sessions::Sessions;
use crate::ops::{Answers, Evictor, FetchLimit, LastOpened, OpError, Surroundings};
use crate::permits::{Limits, PermitPool};
use crate::principal::Peer;
use crate::socket::Closer;
use crate::transfer::{TransferPolicy, Transfers};

/// A daemon without its socket. Embedded in a command or listening, it is the same.
pub(crate) struct Daemon {
    /// The store.
    pub store: Arc<Store>,
    /// How models are fetched.
    pub registry: RegistryClient,
    /// What is being fetched.
    pub transfers: Transfers,
    /// Who has what open.
    pub sessions: Sessions,
    /// What requests may use at a time.
    pub(crate) limits: RequestLimits,
    /// Closes descriptors of clients, which may block.
    pub(crate) closer: Arc<Closer>,
    /// Models that take so much memory that one request reads them for all.
    pub(crate) large_models: LargeModels,
    /// What those were told who opened a model last.
    pub answers: Answers,
    /// What may run at once.
    pub(crate) work: WorkLimits,
    /// What imports and pulls have moved lately.
    pub(crate) activity: Activity,
    /// When a model was last opened: what eviction goes by.
    pub last_opened: Arc<LastOpened>,
    /// Whether clients are meant to be of the daemon's own user.
    is_single_user: bool,
    has_met_owner: AtomicBool,
}

impl fmt::Debug for Daemon {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Daemon").field("store", &self.store).finish_non_exhaustive()
    }
}

/// What may run at once: by each user, and by all of them. What lasts as long as somebody else likes (a
/// transfer with a limit, a registry or a file that does not answer) has pools where nobody's first waits
/// for others ([`PermitPool::with_first_for_each`]).
pub(crate) struct WorkLimits {
    /// Imports that are read and hashed. Each takes some 30 MiB and three threads, and two keep disk and
    /// processors busy.
    pub(crate) imports: PermitPool,
    /// Imports that are asked for, with those that wait for their turn: each is a connection with a
    /// descriptor in flight, which the kernel counts against its user.
    pub(crate) requested_imports: PermitPool,
    /// Processes that read clients' files: those of imports that run, and those that hang in a file that
    /// nobody answers for, until the kernel lets them go.
    pub(crate) file_readers: PermitPool,
    /// Pulls, most of which may wait for another that fetches the same. Each has a thread.
    pub(crate) pulls: PermitPool,
    /// Pulls that fetch something.
    pub(crate) fetches: FetchLimit,
    /// Dry runs of pulls: each has a thread, which waits for a registry.
    pub(crate) plans: PermitPool,
    /// Questions that read all there is. Whoever may read may ask them, and each takes a thread for as
    /// long as it runs.
    pub(crate) surveys: PermitPool,
    /// Verifications, each of which reads as fast as the disk goes.
    pub(crate) verifications: PermitPool,
}

impl WorkLimits {
    /// How many imports of one user run at once.
    const IMPORTS: u32 = 2;
    /// How many processes of one user may hang in a file that nobody answers for, before no more of its
    /// imports are begun.
    pub(crate) const STUCK_READERS: u32 = 4;

    fn new() -> Self {
        let pool = |per_principal, total| PermitPool::with_first_for_each(Limits { per_principal, total });
        Self {
            imports: pool(Self::IMPORTS, 6),
            requested_imports: PermitPool::new(Limits { per_principal: 64, total: 512 }),
            file_readers: pool(Self::IMPORTS + Self::STUCK_READERS, 48),
            // Far fewer than the threads that blocking work may have.
            pulls: pool(32, 96),
            fetches: FetchLimit::default(),
            plans: pool(2, 16),
            surveys: pool(2, 8),
            verifications: pool(1, 2),
        }
    }
}

/// Tells work that the disk notices from work that crawls.
#[derive(Debug, Default)]
pub(crate) struct Activity {
    imported: AtomicU64,
    last_look: Mutex<Option<(Instant, u64, bool)>>,
}

impl Activity {
    /// How often it is looked at.
    const SPAN: Duration = Duration::from_secs(1);
    /// What the disk notices in that time.
    const NOTICED_BYTES: u64 = 1 << 20;

    /// So many more bytes of imports have been read.
    pub(crate) fn note_imported(&self, bytes: u64) {
        self.imported.fetch_add(bytes, Ordering::Relaxed);
    }

    fn imported(&self) -> u64 {
        self.imported.load(Ordering::Relaxed)
    }

    /// Whether much has moved since the last look, by the sum of all that ever has.
    fn is_lively(&self, moved: u64, now: Instant) -> bool {
        let mut last_look = self.last_look.lock().unwrap_or_else(PoisonError::into_inner);
        match *last_look {
            Some((at, _, was_lively)) if now.saturating_duration_since(at) < Self::SPAN => was_lively,
            last => {
                let before = last.map_or(moved, |(_, before, _)| before);
                let is_lively = moved.saturating_sub(before) >= Self::NOTICED_BYTES;
                *last_look = Some((now, moved, is_lively));
                is_lively
            }
        }
    }
}

impl Daemon {
    /// Joins the parts. Reads certificate files, so it blocks for some milliseconds.
    ///
    /// # Errors
    /// [`RegistryError`] when the policy names what is unusable.
    pub(crate) fn new(store: Store, policy: &RegistryPolicy) -> Result<Self, RegistryError> {
        let (store, sessions) = (Arc::new(store), Sessions::default());
        let opened = sessions.clone();
        let last_opened: Arc<LastOpened> = Arc::new(move |model: &Reference| opened.last_opened_at(model));
        store.set_room_maker(Box::new(Evictor::new(&store, Arc::clone(&last_opened))));
        store.make_reserve();
        Ok(Self {
            store,
            registry: RegistryClient::new(policy)?,
            transfers: Transfers::default(),
            sessions,
            limits: RequestLimits::of_process(),
            closer: Arc::default(),
            large_models: LargeModels::default(),
            answers: Answers::default(),
            work: WorkLimits::new(),
            activity: Activity::default(),
            last_opened,
            is_single_user: true,
            has_met_owner: AtomicBool::new(false),
        })
    }

    /// Whether a verification runs, or imports and pulls move as much as a disk notices. One that crawls
    /// or hangs keeps nobody from the disk.
    #[must_use]
    pub(crate) fn is_busy(&self) -> bool {
        let moved = self.transfers.received_bytes().saturating_add(self.activity.imported());
        self.activity.is_lively(moved, Instant::now()) || self.work.verifications.in_use() > 0
    }

    /// The same for users other than the daemon's own: one of those who connects is a danger to
    /// the others, because who owns a blob may change it.
    #[must_use]
    pub(crate) fn for_many_users(mut self) -> Self {
        self.is_single_user = false;
        self.limits.for_many_users();
        self
    }

    /// The same with transfers of another policy.
    #[must_use]
    pub(crate) fn with_transfers(mut self, policy: TransferPolicy) -> Self {
        self.transfers = Transfers::new(policy);
        self
    }

    /// Takes note of who connects, and warns once when it is the blobs' owner.
    pub(crate) fn meet(&self, peer: &Peer) {
        let own = rustix::process::geteuid();
        if self.is_single_user || own.is_root() || peer.uid != own.as_raw() {
            return;
        }
        if !self.has_met_owner.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                "{}: runs as uid {}, which owns the blobs and could change them; run blobd as a user of \
                 its own, or set single_user = true",
                peer.description(),
                peer.uid
            );
        }
    }

    /// What doctor has to know beside the store.
    pub(crate) fn surroundings(&self) -> Surroundings {
        Surroundings {
            is_single_user: self.is_single_user,
            has_met_owner: self.has_met_owner.load(Ordering::Relaxed),
        }
    }

    /// Does work of a request of the user `uid` that blocks on the disk, once it is that user's turn. Few
    /// run at a time; the others wait without a thread, and dropping the future gives up waiting.
    pub(crate) async fn disk_work<T: Send + 'static>(
        self: &Arc<Self>,
        uid: u32,
        work: impl FnOnce(&Self) -> Result<T, OpError> + Send + 'static,
    ) -> Result<T, OpError> {
        let permit = self.limits.disk.acquire(uid).await;
        let work = move |daemon: &Self| {
            // Given back when the work is over, not when its client has hung up.
            let _permit = permit;
            work(daemon)
        };
        self.blocking(work).await
    }

    /// Runs work that blocks on the disk where that is allowed.
    pub(crate) async fn blocking<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Self) -> Result<T, OpError> + Send + 'static,
    ) -> Result<T, OpError> {
        let daemon = Arc::clone(self);
        let done = spawn_blocking(move || work(&daemon)).await;
        done.unwrap_or_else(|panic| Err(OpError::Internal(panic.to_string())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_that_crawls_is_no_activity() {
        let (activity, start) = (Activity::default(), Instant::now());
        let after = |seconds| start + Duration::from_secs(seconds);
        assert!(!activity.is_lively(5 << 30, start), "nobody knows when that was");
        assert!(activity.is_lively(6 << 30, after(1)));
        assert!(activity.is_lively(6 << 30, after(1)), "within a second it stays so");
        assert!(!activity.is_lively((6 << 30) + 1000, after(2)));
    }
}
