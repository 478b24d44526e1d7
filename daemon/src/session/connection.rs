//! Frames on the daemon's side: asynchronous, and never waiting for ever on a peer.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::time::Duration;

use blobd_client::protocol::connection::{receive_message, send_message};
use blobd_client::protocol::frame::{Frame, FrameDecoder, FrameError};
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::time::timeout;

/// How long a peer may take to accept or to send what the protocol has it do next. One that is
/// slower loses its connection, so that descriptors in flight do not pile up.
const PEER_TIMEOUT: Duration = Duration::from_secs(10);

/// How much is received at once: a client's frames are short.
const RECEIVE_BYTES: usize = 4096;

/// As many as the kernel lets into one message: all are taken, so that none is closed on the way.
const MAX_FDS_PER_MESSAGE: usize = 253;

/// An upgraded connection.
#[derive(Debug)]
pub(crate) struct FrameStream {
    stream: UnixStream,
    decoder: FrameDecoder,
    fds: VecDeque<OwnedFd>,
    /// The most descriptors that the protocol has the peer send.
    max_fds: usize,
}

/// Why a session cannot go on. It is the peer's business; the daemon only closes.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SessionError {
    #[error("the peer has closed the connection")]
    Closed,
    #[error("the peer took longer than {} s", PEER_TIMEOUT.as_secs())]
    Slow,
    #[error("the peer sent {found}, {expected} expected")]
    Unexpected { found: String, expected: &'static str },
    #[error(transparent)]
    Frame(#[from] FrameError),
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl FrameStream {
    pub(crate) fn new(stream: UnixStream, max_fds: usize) -> Self {
        Self { stream, decoder: FrameDecoder::new(), fds: VecDeque::new(), max_fds }
    }

    /// The connection itself, for a process that receives a descriptor there in place of this one.
    pub(crate) fn connection(&self) -> io::Result<OwnedFd> {
        self.stream.as_fd().try_clone_to_owned()
    }

    /// Sends frames that are encoded already, with `fds` attached to the first byte.
    pub(crate) async fn send(&self, mut bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), SessionError> {
        let mut fds = fds;
        while !bytes.is_empty() {
            let send = self.stream.async_io(Interest::WRITABLE, || send_message(&self.stream, bytes, fds));
            let sent = timeout(PEER_TIMEOUT, send).await.map_err(|_elapsed| SessionError::Slow)??;
            bytes = bytes.get(sent..).unwrap_or_default();
            fds = &[];
        }
        Ok(())
    }

    /// Sends a short frame, with `fds` attached, if there is room for it now. The kernel takes so few
    /// bytes whole or not at all; were it otherwise, the peer would be too slow.
    pub(crate) fn try_send(&self, frame: &[u8], fds: &[BorrowedFd<'_>]) -> Result<bool, SessionError> {
        match send_message(&self.stream, frame, fds) {
            Ok(sent) if sent == frame.len() => Ok(true),
            Ok(_part) => Err(SessionError::Slow),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    pub(crate) async fn send_frame(&self, frame: &Frame) -> Result<(), SessionError> {
        self.send(&frame.encode()?, &[]).await
    }

    /// Waits for the next frame, but not for ever.
    pub(crate) async fn receive(&mut self) -> Result<Frame, SessionError> {
        timeout(PEER_TIMEOUT, self.next_frame()).await.map_err(|_elapsed| SessionError::Slow)?
    }

    /// The next frame, if all of it has come.
    pub(crate) fn try_receive(&mut self) -> Result<Option<Frame>, SessionError> {
        loop {
            if let Some(frame) = self.decoder.next_frame()? {
                return Ok(Some(frame));
            }
            let mut buffer = [0; RECEIVE_BYTES];
            match receive_message(&self.stream, &mut buffer, &mut self.fds, MAX_FDS_PER_MESSAGE) {
                Ok(received) => self.take_in(buffer.get(..received).unwrap_or_default())?,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// The descriptors that have come so far.
    pub(crate) fn take_fds(&mut self) -> VecDeque<OwnedFd> {
        std::mem::take(&mut self.fds)
    }

    /// Waits, for as long as it takes, until the peer closes the connection or breaks the
    /// protocol by sending anything more.
    pub(crate) async fn closed(&self) {
        let mut byte = [0];
        let mut fds = VecDeque::new();
        let receive = || receive_message(&self.stream, &mut byte, &mut fds, MAX_FDS_PER_MESSAGE);
        // Whatever comes, end, error or byte, ends the session.
        let _ = self.stream.async_io(Interest::READABLE, receive).await;
        close_elsewhere(fds);
    }

    async fn next_frame(&mut self) -> Result<Frame, SessionError> {
        let mut buffer = [0; RECEIVE_BYTES];
        loop {
            if let Some(frame) = self.decoder.next_frame()? {
                return Ok(frame);
            }
            let Self { stream, fds, .. } = self;
            let received = stream
                .async_io(Interest::READABLE, || {
                    receive_message(&*stream, &mut buffer, fds, MAX_FDS_PER_MESSAGE)
                })
                .await?;
            self.take_in(buffer.get(..received).unwrap_or_default())?;
        }
    }

    /// Takes what a message has brought; none means that the peer has closed.
    fn take_in(&mut self, bytes: &[u8]) -> Result<(), SessionError> {
        if self.fds.len() > self.max_fds {
            let found = format!("{} descriptors", self.fds.len());
            return Err(SessionError::Unexpected { found, expected: "fewer" });
        }
        if bytes.is_empty() {
            return Err(SessionError::Closed);
        }
        self.decoder.push(bytes);
        Ok(())
    }
}

impl Drop for FrameStream {
    fn drop(&mut self) {
        close_elsewhere(self.take_fds());
    }
}

/// Closing a descriptor may block for as long as the peer has arranged (a lingering socket, a
/// file system in user space), so it must not happen where all connections are served.
fn close_elsewhere(fds: VecDeque<OwnedFd>) {
    if !fds.is_empty() {
        tokio::task::spawn_blocking(move || drop(fds));
    }
}

/// Refuses a frame that the protocol does not have here.
pub(super) fn unexpected(frame: &Frame, expected: &'static str) -> SessionError {
    SessionError::Unexpected { found: format!("a frame {:?}", frame.kind()), expected }
}
