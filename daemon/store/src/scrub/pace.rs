//! How fast the scrubber may read: a rate, and the loads in front of which it steps back.

use std::time::Duration;

/// Keeps readings to so many bytes per second, over any stretch longer than [`Self::BURST`]. It
/// knows no clock: times are passed in, counted from any fixed moment.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    bytes_per_second: u64,
    /// Up to when what has been read has used up the rate.
    spent_until: Duration,
}

impl Pace {
    /// What may be made up for after a time without reading.
    pub const BURST: Duration = Duration::from_millis(100);

    /// A pace; 0 bytes per second count as 1.
    #[must_use]
    pub fn new(bytes_per_second: u64) -> Self {
        Self { bytes_per_second: bytes_per_second.max(1), spent_until: Duration::ZERO }
    }

    /// Enters `bytes` that are read now, and says how long to wait before the next.
    pub fn take(&mut self, bytes: u64, now: Duration) -> Duration {
        let start = self.spent_until.max(now.saturating_sub(Self::BURST));
        let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(self.bytes_per_second);
        let cost = Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
        self.spent_until = start.saturating_add(cost);
        self.spent_until.saturating_sub(now)
    }
}

/// In how many percent of the last ten seconds some task waited for a disk, by the kernel's own
/// account; 0 where it keeps none.
#[must_use]
#[expect(clippy::disallowed_methods, reason = "a file of the kernel")]
pub fn io_pressure() -> f64 {
    std::fs::read_to_string("/proc/pressure/io").map_or(0.0, |text| parse_pressure(&text))
}

fn parse_pressure(text: &str) -> f64 {
    let some = text.lines().find_map(|line| line.strip_prefix("some "));
    let average = some.and_then(|line| line.split(' ').find_map(|field| field.strip_prefix("avg10=")));
    average.and_then(|number| number.parse().ok()).unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readings_keep_to_the_rate_whatever_their_size() {
        for chunk in [1000, 4096, 1 << 20] {
            let (mut pace, mut now, mut bytes) = (Pace::new(10 << 20), Duration::from_secs(7), 0u64);
            while bytes < 100 << 20 {
                now += pace.take(chunk, now);
                bytes += chunk;
            }
            let seconds = (now - Duration::from_secs(7)).as_secs_f64();
            assert!((9.8..10.2).contains(&seconds), "100 MiB at 10 MiB/s took {seconds} s");
        }
    }

    #[test]
    fn pause_is_not_made_up_for() {
        let mut pace = Pace::new(1000);
        pace.take(1000, Duration::ZERO);
        let after_an_hour = Duration::from_secs(3600);
        assert_eq!(pace.take(1000, after_an_hour), Duration::from_secs(1) - Pace::BURST);
        assert_eq!(pace.take(1000, after_an_hour), Duration::from_secs(2) - Pace::BURST);
    }

    #[test]
    fn extreme_rates_do_not_overflow() {
        assert!(Pace::new(0).take(u64::MAX, Duration::ZERO) > Duration::from_secs(1 << 30));
        assert_eq!(Pace::new(u64::MAX).take(1 << 20, Duration::ZERO), Duration::ZERO);
    }

    #[test]
    fn pressure_is_the_first_average_of_some() {
        let text = "some avg10=12.50 avg60=0.04 avg300=0.94 total=176188128\nfull avg10=1.00 avg60=0.03\n";
        assert!((parse_pressure(text) - 12.5).abs() < f64::EPSILON);
        for text in ["", "full avg10=3.00", "some avg10=x", "some"] {
            assert!(parse_pressure(text).abs() < f64::EPSILON, "{text}");
        }
    }
}
