//! Sends and receives bytes and descriptors on a Unix socket (`SCM_RIGHTS`).
//!
//! [`send_message`] and [`receive_message`] make one system call each, on blocking and non-blocking
//! sockets; the daemon calls them in its runtime's readiness loop. [`Connection`] is blocking and
//! exchanges [`Frame`]s. Descriptors arrive in the order in which they were sent. The kernel
//! delivers them with the byte that they were attached to, and never those of two messages in one
//! call.

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::{Errno, retry_on_intr};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use super::MAX_FDS_PER_BATCH;
use super::frame::{Frame, FrameDecoder, FrameError};

/// Sends `bytes` with `fds` attached to the first byte, in one system call, and returns how many
/// bytes were sent: at least one, perhaps not all. If any byte was sent, all descriptors were; the
/// caller sends the remaining bytes without them.
///
/// If `bytes` is empty, nothing is sent.
///
/// # Errors
/// Those of `sendmsg`, with [`io::ErrorKind::WouldBlock`] on a socket that is non-blocking or has
/// a timeout; [`io::ErrorKind::InvalidInput`] for more than [`MAX_FDS_PER_BATCH`] descriptors.
/// If the peer has closed, [`io::ErrorKind::BrokenPipe`], never a signal.
pub fn send_message(socket: impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS_PER_BATCH))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let attached = fds.is_empty() || control.push(SendAncillaryMessage::ScmRights(fds));
    if !attached || fds.len() > MAX_FDS_PER_BATCH {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!(
                "message: too many descriptors: expected at most {MAX_FDS_PER_BATCH}, found {}",
                fds.len()
            ),
        ));
    }
    if bytes.is_empty() {
        return Ok(0);
    }
    let bytes = [IoSlice::new(bytes)];
    Ok(retry_on_intr(|| sendmsg(&socket, &bytes, &mut control, SendFlags::NOSIGNAL))?)
}

/// Receives bytes into `buffer` and descriptors into `fds`, in one system call, and returns the
/// number of bytes: 0 when the peer has closed (or `buffer` is empty).
///
/// `fds` never grows beyond `max_fds`; surplus descriptors are closed. All descriptors are
/// close-on-exec.
///
/// # Errors
/// Those of `recvmsg`, with [`io::ErrorKind::WouldBlock`] on a socket that is non-blocking or has
/// a timeout. An error that wraps [`FdsLost`] when this process could not receive all descriptors;
/// the connection cannot be used any further.
pub fn receive_message(
    socket: impl AsFd,
    buffer: &mut [u8],
    fds: &mut VecDeque<OwnedFd>,
    max_fds: usize,
) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(KERNEL_MAX_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut bytes = [IoSliceMut::new(buffer)];
    let received = retry_on_intr(|| recvmsg(&socket, &mut bytes, &mut control, RecvFlags::CMSG_CLOEXEC))?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received_fds) = message {
            let free = max_fds.saturating_sub(fds.len());
            fds.extend(received_fds.take(free));
        }
    }
    if received.flags.contains(ReturnFlags::CTRUNC) {
        return Err(io::Error::other(FdsLost));
    }
    Ok(received.bytes)
}

/// Whether `sendmsg` failed because the sending user has too many descriptors in flight: sent over any Unix
/// socket by any of the user's processes, and not yet received. The kernel allows as many as the sending
/// process may have open files. The error is temporary: it ends when the receivers receive them.
pub fn is_too_many_in_flight(error: &io::Error) -> bool {
    error.raw_os_error() == Some(Errno::TOOMANYREFS.raw_os_error())
}

/// The message for an error for which [`is_too_many_in_flight`] holds.
pub(crate) const TOO_MANY_IN_FLIGHT: &str = "this user has too many descriptors in flight over Unix sockets";

/// The kernel discarded descriptors because this process has reached its limit of open files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("descriptors lost: this process has too many open files; raise `ulimit -n`")]
pub struct FdsLost;

/// A blocking connection that exchanges frames.
#[derive(Debug)]
pub struct Connection {
    stream: UnixStream,
    decoder: FrameDecoder,
    fds: VecDeque<OwnedFd>,
    buffer: Box<[u8]>,
}

impl Connection {
    /// A connection on `stream`, from which nothing has been received.
    pub fn new(stream: UnixStream) -> Self {
        Self::resume(stream, &[], VecDeque::new())
    }

    /// A connection on `stream`, from which `bytes` and `fds` have already been received.
    pub fn resume(stream: UnixStream, bytes: &[u8], fds: VecDeque<OwnedFd>) -> Self {
        let mut decoder = FrameDecoder::new();
        decoder.push(bytes);
        let buffer = vec![0; RECEIVE_BYTES].into_boxed_slice();
        Self { stream, decoder, fds, buffer }
    }

    /// Sends a frame, with `fds` attached to its first byte.
    pub fn send(&mut self, frame: &Frame, fds: &[BorrowedFd<'_>]) -> Result<(), ConnectionError> {
        Ok(send_all(&self.stream, &frame.encode()?, fds)?)
    }

    /// Sends frames that are encoded already.
    pub fn send_bytes(&mut self, frames: &[u8]) -> Result<(), ConnectionError> {
        Ok(send_all(&self.stream, frames, &[])?)
    }

    /// Waits for the next frame.
    ///
    /// # Errors
    /// [`ConnectionError`] when the peer closes the connection, sends something that is not a frame,
    /// or sends nothing for longer than the timeout.
    pub fn receive(&mut self) -> Result<Frame, ConnectionError> {
        loop {
            if let Some(frame) = self.decoder.next_frame()? {
                return Ok(frame);
            }
            match receive_message(&self.stream, &mut self.buffer, &mut self.fds, MAX_FDS_PER_BATCH)? {
                0 => return Err(ConnectionError::Closed { inside_frame: self.decoder.is_inside_frame() }),
                count => self.decoder.push(self.buffer.get(..count).unwrap_or_default()),
            }
        }
    }

    /// Whether bytes have arrived that [`receive`](Self::receive) has not returned yet. False after the
    /// peer has closed and all its bytes have been received.
    pub fn has_more(&self) -> bool {
        self.decoder.is_inside_frame()
            || rustix::io::ioctl_fionread(&self.stream).is_ok_and(|count| count > 0)
    }

    /// Returns the descriptors received with the last `fds` frame.
    ///
    /// # Errors
    /// [`ConnectionError::FdCount`] when there are more or fewer than the frame's `count`; all of them
    /// are then closed.
    pub fn take_fds(&mut self, count: u32) -> Result<VecDeque<OwnedFd>, ConnectionError> {
        let received = std::mem::take(&mut self.fds);
        if u32::try_from(received.len()) != Ok(count) {
            return Err(ConnectionError::FdCount { found: received.len(), expected: count });
        }
        Ok(received)
    }

    /// The socket. Data that was received but not yet returned is dropped.
    pub fn into_stream(self) -> UnixStream {
        self.stream
    }
}

/// An error that ends the exchange of frames.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what the variants and their fields are")]
#[non_exhaustive]
pub enum ConnectionError {
    /// The peer closed the connection.
    #[error("connection: closed by the peer{}", if *.inside_frame { " in the middle of a frame" } else { "" })]
    Closed { inside_frame: bool },
    #[error("connection: timed out waiting for the peer")]
    TimedOut,
    #[error("connection: wrong number of descriptors with a frame: expected {expected}, found {found}")]
    FdCount { found: usize, expected: u32 },
    /// The received bytes are not a frame, or a frame to be sent is too long.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// The user has too many descriptors in flight, so no more can be sent.
    #[error("connection: {TOO_MANY_IN_FLIGHT}")]
    TooManyInFlight,
    #[error("connection: {0}")]
    Io(io::Error),
}

impl From<io::Error> for ConnectionError {
    fn from(error: io::Error) -> Self {
        if is_too_many_in_flight(&error) {
            return Self::TooManyInFlight;
        }
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Self::TimedOut,
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => {
                Self::Closed { inside_frame: false }
            }
            _ => Self::Io(error),
        }
    }
}

/// Sends all of `bytes` on a blocking socket, with `fds` attached to the first byte. While the user has
/// too many descriptors in flight, it retries for up to [`IN_FLIGHT_TIMEOUT`].
///
/// # Errors
/// Those of [`send_message`]; one for which [`is_too_many_in_flight`] holds after the last retry.
pub fn send_all(stream: &UnixStream, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let (start, mut pause) = (Instant::now(), FIRST_PAUSE);
    let mut sent = loop {
        match send_message(stream, bytes, fds) {
            Err(error) if is_too_many_in_flight(&error) && start.elapsed() < IN_FLIGHT_TIMEOUT => {
                thread::sleep(pause);
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
            sent => break sent?,
        }
    };
    while let Some(rest) = bytes.get(sent..).filter(|rest| !rest.is_empty()) {
        sent += send_message(stream, rest, &[])?;
    }
    Ok(())
}

/// How long sending descriptors is retried while the user has too many in flight. It is shorter than the
/// ten seconds after which the daemon closes the connection of a client that receives nothing.
pub const IN_FLIGHT_TIMEOUT: Duration = Duration::from_secs(8);

/// The pause before the first retry; each further pause is twice as long, up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(100);

/// The most descriptors that the kernel puts into one message (its `SCM_MAX_FD`). The receive buffer
/// has space for all of them, so truncation can only mean this process's limit of open files.
const KERNEL_MAX_FDS: usize = 253;

/// The most bytes received in one system call; the tables of an ordinary model need one or two calls.
const RECEIVE_BYTES: usize = 64 << 10;

#[cfg(test)]
mod tests;
