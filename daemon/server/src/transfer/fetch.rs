//! Downloads ranges, several at once.
//!
//! Each worker takes a range from the schedule, requests it, and passes the bytes to the writer thread. If
//! a connection breaks, stalls or is much slower than the others, the rest of its range returns to the
//! schedule. When all ranges are claimed, a worker without one takes half of what a slow one has left.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use blobd_registry::{ByteStream, RegistryClient, RegistryError, RemoteFile};
use tokio::sync::{Notify, mpsc};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tracing::Instrument as _;
use tracing_mutex::stdsync::{Mutex, MutexGuard};

use super::growth::{Growth, LimitUse, Sample};
use super::pieces::{Piece, Pieces};
use super::policy::RangeFallback;
use super::schedule::{Claim, Schedule};
use super::shared_assembler::SharedAssembler;
use super::silence::Silence;
use super::speed::{Meter, Speeds};
use super::{Job, RateLimit, TransferPolicy, Transfers, rate_limit};
use crate::permits::PermitPool;

#[derive(Debug)]
pub(super) struct Fetch {
    registry: RegistryClient,
    file: RemoteFile,
    shared: Arc<SharedAssembler>,
    policy: TransferPolicy,
    limits: Vec<RateLimit>,
    /// The permits for connections to the host, and the user whose share of them is used.
    connections: Arc<PermitPool>,
    uid: u32,
    schedule: Mutex<Schedule>,
    /// Notified when a range is available again, or all is done.
    changed: Notify,
    stopped: Notify,
    received: AtomicU64,
    silence: Silence,
    workers: AtomicUsize,
    speeds: Speeds,
}

/// Received data up to this size between two gaps is downloaded again: another request would cost about as much.
const NEAR_BYTES: u64 = 4 << 10;
/// A smaller half of a range is not worth a request at any speed.
const LEAST_DIVIDED_BYTES: u64 = 256 << 10;
/// Other connections make progress if they have received this much.
const LEAST_PROGRESS_BYTES: u64 = 64 << 10;

impl Fetch {
    pub(super) fn new(transfers: &Transfers, job: &Job<'_>, shared: Arc<SharedAssembler>) -> Arc<Self> {
        let schedule = Mutex::new(Schedule::new(shared.assembler().missing(), NEAR_BYTES));
        Arc::new(Self {
            registry: job.registry.clone(),
            file: job.file.clone(),
            shared,
            policy: transfers.policy(),
            limits: job.limits.clone(),
            connections: transfers.connections(job.file.host()),
            uid: job.uid,
            schedule,
            changed: Notify::new(),
            stopped: Notify::new(),
            received: AtomicU64::new(0),
            silence: job.silence.clone(),
            workers: AtomicUsize::new(0),
            speeds: Speeds::default(),
        })
    }

    pub(super) fn received_bytes(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }

    pub(super) fn stop(&self) {
        self.stopped.notify_one();
    }

    /// Downloads all that is scheduled. `whole` is an open stream of the rest of the file, and its position. When this
    /// returns, no task uses the download.
    pub(super) async fn run(self: Arc<Self>, whole: Option<(ByteStream, u64)>, writer: mpsc::Sender<Piece>) {
        let mut workers = JoinSet::new();
        if let Some(stream) = whole {
            let (fetch, writer) = (Arc::clone(&self), writer.clone());
            self.lock().claim_all();
            workers.spawn(async move { fetch.work(Some(stream), writer).await }.in_current_span());
        } else {
            self.add_worker(&mut workers, &writer);
        }
        let (mut growth, mut failure) = (Growth::from_one_connection(), None);
        let mut limits = LimitUse::new(&self.limits);
        let mut tick = tokio::time::interval(self.policy.tick);
        while !workers.is_empty() {
            tokio::select! {
                () = self.stopped.notified() => return workers.shutdown().await,
                // Some servers refuse a second connection: then one must do.
                ended = workers.join_next() => if let Some(Ok(Err(error))) = ended {
                    tracing::debug!("a connection has failed: {error}");
                    failure = Some(error);
                },
                now = tick.tick() => {
                    let (received_bytes, limit) = (self.received_bytes(), limits.left(now));
                    let sample = Sample { now, received_bytes, workers: workers.len(), limit };
                    self.speeds.tick();
                    // A worker that waits for a range may now know how slow the others are.
                    self.changed.notify_waiters();
                    let room = self.policy.max_connections.saturating_sub(workers.len());
                    for _ in 0..growth.how_many_more(sample).min(room) {
                        self.add_worker(&mut workers, &writer);
                    }
                }
            }
            if self.shared.is_over() {
                return workers.shutdown().await;
            }
        }
        if let Some(error) = failure.filter(|_| !self.lock().is_done()) {
            self.shared.fail(error.into());
        }
    }

    fn add_worker(
        self: &Arc<Self>,
        workers: &mut JoinSet<Result<(), RegistryError>>,
        writer: &mpsc::Sender<Piece>,
    ) {
        // Additional connections are opened only if enough is left to download, and only if the file cannot
        // change between requests.
        let enough = self.policy.min_range_bytes.min(self.divisible_bytes().saturating_mul(2));
        let is_worth_it = || self.file.is_resumable() && self.lock().left_bytes() >= enough;
        if !workers.is_empty() && !is_worth_it() {
            return;
        }
        let (fetch, writer) = (Arc::clone(self), writer.clone());
        workers.spawn(async move { fetch.work(None, writer).await }.in_current_span());
    }

    async fn work(
        self: Arc<Self>,
        whole: Option<(ByteStream, u64)>,
        writer: mpsc::Sender<Piece>,
    ) -> Result<(), RegistryError> {
        self.workers.fetch_add(1, Ordering::Relaxed);
        let worked = self.work_until_done(whole, &writer).await;
        self.workers.fetch_sub(1, Ordering::Relaxed);
        self.changed.notify_waiters();
        worked
    }

    async fn work_until_done(
        &self,
        mut whole: Option<(ByteStream, u64)>,
        writer: &mpsc::Sender<Piece>,
    ) -> Result<(), RegistryError> {
        let (mut retry, mut fallback) = (self.registry.retry(), RangeFallback::default());
        let (mut length, mut silent_in_a_row) = (self.policy.min_range_bytes, 0);
        loop {
            // Progress of any connection counts.
            retry.note_progress(self.received_bytes());
            let started = Instant::now();
            let mut attempt = Attempt::default();
            let fetched = match whole.take() {
                Some((stream, position)) => self.receive_whole(stream, position, &mut attempt, writer).await,
                None => match self.next_claim(length).await {
                    None => return Ok(()),
                    Some(claim) => self.fetch_range(&claim, fallback, &mut attempt, writer).await,
                },
            };
            match fetched {
                Ok(Outcome::Fetched) => length = self.policy.next_length(length, started.elapsed()),
                Ok(Outcome::TooSlow) => {
                    self.registry.note_stall();
                    length = self.policy.min_range_bytes;
                }
                Ok(Outcome::Silent) => {
                    self.registry.note_stall();
                    length = self.policy.min_range_bytes;
                    silent_in_a_row = if attempt.received == 0 { silent_in_a_row + 1 } else { 0 };
                    // The host delivers over the other connections; this one is not needed.
                    if silent_in_a_row > 1 {
                        return Ok(());
                    }
                }
                Ok(Outcome::Done | Outcome::WriterClosed) => return Ok(()),
                Err(error) => {
                    let wait =
                        retry.wait_after(&error, attempt.received).filter(|_| self.file.is_resumable());
                    if attempt.received == 0 && (attempt.has_begun || error.is_of_body()) {
                        fallback.note_failure(self.shared.assembler().arrived_bytes());
                    }
                    self.registry.note_failure(&error, wait.is_some());
                    let Some(wait) = wait else { return Err(error) };
                    tracing::debug!("{error}; retry in {wait:?}");
                    let _waiting = self.silence.wait();
                    tokio::time::sleep(wait).await;
                    length = self.policy.min_range_bytes;
                }
            }
        }
    }

    /// The next range; waits while others may return one.
    async fn next_claim(&self, length: u64) -> Option<Claim> {
        loop {
            let notified = self.changed.notified();
            tokio::pin!(notified);
            // Before the check, or a notification in between would be missed.
            notified.as_mut().enable();
            {
                let mut schedule = self.lock();
                let claim = schedule.claim(length).or_else(|| schedule.divide(self.divisible_bytes()));
                if claim.is_some() {
                    return claim;
                }
                if schedule.is_done() || self.workers.load(Ordering::Relaxed) <= 1 {
                    return None;
                }
            }
            notified.await;
        }
    }

    /// The least size of either half of a range that is divided between two connections: what one of them
    /// receives in the time that a range should take. A smaller half is not worth a request.
    fn divisible_bytes(&self) -> u64 {
        let seconds = self.policy.range_takes.as_secs().max(1);
        let rate = self.speeds.of_one_connection();
        rate.map_or(u64::MAX, |rate| rate.saturating_mul(seconds).max(LEAST_DIVIDED_BYTES))
    }

    async fn fetch_range(
        &self,
        claim: &Claim,
        fallback: RangeFallback,
        attempt: &mut Attempt,
        writer: &mpsc::Sender<Piece>,
    ) -> Result<Outcome, RegistryError> {
        let _connection = self.connections.acquire(self.uid).await;
        let Some(opened) = self.open(claim, fallback).await else {
            self.lock().give_back(claim.id);
            self.changed.notify_waiters();
            return Ok(Outcome::Silent);
        };
        attempt.has_begun = opened.is_ok();
        let fetched = match opened {
            Ok(stream) if !stream.is_whole() => self.receive_range(stream, claim, attempt, writer).await,
            Ok(stream) => {
                // One such stream contains all missing ranges.
                self.lock().give_back(claim.id);
                if self.lock().claim_all() {
                    return self.receive_whole(stream, 0, attempt, writer).await;
                }
                return Ok(Outcome::Done);
            }
            Err(error) => Err(error),
        };
        self.lock().give_back(claim.id);
        self.changed.notify_waiters();
        fetched
    }

    /// Requests a range. `None` if the server is silent while other connections receive something.
    async fn open(
        &self,
        claim: &Claim,
        fallback: RangeFallback,
    ) -> Option<Result<ByteStream, RegistryError>> {
        let _waiting = self.silence.wait();
        let file = if fallback.is_whole() { &self.file.without_ranges() } else { &self.file };
        let mut opening = std::pin::pin!(self.registry.open_part(file, claim.range.clone()));
        let mut quiet = SilentConnection::since(self.received_bytes());
        loop {
            let started = Instant::now();
            if let Ok(opened) = tokio::time::timeout(self.policy.tick, opening.as_mut()).await {
                return Some(opened);
            }
            quiet.add(started.elapsed());
            if self.is_outpaced(&quiet) {
                return None;
            }
        }
    }

    /// Whether a connection has been silent while others have received something. It may be dead, so its range is better
    /// given to them.
    fn is_outpaced(&self, quiet: &SilentConnection) -> bool {
        let received_by_others = self.received_bytes().saturating_sub(quiet.received_before);
        quiet.lasts >= self.policy.silent_beside_others && received_by_others >= LEAST_PROGRESS_BYTES
    }

    async fn receive_range(
        &self,
        mut stream: ByteStream,
        claim: &Claim,
        attempt: &mut Attempt,
        writer: &mpsc::Sender<Piece>,
    ) -> Result<Outcome, RegistryError> {
        let (mut pieces, mut meter) = (Pieces::new(claim.range.start, stream.sender()), Meter::default());
        let mut quiet = SilentConnection::since(self.received_bytes());
        loop {
            let waiting = Instant::now();
            let next = {
                let _waiting = self.silence.wait();
                pieces.next_of(&mut stream, self.policy.tick).await
            };
            let Ok(Some(bytes)) = next else {
                // Bytes received before an error are valid.
                self.hand_over(&mut pieces, claim.id, writer).await;
                return next.map(|_| {
                    self.speeds.note(meter);
                    Outcome::Fetched
                });
            };
            let (count, is_idle) = (bytes.len(), bytes.is_empty());
            meter.add(count, waiting.elapsed());
            self.speeds.add(count, waiting.elapsed());
            attempt.received += count as u64;
            pieces.push(bytes);
            let is_too_slow = self.speeds.is_too_slow(&mut meter, pieces.left(&claim.range));
            let is_due = is_idle || pieces.is_full() || is_too_slow || self.is_limited();
            if is_due && !self.hand_over(&mut pieces, claim.id, writer).await {
                return Ok(Outcome::WriterClosed);
            }
            self.count(count).await;
            if is_idle {
                quiet.add(waiting.elapsed());
            } else {
                quiet = SilentConnection::since(self.received_bytes());
            }
            if is_too_slow || self.is_outpaced(&quiet) {
                let what = if is_too_slow { "far slower than the others" } else { "silent" };
                tracing::debug!("a connection is {what}, its range is requested again");
                return Ok(if is_too_slow { Outcome::TooSlow } else { Outcome::Silent });
            }
            if is_due && pieces.offset < claim.range.end && !self.lock().is_active(claim.id) {
                // Another worker has taken the rest of the range.
                return Ok(Outcome::Fetched);
            }
        }
    }

    async fn hand_over(&self, pieces: &mut Pieces, claim: u64, writer: &mpsc::Sender<Piece>) -> bool {
        let Some(piece) = pieces.take() else { return true };
        let sent = writer.send(piece).await.is_ok();
        if sent {
            self.lock().advance(claim, pieces.offset);
        }
        sent
    }

    /// Receives a stream of the whole file, which is at `position`, to its end.
    async fn receive_whole(
        &self,
        mut stream: ByteStream,
        position: u64,
        attempt: &mut Attempt,
        writer: &mpsc::Sender<Piece>,
    ) -> Result<Outcome, RegistryError> {
        let mut pieces = Pieces::new(position, stream.sender());
        let before = self.shared.assembler().arrived_bytes();
        attempt.has_begun = true;
        loop {
            let next = {
                let _waiting = self.silence.wait();
                pieces.next_of(&mut stream, self.policy.tick).await
            };
            let is_over = !matches!(&next, Ok(Some(_)));
            let bytes = next.as_ref().ok().cloned().flatten().unwrap_or_default();
            let count = bytes.len();
            let is_due = is_over || bytes.is_empty() || self.is_limited();
            pieces.push(bytes);
            if (is_due || pieces.is_full())
                && let Some(piece) = pieces.take()
                && writer.send(piece).await.is_err()
            {
                return Ok(Outcome::WriterClosed);
            }
            self.count(count).await;
            if let Err(error) = next {
                // A server without ranges sends everything again; only new bytes are progress.
                attempt.received = self.shared.assembler().arrived_bytes().saturating_sub(before);
                if self.file.is_resumable() {
                    self.lock().reopen(self.shared.assembler().missing());
                }
                return Err(error);
            }
            if is_over {
                return Ok(Outcome::Done);
            }
        }
    }

    /// Counts received bytes, and waits as the rate limits require.
    async fn count(&self, bytes: usize) {
        self.received.fetch_add(bytes as u64, Ordering::Relaxed);
        if bytes > 0 {
            self.silence.interrupt();
        }
        rate_limit::wait(&self.limits, bytes).await;
    }

    /// Whether a rate limit may delay the next bytes: those already received are written before.
    fn is_limited(&self) -> bool {
        self.limits.iter().any(|limit| limit.get().is_some())
    }

    fn lock(&self) -> MutexGuard<'_, Schedule> {
        // Each change is complete before anything can panic.
        self.schedule.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One request: whether its response has begun, and how many new bytes it has brought.
#[derive(Debug, Default)]
struct Attempt {
    has_begun: bool,
    received: u64,
}

enum Outcome {
    Fetched,
    /// Another connection is likely to be faster for the rest.
    TooSlow,
    /// Nothing arrives, while the other connections receive something.
    Silent,
    Done,
    WriterClosed,
}

/// How long a connection has been silent, and what all had received before.
struct SilentConnection {
    lasts: Duration,
    received_before: u64,
}

impl SilentConnection {
    const fn since(received_before: u64) -> Self {
        Self { lasts: Duration::ZERO, received_before }
    }

    /// Adds time spent waiting for bytes. Waits for a rate limit or the disk do not count.
    fn add(&mut self, waited: Duration) {
        self.lasts = self.lasts.saturating_add(waited);
    }
}
