//! Memory that grows while something of unknown size arrives, such as a header from a registry.
//!
//! Two requests that hold some memory and wait for more could wait for each other for ever. So a request that describes
//! models waits no longer than a client may leave a response unread. A pull, which must not fail only because others
//! use the memory, holds none while it waits: it discards what has arrived of a header, waits for enough for the
//! longest one, and requests the header again.

use std::sync::PoisonError;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tokio::time::timeout;
use tracing_mutex::stdsync::Mutex;

use crate::limits::{ACQUIRE_TIMEOUT, kib};
use crate::locks::lock;
use crate::permits::{Permit, PermitPool};

/// Not counted: most headers of small models are shorter.
const UNCOUNTED_BYTES: usize = 256 << 10;

/// The least amount that is counted at a time.
const STEP_KIB: u32 = 1 << 10;

/// How long a pull may hold memory that others wait for, the first time. Each restart doubles it, so that a slow
/// download ends as well.
const FIRST_TURN: Duration = Duration::from_secs(30);

/// The most times that the turn is doubled: it then lasts an hour.
const MAX_DOUBLINGS: u32 = 7;

/// Counts the memory of one request.
#[derive(Debug)]
pub struct MemoryGauge<'m> {
    pool: &'m PermitPool,
    uid: u32,
    waits: Waits,
    /// Bytes of earlier headers that stay in memory.
    kept: AtomicUsize,
    held: Mutex<Option<Held>>,
}

#[derive(Debug)]
enum Waits {
    /// For a limited time, even while it holds some memory.
    Briefly,
    /// As long as necessary, without any memory.
    WithoutMemory { restarts: AtomicU32 },
}

#[derive(Debug)]
struct Held {
    permit: Permit,
    since: Instant,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Covered {
    Yes,
    /// Others use the memory for too long.
    No,
    /// Everything that is counted must be discarded, then [`MemoryGauge::start_again`] waits.
    AfterRestart,
}

impl<'m> MemoryGauge<'m> {
    pub(crate) fn new(pool: &'m PermitPool, uid: u32) -> Self {
        Self { pool, uid, waits: Waits::Briefly, kept: AtomicUsize::new(0), held: Mutex::default() }
    }

    pub(crate) fn for_pull(pool: &'m PermitPool, uid: u32) -> Self {
        Self { waits: Waits::WithoutMemory { restarts: AtomicU32::new(0) }, ..Self::new(pool, uid) }
    }

    /// Includes these bytes in later calls of [`Self::cover`].
    pub(crate) fn keep(&self, bytes: usize) {
        self.kept.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Counts `bytes` and those that are kept. A request that needs more than its user's share gets the whole share: it
    /// is then the only one of the user.
    pub(crate) async fn cover(&self, bytes: usize) -> Covered {
        let bytes = bytes.saturating_add(self.kept.load(Ordering::Relaxed));
        if bytes <= UNCOUNTED_BYTES {
            return Covered::Yes;
        }
        let share = u32::try_from(self.pool.share()).unwrap_or(u32::MAX);
        let held = lock(&self.held).as_ref().map_or(0, |held| held.permit.units());
        let held = u32::try_from(held).unwrap_or(u32::MAX);
        let missing = kib(bytes).min(share).saturating_sub(held);
        if missing == 0 {
            return Covered::Yes;
        }
        let more = missing.max(STEP_KIB).min(share.saturating_sub(held));
        let more = match &self.waits {
            Waits::Briefly => timeout(ACQUIRE_TIMEOUT, self.pool.acquire_many(self.uid, more)).await.ok(),
            Waits::WithoutMemory { .. } => self.pool.try_acquire_many(self.uid, more).ok(),
        };
        match (more, &self.waits) {
            (Some(more), _) => {
                self.add(more);
                Covered::Yes
            }
            (None, Waits::Briefly) => Covered::No,
            (None, Waits::WithoutMemory { .. }) => Covered::AfterRestart,
        }
    }

    /// Whether others wait for memory that this pull has held for too long.
    pub(crate) fn is_overdue(&self) -> bool {
        let Waits::WithoutMemory { restarts } = &self.waits else { return false };
        let turn = FIRST_TURN.saturating_mul(1 << restarts.load(Ordering::Relaxed).min(MAX_DOUBLINGS));
        self.pool.waiting() > 0 && lock(&self.held).as_ref().is_some_and(|held| held.since.elapsed() >= turn)
    }

    /// Returns all memory, then waits for `bytes`. The caller has discarded what was counted.
    pub(crate) async fn start_again(&self, bytes: usize) {
        drop(lock(&self.held).take());
        if let Waits::WithoutMemory { restarts } = &self.waits {
            restarts.fetch_add(1, Ordering::Relaxed);
        }
        self.add(self.pool.acquire_many(self.uid, kib(bytes)).await);
    }

    /// Returns all memory. The caller has discarded what was counted.
    pub(crate) fn release(&self) {
        drop(lock(&self.held).take());
    }

    pub(crate) fn into_permit(self) -> Option<Permit> {
        self.held.into_inner().unwrap_or_else(PoisonError::into_inner).map(|held| held.permit)
    }

    fn add(&self, more: Permit) {
        match &mut *lock(&self.held) {
            Some(held) => held.permit.merge(more),
            none => *none = Some(Held { permit: more, since: Instant::now() }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::permits::Limits;

    const MIB: usize = 1 << 20;

    fn pool() -> PermitPool {
        PermitPool::new(Limits { per_principal: 8 << 10, total: 16 << 10 })
    }

    #[tokio::test]
    async fn what_has_arrived_is_counted_up_to_the_share() {
        let pool = pool();
        let gauge = MemoryGauge::new(&pool, 1);
        assert_eq!(gauge.cover(UNCOUNTED_BYTES).await, Covered::Yes);
        assert_eq!(pool.in_use(), 0, "short");
        assert_eq!(gauge.cover(MIB / 2).await, Covered::Yes);
        assert_eq!(gauge.cover(MIB).await, Covered::Yes);
        assert_eq!(pool.in_use(), 1 << 10, "a step at a time");
        assert_eq!(gauge.cover(5 * MIB).await, Covered::Yes);
        assert_eq!(gauge.cover(3 * MIB).await, Covered::Yes);
        assert_eq!(pool.in_use(), 5 << 10);
        assert_eq!(gauge.cover(9 * MIB).await, Covered::Yes, "alone, a request may take more than the share");
        gauge.keep(5 * MIB);
        assert_eq!(gauge.cover(4 * MIB).await, Covered::Yes);
        assert_eq!(gauge.into_permit().unwrap().units(), 8 << 10);
        assert_eq!(pool.in_use(), 0);
    }

    #[tokio::test]
    async fn description_waits_without_releasing_its_memory() {
        let pool = pool();
        let other = pool.acquire_many(1, 4 << 10).await;
        let gauge = MemoryGauge::new(&pool, 1);
        assert_eq!(gauge.cover(3 * MIB).await, Covered::Yes);
        let more = gauge.cover(5 * MIB);
        tokio::pin!(more);
        assert!(timeout(Duration::from_millis(20), more.as_mut()).await.is_err());
        assert_eq!(pool.in_use(), 7 << 10);
        drop(other);
        assert_eq!(more.await, Covered::Yes);
    }

    #[tokio::test]
    async fn pulls_that_need_more_memory_than_is_free_hold_none_while_they_wait_and_all_end() {
        let pool = pool();
        let [first, second] = [MemoryGauge::for_pull(&pool, 1), MemoryGauge::for_pull(&pool, 1)];
        for gauge in [&first, &second] {
            assert_eq!(gauge.cover(4 * MIB).await, Covered::Yes);
        }
        assert_eq!(first.cover(6 * MIB).await, Covered::AfterRestart);
        assert_eq!(second.cover(6 * MIB).await, Covered::AfterRestart);
        let waiting = first.start_again(6 * MIB);
        tokio::pin!(waiting);
        assert!(timeout(Duration::from_millis(20), waiting.as_mut()).await.is_err());
        assert_eq!(pool.in_use(), 4 << 10, "only the other one holds memory");
        let first_ends = async {
            waiting.await;
            assert_eq!(first.cover(6 * MIB).await, Covered::Yes);
            first.release();
        };
        let second_ends = async {
            second.start_again(6 * MIB).await;
            second.release();
        };
        tokio::join!(first_ends, second_ends);
        assert_eq!(pool.in_use(), 0);
    }

    #[tokio::test]
    async fn pull_is_overdue_only_while_others_wait_and_longer_after_each_restart() {
        let pool = pool();
        let gauge = MemoryGauge::for_pull(&pool, 1);
        let hold_for = |turns: u32| {
            if let Some(held) = &mut *lock(&gauge.held) {
                held.since = Instant::now() - FIRST_TURN * turns;
            }
        };
        assert_eq!(gauge.cover(8 * MIB).await, Covered::Yes);
        hold_for(1);
        assert!(!gauge.is_overdue(), "nobody waits");
        let other = pool.acquire_many(1, 1);
        tokio::pin!(other);
        assert!(timeout(Duration::from_millis(20), other.as_mut()).await.is_err());
        assert!(gauge.is_overdue());
        let again = gauge.start_again(8 * MIB);
        let (_other, ()) = tokio::join!(async { drop(other.await) }, again);
        let next = pool.acquire_many(1, 1);
        tokio::pin!(next);
        assert!(timeout(Duration::from_millis(20), next.as_mut()).await.is_err());
        hold_for(1);
        assert!(!gauge.is_overdue());
        hold_for(2);
        assert!(gauge.is_overdue());
    }
}
