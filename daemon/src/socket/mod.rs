//! One client's end of the Unix socket, while it speaks HTTP and after it has switched to frames.
//!
//! Closing a descriptor can block for as long as whoever made it has arranged: a TCP socket that lingers
//! over unsent data, a file of a file system in user space. Clients can attach descriptors to any byte
//! they send, and the kernel closes those that `read` and `recv` pass over in the thread that calls them.
//! So everything is received with `recvmsg`, and what arrives unasked is closed by the [`Closer`]. So is a
//! socket whose queue may hold descriptors that were never received. Where the kernel can, it refuses
//! descriptors altogether until the protocol asks for one.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use blobd_client::protocol::connection::receive_message;
use tokio::net::UnixStream;

use crate::admission::ConnectionPermit;
use crate::sys::set_takes_descriptors;

mod closer;
mod http_io;
mod listener;

pub(crate) use closer::Closer;
pub(crate) use http_io::HttpIo;
pub(crate) use listener::Socket;

/// As many as the kernel lets into one message: all are taken, so that it closes none on the way.
const MAX_FDS_PER_MESSAGE: usize = 253;

/// The connection to one client. It counts as one until it is closed.
#[derive(Clone, Debug)]
pub(crate) struct ClientSocket(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    /// Taken when it is closed.
    stream: Option<UnixStream>,
    uid: u32,
    /// Whether the queue of what was not received yet may hold descriptors.
    may_hold_descriptors: AtomicBool,
    closer: Arc<Closer>,
    permit: Option<ConnectionPermit>,
}

impl ClientSocket {
    /// Takes over a connection that speaks HTTP, in which descriptors have no place.
    pub(crate) fn new(
        stream: UnixStream,
        uid: u32,
        permit: Option<ConnectionPermit>,
        closer: &Arc<Closer>,
    ) -> Self {
        let refuses = set_takes_descriptors(&stream, false).is_ok();
        Self(Arc::new(Inner {
            stream: Some(stream),
            uid,
            may_hold_descriptors: AtomicBool::new(!refuses),
            closer: Arc::clone(closer),
            permit,
        }))
    }

    /// From now on the client may attach descriptors.
    pub(crate) fn take_descriptors(&self) {
        self.0.may_hold_descriptors.store(true, Ordering::Relaxed);
        // Fails only where the kernel never refused any.
        let _ = set_takes_descriptors(self.stream(), true);
    }

    /// The socket.
    ///
    /// # Panics
    /// Never: it is taken out only when nobody can call this any more.
    pub(crate) fn stream(&self) -> &UnixStream {
        #[allow(clippy::expect_used, reason = "an invariant of this type")]
        self.0.stream.as_ref().expect("open until the last clone is dropped")
    }

    /// Receives what is there, with its descriptors.
    ///
    /// # Errors
    /// As for [`receive_message`].
    pub(crate) fn try_receive(&self, buffer: &mut [u8], fds: &mut VecDeque<OwnedFd>) -> io::Result<usize> {
        receive_message(self.stream(), buffer, fds, MAX_FDS_PER_MESSAGE)
    }

    /// Closes descriptors that the client has sent, on a thread that may block.
    pub(crate) fn close(&self, fds: VecDeque<OwnedFd>) {
        if !fds.is_empty() {
            self.0.closer.close(self.0.uid, fds);
        }
    }

    /// Whether descriptors of this client's user wait to be closed for longer than closing takes.
    pub(crate) fn is_stuck(&self) -> bool {
        self.0.closer.is_stuck(self.0.uid)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if *self.may_hold_descriptors.get_mut() {
            self.closer.close(self.uid, (self.stream.take(), self.permit.take()));
        }
    }
}
