//! Ranges over the network, several at once.
//!
//! Each worker takes a range from the schedule, has it sent, and hands what comes to the thread
//! that writes. A connection that breaks, stalls or is much slower than the others loses the rest
//! of its range to whoever asks next; what it has brought stays.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use blobd_registry::{ByteStream, RegistryClient, RegistryError, RemoteFile};
use bytes::Bytes;
use tokio::sync::{Notify, mpsc};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::schedule::{Claim, Schedule};
use super::shared_assembler::SharedAssembler;
use super::speed::{Meter, Speeds};
use super::{RateLimit, TransferPolicy, rate_limit};
use crate::permits::PermitPool;

/// One file being fetched.
#[derive(Debug)]
pub(super) struct Fetch {
    registry: RegistryClient,
    file: RemoteFile,
    pub(super) shared: Arc<SharedAssembler>,
    pub(super) policy: TransferPolicy,
    /// The daemon's limit and this pull's own.
    pub(super) limits: Vec<RateLimit>,
    /// The connections that the host may get, and whose share they are taken from.
    connections: Arc<PermitPool>,
    uid: u32,
    schedule: Mutex<Schedule>,
    /// Rung when a range is anybody's again, or all is done.
    changed: Notify,
    /// Notified when the download is to stop.
    stopped: Notify,
    received: AtomicU64,
    /// The same of all transfers.
    received_by_all: Arc<AtomicU64>,
    /// Whether a limit has held it up since somebody looked.
    was_held_up: AtomicBool,
    workers: AtomicUsize,
    speeds: Speeds,
}

/// Bytes on their way to the thread that writes.
#[derive(Debug)]
pub(super) struct Piece {
    offset: u64,
    frames: Vec<Bytes>,
    length: usize,
}

/// How much is written at once, and noted in the journal.
const PIECE_BYTES: usize = 1 << 20;
/// A slow connection's bytes do not wait longer than this to be noted.
const PIECE_PATIENCE: Duration = Duration::from_millis(200);
/// Gaps up to this are fetched with what surrounds them: a request costs about as much.
const NEAR_BYTES: u64 = 4 << 10;

impl Fetch {
    pub(super) fn new(
        (registry, file): (RegistryClient, RemoteFile),
        shared: Arc<SharedAssembler>,
        policy: TransferPolicy,
        limits: Vec<RateLimit>,
        (connections, uid): (Arc<PermitPool>, u32),
        received_by_all: Arc<AtomicU64>,
    ) -> Arc<Self> {
        let schedule = Mutex::new(Schedule::new(shared.assembler().missing(), NEAR_BYTES));
        let (received, workers) = (AtomicU64::new(0), AtomicUsize::new(0));
        let (changed, stopped) = (Notify::new(), Notify::new());
        Arc::new(Self {
            registry,
            file,
            shared,
            policy,
            limits,
            connections,
            uid,
            schedule,
            changed,
            stopped,
            received,
            received_by_all,
            was_held_up: AtomicBool::new(false),
            workers,
            speeds: Speeds::default(),
        })
    }

    /// How many bytes have come over the network.
    pub(super) fn received_bytes(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }

    /// Ends [`Self::run`].
    pub(super) fn stop(&self) {
        self.stopped.notify_one();
    }

    /// Fetches all that is scheduled. `whole` is a stream of the rest of the file that is there
    /// already, and where it is. After it returns, no task holds the
    /// download any more.
    pub(super) async fn run(self: Arc<Self>, whole: Option<(ByteStream, u64)>, writer: mpsc::Sender<Piece>) {
        let mut workers = JoinSet::new();
        if let Some(stream) = whole {
            let (fetch, writer) = (Arc::clone(&self), writer.clone());
            self.lock().claim_all();
            workers.spawn(async move { fetch.work(Some(stream), writer).await });
        } else {
            self.add_worker(&mut workers, &writer);
        }
        let (mut growth, mut failure) = (Growth::default(), None);
        let mut tick = tokio::time::interval(self.policy.tick);
        while !workers.is_empty() {
            tokio::select! {
                () = self.stopped.notified() => return workers.shutdown().await,
                // Some servers refuse a second connection: then one has to do.
                ended = workers.join_next() => if let Some(Ok(Err(error))) = ended {
                    tracing::debug!("one connection less: {error}");
                    failure = Some(error);
                },
                _ = tick.tick() => {
                    let is_worth_it = growth.is_worth_one_more(self.received_bytes(), workers.len());
                    // More connections make no limit higher, and others want some too.
                    let was_held_up = self.was_held_up.swap(false, Ordering::Relaxed);
                    if is_worth_it && !was_held_up && workers.len() < self.policy.max_connections {
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
        // Beyond the first, only for what a connection needs some time for; and never for what may be
        // another file by now.
        let is_worth_it =
            || self.file.is_resumable() && self.lock().left_bytes() >= self.policy.min_range_bytes;
        if !workers.is_empty() && !is_worth_it() {
            return;
        }
        let (fetch, writer) = (Arc::clone(self), writer.clone());
        workers.spawn(async move { fetch.work(None, writer).await });
    }

    /// Fetches ranges until none is left.
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
            // Whichever connection has brought it.
            retry.note_progress(self.received_bytes());
            let started = Instant::now();
            let mut came = 0;
            let fetched = match whole.take() {
                Some((stream, position)) => self.receive_whole(stream, position, &mut came, writer).await,
                None => match self.next_claim(length).await {
                    None => return Ok(()),
                    Some(claim) => self.fetch_range(&claim, &mut came, writer).await,
                },
            };
            match fetched {
                Ok(Outcome::Fetched) => length = self.policy.next_length(length, started.elapsed()),
                Ok(Outcome::LeftBehind) => length = self.policy.min_range_bytes,
                Ok(Outcome::Superfluous | Outcome::NobodyListens) => return Ok(()),
                Err(error) => {
                    let wait = retry.wait_after(&error, came);
                    let Some(wait) = wait.filter(|_| self.file.is_resumable()) else {
                        return Err(error);
                    };
                    tracing::debug!("{error}; again in {wait:?}");
                    tokio::time::sleep(wait).await;
                    length = self.policy.min_range_bytes;
                }
            }
        }
    }

    /// The next range; waits while others may give one back.
    async fn next_claim(&self, length: u64) -> Option<Claim> {
        loop {
            let rung = self.changed.notified();
            tokio::pin!(rung);
            // Before the look, or a ring in between would be missed.
            rung.as_mut().enable();
            {
                let mut schedule = self.lock();
                if let Some(claim) = schedule.claim(length) {
                    return Some(claim);
                }
                if schedule.is_done() || self.workers.load(Ordering::Relaxed) <= 1 {
                    return None;
                }
            }
            rung.await;
        }
    }

    /// Adds to `came` how much that was missing has come.
    async fn fetch_range(
        &self,
        claim: &Claim,
        came: &mut u64,
        writer: &mpsc::Sender<Piece>,
    ) -> Result<Outcome, RegistryError> {
        let _connection = self.connections.acquire(self.uid).await;
        let fetched = match self.registry.open_part(&self.file, claim.range.clone()).await {
            Ok(stream) if !stream.is_whole() => self.receive_range(stream, claim, came, writer).await,
            Ok(stream) => {
                // Nobody has to ask for it again: one such stream brings all that is missing.
                self.lock().give_back(claim.id);
                if self.lock().claim_all() {
                    return self.receive_whole(stream, 0, came, writer).await;
                }
                return Ok(Outcome::Superfluous);
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
        came: &mut u64,
        writer: &mpsc::Sender<Piece>,
    ) -> Result<Outcome, RegistryError> {
        let (mut pieces, mut meter) = (Pieces::new(claim.range.start), Meter::default());
        loop {
            let waiting = Instant::now();
            let bytes = match pieces.next_of(&mut stream).await {
                Ok(Some(bytes)) => bytes,
                ended => {
                    // What has come before it broke is as good as any.
                    self.hand_over(&mut pieces, claim.id, writer).await;
                    return ended.map(|_| {
                        self.speeds.note(meter);
                        Outcome::Fetched
                    });
                }
            };
            meter.add(bytes.len(), waiting.elapsed());
            let (count, is_idle) = (bytes.len(), bytes.is_empty());
            *came += count as u64;
            pieces.push(bytes);
            let is_left_behind = self.speeds.is_left_behind(&mut meter, pieces.left(&claim.range));
            let is_due = is_idle || pieces.is_full() || is_left_behind || self.is_limited();
            if is_due && !self.hand_over(&mut pieces, claim.id, writer).await {
                return Ok(Outcome::NobodyListens);
            }
            self.count(count).await;
            if is_left_behind {
                tracing::debug!("a connection far slower than the others is left");
                return Ok(Outcome::LeftBehind);
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

    /// Takes a stream of the whole file, which is at `position`, to its end.
    async fn receive_whole(
        &self,
        mut stream: ByteStream,
        position: u64,
        came: &mut u64,
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
                return Ok(Outcome::NobodyListens);
            }
            self.count(count).await;
            if let Err(error) = next {
                // From a server without ranges all comes again; what is not new is no progress.
                *came = self.shared.assembler().arrived_bytes().saturating_sub(before);
                if self.file.is_resumable() {
                    self.lock().reopen(self.shared.assembler().missing());
                }
                return Err(error);
            }
            if is_over {
                return Ok(Outcome::Superfluous);
            }
        }
    }

    /// Counts bytes that have come, and waits for as long as they should have taken.
    async fn count(&self, bytes: usize) {
        for sum in [&self.received, &*self.received_by_all] {
            sum.fetch_add(bytes as u64, Ordering::Relaxed);
        }
        if rate_limit::wait(&self.limits, bytes).await {
            self.was_held_up.store(true, Ordering::Relaxed);
        }
    }

    /// Whether bytes may have to wait for their turn: those that have come are written before.
    fn is_limited(&self) -> bool {
        self.limits.iter().any(|limit| limit.get().is_some())
    }

    fn lock(&self) -> MutexGuard<'_, Schedule> {
        // Every change is complete before anything could panic.
        self.schedule.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What has become of a request.
enum Outcome {
    /// All of it has come.
    Fetched,
    /// The rest will come sooner by another connection.
    LeftBehind,
    /// Nothing is left to do here.
    Superfluous,
    /// The thread that writes has ended.
    NobodyListens,
}

/// Frames that make up the next piece.
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

    /// The next bytes of a stream; none when what there is has waited long enough for them.
    async fn next_of(&self, stream: &mut ByteStream) -> Result<Option<Bytes>, RegistryError> {
        match self.patience() {
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

    /// How much of the range has still to come.
    fn left(&self, range: &Range<u64>) -> u64 {
        range.end.saturating_sub(self.offset).saturating_sub(self.length as u64)
    }

    /// Until when what there is may wait for more.
    fn patience(&self) -> Option<Instant> {
        (!self.frames.is_empty()).then(|| self.since + PIECE_PATIENCE)
    }

    fn take(&mut self) -> Option<Piece> {
        let (frames, length) = (std::mem::take(&mut self.frames), std::mem::take(&mut self.length));
        let offset = self.offset;
        self.offset += length as u64;
        (length > 0).then_some(Piece { offset, frames, length })
    }
}

/// Writes pieces as they come, until there are no more or one cannot be written.
pub(super) fn write_pieces(shared: &SharedAssembler, mut pieces: mpsc::Receiver<Piece>) {
    let mut joined = Vec::new();
    while let Some(piece) = pieces.blocking_recv() {
        let written = match &*piece.frames {
            [frame] => shared.write(piece.offset, frame),
            frames => {
                joined.clear();
                joined.reserve(piece.length);
                frames.iter().for_each(|frame| joined.extend_from_slice(frame));
                shared.write(piece.offset, &joined)
            }
        };
        if let Err(error) = written {
            shared.fail(error.into());
            return;
        }
    }
    // Whoever waits for what nobody will bring waits no more.
    if !shared.assembler().missing().is_empty() {
        shared.fail(super::TransferError::Incomplete);
    }
}

/// Decides how many connections there are: one more as long as the last one made it faster.
#[derive(Debug, Default)]
struct Growth {
    received: u64,
    best: u64,
    workers: usize,
}

impl Growth {
    fn is_worth_one_more(&mut self, received: u64, workers: usize) -> bool {
        let rate = received.saturating_sub(std::mem::replace(&mut self.received, received));
        if workers != self.workers {
            // What the newest brings is seen in the next tick.
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
        let mut growth = Growth::default();
        assert!(!growth.is_worth_one_more(0, 1));
        assert!(growth.is_worth_one_more(100, 1));
        assert!(!growth.is_worth_one_more(250, 2), "not before it was seen for a whole tick");
        assert!(growth.is_worth_one_more(450, 2));
        assert!(!growth.is_worth_one_more(650, 3));
        assert!(!growth.is_worth_one_more(850, 3), "the third made it no faster");
    }
}
