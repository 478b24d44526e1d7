//! Progress events of pulls, verifications and repairs.

use tokio::sync::mpsc::Sender;

/// Sends progress to the client. It is dropped when the client does not keep up; the next event replaces it.
pub(super) fn send_progress<P>(events: &Sender<P>, progress: P) {
    let _ = events.try_send(progress);
}
