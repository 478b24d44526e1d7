//! One transfer for each file, however many ask for it.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use blobd_store_format::digest::Digest;

use super::RateLimit;

/// The files that are being transferred.
#[derive(Clone, Debug, Default)]
pub(super) struct Flights(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    running: Mutex<BTreeMap<Digest, Running>>,
    landed: Condvar,
}

#[derive(Debug)]
struct Running {
    /// How many bytes have come so far.
    done: u64,
    /// The limit of the pull that transfers it.
    limit: RateLimit,
}

/// The right to transfer a file, until it is dropped.
#[derive(Debug)]
#[must_use]
pub struct Flight {
    flights: Flights,
    file: Digest,
}

impl Flights {
    /// Takes the right to transfer a file. While somebody else has it, `look` is told how far that
    /// one is; when it returns false, the wait ends with nothing. Who waits and has a higher limit, or
    /// none, lifts that one's.
    pub(super) fn board(
        &self,
        file: Digest,
        limit: &RateLimit,
        mut look: impl FnMut(u64) -> bool,
    ) -> Option<Flight> {
        const NOW_AND_THEN: Duration = Duration::from_millis(100);
        let mut running = self.lock();
        while let Some(Running { done, limit: theirs }) = running.get(&file) {
            let done = *done;
            theirs.raise_to(limit.get());
            drop(running);
            if !look(done) {
                return None;
            }
            let waited = self.0.landed.wait_timeout(self.lock(), NOW_AND_THEN);
            running = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        running.insert(file, Running { done: 0, limit: limit.clone() });
        Some(Flight { flights: self.clone(), file })
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Digest, Running>> {
        // Every change is complete before anything could panic.
        self.0.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Flight {
    /// Tells those who wait how far it is.
    pub(super) fn note(&self, done: u64) {
        if let Some(running) = self.flights.lock().get_mut(&self.file) {
            running.done = done;
        }
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        self.flights.lock().remove(&self.file);
        self.flights.0.landed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn second_one_waits_sees_how_far_the_first_is_and_goes_on_after_it() {
        let (flights, file) = (Flights::default(), Digest::of(b"x"));
        let (slow, unlimited) = (RateLimit::new(Some(10)), RateLimit::default());
        let first = flights.board(file, &slow, |_| false).unwrap();
        first.note(42);
        assert!(
            flights
                .board(file, &RateLimit::new(Some(20)), |done| {
                    assert_eq!(done, 42);
                    false
                })
                .is_none()
        );
        assert_eq!(slow.get(), Some(20));
        let _other = flights.board(Digest::of(b"y"), &unlimited, |_| false).unwrap();
        std::thread::scope(|scope| {
            let second = scope.spawn(|| flights.board(file, &unlimited, |_| true).is_some());
            while slow.get().is_some() {
                std::thread::yield_now();
            }
            drop(first);
            assert!(second.join().unwrap());
        });
    }
}
