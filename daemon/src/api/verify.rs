//! `POST /v1/verify`: the response is one line for each event.

use std::sync::Arc;

use blobd_client::protocol::error::ErrorAnswer;
use blobd_client::protocol::request::VerifyParams;
use blobd_client::protocol::upkeep::{VerifyEvent, VerifyProgress};
use tokio::runtime::Handle;
use tokio::sync::mpsc;

use super::body::HttpResponse;
use super::events::{event_response, permit_for};
use crate::ops;
use crate::state::Daemon;

/// Starts a verification. It stops when the client closes the connection.
pub(super) fn start(daemon: &Arc<Daemon>, uid: u32, params: VerifyParams) -> HttpResponse {
    event_response(|events| run(Arc::clone(daemon), uid, params, events))
}

async fn run(daemon: Arc<Daemon>, uid: u32, params: VerifyParams, events: mpsc::Sender<VerifyEvent>) {
    let waiting = || {
        let status = "waiting for another verification to end".to_owned();
        VerifyEvent::Progress(VerifyProgress { status, ..VerifyProgress::default() })
    };
    let Some(permit) = permit_for(&daemon.work.verifications, uid, &events, waiting).await else { return };
    let (handle, sender) = (Handle::current(), events.clone());
    let verify = move |daemon: &Daemon| {
        // Returned when the work is over, not when its client has read the last line.
        let _permit = permit;
        ops::verify(&daemon.store, &daemon.registry, &handle, &params, &sender)
    };
    let last = match daemon.blocking(verify).await {
        Ok(verified) => VerifyEvent::Done(verified),
        Err(error) => {
            if let Some(omitted) = daemon.limits.log.admit(uid) {
                tracing::warn!("verify: {error}{omitted}");
            }
            VerifyEvent::Failed(ErrorAnswer { error: error.body() })
        }
    };
    // Fails when the client has disconnected.
    let _ = events.send(last).await;
}
