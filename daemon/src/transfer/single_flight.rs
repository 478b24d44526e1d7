//! Single flight: a file is transferred once at a time, however many ask for it.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use blobd_store_format::digest::Digest;

use super::RateLimit;

/// The files that are being transferred.
#[derive(Clone, Debug, Default)]
pub(super) struct SingleFlight(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    running: Mutex<BTreeMap<Digest, Running>>,
    finished: Condvar,
}

#[derive(Debug)]
struct Running {
    /// How many bytes have come so far.
    done: u64,
    /// The limit of the pull that transfers it.
    limit: RateLimit,
    progress: Progress,
    /// It makes no progress and shall be left to somebody who waits.
    should_yield: bool,
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
pub struct TransferGuard {
    single_flight: SingleFlight,
    file: Digest,
}

impl SingleFlight {
    /// Takes the right to transfer a file. While somebody else has it, `report` is told how far that
    /// one is; when it returns false, the wait ends with nothing. Who waits and has a higher limit, or
    /// none, lifts that one's. One that does not get on is told to leave it to those who wait: a registry
    /// that trickles holds up nobody who has a better one.
    pub(super) fn acquire(
        &self,
        file: Digest,
        limit: &RateLimit,
        mut report: impl FnMut(u64) -> bool,
    ) -> Option<TransferGuard> {
        const NOW_AND_THEN: Duration = Duration::from_millis(100);
        let mut running = self.lock();
        while let Some(theirs) = running.get_mut(&file) {
            let done = theirs.done;
            theirs.limit.raise_to(limit.get());
            theirs.should_yield |= theirs.progress.is_stuck(Instant::now());
            drop(running);
            if !report(done) {
                return None;
            }
            let waited = self.0.finished.wait_timeout(self.lock(), NOW_AND_THEN);
            running = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        let (limit, progress) = (limit.clone(), Progress::begun());
        running.insert(file, Running { done: 0, limit, progress, should_yield: false });
        Some(TransferGuard { single_flight: self.clone(), file })
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Digest, Running>> {
        // Every change is complete before anything could panic.
        self.0.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl TransferGuard {
    /// Tells those who wait how far it is: how many bytes have come, and how many were hashed.
    pub(super) fn note(&self, done: u64, hashed: u64) {
        if let Some(running) = self.single_flight.lock().get_mut(&self.file) {
            running.done = done;
            running.progress.note(done.saturating_add(hashed));
        }
    }

    /// Whether to stop, so that somebody who waits can go on with it.
    #[must_use]
    pub fn should_yield(&self) -> bool {
        self.single_flight.lock().get(&self.file).is_some_and(|running| running.should_yield)
    }
}

impl Drop for TransferGuard {
    fn drop(&mut self) {
        self.single_flight.lock().remove(&self.file);
        self.single_flight.0.finished.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transfer_that_does_not_get_on_is_left_to_those_who_wait() {
        let (single_flight, file) = (SingleFlight::default(), Digest::of(b"x"));
        let (first, limit) =
            (single_flight.acquire(file, &RateLimit::default(), |_| false).unwrap(), RateLimit::default());
        let waits_in_vain = || assert!(single_flight.acquire(file, &limit, |_| false).is_none());
        let pass = |seconds| {
            let mut running = single_flight.lock();
            let progress = &mut running.get_mut(&file).unwrap().progress;
            progress.since = progress.since.checked_sub(Duration::from_secs(seconds)).unwrap();
        };
        pass(60);
        waits_in_vain();
        assert!(!first.should_yield(), "a beginning takes its time");
        for (done, hashed) in [(0, 0), (1 << 20, 0), (1 << 20, 1 << 20)] {
            first.note(done, hashed);
            pass(20);
            waits_in_vain();
            assert!(!first.should_yield(), "it gets on");
        }
        first.note((1 << 20) + 100, 1 << 20);
        pass(20);
        assert!(!first.should_yield(), "nobody waits");
        waits_in_vain();
        assert!(first.should_yield(), "a few bytes are not enough");
        drop(first);
        let _second = single_flight.acquire(file, &limit, |_| false).unwrap();
    }

    #[test]
    fn second_one_waits_sees_how_far_the_first_is_and_goes_on_after_it() {
        let (single_flight, file) = (SingleFlight::default(), Digest::of(b"x"));
        let (slow, unlimited) = (RateLimit::new(Some(10)), RateLimit::default());
        let first = single_flight.acquire(file, &slow, |_| false).unwrap();
        first.note(42, 0);
        assert!(
            single_flight
                .acquire(file, &RateLimit::new(Some(20)), |done| {
                    assert_eq!(done, 42);
                    false
                })
                .is_none()
        );
        assert_eq!(slow.get(), Some(20));
        let _other = single_flight.acquire(Digest::of(b"y"), &unlimited, |_| false).unwrap();
        std::thread::scope(|scope| {
            let second = scope.spawn(|| single_flight.acquire(file, &unlimited, |_| true).is_some());
            while slow.get().is_some() {
                std::thread::yield_now();
            }
            drop(first);
            assert!(second.join().unwrap());
        });
    }
}
