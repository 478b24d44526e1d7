//! Whether a connection keeps up with the others of its transfer.
//!
//! Content networks have nodes that are a hundred times slower than their neighbours. The rest of a
//! range on such a connection is better asked for again. What counts is the time in which bytes
//! were waited for: a limit of our own, or a slow disk, makes no connection slow.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// A connection is judged by what it brings in so much time.
const WINDOW: Duration = Duration::from_secs(3);
/// Slower than the usual by this factor is left behind. Connections share a line, and their number
/// changes, so much less would be no sign of anything.
const FACTOR: u64 = 8;
/// What ends sooner is not worth a new connection.
const WORTH: Duration = Duration::from_secs(10);

/// What one connection has brought.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Meter {
    bytes: u64,
    waited: Duration,
}

impl Meter {
    /// So many bytes came after a wait.
    pub(super) fn add(&mut self, bytes: usize, waited: Duration) {
        self.bytes = self.bytes.saturating_add(bytes as u64);
        self.waited = self.waited.saturating_add(waited);
    }

    /// In bytes per second.
    fn rate(self) -> u64 {
        let milliseconds = u64::try_from(self.waited.as_millis()).unwrap_or(u64::MAX).max(1);
        self.bytes.saturating_mul(1000) / milliseconds
    }
}

/// What connections of one transfer usually bring, in bytes per second: the newest counts half.
#[derive(Debug, Default)]
pub(super) struct Speeds(Mutex<Option<u64>>);

impl Speeds {
    /// A range has come whole.
    pub(super) fn note(&self, meter: Meter) {
        // The meter may just have begun anew.
        if meter.bytes > 0 {
            self.blend(meter);
        }
    }

    fn blend(&self, meter: Meter) {
        let mut usual = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *usual = Some(usual.map_or(meter.rate(), |usual| usual / 2 + meter.rate() / 2));
    }

    /// Whether the `left` bytes of a range would come much sooner from somewhere else. The meter
    /// begins anew now and then.
    pub(super) fn is_left_behind(&self, meter: &mut Meter, left: u64) -> bool {
        if meter.waited < WINDOW {
            return false;
        }
        let measured = std::mem::take(meter);
        let rate = measured.rate();
        let usual = self.0.lock().unwrap_or_else(PoisonError::into_inner).unwrap_or_default();
        let is_behind = rate.saturating_mul(FACTOR) < usual && left > rate.saturating_mul(WORTH.as_secs());
        if is_behind {
            // If the whole line has become slow, this is what is usual soon.
            self.blend(measured);
        }
        is_behind
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
    fn connection_far_slower_than_the_usual_is_left_behind() {
        let speeds = Speeds::default();
        let is_left_behind = |bytes, seconds| speeds.is_left_behind(&mut meter(bytes, seconds), 64 << 20);
        assert!(!is_left_behind(1000, 3), "nothing to compare it with");
        speeds.note(meter(10 << 20, 1));
        assert!(!is_left_behind(1000, 2), "too early to say");
        assert!(!is_left_behind(6 << 20, 3), "a fifth may be its share of the line");
        assert!(is_left_behind(1000, 3));
    }

    #[test]
    fn what_is_nearly_done_is_waited_for() {
        let speeds = Speeds::default();
        speeds.note(meter(10 << 20, 1));
        assert!(!speeds.is_left_behind(&mut meter(30_000, 3), 90_000));
        assert!(speeds.is_left_behind(&mut meter(30_000, 3), 110_000));
    }

    #[test]
    fn line_that_has_become_slow_is_slow_for_all_soon() {
        let speeds = Speeds::default();
        speeds.note(meter(100 << 20, 1));
        let given_up = (0..100).take_while(|_| speeds.is_left_behind(&mut meter(3 << 20, 3), 64 << 20));
        assert!((1..8).contains(&given_up.count()));
    }
}
