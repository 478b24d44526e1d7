//! A rate limit that transfers share and that can be changed.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use blobd_store::RateLimiter;
use tokio::sync::Notify;
use tokio::time::Instant;
use tracing_mutex::stdsync::{Mutex, MutexGuard};

#[derive(Clone, Debug)]
pub(crate) struct RateLimit(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    limiter: Mutex<RateLimiter>,
    taken: AtomicU64,
    started: Instant,
    /// Notified when the rate changes, which ends waits by the old rate.
    changed: Notify,
}

/// Waits as long as all `limits` require after receiving `bytes`.
pub(super) async fn wait(limits: &[RateLimit], bytes: usize) {
    for limit in limits {
        limit.wait(bytes as u64).await;
    }
}

impl Default for RateLimit {
    fn default() -> Self {
        Self::new(None)
    }
}

impl RateLimit {
    /// A limit in bytes per second; `None` and 0 mean no limit.
    pub(crate) fn new(bytes_per_second: Option<u64>) -> Self {
        let limiter = Mutex::new(RateLimiter::new(bytes_per_second));
        let (taken, started, changed) = (AtomicU64::new(0), Instant::now(), Notify::new());
        Self(Arc::new(Shared { limiter, taken, started, changed }))
    }

    /// Changes the rate, which applies to the next bytes.
    pub(crate) fn set(&self, bytes_per_second: Option<u64>) {
        *self.lock() = RateLimiter::new(bytes_per_second);
        self.0.changed.notify_waiters();
    }

    pub(crate) fn get(&self) -> Option<u64> {
        self.lock().bytes_per_second()
    }

    /// Raises the rate to at least this; `None` means no limit.
    pub(super) fn raise_to(&self, least: Option<u64>) {
        if self.get().is_some_and(|rate| least.is_none_or(|least| least > rate)) {
            self.set(least);
        }
    }

    /// The bytes that all transfers have received under this limit, less those for which they still have to
    /// wait. While the limit delays them, this grows at exactly its rate.
    pub(super) fn paid_bytes(&self) -> u64 {
        self.paid_at(self.0.started.elapsed())
    }

    fn paid_at(&self, now: Duration) -> u64 {
        let limiter = self.lock();
        let owed = limiter.owed(now);
        let rate = limiter.bytes_per_second().unwrap_or_default();
        let milliseconds = u64::try_from(owed.as_millis()).unwrap_or(u64::MAX);
        self.0.taken.load(Ordering::Relaxed).saturating_sub(rate.saturating_mul(milliseconds) / 1000)
    }

    pub(super) fn count(&self, bytes: u64) {
        self.0.taken.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Waits as long as the rate requires after receiving `bytes`, or until the rate changes.
    pub(crate) async fn wait(&self, bytes: u64) {
        self.count(bytes);
        let changed = self.0.changed.notified();
        tokio::pin!(changed);
        // Before the rate is read, or a change in between would be missed.
        changed.as_mut().enable();
        let wait = self.take(bytes, self.0.started.elapsed());
        if wait.is_zero() {
            return;
        }
        tokio::select! {
            () = tokio::time::sleep(wait) => {}
            () = changed => {}
        }
    }

    fn take(&self, bytes: u64, now: Duration) -> Duration {
        /// The longest wait for one piece of a file at a very low rate.
        const LONGEST_SECONDS: u64 = 60;
        let mut limiter = self.lock();
        let rate = limiter.bytes_per_second().unwrap_or_default();
        limiter.take(bytes.min(rate.saturating_mul(LONGEST_SECONDS)), now)
    }

    fn lock(&self) -> MutexGuard<'_, RateLimiter> {
        // Each change is complete before anything can panic.
        self.0.limiter.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changed_limit_applies_immediately() {
        let (limit, now) = (RateLimit::new(Some(1)), Duration::from_secs(1));
        let longest = Duration::from_secs(60) - RateLimiter::BURST;
        assert_eq!(limit.take(1000, now), longest);
        limit.set(Some(1 << 40));
        assert_eq!(limit.take(1000, now), Duration::ZERO);
        limit.set(None);
        assert_eq!(limit.take(u64::MAX, now), Duration::ZERO);
        assert_eq!(RateLimit::new(Some(0)).get(), None);
    }

    #[test]
    fn bytes_that_are_waited_for_are_not_paid_yet() {
        let (limit, now) = (RateLimit::new(Some(1000)), Duration::from_secs(1));
        limit.count(5000);
        limit.take(5000, now);
        let paid = |milliseconds| limit.paid_at(now + Duration::from_millis(milliseconds));
        let burst = u64::try_from(RateLimiter::BURST.as_millis()).unwrap();
        assert_eq!([paid(0), paid(2000), paid(9000)], [burst, 2000 + burst, 5000]);
    }

    #[tokio::test]
    async fn wait_ends_when_the_limit_is_removed() {
        let limit = RateLimit::new(Some(1));
        let waits = limit.clone();
        let started = Instant::now();
        let wait = tokio::spawn(async move { waits.wait(1 << 20).await });
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(!wait.is_finished());
        limit.set(None);
        wait.await.unwrap();
        assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
    }
}
