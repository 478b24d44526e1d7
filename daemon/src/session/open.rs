//! An open model: descriptors go out in acknowledged batches, then the connection is the lease.

use std::fs::File;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::Arc;

use blobd_client::protocol::MAX_FDS_PER_BATCH;
use blobd_client::protocol::frame::Frame;
use blobd_store_format::reference::Reference;

use tokio::sync::OwnedSemaphorePermit;

use super::connection::{FrameStream, SessionError, unexpected};
use super::peer::Peer;
use crate::gc;
use crate::ops::{self, Answer, Located, OpError};
use crate::state::Daemon;
use crate::store::Store;

/// Serves one open model until its client goes, then frees what only it still held.
/// `slot` is free again when all is passed.
pub(crate) async fn serve_open(
    daemon: Arc<Daemon>,
    stream: FrameStream,
    peer: Peer,
    located: Located,
    slot: OwnedSemaphorePermit,
) {
    let Located { reference: model, answer, first_files, lease } = located;
    tracing::debug!("{}: opens {}", peer.description(), model.short());
    let passing = Passing::new(stream, answer, first_files);
    if let Err(error) = hold(&daemon, passing, slot, &peer, model.clone()).await {
        tracing::info!("{}: {}: {error}", peer.description(), model.short());
    }
    // A collection may have the table of leases while it deletes a file: no other session waits.
    let end = move |daemon: &Daemon| {
        drop(lease);
        Ok(gc::collect_condemned(&daemon.store)?.freed_bytes())
    };
    match daemon.blocking(end).await {
        Ok(0) => {}
        Ok(freed) => tracing::info!("{}: closed, {freed} bytes freed", model.short()),
        Err(error) => tracing::warn!("{}: closed, but: {error}", model.short()),
    }
}

async fn hold(
    daemon: &Arc<Daemon>,
    passing: Passing,
    slot: OwnedSemaphorePermit,
    peer: &Peer,
    model: Reference,
) -> Result<(), SessionError> {
    passing.stream.send(&passing.answer.frames, &[]).await?;
    let bytes = passing.answer.blobs.iter().fold(0, |sum: u64, (_, size)| sum.saturating_add(*size));
    // From here on the stream is all that is left: a session may last for days.
    let stream = pass_all(daemon, passing).await?;
    drop(slot);
    let _listed = daemon.sessions.begin(peer, model, bytes);
    stream.closed().await;
    Ok(())
}

/// Passes all descriptors, and returns the stream.
async fn pass_all(daemon: &Arc<Daemon>, mut passing: Passing) -> Result<FrameStream, SessionError> {
    while !passing.is_done() {
        let go_on = move |daemon: &Daemon| {
            let went = passing.go_on(&daemon.store);
            Ok((passing, went))
        };
        let went = daemon.blocking(go_on).await;
        let (returned, went) = went.map_err(std::io::Error::other)?;
        passing = returned;
        match went {
            Ok(()) if passing.is_done() => {}
            Ok(()) => passing.wait().await?,
            Err(PassError::Theirs(error)) => return Err(error),
            Err(PassError::Ours(error)) => {
                // Best effort: if the peer is the reason, it does not listen.
                let _ = passing.stream.send_frame(&Frame::Error(error.body())).await;
                return Err(std::io::Error::other(error).into());
            }
        }
    }
    Ok(passing.stream)
}

enum PassError {
    Ours(OpError),
    Theirs(SessionError),
}

/// Descriptors on their way to a peer, batch by batch. A batch must be acknowledged before the next
/// goes out: descriptors in flight count against the daemon's user, and one peer must not use up what
/// all need. Meanwhile the next is opened.
struct Passing {
    stream: FrameStream,
    answer: Arc<Answer>,
    /// How many blobs have been opened.
    opened: usize,
    /// Those of them that go out next.
    files: Vec<File>,
    /// How many have gone out.
    sent: u32,
    is_acknowledged: bool,
}

impl Passing {
    fn new(stream: FrameStream, answer: Arc<Answer>, first_files: Vec<File>) -> Self {
        Self { stream, answer, opened: first_files.len(), files: first_files, sent: 0, is_acknowledged: true }
    }

    /// Goes on until all is done or the peer has to be waited for. While it keeps up, one thread opens and
    /// passes, and no other has to be woken for every batch.
    fn go_on(&mut self, store: &Store) -> Result<(), PassError> {
        loop {
            if self.files.is_empty() {
                self.open_next(store).map_err(PassError::Ours)?;
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
            self.stream.send(&frame, &borrowed(&self.files)).await?;
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
        self.files = ops::open_blobs(store, batch)?;
        self.opened += batch.len();
        Ok(())
    }

    /// False if the peer has no room.
    fn pass_now(&mut self) -> Result<bool, SessionError> {
        let (frame, count) = self.next_frame()?;
        let went = self.stream.try_send(&frame, &borrowed(&self.files))?;
        if went {
            self.passed(count);
        }
        Ok(went)
    }

    /// The frame that the next batch is attached to, and how many are in it.
    fn next_frame(&self) -> Result<(Vec<u8>, u32), SessionError> {
        let count = u32::try_from(self.files.len()).unwrap_or(u32::MAX);
        Ok((Frame::Fds { first: self.sent, count }.encode()?, count))
    }

    fn passed(&mut self, count: u32) {
        self.sent = self.sent.saturating_add(count);
        self.is_acknowledged = false;
        // On their way they are the kernel's.
        self.files.clear();
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

fn borrowed(files: &[File]) -> Vec<BorrowedFd<'_>> {
    files.iter().map(|file| file.as_fd()).collect()
}
