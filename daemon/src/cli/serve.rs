//! `blobd serve`: the daemon.

mod endpoint;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use blobd_store::scrub::Scrubber;
use clap::Args;
use tokio::signal::unix::SignalKind;

use super::Global;
use super::connect::{load_config, root};
use super::embedded::start_error;
use super::interrupt::{Signals, first_of, listen, listen_for_stop};
use super::store_access::open_for_daemon;
use crate::config::Config;
use crate::housekeeping;
use crate::server::{Server, Socket};
use crate::state::Daemon;
use crate::sys::limit_heaps;

/// Threads that serve the connections. Their work is short; the second one serves while a system call delays
/// the first. Blocking work runs on other threads.
const ASYNC_WORKERS: usize = 2;

/// How long an idle thread for blocking work lives. Idle threads get work in turn, so with a longer time a
/// few requests per second would keep alive all threads that a burst has started.
const BLOCKING_THREAD_KEEP_ALIVE: Duration = Duration::from_millis(250);

/// Run the daemon
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  blobd serve
  blobd serve --root /srv/models --socket /run/blobd/blobd.sock
  BLOBD_LOG=debug blobd serve                      log more
  BLOBD_LOG=warn,blobd_registry=debug blobd serve  log more of the registries and less of the rest

The log goes to standard error. BLOBD_LOG, or else RUST_LOG, is LEVEL or TARGET=LEVEL, or
several of them separated by commas. Levels: off, error, warn, info, debug, trace.
Targets: blobd, blobd_store, blobd_registry.")]
pub(super) struct Params {}

pub(super) fn run(global: &Global, _params: &Params) -> Result<(), ErrorBody> {
    raise_descriptor_limit();
    let config = load_config(global)?;
    let root = root(global, &config)?;
    let socket = endpoint::path(global, &config)?;
    let store = open_for_daemon(&root, &config)?;
    let policy = config.registry_policy();
    let policy = if config.is_single_user() { policy } else { policy.for_many_users() };
    let daemon = Daemon::new(store, &policy).map_err(|error| start_error(&config, error))?;
    let daemon = daemon.with_transfers(config.transfer_policy());
    let daemon = if config.is_single_user() { daemon } else { daemon.for_many_users() };
    limit_heaps();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(ASYNC_WORKERS)
        .thread_keep_alive(BLOCKING_THREAD_KEEP_ALIVE)
        .enable_all()
        .build();
    let runtime = runtime.map_err(|error| ErrorBody::new(ErrorCode::Internal, error))?;
    let (signals, other_signals) = {
        let _context = runtime.enter();
        (listen_for_stop().ok(), listen(WITHOUT_EFFECT).ok())
    };
    limit_stop();
    let daemon = Arc::new(daemon);
    daemon.store.make_reserve();
    let busy = Arc::clone(&daemon);
    let scrubber = Scrubber::start(Arc::clone(&daemon.store), config.scrub_policy(), move || busy.is_busy());
    let scrubber = scrubber.map_err(|error| ErrorBody::new(ErrorCode::Internal, error))?;
    let store = Arc::clone(&daemon.store);
    store.start_index();
    runtime.spawn(report_other_signals(other_signals));
    let served = runtime.block_on(serve(daemon, &socket, &config, signals));
    drop(scrubber);
    // Aborts work in progress: the next start deletes what is not committed.
    runtime.shutdown_background();
    store.stop_index();
    served
}

async fn serve(
    daemon: Arc<Daemon>,
    path: &Path,
    config: &Config,
    signals: Option<Signals>,
) -> Result<(), ErrorBody> {
    let socket = Socket::bind(path).map_err(|error| endpoint::bind_error(path, &error))?;
    endpoint::admit(&socket, config)?;
    daemon.store.announce(Some(path));
    tracing::info!("serving {} on {}", daemon.store.place().display(), path.display());
    let server = Server::new(Arc::clone(&daemon));
    tokio::select! {
        () = server.serve(socket.listener()) => {}
        () = housekeeping::run(daemon) => {}
        () = stop_requested(signals) => tracing::info!("stopping; clients keep what they have mapped"),
    }
    Ok(())
}

/// Waits for a stop signal; forever if the process cannot handle signals.
async fn stop_requested(signals: Option<Signals>) {
    match signals {
        Some(mut signals) => drop(first_of(&mut signals).await),
        None => std::future::pending().await,
    }
}

/// Signals that would end the process, as by a crash, if it did not handle them. The configuration is read only at
/// the start, so a daemon has nothing to reload at SIGHUP, and it survives the terminal that it was started in.
const WITHOUT_EFFECT: [SignalKind; 3] =
    [SignalKind::hangup(), SignalKind::user_defined1(), SignalKind::user_defined2()];

/// Logs the signals of [`WITHOUT_EFFECT`].
async fn report_other_signals(signals: Option<Signals>) {
    let Some(mut signals) = signals else { return };
    loop {
        match first_of(&mut signals).await {
            kind if kind == SignalKind::hangup() => {
                tracing::info!("SIGHUP: ignored; restart the daemon to read the configuration again");
            }
            kind => tracing::info!("signal {}: ignored", kind.as_raw_value()),
        }
    }
}

/// How long a regular stop may take. Service managers wait a few seconds longer before they kill.
const STOP_LIMIT: Duration = Duration::from_secs(7);

/// Exits [`STOP_LIMIT`] after a stop signal if the regular stop hangs on a disk, a lock or the runtime.
/// Committed data is safe, and the next start deletes the rest. Has its own thread and runtime, which do not
/// depend on anything that may hang.
fn limit_stop() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let Ok(runtime) = runtime else { return };
    // Before the daemon serves, so that no signal is missed.
    let signals = runtime.block_on(async { listen_for_stop().ok() });
    let watch = move || {
        runtime.block_on(stop_requested(signals));
        std::thread::sleep(STOP_LIMIT);
        tracing::warn!("not stopped after {} s: exiting now", STOP_LIMIT.as_secs());
        #[expect(clippy::exit, reason = "the main thread hangs")]
        std::process::exit(0);
    };
    let started = std::thread::Builder::new().name("stop-limit".to_owned()).spawn(watch);
    if let Err(error) = started {
        tracing::warn!("cannot start the thread that limits the time of a stop: {error}");
    }
}

/// Raises the soft limit of open files to the hard limit: descriptors that are being sent to clients count
/// for this process. The default soft limit is low only for programs that use `select`.
pub(super) fn raise_descriptor_limit() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let raised = rustix::process::Rlimit { current: limit.maximum, ..limit };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::warn!("cannot raise the limit of open files, which is {:?}: {error}", limit.current);
    }
}
