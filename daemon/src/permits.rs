//! Limits on concurrent work and on memory: the share of each principal first, the total second.
//!
//! A principal that has used up its share waits for its own work to end, in the order of its requests, and
//! does not enter the queue for the total. So the others wait behind at most its share, however many
//! requests it makes.
//!
//! Some work can last without limit (a transfer with a rate limit, a file on an unreachable network), and a
//! few principals could block the total with it. [`PermitPool::with_first_for_each`] makes a pool for such
//! work: the first unit of each principal does not depend on the total.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore, TryAcquireError};
use tracing_mutex::stdsync::Mutex;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) per_principal: u32,
    pub(crate) total: u32,
}

/// Issues permits within [`Limits`]. A principal is identified by its uid.
#[derive(Debug)]
pub(crate) struct PermitPool {
    total: Arc<Semaphore>,
    /// Units for principals that have none while the total is used up.
    firsts: Arc<Semaphore>,
    /// The number of units of both semaphores.
    all_units: usize,
    limits: Limits,
    /// The number of requests that wait for units.
    waiting: AtomicUsize,
    principals: Mutex<BTreeMap<u32, Share>>,
}

/// Counts a request that waits, until it is dropped.
struct Waiting<'p>(&'p AtomicUsize);

impl<'p> Waiting<'p> {
    fn begin(count: &'p AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(count)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The units of one principal.
#[derive(Clone, Debug)]
struct Share {
    units: Arc<Semaphore>,
    /// The one unit that does not depend on the total.
    first: Arc<Semaphore>,
}

/// Units in use; returned on drop.
#[derive(Debug)]
#[must_use]
pub(crate) struct Permit {
    own: OwnedSemaphorePermit,
    first: Option<OwnedSemaphorePermit>,
    total: OwnedSemaphorePermit,
}

impl Permit {
    pub(crate) fn units(&self) -> usize {
        self.own.num_permits()
    }

    /// Returns the units above `units`.
    pub(crate) fn shrink(&mut self, units: usize) {
        let excess = self.units().saturating_sub(units);
        // A first unit is single and stays.
        if self.first.is_none() {
            drop((self.own.split(excess), self.total.split(excess)));
        }
    }

    /// Adds a permit of the same pool, principal and semaphore.
    pub(crate) fn merge(&mut self, other: Self) {
        self.own.merge(other.own);
        self.total.merge(other.total);
    }
}

/// All units of the principal or of the pool are in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Exhausted;

impl PermitPool {
    pub(crate) fn new(limits: Limits) -> Self {
        Self::with_firsts(limits, 0)
    }

    /// The same, but a principal without units gets its first unit even when the total is used up. The
    /// number of such units is also limited to the total.
    pub(crate) fn with_first_for_each(limits: Limits) -> Self {
        Self::with_firsts(limits, limits.total as usize)
    }

    fn with_firsts(limits: Limits, firsts: usize) -> Self {
        let total = limits.total as usize;
        Self {
            total: Arc::new(Semaphore::new(total)),
            firsts: Arc::new(Semaphore::new(firsts)),
            all_units: total.saturating_add(firsts),
            limits,
            waiting: AtomicUsize::new(0),
            principals: Mutex::default(),
        }
    }

    /// Waits for one unit for `uid`. Dropping the future leaves the queue.
    pub(crate) async fn acquire(&self, uid: u32) -> Permit {
        self.acquire_many(uid, 1).await
    }

    /// The same for several units. A number above the principal's limit is reduced to that, so that one
    /// large request runs alone instead of never.
    pub(crate) async fn acquire_many(&self, uid: u32, units: u32) -> Permit {
        let units = self.clamp(units);
        let share = self.share_of(uid);
        let _waiting = Waiting::begin(&self.waiting);
        loop {
            // The semaphores are never closed, so this succeeds at the first try.
            let Ok(own) = Arc::clone(&share.units).acquire_many_owned(units).await else { continue };
            let total = Arc::clone(&self.total).acquire_many_owned(units);
            tokio::select! {
                biased;
                Ok(total) = total => return Permit { own, first: None, total },
                (first, total) = self.first(&share, units) => {
                    return Permit { own, first: Some(first), total };
                }
            }
        }
    }

    /// Waits for the unit that does not depend on the total; for ever if there is none or several units are
    /// requested.
    async fn first(&self, share: &Share, units: u32) -> (OwnedSemaphorePermit, OwnedSemaphorePermit) {
        if units == 1
            && let Ok(first) = Arc::clone(&share.first).acquire_owned().await
            && let Ok(total) = Arc::clone(&self.firsts).acquire_owned().await
        {
            return (first, total);
        }
        std::future::pending().await
    }

    pub(crate) fn try_acquire(&self, uid: u32) -> Result<Permit, Exhausted> {
        self.try_acquire_many(uid, 1)
    }

    pub(crate) fn try_acquire_many(&self, uid: u32, units: u32) -> Result<Permit, Exhausted> {
        let units = self.clamp(units);
        let exhausted = |_: TryAcquireError| Exhausted;
        let share = self.share_of(uid);
        let own = share.units.try_acquire_many_owned(units).map_err(exhausted)?;
        match Arc::clone(&self.total).try_acquire_many_owned(units) {
            Ok(total) => Ok(Permit { own, first: None, total }),
            Err(_) if units == 1 => {
                let first = share.first.try_acquire_owned().map_err(exhausted)?;
                let total = Arc::clone(&self.firsts).try_acquire_owned().map_err(exhausted)?;
                Ok(Permit { own, first: Some(first), total })
            }
            Err(_) => Err(Exhausted),
        }
    }

    /// Waits for one unit, and takes with it up to `most` in total, but at most one in `part` of the units
    /// that the principal has left. So many requests that hold their units for long still leave some for
    /// the next one.
    pub(crate) async fn acquire_part(&self, uid: u32, most: u32, part: usize) -> Permit {
        let mut permit = self.acquire(uid).await;
        let left = self.share_of(uid).units.available_permits().min(self.total.available_permits());
        let more = u32::try_from(left / part.max(1)).unwrap_or(u32::MAX).min(most.saturating_sub(1));
        // A first unit is of another semaphore and cannot be merged.
        if more > 0
            && permit.first.is_none()
            && let Ok(grown) = self.try_acquire_many(uid, more)
            && grown.first.is_none()
        {
            permit.merge(grown);
        }
        permit
    }

    /// The number of requests that wait for their share or for the total.
    pub(crate) fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Relaxed)
    }

    pub(crate) fn in_use(&self) -> usize {
        let free = self.total.available_permits() + self.firsts.available_permits();
        self.all_units.saturating_sub(free)
    }

    /// The most units that all principals together may hold, without the first ones that do not depend on the others.
    pub(crate) const fn total(&self) -> usize {
        self.limits.total as usize
    }

    /// The most units that one principal may hold.
    pub(crate) fn share(&self) -> usize {
        self.limits.per_principal.min(self.limits.total) as usize
    }

    fn clamp(&self, units: u32) -> u32 {
        units.min(self.limits.per_principal).min(self.limits.total)
    }

    fn share_of(&self, uid: u32) -> Share {
        // Each change of the map is complete before anything can panic.
        let mut principals = self.principals.lock().unwrap_or_else(PoisonError::into_inner);
        // Only the map holds a share that is not in use.
        principals
            .retain(|_, share| Arc::strong_count(&share.units) > 1 || Arc::strong_count(&share.first) > 1);
        let full = || Share {
            units: Arc::new(Semaphore::new(self.limits.per_principal as usize)),
            first: Arc::new(Semaphore::new(1)),
        };
        principals.entry(uid).or_insert_with(full).clone()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;

    const MOMENT: Duration = Duration::from_millis(20);

    #[tokio::test]
    async fn principal_that_has_used_up_its_share_waits_and_others_do_not() {
        let pool = PermitPool::new(Limits { per_principal: 2, total: 8 });
        let (first, _second) = (pool.acquire(1).await, pool.acquire(1).await);
        let third = pool.acquire(1);
        tokio::pin!(third);
        assert!(timeout(MOMENT, third.as_mut()).await.is_err(), "it waits");
        assert_eq!((pool.waiting(), pool.in_use(), pool.total()), (1, 2, 8), "the total is not used up");
        assert_eq!(pool.try_acquire(1).unwrap_err(), Exhausted);
        assert!(pool.try_acquire(2).is_ok());
        drop(first);
        let _third = third.await;
        assert!(timeout(MOMENT, pool.acquire(1)).await.is_err());
        assert_eq!(pool.waiting(), 0, "who leaves the queue is not counted");
        assert_eq!(pool.in_use(), 2);
    }

    #[tokio::test]
    async fn principal_with_many_requests_takes_only_its_share_of_the_queue_for_the_total() {
        let pool = Arc::new(PermitPool::new(Limits { per_principal: 1, total: 1 }));
        let held = pool.acquire(1).await;
        let waiting = |uid| {
            let pool = Arc::clone(&pool);
            tokio::spawn(async move { drop(pool.acquire(uid).await) })
        };
        let greedy: Vec<_> = (0..100).map(|_| waiting(1)).collect();
        tokio::task::yield_now().await;
        let other = waiting(2);
        tokio::task::yield_now().await;
        drop(held);
        timeout(Duration::from_secs(10), other).await.expect("the other principal's turn").unwrap();
        for task in greedy {
            task.await.unwrap();
        }
        assert_eq!(pool.in_use(), 0);
    }

    #[tokio::test]
    async fn first_unit_of_a_principal_does_not_depend_on_the_others() {
        let pool = PermitPool::with_first_for_each(Limits { per_principal: 2, total: 4 });
        let held = [1, 1, 2, 2].map(|uid| pool.try_acquire(uid).unwrap());
        let first = pool.acquire(3).await;
        assert_eq!(pool.try_acquire(3).unwrap_err(), Exhausted, "only the first");
        assert!(timeout(MOMENT, pool.acquire(3)).await.is_err());
        assert_eq!(pool.try_acquire(1).unwrap_err(), Exhausted, "its share is used up");
        assert_eq!(pool.in_use(), 5);
        drop(first);
        let _again = pool.try_acquire(3).unwrap();
        drop(held);
        let _second = pool.acquire(3).await;
    }

    #[tokio::test]
    async fn firsts_beyond_the_total_are_limited_too() {
        let pool = PermitPool::with_first_for_each(Limits { per_principal: 1, total: 2 });
        let _held: Vec<_> = (0..4).map(|uid| pool.try_acquire(uid).unwrap()).collect();
        assert_eq!(pool.try_acquire(4).unwrap_err(), Exhausted);
    }

    #[tokio::test]
    async fn request_larger_than_a_share_takes_the_whole_share() {
        let pool = PermitPool::new(Limits { per_principal: 4, total: 10 });
        let _all = pool.acquire_many(1, 100).await;
        assert_eq!(pool.in_use(), 4);
        assert_eq!(pool.try_acquire_many(1, 1).unwrap_err(), Exhausted);
    }

    #[tokio::test]
    async fn parts_get_smaller_the_more_of_them_are_held() {
        let pool = PermitPool::new(Limits { per_principal: 64, total: 1000 });
        let mut held = Vec::new();
        for _ in 0..8 {
            held.push(pool.acquire_part(1, 32, 4).await);
        }
        let units: Vec<_> = held.iter().map(Permit::units).collect();
        assert!(units.is_sorted_by(|a, b| a >= b) && units[0] == 16 && units[7] >= 1, "{units:?}");
        assert_eq!(pool.in_use(), units.iter().sum::<usize>());
        assert_eq!(pool.acquire_part(2, 8, 4).await.units(), 8, "no more than asked for");
        drop(held);
        assert_eq!(pool.in_use(), 0);
    }

    #[tokio::test]
    async fn units_that_are_not_needed_after_all_are_returned() {
        let pool = PermitPool::new(Limits { per_principal: 8, total: 10 });
        let mut permit = pool.acquire_many(1, 8).await;
        permit.shrink(9);
        assert_eq!(permit.units(), 8, "it does not grow");
        permit.shrink(3);
        assert_eq!((permit.units(), pool.in_use()), (3, 3));
        assert!(pool.try_acquire_many(1, 5).is_ok() && pool.try_acquire_many(2, 7).is_ok());
        permit.shrink(0);
        assert_eq!(pool.in_use(), 0);
    }

    #[tokio::test]
    async fn unused_shares_are_forgotten() {
        let pool = PermitPool::new(Limits { per_principal: 1, total: 8 });
        for uid in 0..100 {
            drop(pool.acquire(uid).await);
        }
        let _held = pool.acquire(7).await;
        assert!(pool.principals.lock().unwrap().len() <= 2);
    }
}
