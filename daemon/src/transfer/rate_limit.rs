//! How fast bytes may come: a limit that transfers share and that can be changed.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use blobd_store::RateLimiter;
use tokio::sync::Notify;
use tokio::time::Instant;

/// A limit that several transfers share. It can be changed while they run.
#[derive(Clone, Debug)]
pub struct RateLimit(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    limiter: Mutex<RateLimiter>,
    /// From when on the limiter's times are counted.
    started: Instant,
    /// Rung when the rate is another: whoever waits by the old one need not go on.
    changed: Notify,
}

/// Waits as long as `bytes`, which have come, take by all of these; says whether that was any time.
pub(super) async fn wait(limits: &[RateLimit], bytes: usize) -> bool {
    let mut has_waited = false;
    for limit in limits {
        has_waited |= limit.wait(bytes as u64).await;
    }
    has_waited
}

impl Default for RateLimit {
    fn default() -> Self {
        Self::new(None)
    }
}

impl RateLimit {
    /// A limit in bytes per second; `None` or 0 is none.
    #[must_use]
    pub fn new(bytes_per_second: Option<u64>) -> Self {
        let limiter = Mutex::new(RateLimiter::new(bytes_per_second));
        Self(Arc::new(Shared { limiter, started: Instant::now(), changed: Notify::new() }))
    }

    /// Changes it, from the next bytes on.
    pub fn set(&self, bytes_per_second: Option<u64>) {
        *self.lock() = RateLimiter::new(bytes_per_second);
        self.0.changed.notify_waiters();
    }

    /// What it is in bytes per second.
    #[must_use]
    pub fn get(&self) -> Option<u64> {
        self.lock().bytes_per_second()
    }

    /// Lets it be at least this; `None` is no limit.
    pub(super) fn raise_to(&self, least: Option<u64>) {
        match (self.get(), least) {
            (Some(rate), Some(least)) if least <= rate => {}
            (Some(_), least) => self.set(least),
            (None, _) => {}
        }
    }

    /// Waits as long as `bytes`, which have come, take at this rate, or until it is another; says whether
    /// that was any time.
    pub async fn wait(&self, bytes: u64) -> bool {
        let changed = self.0.changed.notified();
        tokio::pin!(changed);
        // Before the look at the rate, or a change in between would be missed.
        changed.as_mut().enable();
        let wait = self.take(bytes, self.0.started.elapsed());
        if wait.is_zero() {
            return false;
        }
        tokio::select! {
            () = tokio::time::sleep(wait) => {}
            () = changed => {}
        }
        true
    }

    fn take(&self, bytes: u64, now: Duration) -> Duration {
        /// No piece of a file holds a transfer up for longer, however low the rate.
        const LONGEST_SECONDS: u64 = 60;
        let mut limiter = self.lock();
        let rate = limiter.bytes_per_second().unwrap_or_default();
        limiter.take(bytes.min(rate.saturating_mul(LONGEST_SECONDS)), now)
    }

    fn lock(&self) -> MutexGuard<'_, RateLimiter> {
        // Every change is complete before anything could panic.
        self.0.limiter.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limit_that_is_changed_holds_at_once() {
        let (limit, now) = (RateLimit::new(Some(1)), Duration::from_secs(1));
        let longest = Duration::from_secs(60) - RateLimiter::BURST;
        assert_eq!(limit.take(1000, now), longest);
        limit.set(Some(1 << 40));
        assert_eq!(limit.take(1000, now), Duration::ZERO);
        limit.set(None);
        assert_eq!(limit.take(u64::MAX, now), Duration::ZERO);
        assert_eq!(RateLimit::new(Some(0)).get(), None);
    }

    #[tokio::test]
    async fn whoever_waits_goes_on_when_the_limit_is_lifted() {
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
