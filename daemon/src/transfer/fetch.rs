//! Downloads ranges, several at once.
//!
//! Each worker takes a range from the schedule, requests it, and passes the bytes to the writer thread. If
//! a connection breaks, stalls or is much slower than the others, the rest of its range returns to the
//! schedule.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use blobd_registry::{ByteStream, RegistryClient, RegistryError, RemoteFile};
use blobd_store::StoreError;
use bytes::Bytes;
use tokio::sync::{Notify, mpsc};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::schedule::{Claim, Schedule};
use super::shared_assembler::SharedAssembler;
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
    /// The permits for connections to the host, and the user whose share they are of.
    connections: Arc<PermitPool>,
    uid: u32,
    schedule: Mutex<Schedule>,
    /// Notified when a range is available again, or all is done.
    changed: Notify,
    stopped: Notify,
    received: AtomicU64,
    /// The bytes received by all transfers.
    received_by_all: Arc<AtomicU64>,
    /// Whether a rate limit has delayed it since the last check.
    was_delayed: AtomicBool,
    workers: AtomicUsize,
    speeds: Speeds,
}

/// Bytes for the writer thread.
#[derive(Debug)]
pub(super) struct Piece {
    offset: u64,
    frames: Vec<Bytes>,
    length: usize,
}

/// How much is written, and recorded in the journal, at once.
const PIECE_BYTES: usize = 1 << 20;
/// Frames that have at least this size on average are written one by one.
const LARGE_FRAME_BYTES: usize = 128 << 10;
/// How long the bytes of a slow connection wait at most to be written.
const PIECE_TIMEOUT: Duration = Duration::from_millis(200);
/// Received data between two gaps up to this size is downloaded again, because an additional request costs
/// about as much.
const NEAR_BYTES: u64 = 4 << 10;

impl Fetch {
    pub(super) fn new(transfers: &Transfers, job: &Job<'_>, shared: Arc<SharedAssembler>) -> Arc<Self> {
        let schedule = Mutex::new(Schedule::new(shared.assembler().missing(), NEAR_BYTES));
        Arc::new(Self {
            registry: job.registry.clone(),
            file: job.file.clone(),
            shared,
            policy: transfers.policy,
            limits: job.limits.clone(),
            connections: transfers.connections(job.file.host()),
            uid: job.uid,
            schedule,
            changed: Notify::new(),
            stopped: Notify::new(),
            received: AtomicU64::new(0),
            received_by_all: Arc::clone(&transfers.received),
            was_delayed: AtomicBool::new(false),
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

    /// Downloads all that is scheduled. `whole` is an open stream of the rest of the file, and its
    /// position. After it returns, no task uses the download any more.
    pub(super) async fn run(self: Arc<Self>, whole: Option<(ByteStream, u64)>, writer: mpsc::Sender<Piece>) {
        let mut workers = JoinSet::new();
        if let Some(stream) = whole {
            let (fetch, writer) = (Arc::clone(&self), writer.clone());
            self.lock().claim_all();
            workers.spawn(async move { fetch.work(Some(stream), writer).await });
        } else {
            self.add_worker(&mut workers, &writer);
        }
        let (mut growth, mut failure) = (Growth::from_one_connection(), None);
        let mut tick = tokio::time::interval(self.policy.tick);
        while !workers.is_empty() {
            tokio::select! {
                () = self.stopped.notified() => return workers.shutdown().await,
                // Some servers refuse a second connection: then one has to suffice.
                ended = workers.join_next() => if let Some(Ok(Err(error))) = ended {
                    tracing::debug!("a connection has failed: {error}");
                    failure = Some(error);
                },
                _ = tick.tick() => {
                    let is_worth_it = growth.is_worth_one_more(self.received_bytes(), workers.len());
                    // With a rate limit, more connections do not help, and other transfers need some too.
                    let was_delayed = self.was_delayed.swap(false, Ordering::Relaxed);
                    if is_worth_it && !was_delayed && workers.len() < self.policy.max_connections {
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
        let is_worth_it =
            || self.file.is_resumable() && self.lock().left_bytes() >= self.policy.min_range_bytes;
        if !workers.is_empty() && !is_worth_it() {
            return;
        }
        let (fetch, writer) = (Arc::clone(self), writer.clone());
        workers.spawn(async move { fetch.work(None, writer).await });
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
        let mut retry = self.registry.retry();
        let mut length = self.policy.min_range_bytes;
        loop {
            // Progress of any connection counts.
            retry.note_progress(self.received_bytes());
            let started = Instant::now();
            let mut received = 0;
            let fetched = match whole.take() {
                Some((stream, position)) => self.receive_whole(stream, position, &mut received, writer).await,
                None => match self.next_claim(length).await {
                    None => return Ok(()),
                    Some(claim) => self.fetch_range(&claim, &mut received, writer).await,
                },
            };
            match fetched {
                Ok(Outcome::Fetched) => length = self.policy.next_length(length, started.elapsed()),
                Ok(Outcome::TooSlow) => length = self.policy.min_range_bytes,
                Ok(Outcome::Done | Outcome::WriterClosed) => return Ok(()),
                Err(error) => {
                    let wait = retry.wait_after(&error, received);
                    let Some(wait) = wait.filter(|_| self.file.is_resumable()) else {
                        return Err(error);
                    };
                    tracing::debug!("{error}; retry in {wait:?}");
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
                if let Some(claim) = schedule.claim(length) {
                    return Some(claim);
                }
                if schedule.is_done() || self.workers.load(Ordering::Relaxed) <= 1 {
                    return None;
                }
            }
            notified.await;
        }
    }

    /// Adds the number of new bytes to `received`.
    async fn fetch_range(
        &self,
        claim: &Claim,
        received: &mut u64,
        writer: &mpsc::Sender<Piece>,
    ) -> Result<Outcome, RegistryError> {
        let _connection = self.connections.acquire(self.uid).await;
        let fetched = match self.registry.open_part(&self.file, claim.range.clone()).await {
            Ok(stream) if !stream.is_whole() => self.receive_range(stream, claim, received, writer).await,
            Ok(stream) => {
                // One such stream contains all missing ranges.
                self.lock().give_back(claim.id);
                if self.lock().claim_all() {
                    return self.receive_whole(stream, 0, received, writer).await;
                }
                return Ok(Outcome::Done);
            }
            Err(error) => Err(error),
        };
        self.lock().give_back(claim.id);
        self.changed.notify_waiters();
        fetched
    }

    async fn receive_range(
        &self,
        mut stream: ByteStream,
        claim: &Claim,
        received: &mut u64,
        writer: &mpsc::Sender<Piece>,
    ) -> Result<Outcome, RegistryError> {
        let (mut pieces, mut meter) = (Pieces::new(claim.range.start), Meter::default());
        loop {
            let waiting = Instant::now();
            let bytes = match pieces.next_of(&mut stream).await {
                Ok(Some(bytes)) => bytes,
                ended => {
                    // Bytes received before an error are valid.
                    self.hand_over(&mut pieces, claim.id, writer).await;
                    return ended.map(|_| {
                        self.speeds.note(meter);
                        Outcome::Fetched
                    });
                }
            };
            meter.add(bytes.len(), waiting.elapsed());
            let (count, is_idle) = (bytes.len(), bytes.is_empty());
            *received += count as u64;
            pieces.push(bytes);
            let is_too_slow = self.speeds.is_too_slow(&mut meter, pieces.left(&claim.range));
            let is_due = is_idle || pieces.is_full() || is_too_slow || self.is_limited();
            if is_due && !self.hand_over(&mut pieces, claim.id, writer).await {
                return Ok(Outcome::WriterClosed);
            }
            self.count(count).await;
            if is_too_slow {
                tracing::debug!("a connection is far slower than the others, its range is requested again");
                return Ok(Outcome::TooSlow);
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
        received: &mut u64,
        writer: &mpsc::Sender<Piece>,
    ) -> Result<Outcome, RegistryError> {
        let mut pieces = Pieces::new(position);
        let before = self.shared.assembler().arrived_bytes();
        loop {
            let next = pieces.next_of(&mut stream).await;
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
                *received = self.shared.assembler().arrived_bytes().saturating_sub(before);
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
        for sum in [&self.received, &*self.received_by_all] {
            sum.fetch_add(bytes as u64, Ordering::Relaxed);
        }
        if rate_limit::wait(&self.limits, bytes).await {
            self.was_delayed.store(true, Ordering::Relaxed);
        }
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

/// The result of a request.
enum Outcome {
    Fetched,
    /// Another connection is likely to be faster for the rest.
    TooSlow,
    /// Nothing is left to do for this worker.
    Done,
    WriterClosed,
}

/// Collects frames for the next piece.
struct Pieces {
    offset: u64,
    frames: Vec<Bytes>,
    length: usize,
    since: Instant,
}

impl Pieces {
    fn new(offset: u64) -> Self {
        Self { offset, frames: Vec::new(), length: 0, since: Instant::now() }
    }

    /// The next bytes of a stream; empty when collected frames have waited long enough.
    async fn next_of(&self, stream: &mut ByteStream) -> Result<Option<Bytes>, RegistryError> {
        match self.deadline() {
            None => stream.next().await,
            Some(until) => {
                let next = tokio::time::timeout_at(until, stream.next()).await;
                next.unwrap_or_else(|_elapsed| Ok(Some(Bytes::new())))
            }
        }
    }

    fn push(&mut self, bytes: Bytes) {
        if bytes.is_empty() {
            return;
        }
        if self.frames.is_empty() {
            self.since = Instant::now();
        }
        self.length += bytes.len();
        self.frames.push(bytes);
    }

    fn is_full(&self) -> bool {
        self.length >= PIECE_BYTES
    }

    /// How much of the range is missing.
    fn left(&self, range: &Range<u64>) -> u64 {
        range.end.saturating_sub(self.offset).saturating_sub(self.length as u64)
    }

    /// When collected frames are written at the latest.
    fn deadline(&self) -> Option<Instant> {
        (!self.frames.is_empty()).then(|| self.since + PIECE_TIMEOUT)
    }

    fn take(&mut self) -> Option<Piece> {
        let (frames, length) = (std::mem::take(&mut self.frames), std::mem::take(&mut self.length));
        let offset = self.offset;
        self.offset += length as u64;
        (length > 0).then_some(Piece { offset, frames, length })
    }
}

/// Writes pieces until the channel is closed or a write fails.
pub(super) fn write_pieces(shared: &SharedAssembler, mut pieces: mpsc::Receiver<Piece>) {
    let mut joined = Vec::new();
    while let Some(piece) = pieces.blocking_recv() {
        if let Err(error) = write_piece(shared, &piece, &mut joined) {
            shared.fail(error.into());
            return;
        }
    }
    // Ends the wait of readers for bytes that will never arrive.
    if !shared.assembler().missing().is_empty() {
        shared.fail(super::TransferError::Incomplete);
    }
}

/// Writes large frames one by one, which saves a copy, and small ones joined in `joined`, which saves writes
/// and records in the journal.
fn write_piece(shared: &SharedAssembler, piece: &Piece, joined: &mut Vec<u8>) -> Result<(), StoreError> {
    if piece.length >= piece.frames.len().saturating_mul(LARGE_FRAME_BYTES) {
        let mut offset = piece.offset;
        return piece.frames.iter().try_for_each(|frame| {
            shared.write(offset, frame)?;
            offset = offset.saturating_add(frame.len() as u64);
            Ok(())
        });
    }
    joined.clear();
    joined.reserve(piece.length);
    piece.frames.iter().for_each(|frame| joined.extend_from_slice(frame));
    shared.write(piece.offset, joined)
}

/// Decides on the number of connections: one more as long as the last one increased the rate.
#[derive(Debug)]
struct Growth {
    received: u64,
    best: u64,
    workers: usize,
}

impl Growth {
    const fn from_one_connection() -> Self {
        Self { received: 0, best: 0, workers: 1 }
    }

    fn is_worth_one_more(&mut self, received: u64, workers: usize) -> bool {
        let rate = received.saturating_sub(std::mem::replace(&mut self.received, received));
        if workers != self.workers {
            // The effect of the newest connection is measured in the next tick.
            self.workers = workers;
            return false;
        }
        let is_faster = rate > self.best + self.best / 10;
        self.best = self.best.max(rate);
        is_faster
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_are_added_while_they_help() {
        let mut growth = Growth::from_one_connection();
        assert!(!growth.is_worth_one_more(0, 1));
        assert!(growth.is_worth_one_more(100, 1));
        assert!(!growth.is_worth_one_more(250, 2), "not measured for a whole tick");
        assert!(growth.is_worth_one_more(450, 2));
        assert!(!growth.is_worth_one_more(650, 3));
        assert!(!growth.is_worth_one_more(850, 3), "the third made it no faster");
    }

    #[test]
    fn bytes_that_arrive_before_the_first_tick_count() {
        assert!(Growth::from_one_connection().is_worth_one_more(100, 1));
    }
}
