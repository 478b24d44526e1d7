//! The socket: accept, limit, shut down.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use blobd_client::protocol::connection::send_message;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioTimer;
use tokio::net::{UnixListener, UnixStream};

use crate::admission::Connections;
use crate::api;
use crate::principal::Peer;
use crate::socket::{ClientSocket, HttpIo};
use crate::state::Daemon;

pub(crate) use crate::socket::Socket;

/// How long a client may take to send a request's head.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// No head has reason to be longer. Each connection may have that much in memory.
const MAX_HEAD_BYTES: usize = 16 << 10;

/// Serves a daemon on connections, wherever they come from.
#[derive(Clone, Debug)]
pub(crate) struct Server {
    daemon: Arc<Daemon>,
    connections: Connections,
}

impl Server {
    /// A server without a socket.
    #[must_use]
    pub(crate) fn new(daemon: Arc<Daemon>) -> Self {
        let connections = Connections::new(daemon.limits.connections);
        Self { daemon, connections }
    }

    /// Accepts connections for ever.
    pub(crate) async fn serve(&self, listener: &UnixListener) {
        loop {
            match listener.accept().await {
                Ok((stream, _address)) => self.start(stream),
                Err(error) => {
                    // Out of descriptors or memory: give the open connections time to end.
                    if let Some(left_out) =
                        self.daemon.limits.error_log.admit(rustix::process::geteuid().as_raw())
                    {
                        tracing::warn!("cannot accept a connection: {error}{left_out}");
                    }
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
    }

    /// Serves one connection in a task of its own, unless its user has too many.
    pub(crate) fn start(&self, stream: UnixStream) {
        let Ok(peer) = Peer::of(&stream) else { return };
        let closer = &self.daemon.closer;
        let permit = match self.connections.admit(peer.uid) {
            Ok(permit) if !closer.is_stuck(peer.uid) => permit,
            _ => {
                // Its queue may hold descriptors already.
                let socket = ClientSocket::new(stream, peer.uid, None, closer);
                return self.refuse(&peer, &socket);
            }
        };
        let socket = ClientSocket::new(stream, peer.uid, Some(permit), closer);
        self.daemon.meet(&peer);
        let daemon = Arc::clone(&self.daemon);
        tokio::spawn(async move {
            if let Err(error) = serve_connection(daemon, peer, socket).await {
                tracing::debug!("a connection ended early: {error}");
            }
        });
    }

    /// Says why, in a response that was made beforehand, to a peer that may not even have asked yet. A
    /// new socket has room for it; nothing waits.
    fn refuse(&self, peer: &Peer, socket: &ClientSocket) {
        const BUSY: &[u8] = b"HTTP/1.1 409 Conflict\r\nconnection: close\r\n\
            content-type: application/json\r\ncontent-length: 125\r\n\r\n\
            {\"error\":{\"code\":\"busy\",\"message\":\"too many connections\",\
            \"hint\":\"close some; a client needs one for each model it has open\"}}";
        if let Some(left_out) = self.daemon.limits.refusal_log.admit(peer.uid) {
            let description = peer.description();
            tracing::warn!("{description}: too many connections of uid {}{left_out}", peer.uid);
        }
        // Best effort: the connection is closed in any case.
        let _ = send_message(socket.stream(), BUSY, &[]);
    }
}

async fn serve_connection(daemon: Arc<Daemon>, peer: Peer, socket: ClientSocket) -> hyper::Result<()> {
    let io = HttpIo::new(socket.clone());
    let service = service_fn(move |request: hyper::Request<hyper::body::Incoming>| {
        let answer = api::answer(Arc::clone(&daemon), peer.clone(), socket.clone(), request);
        async { Ok::<_, Infallible>(answer.await) }
    });
    http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .max_buf_size(MAX_HEAD_BYTES)
        .serve_connection(io, service)
        .with_upgrades()
        .await
}
