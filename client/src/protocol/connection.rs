//! Sends and receives bytes and descriptors on a Unix socket (`SCM_RIGHTS`).
//!
//! [`send_message`] and [`receive_message`] are single system calls for both ends, blocking or
//! not; the daemon wraps them in its runtime's readiness loop. [`Connection`] is the blocking
//! form that speaks in [`Frame`]s. Descriptors arrive in the order in which they were sent; the
//! kernel never delivers those of two messages in one call, and delivers them with the first
//! byte they were attached to.

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

/// Sends `bytes` with `fds` attached to the first of them, in one system call, and returns how
/// many bytes went out: at least one, perhaps not all. Once anything went out, all descriptors
/// did; the caller sends the rest without them.
///
/// Without bytes nothing is sent.
///
/// # Errors
/// Those of `sendmsg`, with [`io::ErrorKind::WouldBlock`] on a socket that does not block or has
/// a timeout; [`io::ErrorKind::InvalidInput`] for more than [`MAX_FDS_PER_BATCH`] descriptors.
/// A peer that is gone is [`io::ErrorKind::BrokenPipe`], never a signal.
pub fn send_message(socket: impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS_PER_BATCH))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let attached = fds.is_empty() || control.push(SendAncillaryMessage::ScmRights(fds));
    if !attached || fds.len() > MAX_FDS_PER_BATCH {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("{} descriptors in one message, at most {MAX_FDS_PER_BATCH} allowed", fds.len()),
        ));
    }
    if bytes.is_empty() {
        return Ok(0);
    }
    let bytes = [IoSlice::new(bytes)];
    Ok(retry_on_intr(|| sendmsg(&socket, &bytes, &mut control, SendFlags::NOSIGNAL))?)
}

/// Receives bytes into `buffer` and descriptors into `fds`, in one system call, and returns how
/// many bytes came: 0 when the peer has closed (or `buffer` is empty).
///
/// The queue never grows beyond `max_fds`; surplus descriptors are closed. All
/// descriptors are close-on-exec.
///
/// # Errors
/// Those of `recvmsg`, with [`io::ErrorKind::WouldBlock`] on a socket that does not block or has
/// a timeout. An error around [`FdsLost`] when this process could not take all descriptors; the
/// connection is of no further use then.
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
        if let RecvAncillaryMessage::ScmRights(arrived) = message {
            let free = max_fds.saturating_sub(fds.len());
            fds.extend(arrived.take(free));
        }
    }
    if received.flags.contains(ReturnFlags::CTRUNC) {
        return Err(io::Error::other(FdsLost));
    }
    Ok(received.bytes)
}

/// Whether `sendmsg` failed because the sending user has too many descriptors in flight: sent over any Unix
/// socket by any of the user's processes, and not yet received. The kernel allows as many as the sending
/// process may have files open. It passes when others receive theirs.
#[must_use]
pub fn is_too_many_in_flight(error: &io::Error) -> bool {
    error.raw_os_error() == Some(Errno::TOOMANYREFS.raw_os_error())
}

/// What [`is_too_many_in_flight`] means, for messages.
pub(crate) const TOO_MANY_IN_FLIGHT: &str = "this user has too many descriptors in flight over Unix sockets";

/// Descriptors were sent that this process could not take: it has as many open as it may.
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
    /// A connection on `stream`.
    #[must_use]
    pub fn new(stream: UnixStream) -> Self {
        Self::resume(stream, &[], VecDeque::new())
    }

    /// A connection on `stream`, from which `bytes` and `fds` have already been received.
    #[must_use]
    pub fn resume(stream: UnixStream, bytes: &[u8], fds: VecDeque<OwnedFd>) -> Self {
        let mut decoder = FrameDecoder::new();
        decoder.push(bytes);
        let buffer = vec![0; RECEIVE_BYTES].into_boxed_slice();
        Self { stream, decoder, fds, buffer }
    }

    /// How long to wait for the peer to take or send bytes; for ever if `None`.
    ///
    /// # Errors
    /// Those of the system call; a duration of zero is refused.
    pub fn set_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        self.stream.set_read_timeout(timeout)?;
        self.stream.set_write_timeout(timeout)
    }

    /// Sends a frame, with `fds` attached to its first byte.
    ///
    /// # Errors
    /// [`ConnectionError`] when the frame is too long or the peer does not take it.
    pub fn send(&mut self, frame: &Frame, fds: &[BorrowedFd<'_>]) -> Result<(), ConnectionError> {
        Ok(send_all(&self.stream, &frame.encode()?, fds)?)
    }

    /// Sends frames that are encoded already.
    ///
    /// # Errors
    /// [`ConnectionError`] when the peer does not take them.
    pub fn send_bytes(&mut self, frames: &[u8]) -> Result<(), ConnectionError> {
        Ok(send_all(&self.stream, frames, &[])?)
    }

    /// Waits for the next frame.
    ///
    /// # Errors
    /// [`ConnectionError`] when the peer closes first, sends something else, or is silent for
    /// longer than the timeout.
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

    /// Whether [`receive`](Self::receive) would find bytes at once. A peer that has closed sends none.
    #[must_use]
    pub fn has_more(&self) -> bool {
        self.decoder.is_inside_frame()
            || rustix::io::ioctl_fionread(&self.stream).is_ok_and(|count| count > 0)
    }

    /// Takes the descriptors that came with the `fds` frame just received.
    ///
    /// # Errors
    /// [`ConnectionError::FdCount`] when there are more or fewer than the frame's `count`; all
    /// are closed then.
    pub fn take_fds(&mut self, count: u32) -> Result<VecDeque<OwnedFd>, ConnectionError> {
        let arrived = std::mem::take(&mut self.fds);
        if u32::try_from(arrived.len()) != Ok(count) {
            return Err(ConnectionError::FdCount { found: arrived.len(), expected: count });
        }
        Ok(arrived)
    }

    /// The socket, when no more frames are expected. Received but unread data is dropped.
    #[must_use]
    pub fn into_stream(self) -> UnixStream {
        self.stream
    }
}

/// Why frames cannot be exchanged any further.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectionError {
    /// The peer closed the connection.
    #[error("connection: closed by the peer{}", if *.inside_frame { " in the middle of a frame" } else { "" })]
    Closed {
        /// Whether part of a frame had arrived.
        inside_frame: bool,
    },
    /// The peer was silent, or took nothing, for longer than the timeout.
    #[error("connection: the peer is silent")]
    TimedOut,
    /// An `fds` frame came with another number of descriptors than it says.
    #[error("connection: {found} descriptors came with a frame that promises {expected}")]
    FdCount {
        /// How many came.
        found: usize,
        /// How many the frame says.
        expected: u32,
    },
    /// What came is no frame, or what was to be sent does not fit one.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// The user has too many descriptors in flight for one more.
    #[error("connection: {TOO_MANY_IN_FLIGHT}")]
    TooManyInFlight,
    /// The socket failed.
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

/// Sends all of `bytes` on a blocking socket, with `fds` attached to the first of them. While the user
/// has too many descriptors in flight it waits, up to [`IN_FLIGHT_PATIENCE`].
///
/// # Errors
/// Those of [`send_message`]; one for which [`is_too_many_in_flight`] holds when waiting did not help.
pub fn send_all(stream: &UnixStream, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let (start, mut pause) = (Instant::now(), FIRST_PAUSE);
    let mut sent = loop {
        match send_message(stream, bytes, fds) {
            Err(error) if is_too_many_in_flight(&error) && start.elapsed() < IN_FLIGHT_PATIENCE => {
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

/// How long descriptors wait for others of the same user to be received. Those who are slower than ten
/// seconds lose their connection to the daemon.
pub const IN_FLIGHT_PATIENCE: Duration = Duration::from_secs(8);

/// The first pause before descriptors are sent again; each is twice as long as the one before.
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(100);

/// The most descriptors that the kernel puts into one message (its `SCM_MAX_FD`). Room for all
/// of them makes sure that truncation means this process's own limit.
const KERNEL_MAX_FDS: usize = 253;

/// The receive size of one system call; the tables of an ordinary model take one or two.
const RECEIVE_BYTES: usize = 64 << 10;

#[cfg(test)]
mod tests;
