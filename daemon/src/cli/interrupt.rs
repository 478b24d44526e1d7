//! Ctrl-C while something runs that can be gone on with.

use std::io;
use std::thread;

use tokio::runtime::Builder;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// The exit code of a command that Ctrl-C has stopped, as shells have it.
const EXIT_CODE: i32 = 130;

/// From now on Ctrl-C calls `parting` and ends the process. Not if whoever started it wants it to
/// ignore Ctrl-C, as shells do with what scripts have in the background.
///
/// # Errors
/// When the signal cannot be waited for; then it ends the process as it always does.
pub(super) fn on_interrupt(parting: impl FnOnce() + Send + 'static) -> io::Result<()> {
    if is_ignored() {
        return Ok(());
    }
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let mut interrupt = {
        let _context = runtime.enter();
        signal(SignalKind::interrupt())?
    };
    let wait = move || {
        runtime.block_on(interrupt.recv());
        parting();
        // The other threads are in the middle of something, as they would be without this one.
        #[expect(clippy::exit, reason = "it stands for the signal, which ends the process too")]
        std::process::exit(EXIT_CODE);
    };
    thread::Builder::new().name("interrupt".to_owned()).spawn(wait).map(drop)
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
fn is_ignored() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    ignored_signals(&status).is_some_and(|signals| signals & (1 << (SIGINT - 1)) != 0)
}

const SIGINT: u32 = 2;

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
