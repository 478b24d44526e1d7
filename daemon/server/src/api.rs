//! The HTTP API: maps each request to its operation.

// A request uses a thread only after it has waited for its user's turn: see `clippy.toml`.
#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

use std::sync::Arc;

use blobd_client::protocol::access::Right;
use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use blobd_client::protocol::request_id::{REQUEST_ID_HEADER, RequestId};
use blobd_client::protocol::route::{self, Document, Received, Route};
use blobd_store::Store;
use hyper::body::Incoming;
use hyper::header::HeaderValue;
use hyper::{Method, Request};
use percent_encoding::percent_decode_str;
use tracing::Instrument as _;

use crate::access::Rights;
use crate::ops::{CallerPolicy, OpError};
use crate::permits::Permit;
use crate::principal::Principal;
use crate::request_record::RequestRecord;
use crate::requester::Requester;
use crate::socket::ClientSocket;
use crate::state::Daemon;
use crate::verb_log::Finished;

mod answer;
mod body;
mod changes;
mod details;
mod dispatch;
mod events;
mod log;
mod observe;
mod open;
mod read_model;
mod show;

pub(crate) use crate::request_record::verbs as verb_names;
use answer::{Memory, TurnPool};
pub(crate) use body::{HttpResponse, reports_progress};
use body::{Params, Reply, error_response, read_body};
use open::Upgrade;

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
    let route = Route::find(request.method().as_str(), request.uri().path()).map(|(route, _)| route);
    let record = RequestRecord::start(&daemon, &peer, route, id);
    let responding = async {
        let responded = match route {
            Some(route) => {
                let rights = daemon.access.get().rights_of(&peer);
                let record = Arc::clone(&record);
                let (turns, memory) = (dispatch::turns(route), dispatch::memory(route));
                Caller { daemon, route, turns, memory, peer, rights, socket, record }
                    .respond_to(request)
                    .await
            }
            None => Err(unknown(request.method(), request.uri().path())),
        };
        match responded {
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
    route: Route,
    turns: TurnPool,
    memory: Memory,
    peer: Principal,
    rights: Rights,
    socket: ClientSocket,
    record: Arc<RequestRecord>,
}

struct Change<'c, P> {
    daemon: &'c Daemon,
    store: &'c Arc<Store>,
    requester: Requester,
    policy: &'c CallerPolicy,
    params: &'c P,
}

impl Caller {
    async fn respond_to(self, request: Request<Incoming>) -> Result<HttpResponse, ErrorBody> {
        if let Some(right) = self.route.right().filter(|right| !self.rights.include(*right)) {
            self.note_refused(request).await;
            return Err(self.refusal(right, None));
        }
        if self.route.is_audited() && self.daemon.audit.is_required() {
            let check = |daemon: &Daemon| Ok(daemon.audit.check_required());
            let checked = self.daemon.disk_work(self.peer.uid, check).await;
            checked.map_err(|error| error.body())??;
        }
        dispatch::dispatch(&self, request).await
    }

    /// A malformed request names nothing.
    async fn note_refused(&self, request: Request<Incoming>) {
        let noted = self.received(request, |received| self.route.subject(received)).await;
        if let Ok((subject, _memory)) = noted {
            self.record.note_subject(subject);
        }
    }

    async fn run<R: route::Request>(
        &self,
        request: Request<Incoming>,
        work: impl AsyncFnOnce(&Self, Params<R::Params>) -> Result<Reply<R::Answer>, ErrorBody>,
    ) -> Result<HttpResponse, ErrorBody> {
        let params = self.params::<R>(request).await?;
        Ok(work(self, params).await?.into_response())
    }

    /// Executes a request that upgrades its connection.
    async fn upgrade<R: route::Request>(
        &self,
        mut request: Request<Incoming>,
        work: impl AsyncFnOnce(&Self, Params<R::Params>, Upgrade) -> Result<Reply<R::Answer>, ErrorBody>,
    ) -> Result<HttpResponse, ErrorBody> {
        let upgrade = Upgrade::requested(&mut request)?;
        let params = self.params::<R>(request).await?;
        Ok(work(self, params, upgrade).await?.into_response())
    }

    /// Executes a request that only reads, on a thread that may block.
    async fn read<R: route::Request<Answer = Document<T>>, T: serde::Serialize + Send + 'static>(
        &self,
        request: Request<Incoming>,
        work: impl FnOnce(&Daemon, &R::Params) -> Result<T, OpError> + Send + 'static,
    ) -> Result<HttpResponse, ErrorBody>
    where
        R::Params: Send + 'static,
    {
        let params = self.params::<R>(request).await?;
        Ok(self.respond(move |daemon| work(daemon, &params)).await?.into_response())
    }

    /// Executes a request that changes the store, on a thread that may block, and logs its result.
    async fn change<
        R: route::Request<Answer = Document<T>>,
        T: serde::Serialize + Finished + Send + 'static,
    >(
        &self,
        request: Request<Incoming>,
        work: impl FnOnce(&Change<'_, R::Params>) -> Result<T, OpError> + Send + 'static,
    ) -> Result<HttpResponse, ErrorBody>
    where
        R::Params: Send + 'static,
    {
        let params = self.params::<R>(request).await?;
        let (requester, policy, record) = (self.requester(), self.policy(), Arc::clone(&self.record));
        let work = move |daemon: &Daemon| {
            let change =
                Change { daemon, store: &daemon.store, requester, policy: &policy, params: &*params };
            work(&change).inspect(|done| record.finished(done))
        };
        Ok(self.respond(work).await?.into_response())
    }

    async fn params<R: route::Request>(
        &self,
        request: Request<Incoming>,
    ) -> Result<Params<R::Params>, ErrorBody> {
        let (params, memory) = self.received(request, R::decode).await?;
        self.record.note_subject(route::Params::subject(&params));
        Ok(Params::new(params, memory))
    }

    /// Receives the parameters of a request and reads them with `read`. Returns the permit for their memory too.
    async fn received<T>(
        &self,
        request: Request<Incoming>,
        read: impl FnOnce(&Received<'_>) -> Result<T, ErrorBody>,
    ) -> Result<(T, Option<Permit>), ErrorBody> {
        let uri = request.uri().clone();
        let (body, memory) = match self.route.method() {
            route::Method::Get => (Vec::new(), None),
            route::Method::Post => {
                let limit = dispatch::body_limit(self.route);
                read_body(request, &self.daemon.limits, self.peer.uid, limit).await?
            }
        };
        let name = decoded(self.route.name_in(uri.path()).unwrap_or_default())?;
        Ok((read(&Received { name: &name, query: uri.query(), body: &body })?, memory))
    }

    fn requester(&self) -> Requester {
        self.daemon.requester_with(&self.peer, self.rights)
    }

    /// A request uses one policy from its start to its end.
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
        self.daemon.access.get().refusal(&self.peer, right, &what)
    }

    fn lasting(&self) -> Result<Arc<Permit>, ErrorBody> {
        self.daemon.limits.lasting_for(self.peer.uid)
    }
}

fn decoded(part: &str) -> Result<String, ErrorBody> {
    let malformed = || ErrorBody::new(ErrorCode::InvalidRequest, format!("{part:?}: malformed escape"));
    let decoded = percent_decode_str(part).decode_utf8().map_err(|_not_utf8| malformed())?;
    Ok(decoded.into_owned())
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
    use crate::principal::tests::principal;

    #[test]
    fn name_in_a_path_may_have_slashes_and_escapes() {
        for text in ["hf.co/a/b:c", "hf.co%2Fa%2Fb%3Ac"] {
            assert_eq!(decoded(text).unwrap(), "hf.co/a/b:c");
        }
        assert_eq!(decoded("%ff").unwrap_err().code, ErrorCode::InvalidRequest);
        for text in ["", "../../etc/passwd", "a%", "a%zz"] {
            let name = decoded(text).unwrap();
            let received = Received { name: &name, ..Received::default() };
            assert_eq!(Route::Model.subject(&received).expect_err(text).code, ErrorCode::InvalidRequest);
        }
    }

    fn caller() -> (tempfile::TempDir, Caller) {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path().join("store")).unwrap();
        let daemon =
            Arc::new(Daemon::new(store, &RegistryPolicy::default(), Metrics::new([]).unwrap()).unwrap());
        let peer = principal(1, 1, None);
        let rights = daemon.access.get().rights_of(&peer);
        let permit = Connections::new(ConnectionLimits::for_process()).admit(peer.uid, false).unwrap();
        let (stream, _client) = tokio::net::UnixStream::pair().unwrap();
        let socket = ClientSocket::new(stream, peer.uid, Some(permit), &daemon.closer);
        let route = Route::Doctor;
        let record = RequestRecord::start(&daemon, &peer, Some(route), daemon.request_ids.next_id());
        let (turns, memory) = (dispatch::turns(route), dispatch::memory(route));
        (folder, Caller { daemon, route, turns, memory, peer, rights, socket, record })
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
