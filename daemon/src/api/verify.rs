//! `POST /v1/verify`: the response is one line for each event.

use std::sync::Arc;

use blobd_client::protocol::error::ErrorAnswer;
use blobd_client::protocol::request::VerifyParams;
use blobd_client::protocol::upkeep::{VerifyEvent, VerifyProgress};
use tokio::runtime::Handle;
use tokio::sync::mpsc;

use super::body::{HttpResponse, Lines, lines_response};
use super::pull::{LINES_WAITING, write_lines};
use crate::ops;
use crate::permits::Exhausted;
use crate::state::Daemon;

/// Starts a verification. It stops when the client closes the connection.
pub(super) fn start(daemon: &Arc<Daemon>, uid: u32, params: VerifyParams) -> HttpResponse {
    let (events, waiting) = mpsc::channel(LINES_WAITING);
    let (lines, body) = mpsc::channel(LINES_WAITING);
    tokio::spawn(run(Arc::clone(daemon), uid, params, events));
    tokio::spawn(write_lines(waiting, lines));
    lines_response(Lines(body))
}

async fn run(daemon: Arc<Daemon>, uid: u32, params: VerifyParams, events: mpsc::Sender<VerifyEvent>) {
    let verifications = &daemon.work.verifications;
    let permit = match verifications.try_acquire(uid) {
        Ok(permit) => permit,
        Err(Exhausted) => {
            let status = "waiting for another verification to end".to_owned();
            let progress = VerifyProgress { status, ..VerifyProgress::default() };
            let _ = events.try_send(VerifyEvent::Progress(progress));
            tokio::select! {
                permit = verifications.acquire(uid) => permit,
                () = events.closed() => return,
            }
        }
    };
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
