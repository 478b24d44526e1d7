//! How fast work goes, from what was done in the last seconds.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// A speed from the start of the work would be wrong for a long time after a fast or a slow beginning.
const WINDOW: Duration = Duration::from_secs(10);
const SAMPLE_INTERVAL: Duration = Duration::from_millis(100);

/// How much was done at some times, the oldest first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Meter {
    samples: VecDeque<(Instant, u64)>,
    done: u64,
    /// When something was last done.
    moved: Instant,
}

impl Meter {
    /// A meter for work that begins with `done` completed already.
    pub(super) fn starting_at(now: Instant, done: u64) -> Self {
        Self { samples: VecDeque::from([(now, done)]), done, moved: now }
    }

    pub(super) const fn done(&self) -> u64 {
        self.done
    }

    pub(super) fn note(&mut self, now: Instant, done: u64) {
        if done != self.done {
            (self.moved, self.done) = (now, done);
        }
        // The first sample is the last one before the window.
        let begin = now.checked_sub(WINDOW);
        while self.samples.get(1).is_some_and(|(at, _)| begin.is_some_and(|begin| *at <= begin)) {
            self.samples.pop_front();
        }
        let last = self.samples.back().map(|(at, _)| now.saturating_duration_since(*at));
        if last.is_none_or(|last| last >= SAMPLE_INTERVAL) {
            self.samples.push_back((now, done));
        }
    }

    /// What is done per second.
    pub(super) fn speed(&self, now: Instant) -> u64 {
        let begin = now.checked_sub(WINDOW);
        let before = self.samples.iter().rev().find(|(at, _)| begin.is_some_and(|begin| *at <= begin));
        let Some((at, done)) = before.or(self.samples.front()) else { return 0 };
        let elapsed = u64::try_from(now.saturating_duration_since(*at).as_millis()).unwrap_or(u64::MAX);
        self.done.saturating_sub(*done).saturating_mul(1000) / elapsed.max(1)
    }

    /// How long nothing has been done.
    pub(super) fn still_for(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.moved)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(points: impl IntoIterator<Item = (u64, u64)>) -> (Meter, Instant) {
        let start = Instant::now();
        let mut meter = Meter::starting_at(start, 0);
        for (milliseconds, done) in points {
            meter.note(start + Duration::from_millis(milliseconds), done);
        }
        (meter, start)
    }

    #[test]
    fn speed_is_that_of_the_last_seconds() {
        // A second of 1000 each, then a minute of 10 each.
        let points = (0..=600).map(|tenth| (tenth * 100, if tenth < 10 { tenth * 100 } else { 990 + tenth }));
        let (meter, start) = measured(points);
        assert_eq!(meter.speed(start + Duration::from_secs(60)), 10);
        assert!(meter.samples.len() < 110, "{}", meter.samples.len());
    }

    #[test]
    fn speed_falls_to_nothing_while_nothing_is_done() {
        let (meter, start) = measured([(1000, 500)]);
        assert_eq!(meter.speed(start + Duration::from_secs(2)), 250);
        assert_eq!(meter.speed(start + Duration::from_secs(20)), 0);
        assert_eq!(meter.still_for(start + Duration::from_secs(20)), Duration::from_secs(19));
    }

    #[test]
    fn what_was_done_before_does_not_count() {
        let start = Instant::now();
        let mut meter = Meter::starting_at(start, 900);
        meter.note(start + Duration::from_secs(1), 1000);
        assert_eq!(meter.speed(start + Duration::from_secs(1)), 100);
    }
}
