//! `POST /v1/pull`: the response is one line for each event.

use std::sync::Arc;

use blobd_client::protocol::error::ErrorAnswer;
use blobd_client::protocol::request::PullParams;
use blobd_client::protocol::response::{PullEvent, PullPlan, PullProgress};
use bytes::Bytes;
use serde::Serialize;
use tokio::runtime::Handle;
use tokio::sync::mpsc;

use super::body::{HttpResponse, Lines, lines_response};
use crate::ops;
use crate::permits::Exhausted;
use crate::state::Daemon;

/// Lines that may wait for a client. Further progress is dropped, but never the last line.
pub(super) const LINES_WAITING: usize = 64;

/// Starts a pull. It stops when the client closes the connection.
pub(super) fn start(daemon: &Arc<Daemon>, uid: u32, params: PullParams) -> HttpResponse {
    let (events, waiting) = mpsc::channel(LINES_WAITING);
    let (lines, body) = mpsc::channel(LINES_WAITING);
    tokio::spawn(run(Arc::clone(daemon), uid, params, events));
    tokio::spawn(write_lines(waiting, lines));
    lines_response(Lines(body))
}

/// What a pull would download. Ends soon after the future is dropped, as when the client disconnects.
pub(super) async fn plan(
    daemon: &Arc<Daemon>,
    uid: u32,
    params: PullParams,
) -> Result<PullPlan, ops::OpError> {
    let (wanted, _unless_dropped) = mpsc::channel(1);
    let permit = daemon.work.plans.acquire(uid).await;
    let handle = Handle::current();
    let plan = move |daemon: &Daemon| {
        // Returned when the work is over, not when its client has disconnected.
        let _permit = permit;
        let Daemon { store, registry, transfers, .. } = daemon;
        let (handle, params, wanted) = (&handle, &params, &wanted);
        ops::plan_pull(&ops::Planning { store, registry, transfers, handle, uid, params, wanted })
    };
    daemon.blocking(plan).await
}

async fn run(daemon: Arc<Daemon>, uid: u32, params: PullParams, events: mpsc::Sender<PullEvent>) {
    let name = params.source.to_string();
    let handle = Handle::current();
    let sender = events.clone();
    let pulls = &daemon.work.pulls;
    let permit = match pulls.try_acquire(uid) {
        Ok(permit) => permit,
        Err(Exhausted) => {
            let status = "waiting for other pulls to end".to_owned();
            let progress = PullProgress { status, ..PullProgress::default() };
            let _ = events.try_send(PullEvent::Progress(progress));
            tokio::select! {
                permit = pulls.acquire(uid) => permit,
                () = events.closed() => return,
            }
        }
    };
    let pull = move |daemon: &Daemon| {
        // Returned when the work is over, not when its client has read the last line.
        let _permit = permit;
        let Daemon { store, registry, transfers, work, .. } = daemon;
        let (handle, params, events, fetches) = (&handle, &params, &sender, &work.fetches);
        ops::pull(ops::Pull { store, registry, transfers, fetches, handle, uid, params, events })
    };
    let last = match daemon.blocking(pull).await {
        Ok(done) => PullEvent::Done(done),
        Err(error) => {
            if let Some(omitted) = daemon.limits.log.admit(uid) {
                tracing::warn!("pull of {name}: {error}{omitted}");
            }
            PullEvent::Failed(ErrorAnswer { error: error.body() })
        }
    };
    // Fails when the client has disconnected.
    let _ = events.send(last).await;
}

/// Ends when the client disconnects, and drops `events`, which stops the work.
pub(super) async fn write_lines<E: Serialize>(mut events: mpsc::Receiver<E>, lines: mpsc::Sender<Bytes>) {
    loop {
        let event = tokio::select! {
            event = events.recv() => event,
            () = lines.closed() => return,
        };
        let Some(event) = event else { return };
        let mut line = serde_json::to_vec(&event).unwrap_or_default();
        line.push(b'\n');
        if lines.send(line.into()).await.is_err() {
            return;
        }
    }
}
