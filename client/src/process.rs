//! The signals that end a process, for programs that must clean up or report first, and its limit of open files.

use std::io;
use std::task::Poll;
use std::thread;

use tokio::runtime::Builder;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// From now on Ctrl-C calls `cleanup` and ends the process. If the parent process has set SIGINT to be
/// ignored, as shells do for background jobs of scripts, it stays ignored.
pub fn on_interrupt(cleanup: impl FnOnce() + Send + 'static) -> io::Result<()> {
    on_signals([SignalKind::interrupt()], cleanup)
}

/// As [`on_interrupt`], for SIGINT, SIGTERM and SIGHUP.
pub fn on_end(cleanup: impl FnOnce() + Send + 'static) -> io::Result<()> {
    on_signals([SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()], cleanup)
}

fn on_signals(
    kinds: impl IntoIterator<Item = SignalKind>,
    cleanup: impl FnOnce() + Send + 'static,
) -> io::Result<()> {
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let mut signals = {
        let _context = runtime.enter();
        listen(kinds.into_iter().filter(|kind| !is_ignored(*kind)))?
    };
    if signals.is_empty() {
        return Ok(());
    }
    let wait = move || {
        let kind = runtime.block_on(first_of(&mut signals));
        cleanup();
        #[expect(
            clippy::exit,
            reason = "the signal would end the process in the same way, whatever the other threads do"
        )]
        // The exit code that shells report for a command ended by a signal.
        std::process::exit(128 + kind.as_raw_value());
    };
    thread::Builder::new().name("interrupt".to_owned()).spawn(wait).map(drop)
}

/// Signals that are handled.
pub type Signals = Vec<(SignalKind, Signal)>;

/// Handles signals from now on: none is lost, and none ends the process. Must be called within a runtime.
pub fn listen(kinds: impl IntoIterator<Item = SignalKind>) -> io::Result<Signals> {
    kinds.into_iter().map(|kind| Ok((kind, signal(kind)?))).collect()
}

/// As [`listen`], for the signals that ask a service to stop.
pub fn listen_for_stop() -> io::Result<Signals> {
    listen([SignalKind::terminate(), SignalKind::interrupt(), SignalKind::quit()])
}

/// As [`listen_for_stop`], and when the terminal is closed: for commands that last as long as their terminal.
pub fn listen_for_end() -> io::Result<Signals> {
    let hangup = if is_ignored(SignalKind::hangup()) { None } else { Some(SignalKind::hangup()) };
    Ok(listen_for_stop()?.into_iter().chain(listen(hangup)?).collect())
}

/// Waits for the first signal; returns immediately if one has arrived since [`listen`].
pub async fn first_of(signals: &mut Signals) -> SignalKind {
    std::future::poll_fn(|context| {
        for (kind, signal) in signals.iter_mut() {
            if signal.poll_recv(context).is_ready() {
                return Poll::Ready(*kind);
            }
        }
        Poll::Pending
    })
    .await
}

/// Raises the soft limit of open files to the hard limit: descriptors that are being sent to clients count
/// for this process. The default soft limit is low only for programs that use `select`.
pub fn raise_descriptor_limit() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let raised = rustix::process::Rlimit { current: limit.maximum, ..limit };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::warn!("cannot raise the limit of open files, which is {:?}: {error}", limit.current);
    }
}

/// Whether the kernel ignores the signal for this process: then it must not get a handler.
fn is_ignored(kind: SignalKind) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    ignored_signals(&status).is_some_and(|signals| signals & (1 << (kind.as_raw_value() - 1)) != 0)
}

/// A bit for each signal; signal 1 is the lowest.
fn ignored_signals(status: &str) -> Option<u64> {
    let field = status.lines().find_map(|line| line.strip_prefix("SigIgn:"))?;
    u64::from_str_radix(field.trim(), 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ignored_signals_are_read_from_the_status() {
        let status = "Name:\tblobd\nSigBlk:\t0000000000000000\nSigIgn:\t0000000000001002\n";
        assert_eq!(ignored_signals(status), Some(0x1002));
        assert_eq!(ignored_signals("Name:\tblobd\n"), None);
    }
}
