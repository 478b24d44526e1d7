//! The HTTP API: maps each request to its operation.

use std::sync::Arc;

use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use blobd_client::protocol::request::{GcParams, LimitParams, PullParams, ReleaseParams, VerifyParams};
use blobd_client::protocol::response::Version;
use blobd_client::protocol::upkeep::PullLimit;
use blobd_store::Store;
use blobd_store_format::reference::{Reference, ReferenceError};
use hyper::body::Incoming;
use hyper::{Method, Request};
use percent_encoding::percent_decode_str;
use serde::de::DeserializeOwned;

use crate::ops;
use crate::permits::Permit;
use crate::principal::{Peer, Right};
use crate::socket::ClientSocket;
use crate::state::Daemon;

mod body;
mod details;
mod events;
mod open;
mod pull;
mod release;
mod show;
mod upgrade;
mod verify;

pub(crate) use body::{HttpResponse, json_response};
use body::{error_response, raw_response, read_json};

#[derive(Clone, Debug, PartialEq, Eq)]
enum Route {
    Version,
    Models,
    Model(Reference),
    Manifest(Reference),
    DiskUsage,
    Sessions,
    Trash,
    Doctor,
    Eviction(Option<u64>),
    Limit,
    SetLimit,
    Remove,
    Undelete,
    Pin,
    Tag,
    Gc,
    Verify,
    Reindex,
    Release,
    Pull,
    PlanPull,
    Open,
    Import,
}

impl Route {
    fn of(method: &Method, path: &str, query: Option<&str>) -> Result<Self, ErrorBody> {
        const MODELS: &str = "/v1/models/";
        const MANIFESTS: &str = "/v1/manifests/";
        match (method, path) {
            (&Method::GET, "/v1/version") => Ok(Self::Version),
            (&Method::GET, "/v1/models") => Ok(Self::Models),
            (&Method::GET, "/v1/df") => Ok(Self::DiskUsage),
            (&Method::GET, "/v1/ps") => Ok(Self::Sessions),
            (&Method::GET, "/v1/trash") => Ok(Self::Trash),
            (&Method::GET, "/v1/doctor") => Ok(Self::Doctor),
            (&Method::GET, "/v1/eviction") => Ok(Self::Eviction(eviction_bytes(query)?)),
            (&Method::GET, "/v1/limit") => Ok(Self::Limit),
            (&Method::POST, "/v1/limit") => Ok(Self::SetLimit),
            (&Method::POST, "/v1/remove") => Ok(Self::Remove),
            (&Method::POST, "/v1/undelete") => Ok(Self::Undelete),
            (&Method::POST, "/v1/pin") => Ok(Self::Pin),
            (&Method::POST, "/v1/tag") => Ok(Self::Tag),
            (&Method::POST, "/v1/gc") => Ok(Self::Gc),
            (&Method::POST, "/v1/verify") => Ok(Self::Verify),
            (&Method::POST, "/v1/reindex") => Ok(Self::Reindex),
            (&Method::POST, "/v1/release") => Ok(Self::Release),
            (&Method::POST, "/v1/pull/plan") => Ok(Self::PlanPull),
            (&Method::POST, "/v1/pull") => Ok(Self::Pull),
            (&Method::POST, "/v1/open") => Ok(Self::Open),
            (&Method::POST, "/v1/import") => Ok(Self::Import),
            (&Method::GET, path) if path.starts_with(MODELS) => Ok(Self::Model(reference(path, MODELS)?)),
            (&Method::GET, path) if path.starts_with(MANIFESTS) => {
                Ok(Self::Manifest(reference(path, MANIFESTS)?))
            }
            _ => {
                let message = format!("{method} {path}: no such request");
                Err(ErrorBody::new(ErrorCode::InvalidRequest, message)
                    .with_hint("docs/PROTOCOL.md lists them"))
            }
        }
    }

    const fn right(&self) -> Right {
        match self {
            // A verification that repairs needs more, depending on its parameters. So does a release of
            // other users' leases.
            Self::Version
            | Self::Models
            | Self::Model(_)
            | Self::Manifest(_)
            | Self::DiskUsage
            | Self::Sessions
            | Self::Trash
            | Self::Doctor
            | Self::Eviction(_)
            | Self::Limit
            | Self::Open
            | Self::Release
            | Self::Verify => Right::Read,
            Self::Pull | Self::PlanPull | Self::Import => Right::Pull,
            Self::SetLimit
            | Self::Remove
            | Self::Undelete
            | Self::Pin
            | Self::Tag
            | Self::Gc
            | Self::Reindex => Right::Administer,
        }
    }
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
    let Caller { daemon, peer, .. } = caller;
    let route = Route::of(request.method(), request.uri().path(), request.uri().query())?;
    let path = request.uri().path().to_owned();
    require(peer, route.right(), &path)?;
    match route {
        Route::Version => Ok(json_response(&version(daemon))),
        Route::Models => caller.respond(|daemon| ops::list(&daemon.store)).await,
        Route::Model(reference) => show::show(caller, reference).await,
        Route::Manifest(reference) => manifest(caller, reference).await,
        Route::Sessions => caller.respond(|daemon| Ok(daemon.sessions.list())).await,
        Route::DiskUsage => {
            let usage =
                |daemon: &Daemon| ops::usage(&daemon.store, |model| daemon.sessions.last_opened(model));
            caller.survey(usage).await
        }
        Route::Trash => caller.respond(|daemon| ops::trash(&daemon.store)).await,
        Route::Doctor => caller.survey(|daemon| ops::doctor(&daemon.store, daemon.doctor_context())).await,
        Route::Eviction(bytes) => {
            let plan = move |daemon: &Daemon| ops::eviction_plan(&daemon.store, &*daemon.last_opened, bytes);
            caller.survey(plan).await
        }
        Route::Limit => Ok(json_response(&limit(daemon))),
        Route::Open => open::open(caller, request).await,
        Route::Import => open::import(caller, request).await,
        route => dispatch_post(caller, route, &path, request).await,
    }
}

/// Requests with a body that need no upgrade.
async fn dispatch_post(
    caller: &Caller,
    route: Route,
    path: &str,
    request: Request<Incoming>,
) -> Result<HttpResponse, ErrorBody> {
    let daemon = &caller.daemon;
    match route {
        Route::SetLimit => {
            let params: LimitParams = caller.params(request).await?;
            daemon.transfers.limit.set(params.bytes_per_second);
            Ok(json_response(&limit(daemon)))
        }
        Route::Undelete => caller.respond_to(request, ops::undelete).await,
        Route::Pin => caller.respond_to(request, |store, params| ops::pin(store, params)).await,
        Route::Remove => caller.respond_to(request, |store, params| ops::remove(store, params)).await,
        Route::Tag => caller.respond_to(request, ops::tag).await,
        Route::Gc => {
            let params: GcParams = caller.params(request).await?;
            let collect = move |daemon: &Daemon| ops::gc(&daemon.store, params);
            if params.dry_run { caller.survey(collect).await } else { caller.respond(collect).await }
        }
        Route::Verify => {
            let params: VerifyParams = caller.params(request).await?;
            if params.repair {
                require(&caller.peer, Right::Pull, path)?;
            }
            let lasting = caller.lasting()?;
            Ok(lasts(verify::start(daemon, caller.peer.uid, params), lasting))
        }
        Route::Release => {
            let params: ReleaseParams = caller.params(request).await?;
            release::release(caller, params).await
        }
        Route::Pull => {
            let params: PullParams = caller.params(request).await?;
            let lasting = caller.lasting()?;
            Ok(lasts(pull::start(daemon, caller.peer.uid, params), lasting))
        }
        Route::PlanPull => {
            let params: PullParams = caller.params(request).await?;
            let plan = pull::plan(daemon, caller.peer.uid, params).await;
            plan.map(|plan| json_response(&plan)).map_err(|error| error.body())
        }
        Route::Reindex => caller.respond(|daemon| ops::reindex(&daemon.store)).await,
        // `dispatch` handles all others.
        other => Err(ErrorBody::new(ErrorCode::Internal, format!("{path}: {other:?} has no handler"))),
    }
}

/// Counts the connection as long-lived until the response is complete.
fn lasts(mut response: HttpResponse, lasting: Arc<Permit>) -> HttpResponse {
    response.body_mut().hold(lasting);
    response
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

    fn lasting(&self) -> Result<Arc<Permit>, ErrorBody> {
        self.daemon.limits.lasting_for(self.peer.uid)
    }

    /// Runs `work` on the store with the parameters in the request's body.
    async fn respond_to<P: DeserializeOwned + Send + 'static, T: serde::Serialize + Send + 'static>(
        &self,
        request: Request<Incoming>,
        work: impl FnOnce(&Arc<Store>, &P) -> Result<T, ops::OpError> + Send + 'static,
    ) -> Result<HttpResponse, ErrorBody> {
        let (params, permit): (P, _) = read_json(request, &self.daemon.limits, self.peer.uid).await?;
        let work = move |daemon: &Daemon| {
            // The permit counts the parameters as long as they exist.
            let _permit = permit;
            work(&daemon.store, &params)
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

async fn manifest(caller: &Caller, reference: Reference) -> Result<HttpResponse, ErrorBody> {
    let turn = caller.daemon.limits.disk.acquire(caller.peer.uid).await;
    let read = move |daemon: &Daemon| Ok(ops::manifest(&daemon.store, &reference)?.raw().to_vec());
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

/// Parses the reference after `prefix`, percent-decoded.
fn reference(path: &str, prefix: &str) -> Result<Reference, ErrorBody> {
    let text = path.strip_prefix(prefix).unwrap_or_default();
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
        for path in ["/v1/models/hf.co/a/b:c", "/v1/models/hf.co%2Fa%2Fb%3Ac"] {
            let Ok(Route::Model(reference)) = Route::of(&Method::GET, path, None) else { panic!("{path}") };
            assert_eq!(reference.short(), "hf.co/a/b:c");
        }
    }

    #[test]
    fn unknown_requests_and_malformed_names_are_refused() {
        for (method, path) in [
            (Method::GET, "/"),
            (Method::DELETE, "/v1/models"),
            (Method::GET, "/v1/models/"),
            (Method::GET, "/v1/models/../../etc/passwd"),
            (Method::GET, "/v1/models/a%"),
            (Method::GET, "/v1/models/a%zz"),
            (Method::GET, "/v1/models/%ff"),
        ] {
            let error = Route::of(&method, path, None).expect_err(path);
            assert_eq!(error.code, ErrorCode::InvalidRequest);
        }
    }

    /// A client that repeatedly sends a request and disconnects must not get a thread each time.
    #[tokio::test]
    async fn surveys_are_limited_even_if_their_clients_disconnect() {
        const MAX: usize = 2;
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path().join("store")).unwrap();
        let daemon = Arc::new(Daemon::new(store, &RegistryPolicy::default()).unwrap());
        let peer = Peer { pid: 1, uid: 1 };
        let permit = Connections::new(ConnectionLimits::of_process()).admit(peer.uid).unwrap();
        let (stream, _client) = tokio::net::UnixStream::pair().unwrap();
        let socket = ClientSocket::new(stream, peer.uid, Some(permit), &daemon.closer);
        let caller = Caller { daemon, peer, socket };
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
        assert_eq!(Route::Gc.right(), Right::Administer);
        assert_eq!(Route::Remove.right(), Right::Administer);
        assert_eq!(Route::SetLimit.right(), Right::Administer);
        assert_eq!(Route::Limit.right(), Right::Read);
        assert_eq!(Route::Open.right(), Right::Read);
    }
}
