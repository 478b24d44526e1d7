//! One transfer for each file, however many ask for it.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use blobd_store_format::digest::Digest;

/// The files that are being transferred.
#[derive(Clone, Debug, Default)]
pub(super) struct Flights(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    /// How many bytes of each have come so far.
    running: Mutex<BTreeMap<Digest, u64>>,
    landed: Condvar,
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
    /// one is; when it returns false, the wait ends with nothing.
    pub(super) fn board(&self, file: Digest, mut look: impl FnMut(u64) -> bool) -> Option<Flight> {
        const NOW_AND_THEN: Duration = Duration::from_millis(100);
        let mut running = self.lock();
        while let Some(done) = running.get(&file).copied() {
            drop(running);
            if !look(done) {
                return None;
            }
            let waited = self.0.landed.wait_timeout(self.lock(), NOW_AND_THEN);
            running = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        running.insert(file, 0);
        Some(Flight { flights: self.clone(), file })
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Digest, u64>> {
        // Every change is complete before anything could panic.
        self.0.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Flight {
    /// Tells those who wait how far it is.
    pub(super) fn note(&self, done: u64) {
        self.flights.lock().insert(self.file, done);
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
        let first = flights.board(file, |_| false).unwrap();
        first.note(42);
        assert!(
            flights
                .board(file, |done| {
                    assert_eq!(done, 42);
                    false
                })
                .is_none()
        );
        let _other = flights.board(Digest::of(b"y"), |_| false).unwrap();
        std::thread::scope(|scope| {
            let second = scope.spawn(|| flights.board(file, |_| true).is_some());
            drop(first);
            assert!(second.join().unwrap());
        });
    }
}
