//! Decides on the number of connections of a transfer, without clock or network.
//!
//! One more is opened as long as the last one increased the rate. Below a rate limit, as many are opened as the
//! limit seems to need, and one more is tried again after a while even if the last one did not help: one
//! measurement of a host that delivers unevenly proves nothing.

use std::time::Duration;

use tokio::time::Instant;

use super::RateLimit;

#[derive(Clone, Copy, Debug)]
pub(super) struct Sample {
    pub(super) now: Instant,
    pub(super) received_bytes: u64,
    pub(super) workers: usize,
    pub(super) limit: LimitLeft,
}

/// How much of the rate limits was not used since the last sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LimitLeft {
    NoLimit,
    /// A limit delays the transfers that share it, so another connection would not help.
    Reached,
    /// The bytes per second that are still allowed.
    Left(u64),
}

#[derive(Debug)]
pub(super) struct Growth {
    last: Option<(Instant, u64)>,
    /// The best rate so far in bytes per second.
    best: u64,
    workers: usize,
    /// Samples since the last attempt that did not help.
    idle: u32,
    /// The number of such samples before another attempt.
    patience: u32,
}

impl Growth {
    /// Five seconds at the usual interval; doubled after each attempt that did not help.
    const FIRST_PATIENCE: u32 = 10;

    pub(super) const fn from_one_connection() -> Self {
        Self { last: None, best: 0, workers: 1, idle: 0, patience: Self::FIRST_PATIENCE }
    }

    pub(super) fn how_many_more(&mut self, sample: Sample) -> usize {
        let Some(rate) = self.rate(sample) else { return 0 };
        if sample.workers != self.workers {
            // The effect of the newest connection is measured by the next sample.
            self.workers = sample.workers;
            return 0;
        }
        if sample.limit == LimitLeft::Reached {
            return 0;
        }
        let is_faster = rate > self.best.saturating_add(self.least_gain());
        self.best = self.best.max(rate);
        if is_faster {
            (self.idle, self.patience) = (0, Self::FIRST_PATIENCE);
            return match sample.limit {
                LimitLeft::Left(left) => self.needed_for(left, rate),
                LimitLeft::NoLimit | LimitLeft::Reached => 1,
            };
        }
        usize::from(rate > 0 && sample.limit != LimitLeft::NoLimit && self.is_time_for_another())
    }

    /// The rate since the last sample; `None` if there is none, or no time has passed.
    fn rate(&mut self, Sample { now, received_bytes, .. }: Sample) -> Option<u64> {
        let (then, before) = self.last.replace((now, received_bytes)).unwrap_or((now, 0));
        let milliseconds = u64::try_from(now.saturating_duration_since(then).as_millis()).ok()?;
        received_bytes.saturating_sub(before).saturating_mul(1000).checked_div(milliseconds)
    }

    /// A tenth, or a third of the share of one of many connections.
    fn least_gain(&self) -> u64 {
        let share = self.best / u64::try_from(self.workers).unwrap_or(u64::MAX).max(1);
        (self.best / 10).min(share / 3)
    }

    /// The connections that `left` bytes per second need, at most twice as many as there are: together they may be slower
    /// than one suggests.
    fn needed_for(&self, left: u64, rate: u64) -> usize {
        let of_one = rate / u64::try_from(self.workers).unwrap_or(u64::MAX).max(1);
        let needed = usize::try_from(left.div_ceil(of_one.max(1))).unwrap_or(usize::MAX);
        needed.clamp(1, self.workers.max(1))
    }

    fn is_time_for_another(&mut self) -> bool {
        self.idle = self.idle.saturating_add(1);
        let is_time = self.idle >= self.patience;
        if is_time {
            (self.idle, self.patience) = (0, self.patience.saturating_mul(2));
        }
        is_time
    }
}

/// Measures how much of the rate limits is used, by all transfers that share them.
#[derive(Debug)]
pub(super) struct LimitUse {
    limits: Vec<(RateLimit, u64)>,
    then: Option<Instant>,
}

impl LimitUse {
    pub(super) fn new(limits: &[RateLimit]) -> Self {
        Self { limits: limits.iter().map(|limit| (limit.clone(), limit.paid_bytes())).collect(), then: None }
    }

    pub(super) fn left(&mut self, now: Instant) -> LimitLeft {
        let since = now.saturating_duration_since(self.then.replace(now).unwrap_or(now));
        let each = self.limits.iter_mut().map(|(limit, before)| {
            let paid = limit.paid_bytes();
            let new_bytes = paid.saturating_sub(std::mem::replace(before, paid));
            limit.get().map_or(LimitLeft::NoLimit, |rate| Self::left_of_one(rate, new_bytes, since))
        });
        each.fold(LimitLeft::NoLimit, |least, one| match (least, one) {
            (LimitLeft::Reached, _) | (_, LimitLeft::Reached) => LimitLeft::Reached,
            (LimitLeft::Left(least), LimitLeft::Left(one)) => LimitLeft::Left(least.min(one)),
            (LimitLeft::NoLimit, other) | (other, LimitLeft::NoLimit) => other,
        })
    }

    /// A limit counts as reached if at most a twentieth is unused.
    fn left_of_one(rate: u64, new_bytes: u64, since: Duration) -> LimitLeft {
        let milliseconds = u64::try_from(since.as_millis()).unwrap_or(u64::MAX);
        let used = new_bytes.saturating_mul(1000).checked_div(milliseconds).unwrap_or_default();
        let left = rate.saturating_sub(used);
        if left <= rate / 20 { LimitLeft::Reached } else { LimitLeft::Left(left) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIB: u64 = 1 << 10;

    /// A transfer from a host that gives each connection the same rate, up to one for the whole line.
    struct Line {
        of_one: u64,
        of_all: u64,
        limit: Option<u64>,
        growth: Growth,
        now: Instant,
        received: u64,
        workers: usize,
    }

    impl Line {
        fn new(of_one: u64, of_all: u64, limit: Option<u64>) -> Self {
            let growth = Growth::from_one_connection();
            Self { of_one, of_all, limit, growth, now: Instant::now(), received: 0, workers: 1 }
        }

        fn rate(&self) -> u64 {
            let rate = (self.of_one * self.workers as u64).min(self.of_all);
            rate.min(self.limit.unwrap_or(u64::MAX))
        }

        /// `percent` of the rate arrive in half a second; at most eight connections.
        fn pass(&mut self, percent: u64) {
            let half = Duration::from_millis(500);
            let bytes = self.rate() * percent / 200;
            (self.now, self.received) = (self.now + half, self.received + bytes);
            let limit =
                self.limit.map_or(LimitLeft::NoLimit, |limit| LimitUse::left_of_one(limit, bytes, half));
            let (now, received_bytes, workers) = (self.now, self.received, self.workers);
            let more = self.growth.how_many_more(Sample { now, received_bytes, workers, limit });
            self.workers = (self.workers + more).min(8);
        }

        fn pass_seconds(&mut self, seconds: u32) -> usize {
            (0..2 * seconds).for_each(|_| self.pass(100));
            self.workers
        }
    }

    #[test]
    fn connections_are_added_while_they_help() {
        assert_eq!(Line::new(100 * KIB, 100 * KIB, None).pass_seconds(60), 2, "the second did not help");
        assert_eq!(Line::new(100 * KIB, 350 * KIB, None).pass_seconds(60), 5, "the fifth did not help");
        assert_eq!(Line::new(100 * KIB, u64::MAX, None).pass_seconds(60), 8);
    }

    #[test]
    fn limit_is_reached_by_as_many_connections_as_it_needs() {
        for (limit, workers) in [(1_000_000, 4), (250 * KIB, 1), (600 * KIB, 3), (2000 * KIB, 8)] {
            let mut line = Line::new(256 * KIB, u64::MAX, Some(limit));
            assert_eq!(line.pass_seconds(10), workers, "{limit}");
            assert!(line.rate() >= limit * 19 / 20, "{limit}: {}", line.rate());
            assert_eq!(line.pass_seconds(600), workers, "{limit}: no more than needed");
        }
    }

    #[test]
    fn limit_is_reached_although_the_host_delivers_unevenly() {
        let mut line = Line::new(256 * KIB, u64::MAX, Some(1_000_000));
        for step in 0..120 {
            line.pass([100, 40, 130, 70, 100, 20][step % 6]);
        }
        assert!(line.rate() >= 950_000, "{} connections", line.workers);
    }

    #[test]
    fn first_tick_without_time_adds_nothing() {
        let mut growth = Growth::from_one_connection();
        let now = Instant::now();
        let first = Sample { now, received_bytes: 100, workers: 1, limit: LimitLeft::NoLimit };
        assert_eq!(growth.how_many_more(first), 0);
        let later = now + Duration::from_millis(500);
        assert_eq!(growth.how_many_more(Sample { now: later, ..first }), 0, "silent");
    }

    #[test]
    fn tightest_of_several_limits_counts() {
        let (own, shared) = (RateLimit::new(Some(1000)), RateLimit::new(Some(5000)));
        let mut usage = LimitUse::new(&[own.clone(), shared.clone()]);
        let now = Instant::now();
        usage.left(now);
        own.count(400);
        shared.count(400);
        assert_eq!(usage.left(now + Duration::from_secs(1)), LimitLeft::Left(600));
        shared.count(5000);
        assert_eq!(usage.left(now + Duration::from_secs(2)), LimitLeft::Reached, "others use it up");
        own.set(None);
        assert_eq!(usage.left(now + Duration::from_secs(3)), LimitLeft::Left(5000));
        shared.set(None);
        assert_eq!(usage.left(now + Duration::from_secs(4)), LimitLeft::NoLimit);
    }
}
