//! Requests whose response reports work in progress, one JSON document per line.

use std::sync::Arc;

use blobd_client::protocol::access::Right;
use blobd_client::protocol::error::{ErrorBody, ErrorResponse};
use blobd_client::protocol::event::{Event, Phase, Progress, WorkProgress};
use blobd_client::protocol::naming::{EditParams, Edited, PromoteParams, Promoted};
use blobd_client::protocol::pull::{PullDone, PullProgress, RunningKind};
use blobd_client::protocol::push::{PushParams, Pushed, TransferParams, Transferred};
use blobd_client::protocol::request::{PullParams, VerifyParams};
use blobd_client::protocol::route::Events;
use blobd_client::protocol::upkeep::{Verified, VerifyProgress};
use serde::Serialize;
use tokio::runtime::Handle;
use tokio::sync::mpsc::{self, Sender};
use tokio::sync::oneshot;
use tracing::Instrument as _;

use super::Caller;
use super::answer::{TurnPool, json_length};
use super::body::{Line, Params, Reply, lines_response};
use crate::memory_gauge::MemoryGauge;
use crate::ops::{self, OpError};
use crate::permits::{Permit, PermitPool};
use crate::request_record::RequestRecord;
use crate::running_pulls::PullSubject;
use crate::state::{Daemon, Turn};
use crate::verb_log::Finished;

/// Events that may wait for a client. Further progress is dropped; the last event never is.
const EVENTS_WAITING: usize = 64;

type Reporting<P, D> = Result<Reply<Events<P, D>>, ErrorBody>;

pub(super) async fn pull(caller: &Caller, params: Params<PullParams>) -> Reporting<PullProgress, PullDone> {
    let (requester, policy, handle) = (caller.requester(), caller.policy(), Handle::current());
    let model = ops::pulled_name(&params);
    caller.daemon.metrics.events.pulls_started.inc();
    let watch = caller.daemon.running_pulls.begin(requester, model, params.source.to_string());
    let work = Work::new(format!("pull of {}", params.source), "waiting for other pulls to end");
    work.start(caller, move |daemon, events| {
        let registry = daemon.registry();
        let gauge = MemoryGauge::for_pull(&daemon.limits.memory, requester.uid());
        let pull = daemon.pull(&registry, &handle, requester, &policy, &params, events);
        ops::pull(ops::Pull { watch: Some(&watch), gauge: Some(&gauge), ..pull })
    })
}

const OTHER_PUSHES: &str = "waiting for other pushes to end";

pub(super) async fn push(caller: &Caller, params: Params<PushParams>) -> Reporting<WorkProgress, Pushed> {
    let (policy, handle) = (caller.policy(), Handle::current());
    let name = params.reference.short();
    let subject = PullSubject {
        kind: RunningKind::Push,
        model: name.clone(),
        destination: Some(params.destination.as_ref().unwrap_or(&params.reference).to_string()),
        source: name.clone(),
    };
    let watch = caller.daemon.running_pulls.begin_any(caller.requester(), subject, OTHER_PUSHES);
    let work = Work::new(format!("push of {name}"), OTHER_PUSHES);
    work.start(caller, move |daemon, events| {
        let (store, registry, policy) = (&daemon.store, &daemon.registry(), &policy);
        let (limit, listeners) = (&daemon.transfers.limit, ops::Listeners { events, watch: &watch });
        ops::push(ops::Push { store, registry, handle: &handle, policy, params: &params, listeners, limit })
    })
}

pub(super) async fn transfer(
    caller: &Caller,
    params: Params<TransferParams>,
) -> Reporting<WorkProgress, Transferred> {
    let (policy, handle) = (caller.policy(), Handle::current());
    let name = format!("transfer of {}", params.source.short());
    let subject = PullSubject {
        kind: RunningKind::Transfer,
        model: params.destination.short(),
        source: params.source.to_string(),
        destination: Some(params.destination.to_string()),
    };
    let watch = caller.daemon.running_pulls.begin_any(caller.requester(), subject, OTHER_PUSHES);
    let work = Work::new(name, OTHER_PUSHES);
    work.start(caller, move |daemon, events| {
        let (store, registry, policy) = (&daemon.store, &daemon.registry(), &policy);
        let (limit, listeners) = (&daemon.transfers.limit, ops::Listeners { events, watch: &watch });
        let params = &params;
        ops::transfer(ops::Transfer { store, registry, handle: &handle, policy, params, listeners, limit })
    })
}

pub(super) async fn verify(
    caller: &Caller,
    params: Params<VerifyParams>,
) -> Reporting<VerifyProgress, Verified> {
    if params.repair {
        caller.require(Right::Pull, "--repair")?;
    }
    let (policy, handle) = (caller.policy(), Handle::current());
    let work = Work::new("verify".to_owned(), "waiting for another verification to end");
    work.start(caller, move |daemon, events| {
        ops::verify(&daemon.store, &daemon.registry(), &handle, &policy, &params, events)
    })
}

const OTHER_IMPORTS: &str = "waiting for other imports and edits to end";

pub(super) async fn edit(caller: &Caller, params: Params<EditParams>) -> Reporting<WorkProgress, Edited> {
    let (requester, policy) = (caller.requester(), caller.policy());
    let work = Work::new(format!("edit of {}", params.source.short()), OTHER_IMPORTS);
    let header = ops::edits_header(&params).then(|| {
        let source = params.source.clone();
        let header: Box<HeaderBytes> = Box::new(move |daemon| ops::header_bytes(&daemon.store, &source));
        header
    });
    Work { header, ..work }.start(caller, move |daemon, events| {
        let (mut before, mut report) = (0, reporter(events, "hashing", Phase::Hashing));
        let mut report = |completed: u64, total| {
            daemon.activity.note_imported(completed.saturating_sub(before));
            before = completed;
            report(completed, total)
        };
        ops::edit(&daemon.store, requester, &policy, &params, &mut report)
    })
}

pub(super) async fn promote(
    caller: &Caller,
    params: Params<PromoteParams>,
) -> Reporting<WorkProgress, Promoted> {
    let (requester, policy) = (caller.requester(), caller.policy());
    let work = Work::new(format!("promotion of {}", params.reference.short()), OTHER_IMPORTS);
    work.start(caller, move |daemon, events| {
        let mut report = reporter(events, "copying", Phase::Writing);
        ops::promote(&daemon.store, requester, &policy, &params, &mut report)
    })
}

/// Sends progress, and says whether the client still waits for it.
fn reporter(events: &Sender<WorkProgress>, status: &str, phase: Phase) -> impl FnMut(u64, u64) -> bool {
    move |completed, total| {
        let (status, phase) = (status.to_owned(), Some(phase));
        let (total, completed) = (Some(total), Some(completed));
        // The client may be slow; the next event replaces this one.
        let _ = events.try_send(WorkProgress { status, phase, total, completed, ..WorkProgress::default() });
        !events.is_closed()
    }
}

type HeaderBytes = dyn FnOnce(&Daemon) -> Result<u64, OpError> + Send;

/// Memory for each byte of a header that is edited: the old and the new one, each as bytes and as a table of tensors.
const EDITED_COPIES: u64 = 4;

struct Work {
    name: String,
    /// Finds the length of the header that the work has in memory, several times.
    header: Option<Box<HeaderBytes>>,
    /// Sent to the client while it waits for its turn.
    waiting: &'static str,
}

impl Work {
    const fn new(name: String, waiting: &'static str) -> Self {
        Self { name, header: None, waiting }
    }

    /// Starts `run`, whose result is the last event. It stops when the client closes the connection, which drops the
    /// receiver of the events.
    fn start<P, D>(
        self,
        caller: &Caller,
        run: impl FnOnce(&Daemon, &Sender<P>) -> Result<D, OpError> + Send + 'static,
    ) -> Reporting<P, D>
    where
        P: Progress + Serialize + Send + Sync + 'static,
        D: Finished + Serialize + Send + Sync + 'static,
    {
        let lasting = caller.lasting()?;
        let (events, waiting) = mpsc::channel(EVENTS_WAITING);
        let (last, end) = oneshot::channel();
        caller.record.defer();
        let running = Running {
            daemon: Arc::clone(&caller.daemon),
            turns: caller.turns,
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
        // Counts the connection as long-lived until the response is complete.
        Ok(lines_response(waiting, Some(end), vec![lasting]))
    }
}

struct Running<P> {
    daemon: Arc<Daemon>,
    turns: TurnPool,
    uid: u32,
    record: Arc<RequestRecord>,
    events: Sender<P>,
}

impl<P: Progress + Serialize + Send + Sync + 'static> Running<P> {
    /// Returns the last line, unless the client has gone before its turn.
    async fn run<D: Finished + Serialize + Send + Sync + 'static>(
        self,
        work: Work,
        run: impl FnOnce(&Daemon, &Sender<P>) -> Result<D, OpError> + Send + 'static,
    ) -> Option<Line<Event<P, D>>> {
        let Self { daemon, turns, uid, record, events } = self;
        let Work { name, header, waiting } = work;
        let Some(permit) = permit_for(turns(&daemon), uid, &events, waiting).await else {
            record.cancelled();
            return None;
        };
        let (turn, sender) = (Turn::from(permit), events.clone());
        let done = async {
            let _memory = match header {
                Some(header) => {
                    let bytes = daemon.blocking(turn.clone(), header).await?;
                    let bytes = usize::try_from(bytes.saturating_mul(EDITED_COPIES)).unwrap_or(usize::MAX);
                    daemon.limits.memory_for(uid, bytes).await?
                }
                None => None,
            };
            let noted = Arc::clone(&record);
            let run = move |daemon: &Daemon| run(daemon, &sender).inspect(|done| noted.finished(done));
            daemon.blocking(turn.clone(), run).await.map_err(|error| error.body())
        };
        let last = done.await.map(Event::Done).unwrap_or_else(|error: ErrorBody| {
            if let Some(omitted) = daemon.limits.log.admit(uid) {
                tracing::warn!("{name}: {error}{omitted}");
            }
            if events.is_closed() {
                record.cancelled();
            }
            Event::Failed(ErrorResponse { error: record.failed(error) })
        });
        record.succeeded();
        // Keeps the turn until the line is counted: a report of damage can be long.
        let counted = counted_line(&daemon, uid, last);
        tokio::select! {
            line = counted => Some(line),
            () = events.closed() => None,
        }
    }
}

/// Waits until there is memory for the last line.
async fn counted_line<E: Serialize>(daemon: &Daemon, uid: u32, event: E) -> Line<E> {
    // A value that cannot be serialised makes an empty line.
    let length = json_length(&event).unwrap_or_default();
    loop {
        if let Ok(memory) = daemon.limits.memory_for(uid, length.saturating_mul(COPIES)).await {
            return Line { event, memory: memory.map(Arc::new) };
        }
    }
}

/// Memory of the last line: the event, its line, and that line escaped.
const COPIES: usize = 3;

/// Waits for a permit. Sends `waiting` to the client if none is free; `None` when it disconnects.
async fn permit_for<P: Progress>(
    pool: &PermitPool,
    uid: u32,
    events: &Sender<P>,
    waiting: &str,
) -> Option<Permit> {
    if let Ok(permit) = pool.try_acquire(uid) {
        return Some(permit);
    }
    let _ = events.try_send(P::queued(waiting));
    tokio::select! {
        permit = pool.acquire(uid) => Some(permit),
        () = events.closed() => None,
    }
}
