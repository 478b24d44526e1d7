//! `POST /v1/pull`, `POST /v1/verify`, `POST /v1/edit` and `POST /v1/promote`: the response is one JSON document per
//! line for each event.

use std::sync::Arc;

use blobd_client::protocol::edit::{EditEvent, EditParams, EditProgress};
use blobd_client::protocol::error::{ErrorBody, ErrorResponse};
use blobd_client::protocol::promote::{PromoteEvent, PromoteParams, PromoteProgress};
use blobd_client::protocol::request::{PullParams, VerifyParams};
use blobd_client::protocol::response::{PullEvent, PullProgress};
use blobd_client::protocol::upkeep::{VerifyEvent, VerifyProgress};
use serde::Serialize;
use tokio::runtime::Handle;
use tokio::sync::mpsc::{self, Sender};
use tracing::Instrument as _;

use super::Caller;
use super::body::{HttpResponse, lines_response};
use crate::ops::{self, OpError};
use crate::permits::{Permit, PermitPool};
use crate::request_record::RequestRecord;
use crate::state::{Daemon, WorkLimits};

/// Events that may wait for a client. Further progress is dropped, but never the last event.
const EVENTS_WAITING: usize = 64;

pub(super) fn pull(caller: &Caller, params: PullParams) -> Result<HttpResponse, ErrorBody> {
    let (requester, policy, handle) = (caller.requester(), caller.policy(), Handle::current());
    let record = Arc::clone(&caller.record);
    let status = "waiting for other pulls to end".to_owned();
    let model = ops::pulled_name(&params);
    caller.daemon.metrics.events.pulls_started.inc();
    let watch = caller.daemon.running_pulls.begin(requester, model, params.source.to_string());
    let work = Work {
        name: format!("pull of {}", params.source),
        pool: |work| &work.pulls,
        waiting: PullEvent::Progress(PullProgress { status, ..PullProgress::default() }),
        failed: PullEvent::Failed,
    };
    work.start(caller, move |daemon, events| {
        let registry = daemon.registry();
        let pull = daemon.pull(&registry, &handle, requester, &policy, &params, events);
        let done = ops::pull(ops::Pull { watch: Some(&watch), ..pull });
        done.inspect(|done| record.finished(done)).map(PullEvent::Done)
    })
}

pub(super) fn verify(caller: &Caller, params: VerifyParams) -> Result<HttpResponse, ErrorBody> {
    let (record, policy, handle) = (Arc::clone(&caller.record), caller.policy(), Handle::current());
    let status = "waiting for another verification to end".to_owned();
    let work = Work {
        name: "verify".to_owned(),
        pool: |work| &work.verifications,
        waiting: VerifyEvent::Progress(VerifyProgress { status, ..VerifyProgress::default() }),
        failed: VerifyEvent::Failed,
    };
    work.start(caller, move |daemon, events| {
        let verified = ops::verify(&daemon.store, &daemon.registry(), &handle, &policy, &params, events);
        verified.inspect(|verified| record.finished(verified)).map(VerifyEvent::Done)
    })
}

pub(super) fn edit(caller: &Caller, params: EditParams) -> Result<HttpResponse, ErrorBody> {
    let (requester, policy, record) = (caller.requester(), caller.policy(), Arc::clone(&caller.record));
    let status = "waiting for other imports and edits to end".to_owned();
    let work = Work {
        name: format!("edit of {}", params.source.short()),
        // Both read and hash a whole model.
        pool: |work| &work.imports,
        waiting: EditEvent::Progress(EditProgress { status, ..EditProgress::default() }),
        failed: EditEvent::Failed,
    };
    work.start(caller, move |daemon, events| {
        let mut before = 0;
        let mut report = |completed: u64, total: u64| {
            daemon.activity.note_imported(completed.saturating_sub(before));
            before = completed;
            let status = "hashing".to_owned();
            let progress = EditProgress { status, total: Some(total), completed: Some(completed) };
            // The client may be slow; the next event replaces this one.
            let _ = events.try_send(progress.into());
            !events.is_closed()
        };
        let edited = ops::edit(&daemon.store, requester, &policy, &params, &mut report);
        edited.inspect(|edited| record.finished(edited)).map(EditEvent::Done)
    })
}

pub(super) fn promote(caller: &Caller, params: PromoteParams) -> Result<HttpResponse, ErrorBody> {
    let (requester, policy, record) = (caller.requester(), caller.policy(), Arc::clone(&caller.record));
    let status = "waiting for other imports and edits to end".to_owned();
    let work = Work {
        name: format!("promotion of {}", params.reference.short()),
        // As an import, it reads, hashes and writes a whole model.
        pool: |work| &work.imports,
        waiting: PromoteEvent::Progress(PromoteProgress { status, ..PromoteProgress::default() }),
        failed: PromoteEvent::Failed,
    };
    work.start(caller, move |daemon, events| {
        let mut report = |completed: u64, total: u64| {
            let status = "copying".to_owned();
            let progress = PromoteProgress { status, total: Some(total), completed: Some(completed) };
            // The client may be slow; the next event replaces this one.
            let _ = events.try_send(progress.into());
            !events.is_closed()
        };
        let promoted = ops::promote(&daemon.store, requester, &policy, &params, &mut report);
        promoted.inspect(|promoted| record.finished(promoted)).map(PromoteEvent::Done)
    })
}

/// Work that reports events.
struct Work<E> {
    /// For the log.
    name: String,
    pool: fn(&WorkLimits) -> &PermitPool,
    /// Sent if the work has to wait for its turn.
    waiting: E,
    failed: fn(ErrorResponse) -> E,
}

impl<E: Serialize + Send + 'static> Work<E> {
    /// Starts `run`, whose result is the last event. It stops when the client closes the connection, which drops
    /// the receiver of the events.
    fn start(
        self,
        caller: &Caller,
        run: impl FnOnce(&Daemon, &Sender<E>) -> Result<E, OpError> + Send + 'static,
    ) -> Result<HttpResponse, ErrorBody> {
        let lasting = caller.lasting()?;
        let (events, waiting) = mpsc::channel(EVENTS_WAITING);
        caller.record.defer();
        let record = Arc::clone(&caller.record);
        let work = self.run(Arc::clone(&caller.daemon), caller.peer.uid, record, events, run);
        tokio::spawn(work.in_current_span());
        let mut response = lines_response(waiting);
        // Counts the connection as long-lived until the response is complete.
        response.body_mut().hold(lasting);
        Ok(response)
    }

    async fn run(
        self,
        daemon: Arc<Daemon>,
        uid: u32,
        record: Arc<RequestRecord>,
        events: Sender<E>,
        run: impl FnOnce(&Daemon, &Sender<E>) -> Result<E, OpError> + Send + 'static,
    ) {
        let Some(permit) = permit_for((self.pool)(&daemon.work), uid, &events, self.waiting).await else {
            return record.cancelled();
        };
        let sender = events.clone();
        let work = move |daemon: &Daemon| {
            // Returned when the work is over, not when its client has read the last line.
            let _permit = permit;
            run(daemon, &sender)
        };
        let last = daemon.blocking(work).await.unwrap_or_else(|error| {
            if let Some(omitted) = daemon.limits.log.admit(uid) {
                tracing::warn!("{}: {error}{omitted}", self.name);
            }
            if events.is_closed() {
                record.cancelled();
            }
            (self.failed)(ErrorResponse { error: record.failed(error.body()) })
        });
        record.succeeded();
        // Fails when the client has disconnected.
        let _ = events.send(last).await;
    }
}

/// Waits for a permit, after sending `waiting` if none is free; `None` when the client disconnects.
async fn permit_for<E>(pool: &PermitPool, uid: u32, events: &Sender<E>, waiting: E) -> Option<Permit> {
    if let Ok(permit) = pool.try_acquire(uid) {
        return Some(permit);
    }
    let _ = events.try_send(waiting);
    tokio::select! {
        permit = pool.acquire(uid) => Some(permit),
        () = events.closed() => None,
    }
}
