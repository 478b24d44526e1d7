//! Access to a store: as the process that has it open, or through the process that does.
//!
//! A command that has the store open serves others only while it works. When it ends, one of the others opens
//! the store and serves the rest; their requests are repeated by the client.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use blobd_client::client::Client;
use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use blobd_client::sockets;
use blobd_store::{CommandState, LockHolder, Store, StoreError};
use tracing_mutex::stdsync::Mutex;

use crate::config::Config;
use crate::embedded::EmbeddedServer;
use crate::locks::lock;
use crate::ops::OpError;
use crate::peer_process::command_line;
use crate::socket::connect_announced;

#[derive(Debug)]
enum ServedBy {
    Here(EmbeddedServer),
    /// At a socket that the command's lock file names.
    Command(PathBuf),
    Daemon(PathBuf),
}

/// Who serves a store.
#[derive(Debug)]
pub enum Opened {
    /// A daemon at this socket.
    ByDaemon(PathBuf),
    /// This process or another command.
    ByCommand(Arc<StoreAccess>),
}

/// A store that is served by this process or by another command.
#[derive(Debug)]
pub struct StoreAccess {
    root: PathBuf,
    config: Config,
    served_by: Mutex<Option<ServedBy>>,
    was_elsewhere: AtomicBool,
}

impl StoreAccess {
    pub(crate) fn open(root: &Path, config: &Config) -> Result<Opened, ErrorBody> {
        Ok(match find(root, config)? {
            ServedBy::Daemon(socket) => Opened::ByDaemon(root.join(socket)),
            place => Opened::ByCommand(Self::new(root, config, place)),
        })
    }

    fn new(root: &Path, config: &Config, served_by: ServedBy) -> Arc<Self> {
        let was_elsewhere = AtomicBool::new(!matches!(served_by, ServedBy::Here(_)));
        let (root, config) = (root.to_path_buf(), config.clone());
        Arc::new(Self { root, config, served_by: Mutex::new(Some(served_by)), was_elsewhere })
    }

    /// A client of the process that serves the store, whichever that is at the time of a request.
    #[must_use]
    pub fn client(self: &Arc<Self>) -> Client {
        let (connecting, replacing) = (Arc::clone(self), Arc::clone(self));
        Client::with_connector(Arc::new(move || connecting.connect()))
            .repeating_if(Arc::new(move || replacing.was_elsewhere.load(Ordering::Relaxed)))
    }

    /// Whether this process serves it.
    #[must_use]
    pub fn is_here(&self) -> bool {
        matches!(*lock(&self.served_by), Some(ServedBy::Here(_)))
    }

    /// Ends the server in this process. Other commands then open the store.
    pub fn close(&self) {
        let place = lock(&self.served_by).take();
        drop(place);
    }

    /// If the server has ended, finds the process that has the store now, or opens it.
    fn connect(&self) -> io::Result<UnixStream> {
        let mut place = lock(&self.served_by);
        loop {
            let socket = match &*place {
                None => return Err(io::ErrorKind::NotConnected.into()),
                Some(ServedBy::Here(server)) => return server.connect(),
                Some(ServedBy::Command(socket) | ServedBy::Daemon(socket)) => socket,
            };
            if let Ok(stream) = connect_announced(&self.root, socket) {
                return Ok(stream);
            }
            *place = Some(find(&self.root, &self.config).map_err(io::Error::other)?);
        }
    }
}

fn find(root: &Path, config: &Config) -> Result<ServedBy, ErrorBody> {
    let mut wait = Wait::new();
    loop {
        let holder = match Store::open_with(root, config.store_options()) {
            Ok(store) => {
                tracing::debug!("{}: opened in this process", root.display());
                return EmbeddedServer::start(store, root, config).map(ServedBy::Here);
            }
            Err(StoreError::Locked { holder, .. }) => holder,
            Err(error) => return Err(OpError::from(error).into()),
        };
        tracing::debug!("{}: held by {holder}", root.display());
        let failure = match &holder.socket {
            None => None,
            Some(socket) => match connect_announced(root, socket) {
                Ok(_served) if holder.command.is_some() => return Ok(ServedBy::Command(socket.clone())),
                Ok(_served) => return Ok(ServedBy::Daemon(socket.clone())),
                Err(error) => Some(error),
            },
        };
        let is_denied = failure.as_ref().is_some_and(|error| error.kind() == io::ErrorKind::PermissionDenied);
        if is_denied || !wait.goes_on_for(&holder) {
            return Err(locked(root, &holder, failure.as_ref()));
        }
        wait.pause();
    }
}

/// Opens the store for a daemon: waits until a command that has it open has ended.
pub(crate) fn open_for_daemon(root: &Path, config: &Config) -> Result<Store, ErrorBody> {
    let (mut wait, mut is_reported) = (Wait::new(), false);
    loop {
        let holder = match Store::open_with(root, config.store_options()) {
            Ok(store) => return Ok(store),
            Err(StoreError::Locked { holder, .. }) => holder,
            Err(error) => return Err(OpError::from(error).into()),
        };
        if !wait.goes_on_for(&holder) && holder.command.is_none() {
            return Err(locked(root, &holder, None));
        }
        if !is_reported && holder.command.is_some() && wait.is_noticed() {
            let command = i32::try_from(holder.pid).ok().and_then(command_line);
            let command = command.map_or_else(String::new, |line| format!(" (`{line}`)"));
            tracing::info!("store {}: held by {holder}{command}; waiting until it ends", root.display());
            is_reported = true;
        }
        wait.pause();
    }
}

fn locked(root: &Path, holder: &LockHolder, failure: Option<&io::Error>) -> ErrorBody {
    let hint = match (failure, holder.command) {
        (Some(error), None) => {
            let refused = holder.socket.as_ref().and_then(|socket| sockets::hint(socket, error));
            Some(refused.unwrap_or_else(|| format!("that daemon cannot be reached ({error}); restart it")))
        }
        (Some(error), Some(_)) if error.kind() == io::ErrorKind::PermissionDenied => {
            Some("it belongs to another user; wait until it ends".to_owned())
        }
        (None, None) if holder.socket.is_some() => None,
        _ => Some(
            "wait until it ends, or start `blobd serve`, which many commands can use at a time".to_owned(),
        ),
    };
    let body =
        OpError::from(StoreError::Locked { root: root.into(), holder: Box::new(holder.clone()) }).body();
    let body = ErrorBody { code: ErrorCode::Busy, ..body };
    match hint {
        Some(hint) => body.with_hint(hint),
        None => body,
    }
}

struct Wait {
    pid: u32,
    since: Instant,
    pause: Duration,
}

impl Wait {
    /// How long to wait for one process that does not serve others: commands open the store before they listen,
    /// and a killed process has the lock until the kernel has ended it.
    const LIMIT: Duration = Duration::from_secs(5);
    /// For a command that has said that it is about to end.
    const ENDING_LIMIT: Duration = Duration::from_secs(60);
    const LONGEST_PAUSE: Duration = Duration::from_millis(80);

    fn new() -> Self {
        Self { pid: 0, since: Instant::now(), pause: Duration::from_millis(5) }
    }

    fn goes_on_for(&mut self, holder: &LockHolder) -> bool {
        if self.pid != holder.pid {
            (self.pid, self.since) = (holder.pid, Instant::now());
        }
        let is_ending = holder.command == Some(CommandState::Ending);
        self.since.elapsed() < if is_ending { Self::ENDING_LIMIT } else { Self::LIMIT }
    }

    /// Whether a user sees that it takes time; most commands end earlier.
    fn is_noticed(&self) -> bool {
        const NOTICED: Duration = Duration::from_millis(200);
        self.since.elapsed() >= NOTICED
    }

    fn pause(&mut self) {
        thread::sleep(self.pause);
        self.pause = (self.pause * 2).min(Self::LONGEST_PAUSE);
    }
}
