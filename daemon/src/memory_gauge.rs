//! Memory that grows while something of unknown size arrives, such as a header from a registry.

use std::sync::PoisonError;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::time::timeout;
use tracing_mutex::stdsync::Mutex;

use crate::limits::{ACQUIRE_TIMEOUT, kib};
use crate::permits::{Permit, PermitPool};

/// What is not counted: most headers of small models are shorter.
const UNCOUNTED_BYTES: usize = 256 << 10;

/// How much is counted at a time, at least.
const STEP_KIB: u32 = 1 << 10;

/// Counts for one request what has arrived so far. Two requests that both hold some could wait for each other, so none waits
/// longer than a client may leave a response unread.
#[derive(Debug)]
pub struct MemoryGauge<'m> {
    pool: &'m PermitPool,
    uid: u32,
    /// What stays in memory of earlier headers.
    kept: AtomicUsize,
    permit: Mutex<Option<Permit>>,
}

impl<'m> MemoryGauge<'m> {
    pub(crate) fn new(pool: &'m PermitPool, uid: u32) -> Self {
        Self { pool, uid, kept: AtomicUsize::new(0), permit: Mutex::default() }
    }

    /// Has later calls of [`Self::cover`] count these bytes too.
    pub(crate) fn keep(&self, bytes: usize) {
        self.kept.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Counts `bytes` and those that are kept. False if that is more than the user's share, or if others use the memory for
    /// too long.
    pub(crate) async fn cover(&self, bytes: usize) -> bool {
        let bytes = bytes.saturating_add(self.kept.load(Ordering::Relaxed));
        if bytes <= UNCOUNTED_BYTES {
            return true;
        }
        let held = self.lock().as_ref().map_or(0, Permit::units);
        let missing = kib(bytes).saturating_sub(u32::try_from(held).unwrap_or(u32::MAX));
        if missing == 0 {
            return true;
        }
        let more = missing.max(STEP_KIB);
        if usize::try_from(more).is_ok_and(|more| held.saturating_add(more) > self.pool.share()) {
            return false;
        }
        let Ok(more) = timeout(ACQUIRE_TIMEOUT, self.pool.acquire_many(self.uid, more)).await else {
            return false;
        };
        let mut permit = self.lock();
        match &mut *permit {
            Some(permit) => permit.merge(more),
            none => *none = Some(more),
        }
        true
    }

    /// What is counted.
    pub(crate) fn into_permit(self) -> Option<Permit> {
        self.permit.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> tracing_mutex::stdsync::MutexGuard<'_, Option<Permit>> {
        // Each change is complete before anything can panic.
        self.permit.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::permits::Limits;

    const MIB: usize = 1 << 20;

    #[tokio::test]
    async fn what_has_arrived_is_counted_up_to_the_share() {
        let pool = PermitPool::new(Limits { per_principal: 8 << 10, total: 16 << 10 });
        let gauge = MemoryGauge::new(&pool, 1);
        assert!(gauge.cover(UNCOUNTED_BYTES).await);
        assert_eq!(pool.in_use(), 0, "short");
        assert!(gauge.cover(MIB / 2).await && gauge.cover(MIB).await);
        assert_eq!(pool.in_use(), 1 << 10, "a step at a time");
        assert!(gauge.cover(5 * MIB).await && gauge.cover(3 * MIB).await);
        assert_eq!(pool.in_use(), 5 << 10);
        assert!(!gauge.cover(9 * MIB).await, "above the share");
        gauge.keep(5 * MIB);
        assert!(!gauge.cover(4 * MIB).await, "above the share, with what is kept");
        assert_eq!(gauge.into_permit().unwrap().units(), 5 << 10);
        assert_eq!(pool.in_use(), 0);
    }
}
