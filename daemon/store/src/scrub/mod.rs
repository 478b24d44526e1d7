//! Verification of what is on disk, and the scrubber that does it in the background.
//!
//! It promises to read the disk and not memory ([`DiskReader`]), to move nothing into quarantine
//! that has not read wrong twice ([`DiskReader::check`]), to be slower than told ([`RateLimiter`](crate::RateLimiter)), to
//! step back while imports and pulls run or the disks are busy, and to go on after a restart
//! ([`Cursor`]). It holds no lock while it reads, so a blob may be collected under its hands.
//!
//! It does not repair, and does not look at recipes: `verify` does both.

use std::io;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use blobd_store_format::digest::Digest;

use crate::{Store, StoreError};

mod check;
mod cursor;
mod fault;
mod pairs;
mod read;
mod throttle;

pub use check::Verdict;
pub use cursor::{Cursor, unix_seconds};
pub use fault::Fault;
pub use pairs::check_in_pairs;
pub use read::{DiskReader, Ended, Gate, Step};
pub use throttle::{StopSignal, Throttle};

/// How the scrubber works.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScrubPolicy {
    /// The most bytes that are read per second; 0 for no scrubbing at all.
    pub bytes_per_second: u64,
    /// From the beginning of one pass over all blobs to that of the next. A pass that takes
    /// longer is followed by the next at once.
    pub period: Duration,
    /// It pauses while tasks wait for disks for more than this share of the time, in percent.
    pub max_pressure_percent: u8,
}

/// The background verification of one store. Dropped, it stops.
#[derive(Debug)]
#[must_use]
pub struct Scrubber {
    stop: Arc<StopSignal>,
    thread: Option<JoinHandle<()>>,
}

impl Scrubber {
    /// Starts to scrub in a thread of its own, unless the policy says not to. It pauses while
    /// `is_busy`.
    ///
    /// # Errors
    /// When there can be no more threads.
    pub fn start(
        store: Arc<Store>,
        policy: ScrubPolicy,
        is_busy: impl Fn() -> bool + Send + 'static,
    ) -> io::Result<Self> {
        let stop = Arc::new(StopSignal::default());
        // What cannot be noted would be read again and again, and what is damaged could not be put aside.
        if policy.bytes_per_second == 0 || store.read_only_reason().is_some() {
            return Ok(Self { stop, thread: None });
        }
        let throttle = Throttle::new(Arc::clone(&stop), policy, Box::new(is_busy));
        let rounds = Rounds {
            store,
            policy,
            throttle,
            reader: DiskReader::default(),
            unsaved: Unsaved::none(),
            patience: Patience::default(),
        };
        let thread = thread::Builder::new().name("scrub".to_owned()).spawn(move || rounds.run())?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Scrubber {
    fn drop(&mut self) {
        self.stop.set();
        if let Some(Err(_panic)) = self.thread.take().map(JoinHandle::join) {
            tracing::error!("the scrubber has died; nothing was verified since");
        }
    }
}

/// Pass after pass.
struct Rounds {
    store: Arc<Store>,
    policy: ScrubPolicy,
    throttle: Throttle,
    reader: DiskReader,
    unsaved: Unsaved,
    patience: Patience,
}

/// Between two passes that follow each other at once, and between two looks at the clock.
const SHORT_REST: Duration = Duration::from_secs(1);
const LONG_REST: Duration = Duration::from_secs(3600);
/// Before another try after a failure that is not a blob's, such as too many open files.
const REST_AFTER_FAILURE: Duration = Duration::from_secs(60);

impl Rounds {
    fn run(mut self) {
        // Of this thread alone. A refusal costs nothing but politeness.
        let _ = rustix::process::setpriority_process(None, 19);
        let mut cursor = Cursor::load(&self.store);
        let mut rest = Duration::ZERO;
        loop {
            let due = cursor.due_in(unix_seconds(), self.policy.period);
            if self.throttle.stop().wait(due.max(rest).min(LONG_REST)) {
                return;
            }
            // The clock may have been set, or the wait cut short.
            if !cursor.due_in(unix_seconds(), self.policy.period).is_zero() {
                continue;
            }
            cursor.begin(unix_seconds());
            rest = match self.pass(&mut cursor) {
                Ok(()) => SHORT_REST,
                Err(error) => {
                    tracing::warn!("scrub: {error}; trying again later");
                    REST_AFTER_FAILURE
                }
            };
        }
    }

    /// Goes on with a pass, to its end or until it is told to stop.
    fn pass(&mut self, cursor: &mut Cursor) -> Result<(), StoreError> {
        let mut blobs = self.store.blobs()?;
        blobs.retain(|digest| Some(*digest) > cursor.last);
        blobs.sort_unstable();
        let (mut damaged, mut unread) = (0u64, 0u64);
        for digest in blobs {
            let mut bytes = 0u64;
            let throttle = &mut self.throttle;
            let mut gate = |next| {
                let step = throttle.step(next);
                bytes = bytes.saturating_add(if step == Step::Go { next } else { 0 });
                step
            };
            let checked = self.reader.check(&self.store, digest, &mut gate);
            match self.patience.judge(digest, checked)? {
                Verdict::Unfinished => return cursor.save(&self.store),
                Verdict::Good | Verdict::Gone => {}
                Verdict::Writable { mode } => {
                    tracing::warn!(
                        "blob {digest}: mode {mode:04o}, 0444 expected; `blobd verify --repair` sets it"
                    );
                }
                Verdict::Unreadable { .. } => unread += 1,
                Verdict::Unreliable { .. } | Verdict::Bad { .. } => damaged += 1,
            }
            cursor.advance(digest, bytes);
            if self.unsaved.add(bytes) {
                cursor.save(&self.store)?;
            }
        }
        cursor.end(unix_seconds());
        self.unsaved = Unsaved::none();
        tracing::info!(
            "scrub: {} blobs, {} bytes read, {damaged} damaged, {unread} that could not be read",
            cursor.blobs,
            cursor.bytes
        );
        cursor.save(&self.store)
    }
}

/// How often one blob may hold up all others: a shortage that comes with it every time is its own.
#[derive(Debug, Default)]
struct Patience {
    blob: Option<Digest>,
    failures: u32,
}

impl Patience {
    const MAX_FAILURES: u32 = 3;

    /// The verdict on a blob; an error the first times that there is none.
    fn judge(&mut self, digest: Digest, checked: Result<Verdict, StoreError>) -> Result<Verdict, StoreError> {
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
        tracing::error!("blob {digest}: passed over after {} tries: {error}", self.failures);
        *self = Self::default();
        Ok(Verdict::Unreadable { reason: error.to_string() })
    }
}

/// What would be read again after a crash.
struct Unsaved {
    bytes: u64,
    since: Instant,
}

impl Unsaved {
    const MAX_BYTES: u64 = 1 << 30;
    const MAX_AGE: Duration = Duration::from_secs(60);

    fn none() -> Self {
        Self { bytes: 0, since: Instant::now() }
    }

    /// Adds what was read, and says whether it is time to save; then there is nothing unsaved.
    fn add(&mut self, bytes: u64) -> bool {
        self.bytes = self.bytes.saturating_add(bytes);
        let is_time = self.bytes >= Self::MAX_BYTES || self.since.elapsed() >= Self::MAX_AGE;
        if is_time {
            *self = Self::none();
        }
        is_time
    }
}

#[cfg(test)]
mod tests;
