//! The metrics of one daemon, in Prometheus's text format. `docs/METRICS.md` describes each.
//!
//! [`Events`] is fed where events happen. [`Readings`], [`Condition`] and [`Sizes`] are set when the metrics are read. This module
//! knows no other part of the daemon, so that all parts can use it.

use std::sync::PoisonError;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use prometheus::{Error, TextEncoder};
use tracing_mutex::stdsync::{Mutex, MutexGuard};

mod condition;
mod events;
mod process;
mod readings;
mod register;
mod sizes;

pub(crate) use condition::ConditionReading;
pub(crate) use events::{Events, RequestEnd};
pub(crate) use readings::{AuditReading, Permits, Reading};
pub(crate) use sizes::{GroupReading, SizeReading};

use condition::Condition;
use readings::Readings;
use register::Register;
use sizes::Sizes;

/// All metrics of a daemon.
pub(crate) struct Metrics {
    pub(crate) events: Events,
    /// Locked while it is set and written, so that two responses are not mixed.
    current: Mutex<Current>,
    sizes: Mutex<SizeState>,
    /// Whether the condition of the store is being read.
    is_reading: AtomicBool,
}

struct Current {
    main: Register,
    readings: Readings,
    condition: Condition,
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
const SHARE_OF_TIME: u32 = 20;
/// The shortest time between two countings.
const SHORTEST_INTERVAL: Duration = Duration::from_secs(1);

impl Metrics {
    /// `verbs` are those that requests may have.
    ///
    /// # Errors
    /// Never with the names in this module: a test makes them all.
    pub(crate) fn new(verbs: impl IntoIterator<Item = &'static str>) -> Result<Self, Error> {
        let (mut main, mut sizes) = (Register::default(), Register::default());
        let events = Events::new(&mut main, verbs)?;
        let readings = Readings::new(&mut main)?;
        let condition = Condition::new(&mut main)?;
        let size_gauges = Sizes::new(&mut sizes)?;
        let current = Mutex::new(Current { main, readings, condition, sizes, size_gauges });
        Ok(Self { events, current, sizes: Mutex::default(), is_reading: AtomicBool::new(false) })
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

    /// Sets the condition of the store to what `read` returns, unless it is being read already: a disk that does not
    /// respond blocks one thread and not one for each request.
    pub(crate) fn update_condition(&self, read: impl FnOnce() -> ConditionReading) {
        if !self.is_reading.swap(true, Ordering::Acquire) {
            let _turn = Turn(&self.is_reading);
            let reading = read();
            self.current().condition.set(&reading);
        }
    }

    /// Begins to determine the sizes, if it is time to and nobody does.
    pub(crate) fn begin_sizes(&self, now: Instant) -> Option<SizeCount<'_>> {
        let mut state = self.size_state();
        let is_due = state.last.is_none_or(|(at, cost)| {
            let interval = cost.saturating_mul(SHARE_OF_TIME).max(SHORTEST_INTERVAL);
            now.saturating_duration_since(at) >= interval
        });
        let begins = is_due && !state.is_running;
        state.is_running |= begins;
        // Not `then_some`: a count that does not begin must not be dropped either.
        begins.then(|| SizeCount { metrics: self, begun: now })
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

/// A reading in progress.
struct Turn<'m>(&'m AtomicBool);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

/// A count of the sizes in progress. When it is dropped, after a panic too, the next one may begin.
pub(crate) struct SizeCount<'m> {
    metrics: &'m Metrics,
    begun: Instant,
}

impl SizeCount<'_> {
    /// Sets the sizes that were determined.
    pub(crate) fn set(&self, sizes: &SizeReading) {
        self.metrics.current().size_gauges.set(sizes);
        self.metrics.size_state().is_known = true;
    }
}

impl Drop for SizeCount<'_> {
    fn drop(&mut self) {
        let mut state = self.metrics.size_state();
        state.is_running = false;
        state.last = Some((Instant::now(), self.begun.elapsed()));
    }
}

#[cfg(test)]
mod tests;
