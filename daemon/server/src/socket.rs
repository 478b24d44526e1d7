//! The connection to one client, while it uses HTTP and after the upgrade to frames.
//!
//! Closing a descriptor can block for as long as its creator has arranged: a TCP socket that lingers over
//! unsent data, a file of a FUSE file system. Clients can attach descriptors to any byte they send, and the
//! kernel closes those that `read` and `recv` skip in the thread that calls them. So everything is received
//! with `recvmsg`, and the [`Closer`] closes descriptors that were not expected, and sockets whose queue
//! may hold descriptors that were never received. Where the kernel supports it, the socket refuses
//! descriptors until the protocol requests one.

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
mod command;
mod http_io;
mod listener;

pub(crate) use closer::Closer;
pub(crate) use command::{CommandSocket, connect_announced};
pub(crate) use http_io::{HttpIo, MIN_BYTES_PER_SECOND};
pub(crate) use listener::Socket;

/// The kernel's limit for one message: all are received, so that the kernel closes none.
pub(crate) const MAX_FDS_PER_MESSAGE: usize = 253;

/// The connection to one client, counted until it is closed.
#[derive(Clone, Debug)]
pub(crate) struct ClientSocket(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    stream: Option<UnixStream>,
    uid: u32,
    may_hold_descriptors: AtomicBool,
    closer: Arc<Closer>,
    permit: Option<ConnectionPermit>,
}

impl ClientSocket {
    /// For a connection that uses HTTP, where descriptors are not allowed.
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

    /// Allows the client to attach descriptors from now on.
    pub(crate) fn take_descriptors(&self) {
        self.0.may_hold_descriptors.store(true, Ordering::Relaxed);
        // Fails only where the kernel cannot refuse descriptors.
        let _ = set_takes_descriptors(self.stream(), true);
    }

    pub(crate) fn stream(&self) -> &UnixStream {
        #[allow(clippy::expect_used, reason = "an invariant of this type")]
        self.0.stream.as_ref().expect("open until the last clone is dropped")
    }

    pub(crate) fn try_receive(&self, buffer: &mut [u8], fds: &mut VecDeque<OwnedFd>) -> io::Result<usize> {
        receive_message(self.stream(), buffer, fds, MAX_FDS_PER_MESSAGE)
    }

    pub(crate) fn close(&self, fds: VecDeque<OwnedFd>) {
        if !fds.is_empty() {
            self.0.closer.close(self.0.uid, fds);
        }
    }

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
