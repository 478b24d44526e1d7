//! A request from its start to its end: the log, the audit log and the metrics learn about requests only here.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use blobd_client::protocol::audit::AuditRecord;
use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use blobd_client::protocol::params::Subject;
use blobd_client::protocol::request_id::RequestId;
use blobd_client::protocol::route::Route;
use serde_json::{Value, json};
use tracing::Span;
use tracing_mutex::stdsync::Mutex;

use crate::audit::Class;
use crate::locks::lock;
use crate::metrics::RequestEnd;
use crate::peer_process::{self, PeerProcess};
use crate::principal::Principal;
use crate::state::Daemon;
use crate::verb_log::{self, Finished, Outcome};

/// The verb of a request that this version does not know.
const UNKNOWN: &str = "unknown";

pub(crate) fn verbs() -> impl Iterator<Item = &'static str> {
    Route::verbs().chain([UNKNOWN])
}

/// The results of all requests.
pub(crate) fn results() -> impl Iterator<Item = &'static str> {
    let others = [RequestResult::Done, RequestResult::Cancelled, RequestResult::Unacknowledged];
    ErrorCode::ALL.into_iter().map(ErrorCode::name).chain(others.map(RequestResult::name))
}

/// A request in progress. It ends when its result is known, which may be long after the head of the response was
/// sent; at the latest when the last reference to it is dropped.
pub(crate) struct RequestRecord {
    daemon: Arc<Daemon>,
    id: RequestId,
    peer: Principal,
    /// The name of the client's program. Read at the start, because the program may have ended before its request.
    command: Option<String>,
    about_peer: BTreeMap<String, Value>,
    start: Instant,
    span: Span,
    route: Option<Route>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    subject: Subject,
    outcome: Option<Outcome>,
    /// Whether the client has descriptors, and has not acknowledged all of them yet.
    is_unacknowledged: bool,
    is_deferred: bool,
    is_ended: bool,
}

/// A request that has ended.
struct EndedRequest<'r> {
    record: &'r RequestRecord,
    state: &'r State,
    result: RequestResult<'r>,
    duration: Duration,
}

#[derive(Clone, Copy, Debug)]
enum RequestResult<'r> {
    Done,
    Failed(&'r ErrorBody),
    /// The client disconnected first, or the daemon stopped.
    Cancelled,
    /// Cancelled, but the client has received descriptors, which it can keep.
    Unacknowledged,
}

impl RequestResult<'_> {
    /// `ok`, `cancelled`, `unacknowledged`, or the error's code.
    const fn name(self) -> &'static str {
        match self {
            Self::Done => "ok",
            Self::Failed(error) => error.code.name(),
            Self::Cancelled => "cancelled",
            Self::Unacknowledged => "unacknowledged",
        }
    }

    /// Metrics do not distinguish unacknowledged opens.
    const fn metric(self) -> &'static str {
        if matches!(self, Self::Unacknowledged) { Self::Cancelled.name() } else { self.name() }
    }

    const fn is_refusal(self) -> bool {
        matches!(self, Self::Failed(error) if matches!(error.code, ErrorCode::Denied | ErrorCode::DeniedByPolicy))
    }
}

impl RequestRecord {
    pub(crate) fn start(
        daemon: &Arc<Daemon>,
        peer: &Principal,
        route: Option<Route>,
        id: RequestId,
    ) -> Arc<Self> {
        // At the highest level, so that every line of the log has it, however little is logged.
        let span = tracing::error_span!("request", %id);
        let is_audited = route.is_some_and(Route::is_audited);
        let mut process = if is_audited { peer.process() } else { PeerProcess::default() };
        let (command, about_peer) = (process.command.take(), process.details());
        let (daemon, peer, start) = (Arc::clone(daemon), peer.clone(), Instant::now());
        Arc::new(Self { daemon, id, peer, command, about_peer, start, span, route, state: Mutex::default() })
    }

    pub(crate) const fn id(&self) -> &RequestId {
        &self.id
    }

    pub(crate) fn verb(&self) -> &'static str {
        lock(&self.state).verb(self.route)
    }

    /// The log's lines that the request causes are in it.
    pub(crate) const fn span(&self) -> &Span {
        &self.span
    }

    pub(crate) fn note_subject(&self, subject: Subject) {
        lock(&self.state).subject = subject;
    }

    /// Logs what was done, and keeps it for the end of the request.
    pub(crate) fn finished(&self, done: &impl Finished) {
        let requester = self.daemon.requester(&self.peer);
        let outcome = verb_log::finished(&self.daemon.limits.log, requester, self.verb(), done);
        self.note_outcome(outcome);
    }

    pub(crate) fn note_outcome(&self, outcome: Outcome) {
        lock(&self.state).outcome = Some(outcome);
    }

    /// The client can use these descriptors from now on, even if it disconnects without an acknowledgement.
    pub(crate) fn descriptors_sent(&self, outcome: Outcome) {
        let mut state = lock(&self.state);
        (state.outcome, state.is_unacknowledged) = (Some(outcome), true);
    }

    pub(crate) fn defer(&self) {
        lock(&self.state).is_deferred = true;
    }

    /// Ends the request, unless its work goes on. Called when the response begins.
    pub(crate) fn responded(&self) {
        let is_deferred = lock(&self.state).is_deferred;
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

    /// Ends a request whose client has disconnected. Its work may be complete all the same.
    pub(crate) fn cancelled(&self) {
        let result = lock(&self.state).result_without_client();
        self.end(result);
    }

    /// Only the first call has an effect.
    fn end(&self, result: RequestResult<'_>) {
        let mut state = lock(&self.state);
        if std::mem::replace(&mut state.is_ended, true) {
            return;
        }
        let ended = EndedRequest { record: self, state: &state, result, duration: self.start.elapsed() };
        self.span.in_scope(|| ended.observe());
    }
}

impl Drop for RequestRecord {
    fn drop(&mut self) {
        self.cancelled();
    }
}

impl State {
    fn verb(&self, route: Option<Route>) -> &'static str {
        self.subject.verb.unwrap_or_else(|| route.map_or(UNKNOWN, Route::verb))
    }

    fn result_without_client(&self) -> RequestResult<'static> {
        match self.outcome {
            None => RequestResult::Cancelled,
            Some(_) if self.is_unacknowledged => RequestResult::Unacknowledged,
            Some(_) => RequestResult::Done,
        }
    }
}

impl EndedRequest<'_> {
    fn is_audited(&self) -> bool {
        self.record.route.is_some_and(Route::is_audited)
    }

    fn gives_content(&self) -> bool {
        self.record.route.is_some_and(Route::gives_content)
    }

    fn verb(&self) -> &'static str {
        self.state.verb(self.record.route)
    }

    /// The name in the store, or else the one that the client has given.
    fn model(&self) -> Option<&str> {
        let State { outcome, subject, .. } = self.state;
        outcome.as_ref().and_then(|outcome| outcome.model.as_deref()).or(subject.model.as_deref())
    }

    /// Every request is observed here once, when its result is known. Must not block: it also runs on the runtime's threads.
    fn observe(&self) {
        let RequestRecord { daemon, peer, command, .. } = self.record;
        daemon.metrics.events.request_ended(&self.request_end());
        if self.is_audited() || self.result.is_refusal() {
            daemon.audit.record_as(self.class(), self.audit_record());
        }
        let (verb, model, result, ms) =
            (self.verb(), self.model(), self.result.name(), self.duration.as_millis());
        tracing::debug!(uid = peer.uid, pid = peer.pid, command, verb, model, result, ms, "ended");
    }

    /// What the metrics count. Dry runs count as requests only.
    fn request_end(&self) -> RequestEnd {
        let done = self.state.outcome.as_ref().filter(|outcome| !outcome.is_dry_run);
        let detail = |name| done.and_then(|done| done.details.get(name)?.as_u64()).unwrap_or_default();
        RequestEnd {
            verb: self.verb(),
            is_open: self.gives_content(),
            result: self.result.metric(),
            duration: self.duration,
            bytes: done.and_then(|done| done.bytes).unwrap_or_default(),
            reused_bytes: detail("reused_bytes"),
            repaired_blobs: detail("repaired"),
        }
    }

    fn class(&self) -> Class {
        let outcome = &self.state.outcome;
        if outcome.as_ref().is_some_and(|done| done.has_changed) {
            return Class::Change;
        }
        // An open that fails may have given out descriptors before.
        let has_given = outcome.is_some() || matches!(self.result, RequestResult::Done);
        if self.gives_content() && has_given { Class::Open } else { Class::Attempt }
    }

    /// The audit log adds the time and the name of the user.
    fn audit_record(&self) -> AuditRecord {
        let RequestRecord { id, peer, command, about_peer, .. } = self.record;
        let State { subject, outcome, .. } = self.state;
        let message = match self.result {
            RequestResult::Failed(error) => Some(error.message.clone()),
            _ => None,
        };
        // Requests that only read have records only if they are refused, so nothing was read at their start.
        let read_now = || if self.is_audited() { None } else { peer_process::command(peer.pid) };
        let details = outcome.iter().flat_map(|outcome| &outcome.details);
        let details = details.map(|(name, value)| ((*name).to_owned(), value.clone()));
        let from = subject.source.as_ref().map(|source| ("from".to_owned(), json!(source)));
        AuditRecord {
            seq: None,
            time: String::new(),
            request: Some(id.to_string()),
            uid: peer.uid,
            user: None,
            pid: (peer.pid > 0).then_some(peer.pid),
            command: command.clone().or_else(read_now),
            verb: self.verb().to_owned(),
            model: self.model().map(str::to_owned),
            digest: outcome.as_ref().and_then(|outcome| outcome.digest),
            bytes: outcome.as_ref().and_then(|outcome| outcome.bytes),
            result: self.result.name().to_owned(),
            message,
            duration_ms: Some(u64::try_from(self.duration.as_millis()).unwrap_or(u64::MAX)),
            dry_run: outcome.as_ref().is_some_and(|outcome| outcome.is_dry_run),
            // What was done is more certain than what was requested.
            details: about_peer.clone().into_iter().chain(from).chain(details).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use blobd_registry::RegistryPolicy;
    use blobd_store::Store;

    use super::*;
    use blobd_store::StoreOwner;

    use crate::audit::{LogDirectory, LogSettings, Rotation};
    use crate::metrics::Metrics;
    use crate::principal::tests::principal;

    /// The class and the result in the audit log.
    fn recorded(route: Route, request: impl FnOnce(&RequestRecord)) -> Option<String> {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path().join("store")).unwrap();
        let metrics = Metrics::new([]).unwrap();
        let daemon = Arc::new(Daemon::new(store, &RegistryPolicy::default(), metrics).unwrap());
        let log = folder.path().join("log");
        let rotation = Rotation { max_bytes: 1 << 20, keep: 2 };
        let settings = LogSettings {
            directory: LogDirectory::at(&log, StoreOwner::for_process()),
            rotation,
            is_forwarded: false,
        };
        daemon.audit.start(settings).unwrap();
        let peer = principal(1, 1, None);
        let record = RequestRecord::start(&daemon, &peer, Some(route), daemon.request_ids.next_id());
        request(&record);
        drop(record);
        daemon.audit.stop();
        let file = std::fs::read_dir(log).ok()?.next()?.unwrap();
        let record = AuditRecord::parse(&std::fs::read(file.path()).unwrap()).unwrap();
        let class = file.file_name().into_string().unwrap().split('-').next().unwrap().to_owned();
        Some(format!("{class} {}", record.result))
    }

    #[test]
    fn request_of_a_client_that_has_gone_ends_as_its_work_did() {
        let result = |request: fn(&RequestRecord)| recorded(Route::Open, request).unwrap();
        let outcome = || Outcome::new("m", None);
        assert_eq!(result(|_| {}), "attempts cancelled");
        assert_eq!(result(RequestRecord::cancelled), "attempts cancelled");
        let complete = |record: &RequestRecord| {
            record.note_outcome(outcome());
            record.cancelled();
        };
        assert_eq!(recorded(Route::Open, complete).unwrap(), "opens ok");
        let sent = |record: &RequestRecord| record.descriptors_sent(outcome());
        assert_eq!(recorded(Route::Open, sent).unwrap(), "opens unacknowledged");
        let failed_later = |record: &RequestRecord| {
            record.descriptors_sent(outcome());
            record.failed(ErrorBody::new(ErrorCode::Internal, "the disk"));
        };
        assert_eq!(recorded(Route::Open, failed_later).unwrap(), "opens internal");
        let changed = |record: &RequestRecord| {
            record.note_outcome(Outcome { has_changed: true, ..outcome() });
        };
        assert_eq!(recorded(Route::Open, changed).unwrap(), "audit ok");
    }

    #[test]
    fn request_that_reads_has_a_record_only_if_it_is_refused() {
        for (code, is_recorded) in
            [(ErrorCode::Denied, true), (ErrorCode::DeniedByPolicy, true), (ErrorCode::NotFound, false)]
        {
            let refuse = |record: &RequestRecord| drop(record.failed(ErrorBody::new(code, "no")));
            let expected = is_recorded.then(|| format!("attempts {}", code.name()));
            assert_eq!(recorded(Route::Models, refuse), expected, "{}", code.name());
        }
    }
}
