//! Signals that end a process, while something runs that can be gone on with or must not be left behind.

use std::io;
use std::task::Poll;
use std::thread;

use tokio::runtime::Builder;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// From now on Ctrl-C calls `parting` and ends the process. Not if whoever started it wants it to
/// ignore Ctrl-C, as shells do with what scripts have in the background.
///
/// # Errors
/// When the signal cannot be waited for; then it ends the process as it always does.
pub(super) fn on_interrupt(parting: impl FnOnce() + Send + 'static) -> io::Result<()> {
    on_signals([SignalKind::interrupt()], parting)
}

/// The same for every signal by which users, terminals and systems end commands.
///
/// # Errors
/// As for [`on_interrupt`].
pub(super) fn on_end(parting: impl FnOnce() + Send + 'static) -> io::Result<()> {
    on_signals([SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()], parting)
}

fn on_signals(
    kinds: impl IntoIterator<Item = SignalKind>,
    parting: impl FnOnce() + Send + 'static,
) -> io::Result<()> {
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let mut signals = Vec::new();
    {
        let _context = runtime.enter();
        for kind in kinds.into_iter().filter(|kind| !is_ignored(*kind)) {
            signals.push((kind, signal(kind)?));
        }
    }
    if signals.is_empty() {
        return Ok(());
    }
    let wait = move || {
        let kind = runtime.block_on(first_of(&mut signals));
        parting();
        // The other threads are in the middle of something, as they would be without this one.
        #[expect(clippy::exit, reason = "it stands for the signal, which ends the process too")]
        // The exit code of a command that a signal has stopped, as shells have it.
        std::process::exit(128 + kind.as_raw_value());
    };
    thread::Builder::new().name("interrupt".to_owned()).spawn(wait).map(drop)
}

/// Waits for the first of several signals.
async fn first_of(signals: &mut [(SignalKind, Signal)]) -> SignalKind {
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

/// The orders to stop that a service gets, caught from the moment this is made: what is begun
/// afterwards is not cut off by one.
pub(super) struct StopSignals {
    terminate: Signal,
    interrupt: Signal,
}

impl StopSignals {
    /// Catches them. To be called within a runtime.
    ///
    /// # Errors
    /// When they cannot be caught.
    pub(super) fn listen() -> io::Result<Self> {
        let (terminate, interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        Ok(Self { terminate, interrupt })
    }

    /// Waits for the first, which may have come already.
    pub(super) async fn received(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

/// What the kernel says; a handler would be more than was asked for.
fn is_ignored(kind: SignalKind) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    ignored_signals(&status).is_some_and(|signals| signals & (1 << (kind.as_raw_value() - 1)) != 0)
}

/// A bit for each signal, the first one lowest.
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
