//! Decides when the scrubber may read its next chunk.

use std::fmt;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use tracing_mutex::stdsync::{Condvar, Mutex};

use super::{ScrubPolicy, Step};
use crate::RateLimiter;

/// Asks a thread to stop, also while it sleeps.
#[derive(Debug, Default)]
pub struct StopSignal {
    is_set: Mutex<bool>,
    changed: Condvar,
}

impl StopSignal {
    /// Sets the signal.
    pub fn set(&self) {
        *self.is_set.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_all();
    }

    /// Sleeps for `time` or until the signal is set; returns whether it is set.
    #[must_use]
    pub fn wait(&self, time: Duration) -> bool {
        let is_set = self.is_set.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.changed.wait_timeout_while(is_set, time, |is_set| !*is_set);
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

/// Combines the rate limit, the load and the stop signal into one decision per chunk.
pub struct Throttle {
    stop: Arc<StopSignal>,
    limiter: RateLimiter,
    started: Instant,
    /// When the next chunk may be read, counted from `started`.
    ready_at: Duration,
    is_busy: Box<dyn Fn() -> bool + Send>,
    max_pressure_percent: u8,
    read_pressure: fn() -> f64,
    /// When the pressure was last read, and whether it was too high.
    pressure: Option<(Instant, bool)>,
}

impl Throttle {
    /// The shortest pause, and the longest time for which a pressure value is used.
    const PAUSE: Duration = Duration::from_secs(1);

    /// A throttle that has allowed no chunk yet.
    pub fn new(stop: Arc<StopSignal>, policy: ScrubPolicy, is_busy: Box<dyn Fn() -> bool + Send>) -> Self {
        Self {
            stop,
            limiter: RateLimiter::new(Some(policy.bytes_per_second)),
            started: Instant::now(),
            ready_at: Duration::ZERO,
            is_busy,
            max_pressure_percent: policy.max_pressure_percent,
            read_pressure: io_pressure,
            pressure: None,
        }
    }

    /// The stop signal.
    pub fn stop(&self) -> &StopSignal {
        &self.stop
    }

    /// Whether `bytes` may be read now. Sleeps for at most a second before [`Step::Wait`].
    pub fn step(&mut self, bytes: u64) -> Step {
        let now = self.started.elapsed();
        let wait = if (self.is_busy)() || self.is_under_pressure() {
            Self::PAUSE
        } else {
            self.ready_at.saturating_sub(now).min(Self::PAUSE)
        };
        match self.stop.wait(wait) {
            true => Step::Stop,
            false if wait.is_zero() => {
                self.ready_at = now.saturating_add(self.limiter.take(bytes, now));
                Step::Go
            }
            false => Step::Wait,
        }
    }

    fn is_under_pressure(&mut self) -> bool {
        match self.pressure {
            Some((read_at, high)) if read_at.elapsed() < Self::PAUSE => high,
            _ => {
                let high = (self.read_pressure)() > f64::from(self.max_pressure_percent);
                self.pressure = Some((Instant::now(), high));
                high
            }
        }
    }
}

impl fmt::Debug for Throttle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Throttle").field("limiter", &self.limiter).finish_non_exhaustive()
    }
}

/// For what percentage of the last ten seconds some task waited for a disk; 0 if the kernel does not say.
#[expect(clippy::disallowed_methods, reason = "a file of the kernel")]
fn io_pressure() -> f64 {
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
    fn pressure_is_the_first_average_of_some() {
        let text = "some avg10=12.50 avg60=0.04 avg300=0.94 total=176188128\nfull avg10=1.00 avg60=0.03\n";
        assert!((parse_pressure(text) - 12.5).abs() < f64::EPSILON);
        for text in ["", "full avg10=3.00", "some avg10=x", "some"] {
            assert!(parse_pressure(text).abs() < f64::EPSILON, "{text}");
        }
    }

    #[test]
    fn pressure_above_the_limit_pauses_for_as_long_as_its_value_is_used() {
        for (read_pressure, is_high) in
            [(|| 49.9) as fn() -> f64, || 50.0, || 50.1].into_iter().zip([false, false, true])
        {
            let policy = ScrubPolicy {
                bytes_per_second: u64::MAX,
                period: Duration::from_secs(1),
                max_pressure_percent: 50,
            };
            let throttle = Throttle::new(Arc::default(), policy, Box::new(|| false));
            let mut throttle = Throttle { read_pressure, ..throttle };
            assert_eq!(throttle.is_under_pressure(), is_high);
            throttle.read_pressure = || panic!("it was just read");
            assert_eq!(throttle.is_under_pressure(), is_high);
            throttle.read_pressure = || 100.0;
            throttle.pressure = Instant::now().checked_sub(Throttle::PAUSE).map(|before| (before, false));
            assert!(throttle.is_under_pressure());
            throttle.stop.set();
            assert_eq!(throttle.step(1), Step::Stop);
        }
        assert!((0.0..=100.0).contains(&io_pressure()));
    }
}
