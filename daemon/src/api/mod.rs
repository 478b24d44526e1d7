//! The HTTP API: maps each request to its operation.

use std::sync::Arc;

use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use blobd_client::protocol::request::{GcParams, LimitParams, PullParams, RenameParams, VerifyParams};
use blobd_client::protocol::request_id::{REQUEST_ID_HEADER, RequestId};
use blobd_client::protocol::response::{PullPlan, Resolved, Version};
use blobd_client::protocol::space::RemovePartialsParams;
use blobd_client::protocol::upkeep::PullLimit;
use blobd_store::Store;
use blobd_store_format::reference::{Reference, ReferenceError};
use hyper::body::Incoming;
use hyper::header::HeaderValue;
use hyper::{Method, Request, Uri};
use percent_encoding::percent_decode_str;
use serde::de::DeserializeOwned;
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tracing::Instrument as _;

use crate::access::{Right, Rights};
use crate::monitoring;
use crate::ops::{self, CallerPolicy};
use crate::permits::Permit;
use crate::principal::Principal;
use crate::request_record::RequestRecord;
use crate::requester::Requester;
use crate::socket::ClientSocket;
use crate::state::Daemon;
use crate::verb_log::{Finished, NewPullLimit};

mod body;
mod details;
mod events;
mod log;
mod observe;
mod open;
mod refused;
mod release;
mod right;
mod show;
mod upgrade;
mod verbs;

pub(crate) use body::{HttpResponse, json_response, reports_progress};
use body::{error_response, raw_response, read_json, text_response};
pub(crate) use verbs::names as verb_names;
use verbs::{Subject, short_name};

fn unknown(method: &Method, path: &str) -> ErrorBody {
    let message = format!("{method} {path}: no such request");
    ErrorBody::new(ErrorCode::InvalidRequest, message).with_hint("docs/PROTOCOL.md lists them")
}

pub(crate) async fn respond(
    daemon: Arc<Daemon>,
    peer: Principal,
    socket: ClientSocket,
    request: Request<Incoming>,
) -> HttpResponse {
    let id = requested_id(&request).unwrap_or_else(|| daemon.request_ids.next_id());
    let verb = verbs::verb(request.method(), request.uri().path());
    let record = RequestRecord::start(&daemon, &peer, verb, id);
    let rights = daemon.access().rights_of(&peer);
    let caller = Caller { daemon, peer, rights, socket, record: Arc::clone(&record) };
    let responding = async {
        match dispatch(&caller, request).await {
            Ok(response) => {
                record.responded();
                response
            }
            Err(error) => {
                record.log(&error);
                error_response(record.failed(error))
            }
        }
    };
    let mut response = responding.instrument(record.span().clone()).await;
    if let Ok(id) = HeaderValue::from_str(record.id().as_str()) {
        response.headers_mut().insert(REQUEST_ID_HEADER, id);
    }
    response
}

/// The ID that the client gives its request; a malformed one is replaced.
fn requested_id(request: &Request<Incoming>) -> Option<RequestId> {
    request.headers().get(REQUEST_ID_HEADER)?.to_str().ok()?.parse().ok()
}

struct Caller {
    daemon: Arc<Daemon>,
    peer: Principal,
    rights: Rights,
    socket: ClientSocket,
    record: Arc<RequestRecord>,
}

async fn dispatch(caller: &Caller, request: Request<Incoming>) -> Result<HttpResponse, ErrorBody> {
    let (method, uri) = (request.method().clone(), request.uri().clone());
    let right = right::needed(&method, uri.path()).ok_or_else(|| unknown(&method, uri.path()))?;
    if let Some(right) = right.filter(|right| !caller.rights.include(*right)) {
        refused::note_subject(caller, uri.path(), request).await;
        return Err(caller.refusal(right, None));
    }
    match method {
        Method::GET => get(caller, &uri).await,
        _ => post(caller, uri.path(), request).await,
    }
}

async fn get(caller: &Caller, uri: &Uri) -> Result<HttpResponse, ErrorBody> {
    let daemon = &caller.daemon;
    match uri.path() {
        "/v1/version" => Ok(json_response(&version(daemon))),
        "/v1/access" => Ok(json_response(&daemon.access().own_access(&caller.peer))),
        "/v1/models" => caller.respond(|daemon| ops::list(&daemon.store)).await,
        "/v1/ps" => observe::sessions(caller, uri.query()).await,
        "/v1/pulls" => observe::pulls(caller).await,
        "/v1/df" => observe::usage(caller, uri.query()).await,
        "/v1/df/users" => observe::user_usage(caller).await,
        "/v1/partials" => caller.survey(|daemon| ops::partials(&daemon.store, &daemon.transfers)).await,
        "/v1/trash" => caller.respond(|daemon| ops::trash(&daemon.store)).await,
        "/v1/doctor" => caller.survey(|daemon| ops::doctor(&daemon.store, daemon.doctor_context())).await,
        "/v1/eviction" => {
            let bytes = observe::number(uri.query(), "bytes")?;
            let plan = move |daemon: &Daemon| ops::eviction_plan(&daemon.store, &*daemon.last_opened, bytes);
            caller.survey(plan).await
        }
        "/v1/gc" => caller.survey(|daemon| ops::gc(&daemon.store, GcParams { dry_run: true })).await,
        "/v1/health" => Ok(json_response(&monitoring::health(daemon, caller.peer.uid).await)),
        "/v1/metrics" => {
            let text = monitoring::scrape(daemon).await?;
            Ok(text_response(text, monitoring::TEXT_FORMAT))
        }
        "/v1/limit" => Ok(json_response(&limit(daemon))),
        "/v1/config" => Ok(json_response(&daemon.configuration())),
        path => {
            if let Some(name) = path.strip_prefix("/v1/models/") {
                show::show(caller, reference(name)?).await
            } else if let Some(name) = path.strip_prefix("/v1/manifests/") {
                manifest(caller, reference(name)?).await
            } else if let Some(name) = path.strip_prefix("/v1/heads/") {
                let name = reference(name)?;
                // The policy may refuse it, which has a record.
                caller.record.note_subject(Some(short_name(&name)), None);
                show::heads(caller, name).await
            } else if let Some(name) = path.strip_prefix("/v1/history/") {
                let name = reference(name)?;
                caller.respond(move |daemon| ops::history(&daemon.store, &name)).await
            } else if let Some(name) = path.strip_prefix("/v1/sharing/") {
                let model = reference(name)?;
                caller.survey(move |daemon| ops::sharing(&daemon.store, &model)).await
            } else {
                Err(unknown(&Method::GET, path))
            }
        }
    }
}

async fn post(caller: &Caller, path: &str, request: Request<Incoming>) -> Result<HttpResponse, ErrorBody> {
    let daemon = &caller.daemon;
    match path {
        "/v1/open" => open::open(caller, request).await,
        "/v1/import" => open::import(caller, request).await,
        "/v1/limit" => {
            let params: LimitParams = caller.params(request).await?;
            let before = limit(daemon);
            daemon.transfers.limit.set(params.bytes_per_second);
            let limit = limit(daemon);
            caller.record.finished(&NewPullLimit { limit, before });
            Ok(json_response(&limit))
        }
        "/v1/undelete" => {
            let policy = caller.policy();
            let undelete =
                move |store: &_, requester, params: &_| ops::undelete(store, requester, &policy, params);
            caller.change(request, undelete).await
        }
        "/v1/pin" => {
            caller.change(request, |store: &_, requester, params| ops::pin(store, requester, params)).await
        }
        "/v1/partials/remove" => remove_partials(caller, caller.params(request).await?).await,
        "/v1/remove" => {
            let last_opened = Arc::clone(&daemon.last_opened);
            let remove = move |store: &Arc<Store>, requester, params: &_| {
                ops::remove(store, &*last_opened, requester, params)
            };
            caller.change(request, remove).await
        }
        "/v1/tag" => {
            let policy = caller.policy();
            let tag = move |store: &_, requester, params: &_| ops::tag(store, requester, &policy, params);
            caller.change(request, tag).await
        }
        "/v1/rename" => rename(caller, request).await,
        "/v1/gc" => collect(caller, caller.params(request).await?).await,
        "/v1/verify" => {
            let params: VerifyParams = caller.params(request).await?;
            if params.repair {
                caller.require(Right::Pull, "--repair")?;
            }
            events::verify(caller, params)
        }
        "/v1/release" => release::release(caller, caller.params(request).await?).await,
        "/v1/edit" => events::edit(caller, caller.params(request).await?),
        "/v1/promote" => events::promote(caller, caller.params(request).await?),
        "/v1/pull" => {
            let params: PullParams = caller.params(request).await?;
            events::pull(caller, params)
        }
        "/v1/pull/plan" => {
            let plan = plan_pull(caller, caller.params(request).await?).await;
            plan.map(|plan| json_response(&plan)).map_err(|error| error.body())
        }
        "/v1/resolve" => {
            let resolved = resolve(caller, caller.params(request).await?).await;
            resolved.map(|resolved| json_response(&resolved)).map_err(|error| error.body())
        }
        "/v1/log" => log::log(caller, &caller.params(request).await?).await,
        "/v1/inspect" => inspect(caller, caller.params(request).await?).await,
        "/v1/reindex" => reindex(caller).await,
        _ => Err(unknown(&Method::POST, path)),
    }
}

async fn reindex(caller: &Caller) -> Result<HttpResponse, ErrorBody> {
    let record = Arc::clone(&caller.record);
    let reindex = move |daemon: &Daemon| {
        let reindexed = ops::reindex(&daemon.store)?;
        record.finished(&reindexed);
        Ok(reindexed)
    };
    caller.respond(reindex).await
}

async fn rename(caller: &Caller, request: Request<Incoming>) -> Result<HttpResponse, ErrorBody> {
    let (sessions, policy) = (caller.daemon.sessions.clone(), caller.policy());
    let rename = move |store: &Arc<Store>, requester, params: &RenameParams| {
        let renamed = ops::rename(store, requester, &policy, params)?;
        // The source may have been given by its ID.
        if let Ok(old) = renamed.from.parse() {
            sessions.rename(&old, &params.target, renamed.digest);
        }
        Ok(renamed)
    };
    caller.change(request, rename).await
}

async fn collect(caller: &Caller, params: GcParams) -> Result<HttpResponse, ErrorBody> {
    let record = Arc::clone(&caller.record);
    let collect = move |daemon: &Daemon| {
        let report = ops::gc(&daemon.store, params)?;
        record.finished(&report);
        Ok(report)
    };
    if params.dry_run { caller.survey(collect).await } else { caller.respond(collect).await }
}

async fn remove_partials(caller: &Caller, params: RemovePartialsParams) -> Result<HttpResponse, ErrorBody> {
    let (uid, may_drop_all) = (caller.peer.uid, caller.rights.include(Right::Administer));
    let record = Arc::clone(&caller.record);
    let remove = move |daemon: &Daemon| {
        let done = ops::remove_partials(&daemon.store, &daemon.transfers, &params, uid, may_drop_all)?;
        record.finished(&done);
        Ok(done)
    };
    caller.respond(remove).await
}

impl Caller {
    /// The JSON parameters of a request, without their memory permit: they are used immediately.
    async fn params<P: DeserializeOwned + Subject>(
        &self,
        request: Request<Incoming>,
    ) -> Result<P, ErrorBody> {
        let (params, _permit) = self.counted_params(request).await?;
        Ok(params)
    }

    /// The parameters with the permit that counts their memory.
    async fn counted_params<P: DeserializeOwned + Subject>(
        &self,
        request: Request<Incoming>,
    ) -> Result<(P, Option<Permit>), ErrorBody> {
        let (params, permit): (P, _) = read_json(request, &self.daemon.limits, self.peer.uid).await?;
        self.record.note_subject(params.subject(), params.verb());
        self.record.note_source(params.source());
        Ok((params, permit))
    }

    fn requester(&self) -> Requester {
        self.daemon.requester_with(&self.peer, self.rights)
    }

    /// As it is now: a request uses one policy from its start to its end.
    fn policy(&self) -> CallerPolicy {
        self.daemon.policy_for(&self.peer)
    }

    /// For a request that needs the right because of an option.
    fn require(&self, right: Right, option: &str) -> Result<(), ErrorBody> {
        if self.rights.include(right) { Ok(()) } else { Err(self.refusal(right, Some(option))) }
    }

    fn refusal(&self, right: Right, option: Option<&str>) -> ErrorBody {
        let verb = self.record.verb();
        let what = option.map_or_else(|| verb.to_owned(), |option| format!("{verb} {option}"));
        self.daemon.access().refusal(&self.peer, right, &what)
    }

    fn lasting(&self) -> Result<Arc<Permit>, ErrorBody> {
        self.daemon.limits.lasting_for(self.peer.uid)
    }

    /// Runs `work`, which changes the store, with the parameters in the request's body, and logs its result.
    async fn change<
        P: DeserializeOwned + Subject + Send + 'static,
        T: serde::Serialize + Finished + Send + 'static,
    >(
        &self,
        request: Request<Incoming>,
        work: impl FnOnce(&Arc<Store>, Requester, &P) -> Result<T, ops::OpError> + Send + 'static,
    ) -> Result<HttpResponse, ErrorBody> {
        let (params, permit): (P, _) = self.counted_params(request).await?;
        let (requester, record) = (self.requester(), Arc::clone(&self.record));
        let work = move |daemon: &Daemon| {
            // The permit counts the parameters as long as they exist.
            let _permit = permit;
            let done = work(&daemon.store, requester, &params)?;
            record.finished(&done);
            Ok(done)
        };
        self.respond(work).await
    }

    /// Runs `work` on the disk, and responds with its result.
    async fn respond<T: serde::Serialize>(
        &self,
        work: impl FnOnce(&Daemon) -> Result<T, ops::OpError> + Send + 'static,
    ) -> Result<HttpResponse, ErrorBody> {
        let turn = self.daemon.limits.disk.acquire(self.peer.uid).await;
        self.respond_with(turn, work).await
    }

    /// The same for work that reads the whole store: few run at a time, the others wait without a thread.
    async fn survey<T: serde::Serialize>(
        &self,
        work: impl FnOnce(&Daemon) -> Result<T, ops::OpError> + Send + 'static,
    ) -> Result<HttpResponse, ErrorBody> {
        let turn = self.daemon.work.surveys.acquire(self.peer.uid).await;
        self.respond_with(turn, work).await
    }

    /// Holds `turn` until the response is counted, or until the work is over if its client has
    /// disconnected.
    async fn respond_with<T: serde::Serialize>(
        &self,
        turn: impl Send + 'static,
        work: impl FnOnce(&Daemon) -> Result<T, ops::OpError> + Send + 'static,
    ) -> Result<HttpResponse, ErrorBody> {
        let serialized = move |daemon: &Daemon| {
            serde_json::to_vec(&work(daemon)?).map_err(|error| ops::OpError::Internal(error.to_string()))
        };
        self.respond_raw(turn, serialized).await
    }

    async fn respond_raw(
        &self,
        turn: impl Send + 'static,
        work: impl FnOnce(&Daemon) -> Result<Vec<u8>, ops::OpError> + Send + 'static,
    ) -> Result<HttpResponse, ErrorBody> {
        let work = move |daemon: &Daemon| Ok((work(daemon)?, turn));
        let (json, turn) = self.daemon.blocking(work).await.map_err(|error| error.body())?;
        let memory = self.daemon.limits.memory_for(self.peer.uid, json.len()).await?;
        drop(turn);
        Ok(raw_response(json, memory))
    }
}

/// Plans a pull. Ends soon after the future is dropped, as when the client disconnects.
async fn plan_pull(caller: &Caller, params: PullParams) -> Result<PullPlan, ops::OpError> {
    let (daemon, requester, policy) = (&caller.daemon, caller.requester(), caller.policy());
    let (events, _unless_dropped) = mpsc::channel(1);
    let permit = daemon.work.plans.acquire(requester.uid()).await;
    let handle = Handle::current();
    let plan = move |daemon: &Daemon| {
        // Returned when the work is over, not when its client has disconnected.
        let _permit = permit;
        let registry = daemon.registry();
        let pull = daemon.pull(&registry, &handle, requester, &policy, &params, &events);
        ops::plan_pull(pull, &*daemon.last_opened)
    };
    daemon.blocking(plan).await
}

/// Finds out which model a source names now. Ends soon after the future is dropped, as when the client disconnects.
async fn resolve(caller: &Caller, params: PullParams) -> Result<Resolved, ops::OpError> {
    let (daemon, requester, policy) = (&caller.daemon, caller.requester(), caller.policy());
    let (events, _unless_dropped) = mpsc::channel(1);
    let permit = daemon.work.plans.acquire(requester.uid()).await;
    let handle = Handle::current();
    let resolve = move |daemon: &Daemon| {
        // Returned when the work is over, not when its client has disconnected.
        let _permit = permit;
        ops::resolve(daemon.pull(&daemon.registry(), &handle, requester, &policy, &params, &events))
    };
    daemon.blocking(resolve).await
}

/// Describes a model at its registry. Ends soon after its client disconnects.
async fn inspect(caller: &Caller, params: PullParams) -> Result<HttpResponse, ErrorBody> {
    let (daemon, requester, policy) = (&caller.daemon, caller.requester(), caller.policy());
    let uid = requester.uid();
    let (events, _unless_dropped) = mpsc::channel(1);
    let permit = daemon.work.inspections.acquire(uid).await;
    let handle = Handle::current();
    let inspect = move |daemon: &Daemon| {
        // Returned when the work is over, not when its client has disconnected.
        let registry = daemon.registry();
        let pull = daemon.pull(&registry, &handle, requester, &policy, &params, &events);
        Ok((ops::inspect(pull)?, permit))
    };
    let (heads, permit) = daemon.blocking(inspect).await.map_err(|error| error.body())?;
    // Counted before the copy in base64 is made.
    let bytes = heads.content_bytes().saturating_mul(BYTES_PER_CONTENT_BYTE);
    let memory = daemon.limits.memory_for(uid, bytes).await?;
    let serialize = move |_: &Daemon| {
        serde_json::to_vec(&heads).map_err(|error| ops::OpError::Internal(error.to_string()))
    };
    let json = daemon.blocking(serialize).await.map_err(|error| error.body())?;
    drop(permit);
    Ok(raw_response(json, memory))
}

/// Memory of a description for each byte of headers and texts: the byte, and base64 in JSON.
const BYTES_PER_CONTENT_BYTE: usize = 3;

async fn manifest(caller: &Caller, reference: Reference) -> Result<HttpResponse, ErrorBody> {
    let turn = caller.daemon.limits.disk.acquire(caller.peer.uid).await;
    let read =
        move |daemon: &Daemon| Ok(daemon.store.manifest(&daemon.store.resolve(&reference)?)?.raw().to_vec());
    caller.respond_raw(turn, read).await
}

fn version(daemon: &Daemon) -> Version {
    Version {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        protocol: blobd_client::protocol::VERSION,
        root: daemon.store.place().display().to_string(),
        pid: std::process::id(),
    }
}

fn limit(daemon: &Daemon) -> PullLimit {
    PullLimit { bytes_per_second: daemon.transfers.limit.get() }
}

/// Parses a percent-decoded reference.
fn reference(text: &str) -> Result<Reference, ErrorBody> {
    let malformed = || ErrorBody::new(ErrorCode::InvalidRequest, format!("{text:?}: malformed escape"));
    let decoded = percent_decode_str(text).decode_utf8().map_err(|_not_utf8| malformed())?;
    decoded.parse().map_err(|error: ReferenceError| ErrorBody::new(ErrorCode::InvalidRequest, error))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use blobd_registry::RegistryPolicy;
    use blobd_store::Store;

    use super::*;
    use crate::admission::{ConnectionLimits, Connections};
    use crate::metrics::Metrics;
    use crate::peer_process::Namespaces;
    use crate::principal::Groups;

    #[test]
    fn reference_in_a_path_may_have_slashes_and_escapes() {
        for name in ["hf.co/a/b:c", "hf.co%2Fa%2Fb%3Ac"] {
            assert_eq!(reference(name).unwrap().short(), "hf.co/a/b:c");
        }
    }

    #[test]
    fn malformed_names_are_refused() {
        for name in ["", "../../etc/passwd", "a%", "a%zz", "%ff"] {
            assert_eq!(reference(name).expect_err(name).code, ErrorCode::InvalidRequest);
        }
    }

    #[tokio::test]
    async fn unknown_requests_are_refused() {
        let (_folder, caller) = caller();
        for path in ["/", "/v1/model", "/v1/remove"] {
            let code = get(&caller, &path.parse().unwrap()).await.err().map(|error| error.code);
            assert_eq!(code, Some(ErrorCode::InvalidRequest), "{path}");
        }
    }

    fn caller() -> (tempfile::TempDir, Caller) {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path().join("store")).unwrap();
        let daemon = Arc::new(
            Daemon::new(store, &RegistryPolicy::default(), Metrics::new(verbs::names()).unwrap()).unwrap(),
        );
        let peer = Principal {
            pid: 1,
            uid: 1,
            groups: Groups { primary: 1, supplementary: None },
            namespaces: Namespaces::default(),
        };
        let rights = daemon.access().rights_of(&peer);
        let permit = Connections::new(ConnectionLimits::of_process()).admit(peer.uid, false).unwrap();
        let (stream, _client) = tokio::net::UnixStream::pair().unwrap();
        let socket = ClientSocket::new(stream, peer.uid, Some(permit), &daemon.closer);
        let record = RequestRecord::start(
            &daemon,
            &peer,
            verbs::verb(&Method::GET, "/"),
            daemon.request_ids.next_id(),
        );
        (folder, Caller { daemon, peer, rights, socket, record })
    }

    /// A client that repeatedly sends a request and disconnects must not get a thread each time.
    #[tokio::test]
    async fn surveys_are_limited_even_if_their_clients_disconnect() {
        const MAX: usize = 2;
        let (_folder, caller) = caller();
        let (running, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        for _client in 0..8 {
            let (running, most) = (Arc::clone(&running), Arc::clone(&most));
            let work = move |_: &Daemon| {
                most.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                std::thread::sleep(Duration::from_millis(100));
                running.fetch_sub(1, Ordering::SeqCst);
                Ok(())
            };
            // Dropped while it waits, as when a connection ends.
            let _ = tokio::time::timeout(Duration::from_millis(20), caller.survey(work)).await;
        }
        assert_eq!(most.load(Ordering::SeqCst), MAX);
        caller.survey(|_| Ok(())).await.unwrap();
    }
}
