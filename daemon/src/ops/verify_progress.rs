//! Progress events of a verification and of its repairs.

use blobd_client::protocol::upkeep::{VerifyEvent, VerifyProgress};
use tokio::sync::mpsc::Sender;

/// Sends progress to the client. It is dropped when the client does not keep up; the next event replaces it.
pub(super) fn send_progress(events: &Sender<VerifyEvent>, progress: VerifyProgress) {
    let _ = events.try_send(VerifyEvent::Progress(progress));
}
