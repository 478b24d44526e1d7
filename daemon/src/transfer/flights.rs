//! One transfer for each file, however many ask for it.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

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
    progress: Progress,
    /// Somebody who waits shall have it, because it does not get on.
    is_asked_for: bool,
}

/// How far a transfer was when it last got on, and when that was.
#[derive(Clone, Copy, Debug)]
struct Progress {
    at: u64,
    since: Instant,
    patience: Duration,
}

impl Progress {
    /// How long a transfer may take to begin: to fetch the head and compare samples.
    const TO_BEGIN: Duration = Duration::from_secs(300);
    /// How long it may go on without so much as [`Self::STEP_BYTES`].
    const TO_GO_ON: Duration = Duration::from_secs(30);
    const STEP_BYTES: u64 = 64 << 10;

    fn begun() -> Self {
        Self { at: 0, since: Instant::now(), patience: Self::TO_BEGIN }
    }

    fn note(&mut self, at: u64) {
        if self.patience == Self::TO_BEGIN || at >= self.at.saturating_add(Self::STEP_BYTES) || at < self.at {
            *self = Self { at, since: Instant::now(), patience: Self::TO_GO_ON };
        }
    }

    fn is_stuck(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.since) > self.patience
    }
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
    /// none, lifts that one's. One that does not get on is told to leave it to those who wait: a registry
    /// that trickles holds up nobody who has a better one.
    pub(super) fn board(
        &self,
        file: Digest,
        limit: &RateLimit,
        mut look: impl FnMut(u64) -> bool,
    ) -> Option<Flight> {
        const NOW_AND_THEN: Duration = Duration::from_millis(100);
        let mut running = self.lock();
        while let Some(theirs) = running.get_mut(&file) {
            let done = theirs.done;
            theirs.limit.raise_to(limit.get());
            theirs.is_asked_for |= theirs.progress.is_stuck(Instant::now());
            drop(running);
            if !look(done) {
                return None;
            }
            let waited = self.0.landed.wait_timeout(self.lock(), NOW_AND_THEN);
            running = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        let (limit, progress) = (limit.clone(), Progress::begun());
        running.insert(file, Running { done: 0, limit, progress, is_asked_for: false });
        Some(Flight { flights: self.clone(), file })
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Digest, Running>> {
        // Every change is complete before anything could panic.
        self.0.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Flight {
    /// Tells those who wait how far it is: how many bytes have come, and how many were hashed.
    pub(super) fn note(&self, done: u64, hashed: u64) {
        if let Some(running) = self.flights.lock().get_mut(&self.file) {
            running.done = done;
            running.progress.note(done.saturating_add(hashed));
        }
    }

    /// Whether somebody who waits shall go on with it.
    #[must_use]
    pub fn is_asked_for(&self) -> bool {
        self.flights.lock().get(&self.file).is_some_and(|running| running.is_asked_for)
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
    fn transfer_that_does_not_get_on_is_left_to_those_who_wait() {
        let (flights, file) = (Flights::default(), Digest::of(b"x"));
        let (first, limit) =
            (flights.board(file, &RateLimit::default(), |_| false).unwrap(), RateLimit::default());
        let waits_in_vain = || assert!(flights.board(file, &limit, |_| false).is_none());
        let pass = |seconds| {
            let mut running = flights.lock();
            let progress = &mut running.get_mut(&file).unwrap().progress;
            progress.since = progress.since.checked_sub(Duration::from_secs(seconds)).unwrap();
        };
        pass(60);
        waits_in_vain();
        assert!(!first.is_asked_for(), "a beginning takes its time");
        for (done, hashed) in [(0, 0), (1 << 20, 0), (1 << 20, 1 << 20)] {
            first.note(done, hashed);
            pass(20);
            waits_in_vain();
            assert!(!first.is_asked_for(), "it gets on");
        }
        first.note((1 << 20) + 100, 1 << 20);
        pass(20);
        assert!(!first.is_asked_for(), "nobody waits");
        waits_in_vain();
        assert!(first.is_asked_for(), "a few bytes are not enough");
        drop(first);
        let _second = flights.board(file, &limit, |_| false).unwrap();
    }

    #[test]
    fn second_one_waits_sees_how_far_the_first_is_and_goes_on_after_it() {
        let (flights, file) = (Flights::default(), Digest::of(b"x"));
        let (slow, unlimited) = (RateLimit::new(Some(10)), RateLimit::default());
        let first = flights.board(file, &slow, |_| false).unwrap();
        first.note(42, 0);
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
