//! Limits the rate of reads from a disk or the network.

use std::time::Duration;

/// Limits bytes per second over any period longer than [`Self::BURST`]. The caller passes times from any fixed moment.
#[derive(Clone, Copy, Debug, Default)]
pub struct RateLimiter {
    bytes_per_second: Option<u64>,
    /// The time until which the bytes taken so far use the whole rate.
    spent_until: Duration,
}

impl RateLimiter {
    /// Unused rate of at most this period may be used later.
    pub const BURST: Duration = Duration::from_millis(100);

    /// A limit in bytes per second; `None` or 0 means unlimited.
    pub fn new(bytes_per_second: Option<u64>) -> Self {
        Self { bytes_per_second: bytes_per_second.filter(|rate| *rate > 0), spent_until: Duration::ZERO }
    }

    pub const fn bytes_per_second(&self) -> Option<u64> {
        self.bytes_per_second
    }

    /// How long the bytes taken so far use the whole rate from now on.
    pub fn owed(&self, now: Duration) -> Duration {
        self.bytes_per_second.map_or(Duration::ZERO, |_| self.spent_until.saturating_sub(now))
    }

    /// Records that `bytes` are taken now; returns how long to wait before the next.
    pub fn take(&mut self, bytes: u64, now: Duration) -> Duration {
        let Some(rate) = self.bytes_per_second else { return Duration::ZERO };
        let start = self.spent_until.max(now.saturating_sub(Self::BURST));
        let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(rate);
        let cost = Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
        self.spent_until = start.saturating_add(cost);
        self.spent_until.saturating_sub(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limiter(bytes_per_second: u64) -> RateLimiter {
        RateLimiter::new(Some(bytes_per_second))
    }

    #[test]
    fn rate_is_kept_for_any_chunk_size() {
        for chunk in [1000, 4096, 1 << 20] {
            let (mut limiter, mut now, mut bytes) = (limiter(10 << 20), Duration::from_secs(7), 0u64);
            while bytes < 100 << 20 {
                now += limiter.take(chunk, now);
                bytes += chunk;
            }
            let seconds = (now - Duration::from_secs(7)).as_secs_f64();
            assert!((9.8..10.2).contains(&seconds), "100 MiB at 10 MiB/s took {seconds} s");
        }
    }

    #[test]
    fn pause_allows_at_most_one_burst() {
        let mut limiter = limiter(1000);
        limiter.take(1000, Duration::ZERO);
        assert_eq!(limiter.owed(Duration::from_millis(400)), Duration::from_millis(600));
        let after_an_hour = Duration::from_secs(3600);
        assert_eq!(limiter.take(1000, after_an_hour), Duration::from_secs(1) - RateLimiter::BURST);
        assert_eq!(limiter.take(1000, after_an_hour), Duration::from_secs(2) - RateLimiter::BURST);
    }

    #[test]
    fn extreme_rates_do_not_overflow() {
        assert!(limiter(1).take(u64::MAX, Duration::ZERO) > Duration::from_secs(1 << 30));
        assert_eq!(limiter(u64::MAX).take(1 << 20, Duration::ZERO), Duration::ZERO);
    }

    #[test]
    fn no_rate_is_no_limit() {
        for mut unlimited in [RateLimiter::new(None), limiter(0)] {
            assert_eq!(unlimited.bytes_per_second(), None);
            assert_eq!(unlimited.take(u64::MAX, Duration::ZERO), Duration::ZERO);
        }
    }
}
