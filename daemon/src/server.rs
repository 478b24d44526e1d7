//! The socket: accept, limit, shut down.

use std::convert::Infallible;
use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use blobd_client::protocol::connection::send_message;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{UnixListener, UnixStream};

use crate::api;
use crate::session::{Connections, Peer, Permit, Refused};
use crate::state::Daemon;

/// How long a client may take to send a request's head.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// No head has reason to be longer.
const MAX_HEAD_BYTES: usize = 64 << 10;

/// Serves a daemon on connections, wherever they come from.
#[derive(Clone, Debug)]
pub struct Server {
    daemon: Arc<Daemon>,
    connections: Connections,
}

impl Server {
    /// A server without a socket.
    #[must_use]
    pub fn new(daemon: Arc<Daemon>) -> Self {
        Self { daemon, connections: Connections::default() }
    }

    /// Accepts connections for ever.
    pub async fn serve(&self, listener: &UnixListener) {
        loop {
            match listener.accept().await {
                Ok((stream, _address)) => self.start(stream),
                Err(error) => {
                    // Out of descriptors or memory: give the open connections time to end.
                    tracing::warn!("cannot accept a connection: {error}");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
    }

    /// Serves one connection in a task of its own, unless its user has too many.
    pub fn start(&self, stream: UnixStream) {
        let Ok(peer) = Peer::of(&stream) else { return };
        let permit = match self.connections.admit(peer.uid) {
            Ok(permit) => permit,
            Err(Refused { is_news }) => {
                if is_news {
                    tracing::warn!("{}: too many connections of uid {}", peer.description(), peer.uid);
                }
                return refuse(&stream);
            }
        };
        self.daemon.meet(&peer);
        let daemon = Arc::clone(&self.daemon);
        tokio::spawn(async move {
            if let Err(error) = serve_connection(daemon, peer, stream, permit).await {
                tracing::debug!("a connection ended early: {error}");
            }
        });
    }
}

/// Says why, in an answer that was made beforehand, to a peer that may not even have asked yet. A
/// new socket has room for it; nothing waits.
fn refuse(stream: &UnixStream) {
    const BUSY: &[u8] = b"HTTP/1.1 409 Conflict\r\nconnection: close\r\n\
        content-type: application/json\r\ncontent-length: 125\r\n\r\n\
        {\"error\":{\"code\":\"busy\",\"message\":\"too many connections\",\
        \"hint\":\"close some; a client needs one for each model it has open\"}}";
    // Best effort: the connection is closed in any case.
    let _ = send_message(stream, BUSY, &[]);
}

async fn serve_connection(
    daemon: Arc<Daemon>,
    peer: Peer,
    stream: UnixStream,
    permit: Permit,
) -> hyper::Result<()> {
    let permit = Arc::new(permit);
    let service = service_fn(move |mut request: hyper::Request<hyper::body::Incoming>| {
        // An upgraded connection outlives this task; it takes its permit from the request.
        request.extensions_mut().insert(Arc::clone(&permit));
        let answer = api::answer(Arc::clone(&daemon), peer.clone(), request);
        async { Ok::<_, Infallible>(answer.await) }
    });
    http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .max_buf_size(MAX_HEAD_BYTES)
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades()
        .await
}

/// A listening socket, whose name goes when it is dropped.
#[derive(Debug)]
pub struct Socket {
    path: PathBuf,
    listener: UnixListener,
}

impl Socket {
    /// Listens at `path`. A name that a dead daemon left is replaced; one that somebody serves
    /// is not. Nobody but the owner may connect until [`Self::admit_group`].
    ///
    /// # Errors
    /// [`io::ErrorKind::AddrInUse`] when a daemon answers there; those of `bind`.
    pub fn bind(path: &Path) -> io::Result<Self> {
        if let Some(directory) = path.parent() {
            fs::DirBuilder::new().recursive(true).mode(0o755).create(directory)?;
        }
        match std::os::unix::net::UnixStream::connect(path) {
            Ok(_served) => return Err(io::ErrorKind::AddrInUse.into()),
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                // A file that is no socket refuses connections too, and is none of ours.
                if !is_socket(path) {
                    return Err(io::Error::new(io::ErrorKind::AlreadyExists, "is there and is no socket"));
                }
                fs::remove_file(path)?;
            }
            Err(_nothing_there) => {}
        }
        let previous = rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o177));
        let listener = UnixListener::bind(path);
        rustix::process::umask(previous);
        Ok(Self { path: path.to_path_buf(), listener: listener? })
    }

    /// Lets the members of a group connect.
    ///
    /// # Errors
    /// Those of `chown` and `chmod`.
    pub fn admit_group(&self, gid: u32) -> io::Result<()> {
        std::os::unix::fs::chown(&self.path, None, Some(gid))?;
        fs::set_permissions(&self.path, fs::Permissions::from_mode(0o660))
    }

    /// What to accept connections from.
    #[must_use]
    pub const fn listener(&self) -> &UnixListener {
        &self.listener
    }
}

fn is_socket(path: &Path) -> bool {
    use std::os::unix::fs::FileTypeExt as _;
    fs::symlink_metadata(path).is_ok_and(|metadata| metadata.file_type().is_socket())
}

impl Drop for Socket {
    fn drop(&mut self) {
        // Already gone: somebody cleaned up. Nothing depends on it.
        let _ = fs::remove_file(&self.path);
    }
}
