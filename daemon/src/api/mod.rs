//! The HTTP API: maps each request to its operation.

use std::sync::Arc;

use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use blobd_client::protocol::request::{GcParams, LimitParams, PullParams, RenameParams, VerifyParams};
use blobd_client::protocol::response::{PullPlan, Resolved, Version};
use blobd_client::protocol::space::RemovePartialsParams;
use blobd_client::protocol::upkeep::PullLimit;
use blobd_store::Store;
use blobd_store_format::reference::{Reference, ReferenceError};
use hyper::body::Incoming;
use hyper::{Method, Request, Uri};
use percent_encoding::percent_decode_str;
use serde::de::DeserializeOwned;
use tokio::runtime::Handle;
use tokio::sync::mpsc;

use crate::ops;
use crate::permits::Permit;
use crate::principal::{Peer, Right};
use crate::requester::Requester;
use crate::socket::ClientSocket;
use crate::state::Daemon;
use crate::verb_log::{self, Finished};

mod body;
mod details;
mod events;
mod open;
mod release;
mod show;
mod upgrade;

pub(crate) use body::{HttpResponse, json_response, reports_progress};
use body::{error_response, raw_response, read_json};

/// The right that a request needs; `None` for an unknown one. A verification that repairs and a release of other
/// users' leases need more, depending on their parameters.
fn right(method: &Method, path: &str) -> Option<Right> {
    match (method.as_str(), path) {
        ("GET", _) | ("POST", "/v1/open" | "/v1/release" | "/v1/verify") => Some(Right::Read),
        (
            "POST",
            "/v1/pull"
            | "/v1/pull/plan"
            | "/v1/resolve"
            | "/v1/inspect"
            | "/v1/import"
            | "/v1/edit"
            | "/v1/partials/remove",
        ) => Some(Right::Pull),
        (
            "POST",
            "/v1/limit" | "/v1/remove" | "/v1/rename" | "/v1/undelete" | "/v1/pin" | "/v1/tag" | "/v1/gc"
            | "/v1/reindex",
        ) => Some(Right::Administer),
        _ => None,
    }
}

fn unknown(method: &Method, path: &str) -> ErrorBody {
    let message = format!("{method} {path}: no such request");
    ErrorBody::new(ErrorCode::InvalidRequest, message).with_hint("docs/PROTOCOL.md lists them")
}

pub(crate) async fn respond(
    daemon: Arc<Daemon>,
    peer: Peer,
    socket: ClientSocket,
    request: Request<Incoming>,
) -> HttpResponse {
    let caller = Caller { daemon, peer, socket };
    match dispatch(&caller, request).await {
        Ok(response) => response,
        Err(error) => {
            // Errors of the daemon itself are also logged.
            if matches!(error.code, ErrorCode::Internal | ErrorCode::Corrupt | ErrorCode::NoSpace)
                && let Some(omitted) = caller.daemon.limits.error_log.admit(caller.peer.uid)
            {
                tracing::error!("{error}{omitted}");
            }
            error_response(error)
        }
    }
}

struct Caller {
    daemon: Arc<Daemon>,
    peer: Peer,
    socket: ClientSocket,
}

async fn dispatch(caller: &Caller, request: Request<Incoming>) -> Result<HttpResponse, ErrorBody> {
    let (method, uri) = (request.method().clone(), request.uri().clone());
    let right = right(&method, uri.path()).ok_or_else(|| unknown(&method, uri.path()))?;
    require(&caller.peer, right, uri.path())?;
    match method {
        Method::GET => get(caller, &uri).await,
        _ => post(caller, uri.path(), request).await,
    }
}

async fn get(caller: &Caller, uri: &Uri) -> Result<HttpResponse, ErrorBody> {
    let daemon = &caller.daemon;
    match uri.path() {
        "/v1/version" => Ok(json_response(&version(daemon))),
        "/v1/models" => caller.respond(|daemon| ops::list(&daemon.store)).await,
        "/v1/ps" => caller.respond(|daemon| Ok(daemon.sessions.list())).await,
        "/v1/df" => caller.survey(|daemon| ops::usage(&daemon.store, &*daemon.last_opened)).await,
        "/v1/partials" => caller.survey(|daemon| ops::partials(&daemon.store, &daemon.transfers)).await,
        "/v1/trash" => caller.respond(|daemon| ops::trash(&daemon.store)).await,
        "/v1/doctor" => caller.survey(|daemon| ops::doctor(&daemon.store, daemon.doctor_context())).await,
        "/v1/eviction" => {
            let bytes = eviction_bytes(uri.query())?;
            let plan = move |daemon: &Daemon| ops::eviction_plan(&daemon.store, &*daemon.last_opened, bytes);
            caller.survey(plan).await
        }
        "/v1/limit" => Ok(json_response(&limit(daemon))),
        path => {
            if let Some(name) = path.strip_prefix("/v1/models/") {
                show::show(caller, reference(name)?).await
            } else if let Some(name) = path.strip_prefix("/v1/manifests/") {
                manifest(caller, reference(name)?).await
            } else if let Some(name) = path.strip_prefix("/v1/heads/") {
                show::heads(caller, reference(name)?).await
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
            daemon.transfers.limit.set(params.bytes_per_second);
            let limit = limit(daemon);
            verb_log::finished(&daemon.limits.log, caller.requester(), &limit);
            Ok(json_response(&limit))
        }
        "/v1/undelete" => caller.change(request, |store, _, params| ops::undelete(store, params)).await,
        "/v1/pin" => caller.change(request, |store, _, params| ops::pin(store, params)).await,
        "/v1/partials/remove" => remove_partials(caller, caller.params(request).await?).await,
        "/v1/remove" => {
            let last_opened = Arc::clone(&daemon.last_opened);
            caller.change(request, move |store, _, params| ops::remove(store, &*last_opened, params)).await
        }
        "/v1/tag" => caller.change(request, ops::tag).await,
        "/v1/rename" => rename(caller, request).await,
        "/v1/gc" => collect(caller, caller.params(request).await?).await,
        "/v1/verify" => {
            let params: VerifyParams = caller.params(request).await?;
            if params.repair {
                require(&caller.peer, Right::Pull, path)?;
            }
            events::verify(caller, params)
        }
        "/v1/release" => release::release(caller, caller.params(request).await?).await,
        "/v1/edit" => events::edit(caller, caller.params(request).await?),
        "/v1/pull" => {
            let params: PullParams = caller.params(request).await?;
            caller.require_to_force(params.force, path)?;
            events::pull(caller, params)
        }
        "/v1/pull/plan" => {
            let plan = plan_pull(daemon, caller.requester(), caller.params(request).await?).await;
            plan.map(|plan| json_response(&plan)).map_err(|error| error.body())
        }
        "/v1/resolve" => {
            let resolved = resolve(daemon, caller.requester(), caller.params(request).await?).await;
            resolved.map(|resolved| json_response(&resolved)).map_err(|error| error.body())
        }
        "/v1/inspect" => inspect(caller, caller.params(request).await?).await,
        "/v1/reindex" => {
            let requester = caller.requester();
            let reindex = move |daemon: &Daemon| {
                let reindexed = ops::reindex(&daemon.store)?;
                verb_log::finished(&daemon.limits.log, requester, &reindexed);
                Ok(reindexed)
            };
            caller.respond(reindex).await
        }
        _ => Err(unknown(&Method::POST, path)),
    }
}

async fn rename(caller: &Caller, request: Request<Incoming>) -> Result<HttpResponse, ErrorBody> {
    let sessions = caller.daemon.sessions.clone();
    let rename = move |store: &Arc<Store>, requester, params: &RenameParams| {
        let renamed = ops::rename(store, requester, params)?;
        // The source may have been given by its ID.
        if let Ok(old) = renamed.from.parse() {
            sessions.rename(&old, &params.target);
        }
        Ok(renamed)
    };
    caller.change(request, rename).await
}

async fn collect(caller: &Caller, params: GcParams) -> Result<HttpResponse, ErrorBody> {
    let requester = caller.requester();
    let collect = move |daemon: &Daemon| {
        let report = ops::gc(&daemon.store, params)?;
        verb_log::finished(&daemon.limits.log, requester, &report);
        Ok(report)
    };
    if params.dry_run { caller.survey(collect).await } else { caller.respond(collect).await }
}

async fn remove_partials(caller: &Caller, params: RemovePartialsParams) -> Result<HttpResponse, ErrorBody> {
    let (uid, may_drop_all) = (caller.peer.uid, caller.peer.may(Right::Administer));
    let requester = caller.requester();
    let remove = move |daemon: &Daemon| {
        let done = ops::remove_partials(&daemon.store, &daemon.transfers, &params, uid, may_drop_all)?;
        verb_log::finished(&daemon.limits.log, requester, &done);
        Ok(done)
    };
    caller.respond(remove).await
}

fn require(peer: &Peer, right: Right, path: &str) -> Result<(), ErrorBody> {
    if peer.may(right) {
        return Ok(());
    }
    let message = format!("{path}: uid {} may not do this", peer.uid);
    Err(ErrorBody::new(ErrorCode::Denied, message).with_hint("the daemon's own user and root may"))
}

impl Caller {
    /// The JSON parameters of a request, without their memory permit: they are used immediately.
    async fn params<P: DeserializeOwned>(&self, request: Request<Incoming>) -> Result<P, ErrorBody> {
        let (params, _permit) = read_json(request, &self.daemon.limits, self.peer.uid).await?;
        Ok(params)
    }

    fn requester(&self) -> Requester {
        Requester::of(&self.peer)
    }

    /// Only administrators may take the name of a pinned model, because only they may pin and unpin.
    fn require_to_force(&self, force: bool, path: &str) -> Result<(), ErrorBody> {
        if force { require(&self.peer, Right::Administer, &format!("{path}, force")) } else { Ok(()) }
    }

    fn lasting(&self) -> Result<Arc<Permit>, ErrorBody> {
        self.daemon.limits.lasting_for(self.peer.uid)
    }

    /// Runs `work`, which changes the store, with the parameters in the request's body, and logs its result.
    async fn change<P: DeserializeOwned + Send + 'static, T: serde::Serialize + Finished + Send + 'static>(
        &self,
        request: Request<Incoming>,
        work: impl FnOnce(&Arc<Store>, Requester, &P) -> Result<T, ops::OpError> + Send + 'static,
    ) -> Result<HttpResponse, ErrorBody> {
        let (params, permit): (P, _) = read_json(request, &self.daemon.limits, self.peer.uid).await?;
        let requester = self.requester();
        let work = move |daemon: &Daemon| {
            // The permit counts the parameters as long as they exist.
            let _permit = permit;
            let done = work(&daemon.store, requester, &params)?;
            verb_log::finished(&daemon.limits.log, requester, &done);
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

/// What a pull would download. Ends soon after the future is dropped, as when the client disconnects.
async fn plan_pull(
    daemon: &Arc<Daemon>,
    requester: Requester,
    params: PullParams,
) -> Result<PullPlan, ops::OpError> {
    let (events, _unless_dropped) = mpsc::channel(1);
    let permit = daemon.work.plans.acquire(requester.uid()).await;
    let handle = Handle::current();
    let plan = move |daemon: &Daemon| {
        // Returned when the work is over, not when its client has disconnected.
        let _permit = permit;
        ops::plan_pull(daemon.pull(&handle, requester, &params, &events))
    };
    daemon.blocking(plan).await
}

/// What a source names now. Ends soon after the future is dropped, as when the client disconnects.
async fn resolve(
    daemon: &Arc<Daemon>,
    requester: Requester,
    params: PullParams,
) -> Result<Resolved, ops::OpError> {
    let (events, _unless_dropped) = mpsc::channel(1);
    let permit = daemon.work.plans.acquire(requester.uid()).await;
    let handle = Handle::current();
    let resolve = move |daemon: &Daemon| {
        // Returned when the work is over, not when its client has disconnected.
        let _permit = permit;
        ops::resolve(daemon.pull(&handle, requester, &params, &events))
    };
    daemon.blocking(resolve).await
}

/// Describes a model at its registry. Ends soon after its client disconnects.
async fn inspect(caller: &Caller, params: PullParams) -> Result<HttpResponse, ErrorBody> {
    let (daemon, requester) = (&caller.daemon, caller.requester());
    let uid = requester.uid();
    let (events, _unless_dropped) = mpsc::channel(1);
    let permit = daemon.work.inspections.acquire(uid).await;
    let handle = Handle::current();
    let inspect = move |daemon: &Daemon| {
        // Returned when the work is over, not when its client has disconnected.
        Ok((ops::inspect(daemon.pull(&handle, requester, &params, &events))?, permit))
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

/// Parses `bytes=N`; `None` without a query.
fn eviction_bytes(query: Option<&str>) -> Result<Option<u64>, ErrorBody> {
    let Some(query) = query else { return Ok(None) };
    let bytes = query.strip_prefix("bytes=").and_then(|number| number.parse().ok());
    let message = || format!("{query:?}: not a query of this request, bytes=NUMBER expected");
    bytes.map(Some).ok_or_else(|| ErrorBody::new(ErrorCode::InvalidRequest, message()))
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
        assert_eq!(right(&Method::DELETE, "/v1/models"), None);
        assert_eq!(right(&Method::POST, "/v1/models"), None);
    }

    fn caller() -> (tempfile::TempDir, Caller) {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path().join("store")).unwrap();
        let daemon = Arc::new(Daemon::new(store, &RegistryPolicy::default()).unwrap());
        let peer = Peer { pid: 1, uid: 1 };
        let permit = Connections::new(ConnectionLimits::of_process()).admit(peer.uid).unwrap();
        let (stream, _client) = tokio::net::UnixStream::pair().unwrap();
        let socket = ClientSocket::new(stream, peer.uid, Some(permit), &daemon.closer);
        (folder, Caller { daemon, peer, socket })
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

    #[test]
    fn changing_the_store_needs_more_than_reading_it() {
        assert_eq!(right(&Method::POST, "/v1/gc"), Some(Right::Administer));
        assert_eq!(right(&Method::POST, "/v1/remove"), Some(Right::Administer));
        assert_eq!(right(&Method::POST, "/v1/limit"), Some(Right::Administer));
        assert_eq!(right(&Method::GET, "/v1/limit"), Some(Right::Read));
        assert_eq!(right(&Method::POST, "/v1/open"), Some(Right::Read));
    }
}
