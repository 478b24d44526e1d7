//! The HTTP API: maps each request to its operation.

// A request takes a thread only with its user's turn, see `clippy.toml`.
#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

use std::sync::Arc;

use blobd_client::protocol::audit::LogParams;
use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use blobd_client::protocol::request::{GcParams, LimitParams, RenameParams, VerifyParams};
use blobd_client::protocol::request_id::{REQUEST_ID_HEADER, RequestId};
use blobd_client::protocol::response::Version;
use blobd_client::protocol::space::RemovePartialsParams;
use blobd_client::protocol::upkeep::PullLimit;
use blobd_store::Store;
use blobd_store_format::reference::{Reference, ReferenceError};
use hyper::body::Incoming;
use hyper::header::HeaderValue;
use hyper::{Method, Request, Uri};
use percent_encoding::percent_decode_str;
use serde::de::DeserializeOwned;
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

mod answer;
mod body;
mod details;
mod events;
mod heads;
mod log;
mod observe;
mod open;
mod read_model;
mod refused;
mod release;
mod route;
mod show;
mod upgrade;
mod verbs;

pub(crate) use body::{HttpResponse, reports_progress};
use body::{Params, error_response, read_json};
use route::Route;
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
    let responding = async {
        match dispatch(daemon, peer, socket, Arc::clone(&record), request).await {
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
    route: &'static Route,
    peer: Principal,
    rights: Rights,
    socket: ClientSocket,
    record: Arc<RequestRecord>,
}

async fn dispatch(
    daemon: Arc<Daemon>,
    peer: Principal,
    socket: ClientSocket,
    record: Arc<RequestRecord>,
    request: Request<Incoming>,
) -> Result<HttpResponse, ErrorBody> {
    let (method, uri) = (request.method().clone(), request.uri().clone());
    let route = route::find(&method, uri.path()).ok_or_else(|| unknown(&method, uri.path()))?;
    let rights = daemon.access().rights_of(&peer);
    let caller = Caller { daemon, route, peer, rights, socket, record };
    if let Some(right) = route.right.filter(|right| !rights.include(*right)) {
        refused::note_subject(&caller, uri.path(), request).await;
        return Err(caller.refusal(right, None));
    }
    match method {
        Method::GET => get(&caller, &uri).await,
        _ => post(&caller, uri.path(), request).await,
    }
}

async fn get(caller: &Caller, uri: &Uri) -> Result<HttpResponse, ErrorBody> {
    let daemon = &caller.daemon;
    match uri.path() {
        "/v1/version" => caller.answer(&version(daemon)).await,
        "/v1/access" => caller.answer(&daemon.access().own_access(&caller.peer)).await,
        "/v1/models" => caller.respond(|daemon| ops::list(&daemon.store)).await,
        "/v1/ps" => observe::sessions(caller, uri.query()).await,
        "/v1/pulls" => observe::pulls(caller).await,
        "/v1/df" => observe::usage(caller, uri.query()).await,
        "/v1/df/users" => observe::user_usage(caller).await,
        "/v1/partials" => caller.respond(|daemon| ops::partials(&daemon.store, &daemon.transfers)).await,
        "/v1/trash" => caller.respond(|daemon| ops::trash(&daemon.store)).await,
        "/v1/doctor" => caller.respond(|daemon| ops::doctor(&daemon.store, daemon.doctor_context())).await,
        "/v1/eviction" => {
            let bytes = observe::number(uri.query(), "bytes")?;
            let plan = move |daemon: &Daemon| ops::eviction_plan(&daemon.store, &*daemon.last_opened, bytes);
            caller.respond(plan).await
        }
        "/v1/gc" => {
            caller
                .respond(|daemon| ops::gc(&daemon.store, GcParams { dry_run: true, ..GcParams::default() }))
                .await
        }
        "/v1/health" => caller.answer(&monitoring::health(daemon, caller.peer.uid).await).await,
        "/v1/metrics" => observe::metrics(caller).await,
        "/v1/limit" => caller.answer(&limit(daemon)).await,
        "/v1/config" => caller.answer(&daemon.configuration()).await,
        path => {
            if let Some(name) = path.strip_prefix("/v1/models/") {
                show::show(caller, reference(name)?).await
            } else if let Some(name) = path.strip_prefix("/v1/manifests/") {
                show::manifest(caller, reference(name)?).await
            } else if let Some(name) = path.strip_prefix("/v1/heads/") {
                let name = reference(name)?;
                // The policy may refuse it, which has a record.
                caller.record.note_subject(Some(short_name(&name)), None);
                heads::heads(caller, name).await
            } else if let Some(name) = path.strip_prefix("/v1/fit/") {
                let name = reference(name)?;
                // As for `heads`.
                caller.record.note_subject(Some(short_name(&name)), None);
                show::fit(caller, name, uri.query()).await
            } else if let Some(name) = path.strip_prefix("/v1/history/") {
                let name = reference(name)?;
                caller.respond(move |daemon| ops::history(&daemon.store, &name)).await
            } else if let Some(name) = path.strip_prefix("/v1/sharing/") {
                let model = reference(name)?;
                caller.respond(move |daemon| ops::sharing(&daemon.store, &model)).await
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
            let params: Params<LimitParams> = caller.params(request).await?;
            let before = limit(daemon);
            daemon.transfers.limit.set(params.bytes_per_second);
            let limit = limit(daemon);
            caller.record.finished(&NewPullLimit { limit, before });
            caller.answer(&limit).await
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
        "/v1/gc" => collect(caller, *caller.params(request).await?).await,
        "/v1/verify" => {
            let params: Params<VerifyParams> = caller.params(request).await?;
            if params.repair {
                caller.require(Right::Pull, "--repair")?;
            }
            events::verify(caller, params)
        }
        "/v1/release" => release::release(caller, caller.params(request).await?).await,
        "/v1/edit" => events::edit(caller, caller.params(request).await?),
        "/v1/promote" => events::promote(caller, caller.params(request).await?),
        "/v1/pull" => events::pull(caller, caller.params(request).await?),
        "/v1/pull/plan" => observe::plan_pull(caller, caller.params(request).await?).await,
        "/v1/resolve" => observe::resolve(caller, caller.params(request).await?).await,
        "/v1/log" => log::log(caller, &*caller.params::<LogParams>(request).await?).await,
        "/v1/inspect" => observe::inspect(caller, caller.params(request).await?).await,
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
    caller.respond(collect).await
}

async fn remove_partials(
    caller: &Caller,
    params: Params<RemovePartialsParams>,
) -> Result<HttpResponse, ErrorBody> {
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
    /// The JSON parameters of a request.
    async fn params<P: DeserializeOwned + Subject>(
        &self,
        request: Request<Incoming>,
    ) -> Result<Params<P>, ErrorBody> {
        let params: Params<P> = read_json(request, &self.daemon.limits, self.peer.uid).await?;
        self.record.note_subject(params.subject(), params.verb());
        self.record.note_source(params.source());
        Ok(params)
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
        let params: Params<P> = self.params(request).await?;
        let (requester, record) = (self.requester(), Arc::clone(&self.record));
        let work = move |daemon: &Daemon| {
            let done = work(&daemon.store, requester, &params)?;
            record.finished(&done);
            Ok(done)
        };
        self.respond(work).await
    }
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
        let route = route::find(&Method::GET, "/v1/doctor").unwrap();
        (folder, Caller { daemon, route, peer, rights, socket, record })
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
            let _ = tokio::time::timeout(Duration::from_millis(20), caller.respond(work)).await;
        }
        assert_eq!(most.load(Ordering::SeqCst), MAX);
        caller.respond(|_| Ok(())).await.unwrap();
    }
}
