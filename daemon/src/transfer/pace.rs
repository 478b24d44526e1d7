//! How fast bytes may come.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

/// A limit that several transfers share. It can be changed while they run.
#[derive(Clone, Debug, Default)]
pub struct RateLimit(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    bucket: Mutex<Bucket>,
    /// Rung when the rate is another: whoever waits by the old one need not go on.
    changed: Notify,
}

/// Waits as long as `bytes`, which have come, take by all of these; says whether that was any time.
pub(super) async fn pay(limits: &[RateLimit], bytes: usize) -> bool {
    let mut has_waited = false;
    for limit in limits {
        has_waited |= limit.pay(bytes as u64).await;
    }
    has_waited
}

#[derive(Debug, Default)]
struct Bucket {
    bytes_per_second: Option<u64>,
    /// When what has come so far may have come at this rate.
    paid_until: Option<Instant>,
}

impl RateLimit {
    /// A limit in bytes per second; `None` or 0 is none.
    #[must_use]
    pub fn new(bytes_per_second: Option<u64>) -> Self {
        let limit = Self::default();
        limit.set(bytes_per_second);
        limit
    }

    /// Changes it, from the next bytes on.
    pub fn set(&self, bytes_per_second: Option<u64>) {
        {
            let mut bucket = self.lock();
            bucket.bytes_per_second = bytes_per_second.filter(|rate| *rate > 0);
            bucket.paid_until = None;
        }
        self.0.changed.notify_waiters();
    }

    /// What it is in bytes per second.
    #[must_use]
    pub fn get(&self) -> Option<u64> {
        self.lock().bytes_per_second
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
    pub async fn pay(&self, bytes: u64) -> bool {
        let changed = self.0.changed.notified();
        tokio::pin!(changed);
        // Before the look at the rate, or a change in between would be missed.
        changed.as_mut().enable();
        let Some(until) = self.due(bytes, Instant::now()) else { return false };
        tokio::select! {
            () = tokio::time::sleep_until(until) => {}
            () = changed => {}
        }
        true
    }

    fn due(&self, bytes: u64, now: Instant) -> Option<Instant> {
        /// What was not used a moment ago may be used now, but no more than that.
        const BURST: Duration = Duration::from_millis(100);
        const LONGEST: Duration = Duration::from_secs(60);
        let mut bucket = self.lock();
        let rate = bucket.bytes_per_second?;
        let earliest = now.checked_sub(BURST).unwrap_or(now);
        let from = bucket.paid_until.map_or(earliest, |until| until.max(earliest));
        let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(rate);
        let takes = Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX)).min(LONGEST);
        let until = from + takes;
        bucket.paid_until = Some(until);
        (until > now).then_some(until)
    }

    fn lock(&self) -> MutexGuard<'_, Bucket> {
        // Every change is complete before anything could panic.
        self.0.bucket.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_take_as_long_as_the_rate_says_however_they_are_cut() {
        for step in [1_000, 100_000] {
            let (limit, start) = (RateLimit::new(Some(1_000_000)), Instant::now());
            let due: Vec<_> = (0..1_000_000 / step).map(|_| limit.due(step, start)).collect();
            let took = due.last().unwrap().unwrap() - start;
            assert!((0.85..1.01).contains(&took.as_secs_f64()), "{took:?}");
        }
    }

    #[test]
    fn limit_that_is_changed_holds_at_once() {
        let (limit, now) = (RateLimit::new(Some(1)), Instant::now());
        assert!(limit.due(1000, now).is_some());
        limit.set(Some(1 << 40));
        assert_eq!(limit.due(1000, now), None);
        limit.set(None);
        assert_eq!(limit.due(u64::MAX, now), None);
        assert_eq!(RateLimit::new(Some(0)).get(), None);
    }

    #[tokio::test]
    async fn whoever_waits_goes_on_when_the_limit_is_lifted() {
        let limit = RateLimit::new(Some(1));
        let waits = limit.clone();
        let started = Instant::now();
        let wait = tokio::spawn(async move { waits.pay(1 << 20).await });
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(!wait.is_finished());
        limit.set(None);
        wait.await.unwrap();
        assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
    }
}
