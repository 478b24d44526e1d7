//! Reads many blobs in parallel, at the speed of the disk.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use blobd_client::protocol::event::{Phase, Progress as _};
use blobd_client::protocol::upkeep::{Unavailable, VerifyProgress};
use blobd_store::scrub::{Step, Verdict, check_in_pairs};
use blobd_store::{Store, StoreError};
use blobd_store_format::digest::Digest;
use tokio::sync::mpsc::Sender;
use tracing_mutex::stdsync::Mutex;

use crate::ops::{OpError, send_progress};

/// With two readers, one hashes while the other reads. Four saturate the fastest disks.
const READERS: RangeInclusive<usize> = 2..=4;
const BETWEEN_EVENTS: Duration = Duration::from_millis(100);

/// A list of blobs to read, shared by the readers.
pub(super) struct Reading<'r> {
    store: &'r Store,
    events: &'r Sender<VerifyProgress>,
    sizes: BTreeMap<Digest, u64>,
    /// The largest first, so that no reader has one left to read when the others have finished.
    blobs: Vec<Digest>,
    next: AtomicUsize,
    total: u64,
    completed: AtomicU64,
    /// Set when one reader has failed, which stops the others.
    failed: AtomicBool,
    last_event: Mutex<Option<Instant>>,
}

/// The result. Good blobs, of which there may be millions, are only counted.
#[derive(Debug, Default)]
pub(super) struct Read {
    pub(super) blobs: u64,
    pub(super) bytes: u64,
    pub(super) not_good: Vec<(Digest, Verdict)>,
    /// Blobs in lower stores that cannot be used now.
    pub(super) unavailable: Option<Unavailable>,
}

impl Read {
    fn add(&mut self, digest: Digest, bytes: u64, verdict: Verdict) {
        if let Verdict::Hidden { problem } = verdict {
            self.add_unavailable(1, &problem);
            return;
        }
        if verdict != Verdict::Gone {
            self.blobs += 1;
            self.bytes = self.bytes.saturating_add(bytes);
        }
        if verdict != Verdict::Good {
            self.not_good.push((digest, verdict));
        }
    }

    fn join(&mut self, mut other: Self) {
        self.blobs += other.blobs;
        self.bytes = self.bytes.saturating_add(other.bytes);
        self.not_good.append(&mut other.not_good);
        if let Some(Unavailable { blobs, reason }) = &other.unavailable {
            self.add_unavailable(*blobs, reason);
        }
    }

    fn add_unavailable(&mut self, blobs: u64, reason: &str) {
        let first = || Unavailable { blobs: 0, reason: reason.to_owned() };
        let sum = self.unavailable.get_or_insert_with(first);
        sum.blobs = sum.blobs.saturating_add(blobs);
    }
}

impl<'r> Reading<'r> {
    pub(super) fn new(store: &'r Store, blobs: BTreeSet<Digest>, events: &'r Sender<VerifyProgress>) -> Self {
        let _held = store.content().hold_lower_stores();
        // A blob that cannot be inspected now is a finding when it is read.
        let size = |digest| (digest, store.content().blob_size(digest).ok().flatten().unwrap_or_default());
        let sizes: BTreeMap<Digest, u64> = blobs.into_iter().map(size).collect();
        let total = sizes.values().fold(0, |sum: u64, bytes| sum.saturating_add(*bytes));
        let mut blobs: Vec<Digest> = sizes.keys().copied().collect();
        blobs.sort_by_key(|digest| Reverse(sizes.get(digest)));
        Self {
            store,
            events,
            sizes,
            blobs,
            next: AtomicUsize::new(0),
            total,
            completed: AtomicU64::new(0),
            failed: AtomicBool::new(false),
            last_event: Mutex::default(),
        }
    }

    /// Checks all blobs. Fails when a blob cannot be inspected or when the client has disconnected.
    pub(super) fn run(&self) -> Result<Read, OpError> {
        let readers = thread::scope(|scope| {
            let count = thread::available_parallelism().map_or(*READERS.start(), usize::from);
            let count = count.clamp(*READERS.start(), *READERS.end());
            let readers: Vec<_> = (0..count).map(|_| scope.spawn(|| self.work())).collect();
            readers.into_iter().map(thread::ScopedJoinHandle::join).collect::<Vec<_>>()
        });
        let mut read = Read::default();
        for reader in readers {
            let died = |_panic| OpError::Internal("a reader thread panicked".to_owned());
            read.join(reader.map_err(died)??);
        }
        if self.events.is_closed() {
            return Err(OpError::Internal("the client of this verification has disconnected".to_owned()));
        }
        Ok(read)
    }

    fn work(&self) -> Result<Read, StoreError> {
        let mut read = Read::default();
        let mut next = || self.blobs.get(self.next.fetch_add(1, Ordering::Relaxed)).copied();
        let checked =
            check_in_pairs(self.store, &mut next, &mut |bytes| self.step(bytes), &mut |digest, checked| {
                read.add(digest, self.sizes.get(&digest).copied().unwrap_or_default(), checked?);
                Ok(())
            });
        checked.inspect_err(|_| self.failed.store(true, Ordering::Relaxed))?;
        Ok(read)
    }

    fn step(&self, bytes: u64) -> Step {
        if self.events.is_closed() || self.failed.load(Ordering::Relaxed) {
            return Step::Stop;
        }
        let completed = self.completed.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes);
        self.report(completed);
        Step::Go
    }

    /// Blobs that are read twice count twice, so the sum is limited to the total.
    fn report(&self, completed: u64) {
        let mut last_event = self.last_event.lock().unwrap_or_else(PoisonError::into_inner);
        if last_event.is_some_and(|sent| sent.elapsed() < BETWEEN_EVENTS) {
            return;
        }
        *last_event = Some(Instant::now());
        let (total, completed) = (self.total, completed.min(self.total));
        let reading = VerifyProgress::working("reading blobs", Phase::Hashing);
        send_progress(self.events, VerifyProgress { total, completed, ..reading });
    }
}

#[cfg(test)]
mod tests {
    use blobd_store::testing::{add_blobs, new_store};
    use tokio::sync::mpsc;

    use super::*;

    #[test]
    fn all_blobs_are_read_once_and_progress_is_sent() {
        let (_folder, store) = new_store();
        let mut blobs: BTreeSet<_> =
            add_blobs(&store, (0..50).map(|byte| [byte; 3000])).into_iter().collect();
        let missing = Digest::of(b"missing");
        blobs.insert(missing);
        let (events, mut received) = mpsc::channel(64);
        let read = Reading::new(&store, blobs.clone(), &events).run().unwrap();
        assert_eq!((read.blobs, read.bytes), (50, 150_000));
        assert_eq!(read.not_good, [(missing, Verdict::Gone)], "good blobs are not listed");
        let Ok(progress) = received.try_recv() else { panic!("no progress") };
        assert_eq!(progress.total, 150_000);

        drop(received);
        let error = Reading::new(&store, blobs, &events).run().unwrap_err();
        assert!(error.to_string().contains("has disconnected"), "{error}");
    }
}
