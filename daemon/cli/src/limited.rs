//! Work that may not return, such as a question to a daemon or a directory server that does not respond.

use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

/// The result of the work; `None` if there is none in time. The work then goes on until the process ends.
pub(crate) fn within<T: Send + 'static>(
    limit: Duration,
    work: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let (done, result) = channel();
    let run = move || {
        // The receiver may have given up.
        let _ = done.send(work());
    };
    let _not_joined = thread::Builder::new().name("limited".to_owned()).spawn(run).ok()?;
    result.recv_timeout(limit).ok()
}
