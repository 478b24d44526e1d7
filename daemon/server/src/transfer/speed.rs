//! Detects connections that are far slower than the others of their transfer.
//!
//! Some nodes of content delivery networks are a hundred times slower than others. It is then faster to
//! request the rest of a range again. Only the time spent waiting for bytes counts: a rate limit or a slow
//! disk does not make a connection slow.

use std::sync::PoisonError;
use std::time::Duration;

use tracing_mutex::stdsync::Mutex;

const WINDOW: Duration = Duration::from_secs(3);
/// A connection that is slower than the average by this factor is replaced. Connections share a line, and their number
/// changes, so smaller differences mean nothing.
const FACTOR: u64 = 8;
/// If the rest of a range takes less time than this, a new connection is not worth it.
const MIN_REST: Duration = Duration::from_secs(10);

/// The bytes that one connection has received, and how long it waited for them.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Meter {
    bytes: u64,
    waited: Duration,
}

impl Meter {
    pub(super) fn add(&mut self, bytes: usize, waited: Duration) {
        self.bytes = self.bytes.saturating_add(bytes as u64);
        self.waited = self.waited.saturating_add(waited);
    }

    fn rate(self) -> u64 {
        let milliseconds = u64::try_from(self.waited.as_millis()).unwrap_or(u64::MAX).max(1);
        self.bytes.saturating_mul(1000) / milliseconds
    }
}

/// The rates of one transfer's connections, in bytes per second.
#[derive(Debug, Default)]
pub(super) struct Speeds {
    /// The average over complete ranges; the latest counts half.
    average: Mutex<Option<u64>>,
    /// The bytes that all connections have received since the last tick, and the last rate of one of them.
    current: Mutex<(Meter, Option<u64>)>,
}

impl Speeds {
    pub(super) fn add(&self, bytes: usize, waited: Duration) {
        self.current.lock().unwrap_or_else(PoisonError::into_inner).0.add(bytes, waited);
    }

    /// Computes the rate of one connection since the last tick.
    pub(super) fn tick(&self) {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        let meter = std::mem::take(&mut current.0);
        if meter.bytes > 0 {
            current.1 = Some(meter.rate());
        }
    }

    /// The last rate of one connection, while it waits for the network alone.
    pub(super) fn of_one_connection(&self) -> Option<u64> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner).1
    }

    /// Records a complete range.
    pub(super) fn note(&self, meter: Meter) {
        // The meter may just have been reset.
        if meter.bytes > 0 {
            self.update(meter);
        }
    }

    fn update(&self, meter: Meter) {
        let mut average = self.average.lock().unwrap_or_else(PoisonError::into_inner);
        *average = Some(average.map_or(meter.rate(), |average| average / 2 + meter.rate() / 2));
    }

    /// Whether the `left` bytes of a range would arrive much sooner over another connection. Resets the meter after each
    /// window.
    pub(super) fn is_too_slow(&self, meter: &mut Meter, left: u64) -> bool {
        if meter.waited < WINDOW {
            return false;
        }
        let measured = std::mem::take(meter);
        let rate = measured.rate();
        let average = self.average.lock().unwrap_or_else(PoisonError::into_inner).unwrap_or_default();
        let is_slow = rate.saturating_mul(FACTOR) < average && left > rate.saturating_mul(MIN_REST.as_secs());
        if is_slow {
            // If the whole line has become slow, the average adapts soon.
            self.update(measured);
        }
        is_slow
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn meter(bytes: usize, seconds: u64) -> Meter {
        let mut meter = Meter::default();
        meter.add(bytes, Duration::from_secs(seconds));
        meter
    }

    #[test]
    fn connection_far_slower_than_the_average_is_too_slow() {
        let speeds = Speeds::default();
        let is_too_slow = |bytes, seconds| speeds.is_too_slow(&mut meter(bytes, seconds), 64 << 20);
        assert!(!is_too_slow(1000, 3), "nothing to compare with");
        speeds.note(meter(10 << 20, 1));
        assert!(!is_too_slow(1000, 2), "too early to say");
        assert!(!is_too_slow(6 << 20, 3), "a fifth may be its share of the line");
        assert!(is_too_slow(1000, 3));
    }

    #[test]
    fn range_that_is_nearly_complete_is_waited_for() {
        let speeds = Speeds::default();
        speeds.note(meter(10 << 20, 1));
        assert!(!speeds.is_too_slow(&mut meter(30_000, 3), 90_000));
        assert!(speeds.is_too_slow(&mut meter(30_000, 3), 110_000));
    }

    #[test]
    fn average_adapts_to_a_line_that_has_become_slow() {
        let speeds = Speeds::default();
        speeds.note(meter(100 << 20, 1));
        let given_up = (0..100).take_while(|_| speeds.is_too_slow(&mut meter(3 << 20, 3), 64 << 20));
        assert!((1..8).contains(&given_up.count()));
    }
}
