//! The daemon: how it starts, runs and stops.

mod endpoint;
mod reload;
mod start_failure;

use std::sync::Arc;
use std::time::Duration;

use blobd_client::paths::GivenPaths;
use blobd_client::process::{Signals, first_of, listen, listen_for_stop, raise_descriptor_limit};
use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use blobd_store::Store;
use tokio::signal::unix::SignalKind;
use tracing_mutex::stdsync::Mutex;

use self::endpoint::Endpoint;
use self::reload::Reloader;
pub(crate) use self::reload::settings_of_daemon;
use crate::api;
use crate::audit::{start_record, stop_record};
use crate::config::{Config, ConfigError};
use crate::embedded::{AUDIT_DIRECTORY, registry_policy, start_audit, start_error};
use crate::housekeeping;
use crate::locks::lock;
use crate::metrics::Metrics;
use crate::monitoring::MetricsServer;
use crate::names::Names;
use crate::network::Network;
use crate::server::{Server, Socket};
use crate::state::Daemon;
use crate::store_access::open_for_daemon;
use crate::sys::limit_heaps;
use crate::systemd::{Notifier, PassedSocket, keep_alive};

/// Threads that serve the connections. Their work is short; the second one serves while a system call delays
/// the first. Blocking work runs on other threads.
const ASYNC_WORKERS: usize = 2;

/// How long an idle thread for blocking work lives. Idle threads get work in turn, so with a longer time a
/// few requests per second would keep alive all threads that a burst has started.
const BLOCKING_THREAD_KEEP_ALIVE: Duration = Duration::from_millis(100);

/// Runs the daemon until it is stopped.
///
/// # Errors
/// If it cannot start.
pub fn run(paths: &GivenPaths) -> Result<(), ErrorBody> {
    // Before anything is opened.
    let passed = PassedSocket::take().map_err(|error| endpoint::activation_error(&error))?;
    let waiting = passed.as_ref().and_then(|passed| passed.listener().try_clone().ok());
    let started = start(paths, passed);
    if let (Err(error), Some(waiting)) = (&started, waiting) {
        start_failure::answer_waiting(&waiting, error);
    }
    started
}

/// The same as for every command, unless a service manager waits for the daemon.
#[must_use]
pub fn exit_code(error: &ErrorBody) -> u8 {
    start_failure::exit_code(error, Notifier::is_requested())
}

fn start(paths: &GivenPaths, passed: Option<PassedSocket>) -> Result<(), ErrorBody> {
    let notifier = Notifier::from_environment();
    raise_descriptor_limit();
    let mut config = load_config_with_names(paths)?;
    let root = config.root_for(paths)?;
    config.check_root(&root).map_err(ConfigError::body)?;
    let endpoint = Endpoint::find(paths, &mut config, passed)?;
    let daemon = {
        let _time = notifier.starting(&format!("opening the store {}", root.display()));
        let store = open_for_daemon(&root, &config)?;
        // Other operations are first tried by the first change.
        let _ = store.content().try_renames();
        if let Some(reason) = store.content().read_only_reason() {
            tracing::warn!("store {}: is read-only: {reason}", root.display());
        }
        new_daemon(store, &config)?
    };
    limit_heaps();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(ASYNC_WORKERS)
        .thread_keep_alive(BLOCKING_THREAD_KEEP_ALIVE)
        .enable_all()
        .build();
    let runtime = runtime.map_err(|error| ErrorBody::new(ErrorCode::Internal, error))?;
    let (signals, other_signals) = {
        let _context = runtime.enter();
        (listen_for_stop().ok(), listen(OTHER_SIGNALS).ok())
    };
    limit_stop();
    let daemon = Arc::new(daemon);
    daemon.store.ledger().make_reserve();
    start_audit(&daemon, &config)?;
    if config.audit.directory.is_some() {
        // A daemon whose administrator has named a directory does not run without its audit log.
        daemon.audit.check(&config.place_of(AUDIT_DIRECTORY))?;
    }
    let audit = Arc::clone(&daemon.audit);
    let reloader = Arc::new(Mutex::new(Reloader::start(paths, &daemon, config.clone())?));
    let store = Arc::clone(&daemon.store);
    let long_work = daemon.long_work.clone();
    store.content().start_index();
    runtime.spawn(handle_other_signals(other_signals, Arc::clone(&reloader)));
    let served = runtime.block_on(async {
        let socket = endpoint.listen(&config)?;
        let metrics = listen_for_metrics(&config).await?;
        let network = Network::start(&daemon, &config).await?;
        let signal = serve(daemon, socket, metrics, &notifier, signals).await;
        drop(network);
        Ok(signal)
    });
    lock(&reloader).stop();
    // Aborts work in progress: the next start deletes what is not committed.
    runtime.shutdown_timeout(RECORDS_LIMIT);
    long_work.wait(RECORDS_LIMIT);
    store.content().stop_index();
    if let Ok(signal) = &served {
        audit.record(stop_record(*signal));
    }
    audit.stop();
    served.map(drop)
}

/// How long a stop waits for the records of requests that it has aborted, such as an open whose client has descriptors
/// and has not acknowledged them.
const RECORDS_LIMIT: Duration = Duration::from_millis(500);

/// Waits for users and groups: while a machine starts, its name service may not answer yet.
fn load_config_with_names(paths: &GivenPaths) -> Result<Config, ErrorBody> {
    /// The service manager starts the daemon again afterwards.
    const ATTEMPTS: u32 = 5;
    const PAUSE: Duration = Duration::from_secs(2);
    for _attempt in 1..ATTEMPTS {
        let config = Config::load_for(paths)?;
        let Some(error) = &config.unresolved else { return Ok(config) };
        tracing::warn!("{error}; trying again in {} s", PAUSE.as_secs());
        std::thread::sleep(PAUSE);
        Names::system().refresh();
    }
    Config::load_for(paths)?.with_known_names()
}

fn new_daemon(store: Store, config: &Config) -> Result<Daemon, ErrorBody> {
    let policy = registry_policy(config);
    let metrics =
        Metrics::new(api::verb_names()).map_err(|error| ErrorBody::new(ErrorCode::Internal, error))?;
    let daemon = Daemon::new(store, &policy, metrics).map_err(|error| start_error(config, error))?;
    let daemon = daemon.with_transfers(config.transfer_policy());
    Ok(if config.is_single_user() { daemon } else { daemon.for_many_users() })
}

async fn listen_for_metrics(config: &Config) -> Result<Option<MetricsServer>, ErrorBody> {
    let Some(address) = config.metrics.listen else { return Ok(None) };
    let server = MetricsServer::bind(address).await?;
    let address = server.address().map_err(|error| ErrorBody::new(ErrorCode::Internal, error))?;
    tracing::info!("metrics on http://{address}/metrics");
    Ok(Some(server))
}

async fn serve_metrics(server: Option<MetricsServer>, daemon: &Arc<Daemon>) {
    match server {
        Some(server) => server.serve(daemon).await,
        None => std::future::pending().await,
    }
}

async fn serve(
    daemon: Arc<Daemon>,
    socket: Socket,
    metrics: Option<MetricsServer>,
    notifier: &Notifier,
    signals: Option<Signals>,
) -> Option<&'static str> {
    let place = daemon.store.content().place().display().to_string();
    daemon.audit.record(start_record(&socket.path().display().to_string(), &place));
    daemon.store.content().announce(Some(socket.path()), None);
    let serving = format!("serving {place} on {}", socket.path().display());
    tracing::info!("{serving}");
    let server = Server::new(Arc::clone(&daemon));
    notifier.ready(&serving);
    let signal = tokio::select! {
        () = server.serve(socket.listener()) => None,
        () = serve_metrics(metrics, &daemon) => None,
        () = housekeeping::run(Arc::clone(&daemon)) => None,
        () = keep_alive(notifier) => None,
        signal = stop_requested(signals) => {
            tracing::info!("stopping; clients keep what they have mapped");
            Some(signal_name(signal))
        }
    };
    notifier.stopping();
    // Refuses new connections, or leaves them to systemd, whose next daemon answers them.
    drop(socket);
    complete_requests(&server, &daemon).await;
    signal
}

/// How long a daemon that stops waits for requests that it has read. They take milliseconds, unless their client or
/// the disk is slow.
const REQUESTS_LIMIT: Duration = Duration::from_secs(2);

/// Completes requests and opens that have begun, so that no client notices that the daemon is replaced. Pulls,
/// imports and verifications end. Clients repeat the requests that were not read.
async fn complete_requests(server: &Server, daemon: &Daemon) {
    let completed = async {
        server.end(REQUESTS_LIMIT).await;
        while daemon.limits.opening.in_use() > 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    if tokio::time::timeout(REQUESTS_LIMIT, completed).await.is_err() {
        tracing::info!(
            "stopping although some requests are not completed after {} s",
            REQUESTS_LIMIT.as_secs()
        );
    }
}

/// Waits for a stop signal; forever if the process cannot handle signals.
async fn stop_requested(signals: Option<Signals>) -> SignalKind {
    match signals {
        Some(mut signals) => first_of(&mut signals).await,
        None => std::future::pending().await,
    }
}

/// The name of a signal that [`listen_for_stop`] waits for.
fn signal_name(signal: SignalKind) -> &'static str {
    if signal == SignalKind::interrupt() {
        "SIGINT"
    } else if signal == SignalKind::quit() {
        "SIGQUIT"
    } else {
        "SIGTERM"
    }
}

/// Signals that would end the process, as by a crash, if it did not handle them. A terminal that closes sends SIGHUP
/// too; the daemon survives it and reads a configuration that has not changed.
const OTHER_SIGNALS: [SignalKind; 3] =
    [SignalKind::hangup(), SignalKind::user_defined1(), SignalKind::user_defined2()];

/// Reads the configuration again at SIGHUP, and logs the other ones of [`OTHER_SIGNALS`].
async fn handle_other_signals(signals: Option<Signals>, reloader: Arc<Mutex<Reloader>>) {
    let Some(mut signals) = signals else { return };
    loop {
        match first_of(&mut signals).await {
            kind if kind == SignalKind::hangup() => {
                let reloader = Arc::clone(&reloader);
                let reload = move || lock(&reloader).reload();
                let reloaded = tokio::task::spawn_blocking(reload).await;
                if let Err(panic) = reloaded {
                    tracing::error!("SIGHUP: the configuration was not reloaded: {panic}");
                }
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
