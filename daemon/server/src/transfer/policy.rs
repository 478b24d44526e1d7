//! How files are requested: limits and timing, and whether by ranges.

use std::time::Duration;

#[derive(Clone, Copy, Debug)]
pub(crate) struct TransferPolicy {
    /// The initial rate limit of all transfers together, if any.
    pub(crate) bytes_per_second: Option<u64>,
    /// The most connections to one host, of all transfers together.
    pub(crate) max_connections: usize,
    /// The smallest range to request in bytes, unless less is missing.
    pub(crate) min_range_bytes: u64,
    pub(crate) max_range_bytes: u64,
    pub(crate) range_takes: Duration,
    /// How often the transfer checks whether one more connection would help.
    pub(crate) tick: Duration,
    /// A connection that has been silent for this long, while others received something, is given up.
    pub(crate) silent_beside_others: Duration,
    /// After this time without a byte, the user is told that the transfer waits for the host.
    pub(crate) silence_reported: Duration,
}

impl Default for TransferPolicy {
    fn default() -> Self {
        Self {
            bytes_per_second: None,
            // Registries' networks serve one connection at 10 to 100 MB/s; some treat more than eight as abuse.
            max_connections: 8,
            // At 10 MB/s, a round trip around the world takes less than a tenth of the time of such a range.
            min_range_bytes: 4 << 20,
            max_range_bytes: 64 << 20,
            range_takes: Duration::from_secs(2),
            tick: Duration::from_millis(500),
            silent_beside_others: SILENCE,
            silence_reported: SILENCE,
        }
    }
}

/// A third of the time after which a connection counts as stalled. Lost packets, or a wireless network that changes its
/// cell, rarely cost more than two seconds.
const SILENCE: Duration = Duration::from_secs(5);

impl TransferPolicy {
    /// Adapts the policy to connections that count as stalled after `stall_timeout` without a byte.
    pub(crate) fn with_stall_timeout(self, stall_timeout: Duration) -> Self {
        let third = stall_timeout / 3;
        Self { silent_beside_others: third, silence_reported: third, ..self }
    }

    /// The length of the next range, after one of `length` bytes took this long.
    pub(super) fn next_length(&self, length: u64, took: Duration) -> u64 {
        let next = if took < self.range_takes / 2 {
            length.saturating_mul(2)
        } else if took > self.range_takes * 2 {
            length / 2
        } else {
            length
        };
        next.clamp(self.min_range_bytes, self.max_range_bytes)
    }
}

/// Whether the rest of a file is requested by ranges, or as the whole file again.
///
/// Some servers accept a range and send nothing of it; others break every long stream at the same place. A request that
/// has failed twice without progress would fail again, so the next one is made in the other way.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RangeFallback {
    is_whole: bool,
    fruitless: u32,
    /// The bytes received when the last attempt failed.
    received_bytes: u64,
}

/// The number of attempts in a row without progress after which requests change.
const MAX_FRUITLESS: u32 = 2;

impl RangeFallback {
    pub(super) const fn is_whole(self) -> bool {
        self.is_whole
    }

    /// Records an attempt whose response began and failed, and how much has been received in total. An attempt without a
    /// response says nothing about ranges.
    pub(super) const fn note_failure(&mut self, received_bytes: u64) {
        if received_bytes > self.received_bytes {
            (self.fruitless, self.received_bytes) = (0, received_bytes);
        }
        self.fruitless += 1;
        if self.fruitless >= MAX_FRUITLESS {
            (self.fruitless, self.is_whole) = (0, !self.is_whole);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_grow_with_the_speed_of_the_link() {
        let policy = TransferPolicy::default();
        let slow = policy.next_length(4 << 20, Duration::from_secs(60));
        assert_eq!(slow, policy.min_range_bytes);
        assert_eq!(policy.next_length(8 << 20, Duration::from_millis(100)), 16 << 20);
        assert_eq!(policy.next_length(64 << 20, Duration::from_millis(100)), policy.max_range_bytes);
        assert_eq!(policy.next_length(16 << 20, policy.range_takes), 16 << 20);
    }

    #[test]
    fn requests_change_after_two_attempts_without_progress() {
        let mut fallback = RangeFallback::default();
        let is_whole = [0, 0, 0, 0, 9, 20, 20, 20].map(|received| {
            fallback.note_failure(received);
            fallback.is_whole()
        });
        assert_eq!(is_whole, [false, true, true, false, false, false, true, true]);
    }
}
