//! What requests may use at a time: of connections, threads, memory and descriptors.
//!
//! Each pool has a share for every user and a total, so that no user can use up what the others need.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use blobd_client::protocol::MAX_FDS_PER_BATCH;
use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use rustix::process::{Resource, getrlimit};
use tokio::time::timeout;

use crate::admission::ConnectionLimits;
use crate::log_limit::LogLimit;
use crate::permits::{Limits, Permit, PermitPool};

/// Requests that work on the disk or build a response, each on a thread of its own. More at a time make
/// none of them faster, and the others wait without a thread.
const DISK_WORK: Limits = Limits { per_principal: 6, total: 48 };

/// Memory in KiB for models and responses that clients have not taken yet. The largest model, of 131,072
/// tensors, takes some 100 MiB while it is read and put into tables; the total keeps the daemon below
/// 256 MiB with its index and its caches.
const MEMORY_KIB: Limits = Limits { per_principal: 112 << 10, total: 144 << 10 };

/// Responses up to this size are not counted: with as many connections as there may be they are few MiB.
const UNCOUNTED_BYTES: usize = 4 << 10;

/// Descriptors on their way to clients. The kernel counts those that one user has sent over Unix sockets
/// and nobody has received, and refuses more than the sender's own limit of open files, which for a client
/// of the daemon's own user is 1,024 as a rule. A quarter of that is left to the clients.
const DESCRIPTORS_IN_FLIGHT: Limits = Limits { per_principal: 512, total: 768 };

/// The same for a daemon whose clients are other users, or that is root, who is exempt. From 2,024 on the
/// kernel makes each sender wait while it looks for sockets that nobody can receive any more.
const DESCRIPTORS_IN_FLIGHT_TO_OTHERS: Limits = Limits { per_principal: 512, total: 1920 };

/// With fewer files than this a daemon would itself be refused, whoever its clients are.
const FILES_TO_SERVE_OTHERS: u64 = 4096;

/// Descriptors that an open model has in the daemon until its client takes them: a batch that goes out and
/// the next one.
pub(crate) const DESCRIPTORS_PER_OPEN: u32 = 128;
const _: () = assert!(DESCRIPTORS_PER_OPEN as usize == 2 * MAX_FDS_PER_BATCH);

/// From so many bytes for one response, or connections that last, on the heap is looked after when they are
/// over. Few are no trouble.
const GROWING_BYTES: usize = 1 << 20;
const GROWING_CONNECTIONS: usize = 64;

/// How long a request waits for its share of a pool before it is refused. A client that takes nothing loses
/// its connection, and with it what it holds, after ten seconds.
const PATIENCE: Duration = Duration::from_secs(12);

/// How often a client may cause a line in the log.
const LOG_INTERVAL: Duration = Duration::from_secs(1);

/// How often a user is told in the log to have too many connections.
const REFUSAL_LOG_INTERVAL: Duration = Duration::from_secs(60);

/// The pools that requests take their permits from.
#[derive(Debug)]
pub(crate) struct RequestLimits {
    /// How many connections there may be.
    pub(crate) connections: ConnectionLimits,
    /// Connections that last: open models, imports, pulls, verifications.
    pub(crate) lasting: PermitPool,
    /// Threads for requests that are answered at once.
    pub(crate) disk: PermitPool,
    /// Memory in KiB.
    pub(crate) memory: PermitPool,
    /// Descriptors in the daemon of models that are being opened.
    pub(crate) opening: PermitPool,
    /// Descriptors that were sent and not acknowledged.
    pub(crate) in_flight: PermitPool,
    /// Whether the heap may have grown since the last [`Self::has_become_idle`].
    has_grown: AtomicBool,
    /// What clients do.
    pub(crate) log: LogLimit,
    /// What goes wrong in the daemon while it serves them.
    pub(crate) error_log: LogLimit,
    /// Connections that are refused.
    pub(crate) refusal_log: LogLimit,
}

impl RequestLimits {
    /// Those of this process.
    pub(crate) fn of_process() -> Self {
        let connections = ConnectionLimits::of_process();
        let units = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        let lasting = Limits {
            per_principal: units(connections.lasting_per_uid),
            total: units(connections.lasting_total),
        };
        let is_root = rustix::process::geteuid().is_root();
        let in_flight = if is_root { DESCRIPTORS_IN_FLIGHT_TO_OTHERS } else { DESCRIPTORS_IN_FLIGHT };
        Self {
            connections,
            lasting: PermitPool::new(lasting),
            disk: PermitPool::new(DISK_WORK),
            memory: PermitPool::new(MEMORY_KIB),
            opening: PermitPool::new(opening_limits()),
            in_flight: PermitPool::new(in_flight),
            has_grown: AtomicBool::new(false),
            log: LogLimit::every(LOG_INTERVAL),
            error_log: LogLimit::every(LOG_INTERVAL),
            refusal_log: LogLimit::every(REFUSAL_LOG_INTERVAL),
        }
    }

    /// The same for a daemon whose clients are of other users than its own.
    pub(crate) fn for_many_users(&mut self) {
        if getrlimit(Resource::Nofile).current.is_none_or(|files| files >= FILES_TO_SERVE_OTHERS) {
            self.in_flight = PermitPool::new(DESCRIPTORS_IN_FLIGHT_TO_OTHERS);
        }
    }

    /// Memory for `bytes` on behalf of the user `uid`; nothing for few.
    ///
    /// # Errors
    /// [`ErrorCode::Busy`] when none becomes free in time.
    pub(crate) async fn memory_for(&self, uid: u32, bytes: usize) -> Result<Option<Permit>, ErrorBody> {
        if bytes <= UNCOUNTED_BYTES {
            return Ok(None);
        }
        if bytes >= GROWING_BYTES {
            self.has_grown.store(true, Ordering::Relaxed);
        }
        let memory = self.memory.acquire_many(uid, kib(bytes));
        timeout(PATIENCE, memory).await.map(Some).map_err(|_elapsed| too_much_unread(uid))
    }

    /// Whether much memory was used and has been given back: time to give it back to the system too.
    pub(crate) fn has_become_idle(&self) -> bool {
        let is_idle = self.memory.in_use() == 0 && self.lasting.in_use() < GROWING_CONNECTIONS;
        is_idle && self.has_grown.swap(false, Ordering::Relaxed)
    }

    /// Descriptors for one more model that is being opened.
    ///
    /// # Errors
    /// [`ErrorCode::Busy`] when none become free in time.
    pub(crate) async fn opening_for(&self, uid: u32) -> Result<Permit, ErrorBody> {
        let permit = self.opening.acquire_many(uid, DESCRIPTORS_PER_OPEN);
        timeout(PATIENCE, permit).await.map_err(|_elapsed| too_many_opens(uid))
    }

    /// A connection that lasts, if the user may have one more.
    ///
    /// # Errors
    /// [`ErrorCode::Busy`].
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
}

/// Rounded up.
fn kib(bytes: usize) -> u32 {
    u32::try_from(bytes.div_ceil(1 << 10)).unwrap_or(u32::MAX)
}

/// A quarter of the files that this process may have open for each user, half for all.
fn opening_limits() -> Limits {
    /// More would be more models at a time than a user may have connections.
    const MOST: u64 = 128 << 10;
    let files = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX).min(MOST);
    let files = u32::try_from(files).unwrap_or(u32::MAX);
    let at_least_one = |files: u32| files.max(DESCRIPTORS_PER_OPEN);
    Limits { per_principal: at_least_one(files / 4), total: at_least_one(files / 2) }
}

pub(crate) fn too_much_unread(uid: u32) -> ErrorBody {
    let message = format!("uid {uid}: too many responses that were not read yet");
    ErrorBody::new(ErrorCode::Busy, message)
        .with_hint("read the responses of earlier requests, or close them")
}

fn too_many_opens(uid: u32) -> ErrorBody {
    let message = format!("open: too many opens in progress for uid {uid}");
    ErrorBody::new(ErrorCode::Busy, message)
        .with_hint("a client must take the descriptors it asks for; raise the daemon's LimitNOFILE for more")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_that_are_opened_take_a_part_of_the_files_that_may_be_open() {
        let files = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let limits = opening_limits();
        assert!(u64::from(limits.total) <= u64::from(DESCRIPTORS_PER_OPEN).max(files / 2), "{limits:?}");
        assert!(limits.per_principal <= limits.total, "{limits:?}");
    }

    #[tokio::test]
    async fn small_responses_are_not_counted_and_large_ones_are() {
        let limits = RequestLimits::of_process();
        assert!(limits.memory_for(1, UNCOUNTED_BYTES).await.unwrap().is_none());
        let permit = limits.memory_for(1, 10 << 20).await.unwrap().expect("counted");
        assert_eq!((permit.units(), limits.memory.in_use()), (10 << 10, 10 << 10));
        assert!(!limits.has_become_idle(), "in use");
        drop(permit);
        assert!(limits.has_become_idle());
        assert!(!limits.has_become_idle(), "nothing since");
    }
}
