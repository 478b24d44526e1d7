//! What is known of a request, from its start to its end: the one place that the log, the audit log and the metrics
//! learn about requests from.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use blobd_client::protocol::audit::AuditRecord;
use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use blobd_client::protocol::request_id::RequestId;
use tracing::Span;

use crate::metrics::RequestEnd;
use crate::principal::Principal;
use crate::state::Daemon;
use crate::verb_log::{self, Finished, Outcome};

/// The kind of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Verb {
    /// The command that sends it; one of a fixed list.
    pub(crate) name: &'static str,
    /// Whether it changes the store, gives out descriptors or controls the daemon.
    pub(crate) is_audited: bool,
}

/// A request in progress. It ends when its result is known, which may be long after the head of the response was
/// sent; at the latest when the last reference to it is dropped.
pub(crate) struct RequestRecord {
    daemon: Arc<Daemon>,
    id: RequestId,
    peer: Principal,
    /// The name of the client's program. Read at the start, because the program may have ended before its request.
    command: Option<String>,
    start: Instant,
    span: Span,
    state: Mutex<State>,
}

struct State {
    verb: Verb,
    subject: Option<String>,
    outcome: Option<Outcome>,
    /// Whether the request ends later than its response begins.
    is_deferred: bool,
    is_ended: bool,
}

/// A request that has ended.
#[derive(Debug)]
pub(crate) struct EndedRequest<'r> {
    pub(crate) id: &'r RequestId,
    pub(crate) verb: Verb,
    pub(crate) peer: &'r Principal,
    pub(crate) command: Option<&'r str>,
    /// The model that the client named, as it named it.
    pub(crate) subject: Option<&'r str>,
    /// What was done, if anything.
    pub(crate) outcome: Option<&'r Outcome>,
    pub(crate) result: RequestResult<'r>,
    pub(crate) duration: Duration,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum RequestResult<'r> {
    Done,
    Failed(&'r ErrorBody),
    /// The client disconnected first, or the daemon stopped.
    Cancelled,
}

impl RequestResult<'_> {
    /// `ok`, `cancelled`, or the error's code.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Done => "ok",
            Self::Failed(error) => error.code.name(),
            Self::Cancelled => "cancelled",
        }
    }
}

impl RequestRecord {
    pub(crate) fn start(daemon: &Arc<Daemon>, peer: &Principal, verb: Verb, id: RequestId) -> Arc<Self> {
        // At the highest level, so that it is in every line of the log, however little is logged.
        let span = tracing::error_span!("request", %id);
        let command = if verb.is_audited { peer.command() } else { None };
        let state = State { verb, subject: None, outcome: None, is_deferred: false, is_ended: false };
        let (daemon, peer, start) = (Arc::clone(daemon), peer.clone(), Instant::now());
        Arc::new(Self { daemon, id, peer, command, start, span, state: Mutex::new(state) })
    }

    pub(crate) const fn id(&self) -> &RequestId {
        &self.id
    }

    /// Contains all lines of the log that the request causes.
    pub(crate) const fn span(&self) -> &Span {
        &self.span
    }

    /// Notes what the client has asked for. `verb` is set if the parameters decide which command it is.
    pub(crate) fn note_subject(&self, subject: Option<String>, verb: Option<&'static str>) {
        let mut state = self.state();
        state.subject = subject;
        if let Some(name) = verb {
            state.verb.name = name;
        }
    }

    /// Logs what was done, and keeps it for the end of the request.
    pub(crate) fn finished(&self, done: &impl Finished) {
        verb_log::finished(&self.daemon.limits.log, self.daemon.requester(&self.peer), done);
        self.note_outcome(Outcome { has_changed: done.has_changed(), ..done.outcome() });
    }

    /// Keeps what was done for the end of the request.
    pub(crate) fn note_outcome(&self, outcome: Outcome) {
        self.state().outcome = Some(outcome);
    }

    /// The request does not end when its response begins.
    pub(crate) fn defer(&self) {
        self.state().is_deferred = true;
    }

    /// Ends the request, unless its work goes on. Called when the response begins.
    pub(crate) fn responded(&self) {
        let is_deferred = self.state().is_deferred;
        if !is_deferred {
            self.succeeded();
        }
    }

    pub(crate) fn succeeded(&self) {
        self.end(RequestResult::Done);
    }

    /// Ends the request, and adds its ID to the error, which the client receives.
    pub(crate) fn failed(&self, error: ErrorBody) -> ErrorBody {
        self.end(RequestResult::Failed(&error));
        ErrorBody { request: Some(self.id.to_string()), ..error }
    }

    /// Logs an error if it is one of the daemon itself.
    pub(crate) fn log(&self, error: &ErrorBody) {
        if matches!(error.code, ErrorCode::Internal | ErrorCode::Corrupt | ErrorCode::NoSpace)
            && let Some(omitted) = self.daemon.limits.error_log.admit(self.peer.uid)
        {
            tracing::error!("{error}{omitted}");
        }
    }

    /// Ends a request whose client has disconnected.
    pub(crate) fn cancelled(&self) {
        self.end(RequestResult::Cancelled);
    }

    /// Only the first call has an effect.
    fn end(&self, result: RequestResult<'_>) {
        let mut state = self.state();
        if std::mem::replace(&mut state.is_ended, true) {
            return;
        }
        let ended = EndedRequest {
            id: &self.id,
            verb: state.verb,
            peer: &self.peer,
            command: self.command.as_deref(),
            subject: state.subject.as_deref(),
            outcome: state.outcome.as_ref(),
            result,
            duration: self.start.elapsed(),
        };
        self.span.in_scope(|| observe(&self.daemon, &ended));
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Each change is complete before anything can panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for RequestRecord {
    fn drop(&mut self) {
        // Work can be complete although its client has disconnected before the response.
        let is_done = self.state().outcome.is_some();
        self.end(if is_done { RequestResult::Done } else { RequestResult::Cancelled });
    }
}

/// What the metrics count of a request. Of a dry run only that it was made.
fn request_end(ended: &EndedRequest<'_>) -> RequestEnd {
    let done = ended.outcome.filter(|outcome| !outcome.is_dry_run);
    let detail = |name| done.and_then(|done| done.details.get(name)?.as_u64()).unwrap_or_default();
    RequestEnd {
        verb: ended.verb.name,
        result: ended.result.name(),
        duration: ended.duration,
        bytes: done.and_then(|done| done.bytes).unwrap_or_default(),
        reused_bytes: detail("reused_bytes"),
        repaired_blobs: detail("repaired"),
    }
}

/// Every request is observed here once, when its result is known. Must not block: it also runs on the runtime's
/// threads.
fn observe(daemon: &Daemon, ended: &EndedRequest<'_>) {
    daemon.metrics.events.request_ended(&request_end(ended));
    if ended.verb.is_audited {
        let (record, has_changed) = (audit_record(ended), ended.outcome.is_some_and(|done| done.has_changed));
        if has_changed { daemon.audit.record(record) } else { daemon.audit.record_limited(record) }
    }
    let EndedRequest { verb, peer, command, subject, outcome, result, duration, .. } = ended;
    let (uid, pid, verb, result) = (peer.uid, peer.pid, verb.name, result.name());
    let model = outcome.and_then(|outcome| outcome.model.as_deref()).or(*subject);
    tracing::debug!(uid, pid, command, verb, model, result, ms = duration.as_millis(), "ended");
}

/// The audit log adds the time and the name of the user.
fn audit_record(ended: &EndedRequest<'_>) -> AuditRecord {
    let EndedRequest { id, verb, peer, command, subject, outcome, result, duration } = ended;
    let message = match result {
        RequestResult::Failed(error) => Some(error.message.clone()),
        RequestResult::Done | RequestResult::Cancelled => None,
    };
    let details = outcome.iter().flat_map(|outcome| &outcome.details);
    AuditRecord {
        time: String::new(),
        request: Some(id.to_string()),
        uid: peer.uid,
        user: None,
        pid: (peer.pid > 0).then_some(peer.pid),
        command: command.map(str::to_owned),
        verb: verb.name.to_owned(),
        model: outcome.and_then(|outcome| outcome.model.as_deref()).or(*subject).map(str::to_owned),
        digest: outcome.and_then(|outcome| outcome.digest),
        bytes: outcome.and_then(|outcome| outcome.bytes),
        result: result.name().to_owned(),
        message,
        duration_ms: Some(u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)),
        dry_run: outcome.is_some_and(|outcome| outcome.is_dry_run),
        details: details.map(|(name, value)| ((*name).to_owned(), value.clone())).collect(),
    }
}
