//! The metrics of one daemon, in Prometheus's text format. `docs/METRICS.md` describes each.
//!
//! [`Events`] is fed where events happen. [`Readings`] are set when the metrics are read. This module knows no other part
//! of the daemon, so that all parts can use it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use prometheus::{Error, TextEncoder};
use tracing_mutex::stdsync::Mutex;

mod events;
mod readings;
mod register;

pub(crate) use events::{Events, RequestEnd};
pub(crate) use readings::{ConditionReading, GroupReading, Permits, Reading, SizeReading};

use readings::Readings;
use register::{Register, Table};

use crate::locks::lock;

pub(crate) struct Metrics {
    pub(crate) events: Events,
    /// Locked while it is set and written, so that two responses are not mixed. A panic leaves at worst some earlier values.
    current: Mutex<Current>,
    sizes: Mutex<SizeState>,
    /// Whether the condition of the store is being read.
    is_reading: AtomicBool,
}

struct Current {
    main: Register,
    readings: Readings,
    condition: Table<ConditionReading>,
    sizes: Register,
    size_gauges: Table<SizeReading>,
}

#[derive(Debug, Default)]
struct SizeState {
    /// The end of the last count, and how long it took.
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
    pub(crate) fn new(verbs: impl IntoIterator<Item = &'static str>) -> Result<Self, Error> {
        let (mut main, mut sizes) = (Register::default(), Register::default());
        let events = Events::new(&mut main, verbs)?;
        let readings = Readings::new(&mut main)?;
        let condition = readings::condition(&mut main)?;
        let size_gauges = readings::sizes(&mut sizes)?;
        let current = Mutex::new(Current { main, readings, condition, sizes, size_gauges });
        Ok(Self { events, current, sizes: Mutex::default(), is_reading: AtomicBool::new(false) })
    }

    /// The text of all metrics. Reads some files of `/proc`, so it blocks briefly.
    pub(crate) fn text(&self, reading: &Reading) -> Result<String, Error> {
        let has_sizes = lock(&self.sizes).is_known;
        let current = lock(&self.current);
        current.readings.set(reading);
        let mut text = TextEncoder::new().encode_to_string(&current.main.gather())?;
        if has_sizes {
            TextEncoder::new().encode_utf8(&current.sizes.gather(), &mut text)?;
        }
        Ok(text)
    }

    /// Sets the condition of the store, unless a reading is in progress: a disk that does not respond blocks one
    /// thread, not one for each request.
    pub(crate) fn update_condition(&self, read: impl FnOnce() -> ConditionReading) {
        if !self.is_reading.swap(true, Ordering::Acquire) {
            let _guard = ReadingGuard(&self.is_reading);
            let reading = read();
            lock(&self.current).condition.set(&reading);
        }
    }

    /// Begins to count the sizes if it is time and no count is in progress.
    pub(crate) fn begin_sizes(&self, now: Instant) -> Option<SizeCount<'_>> {
        let mut state = lock(&self.sizes);
        let is_due = state.last.is_none_or(|(at, cost)| {
            let interval = cost.saturating_mul(SHARE_OF_TIME).max(SHORTEST_INTERVAL);
            now.saturating_duration_since(at) >= interval
        });
        let begins = is_due && !state.is_running;
        state.is_running |= begins;
        // Not `then_some`: a count that does not begin must not be dropped either.
        begins.then(|| SizeCount { metrics: self, begun: now })
    }
}

struct ReadingGuard<'m>(&'m AtomicBool);

impl Drop for ReadingGuard<'_> {
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
    pub(crate) fn set(&self, sizes: &SizeReading) {
        lock(&self.metrics.current).size_gauges.set(sizes);
        lock(&self.metrics.sizes).is_known = true;
    }
}

impl Drop for SizeCount<'_> {
    fn drop(&mut self) {
        let mut state = lock(&self.metrics.sizes);
        state.is_running = false;
        state.last = Some((Instant::now(), self.begun.elapsed()));
    }
}

#[cfg(test)]
mod tests;
