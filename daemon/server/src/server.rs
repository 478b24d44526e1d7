//! Accepts connections, limits their number, and serves HTTP on them.

// A request takes a thread only with its user's turn, see `clippy.toml`.
#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

use std::convert::Infallible;
use std::future::poll_fn;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::Duration;

use blobd_client::protocol::connection::send_message;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioTimer;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch;

use crate::admission::{ConnectionPermit, Connections, Turns};
use crate::api;
use crate::names::Names;
use crate::permits::Permit;
use crate::principal::Principal;
use crate::socket::{ClientSocket, HttpIo};
use crate::state::Daemon;

pub(crate) use crate::socket::Socket;

const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// Requests of clients are far shorter. Each connection may take this much memory.
const MAX_HEAD_BYTES: usize = 16 << 10;

const ACCEPTED_AT_ONCE: usize = 64;

struct Connection {
    peer: Principal,
    socket: ClientSocket,
    requesting: Option<Permit>,
}

#[derive(Clone, Debug)]
pub(crate) struct Server {
    daemon: Arc<Daemon>,
    connections: Connections,
    /// Whether only this process's user and root are served.
    is_private: bool,
    /// Set to true at the end. Each connection that uses HTTP has a receiver.
    ending: Arc<watch::Sender<bool>>,
}

impl Server {
    pub(crate) fn new(daemon: Arc<Daemon>) -> Self {
        let connections = Connections::new(daemon.limits.connections);
        Self { daemon, connections, is_private: false, ending: Arc::new(watch::channel(false).0) }
    }

    /// A server for this process's user and root.
    pub(crate) fn private(daemon: Arc<Daemon>) -> Self {
        Self { is_private: true, ..Self::new(daemon) }
    }

    /// Ends all connections that use HTTP. Requests that have been read are completed, except for those that report
    /// progress, which may take hours. Requests that have not been read are not executed. Returns false if requests are
    /// not completed within `limit`.
    pub(crate) async fn end(&self, limit: Duration) -> bool {
        self.ending.send_replace(true);
        tokio::time::timeout(limit, self.ending.closed()).await.is_ok()
    }

    /// Runs until it is dropped. When very many connections arrive at once, those of each user are begun in turn.
    pub(crate) async fn serve(&self, listener: &UnixListener) {
        let mut arrived = Turns::default();
        loop {
            self.accept(listener, &mut arrived).await;
            if let Some(connection) = arrived.next() {
                self.begin(connection);
                // Its task runs before the next one is begun.
                tokio::task::yield_now().await;
            }
        }
    }

    /// Accepts what has arrived, and waits for a connection only if there is none yet.
    async fn accept(&self, listener: &UnixListener, arrived: &mut Turns<Connection>) {
        for _ in 0..ACCEPTED_AT_ONCE {
            let is_waiting = arrived.is_empty();
            let accepted = poll_fn(|context| match listener.poll_accept(context) {
                Poll::Pending if !is_waiting => Poll::Ready(None),
                accepted => accepted.map(Some),
            });
            match accepted.await {
                Some(Ok((stream, _address))) => {
                    if let Some(connection) = self.admitted(stream) {
                        arrived.add(connection.peer.uid, connection);
                    }
                }
                Some(Err(error)) => return self.wait_for_resources(&error).await,
                None => return,
            }
        }
    }

    /// Out of descriptors or memory: waits until some connections have ended.
    async fn wait_for_resources(&self, error: &io::Error) {
        if let Some(omitted) = self.daemon.limits.error_log.admit(rustix::process::geteuid().as_raw()) {
            tracing::warn!("cannot accept a connection: {error}{omitted}");
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }

    pub(crate) fn start(&self, stream: UnixStream) {
        if let Some(connection) = self.admitted(stream) {
            self.begin(connection);
        }
    }

    /// A connection that is to be served. Others are closed, with a response if their user has too many.
    fn admitted(&self, stream: UnixStream) -> Option<Connection> {
        let peer = Principal::from_stream(&stream).ok()?;
        let is_owner = self.daemon.access.get().owns_store(&peer);
        if self.is_private && !is_owner {
            return None;
        }
        let closer = &self.daemon.closer;
        let Some((permit, requesting)) = self.admit(peer.uid, is_owner) else {
            // The socket's queue may already hold descriptors.
            let socket = ClientSocket::new(stream, peer.uid, None, closer);
            self.refuse(&peer, &socket);
            return None;
        };
        let socket = ClientSocket::new(stream, peer.uid, Some(permit), closer);
        Some(Connection { peer, socket, requesting })
    }

    fn begin(&self, connection: Connection) {
        let Connection { peer, socket, requesting } = connection;
        let (daemon, ending) = (Arc::clone(&self.daemon), self.ending.subscribe());
        tokio::spawn(async move {
            // Until the connection ends, or carries no HTTP any more.
            let _requesting = requesting;
            let Some(peer) = named(&daemon, peer).await else { return };
            if let Err(error) = serve_connection(daemon, peer, socket, ending).await {
                tracing::debug!("a connection ended early: {error}");
            }
        });
    }

    /// Connections of owners need buffers too, but are not limited by those of others.
    fn admit(&self, uid: u32, is_owner: bool) -> Option<(ConnectionPermit, Option<Permit>)> {
        if self.daemon.closer.is_stuck(uid) {
            return None;
        }
        let requesting = match is_owner {
            true => None,
            false => Some(self.daemon.limits.requesting.try_acquire(uid).ok()?),
        };
        Some((self.connections.admit(uid, is_owner)?, requesting))
    }

    /// Sends a constant response, perhaps before the request has arrived. The buffer of a new socket has
    /// enough space, so this does not wait.
    fn refuse(&self, peer: &Principal, socket: &ClientSocket) {
        self.daemon.metrics.events.connections_refused.inc();
        const BUSY: &[u8] = b"HTTP/1.1 409 Conflict\r\nconnection: close\r\n\
            content-type: application/json\r\ncontent-length: 125\r\n\r\n\
            {\"error\":{\"code\":\"busy\",\"message\":\"too many connections\",\
            \"hint\":\"close some; a client needs one for each model it has open\"}}";
        if let Some(omitted) = self.daemon.limits.refusal_log.admit(peer.uid) {
            let description = peer.description();
            tracing::warn!("{description}: too many connections of uid {}{omitted}", peer.uid);
        }
        // Best effort: the connection is closed in any case.
        let _ = send_message(socket.stream(), BUSY, &[]);
    }
}

/// Finds the name of a peer before its first request, so that errors and records have it. `None` if the process ends.
async fn named(daemon: &Arc<Daemon>, peer: Principal) -> Option<Principal> {
    let names = Names::system();
    if peer.is_named(&names) {
        return Some(peer);
    }
    // A directory server may not respond: then only connections of this user wait.
    let turn = daemon.limits.disk.acquire(peer.uid).await.into();
    daemon.blocking(turn, move |_| Ok(peer.named(&names))).await.ok()
}

async fn serve_connection(
    daemon: Arc<Daemon>,
    peer: Principal,
    socket: ClientSocket,
    mut ending: watch::Receiver<bool>,
) -> hyper::Result<()> {
    let reports_progress = Arc::new(AtomicBool::new(false));
    let io = HttpIo::new(socket.clone(), Arc::clone(&reports_progress));
    let reports = Arc::clone(&reports_progress);
    let has_request = Arc::new(AtomicBool::new(false));
    let received = Arc::clone(&has_request);
    let service = service_fn(move |request: hyper::Request<hyper::body::Incoming>| {
        received.store(true, Ordering::Relaxed);
        let response = api::respond(Arc::clone(&daemon), peer.clone(), socket.clone(), request);
        let reports = Arc::clone(&reports);
        // Boxed: each connection has space for this future, even while it has no request.
        Box::pin(async move {
            let response = response.await;
            reports.store(api::reports_progress(&response), Ordering::Relaxed);
            Ok::<_, Infallible>(response)
        })
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .max_buf_size(MAX_HEAD_BYTES)
        .serve_connection(io, service)
        .with_upgrades();
    tokio::pin!(connection);
    tokio::select! {
        served = connection.as_mut() => return served,
        _ = ending.wait_for(|ending| *ending) => {}
    }
    // Without a request the connection is dropped, so that the kernel resets it if a request is waiting there: that
    // tells the client that nothing was executed. A regular shutdown looks like a lost response.
    if reports_progress.load(Ordering::Relaxed) || !has_request.load(Ordering::Relaxed) {
        return Ok(());
    }
    connection.as_mut().graceful_shutdown();
    connection.await
}
