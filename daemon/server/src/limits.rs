//! Limits on what requests use at a time: connections, threads, memory and descriptors.
//!
//! Each pool has a share for each user and a total, so that one user cannot use up what the others need.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use blobd_client::protocol::MAX_FDS_PER_BATCH;
use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use rustix::process::{Resource, getrlimit};
use tokio::time::timeout;

use crate::admission::ConnectionLimits;
use crate::log_limit::LogLimit;
use crate::permits::{Limits, Permit, PermitPool};

/// Requests that read or write the disk or build a response, each on its own thread. More threads make no request
/// faster, and waiting requests need none.
const DISK_WORK: Limits = Limits { per_principal: 6, total: 16 };

/// Health checks have a pool of their own: other work of the user must not look like a disk that does not respond.
const HEALTH_CHECKS: Limits = Limits { per_principal: 2, total: 16 };

/// Memory in KiB for models, and for responses that clients have not received yet. The largest model, with
/// 131,072 tensors, takes about 100 MiB while it is parsed: it takes all of this, and the rest of its memory is left
/// for it below 256 MiB, beside the index, the caches and the buffers of all connections.
const MEMORY_KIB: Limits = Limits { per_principal: 48 << 10, total: 48 << 10 };

/// Memory in KiB for requests that need at most [`SMALL_BYTES`]. It is a pool of its own, so that a few users who hold all of
/// the other pool do not delay the short requests of everybody else.
const SMALL_MEMORY_KIB: Limits = Limits { per_principal: 2 << 10, total: 16 << 10 };

/// The most memory that is taken from the pool for small requests.
const SMALL_BYTES: usize = 256 << 10;

/// Connections of users that carry HTTP: each has buffers of about 20 KiB, which an open model no longer needs. The
/// total is about 20 MiB.
const REQUESTING: Limits = Limits { per_principal: 1024, total: 1024 };

/// Requests that follow the audit log. Each takes a connection and a task for as long as its client likes, and is woken
/// by each record; one user needs few.
const LOG_FOLLOWERS: Limits = Limits { per_principal: 4, total: 64 };

/// Responses up to this size are not counted: the kernel's buffer of a connection takes them, whether its client reads or
/// not.
pub(crate) const UNCOUNTED_BYTES: usize = 4 << 10;

/// Descriptors in flight to clients. The kernel counts the descriptors that one user has sent over Unix
/// sockets and that were not received yet, and refuses more than the sender's own limit of open files,
/// which is usually 1,024 for a client of the daemon's own user. A quarter of that is left to the clients.
const DESCRIPTORS_IN_FLIGHT: Limits = Limits { per_principal: 512, total: 768 };

/// Descriptors in flight to clients if these are other users, or if the daemon runs as root, which has no such limit. From
/// 2,024 on the kernel delays each sender while it searches for unreachable sockets.
const DESCRIPTORS_IN_FLIGHT_TO_OTHERS: Limits = Limits { per_principal: 512, total: 1920 };

/// With a lower limit of open files, the kernel could refuse descriptors that the daemon itself sends.
const FILES_TO_SERVE_OTHERS: u64 = 4096;

/// Descriptors that an open holds in the daemon until its client has received them: the batch in flight and the next
/// one.
pub(crate) const DESCRIPTORS_PER_OPEN: u32 = 128;
const _: () = assert!(DESCRIPTORS_PER_OPEN as usize == 2 * MAX_FDS_PER_BATCH);

/// A response of this size, or this many long-lived connections, may have grown the heap: when they are
/// over, unused memory is returned to the system.
const GROWING_BYTES: usize = 1 << 20;
const GROWING_CONNECTIONS: usize = 64;

/// How long a request waits for its share of a pool before it is refused. Longer than the ten seconds after
/// which a client that receives nothing loses its connection, and with it its permits.
pub(crate) const ACQUIRE_TIMEOUT: Duration = Duration::from_secs(12);

/// The shortest time between two log lines that one client causes.
const LOG_INTERVAL: Duration = Duration::from_secs(1);

/// The shortest time between two log lines about too many connections of one user.
const REFUSAL_LOG_INTERVAL: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub(crate) struct RequestLimits {
    pub(crate) connections: ConnectionLimits,
    pub(crate) requesting: PermitPool,
    pub(crate) lasting: PermitPool,
    pub(crate) disk: PermitPool,
    pub(crate) health: HealthChecks,
    /// Requests that follow the audit log.
    pub(crate) log_followers: PermitPool,
    /// Memory in KiB.
    pub(crate) memory: PermitPool,
    pub(crate) small_memory: PermitPool,
    pub(crate) opening: PermitPool,
    /// Descriptors that were sent and not yet acknowledged.
    pub(crate) in_flight: PermitPool,
    /// Whether the heap may have grown since the last [`Self::has_become_idle`].
    has_grown: AtomicBool,
    pub(crate) log: LogLimit,
    pub(crate) error_log: LogLimit,
    pub(crate) refusal_log: LogLimit,
}

impl RequestLimits {
    pub(crate) fn for_process() -> Self {
        let connections = ConnectionLimits::for_process();
        let units = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        let lasting = Limits {
            per_principal: units(connections.lasting_per_uid),
            total: units(connections.lasting_total),
        };
        let is_root = rustix::process::geteuid().is_root();
        let in_flight = if is_root { DESCRIPTORS_IN_FLIGHT_TO_OTHERS } else { DESCRIPTORS_IN_FLIGHT };
        Self {
            connections,
            requesting: PermitPool::new(REQUESTING),
            lasting: PermitPool::new(lasting),
            // Requests of a few users that wait for memory must not keep those of the others waiting.
            disk: PermitPool::with_first_for_each(DISK_WORK),
            health: HealthChecks::new(),
            log_followers: PermitPool::new(LOG_FOLLOWERS),
            memory: PermitPool::in_order_of_requests(MEMORY_KIB),
            small_memory: PermitPool::new(SMALL_MEMORY_KIB),
            opening: PermitPool::new(opening_limits()),
            in_flight: PermitPool::new(in_flight),
            has_grown: AtomicBool::new(false),
            log: LogLimit::every(LOG_INTERVAL),
            error_log: LogLimit::every(LOG_INTERVAL),
            refusal_log: LogLimit::every(REFUSAL_LOG_INTERVAL),
        }
    }

    /// Changes the limits for a daemon whose clients are other users.
    pub(crate) fn for_many_users(&mut self) {
        if getrlimit(Resource::Nofile).current.is_none_or(|files| files >= FILES_TO_SERVE_OTHERS) {
            self.in_flight = PermitPool::new(DESCRIPTORS_IN_FLIGHT_TO_OTHERS);
        }
    }

    /// Memory for a user; `None` for small sizes. Fails with [`ErrorCode::Busy`] after a time limit.
    pub(crate) async fn memory_for(&self, uid: u32, bytes: usize) -> Result<Option<Permit>, ErrorBody> {
        if bytes <= UNCOUNTED_BYTES {
            return Ok(None);
        }
        if bytes >= GROWING_BYTES {
            self.has_grown.store(true, Ordering::Relaxed);
        }
        let units = kib(bytes);
        let memory = async {
            if bytes > SMALL_BYTES {
                return self.memory.acquire_many(uid, units).await;
            }
            tokio::select! {
                biased;
                small = self.small_memory.acquire_many(uid, units) => small,
                other = self.memory.acquire_many(uid, units) => other,
            }
        };
        timeout(ACQUIRE_TIMEOUT, memory).await.map(Some).map_err(|_elapsed| too_many_unread(uid))
    }

    /// Whether much memory has been used and released since the last call.
    pub(crate) fn has_become_idle(&self) -> bool {
        let is_idle = self.memory.in_use() == 0 && self.lasting.in_use() < GROWING_CONNECTIONS;
        is_idle && self.has_grown.swap(false, Ordering::Relaxed)
    }

    /// Fails with [`ErrorCode::Busy`] after a time limit.
    pub(crate) async fn opening_for(&self, uid: u32) -> Result<Permit, ErrorBody> {
        let permit = self.opening.acquire_many(uid, DESCRIPTORS_PER_OPEN);
        timeout(ACQUIRE_TIMEOUT, permit).await.map_err(|_elapsed| too_many_opens(uid))
    }

    pub(crate) fn lasting_for(&self, uid: u32) -> Result<Arc<Permit>, ErrorBody> {
        if self.lasting.in_use() >= GROWING_CONNECTIONS {
            self.has_grown.store(true, Ordering::Relaxed);
        }
        self.lasting.try_acquire(uid).map(Arc::new).map_err(|_exhausted| {
            let message = format!("uid {uid}: too many open models, pulls and imports at a time");
            ErrorBody::new(ErrorCode::Busy, message)
                .with_hint("close some, or end leases with `blobd release`; `blobd ps` lists them")
        })
    }

    pub(crate) fn log_follower_for(&self, uid: u32) -> Result<Arc<Permit>, ErrorBody> {
        self.log_followers.try_acquire(uid).map(Arc::new).map_err(|_exhausted| {
            let (own, all) = (LOG_FOLLOWERS.per_principal, LOG_FOLLOWERS.total);
            let message = format!("log: uid {uid} may follow it {own} times at once, all users {all} times");
            ErrorBody::new(ErrorCode::Busy, message).with_hint("end another `blobd log --follow`")
        })
    }
}

#[derive(Debug)]
pub(crate) struct HealthChecks {
    pub(crate) turns: PermitPool,
    working: AtomicUsize,
}

#[derive(Debug)]
pub(crate) struct WorkingCheck<'c>(&'c AtomicUsize);

impl HealthChecks {
    fn new() -> Self {
        // A few users cannot keep the checks of the others waiting.
        Self { turns: PermitPool::with_first_for_each(HEALTH_CHECKS), working: AtomicUsize::new(0) }
    }

    pub(crate) fn is_any_working(&self) -> bool {
        self.working.load(Ordering::Relaxed) > 0
    }

    pub(crate) fn work(&self) -> WorkingCheck<'_> {
        self.working.fetch_add(1, Ordering::Relaxed);
        WorkingCheck(&self.working)
    }
}

impl Drop for WorkingCheck<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// KiB, the unit of permits for memory.
pub(crate) fn kib(bytes: usize) -> u32 {
    u32::try_from(bytes.div_ceil(1 << 10)).unwrap_or(u32::MAX)
}

/// A quarter of the files that this process may have open for each user, half for all users.
fn opening_limits() -> Limits {
    /// A higher limit would allow more opens than a user may have connections.
    const MOST: u64 = 128 << 10;
    let files = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX).min(MOST);
    let files = u32::try_from(files).unwrap_or(u32::MAX);
    let at_least_one = |files: u32| files.max(DESCRIPTORS_PER_OPEN);
    Limits { per_principal: at_least_one(files / 4), total: at_least_one(files / 2) }
}

pub(crate) fn too_many_unread(uid: u32) -> ErrorBody {
    let message = format!("uid {uid}: too many unread responses");
    ErrorBody::new(ErrorCode::Busy, message)
        .with_hint("read the responses of earlier requests, or close them")
}

fn too_many_opens(uid: u32) -> ErrorBody {
    let message = format!("open: too many opens in progress for uid {uid}");
    ErrorBody::new(ErrorCode::Busy, message).with_hint(
        "a client must receive the descriptors that it requests; raise the daemon's LimitNOFILE for more",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn opens_use_at_most_half_of_the_descriptor_limit() {
        let files = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let limits = opening_limits();
        assert!(u64::from(limits.total) <= u64::from(DESCRIPTORS_PER_OPEN).max(files / 2), "{limits:?}");
        assert!(limits.per_principal <= limits.total, "{limits:?}");
    }

    #[tokio::test]
    async fn small_responses_are_not_counted_and_large_ones_are() {
        let limits = RequestLimits::for_process();
        assert!(limits.memory_for(1, UNCOUNTED_BYTES).await.unwrap().is_none());
        let permit = limits.memory_for(1, 10 << 20).await.unwrap().expect("counted");
        assert_eq!((permit.units(), limits.memory.in_use()), (10 << 10, 10 << 10));
        assert!(!limits.has_become_idle(), "in use");
        drop(permit);
        assert!(limits.has_become_idle());
        assert!(!limits.has_become_idle(), "nothing was used since");
    }

    #[tokio::test]
    async fn users_that_hold_all_memory_leave_some_for_small_responses_of_others() {
        let limits = RequestLimits::for_process();
        let held = (0..8).map(|uid| limits.memory.try_acquire_many(uid, MEMORY_KIB.total / 8).unwrap());
        let held: Vec<_> = held.collect();
        assert!(limits.memory.try_acquire(9).is_err(), "all is in use");
        let small = (0..9).map(|uid| limits.small_memory.try_acquire_many(uid, kib(SMALL_BYTES)));
        assert!(small.collect::<Result<Vec<_>, _>>().is_ok());
        assert!(limits.memory_for(9, SMALL_BYTES).await.unwrap().is_some());
        drop(held);
    }
}
