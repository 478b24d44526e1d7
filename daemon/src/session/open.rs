//! An open model: descriptors go out in acknowledged batches, then the connection is the lease.

use std::collections::VecDeque;
use std::fs::File;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use blobd_client::protocol::MAX_FDS_PER_BATCH;
use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use blobd_client::protocol::frame::Frame;
use blobd_store::Store;
use blobd_store::gc;
use blobd_store_format::reference::Reference;
use tokio::time::timeout;

use super::connection::{FrameStream, Sent, SessionError, unexpected};
use crate::large_models::ReadPermit;
use crate::open_sessions::SessionGuard;
use crate::ops::{self, Answer, Located, OpError};
use crate::permits::Permit;
use crate::principal::Peer;
use crate::state::Daemon;

/// Serves one open model until its client goes or somebody ends its lease, then frees what only it still
/// held.
pub(crate) async fn serve_open(
    daemon: Arc<Daemon>,
    stream: FrameStream,
    peer: Peer,
    located: Located,
    permits: OpenPermits,
) {
    let Located { reference: model, answer, first_files, lease, recipes } = located;
    tracing::debug!("{}: opens {}", peer.description(), model.short());
    let OpenPermits { opening, memory, model: read_permit, lasting } = permits;
    let passing = Passing::new(stream, answer, first_files, peer.uid);
    // In use until the client has taken everything: others who open the model meanwhile share them.
    let until_passed = (opening, memory, recipes, read_permit);
    let listed = hold(&daemon, passing, until_passed, &peer, &model).await;
    drop(lasting);
    if let Err(error) = &listed {
        note(&daemon, &peer, &model, error);
    }
    // A collection may have the table of leases while it deletes a file: no other session waits.
    let end = move |daemon: &Daemon| {
        drop(lease);
        Ok(gc::collect_condemned(&daemon.store)?.freed_bytes())
    };
    let ended = daemon.disk_work(peer.uid, end).await;
    if !matches!(ended, Ok(0))
        && let Some(left_out) = daemon.limits.log.admit(peer.uid)
    {
        match ended {
            Ok(freed) => tracing::info!("{}: closed, {freed} bytes freed{left_out}", model.short()),
            Err(error) => tracing::warn!("{}: closed, but: {error}{left_out}", model.short()),
        }
    }
    // In the list of sessions until its lease has ended.
    drop(listed);
}

/// What an open model is counted by.
pub(crate) struct OpenPermits {
    /// Descriptors in the daemon, until the client has taken everything. So the next two.
    pub(crate) opening: Permit,
    /// Memory for what the client is told, unless that is counted with a large model.
    pub(crate) memory: Option<Permit>,
    /// Memory for a large model.
    pub(crate) model: ReadPermit,
    /// The connection that lasts.
    pub(crate) lasting: Arc<Permit>,
}

fn note(daemon: &Daemon, peer: &Peer, model: &Reference, error: &SessionError) {
    if let Some(left_out) = daemon.limits.log.admit(peer.uid) {
        tracing::info!("{}: {}: {error}{left_out}", peer.description(), model.short());
    }
}

async fn hold(
    daemon: &Arc<Daemon>,
    passing: Passing,
    until_passed: impl Send,
    peer: &Peer,
    model: &Reference,
) -> Result<SessionGuard, SessionError> {
    let bytes = passing.answer.blobs.iter().fold(0, |sum: u64, (_, size)| sum.saturating_add(*size));
    // Listed before the client has anything: whoever asks afterwards sees it.
    let listed = daemon.sessions.begin(peer, model.clone(), bytes);
    for part in &passing.answer.frames {
        passing.stream.send(part, &[]).await?;
    }
    // From here on the stream is all that is left: a session may last for days.
    let stream = pass_all(daemon, passing).await?;
    drop(until_passed);
    tokio::select! {
        () = stream.closed() => {}
        // One request may end a thousand.
        () = listed.stopped() => {
            if let Some(left_out) = daemon.limits.log.admit(peer.uid) {
                tracing::info!("{}: lease of {} ended{left_out}", peer.description(), model.short());
            }
        }
    }
    Ok(listed)
}

/// Passes all descriptors, and returns the stream.
async fn pass_all(daemon: &Arc<Daemon>, mut passing: Passing) -> Result<FrameStream, SessionError> {
    let uid = passing.uid;
    while !passing.is_done() {
        if let Err(error) = passing.reserve(daemon).await {
            // Best effort: if the peer is the reason, it does not listen.
            let _ = passing.stream.send_frame(&Frame::Error(error)).await;
            return Err(SessionError::TooManyInFlight);
        }
        let go_on = move |daemon: &Daemon| {
            let went = passing.go_on(daemon);
            Ok((passing, went))
        };
        let went = daemon.disk_work(uid, go_on).await;
        let (returned, went) = went.map_err(std::io::Error::other)?;
        passing = returned;
        let went = match went {
            Ok(()) if passing.is_done() => return Ok(passing.stream),
            Ok(()) => passing.wait().await,
            Err(PassError::Theirs(error)) => Err(error),
            Err(PassError::Ours(error)) => {
                // As above.
                let _ = passing.stream.send_frame(&Frame::Error(error.body())).await;
                Err(std::io::Error::other(error).into())
            }
        };
        if let Err(error) = went {
            let Passing { stream, in_flight, .. } = passing;
            // As long as it takes, and nobody waits for it.
            tokio::spawn(stream.give_up(in_flight));
            return Err(error);
        }
    }
    Ok(passing.stream)
}

enum PassError {
    Ours(OpError),
    Theirs(SessionError),
}

/// Passes descriptors to a peer, batch by batch. A batch must be acknowledged before the next goes out:
/// descriptors in flight count against the daemon's user, and one peer must not use up what all need.
/// Meanwhile the next is opened.
struct Passing {
    stream: FrameStream,
    answer: Arc<Answer>,
    uid: u32,
    /// How many blobs have been opened.
    opened: usize,
    /// Those of them that go out next.
    files: VecDeque<File>,
    /// For descriptors that are in flight, or go out next: their number is the most of a batch.
    in_flight: Option<Permit>,
    /// How many have gone out.
    sent: u32,
    is_acknowledged: bool,
}

/// Of the descriptors that its user may still have in flight, one open gets one in so many for a batch.
const PARTS_IN_FLIGHT: usize = 8;

/// How long an open waits until its user's other opens have fewer descriptors in flight.
const IN_FLIGHT_PATIENCE: Duration = Duration::from_secs(12);

impl Passing {
    fn new(stream: FrameStream, answer: Arc<Answer>, first_files: Vec<File>, uid: u32) -> Self {
        Self {
            stream,
            answer,
            uid,
            opened: first_files.len(),
            files: first_files.into(),
            in_flight: None,
            sent: 0,
            is_acknowledged: true,
        }
    }

    /// Sees to it that descriptors may be sent. All batches of an open are as large as the first, unless
    /// that had to be small.
    async fn reserve(&mut self, daemon: &Daemon) -> Result<(), ErrorBody> {
        let wanted = u32::try_from(self.files.len().clamp(1, MAX_FDS_PER_BATCH)).unwrap_or(1);
        if !self.is_acknowledged {
            return Ok(());
        }
        // Given back before more is asked for: an open that holds some must not wait for others.
        self.in_flight = None;
        let permit = daemon.limits.in_flight.acquire_part(self.uid, wanted, PARTS_IN_FLIGHT);
        let permit = timeout(IN_FLIGHT_PATIENCE, permit).await;
        self.in_flight = Some(permit.map_err(|_elapsed| too_many_in_flight(self.uid))?);
        Ok(())
    }

    /// Goes on until all is done or the peer has to be waited for. While it keeps up, one thread opens and
    /// passes, and no other has to be woken for every batch.
    fn go_on(&mut self, daemon: &Daemon) -> Result<(), PassError> {
        loop {
            if self.files.is_empty() {
                self.open_next(&daemon.store).map_err(PassError::Ours)?;
            }
            if !self.is_acknowledged {
                let Some(frame) = self.stream.try_receive().map_err(PassError::Theirs)? else {
                    return Ok(());
                };
                self.acknowledge(&frame).map_err(PassError::Theirs)?;
            }
            if self.files.is_empty() || !self.pass_now().map_err(PassError::Theirs)? {
                return Ok(());
            }
        }
    }

    /// Waits for what [`go_on`](Self::go_on) has to wait for.
    async fn wait(&mut self) -> Result<(), SessionError> {
        if self.is_acknowledged {
            let (frame, count) = self.next_frame()?;
            self.stream.send(&frame, &self.next_batch()).await?;
            self.passed(count);
            return Ok(());
        }
        let frame = self.stream.receive().await?;
        self.acknowledge(&frame)
    }

    /// Whether all blobs have gone out and were acknowledged.
    fn is_done(&self) -> bool {
        self.is_acknowledged && self.files.is_empty() && self.opened >= self.answer.blobs.len()
    }

    fn open_next(&mut self, store: &Store) -> Result<(), OpError> {
        let left = self.answer.blobs.get(self.opened..).unwrap_or_default();
        let batch = left.get(..MAX_FDS_PER_BATCH).unwrap_or(left);
        self.files = ops::open_blobs(store, batch)?.into();
        self.opened += batch.len();
        Ok(())
    }

    /// False if the peer has no room.
    fn pass_now(&mut self) -> Result<bool, SessionError> {
        let (frame, count) = self.next_frame()?;
        let sent = self.stream.try_send(&frame, &self.next_batch())?;
        if sent == Sent::Yes {
            self.passed(count);
        }
        Ok(sent == Sent::Yes)
    }

    /// As many files as may be in flight.
    fn next_batch(&self) -> Vec<BorrowedFd<'_>> {
        let most = self.in_flight.as_ref().map_or(1, Permit::units).min(MAX_FDS_PER_BATCH);
        self.files.iter().take(most).map(|file| file.as_fd()).collect()
    }

    /// The frame that the next batch is attached to, and how many are in it.
    fn next_frame(&self) -> Result<(Vec<u8>, u32), SessionError> {
        let count = u32::try_from(self.next_batch().len()).unwrap_or(u32::MAX);
        Ok((Frame::Fds { first: self.sent, count }.encode()?, count))
    }

    fn passed(&mut self, count: u32) {
        self.sent = self.sent.saturating_add(count);
        self.is_acknowledged = false;
        // On their way they are the kernel's.
        self.files.drain(..self.files.len().min(usize::try_from(count).unwrap_or(usize::MAX)));
    }

    fn acknowledge(&mut self, frame: &Frame) -> Result<(), SessionError> {
        match *frame {
            Frame::Ack { received } if received == self.sent => {
                self.is_acknowledged = true;
                Ok(())
            }
            _ => Err(unexpected(frame, "an acknowledgement of all descriptors")),
        }
    }
}

fn too_many_in_flight(uid: u32) -> ErrorBody {
    let message = format!("open: uid {uid} has too many descriptors in flight");
    ErrorBody::new(ErrorCode::Busy, message)
        .with_hint("end the programs that do not receive the descriptors they asked for")
}
