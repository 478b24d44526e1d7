//! How files are transferred.

use std::time::Duration;

/// How files are transferred.
#[derive(Clone, Copy, Debug)]
pub struct TransferPolicy {
    /// How fast all transfers together may be at first; `None` is no limit.
    pub bytes_per_second: Option<u64>,
    /// The most connections to one host, of all transfers together.
    pub max_connections: usize,
    /// The least that is asked for at once in bytes, unless less is missing.
    pub min_range_bytes: u64,
    /// The most.
    pub max_range_bytes: u64,
    /// How long a range should take.
    pub range_takes: Duration,
    /// How often it is considered whether one more connection would help.
    pub tick: Duration,
}

impl Default for TransferPolicy {
    fn default() -> Self {
        Self {
            bytes_per_second: None,
            // Registries' networks serve one connection at 10 to 100 MB/s; more than eight are
            // taken for abuse by some.
            max_connections: 8,
            // A round trip around the world costs less than a tenth of it at 10 MB/s.
            min_range_bytes: 4 << 20,
            max_range_bytes: 64 << 20,
            range_takes: Duration::from_secs(2),
            tick: Duration::from_millis(500),
        }
    }
}

impl TransferPolicy {
    /// How much to ask for next, after `length` bytes have taken this long.
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
}
