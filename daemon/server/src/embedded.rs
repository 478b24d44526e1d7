//! The server in a command's own process: for the command itself, and for other commands that use the same store
//! meanwhile.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use blobd_registry::{RegistryError, RegistryPolicy};
use blobd_store::{CommandState, Store};
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;

use crate::api;
use crate::audit;
use crate::config::Config;
use crate::metrics::Metrics;
use crate::ops::OpError;
use crate::server::Server;
use crate::socket::CommandSocket;
use crate::state::Daemon;
use crate::sys::limit_heaps;

/// How long the command waits at its end for the requests of other commands that have begun. They are short, but a
/// removal of many blobs takes some time on a slow disk.
const REQUESTS_LIMIT: Duration = Duration::from_secs(30);
/// How long it waits for work that it has stopped, such as a pull, which its command resumes. Work that does not stop
/// in time ends with the process, as after a kill.
const WORK_LIMIT: Duration = Duration::from_secs(1);

pub(crate) fn start_error(config: &Config, error: RegistryError) -> ErrorBody {
    const HINT: &str =
        "name PEM files with certificates that the daemon's user can read, or leave out ca_files";
    match &error {
        RegistryError::Certificates { path, reason } => match config.place_of_ca_file(path) {
            Some(place) => {
                let message = format!("{place}: {}: {reason}", path.display());
                ErrorBody::new(ErrorCode::InvalidRequest, message).with_hint(HINT)
            }
            None => OpError::from(error).body(),
        },
        _ => OpError::from(error).body(),
    }
}

/// The policy of a daemon's client of registries.
pub(crate) fn registry_policy(config: &Config) -> RegistryPolicy {
    let policy = config.registry_policy();
    if config.is_single_user() { policy } else { policy.for_many_users() }
}

/// The key of the directory of the audit log.
pub(crate) const AUDIT_DIRECTORY: &str = "audit.directory";

/// Starts the audit log, unless it is off or the store is read-only. A log that is not continued says so.
pub(crate) fn start_audit(daemon: &Daemon, config: &Config) -> Result<(), ErrorBody> {
    let (store, audit) = (&daemon.store, &config.audit);
    if store.content().read_only_reason().is_some() {
        return Ok(());
    }
    let left = audit.log_left_in_store(store);
    let left = left.map_or(Ok(()), |left| audit::switch(&daemon.audit, left, false));
    let switched = left.and_then(|()| audit::switch(&daemon.audit, audit.log(store), audit.enabled));
    switched.map_err(|error| ErrorBody::new(ErrorCode::Internal, format!("audit log: {error}")))
}

#[derive(Debug)]
pub(crate) struct EmbeddedServer {
    server: Server,
    daemon: Arc<Daemon>,
    listening: Option<JoinHandle<()>>,
    runtime: Option<Runtime>,
}

impl EmbeddedServer {
    pub(crate) fn start(store: Store, root: &Path, config: &Config) -> Result<Self, ErrorBody> {
        limit_heaps();
        let metrics =
            Metrics::new(api::verb_names()).map_err(|error| ErrorBody::new(ErrorCode::Internal, error))?;
        let daemon = Daemon::new(store, &config.registry_policy(), metrics);
        let daemon = daemon.map_err(|error| start_error(config, error))?;
        let daemon = Arc::new(daemon.with_transfers(config.transfer_policy()));
        start_audit(&daemon, config)?;
        if config.audit.directory.is_some() {
            daemon.audit.require(config.place_of(AUDIT_DIRECTORY));
        }
        // Only root and the user of this process can connect, who have all rights. So `[access]` has no effect, and of
        // the quotas those that name these users.
        daemon.set_quotas(config.quotas());
        daemon.policy.set(config.policy());
        daemon.trust.set(config.trust()?);
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.map_err(|error| ErrorBody::new(ErrorCode::Internal, error))?;
        let server = Server::private(Arc::clone(&daemon));
        let mut embedded = Self { server, daemon, listening: None, runtime: None };
        embedded.listening = embedded.listen(root, &runtime);
        embedded.runtime = Some(runtime);
        Ok(embedded)
    }

    /// Listens for other commands. Without a socket, they wait until this command has ended.
    fn listen(&self, root: &Path, runtime: &Runtime) -> Option<JoinHandle<()>> {
        let store = &self.daemon.store;
        // Any number of processes may have a read-only store open.
        if store.content().read_only_reason().is_some() {
            return None;
        }
        let _context = runtime.enter();
        let socket = CommandSocket::bind(root, store.content().owner());
        if let Err(error) = &socket {
            tracing::debug!("{}: cannot listen for other commands: {error}", root.display());
        }
        let announced = socket.as_ref().ok().map(CommandSocket::announced);
        store.content().announce(announced, Some(CommandState::Working));
        let (socket, server) = (socket.ok()?, self.server.clone());
        Some(runtime.spawn(async move { server.serve(socket.listener()).await }))
    }

    pub(crate) fn connect(&self) -> io::Result<UnixStream> {
        let runtime = self.runtime.as_ref().ok_or(io::ErrorKind::NotConnected)?;
        let (ours, theirs) = UnixStream::pair()?;
        theirs.set_nonblocking(true)?;
        let _context = runtime.enter();
        self.server.start(tokio::net::UnixStream::from_std(theirs)?);
        Ok(ours)
    }

    /// Completes the requests that have begun, and accepts no others. Returns whether all work has ended.
    async fn end(&mut self) -> bool {
        if let Some(listening) = self.listening.take() {
            self.daemon.store.content().announce(None, Some(CommandState::Ending));
            // Removes the socket. Connections that were not accepted are reset, so their requests are repeated.
            listening.abort();
            let _ = listening.await;
        }
        let have_requests_ended = self.server.end(REQUESTS_LIMIT).await;
        let work_ended = async {
            while self.daemon.work.is_any_running() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        have_requests_ended && tokio::time::timeout(WORK_LIMIT, work_ended).await.is_ok()
    }
}

impl Drop for EmbeddedServer {
    fn drop(&mut self) {
        let Some(runtime) = self.runtime.take() else { return };
        if !runtime.block_on(self.end()) {
            // Dropping it would wait for that work. The process is about to end.
            std::mem::forget(runtime);
        }
        self.daemon.audit.stop();
    }
}
