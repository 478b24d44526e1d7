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
use tokio::sync::oneshot;
use tracing::Instrument as _;

use super::Caller;
use super::answer::json_length;
use super::body::{HttpResponse, Line, Params, lines_response};
use super::route::Route;
use crate::memory_gauge::MemoryGauge;
use crate::ops::{self, OpError};
use crate::permits::{Permit, PermitPool};
use crate::request_record::RequestRecord;
use crate::state::{Daemon, Turn};

/// Events that may wait for a client. Further progress is dropped, but never the last event.
const EVENTS_WAITING: usize = 64;

pub(super) fn pull(caller: &Caller, params: Params<PullParams>) -> Result<HttpResponse, ErrorBody> {
    let (requester, policy, handle) = (caller.requester(), caller.policy(), Handle::current());
    let record = Arc::clone(&caller.record);
    let status = "waiting for other pulls to end".to_owned();
    let model = ops::pulled_name(&params);
    caller.daemon.metrics.events.pulls_started.inc();
    let watch = caller.daemon.running_pulls.begin(requester, model, params.source.to_string());
    let work = Work {
        name: format!("pull of {}", params.source),
        header: None,
        waiting: PullEvent::Progress(PullProgress { status, ..PullProgress::default() }),
        failed: PullEvent::Failed,
    };
    work.start(caller, move |daemon, events| {
        let registry = daemon.registry();
        let gauge = MemoryGauge::for_pull(&daemon.limits.memory, requester.uid());
        let pull = daemon.pull(&registry, &handle, requester, &policy, &params, events);
        let done = ops::pull(ops::Pull { watch: Some(&watch), gauge: Some(&gauge), ..pull });
        done.inspect(|done| record.finished(done)).map(PullEvent::Done)
    })
}

pub(super) fn verify(caller: &Caller, params: Params<VerifyParams>) -> Result<HttpResponse, ErrorBody> {
    let (record, policy, handle) = (Arc::clone(&caller.record), caller.policy(), Handle::current());
    let status = "waiting for another verification to end".to_owned();
    let work = Work {
        name: "verify".to_owned(),
        header: None,
        waiting: VerifyEvent::Progress(VerifyProgress { status, ..VerifyProgress::default() }),
        failed: VerifyEvent::Failed,
    };
    work.start(caller, move |daemon, events| {
        let verified = ops::verify(&daemon.store, &daemon.registry(), &handle, &policy, &params, events);
        verified.inspect(|verified| record.finished(verified)).map(VerifyEvent::Done)
    })
}

pub(super) fn edit(caller: &Caller, params: Params<EditParams>) -> Result<HttpResponse, ErrorBody> {
    let (requester, policy, record) = (caller.requester(), caller.policy(), Arc::clone(&caller.record));
    let status = "waiting for other imports and edits to end".to_owned();
    let source = params.source.clone();
    let header = move |daemon: &Daemon| ops::header_bytes(&daemon.store, &source);
    let work = Work {
        name: format!("edit of {}", params.source.short()),
        header: Some(Box::new(header)),
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

pub(super) fn promote(caller: &Caller, params: Params<PromoteParams>) -> Result<HttpResponse, ErrorBody> {
    let (requester, policy, record) = (caller.requester(), caller.policy(), Arc::clone(&caller.record));
    let status = "waiting for other imports and edits to end".to_owned();
    let work = Work {
        name: format!("promotion of {}", params.reference.short()),
        header: None,
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

type HeaderBytes = dyn FnOnce(&Daemon) -> Result<u64, OpError> + Send;

/// Memory for each byte of a header that is edited: the header and the new one, each as bytes and as the table of its
/// tensors.
const EDITED_COPIES: u64 = 4;

/// Work that reports events.
struct Work<E> {
    /// For the log.
    name: String,
    /// Finds out how long the header is that the work has in memory, several times.
    header: Option<Box<HeaderBytes>>,
    /// Sent if the work has to wait for its turn.
    waiting: E,
    failed: fn(ErrorResponse) -> E,
}

impl<E: Serialize + Send + Sync + 'static> Work<E> {
    /// Starts `run`, whose result is the last event. It stops when the client closes the connection, which drops
    /// the receiver of the events.
    fn start(
        self,
        caller: &Caller,
        run: impl FnOnce(&Daemon, &Sender<E>) -> Result<E, OpError> + Send + 'static,
    ) -> Result<HttpResponse, ErrorBody> {
        let lasting = caller.lasting()?;
        let (events, waiting) = mpsc::channel(EVENTS_WAITING);
        let (last, end) = oneshot::channel();
        caller.record.defer();
        let running = Running {
            daemon: Arc::clone(&caller.daemon),
            route: caller.route,
            uid: caller.peer.uid,
            record: Arc::clone(&caller.record),
            events,
        };
        let work = async move {
            let _unless_the_client_has_gone = match running.run(self, run).await {
                Some(line) => last.send(line),
                None => Ok(()),
            };
        };
        tokio::spawn(work.in_current_span());
        let mut response = lines_response(waiting, Some(end));
        // Counts the connection as long-lived until the response is complete.
        response.body_mut().hold(lasting);
        Ok(response)
    }
}

/// Work whose turn has come or is waited for.
struct Running<E> {
    daemon: Arc<Daemon>,
    route: &'static Route,
    uid: u32,
    record: Arc<RequestRecord>,
    events: Sender<E>,
}

impl<E: Serialize + Send + Sync + 'static> Running<E> {
    /// Does the work, and returns the last line unless the client has gone before its turn.
    async fn run(
        self,
        work: Work<E>,
        run: impl FnOnce(&Daemon, &Sender<E>) -> Result<E, OpError> + Send + 'static,
    ) -> Option<Line<E>> {
        let Self { daemon, route, uid, record, events } = self;
        let Work { name, header, waiting, failed } = work;
        let Some(permit) = permit_for((route.turns)(&daemon), uid, &events, waiting).await else {
            record.cancelled();
            return None;
        };
        let (turn, sender) = (Turn::from(permit), events.clone());
        let done = async {
            let _memory = match header {
                Some(header) => {
                    let bytes = daemon.blocking(turn.clone(), header).await.map_err(|error| error.body())?;
                    let bytes = usize::try_from(bytes.saturating_mul(EDITED_COPIES)).unwrap_or(usize::MAX);
                    daemon.limits.memory_for(uid, bytes).await?
                }
                None => None,
            };
            let done = daemon.blocking(turn.clone(), move |daemon: &Daemon| run(daemon, &sender)).await;
            done.map_err(|error| error.body())
        };
        let last = done.await.unwrap_or_else(|error: ErrorBody| {
            if let Some(omitted) = daemon.limits.log.admit(uid) {
                tracing::warn!("{name}: {error}{omitted}");
            }
            if events.is_closed() {
                record.cancelled();
            }
            failed(ErrorResponse { error: record.failed(error) })
        });
        record.succeeded();
        // Still its turn until the line is counted: a report of damage can be long.
        let counted = counted_line(&daemon, uid, last);
        tokio::select! {
            line = counted => Some(line),
            () = events.closed() => None,
        }
    }
}

/// The last line, when there is memory for it.
async fn counted_line<E: Serialize>(daemon: &Daemon, uid: u32, event: E) -> Line<E> {
    // A value that cannot be serialised makes an empty line.
    let length = json_length(&event).unwrap_or_default();
    loop {
        if let Ok(memory) = daemon.limits.memory_for(uid, length.saturating_mul(COPIES)).await {
            return Line { event, memory: memory.map(Arc::new) };
        }
    }
}

/// The event, and its line while it is escaped.
const COPIES: usize = 3;

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
