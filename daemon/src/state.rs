//! What the daemon is made of: the store and what it remembers beside it.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use blobd_store_format::reference::Reference;
use tokio::sync::Semaphore;
use tokio::task::spawn_blocking;

use crate::large_models::LargeModels;
use crate::limits::RequestLimits;
use crate::ops::{Answers, Evictor, LastOpened, OpError, Surroundings};
use crate::registry::{RegistryClient, RegistryError, RegistryPolicy};
use crate::session::{Peer, Sessions};
use crate::socket::Closer;
use crate::store::Store;
use crate::transfer::{TransferPolicy, Transfers};

/// A daemon without its socket. Embedded in a command or listening, it is the same.
pub struct Daemon {
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
    /// Room for imports, and for pulls while something is fetched. The others wait, so that buffers stay
    /// bounded and opening a model never waits behind them.
    pub intakes: Arc<Semaphore>,
    /// Room for pulls, most of which may be waiting for another that fetches the same. Each has a
    /// thread.
    pub pulls: Arc<Semaphore>,
    /// Room for verifications, each of which reads as fast as the disk goes: one at a time.
    pub verifications: Arc<Semaphore>,
    /// Room for questions that read all there is. Whoever may read may ask them, and each takes a
    /// thread for as long as it runs.
    pub surveys: Arc<Semaphore>,
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

/// How many imports and pulls run at once. Each takes some 30 MiB and three threads, and two or
/// three keep disk and processors busy.
const MAX_INTAKES: usize = 4;

/// How many pulls there are at once: more than a machine has users, and far fewer than the threads that
/// blocking work may have.
const MAX_PULLS: usize = 64;

/// How many of them run at once: one that waits for another's lock or the index, one beside it.
const MAX_SURVEYS: usize = 2;

impl Daemon {
    /// Joins the parts. Reads certificate files, so it blocks for some milliseconds.
    ///
    /// # Errors
    /// [`RegistryError`] when the policy names what is unusable.
    pub fn new(store: Store, policy: &RegistryPolicy) -> Result<Self, RegistryError> {
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
            intakes: Arc::new(Semaphore::new(MAX_INTAKES)),
            pulls: Arc::new(Semaphore::new(MAX_PULLS)),
            verifications: Arc::new(Semaphore::new(1)),
            surveys: Arc::new(Semaphore::new(MAX_SURVEYS)),
            last_opened,
            is_single_user: true,
            has_met_owner: AtomicBool::new(false),
        })
    }

    /// Whether an import, a pull or a verification runs.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        self.intakes.available_permits() < MAX_INTAKES || self.verifications.available_permits() == 0
    }

    /// The same for users other than the daemon's own: one of those who connects is a danger to
    /// the others, because who owns a blob may change it.
    #[must_use]
    pub fn for_many_users(mut self) -> Self {
        self.is_single_user = false;
        self.limits.for_many_users();
        self
    }

    /// The same with transfers of another policy.
    #[must_use]
    pub fn with_transfers(mut self, policy: TransferPolicy) -> Self {
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
