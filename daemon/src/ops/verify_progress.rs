//! Progress of a verification and of the repairs that it makes.

use blobd_client::protocol::upkeep::{VerifyEvent, VerifyProgress};
use tokio::sync::mpsc::Sender;

/// Sends progress to the client. It is dropped when the client does not keep up; the next line says more
/// anyway.
pub(super) fn send_progress(events: &Sender<VerifyEvent>, progress: VerifyProgress) {
    let _ = events.try_send(VerifyEvent::Progress(progress));
}
