//! Single flight: concurrent requests for one file share one transfer.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, Weak};
use std::time::{Duration, Instant};

use blobd_store_format::digest::Digest;
use tracing_mutex::stdsync::{Condvar, Mutex, MutexGuard};

use super::RateLimit;
use super::shared_assembler::SharedAssembler;

#[derive(Clone, Debug, Default)]
pub(super) struct SingleFlight(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    running: Mutex<BTreeMap<Digest, Running>>,
    finished: Condvar,
}

#[derive(Debug)]
struct Running {
    done: u64,
    limit: RateLimit,
    progress: Progress,
    /// Whether a waiting pull should take over, because this one makes no progress.
    should_yield: bool,
    /// What has arrived, for readers.
    assembler: Weak<SharedAssembler>,
}

#[derive(Clone, Copy, Debug)]
struct Progress {
    at: u64,
    since: Instant,
    time_limit: Duration,
}

impl Progress {
    /// How long a transfer may take to start: to fetch the head and compare samples.
    const START_TIMEOUT: Duration = Duration::from_secs(300);
    /// How long it may then take for each [`Self::STEP_BYTES`].
    const PROGRESS_TIMEOUT: Duration = Duration::from_secs(30);
    const STEP_BYTES: u64 = 64 << 10;

    fn started() -> Self {
        Self { at: 0, since: Instant::now(), time_limit: Self::START_TIMEOUT }
    }

    fn note(&mut self, at: u64) {
        if self.time_limit == Self::START_TIMEOUT
            || at >= self.at.saturating_add(Self::STEP_BYTES)
            || at < self.at
        {
            *self = Self { at, since: Instant::now(), time_limit: Self::PROGRESS_TIMEOUT };
        }
    }

    fn is_stuck(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.since) > self.time_limit
    }
}

/// The right to transfer a file, returned on drop.
#[derive(Debug)]
#[must_use]
pub(crate) struct TransferGuard {
    single_flight: SingleFlight,
    file: Digest,
}

impl SingleFlight {
    /// Waits for the right to transfer a file. Meanwhile `report` is called with the bytes that the other transfer has
    /// received; when it returns false, the wait ends without the right. A waiting pull with a higher rate limit, or
    /// none, raises that of the running transfer. A transfer without progress is asked to yield, so that a slow registry
    /// does not block pulls that have a better one.
    pub(super) fn acquire(
        &self,
        file: Digest,
        limit: &RateLimit,
        mut report: impl FnMut(u64) -> bool,
    ) -> Option<TransferGuard> {
        const POLL_INTERVAL: Duration = Duration::from_millis(100);
        let mut running = self.lock();
        while let Some(active) = running.get_mut(&file) {
            let done = active.done;
            active.limit.raise_to(limit.get());
            active.should_yield |= active.progress.is_stuck(Instant::now());
            drop(running);
            if !report(done) {
                return None;
            }
            let waited = self.0.finished.wait_timeout(self.lock(), POLL_INTERVAL);
            running = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        Some(self.begin(&mut running, file, limit.clone()))
    }

    /// The right to transfer a file; `None` if another transfer has it, which is not affected.
    pub(super) fn try_acquire(&self, file: Digest) -> Option<TransferGuard> {
        let mut running = self.lock();
        (!running.contains_key(&file)).then(|| self.begin(&mut running, file, RateLimit::default()))
    }

    fn begin(&self, all: &mut BTreeMap<Digest, Running>, file: Digest, limit: RateLimit) -> TransferGuard {
        let (progress, assembler) = (Progress::started(), Weak::new());
        all.insert(file, Running { done: 0, limit, progress, should_yield: false, assembler });
        TransferGuard { single_flight: self.clone(), file }
    }

    pub(super) fn is_running(&self, file: Digest) -> bool {
        self.lock().contains_key(&file)
    }

    /// What has arrived of a file that is being transferred.
    pub(super) fn assembler(&self, file: Digest) -> Option<Arc<SharedAssembler>> {
        self.lock().get(&file)?.assembler.upgrade()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Digest, Running>> {
        // Each change is complete before anything can panic.
        self.0.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl TransferGuard {
    /// Reports progress to waiting pulls: the bytes that have arrived and that were hashed.
    pub(super) fn note(&self, done: u64, hashed: u64) {
        if let Some(running) = self.single_flight.lock().get_mut(&self.file) {
            running.done = done;
            running.progress.note(done.saturating_add(hashed));
        }
    }

    /// Shows to readers what arrives.
    pub(super) fn show(&self, assembler: &Arc<SharedAssembler>) {
        if let Some(running) = self.single_flight.lock().get_mut(&self.file) {
            running.assembler = Arc::downgrade(assembler);
        }
    }

    /// Whether to stop, so that a waiting pull can continue the transfer.
    pub(crate) fn should_yield(&self) -> bool {
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
    fn transfer_without_progress_yields_to_a_waiting_one() {
        let (single_flight, file) = (SingleFlight::default(), Digest::of(b"x"));
        let (first, limit) =
            (single_flight.acquire(file, &RateLimit::default(), |_| false).unwrap(), RateLimit::default());
        let cannot_acquire = || assert!(single_flight.acquire(file, &limit, |_| false).is_none());
        let pass = |seconds| {
            let mut running = single_flight.lock();
            let progress = &mut running.get_mut(&file).unwrap().progress;
            progress.since = progress.since.checked_sub(Duration::from_secs(seconds)).unwrap();
        };
        pass(60);
        cannot_acquire();
        assert!(!first.should_yield(), "the start has a longer time limit");
        for (done, hashed) in [(0, 0), (1 << 20, 0), (1 << 20, 1 << 20)] {
            first.note(done, hashed);
            pass(20);
            cannot_acquire();
            assert!(!first.should_yield(), "it makes progress");
        }
        first.note((1 << 20) + 100, 1 << 20);
        pass(20);
        assert!(!first.should_yield(), "no other waits");
        cannot_acquire();
        assert!(first.should_yield(), "a few bytes are not enough");
        drop(first);
        let _second = single_flight.acquire(file, &limit, |_| false).unwrap();
    }

    #[test]
    fn second_pull_waits_sees_the_progress_of_the_first_and_continues_after_it() {
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
