//! Whom a command talks to: the daemon that runs, or a server of its own.
//!
//! There is one path: without a daemon the command opens the store itself and serves it to
//! itself over socket pairs, with the very code that the daemon runs.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use blobd_client::client::{Client, default_sockets};
use blobd_client::error::ClientError;
use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use blobd_store::{LockHolder, Store, StoreError};
use tokio::runtime::Runtime;

use super::Global;
use crate::config::{Config, Defaults};
use crate::ops::OpError;
use crate::server::Server;
use crate::state::Daemon;

/// A connection to a daemon, and the daemon itself if it lives in this process.
#[derive(Debug)]
pub(crate) struct Connected {
    pub(crate) client: Client,
    /// Dropped last: it serves the client.
    embedded: Option<Runtime>,
}

/// Connects to the socket that was named; else to whoever holds the store that was named, or opens
/// that; else to a daemon at the usual places; else to a server in this process.
pub(crate) fn connect(global: &Global) -> Result<Connected, ErrorBody> {
    let config = load_config(global)?;
    match (&global.root, &global.socket) {
        (Some(root), Some(socket)) => return connect_to_store(root, socket),
        (Some(root), None) => return embedded(root, &config),
        (None, Some(socket)) => return connect_to(socket).map_err(client_error),
        (None, None) => {}
    }
    if let Some(socket) = &config.socket {
        match connect_to(socket) {
            // A configured daemon that is not running is no reason to refuse work.
            Err(error) if is_away(&error) => {}
            connected => return connected.map_err(client_error),
        }
    }
    if let Some(root) = &config.root {
        return embedded(root, &config);
    }
    for socket in default_sockets() {
        if let Ok(connected) = connect_to(&socket) {
            return Ok(connected);
        }
    }
    embedded(&Defaults::of_user().root, &config)
}

impl Connected {
    /// Whether no daemon runs, so that what is set now ends with this command.
    pub(crate) const fn is_embedded(&self) -> bool {
        self.embedded.is_some()
    }
}

pub(crate) fn load_config(global: &Global) -> Result<Config, ErrorBody> {
    Config::load(global.config.as_deref()).map_err(super::usage)
}

/// A client's failure as the command line reports it.
pub(crate) fn client_error(error: ClientError) -> ErrorBody {
    match error {
        ClientError::Daemon(body) => body,
        error => ErrorBody::new(error.code(), error),
    }
}

fn connect_to(socket: &Path) -> Result<Connected, ClientError> {
    let client = Client::connect(socket)?;
    Ok(Connected { client, embedded: None })
}

/// Whoever names both must mean one store: a command that removes must not find another behind
/// a socket that the environment happens to name.
fn connect_to_store(root: &Path, socket: &Path) -> Result<Connected, ErrorBody> {
    let connected = connect_to(socket).map_err(client_error)?;
    let served = PathBuf::from(connected.client.version().map_err(client_error)?.root);
    let canonical = |path: &Path| path.canonicalize().unwrap_or_else(|_absent| path.to_path_buf());
    if canonical(&served) == canonical(root) {
        return Ok(connected);
    }
    let message = format!("{}: serves {}, not {}", socket.display(), served.display(), root.display());
    Err(super::usage(message).with_hint("leave out --root or --socket (BLOBD_ROOT, BLOBD_SOCKET)"))
}

fn is_away(error: &ClientError) -> bool {
    matches!(error, ClientError::NotRunning { .. })
}

/// Opens the store. While another process holds it, this tries again for two seconds, unless `can_reach` it:
/// a command holds a store for moments, and the kernel takes some time to end a process that was killed.
pub(crate) fn open_store(
    root: &Path,
    config: &Config,
    can_reach: impl Fn(&LockHolder) -> bool,
) -> Result<Store, StoreError> {
    const PATIENCE: Duration = Duration::from_secs(2);
    const PAUSE: Duration = Duration::from_millis(20);
    let start = Instant::now();
    loop {
        match Store::open_with(root, config.store_options()) {
            Err(StoreError::Locked { holder, .. }) if start.elapsed() < PATIENCE && !can_reach(&holder) => {
                thread::sleep(PAUSE);
            }
            opened => return opened,
        }
    }
}

/// Serves the store in this process; if a daemon has it, talks to that instead.
fn embedded(root: &Path, config: &Config) -> Result<Connected, ErrorBody> {
    let serves = |holder: &LockHolder| {
        holder.socket.as_ref().is_some_and(|socket| UnixStream::connect(socket).is_ok())
    };
    let store = match open_store(root, config, serves) {
        Ok(store) => store,
        Err(StoreError::Locked { holder, .. }) => return connect_to_holder(root, &holder),
        Err(error) => return Err(OpError::from(error).body()),
    };
    let daemon =
        Daemon::new(store, &config.registry_policy()).map_err(|error| OpError::from(error).body())?;
    let daemon = daemon.with_transfers(config.transfer_policy());
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let runtime = runtime.map_err(|error| ErrorBody::new(ErrorCode::Internal, error))?;
    let server = Server::new(Arc::new(daemon));
    let handle = runtime.handle().clone();
    let connector = move || -> io::Result<UnixStream> {
        let (ours, theirs) = UnixStream::pair()?;
        theirs.set_nonblocking(true)?;
        let _context = handle.enter();
        server.start(tokio::net::UnixStream::from_std(theirs)?);
        Ok(ours)
    };
    Ok(Connected { client: Client::with_connector(Arc::new(connector)), embedded: Some(runtime) })
}

fn connect_to_holder(root: &Path, holder: &LockHolder) -> Result<Connected, ErrorBody> {
    let hint = match holder.socket.as_ref().map(|socket| connect_to(socket)) {
        Some(Ok(connected)) => return Ok(connected),
        Some(Err(error)) => format!("that daemon cannot be reached ({error}); restart it"),
        None => "wait until it is done, or start `blobd serve` and share it".to_owned(),
    };
    let locked = StoreError::Locked { root: root.into(), holder: Box::new(holder.clone()) };
    Err(OpError::from(locked).body().with_hint(hint))
}

/// Where the daemon's store is.
pub(crate) fn root(global: &Global, config: &Config) -> PathBuf {
    let named = global.root.clone().or_else(|| config.root.clone());
    named.unwrap_or_else(|| Defaults::of_user().root)
}
