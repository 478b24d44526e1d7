//! The daemon: its store, and what it keeps in memory.

// A request takes a thread only with its user's turn, see `clippy.toml`.
#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use blobd_client::protocol::access::Right;
use blobd_client::protocol::pull::PullProgress;
use blobd_client::protocol::request::PullParams;
use blobd_client::protocol::request_id::RequestIds;
use blobd_client::protocol::upkeep::Configuration;
use blobd_registry::{RegistryClient, RegistryError, RegistryPolicy};
use blobd_store::Store;
use blobd_store_format::reference::Reference;
use tokio::runtime::Handle;
use tokio::sync::mpsc::Sender;
use tokio::task::spawn_blocking;
use tracing::Span;
use tracing_mutex::stdsync::{Mutex, RwLock};

use crate::access::{Access, Rights};
use crate::audit::AuditLog;
use crate::large_models::LargeModels;
use crate::limits::RequestLimits;
use crate::locks::{lock, read, write};
use crate::long_work::LongWork;
use crate::metrics::Metrics;
use crate::offer::{Offer, Reader};
use crate::open_sessions::Sessions;
use crate::ops::{
    CallerPolicy, DoctorContext, EvictionReport, Evictor, FetchLimit, LastOpened, OpError, OpenCache, Pull,
    TermsCache,
};
use crate::permits::{Limits, Permit, PermitPool};
use crate::policy::Policy;
use crate::principal::Principal;
use crate::quotas::{GroupPool, Quotas};
use crate::requester::Requester;
use crate::running_pulls::RunningPulls;
use crate::socket::Closer;
use crate::transfer::{TransferPolicy, Transfers};
use crate::trust::Trust;
use crate::verb_log;

/// A daemon without its socket, embedded in a command or listening.
pub(crate) struct Daemon {
    pub store: Arc<Store>,
    pub(crate) metrics: Metrics,
    registry: RwLock<RegistryClient>,
    pub(crate) access: FromConfig<Access>,
    pub(crate) quotas: FromConfig<Quotas>,
    /// How much may be charged to the members of each group together. The store has the same pools.
    pools: RwLock<Vec<GroupPool>>,
    pub(crate) policy: FromConfig<Policy>,
    pub(crate) trust: FromConfig<Trust>,
    pub(crate) offer: FromConfig<Offer>,
    terms: Arc<TermsCache>,
    pub(crate) configuration: FromConfig<Configuration>,
    pub transfers: Transfers,
    pub sessions: Sessions,
    pub(crate) running_pulls: RunningPulls,
    pub(crate) audit: Arc<AuditLog>,
    pub(crate) limits: RequestLimits,
    pub(crate) closer: Arc<Closer>,
    /// Models that are so large that one request reads them for all.
    pub(crate) large_models: LargeModels,
    pub open_cache: OpenCache,
    pub(crate) work: WorkLimits,
    pub(crate) long_work: LongWork,
    /// For requests that have none from their clients.
    pub(crate) request_ids: RequestIds,
    pub(crate) activity: Activity,
    /// Eviction removes the model that was opened the longest time ago.
    pub last_opened: Arc<LastOpened>,
    is_single_user: bool,
    has_met_owner: AtomicBool,
}

/// A value from the configuration, which is replaced when that is read again. A request uses one value from its start
/// to its end.
#[derive(Default)]
pub(crate) struct FromConfig<T>(RwLock<Arc<T>>);

impl<T> FromConfig<T> {
    pub(crate) fn get(&self) -> Arc<T> {
        Arc::clone(&read(&self.0))
    }

    pub(crate) fn set(&self, value: T) {
        *write(&self.0) = Arc::new(value);
    }
}

impl fmt::Debug for Daemon {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Daemon").field("store", &self.store).finish_non_exhaustive()
    }
}

/// Limits of concurrent work. Work that can last without limit (a transfer with a rate limit, a registry or file that
/// does not respond) uses pools in which the first unit of a user does not depend on the others
/// ([`PermitPool::with_first_for_each`]).
pub(crate) struct WorkLimits {
    /// Imports that read and hash. Each takes about 20 MiB and two threads, and two keep disk and
    /// processors busy.
    pub(crate) imports: PermitPool,
    /// Imports whose file has not arrived yet or whose turn has not come, each with the process that reads the file. A client
    /// may never send its file.
    pub(crate) arriving_imports: PermitPool,
    /// Edits. Each may wait for memory for a header, which no import may wait behind.
    pub(crate) edits: PermitPool,
    /// Requested imports, including waiting ones: each is a connection with a descriptor in flight, which
    /// the kernel counts against its user.
    pub(crate) requested_imports: PermitPool,
    /// Processes that read clients' files: those of running and of arriving imports, and those blocked by a file that does
    /// not respond, until the kernel ends the call.
    pub(crate) file_readers: PermitPool,
    /// Pulls, including those that wait for another pull of the same file. Each has a thread.
    pub(crate) pulls: PermitPool,
    pub(crate) fetches: FetchLimit,
    /// Pushes. Each has a thread and up to 8 MiB of memory.
    pub(crate) pushes: PermitPool,
    /// Dry runs of pulls: each has a thread that waits for a registry.
    pub(crate) plans: PermitPool,
    /// Descriptions of models at registries. Each has a thread that waits for a registry, and a header in memory
    /// that is counted only when it is complete.
    pub(crate) inspections: PermitPool,
    /// Requests that read the whole store. All users may make them, and each takes a thread for as long as
    /// it runs.
    pub(crate) surveys: PermitPool,
    /// Verifications, each of which reads at the speed of the disk.
    pub(crate) verifications: PermitPool,
    pub(crate) scrapes: PermitPool,
    /// Reads for other machines. Each client is counted by a number of its own, as others are by their user's.
    pub(crate) served_reads: PermitPool,
    /// Readings of the disk for the metrics, which go on when it does not respond: one of each kind at a time.
    pub(crate) sizes: PermitPool,
    pub(crate) condition: PermitPool,
}

/// The right of a request to use a thread that may block, until it is dropped. Only a permit gives it, so that every
/// request waits for its user's turn.
#[derive(Clone, Debug)]
pub(crate) struct Turn {
    permit: Option<Arc<Permit>>,
}

impl From<Permit> for Turn {
    fn from(permit: Permit) -> Self {
        Self { permit: Some(Arc::new(permit)) }
    }
}

impl Turn {
    fn is_for_long_work(&self) -> bool {
        self.permit.as_ref().is_some_and(|permit| permit.is_for_long_work())
    }

    /// The daemon does one thing after the other.
    pub(crate) const fn for_daemon() -> Self {
        Self { permit: None }
    }
}

impl WorkLimits {
    const IMPORTS: u32 = 2;
    /// How many processes of one user may be blocked by files that do not respond before its imports are
    /// refused.
    pub(crate) const STUCK_READERS: u32 = 4;

    fn new() -> Self {
        let limits = |per_principal, total| Limits { per_principal, total };
        let short = |per_principal, total| PermitPool::with_first_for_each(limits(per_principal, total));
        let long = |per_principal, total| PermitPool::for_long_work(limits(per_principal, total));
        Self {
            // Most are of small files, or wait for the disk.
            imports: short(Self::IMPORTS, 6),
            arriving_imports: short(Self::IMPORTS, 32),
            edits: long(1, 4),
            requested_imports: PermitPool::new(limits(64, 512)),
            file_readers: short(Self::IMPORTS + Self::STUCK_READERS, 48),
            // Few threads: when a crowd of users has all of them busy, short requests still get a processor soon.
            pulls: long(32, 32),
            fetches: FetchLimit::default(),
            pushes: long(4, 8),
            plans: long(2, 4),
            inspections: long(1, 4),
            surveys: long(2, 3),
            verifications: long(1, 2),
            scrapes: short(1, 4),
            // As many as keep a disk busy.
            served_reads: PermitPool::new(limits(2, 4)),
            sizes: PermitPool::new(limits(1, 1)),
            condition: PermitPool::new(limits(1, 1)),
        }
    }

    /// Whether any work runs that changes the store, or waits for a registry.
    pub(crate) fn is_any_running(&self) -> bool {
        let Self { imports, edits, pulls, pushes, plans, inspections, surveys, verifications, .. } = self;
        [imports, edits, pulls, pushes, plans, inspections, surveys, verifications]
            .iter()
            .any(|pool| pool.in_use() > 0)
    }
}

/// Measures whether imports and pulls move enough bytes to keep the disk busy.
#[derive(Debug, Default)]
pub(crate) struct Activity {
    imported: AtomicU64,
    last_check: Mutex<Option<(Instant, u64, bool)>>,
}

impl Activity {
    /// How often the rate is measured.
    const INTERVAL: Duration = Duration::from_secs(1);
    /// Imports and pulls that move fewer bytes in that time do not count as activity.
    const ACTIVE_BYTES: u64 = 1 << 20;

    pub(crate) fn note_imported(&self, bytes: u64) {
        self.imported.fetch_add(bytes, Ordering::Relaxed);
    }

    fn imported(&self) -> u64 {
        self.imported.load(Ordering::Relaxed)
    }

    /// `moved` is the total since the start.
    fn is_active(&self, moved: u64, now: Instant) -> bool {
        let mut last_check = lock(&self.last_check);
        match *last_check {
            Some((at, _, was_active)) if now.saturating_duration_since(at) < Self::INTERVAL => was_active,
            last => {
                let before = last.map_or(moved, |(_, before, _)| before);
                let is_active = moved.saturating_sub(before) >= Self::ACTIVE_BYTES;
                *last_check = Some((now, moved, is_active));
                is_active
            }
        }
    }
}

impl Daemon {
    /// Reads certificate files, so it blocks for some milliseconds. Fails if the policy is not usable.
    pub(crate) fn new(
        store: Store,
        policy: &RegistryPolicy,
        metrics: Metrics,
    ) -> Result<Self, RegistryError> {
        let (store, sessions) = (Arc::new(store), Sessions::default());
        let opened = sessions.clone();
        let last_opened: Arc<LastOpened> =
            Arc::new(move |model: &Reference, manifest| opened.last_opened(model, manifest));
        let audit = Arc::new(AuditLog::default());
        let evictor = Evictor::new(&store, Arc::clone(&last_opened), evictions_to(&audit));
        store.liveness().set_space_maker(Box::new(evictor));
        Ok(Self {
            store,
            metrics,
            registry: RwLock::new(RegistryClient::new(policy)?),
            access: FromConfig::default(),
            quotas: FromConfig::default(),
            pools: RwLock::default(),
            policy: FromConfig::default(),
            trust: FromConfig::default(),
            offer: FromConfig::default(),
            terms: Arc::default(),
            configuration: FromConfig::default(),
            transfers: Transfers::default(),
            sessions,
            running_pulls: RunningPulls::default(),
            audit,
            limits: RequestLimits::for_process(),
            closer: Arc::default(),
            large_models: LargeModels::default(),
            open_cache: OpenCache::default(),
            work: WorkLimits::new(),
            long_work: LongWork::default(),
            request_ids: RequestIds::default(),
            activity: Activity::default(),
            last_opened,
            is_single_user: true,
            has_met_owner: AtomicBool::new(false),
        })
    }

    /// Whether a verification runs, or imports and pulls keep the disk busy. Very slow or blocked ones do
    /// not count.
    pub(crate) fn is_busy(&self) -> bool {
        let moved = self.registry().received_bytes().saturating_add(self.activity.imported());
        self.activity.is_active(moved, Instant::now()) || self.work.verifications.in_use() > 0
    }

    /// For a daemon whose clients are other users. A client that runs as the daemon's own user is then a danger to the
    /// others, because the owner of a blob may change it.
    pub(crate) fn for_many_users(mut self) -> Self {
        self.is_single_user = false;
        self.limits.for_many_users();
        self
    }

    pub(crate) fn with_transfers(mut self, policy: TransferPolicy) -> Self {
        self.transfers = Transfers::new(policy);
        self
    }

    pub(crate) fn registry(&self) -> RegistryClient {
        read(&self.registry).clone()
    }

    pub(crate) fn set_registry(&self, registry: RegistryClient) {
        let mut current = write(&self.registry);
        *current = registry.continuing(&current);
    }

    pub(crate) fn policy_for(&self, peer: &Principal) -> CallerPolicy {
        CallerPolicy::new(self.policy.get(), peer, &self.terms).with_trust(self.trust.get())
    }

    /// The policy for other machines; `None` if they may read nothing.
    pub(crate) fn policy_for_others(&self, reader: &Reader) -> Option<CallerPolicy> {
        let access = self.access.get();
        match reader {
            Reader::User(user) => access.rights_of(user).include(Right::Read).then(|| self.policy_for(user)),
            Reader::EveryUser => access.read.has_everyone().then(|| {
                let policy = Arc::new(self.policy.get().for_every_user());
                CallerPolicy::new(policy, &Principal::unknown(), &self.terms).with_trust(self.trust.get())
            }),
        }
    }

    /// The user of a request that is served after its connection was upgraded.
    pub(crate) fn requester(&self, peer: &Principal) -> Requester {
        self.requester_with(peer, self.access.get().rights_of(peer))
    }

    pub(crate) fn requester_with(&self, peer: &Principal, rights: Rights) -> Requester {
        let requester = Requester::new(peer, rights);
        read(&self.pools).iter().for_each(|pool| pool.note(peer));
        requester.within(self.quotas.get().quota_of(peer, requester.may_administer()))
    }

    pub(crate) fn set_quotas(&self, quotas: Quotas) {
        let mut pools = write(&self.pools);
        *pools = quotas.pools(&pools);
        self.store.ledger().set_pools(pools.iter().map(GroupPool::store_pool).collect());
        drop(pools);
        self.quotas.set(quotas);
    }

    /// Warns once if a client that opens a model owns the blobs. Commands that open none are those of an administrator,
    /// such as the probes of a container.
    pub(crate) fn note_reader(&self, peer: &Principal) {
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

    pub(crate) fn doctor_context(&self) -> DoctorContext {
        DoctorContext {
            audit: self.audit.checked_status(),
            is_single_user: self.is_single_user,
            has_met_owner: self.has_met_owner.load(Ordering::Relaxed),
        }
    }

    pub(crate) const fn pull<'p>(
        &'p self,
        registry: &'p RegistryClient,
        handle: &'p Handle,
        requester: Requester,
        policy: &'p CallerPolicy,
        params: &'p PullParams,
        events: &'p Sender<PullProgress>,
    ) -> Pull<'p> {
        let Self { store, transfers, work: WorkLimits { fetches, .. }, .. } = self;
        Pull {
            store,
            registry,
            transfers,
            fetches,
            handle,
            requester,
            policy,
            params,
            events,
            watch: None,
            arriving: None,
            gauge: None,
        }
    }

    /// Runs blocking work when it is the user's turn. Few run at a time; the others wait without a thread, and dropping
    /// the future leaves the queue.
    pub(crate) async fn disk_work<T: Send + 'static>(
        self: &Arc<Self>,
        uid: u32,
        work: impl FnOnce(&Self) -> Result<T, OpError> + Send + 'static,
    ) -> Result<T, OpError> {
        let turn = self.limits.disk.acquire(uid).await.into();
        self.blocking(turn, work).await
    }

    /// Runs `work` on a blocking thread, within the span of the request, at the priority of the turn. The turn ends with the
    /// work, not when the client has closed the connection.
    pub(crate) async fn blocking<T: Send + 'static>(
        self: &Arc<Self>,
        turn: Turn,
        work: impl FnOnce(&Self) -> Result<T, OpError> + Send + 'static,
    ) -> Result<T, OpError> {
        if turn.is_for_long_work() {
            return self.long_work(turn, work).await;
        }
        let work = self.in_span(turn, work);
        #[allow(clippy::disallowed_methods, reason = "the one place where requests take a thread")]
        let done = spawn_blocking(work).await;
        done.unwrap_or_else(|panic| Err(OpError::Internal(panic.to_string())))
    }

    /// As [`Self::blocking`], at a lower priority whatever the turn is.
    pub(crate) async fn long_work<T: Send + 'static>(
        self: &Arc<Self>,
        turn: Turn,
        work: impl FnOnce(&Self) -> Result<T, OpError> + Send + 'static,
    ) -> Result<T, OpError> {
        let done = self.long_work.run(self.in_span(turn, work)).await;
        done.unwrap_or_else(|error| Err(OpError::Internal(format!("thread for a request: {error}"))))
    }

    fn in_span<T, F: FnOnce(&Self) -> Result<T, OpError>>(
        self: &Arc<Self>,
        turn: Turn,
        work: F,
    ) -> impl FnOnce() -> Result<T, OpError> + use<T, F> {
        let (daemon, span) = (Arc::clone(self), Span::current());
        move || {
            let _turn = turn;
            span.in_scope(|| work(&daemon))
        }
    }
}

/// Adds evictions to the audit log.
pub(crate) fn evictions_to(audit: &Arc<AuditLog>) -> Box<EvictionReport> {
    let audit = Arc::clone(audit);
    Box::new(move |cause, model| audit.record(verb_log::eviction_record(cause, model)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_work_is_not_activity() {
        let (activity, start) = (Activity::default(), Instant::now());
        let after = |seconds| start + Duration::from_secs(seconds);
        assert!(!activity.is_active(5 << 30, start), "no earlier measurement");
        assert!(activity.is_active(6 << 30, after(1)));
        assert!(activity.is_active(6 << 30, after(1)), "the result is kept for a second");
        assert!(!activity.is_active((6 << 30) + 1000, after(2)));
    }
}
