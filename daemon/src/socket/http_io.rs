//! Adapts a client's socket to hyper.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use hyper::rt::{Read, ReadBufCursor, Write};
use rustix::net::{Shutdown, shutdown};
use tokio::io::Interest;
use tokio::time::{Sleep, sleep};

use super::ClientSocket;

/// How long a client may receive nothing of pending data. A slower client loses its connection, and with it
/// the memory of the response.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);

/// The size of the receive buffer: requests are short.
const RECEIVE_BYTES: usize = 8 << 10;

#[derive(Debug)]
pub(crate) struct HttpIo {
    socket: ClientSocket,
    /// Set while data waits for the client.
    write_deadline: Option<Pin<Box<Sleep>>>,
}

impl HttpIo {
    pub(crate) const fn new(socket: ClientSocket) -> Self {
        Self { socket, write_deadline: None }
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

    /// Writes when the client's buffer has space, with a time limit.
    fn poll_send(
        &mut self,
        context: &mut Context<'_>,
        send: impl Fn(&tokio::net::UnixStream) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        loop {
            match self.socket.stream().poll_write_ready(context) {
                Poll::Ready(ready) => ready?,
                Poll::Pending => {
                    let deadline = self.write_deadline.get_or_insert_with(|| Box::pin(sleep(WRITE_TIMEOUT)));
                    ready!(deadline.as_mut().poll(context));
                    return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
                }
            }
            match send(self.socket.stream()) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                sent => {
                    self.write_deadline = None;
                    return Poll::Ready(sent);
                }
            }
        }
    }
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
