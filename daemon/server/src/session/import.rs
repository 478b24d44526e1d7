//! Imports a file that the client has opened, and reports progress.
//!
//! The daemon itself never has the file's descriptor: a separate process receives and reads it
//! ([`crate::client_file`]).

use std::io;
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use blobd_client::protocol::event::{ImportProgress, Phase, State};
use blobd_client::protocol::frame::Frame;
use blobd_client::protocol::pull::Imported;
use blobd_client::protocol::request::{ImportFile, ImportParams};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::sync::watch;
use tokio::time::{Instant, Interval, MissedTickBehavior, interval_at, timeout};

use super::{FrameStream, SessionError};
use crate::client_file::{ClientFile, FileList, Refusal};
use crate::ops::{self, OpError, StoredBlobs};
use crate::permits::Permit;
use crate::principal::Principal;
use crate::request_record::RequestRecord;
use crate::state::{Daemon, Turn, WorkLimits};

const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

/// How long an import waits for the processes of its user's earlier imports to end. They end immediately
/// unless they are blocked.
const READER_TIMEOUT: Duration = Duration::from_secs(5);

/// Serves one import. If the client disconnects, the import stops and leaves nothing behind.
pub(crate) async fn serve_import(
    daemon: Arc<Daemon>,
    mut stream: FrameStream,
    peer: Principal,
    record: Arc<RequestRecord>,
    params: impl Deref<Target = ImportParams> + Send + 'static,
    _requested: Permit,
) {
    let name = params.file_name.clone();
    let served = import(&daemon, &mut stream, &peer, &record, params).await;
    if served.is_err() {
        record.cancelled();
    }
    if let Err(error) = served
        && let Some(omitted) = daemon.limits.log.admit(peer.uid)
    {
        tracing::info!("{}: import of {name:?}: {error}{omitted}", peer.description());
    }
}

async fn import(
    daemon: &Arc<Daemon>,
    stream: &mut FrameStream,
    peer: &Principal,
    record: &Arc<RequestRecord>,
    params: impl Deref<Target = ImportParams> + Send + 'static,
) -> Result<(), SessionError> {
    let cancelled = CancelOnDrop::default();
    let arriving: Turn = while_alive(stream, daemon.work.arriving_imports.acquire(peer.uid)).await?.into();
    let reader = timeout(READER_TIMEOUT, daemon.work.file_readers.acquire(peer.uid));
    let Ok(reader) = while_alive(stream, reader).await? else {
        return refuse(stream, record, too_many_stuck(peer)).await;
    };
    let file = started(daemon, stream, (arriving.clone(), reader), (&params, &cancelled)).await;
    let (file, mut wants) = match file {
        Err(SessionError::Io(error)) => {
            let message = format!("import: cannot start the process that reads the file: {error}");
            return refuse(stream, record, ErrorBody::new(ErrorCode::Internal, message)).await;
        }
        file => file?,
    };
    // Not earlier: a client that does not send its file must not keep the imports of others waiting.
    let turn: Turn = while_alive(stream, daemon.work.imports.acquire(peer.uid)).await?.into();
    drop(arriving);
    let (report, progress) = watch::channel((0, 0));
    let stored = Arc::<StoredBlobs>::default();
    let counted = Arc::clone(&stored);
    let (requester, policy, noted) = (daemon.requester(peer), daemon.policy_for(peer), Arc::clone(record));
    let work = async move {
        let import = move |daemon: &Daemon| {
            let mut before = 0;
            let mut report = |completed: u64, total| {
                daemon.activity.note_imported(completed.saturating_sub(before));
                before = completed;
                let _ = report.send((completed, total));
            };
            // Moved here, so that its process ends with the work.
            let mut file = file;
            let progress: (&mut dyn FnMut(u64, u64), _) = (&mut report, &counted);
            let done = ops::import(&daemon.store, requester, &policy, &params, &mut file, progress);
            done.inspect(|done| noted.finished(done))
        };
        daemon.blocking(turn, import).await
    };
    let done = with_progress(stream, ((progress, &stored), &mut wants), &cancelled, work).await;
    if let Some(refusal) = wants.refusal.get() {
        return Err(refused(*refusal));
    }
    if cancelled.0.load(Ordering::Relaxed) && done.is_err() {
        record.cancelled();
        return Err(SessionError::Closed);
    }
    stream.send_frame(&result_frame(record, done)).await
}

async fn refuse(stream: &FrameStream, record: &RequestRecord, error: ErrorBody) -> Result<(), SessionError> {
    stream.send_frame(&Frame::Error(record.failed(error))).await
}

/// The files that the client is to send next, of an import with a list.
#[derive(Debug)]
struct RequestedFiles {
    /// `None` if all files have been received.
    next: Option<UnboundedReceiver<(u32, u32)>>,
    refusal: Arc<OnceLock<Refusal>>,
}

impl RequestedFiles {
    /// Waits until files are wanted, or, when none can be wanted any more, until the client has closed its end. Before
    /// that nothing may be received here, because descriptors may be in the queue; a closed connection is then detected
    /// when progress is sent.
    async fn next(&mut self, stream: &FrameStream) -> Option<Frame> {
        if let Some(next) = &mut self.next {
            match next.recv().await {
                Some((first, count)) => return Some(Frame::Want { first, count }),
                // The work has ended.
                None => return std::future::pending().await,
            }
        }
        stream.closed().await;
        None
    }
}

/// Starts the process that reads the files. Without a list, waits until it has received their descriptors.
async fn started(
    daemon: &Arc<Daemon>,
    stream: &FrameStream,
    (turn, permit): (Turn, Permit),
    (params, cancelled): (&ImportParams, &CancelOnDrop),
) -> Result<(ClientFile, RequestedFiles), SessionError> {
    let (connection, cancelled) = (stream.connection()?, Arc::clone(&cancelled.0));
    let (listed, count) = (params.files.len(), params.sidecars.len() + 1);
    let (want, next) = unbounded_channel();
    let refusal = Arc::new(OnceLock::new());
    let place = |file: &ImportFile| if file.stream { None } else { Some(file.offset) };
    let places = params.files.iter().map(place).collect();
    let list = FileList { places, want, refusal: Arc::clone(&refusal) };
    let start = move |_: &Daemon| {
        let started = ClientFile::start(connection, permit, cancelled);
        Ok(started.and_then(|mut file| {
            if listed > 0 {
                return Ok(Ok(file.with_list(list)));
            }
            let received = file.receive_files(count)?;
            Ok(received.map(|()| file))
        }))
    };
    let received = daemon.blocking(turn, start).await.map_err(io::Error::other)?;
    let file = received?.map_err(refused)?;
    Ok((file, RequestedFiles { next: (listed > 0).then_some(next), refusal }))
}

/// The bytes that are read of all, and the blobs that are stored.
type Amounts<'a> = (watch::Receiver<(u64, u64)>, &'a StoredBlobs);

/// Reports progress to the client, and stops the work when the client disconnects. Returns the result in any case,
/// because the work may be complete before it stops.
async fn with_progress<T>(
    stream: &FrameStream,
    ((mut read, stored), wants): (Amounts<'_>, &mut RequestedFiles),
    cancelled: &CancelOnDrop,
    work: impl Future<Output = T>,
) -> T {
    tokio::pin!(work);
    let mut ticks = ticks();
    loop {
        tokio::select! {
            done = &mut work => return done,
            want = wants.next(stream) => {
                let Some(want) = want else { break };
                if stream.send_frame(&want).await.is_err() {
                    break;
                }
            }
            _ = ticks.tick() => {
                let progress = progress_of(*read.borrow_and_update(), stored);
                if stream.send_frame(&Frame::Progress(progress)).await.is_err() {
                    break;
                }
            }
        }
    }
    cancelled.0.store(true, Ordering::Relaxed);
    work.await
}

/// A file of many small tensors is read long before they are all written.
fn progress_of((completed, total): (u64, u64), stored: &StoredBlobs) -> ImportProgress {
    let (done, expected) = stored.counts();
    // Bytes are hashed and written as soon as they are read.
    let phase = match () {
        () if completed < total || total == 0 => Phase::Hashing,
        () if done < expected => Phase::Writing,
        () if stored.are_durable() => Phase::Committing,
        () => Phase::Syncing,
    };
    let counts = (phase == Phase::Writing).then_some((done, expected));
    ImportProgress {
        completed,
        total,
        state: State::Working,
        phase: Some(phase),
        phase_completed: counts.map(|(done, _)| done),
        phase_total: counts.map(|(_, expected)| expected),
    }
}

/// Waits for the import's turn. Nothing is received meanwhile, because the descriptor may be in the queue;
/// a closed connection is detected when progress is sent.
async fn while_alive<T>(stream: &FrameStream, turn: impl Future<Output = T>) -> Result<T, SessionError> {
    tokio::pin!(turn);
    let mut ticks = ticks();
    let queued = ImportProgress { state: State::Queued, ..ImportProgress::default() };
    loop {
        tokio::select! {
            turn = &mut turn => return Ok(turn),
            _ = ticks.tick() => stream.send_frame(&Frame::Progress(queued)).await?,
        }
    }
}

fn ticks() -> Interval {
    let mut ticks = interval_at(Instant::now() + PROGRESS_INTERVAL, PROGRESS_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
}

/// Stops the import whenever the session ends, also when a frame cannot be sent.
#[derive(Debug, Default)]
struct CancelOnDrop(Arc<AtomicBool>);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The result counts even if the client does not receive it.
fn result_frame(record: &RequestRecord, done: Result<Imported, OpError>) -> Frame {
    match done {
        Ok(imported) => {
            record.succeeded();
            Frame::Imported(in_one_frame(imported))
        }
        Err(error) => {
            let error = error.body();
            record.log(&error);
            Frame::Error(record.failed(error))
        }
    }
}

/// The most evicted models, and names of what needs their bytes, in the last frame. With the longest names they
/// take less than [`MAX_FRAME_BYTES`](blobd_client::protocol::frame::MAX_FRAME_BYTES). The log has all.
const MAX_LOST_MODELS: usize = 300;
const MAX_KEEPERS: usize = 800;

fn in_one_frame(mut imported: Imported) -> Imported {
    let effects = &mut imported.effects;
    effects.evicted.truncate(MAX_LOST_MODELS);
    let mut left = MAX_KEEPERS;
    for model in effects.displaced.iter_mut().chain(&mut effects.evicted) {
        model.kept.truncate(left);
        for kept in &mut model.kept {
            kept.by.truncate(left.max(1));
            left = left.saturating_sub(kept.by.len());
        }
    }
    imported
}

fn too_many_stuck(peer: &Principal) -> ErrorBody {
    let (uid, stuck) = (peer.uid, WorkLimits::STUCK_READERS);
    let message = format!("import: {stuck} or more earlier imports of uid {uid} still wait for their files");
    ErrorBody::new(ErrorCode::Busy, message)
        .with_hint("the file system that those files are on does not respond; repair or unmount it")
}

fn refused(refusal: Refusal) -> SessionError {
    let found = match refusal {
        Refusal::Closed => return SessionError::Closed,
        Refusal::Slow => return SessionError::Slow,
        Refusal::Failed => return SessionError::Io(io::Error::other("the connection cannot be read")),
        Refusal::Frame => "another frame, or several",
        Refusal::NoFile => "no descriptor",
        Refusal::Files => "another number of descriptors",
    };
    SessionError::Unexpected { found: found.to_owned(), expected: "an fds frame with the files" }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admission::{ConnectionLimits, Connections};
    use crate::socket::ClientSocket;

    #[tokio::test]
    async fn work_that_is_complete_when_its_client_has_gone_has_its_result() {
        let permit = Connections::new(ConnectionLimits::for_process()).admit(1, false).unwrap();
        let (stream, client) = tokio::net::UnixStream::pair().unwrap();
        drop(client);
        let stream = FrameStream::new(ClientSocket::new(stream, 1, Some(permit), &Arc::default()), 0);
        let (cancelled, (_report, progress)) = (CancelOnDrop::default(), watch::channel((0, 0)));
        let is_cancelled = Arc::clone(&cancelled.0);
        let work = async {
            while !is_cancelled.load(Ordering::Relaxed) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            "imported"
        };
        let mut wants = RequestedFiles { next: None, refusal: Arc::default() };
        assert_eq!(
            with_progress(&stream, ((progress, &StoredBlobs::default()), &mut wants), &cancelled, work).await,
            "imported"
        );
    }
}
