//! Models for other machines, over HTTP on a TCP port: off by default, and read only. What is shown is configured
//! ([`crate::offer`]), and has nothing to do with the rights on the socket.
//!
//! It has threads of its own, with a lower priority than the daemon's: many clients that read do not delay the socket.

// A request takes a thread only with its turn, see `clippy.toml`.
#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

mod access_log;
mod answer;
mod body;
mod hub;
mod oci;
mod pull_through;
mod range;
mod source;

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::thread::available_parallelism;
use std::time::Duration;

use blobd_client::listener::{HttpListener, ListenerLimits};
use blobd_client::loopback::check_origin_of;
use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use hyper::body::Incoming;
use hyper::header::{ALLOW, AUTHORIZATION, HeaderValue, RANGE, SERVER};
use hyper::http::request::Parts;
use hyper::{Method, Request, Response, StatusCode};
use percent_encoding::percent_decode_str;
use serde_json::json;
use tokio::runtime::{Builder, Runtime};

use self::access_log::AccessRecord;
use self::answer::{Answer, AnswerContent, Answered};
use self::body::{AnswerBody, Content, FileContent};
use self::pull_through::PullThrough;
use crate::config::Config;
use crate::long_work::NICENESS;
use crate::monitoring::cannot_listen;
use crate::offer::Offer;
use crate::ops::View;
use crate::state::Daemon;
use crate::tls::secured;

/// Clients keep connections for the next file of a model.
const HEAD_TIMEOUT: Duration = Duration::from_secs(60);
const HEAD_BYTES: usize = 16 << 10;
/// A client that takes nothing for so long has gone, or waits for a disk that has failed.
const STALL_TIMEOUT: Duration = Duration::from_secs(60);

/// The server, until it is dropped.
#[derive(Debug)]
pub(crate) struct Network(Option<Runtime>);

impl Drop for Network {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

#[derive(Clone, Debug)]
struct Server {
    daemon: Arc<Daemon>,
    /// Whether only this machine can connect.
    is_local: bool,
    through: Arc<PullThrough>,
}

impl Network {
    /// Listens if the configuration says so.
    pub(crate) async fn start(daemon: &Arc<Daemon>, config: &Config) -> Result<Self, ErrorBody> {
        let Some(address) = config.serve.listen else { return Ok(Self(None)) };
        let internal = |error: io::Error| ErrorBody::new(ErrorCode::Internal, error);
        let workers = available_parallelism().map_or(1, |cores| cores.get() / 4).clamp(1, 4);
        let runtime = Builder::new_multi_thread()
            .worker_threads(workers)
            .thread_name("network")
            .on_thread_start(|| {
                // If this fails, the work takes processors from others, but it is done.
                let _ = rustix::process::nice(NICENESS);
            })
            .enable_all()
            .build()
            .map_err(internal)?;
        let limits = ListenerLimits {
            head_timeout: HEAD_TIMEOUT,
            head_bytes: HEAD_BYTES,
            connections: config.serve.max_connections,
            connections_per_client: config.serve.max_connections_per_client,
            stall_timeout: STALL_TIMEOUT,
            age: None,
        };
        // The runtime that waits for a connection must be the one that has made the socket.
        let bound = runtime.spawn(HttpListener::bind(address, limits)).await;
        let listener = bound
            .map_err(|panic| internal(panic.into()))?
            .map_err(|error| cannot_listen("serve.listen", address, &error))?;
        let address = listener.address().map_err(internal)?;
        let (is_local, through) = (address.ip().is_loopback(), Arc::new(PullThrough::new(daemon)));
        let server = Server { daemon: Arc::clone(daemon), is_local, through };
        server.announce(address);
        runtime.spawn(async move { server.serve(&listener).await });
        Ok(Self(Some(runtime)))
    }
}

impl Server {
    fn announce(&self, address: SocketAddr) {
        let offer = self.daemon.offer.get();
        tracing::info!("models for other machines on {}://{address}/", scheme(&offer));
        if !self.is_local && offer.tokens.is_none() {
            tracing::warn!("serve.listen: everybody who can reach {address} can read models without a token");
        }
        if self.daemon.policy_for_others(&offer.reader).is_none() {
            tracing::warn!(
                "serve: nothing is shown: access.read does not include everybody; set serve.user to a user who may read"
            );
        }
    }

    async fn serve(&self, listener: &HttpListener) {
        let daemon = Arc::clone(&self.daemon);
        // The certificate of a connection is that of the configuration when it begins.
        let secured = move |stream| secured(stream, daemon.offer.get().tls.clone());
        let server = self.clone();
        let respond = move |request: Request<Incoming>, client| {
            let server = server.clone();
            async move { server.respond(request, client).await }
        };
        listener.serve(secured, respond).await;
    }

    async fn respond(&self, request: Request<Incoming>, client: IpAddr) -> Response<AnswerBody> {
        let (mut request, body) = request.into_parts();
        let mut record = AccessRecord::new(&self.daemon, client, &request);
        let answer = match self.admitted(&request, &mut record) {
            Ok(view) => match received(&mut request, body).await {
                Ok(()) => self.answered(view, &request, &record).await,
                Err(refusal) => refusal,
            },
            Err(refusal) => *refusal,
        };
        self.response(answer.for_method(&request.method), record)
    }

    /// What the client may see, after the checks that do not read the store.
    fn admitted(&self, request: &Parts, record: &mut AccessRecord) -> Result<View, Box<Answer>> {
        let offer = self.daemon.offer.get();
        let refused = |status, code, message: &str| Err(Box::new(oci::refusal(status, code, message)));
        let is_own = |name: &str| offer.is_own_host(name, self.is_local);
        if check_origin_of(&request.headers, scheme(&offer), is_own).is_err() {
            let message = "the name in the request is not one of this machine; serve.hosts lists its names";
            return refused(StatusCode::FORBIDDEN, "DENIED", message);
        }
        let has_body = offer.hub && has_body(request);
        if !matches!(request.method, Method::GET | Method::HEAD) && !has_body {
            let message = "models can only be read here; `blobd pull` and `blobd import` add them";
            let answer = oci::refusal(StatusCode::METHOD_NOT_ALLOWED, "UNSUPPORTED", message);
            return Err(Box::new(answer.with(ALLOW, "GET, HEAD")));
        }
        if !is_authorized(&offer, request, record) {
            let message = "a name and its token are required";
            return refused(StatusCode::UNAUTHORIZED, "UNAUTHORIZED", message);
        }
        match self.daemon.policy_for_others(&offer.reader) {
            Some(policy) => Ok(View { offer, policy }),
            None => refused(StatusCode::FORBIDDEN, "DENIED", "no model is shown to other machines"),
        }
    }

    async fn answered(&self, view: View, request: &Parts, record: &AccessRecord) -> Answer {
        let Ok(path) = percent_decode_str(request.uri.path()).decode_utf8() else {
            return oci::refusal(StatusCode::BAD_REQUEST, "NAME_INVALID", "the path is not UTF-8");
        };
        let client = record.client_number();
        let stored = self.stored(view.clone(), request, &path, client).await;
        let answered = self.through.complete(self, &view, (request, &path, client), stored).await;
        answered.unwrap_or_else(|error| {
            record.note_failure(&error);
            let message = "the model cannot be read; the log of the server says why";
            oci::refusal(StatusCode::INTERNAL_SERVER_ERROR, "UNKNOWN", message)
        })
    }

    /// The answer from what is stored. `path` is decoded.
    async fn stored(&self, view: View, request: &Parts, path: &str, client: u32) -> Answered {
        let (path, mut parts) = (path.to_owned(), request.clone());
        if self.through.is_doubted(&path) {
            parts.headers.remove(RANGE);
        }
        let turn = self.daemon.work.served_reads.acquire(client).await.into();
        let answered = self.daemon.blocking(turn, move |daemon| Ok(route(daemon, &view, &parts, &path)));
        answered.await.unwrap_or_else(Err)
    }

    fn response(&self, answer: Answer, mut record: AccessRecord) -> Response<AnswerBody> {
        let Answer { status, headers, content } = answer;
        record.set_status(status);
        let content = match content {
            AnswerContent::Nothing => Content::Document(bytes::Bytes::new()),
            AnswerContent::Document(bytes) => Content::Document(bytes),
            AnswerContent::Part(file, part) => {
                Content::File(FileContent::new(&self.daemon, file, part, record.client_number()))
            }
        };
        let mut response = Response::new(AnswerBody::new(content, record));
        *response.status_mut() = status;
        *response.headers_mut() = headers;
        response.headers_mut().insert(SERVER, HeaderValue::from_static("blobd"));
        response
    }
}

/// Whether it is the one request that reads something and has a body.
fn has_body(request: &Parts) -> bool {
    request.method == Method::POST && hub::has_paths(request.uri.path())
}

async fn received(request: &mut Parts, body: Incoming) -> Result<(), Answer> {
    if !has_body(request) {
        return Ok(());
    }
    let refused = |message: String| Answer::json(StatusCode::BAD_REQUEST, &json!({ "error": message }));
    hub::receive_paths(request, body).await.map_err(refused)
}

fn scheme(offer: &Offer) -> &'static str {
    if offer.tls.is_some() { "https" } else { "http" }
}

fn is_authorized(offer: &Offer, request: &Parts, record: &mut AccessRecord) -> bool {
    let Some(tokens) = &offer.tokens else { return true };
    let given = request.headers.get(AUTHORIZATION).and_then(|value| value.to_str().ok());
    let Some(owner) = given.and_then(|given| tokens.owner(given)) else { return false };
    record.set_user(owner);
    true
}

fn route(daemon: &Daemon, view: &View, request: &Parts, path: &str) -> Answered {
    if path == "/v2" || path.starts_with(oci::PREFIX) {
        return oci::answer(daemon, view, request, path);
    }
    let of_hub = if view.offer.hub { hub::answer(daemon, view, request, path) } else { None };
    let message = "expected a path below /v2/, or one of the hub's API if serve.hub is true\n";
    of_hub.unwrap_or_else(|| Ok(Answer::new(StatusCode::NOT_FOUND, "text/plain", message)))
}
