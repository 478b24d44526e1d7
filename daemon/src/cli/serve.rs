//! `blobd serve`: the daemon.

use std::io::IsTerminal as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use blobd_store::scrub::Scrubber;
use clap::Args;
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::Global;
use super::connect::{load_config, open_store, root};
use crate::config::Defaults;
use crate::housekeeping;
use crate::ops::OpError;
use crate::server::{Server, Socket};
use crate::state::Daemon;
use crate::sys::limit_heaps;

/// Threads that carry the connections. What they do is short; the second goes on should the first be kept
/// by the kernel. Blocking work has threads of its own.
const ASYNC_WORKERS: usize = 2;

/// How long such a thread waits for more work before it ends. Waiting threads take turns, so with a few
/// requests per second a longer time would keep all threads that a burst has left.
const BLOCKING_THREAD_KEEP_ALIVE: Duration = Duration::from_millis(250);

/// Run the daemon
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  blobd serve
  blobd serve --root /srv/models --socket /run/blobd/blobd.sock")]
pub(super) struct Params {}

pub(super) fn run(global: &Global, _params: &Params) -> Result<(), ErrorBody> {
    start_log();
    raise_descriptor_limit();
    let config = load_config(global)?;
    let root = root(global, &config);
    let socket = global.socket.clone().or_else(|| config.socket.clone());
    let socket = socket.unwrap_or_else(|| Defaults::of_user().socket);
    let store = open_store(&root, &config, |_holder| false).map_err(|error| OpError::from(error).body())?;
    let policy = config.registry_policy();
    let policy = if config.is_single_user() { policy } else { policy.for_many_users() };
    let daemon = Daemon::new(store, &policy);
    let daemon = daemon.map_err(|error| OpError::from(error).body())?;
    let daemon = daemon.with_transfers(config.transfer_policy());
    let daemon = if config.is_single_user() { daemon } else { daemon.for_many_users() };
    limit_heaps();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(ASYNC_WORKERS)
        .thread_keep_alive(BLOCKING_THREAD_KEEP_ALIVE)
        .enable_all()
        .build();
    let runtime = runtime.map_err(|error| ErrorBody::new(ErrorCode::Internal, error))?;
    let signals = {
        let _context = runtime.enter();
        StopSignals::catch()
    };
    limit_stop();
    let daemon = Arc::new(daemon);
    let busy = Arc::clone(&daemon);
    let scrubber = Scrubber::start(Arc::clone(&daemon.store), config.scrub_policy(), move || busy.is_busy());
    let scrubber = scrubber.map_err(|error| ErrorBody::new(ErrorCode::Internal, error))?;
    let store = Arc::clone(&daemon.store);
    store.start_index();
    let served = runtime.block_on(serve(daemon, &socket, signals));
    drop(scrubber);
    // Work in progress is dropped where it stands: what is not committed is swept at the next start.
    runtime.shutdown_background();
    store.stop_index();
    served
}

async fn serve(daemon: Arc<Daemon>, path: &Path, signals: Option<StopSignals>) -> Result<(), ErrorBody> {
    let socket = Socket::bind(path).map_err(|error| bind_error(path, &error))?;
    admit_system_group(&socket);
    daemon.store.announce(Some(path));
    tracing::info!("serving {} on {}", daemon.store.place().display(), path.display());
    let server = Server::new(Arc::clone(&daemon));
    tokio::select! {
        () = server.serve(socket.listener()) => {}
        () = housekeeping::run(daemon) => {}
        () = StopSignals::received(signals) => tracing::info!("stopping; clients keep what they have mapped"),
    }
    Ok(())
}

fn bind_error(path: &Path, error: &std::io::Error) -> ErrorBody {
    let name = path.display();
    match error.kind() {
        std::io::ErrorKind::AddrInUse => {
            let body = ErrorBody::new(ErrorCode::Busy, format!("{name}: another daemon answers there"));
            body.with_hint("choose another --socket")
        }
        std::io::ErrorKind::PermissionDenied => ErrorBody::new(ErrorCode::Denied, format!("{name}: {error}")),
        _ => ErrorBody::new(ErrorCode::Internal, format!("{name}: {error}")),
    }
}

/// On a system where somebody made the group `blobd`, its members may connect.
fn admit_system_group(socket: &Socket) {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let groups = std::fs::read_to_string("/etc/group").unwrap_or_default();
    let gid = groups.lines().find_map(|line| line.strip_prefix("blobd:")?.split(':').nth(1)?.parse().ok());
    if let Some(Err(error)) = gid.map(|gid| socket.admit_group(gid)) {
        tracing::warn!("group blobd cannot be admitted: {error}");
    }
}

/// The signals that stop the daemon. From the moment that they are caught none is lost, and none ends the
/// process by itself.
struct StopSignals {
    terminate: Signal,
    interrupt: Signal,
}

impl StopSignals {
    /// None where the system does not let the process catch them.
    fn catch() -> Option<Self> {
        let terminate = signal(SignalKind::terminate()).ok()?;
        Some(Self { terminate, interrupt: signal(SignalKind::interrupt()).ok()? })
    }

    async fn received(signals: Option<Self>) {
        let Some(Self { mut terminate, mut interrupt }) = signals else {
            return std::future::pending().await;
        };
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    }
}

/// How long the daemon may take to stop in good order. Those who stop it wait a few seconds more.
const STOP_LIMIT: Duration = Duration::from_secs(7);

/// Ends the process some seconds after it was told to stop, whatever hangs: a disk, a lock, the runtime.
/// What is committed is as safe as from a kill, and what is not is swept at the next start. On a thread
/// and a runtime of its own, which hang with nothing else.
fn limit_stop() {
    let watch = || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let Ok(runtime) = runtime else { return };
        runtime.block_on(async { StopSignals::received(StopSignals::catch()).await });
        std::thread::sleep(STOP_LIMIT);
        tracing::warn!("not done after {} s: stopped all the same", STOP_LIMIT.as_secs());
        #[expect(clippy::exit, reason = "what main waits for is what hangs")]
        std::process::exit(0);
    };
    let started = std::thread::Builder::new().name("stop-limit".to_owned()).spawn(watch);
    if let Err(error) = started {
        tracing::warn!("a stop has no limit: cannot start its thread: {error}");
    }
}

/// Descriptors on their way to clients count against the daemon's limit, whose soft half is made
/// for programs that use `select`.
pub(super) fn raise_descriptor_limit() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let raised = rustix::process::Rlimit { current: limit.maximum, ..limit };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::warn!("the limit of open files stays at {:?}: {error}", limit.current);
    }
}

pub(super) fn start_log() {
    let subscriber = tracing_subscriber::fmt().with_writer(std::io::stderr).with_target(false);
    let colour = std::io::stderr().is_terminal();
    // Fails only if a log is already running, as in tests.
    let _ = tracing::subscriber::set_global_default(subscriber.with_ansi(colour).finish());
}
