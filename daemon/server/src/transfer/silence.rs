//! How long a transfer has been waiting for its host without receiving a byte, for the user.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use tokio::time::Instant;
use tracing_mutex::stdsync::{Mutex, MutexGuard};

/// Measures how long nothing has arrived over any connection. Waits for a rate limit or the disk do not count.
#[derive(Clone, Debug, Default)]
pub(crate) struct Silence(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    waiting: usize,
    /// When the first of them began to wait, or the last byte arrived.
    since: Option<Instant>,
    /// How long earlier waits lasted without a byte.
    before: Duration,
}

/// A wait for bytes, until it is dropped.
#[derive(Debug)]
#[must_use]
pub(super) struct Waiting<'s>(&'s Silence);

impl Silence {
    /// Waits for something from the host. What it returns ends the silence.
    pub(super) async fn until<T>(&self, response: impl Future<Output = T>) -> T {
        let _waiting = self.wait();
        let response = response.await;
        self.interrupt();
        response
    }

    pub(super) fn wait(&self) -> Waiting<'_> {
        self.lock().begin(Instant::now());
        Waiting(self)
    }

    pub(super) fn interrupt(&self) {
        self.lock().interrupt(Instant::now());
    }

    pub(crate) fn lasts(&self) -> Duration {
        self.lock().lasts(Instant::now())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Each change is complete before anything can panic.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn begin(&mut self, now: Instant) {
        self.waiting = self.waiting.saturating_add(1);
        self.since.get_or_insert(now);
    }

    fn end(&mut self, now: Instant) {
        self.waiting = self.waiting.saturating_sub(1);
        if self.waiting == 0 {
            self.before = self.lasts(now);
            self.since = None;
        }
    }

    fn interrupt(&mut self, now: Instant) {
        self.before = Duration::ZERO;
        self.since = self.since.map(|_| now);
    }

    fn lasts(&self, now: Instant) -> Duration {
        let wait = self.since.map(|since| now.saturating_duration_since(since));
        wait.map_or(Duration::ZERO, |wait| self.before.saturating_add(wait))
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.lock().end(Instant::now());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silence_lasts_from_the_first_wait_or_the_last_byte() {
        let (mut state, start) = (State::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(state.lasts(at(1)), Duration::ZERO, "nobody waits");
        state.begin(at(1));
        state.begin(at(2));
        assert_eq!(state.lasts(at(3)), Duration::from_secs(2));
        state.interrupt(at(3));
        state.end(at(3));
        assert_eq!(state.lasts(at(4)), Duration::from_secs(1));
        state.end(at(5));
        assert_eq!(state.lasts(at(6)), Duration::ZERO, "nobody waits");
        state.begin(at(7));
        assert_eq!(state.lasts(at(8)), Duration::from_secs(3), "no byte arrived in between");
        state.interrupt(at(8));
        assert_eq!(state.lasts(at(9)), Duration::from_secs(1));
    }
}
