//! Frames on the daemon's side: asynchronous, and never waiting for ever on a peer.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::time::Duration;

use blobd_client::protocol::connection::{is_too_many_in_flight, send_message};
use blobd_client::protocol::frame::{Frame, FrameDecoder, FrameError};
use rustix::net::{Shutdown, shutdown};
use tokio::io::Interest;
use tokio::time::{Instant, sleep, timeout};

use crate::permits::Permit;
use crate::socket::ClientSocket;
use crate::sys::unreceived_bytes;

/// How long a peer may take to accept or to send what the protocol has it do next. One that is
/// slower loses its connection, so that descriptors in flight do not pile up.
const PEER_TIMEOUT: Duration = Duration::from_secs(10);

/// How much is received at once: a client's frames are short.
const RECEIVE_BYTES: usize = 4096;

/// The longest frame of a client: acknowledgements and announcements of descriptors are shorter.
const MAX_CLIENT_FRAME_BYTES: usize = 4 << 10;

/// The pauses before descriptors are sent once more that the kernel did not take because the daemon's user
/// has too many in flight: from the first on twice as long each.
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(100);

/// How often the daemon looks whether a peer that it has given up has let go of its descriptors.
const RELEASE_INTERVAL: Duration = Duration::from_millis(250);

/// An upgraded connection.
#[derive(Debug)]
pub(crate) struct FrameStream {
    socket: ClientSocket,
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
    #[error("the daemon's user has too many descriptors in flight over Unix sockets")]
    TooManyInFlight,
    #[error("the peer sent {found}, {expected} expected")]
    Unexpected { found: String, expected: &'static str },
    #[error(transparent)]
    Frame(#[from] FrameError),
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Whether a batch of descriptors went out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sent {
    Yes,
    /// The peer has no room for it now, or too many descriptors are in flight.
    NotNow,
}

impl FrameStream {
    pub(crate) const fn new(socket: ClientSocket, max_fds: usize) -> Self {
        let decoder = FrameDecoder::with_limit(MAX_CLIENT_FRAME_BYTES);
        Self { socket, decoder, fds: VecDeque::new(), max_fds }
    }

    /// The connection itself, for a process that receives a descriptor there in place of this one.
    pub(crate) fn connection(&self) -> io::Result<OwnedFd> {
        self.socket.stream().as_fd().try_clone_to_owned()
    }

    /// Sends frames that are encoded already, with `fds` attached to the first byte.
    pub(crate) async fn send(&self, mut bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), SessionError> {
        let (mut fds, mut pause, start) = (fds, FIRST_PAUSE, Instant::now());
        let stream = self.socket.stream();
        while !bytes.is_empty() {
            let send = stream.async_io(Interest::WRITABLE, || send_message(stream, bytes, fds));
            match timeout(PEER_TIMEOUT, send).await.map_err(|_elapsed| SessionError::Slow)? {
                Ok(sent) => {
                    bytes = bytes.get(sent..).unwrap_or_default();
                    fds = &[];
                }
                Err(error) if is_too_many_in_flight(&error) && start.elapsed() < PEER_TIMEOUT => {
                    sleep(pause).await;
                    pause = (pause * 2).min(LONGEST_PAUSE);
                }
                Err(error) if is_too_many_in_flight(&error) => return Err(SessionError::TooManyInFlight),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Sends a short frame, with `fds` attached, if there is room for it now. The kernel takes so few
    /// bytes whole or not at all; were it otherwise, the peer would be too slow.
    pub(crate) fn try_send(&self, frame: &[u8], fds: &[BorrowedFd<'_>]) -> Result<Sent, SessionError> {
        match send_message(self.socket.stream(), frame, fds) {
            Ok(sent) if sent == frame.len() => Ok(Sent::Yes),
            Ok(_part) => Err(SessionError::Slow),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock || is_too_many_in_flight(&error) => {
                Ok(Sent::NotNow)
            }
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
            match self.socket.try_receive(&mut buffer, &mut self.fds) {
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
        let receive = || self.socket.try_receive(&mut byte, &mut fds);
        // Whatever comes, end, error or byte, ends the session.
        let _ = self.socket.stream().async_io(Interest::READABLE, receive).await;
        self.socket.close(fds);
    }

    /// Gives up a peer that has not taken all descriptors, and keeps `in_flight` until the kernel counts
    /// them no more. They stay in the peer's queue, and count as sent by the daemon's user, until the peer
    /// receives them or closes its end: closing the daemon's end does not take them back.
    pub(crate) async fn give_up(self, in_flight: Option<Permit>) {
        // Fails only if the peer has gone.
        let _ = shutdown(self.socket.stream(), Shutdown::Both);
        while in_flight.is_some() && self.has_unreceived() {
            sleep(RELEASE_INTERVAL).await;
        }
    }

    /// Whether the peer has not received all that was sent.
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
        let fds = self.take_fds();
        self.socket.close(fds);
    }
}

/// Refuses a frame that the protocol does not have here.
pub(super) fn unexpected(frame: &Frame, expected: &'static str) -> SessionError {
    SessionError::Unexpected { found: format!("a frame {:?}", frame.kind()), expected }
}
