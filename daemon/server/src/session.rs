//! Sessions on upgraded connections: frames with time limits. The connection is the lease, which ends when it closes.

// A request takes a thread only with its user's turn, see `clippy.toml`.
#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

mod import;
mod open;

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::time::Duration;

use blobd_client::protocol::connection::{is_too_many_in_flight, send_message};
use blobd_client::protocol::frame::{Frame, FrameDecoder, FrameError};
use rustix::net::{Shutdown, shutdown};
use tokio::io::Interest;
use tokio::time::{Instant, sleep, timeout};

pub(crate) use import::serve_import;
pub(crate) use open::serve_open;

use crate::permits::Permit;
use crate::socket::{ClientSocket, MIN_BYTES_PER_SECOND};
use crate::sys::unreceived_bytes;

/// How long a peer may take to accept data, or to send the next expected frame. A slower peer loses its
/// connection, so that descriptors in flight do not accumulate.
const PEER_TIMEOUT: Duration = Duration::from_secs(10);

/// The size of the receive buffer: frames of clients are short.
const RECEIVE_BYTES: usize = 4096;

/// Acknowledgements and announcements of descriptors are shorter.
const MAX_CLIENT_FRAME_BYTES: usize = 4 << 10;

/// The pause before descriptors are sent again that the kernel has refused because the daemon's user has too many in
/// flight. It doubles each time.
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(100);

/// A little less than the peer's limit, so that the error names the cause.
const IN_FLIGHT_TIMEOUT: Duration = Duration::from_secs(9);

/// How often the daemon checks whether a dropped peer has released its descriptors.
const RELEASE_INTERVAL: Duration = Duration::from_millis(250);

#[derive(Debug)]
pub(crate) struct FrameStream {
    socket: ClientSocket,
    decoder: FrameDecoder,
    fds: VecDeque<OwnedFd>,
    max_fds: usize,
}

/// The peer is the cause; the daemon only closes the connection.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SessionError {
    #[error("the peer has closed the connection")]
    Closed,
    #[error("the peer took longer than {} s", PEER_TIMEOUT.as_secs())]
    Slow,
    #[error("the daemon's user has too many descriptors in flight over Unix sockets")]
    TooManyInFlight,
    #[error("message from the peer: wrong kind: expected {expected}, found {found}")]
    Unexpected { found: String, expected: &'static str },
    #[error(transparent)]
    Frame(#[from] FrameError),
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl FrameStream {
    pub(crate) const fn new(socket: ClientSocket, max_fds: usize) -> Self {
        let decoder = FrameDecoder::with_limit(MAX_CLIENT_FRAME_BYTES);
        Self { socket, decoder, fds: VecDeque::new(), max_fds }
    }

    /// A duplicate of the connection, for a process that receives a descriptor from it.
    pub(crate) fn connection(&self) -> io::Result<OwnedFd> {
        self.socket.stream().as_fd().try_clone_to_owned()
    }

    /// Attaches `fds` to the first byte. The time limit is that of a response of this length.
    pub(crate) async fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), SessionError> {
        let seconds = bytes.len() as u64 / u64::from(MIN_BYTES_PER_SECOND);
        let limit = PEER_TIMEOUT.saturating_add(Duration::from_secs(seconds));
        timeout(limit, self.send_all(bytes, fds)).await.map_err(|_elapsed| SessionError::Slow)?
    }

    async fn send_all(&self, mut bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), SessionError> {
        let (mut fds, mut pause, start) = (fds, FIRST_PAUSE, Instant::now());
        let stream = self.socket.stream();
        while !bytes.is_empty() {
            let send = stream.async_io(Interest::WRITABLE, || send_message(stream, bytes, fds));
            match timeout(PEER_TIMEOUT, send).await.map_err(|_elapsed| SessionError::Slow)? {
                Ok(sent) => {
                    bytes = bytes.get(sent..).unwrap_or_default();
                    fds = &[];
                }
                Err(error) if is_too_many_in_flight(&error) && start.elapsed() < IN_FLIGHT_TIMEOUT => {
                    sleep(pause).await;
                    pause = (pause * 2).min(LONGEST_PAUSE);
                }
                Err(error) if is_too_many_in_flight(&error) => return Err(SessionError::TooManyInFlight),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Sends a short frame; false if the peer's buffer is full or too many descriptors are in flight. The kernel
    /// accepts so few bytes whole or not at all.
    pub(crate) fn try_send(&self, frame: &[u8], fds: &[BorrowedFd<'_>]) -> Result<bool, SessionError> {
        match send_message(self.socket.stream(), frame, fds) {
            Ok(sent) if sent == frame.len() => Ok(true),
            Ok(_part) => Err(SessionError::Slow),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock || is_too_many_in_flight(&error) => {
                Ok(false)
            }
            Err(error) => Err(error.into()),
        }
    }

    pub(crate) async fn send_frame(&self, frame: &Frame) -> Result<(), SessionError> {
        self.send(&frame.encode()?, &[]).await
    }

    pub(crate) async fn receive(&mut self) -> Result<Frame, SessionError> {
        timeout(PEER_TIMEOUT, self.next_frame()).await.map_err(|_elapsed| SessionError::Slow)?
    }

    pub(crate) fn try_receive(&mut self) -> Result<Option<Frame>, SessionError> {
        loop {
            if let Some(frame) = self.decoder.next_frame()? {
                return Ok(Some(frame));
            }
            let mut buffer = [0; RECEIVE_BYTES];
            match self.socket.try_receive(&mut buffer, &mut self.fds) {
                Ok(received) => self.process(buffer.get(..received).unwrap_or_default())?,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(error) => return Err(error.into()),
            }
        }
    }

    pub(crate) fn take_fds(&mut self) -> VecDeque<OwnedFd> {
        std::mem::take(&mut self.fds)
    }

    /// Waits without a time limit until the peer closes the connection or sends anything, which breaks the
    /// protocol.
    pub(crate) async fn closed(&self) {
        let mut byte = [0];
        let mut fds = VecDeque::new();
        let receive = || self.socket.try_receive(&mut byte, &mut fds);
        // An end, an error or a byte: each ends the session.
        let _ = self.socket.stream().async_io(Interest::READABLE, receive).await;
        self.socket.close(fds);
    }

    /// Drops a peer that has not received all descriptors, and keeps `in_flight` until the kernel no longer
    /// counts them. They stay in the peer's queue, and count as sent by the daemon's user, until the peer
    /// receives them or closes its end; closing the daemon's end does not remove them.
    pub(crate) async fn drain(self, in_flight: Option<Permit>) {
        // Fails only if the peer has closed its end.
        let _ = shutdown(self.socket.stream(), Shutdown::Both);
        while in_flight.is_some() && self.has_unreceived() {
            sleep(RELEASE_INTERVAL).await;
        }
    }

    fn has_unreceived(&self) -> bool {
        unreceived_bytes(self.socket.stream()).is_ok_and(|bytes| bytes > 0)
    }

    async fn next_frame(&mut self) -> Result<Frame, SessionError> {
        let mut buffer = [0; RECEIVE_BYTES];
        loop {
            if let Some(frame) = self.decoder.next_frame()? {
                return Ok(frame);
            }
            let Self { socket, fds, .. } = self;
            let receive = || socket.try_receive(&mut buffer, fds);
            let received = socket.stream().async_io(Interest::READABLE, receive).await?;
            self.process(buffer.get(..received).unwrap_or_default())?;
        }
    }

    /// No bytes mean that the peer has closed.
    fn process(&mut self, bytes: &[u8]) -> Result<(), SessionError> {
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
        let fds = self.take_fds();
        self.socket.close(fds);
    }
}

fn unexpected(frame: &Frame, expected: &'static str) -> SessionError {
    SessionError::Unexpected { found: format!("a frame {:?}", frame.kind()), expected }
}
