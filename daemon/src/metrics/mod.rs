//! The metrics of one daemon, in Prometheus's text format. `docs/METRICS.md` describes each.
//!
//! [`Events`] is fed where events happen. [`Readings`] and [`Sizes`] are set when the metrics are read. This module
//! knows no other part of the daemon, so that all parts can use it.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use prometheus::{Error, TextEncoder};

mod events;
mod process;
mod readings;
mod register;
mod sizes;

pub(crate) use events::{Events, RequestEnd};
pub(crate) use readings::{Permits, Reading};
pub(crate) use sizes::SizeReading;

use readings::Readings;
use register::Register;
use sizes::Sizes;

/// All metrics of a daemon.
pub(crate) struct Metrics {
    pub(crate) events: Events,
    /// Locked while it is set and written, so that two responses are not mixed.
    current: Mutex<Current>,
    sizes: Mutex<SizeState>,
}

struct Current {
    main: Register,
    readings: Readings,
    sizes: Register,
    size_gauges: Sizes,
}

/// When the sizes were determined.
#[derive(Debug, Default)]
struct SizeState {
    /// The end of the last attempt, and how long it took.
    last: Option<(Instant, Duration)>,
    is_running: bool,
    /// Whether there are sizes: before that, none are reported.
    is_known: bool,
}

/// The sizes are counted over the whole index, so at most this part of the time is spent on that.
const SHARE_OF_TIME: u32 = 100;
/// The shortest time between two countings.
const SHORTEST_INTERVAL: Duration = Duration::from_secs(1);

impl Metrics {
    /// # Errors
    /// Never with the names in this module: a test makes them all.
    pub(crate) fn new() -> Result<Self, Error> {
        let (mut main, mut sizes) = (Register::default(), Register::default());
        let events = Events::new(&mut main)?;
        let readings = Readings::new(&mut main)?;
        let size_gauges = Sizes::new(&mut sizes)?;
        let current = Mutex::new(Current { main, readings, sizes, size_gauges });
        Ok(Self { events, current, sizes: Mutex::default() })
    }

    /// The text of all metrics. Reads some files of `/proc`, so it blocks briefly.
    pub(crate) fn text(&self, reading: &Reading) -> Result<String, Error> {
        let has_sizes = self.size_state().is_known;
        let current = self.current();
        current.readings.set(reading);
        let mut text = TextEncoder::new().encode_to_string(&current.main.gather())?;
        if has_sizes {
            TextEncoder::new().encode_utf8(&current.sizes.gather(), &mut text)?;
        }
        Ok(text)
    }

    /// Whether the sizes have to be determined again. If so, [`Self::set_sizes`] has to be called with them.
    pub(crate) fn begin_sizes(&self, now: Instant) -> bool {
        let mut state = self.size_state();
        let is_due = state.last.is_none_or(|(at, cost)| {
            let interval = cost.saturating_mul(SHARE_OF_TIME).max(SHORTEST_INTERVAL);
            now.saturating_duration_since(at) >= interval
        });
        let begins = is_due && !state.is_running;
        state.is_running |= begins;
        begins
    }

    /// Sets the sizes that were determined since `begun`; `None` if that was not possible.
    pub(crate) fn set_sizes(&self, begun: Instant, sizes: Option<&SizeReading>) {
        if let Some(sizes) = sizes {
            self.current().size_gauges.set(sizes);
        }
        let mut state = self.size_state();
        state.is_running = false;
        state.is_known |= sizes.is_some();
        state.last = Some((Instant::now(), begun.elapsed()));
    }

    fn current(&self) -> MutexGuard<'_, Current> {
        // A panic leaves at worst some values of an earlier reading.
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn size_state(&self) -> MutexGuard<'_, SizeState> {
        // Each change is complete before anything can panic.
        self.sizes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests;
