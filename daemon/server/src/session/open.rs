//! Serves an open model: sends descriptors in acknowledged batches; after that the connection is the lease.

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
use blobd_store_format::digest::Digest;
use blobd_store_format::reference::Reference;
use prometheus::IntCounter;
use tokio::time::timeout;

use super::{FrameStream, SessionError, unexpected};
use crate::open_sessions::SessionGuard;
use crate::ops::{self, Located, OpError, OpenResponse};
use crate::permits::Permit;
use crate::principal::Principal;
use crate::request_record::RequestRecord;
use crate::state::Daemon;
use crate::verb_log::Outcome;

/// Serves one open model until its client disconnects or its lease is ended, then frees what only this
/// session still held. `permits` are held until the client has received all descriptors, `lasting` until it
/// has disconnected.
pub(crate) async fn serve_open(
    daemon: Arc<Daemon>,
    stream: FrameStream,
    peer: Principal,
    record: Arc<RequestRecord>,
    located: Located,
    permits: impl Send,
    lasting: Arc<Permit>,
) {
    let Located { reference: model, manifest, response, first_files, lease, recipes } = located;
    tracing::debug!("{}: opens {}", peer.description(), model.short());
    let bytes = response.blobs.iter().fold(0, |sum: u64, (_, size)| sum.saturating_add(*size));
    let outcome = Outcome::new(&model.short(), manifest).with("blobs", response.blobs.len());
    let sender = DescriptorSender {
        stream,
        response,
        uid: peer.uid,
        opened: first_files.len(),
        files: first_files.into(),
        in_flight: None,
        sent: 0,
        sent_bytes: 0,
        all_sent: daemon.metrics.events.descriptors_sent.clone(),
        is_acknowledged: true,
        record: Arc::clone(&record),
        outcome,
    };
    // Held until the client has received all descriptors: concurrent opens of the model share them.
    let until_sent = (permits, recipes);
    let open = Open { daemon: &daemon, peer: &peer, record: &record, model: &model, manifest, bytes };
    let listed = open.hold(sender, until_sent).await;
    drop(lasting);
    if let Err(error) = &listed {
        record.cancelled();
        note(&daemon, &peer, &model, error);
    }
    // On another thread, because a collection may hold the table of leases while it deletes a file.
    let end = move |daemon: &Daemon| {
        drop(lease);
        Ok(gc::collect_condemned(daemon.store.liveness())?.freed_bytes())
    };
    let ended = daemon.disk_work(peer.uid, end).await;
    if !matches!(ended, Ok(0))
        && let Some(omitted) = daemon.limits.log.admit(peer.uid)
    {
        match ended {
            Ok(freed) => tracing::info!("{}: closed, {freed} bytes freed{omitted}", model.short()),
            Err(error) => tracing::warn!("{}: closed, but: {error}{omitted}", model.short()),
        }
    }
    // The session is listed until its lease has ended.
    drop(listed);
}

fn note(daemon: &Daemon, peer: &Principal, model: &Reference, error: &SessionError) {
    if let Some(omitted) = daemon.limits.log.admit(peer.uid) {
        tracing::info!("{}: {}: {error}{omitted}", peer.description(), model.short());
    }
}

struct Open<'o> {
    daemon: &'o Arc<Daemon>,
    peer: &'o Principal,
    record: &'o RequestRecord,
    model: &'o Reference,
    manifest: Digest,
    bytes: u64,
}

impl Open<'_> {
    /// Sends the descriptors, ends the request when the client has received all of them, and waits for the end of the
    /// lease.
    async fn hold(
        &self,
        sender: DescriptorSender,
        until_sent: impl Send,
    ) -> Result<SessionGuard, SessionError> {
        let Self { daemon, peer, model, .. } = self;
        daemon.note_reader(peer);
        // Listed before the client receives anything, so that `ps` never misses a model in use.
        let listed = daemon.sessions.begin(peer, (*model).clone(), self.manifest, self.bytes);
        for part in &sender.response.frames {
            sender.stream.send(part, &[]).await?;
        }
        // Only the stream is kept from here on: a session may last for days.
        let stream = self.send_all(sender).await?;
        drop(until_sent);
        self.record.succeeded();
        tokio::select! {
            () = stream.closed() => {}
            // Rate-limited, because one request may end a thousand leases.
            () = listed.stopped() => {
                if let Some(omitted) = daemon.limits.log.admit(peer.uid) {
                    tracing::info!("{}: lease of {} ended{omitted}", peer.description(), model.short());
                }
            }
        }
        Ok(listed)
    }

    async fn send_all(&self, mut sender: DescriptorSender) -> Result<FrameStream, SessionError> {
        let daemon = self.daemon;
        let uid = sender.uid;
        while !sender.is_done() {
            if let Err(error) = sender.reserve(daemon).await {
                let error = self.record.failed(error);
                // Best effort: a peer that is the cause does not receive it.
                let _ = sender.stream.send_frame(&Frame::Error(error)).await;
                return Err(SessionError::TooManyInFlight);
            }
            let send_available = move |daemon: &Daemon| {
                let sent = sender.send_available(daemon);
                Ok((sender, sent))
            };
            let work = daemon.disk_work(uid, send_available).await;
            let (returned, sent) = work.map_err(std::io::Error::other)?;
            sender = returned;
            let sent = match sent {
                Ok(()) if sender.is_done() => return Ok(sender.stream),
                Ok(()) => sender.wait().await,
                Err(SendError::Peer(error)) => Err(error),
                Err(SendError::Daemon(error)) => {
                    let body = self.record.failed(error.body());
                    let _ = sender.stream.send_frame(&Frame::Error(body)).await;
                    Err(std::io::Error::other(error).into())
                }
            };
            if let Err(error) = sent {
                let DescriptorSender { stream, in_flight, .. } = sender;
                // May take long, and nothing waits for it.
                tokio::spawn(stream.drain(in_flight));
                return Err(error);
            }
        }
        Ok(sender.stream)
    }
}

enum SendError {
    Daemon(OpError),
    Peer(SessionError),
}

/// Sends descriptors to a peer, batch by batch. A batch must be acknowledged before the next one is sent:
/// descriptors in flight count against the daemon's user, and one peer must not use them up. Meanwhile the
/// next batch is opened.
struct DescriptorSender {
    stream: FrameStream,
    response: Arc<OpenResponse>,
    uid: u32,
    opened: usize,
    files: VecDeque<File>,
    /// Its units limit the size of a batch.
    in_flight: Option<Permit>,
    sent: u32,
    /// The sizes of the blobs whose descriptors were sent.
    sent_bytes: u64,
    all_sent: IntCounter,
    is_acknowledged: bool,
    record: Arc<RequestRecord>,
    outcome: Outcome,
}

/// One open gets at most one in this many of the descriptors that its user may still have in flight.
const PARTS_IN_FLIGHT: usize = 8;

/// How long an open waits until its user's other opens have fewer descriptors in flight.
const IN_FLIGHT_TIMEOUT: Duration = Duration::from_secs(12);

impl DescriptorSender {
    /// All batches of an open are as large as the first, unless that had to be small.
    async fn reserve(&mut self, daemon: &Daemon) -> Result<(), ErrorBody> {
        let wanted = u32::try_from(self.files.len().clamp(1, MAX_FDS_PER_BATCH)).unwrap_or(1);
        if !self.is_acknowledged {
            return Ok(());
        }
        // Returned before more is requested: an open that holds some must not wait for others.
        self.in_flight = None;
        let permit = daemon.limits.in_flight.acquire_part(self.uid, wanted, PARTS_IN_FLIGHT);
        let permit = timeout(IN_FLIGHT_TIMEOUT, permit).await;
        self.in_flight = Some(permit.map_err(|_elapsed| too_many_in_flight(self.uid))?);
        Ok(())
    }

    /// Continues until all is done or the peer has to act. While the peer keeps up, one thread opens and
    /// sends, and no other is woken for each batch.
    fn send_available(&mut self, daemon: &Daemon) -> Result<(), SendError> {
        loop {
            if self.files.is_empty() {
                self.open_next(&daemon.store).map_err(SendError::Daemon)?;
            }
            if !self.is_acknowledged {
                let Some(frame) = self.stream.try_receive().map_err(SendError::Peer)? else {
                    return Ok(());
                };
                self.acknowledge(&frame).map_err(SendError::Peer)?;
            }
            if self.files.is_empty() || !self.send_now().map_err(SendError::Peer)? {
                return Ok(());
            }
        }
    }

    async fn wait(&mut self) -> Result<(), SessionError> {
        if self.is_acknowledged {
            let (frame, count) = self.next_frame()?;
            self.stream.send(&frame, &self.next_batch()).await?;
            self.note_sent(count);
            return Ok(());
        }
        let frame = self.stream.receive().await?;
        self.acknowledge(&frame)
    }

    fn is_done(&self) -> bool {
        self.is_acknowledged && self.files.is_empty() && self.opened >= self.response.blobs.len()
    }

    fn open_next(&mut self, store: &Store) -> Result<(), OpError> {
        let left = self.response.blobs.get(self.opened..).unwrap_or_default();
        let batch = left.get(..MAX_FDS_PER_BATCH).unwrap_or(left);
        self.files = ops::open_blobs(store, batch)?.into();
        self.opened += batch.len();
        Ok(())
    }

    /// False if the peer's buffer is full.
    fn send_now(&mut self) -> Result<bool, SessionError> {
        let (frame, count) = self.next_frame()?;
        let sent = self.stream.try_send(&frame, &self.next_batch())?;
        if sent {
            self.note_sent(count);
        }
        Ok(sent)
    }

    /// The next files, as many as may be in flight.
    fn next_batch(&self) -> Vec<BorrowedFd<'_>> {
        let most = self.in_flight.as_ref().map_or(1, Permit::units).min(MAX_FDS_PER_BATCH);
        self.files.iter().take(most).map(|file| file.as_fd()).collect()
    }

    fn next_frame(&self) -> Result<(Vec<u8>, u32), SessionError> {
        let count = u32::try_from(self.next_batch().len()).unwrap_or(u32::MAX);
        Ok((Frame::Fds { first: self.sent, count }.encode()?, count))
    }

    fn note_sent(&mut self, count: u32) {
        let first = usize::try_from(self.sent).unwrap_or(usize::MAX);
        self.sent = self.sent.saturating_add(count);
        let end = usize::try_from(self.sent).unwrap_or(usize::MAX);
        let blobs = self.response.blobs.get(first..end).unwrap_or_default();
        self.sent_bytes = blobs.iter().fold(self.sent_bytes, |sum, (_, size)| sum.saturating_add(*size));
        // A client that disconnects without an acknowledgement keeps the descriptors that it has received.
        let outcome = self.outcome.clone().with_bytes(self.sent_bytes);
        self.record.descriptors_sent(outcome.with("descriptors", self.sent));
        self.all_sent.inc_by(count.into());
        self.is_acknowledged = false;
        // The kernel has its own references now.
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
        .with_hint("end the programs that do not receive the descriptors they requested")
}
