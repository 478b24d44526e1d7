//! Adapts a client's socket to hyper.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use hyper::rt::{Read, ReadBufCursor, Write};
use rustix::net::{Shutdown, shutdown};
use tokio::io::Interest;
use tokio::time::{Instant, Sleep, sleep};

use super::ClientSocket;

/// How long a client may receive none of the pending data. A slower client loses its connection, and with it the memory
/// of the response.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);

/// The slowest rate, in bytes per second, of responses that take longer: a client that receives a byte from time to
/// time must not keep the memory of a large response from others.
pub(crate) const MIN_BYTES_PER_SECOND: u32 = 128 << 10;

/// The size of the receive buffer: requests are short.
const RECEIVE_BYTES: usize = 8 << 10;

#[derive(Debug)]
pub(crate) struct HttpIo {
    socket: ClientSocket,
    blocked: Option<Blocked>,
    /// How long data may still wait for the client. Each byte that it receives prolongs this, up to [`WRITE_TIMEOUT`].
    patience: Duration,
    /// Whether the response consists of events, which a client may read as slowly as it likes, because few are in
    /// memory.
    sends_events: Arc<AtomicBool>,
}

#[derive(Debug)]
struct Blocked {
    since: Instant,
    deadline: Pin<Box<Sleep>>,
}

impl HttpIo {
    pub(crate) const fn new(socket: ClientSocket, sends_events: Arc<AtomicBool>) -> Self {
        Self { socket, blocked: None, patience: WRITE_TIMEOUT, sends_events }
    }

    pub(crate) fn into_socket(self) -> ClientSocket {
        self.socket
    }

    /// Receives into `buffer`; fails if descriptors are attached.
    fn try_receive(&self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.socket.is_stuck() {
            // No more descriptors are accepted until those of its user are closed.
            return Err(io::Error::other("descriptors of this user are still being closed"));
        }
        let mut fds = VecDeque::new();
        let socket = &self.socket;
        let received = socket.stream().try_io(Interest::READABLE, || socket.try_receive(buffer, &mut fds));
        if fds.is_empty() {
            return received;
        }
        let count = fds.len();
        socket.close(fds);
        Err(io::Error::other(format!("{count} descriptors attached to a request")))
    }

    fn poll_send(
        &mut self,
        context: &mut Context<'_>,
        send: impl Fn(&tokio::net::UnixStream) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        loop {
            match self.socket.stream().poll_write_ready(context) {
                Poll::Ready(ready) => ready?,
                Poll::Pending => {
                    let begin =
                        || Blocked { since: Instant::now(), deadline: Box::pin(sleep(self.patience)) };
                    let blocked = self.blocked.get_or_insert_with(begin);
                    ready!(blocked.deadline.as_mut().poll(context));
                    return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
                }
            }
            match send(self.socket.stream()) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                sent => {
                    let waited = self.blocked.take().map(|blocked| blocked.since.elapsed());
                    self.patience = match self.sends_events.load(Ordering::Relaxed) {
                        true => WRITE_TIMEOUT,
                        false => patience_after(self.patience, waited, sent.as_ref().map_or(0, |sent| *sent)),
                    };
                    return Poll::Ready(sent);
                }
            }
        }
    }
}

/// How long data may still wait after the client has received `sent` bytes.
fn patience_after(patience: Duration, waited: Option<Duration>, sent: usize) -> Duration {
    let rest = patience.saturating_sub(waited.unwrap_or_default());
    let earned = Duration::from_secs(1) * u32::try_from(sent).unwrap_or(u32::MAX) / MIN_BYTES_PER_SECOND;
    rest.saturating_add(earned).min(WRITE_TIMEOUT)
}

impl Read for HttpIo {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        mut target: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        let mut buffer = [0; RECEIVE_BYTES];
        let length = target.remaining().min(RECEIVE_BYTES);
        let buffer = buffer.get_mut(..length).unwrap_or_default();
        loop {
            ready!(self.socket.stream().poll_read_ready(context))?;
            match self.try_receive(buffer) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
                Ok(received) => {
                    target.put_slice(buffer.get(..received).unwrap_or_default());
                    return Poll::Ready(Ok(()));
                }
            }
        }
    }
}

impl Write for HttpIo {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_send(context, |stream| stream.try_write(bytes))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll_send(context, |stream| stream.try_write_vectored(parts))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(shutdown(self.socket.stream(), Shutdown::Write).map_err(Into::into))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn client_slower_than_the_minimum_rate_is_disconnected() {
        let second = Some(Duration::from_secs(1));
        let after = |seconds: u32, bytes| {
            (0..seconds).fold(WRITE_TIMEOUT, |patience, _| patience_after(patience, second, bytes))
        };
        let rate = usize::try_from(MIN_BYTES_PER_SECOND).unwrap();
        assert_eq!(after(1000, rate), WRITE_TIMEOUT);
        assert_eq!(after(10, 0), Duration::ZERO);
        assert!(after(11, 1) < Duration::from_millis(1), "a byte a second");
        assert!(after(11, rate / 2) > Duration::from_secs(4));
        assert!(after(20, rate / 2) < Duration::from_secs(1), "too little for the next second");
        assert_eq!(patience_after(Duration::ZERO, None, 1 << 30), WRITE_TIMEOUT, "no more than at the start");
    }
}
