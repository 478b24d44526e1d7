//! `POST /v1/pull`: the response is one line for each event.

use std::sync::Arc;

use blobd_client::protocol::error::ErrorAnswer;
use blobd_client::protocol::request::PullParams;
use blobd_client::protocol::response::{PullEvent, PullPlan, PullProgress};
use tokio::runtime::Handle;
use tokio::sync::mpsc;

use super::body::HttpResponse;
use super::events::{event_response, permit_for};
use crate::ops;
use crate::state::Daemon;

/// Starts a pull. It stops when the client closes the connection.
pub(super) fn start(daemon: &Arc<Daemon>, uid: u32, params: PullParams) -> HttpResponse {
    event_response(|events| run(Arc::clone(daemon), uid, params, events))
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
    let waiting = || {
        let status = "waiting for other pulls to end".to_owned();
        PullEvent::Progress(PullProgress { status, ..PullProgress::default() })
    };
    let Some(permit) = permit_for(&daemon.work.pulls, uid, &events, waiting).await else { return };
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
