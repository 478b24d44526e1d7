//! Verification of blobs on disk, and the scrubber that does it in the background.
//!
//! It reads the disk and not the page cache ([`DiskReader`]), moves a blob to quarantine only if it was read wrong
//! twice ([`DiskReader::check`]), keeps below a configured rate ([`RateLimiter`](crate::RateLimiter)), pauses while
//! imports and pulls run or the disks are busy, and continues after a restart ([`Cursor`]). It holds no lock while it
//! reads, so a blob may be collected meanwhile.
//!
//! It does not repair, and does not check recipes: `verify` does both.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use blobd_store_format::digest::Digest;

use crate::{Store, StoreError};

mod check;
mod cursor;
mod pairs;
mod read;
mod throttle;

pub use check::Verdict;
pub use cursor::{Cursor, unix_seconds};
pub use pairs::{VerdictSink, check_in_pairs};
pub use read::{DiskReader, Ended, Fault, Gate, Step};
pub use throttle::{StopSignal, Throttle};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScrubPolicy {
    /// The most bytes that are read per second; 0 disables scrubbing.
    pub bytes_per_second: u64,
    /// The time between the starts of two passes. If a pass takes longer, the next one follows immediately.
    pub period: Duration,
    /// The scrubber pauses while tasks wait for disks for more than this share of the time, in percent.
    pub max_pressure_percent: u8,
}

/// The background verification of one store. Dropping it stops it.
#[derive(Debug)]
#[must_use]
pub struct Scrubber {
    stop: Arc<StopSignal>,
    thread: Option<JoinHandle<()>>,
}

impl Scrubber {
    /// Starts the scrubber, unless the rate is 0 or the store is read-only. It pauses while `is_busy`, and reports
    /// damage to `observe`.
    pub fn start(
        store: Arc<Store>,
        policy: ScrubPolicy,
        is_busy: impl Fn() -> bool + Send + 'static,
        observe: impl Fn(Digest, &Verdict) + Send + 'static,
    ) -> io::Result<Self> {
        let stop = Arc::new(StopSignal::default());
        // In a read-only store the cursor could not be saved and damaged blobs could not be moved.
        if policy.bytes_per_second == 0 || store.content.refuses_changes() {
            return Ok(Self { stop, thread: None });
        }
        let throttle = Throttle::new(Arc::clone(&stop), policy, Box::new(is_busy));
        let observe = Box::new(observe);
        let scrub_loop = ScrubLoop {
            store,
            policy,
            throttle,
            observe,
            unsaved: UnsavedProgress::none(),
            retries: RetryLimit::default(),
        };
        let thread = thread::Builder::new().name("scrub".to_owned()).spawn(move || scrub_loop.run())?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Scrubber {
    fn drop(&mut self) {
        self.stop.set();
        if let Some(Err(_panic)) = self.thread.take().map(JoinHandle::join) {
            tracing::error!(
                "scrub: the thread has panicked; blobs are no longer verified until the daemon is restarted"
            );
        }
    }
}

type Observe = dyn Fn(Digest, &Verdict) + Send;

struct ScrubLoop {
    store: Arc<Store>,
    policy: ScrubPolicy,
    throttle: Throttle,
    /// Told of each damaged blob.
    observe: Box<Observe>,
    unsaved: UnsavedProgress,
    retries: RetryLimit,
}

/// Blobs that are checked together. If the pass is interrupted, at most these are read again.
const WINDOW_BLOBS: usize = 16;
/// The pause after a pass, and the longest wait before the clock is read again.
const MIN_PAUSE: Duration = Duration::from_secs(1);
const MAX_WAIT: Duration = Duration::from_secs(3600);
/// The pause after a failure that is not a blob's, such as too many open files.
const RETRY_DELAY: Duration = Duration::from_secs(60);

impl ScrubLoop {
    fn run(mut self) {
        // For this thread alone. If it fails, the scrubber only competes more with other work.
        let _ = rustix::process::setpriority_process(None, 19);
        let mut cursor = Cursor::load(&self.store);
        let mut pause = Duration::ZERO;
        loop {
            let due = cursor.due_in(unix_seconds(), self.policy.period);
            if self.throttle.stop().wait(due.max(pause).min(MAX_WAIT)) {
                return;
            }
            // The clock may have been set, or the wait may have ended early.
            if !cursor.due_in(unix_seconds(), self.policy.period).is_zero() {
                continue;
            }
            cursor.begin(unix_seconds());
            pause = match self.pass(&mut cursor) {
                Ok(()) => MIN_PAUSE,
                Err(error) => {
                    tracing::warn!("scrub: {error}; trying again later");
                    RETRY_DELAY
                }
            };
        }
    }

    fn pass(&mut self, cursor: &mut Cursor) -> Result<(), StoreError> {
        let mut blobs = self.store.content.blobs()?;
        blobs.retain(|digest| Some(*digest) > cursor.last);
        blobs.sort_unstable();
        let mut found = Found::default();
        for window in blobs.chunks(WINDOW_BLOBS) {
            self.check_window(window, cursor, &mut found)?;
            if cursor.last.as_ref() != window.last() {
                return cursor.save(&self.store);
            }
        }
        cursor.end(unix_seconds());
        self.unsaved = UnsavedProgress::none();
        let Found { damaged, unread } = found;
        let (blobs, bytes) = (cursor.blobs, cursor.bytes);
        tracing::info!("scrub: blobs {blobs}, bytes {bytes}, damaged {damaged}, unreadable {unread}");
        cursor.save(&self.store)
    }

    /// Checks blobs, two at a time, and moves the cursor behind each when those before it are checked too.
    fn check_window(
        &mut self,
        window: &[Digest],
        cursor: &mut Cursor,
        found: &mut Found,
    ) -> Result<(), StoreError> {
        let Self { store, throttle, observe, unsaved, retries, .. } = self;
        let bytes = Cell::new(0u64);
        let mut gate = |next| {
            let step = throttle.step(next);
            bytes.set(bytes.get().saturating_add(if step == Step::Go { next } else { 0 }));
            step
        };
        let (mut blobs, mut checked) = (window.iter().copied(), BTreeSet::new());
        let mut uncounted = window.iter().copied().peekable();
        check_in_pairs(store, &mut || blobs.next(), &mut gate, &mut |digest, result| {
            let verdict = retries.accept(digest, result)?;
            if verdict.damage().is_some() {
                observe(digest, &verdict);
            }
            found.add(digest, &verdict);
            checked.insert(digest);
            while let Some(first) = uncounted.next_if(|first| checked.contains(first)) {
                cursor.advance(first);
            }
            let read = bytes.take();
            cursor.bytes = cursor.bytes.saturating_add(read);
            if unsaved.add(read) { cursor.save(store) } else { Ok(()) }
        })
    }
}

#[derive(Debug, Default)]
struct Found {
    damaged: u64,
    unread: u64,
}

impl Found {
    fn add(&mut self, digest: Digest, verdict: &Verdict) {
        match verdict {
            Verdict::Good | Verdict::Gone | Verdict::Hidden { .. } | Verdict::Unfinished => {}
            Verdict::Writable { mode } => tracing::warn!(
                "blob {digest}: wrong mode: expected 0444, found {mode:04o}; `blobd verify --repair` sets it"
            ),
            Verdict::Unreadable { .. } => self.unread += 1,
            Verdict::Unreliable { .. } | Verdict::BadBelow { .. } | Verdict::Bad { .. } => self.damaged += 1,
        }
    }
}

/// How often one blob may hold up the pass with an error: a shortage that it causes each time will not go away.
#[derive(Debug, Default)]
struct RetryLimit {
    blob: Option<Digest>,
    failures: u32,
}

impl RetryLimit {
    const MAX_FAILURES: u32 = 3;

    /// Returns the verdict on a blob. An error is returned the first times, and then becomes a verdict.
    fn accept(
        &mut self,
        digest: Digest,
        checked: Result<Verdict, StoreError>,
    ) -> Result<Verdict, StoreError> {
        let error = match checked {
            Ok(verdict) => return Ok(verdict),
            Err(error) => error,
        };
        if self.blob.replace(digest) != Some(digest) {
            self.failures = 0;
        }
        self.failures += 1;
        if self.failures < Self::MAX_FAILURES {
            return Err(error);
        }
        tracing::error!("blob {digest}: skipped after {} failed reads: {error}", self.failures);
        *self = Self::default();
        Ok(Verdict::Unreadable { reason: error.to_string() })
    }
}

/// What was read since the cursor was saved: it would be read again after a crash.
struct UnsavedProgress {
    bytes: u64,
    since: Instant,
}

impl UnsavedProgress {
    const MAX_BYTES: u64 = 1 << 30;
    const MAX_AGE: Duration = Duration::from_secs(60);

    fn none() -> Self {
        Self { bytes: 0, since: Instant::now() }
    }

    /// Adds bytes that were read. If it is time to save, resets the count and returns true.
    fn add(&mut self, bytes: u64) -> bool {
        self.bytes = self.bytes.saturating_add(bytes);
        let is_due = self.bytes >= Self::MAX_BYTES || self.since.elapsed() >= Self::MAX_AGE;
        if is_due {
            *self = Self::none();
        }
        is_due
    }
}

#[cfg(test)]
mod tests;
