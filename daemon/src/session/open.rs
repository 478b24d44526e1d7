//! An open model: descriptors go out in acknowledged batches, then the connection is the lease.

use std::fs::File;
use std::mem::take;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::Arc;

use blobd_client::protocol::MAX_FDS_PER_BATCH;
use blobd_client::protocol::frame::Frame;
use blobd_store_format::digest::Digest;

use super::connection::{FrameStream, SessionError, unexpected};
use super::peer::Peer;
use crate::gc;
use crate::ops::{self, Located, OpError};
use crate::state::Daemon;

/// Serves one open model until its client goes, then frees what only it still held.
pub(crate) async fn serve_open(daemon: Arc<Daemon>, stream: FrameStream, peer: Peer, mut located: Located) {
    let model = located.reference.clone();
    tracing::debug!("{}: opens {}", peer.description(), model.short());
    if let Err(error) = hold(&daemon, stream, &peer, &mut located).await {
        tracing::info!("{}: {}: {error}", peer.description(), model.short());
    }
    // A collection may have the table of leases while it deletes a file: no other session waits.
    let end = move |daemon: &Daemon| {
        drop(located);
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
    mut stream: FrameStream,
    peer: &Peer,
    located: &mut Located,
) -> Result<(), SessionError> {
    let (blobs, first_files) = (take(&mut located.blobs), take(&mut located.first_files));
    let bytes = blobs.iter().fold(0, |sum: u64, (_, size)| sum.saturating_add(*size));
    let mut answer = Frame::Open(located.head.clone()).encode()?;
    answer.append(&mut located.tables);
    stream.send(&answer, &[]).await?;
    drop(answer);
    if let Err(error) = send_blobs(daemon, &mut stream, blobs, first_files).await {
        // Best effort: if the peer is the reason, it does not listen.
        if let SendError::Ours(error) = &error {
            let _ = stream.send_frame(&Frame::Error(error.body())).await;
        }
        return error.into_session();
    }
    let _listed = daemon.sessions.begin(peer, located.reference.clone(), bytes);
    stream.closed().await;
    Ok(())
}

enum SendError {
    Ours(OpError),
    Theirs(SessionError),
}

impl SendError {
    fn into_session(self) -> Result<(), SessionError> {
        match self {
            Self::Theirs(error) => Err(error),
            Self::Ours(error) => Err(std::io::Error::other(error).into()),
        }
    }
}

/// Sends all descriptors; while one batch waits for its acknowledgement, the next is opened.
async fn send_blobs(
    daemon: &Arc<Daemon>,
    stream: &mut FrameStream,
    blobs: Vec<(Digest, u64)>,
    mut files: Vec<File>,
) -> Result<(), SendError> {
    let mut batches = blobs.chunks(MAX_FDS_PER_BATCH).map(<[_]>::to_vec).skip(1);
    let mut sent = 0;
    while !files.is_empty() {
        let batch = send_batch(stream, files, &mut sent);
        let next = open_batch(daemon, batches.next().unwrap_or_default());
        let (acknowledged, next) = tokio::join!(batch, next);
        acknowledged.map_err(SendError::Theirs)?;
        files = next?;
    }
    Ok(())
}

async fn open_batch(daemon: &Arc<Daemon>, batch: Vec<(Digest, u64)>) -> Result<Vec<File>, SendError> {
    if batch.is_empty() {
        return Ok(Vec::new());
    }
    let open = move |daemon: &Daemon| ops::open_blobs(&daemon.store, &batch);
    daemon.blocking(open).await.map_err(SendError::Ours)
}

/// Sends one batch and waits until the peer has taken it: descriptors in flight count against
/// the daemon's user, and one peer must not use up what all need.
async fn send_batch(stream: &mut FrameStream, files: Vec<File>, sent: &mut u32) -> Result<(), SessionError> {
    let count = u32::try_from(files.len()).unwrap_or(u32::MAX);
    let fds: Vec<BorrowedFd<'_>> = files.iter().map(|file| file.as_fd()).collect();
    stream.send(&Frame::Fds { first: *sent, count }.encode()?, &fds).await?;
    *sent = sent.saturating_add(count);
    // On their way they are the kernel's; closing ours takes time that the peer now uses.
    drop(files);
    match stream.receive().await? {
        Frame::Ack { received } if received == *sent => Ok(()),
        frame => Err(unexpected(&frame, "an acknowledgement of all descriptors")),
    }
}
