//! The server on loopback.
//!
//! Every user of the machine can connect to it, so each connection has a limit of time and of memory, and their number
//! is limited.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use blobd_cli_common::connect::client_error;
use blobd_client::error::ClientError;
use blobd_client::loopback::{
    CrossSiteRequest, HEAD_TIMEOUT, LoopbackResponse, LoopbackServer, check_origin, error_response,
    json_response, response,
};
use blobd_client::protocol::error::ErrorResponse;
use blobd_client::protocol::route::Route;
use http_body_util::{BodyExt as _, Limited};
use hyper::body::Bytes;
use hyper::body::Incoming;
use hyper::header::{
    CONTENT_SECURITY_POLICY, HeaderName, HeaderValue, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS,
    X_FRAME_OPTIONS,
};
use hyper::{Method, Request, StatusCode};
use serde::Serialize;
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::access::{Access, Refusal, Secret, check_page};
use super::pulls::Pulls;
use super::routes::{self, Action, Mode, Relay};
use crate::{ErrorBody, ErrorCode, outdated};

/// The longest body is a name with a few parameters.
const MAX_BODY_BYTES: usize = 16 << 10;
/// Questions to the daemon at a time: each has a thread.
const MAX_QUESTIONS: usize = 4;
/// Actions at a time, apart from the questions: a collection may take long.
const MAX_ACTIONS: usize = 4;

/// No inline script or style, nothing from another server, no frame, no form.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

const HEADERS: [(HeaderName, &str); 6] = [
    (CONTENT_SECURITY_POLICY, POLICY),
    (X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (X_FRAME_OPTIONS, "DENY"),
    (REFERRER_POLICY, "no-referrer"),
    (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
];

#[derive(Debug)]
pub(crate) struct WebServer {
    server: LoopbackServer,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    access: Access,
    relay: Relay,
    pulls: Arc<Pulls>,
    mode: Mode,
    questions: Semaphore,
    actions: Semaphore,
}

#[derive(Serialize)]
struct Session<'k> {
    key: &'k str,
}

impl WebServer {
    /// Listens on a port of 127.0.0.1; on any free one for port 0. The page gets its session with `token`.
    pub(crate) async fn bind(port: u16, token: Secret, relay: Relay, mode: Mode) -> io::Result<Self> {
        Self::bind_with(port, token, (relay, mode), HEAD_TIMEOUT).await
    }

    async fn bind_with(
        port: u16,
        token: Secret,
        (relay, mode): (Relay, Mode),
        head_timeout: Duration,
    ) -> io::Result<Self> {
        let address = (Ipv4Addr::LOCALHOST, port).into();
        let server = LoopbackServer::bind(address, head_timeout).await?;
        let shared = Shared {
            access: Access::new(token, Secret::random()?),
            pulls: Pulls::new(relay.client()),
            relay,
            mode,
            questions: Semaphore::new(MAX_QUESTIONS),
            actions: Semaphore::new(MAX_ACTIONS),
        };
        Ok(Self { server, shared: Arc::new(shared) })
    }

    pub(crate) fn address(&self) -> io::Result<SocketAddr> {
        self.server.address()
    }

    pub(crate) fn stop_pulls(&self) {
        self.shared.pulls.stop_all();
    }

    pub(crate) async fn serve(&self) {
        let shared = Arc::clone(&self.shared);
        let respond = move |request| {
            let shared = Arc::clone(&shared);
            async move { with_headers(respond(&shared, request).await) }
        };
        self.server.serve(respond).await;
    }
}

async fn respond(shared: &Arc<Shared>, request: Request<Incoming>) -> LoopbackResponse {
    if let Err(foreign) = check_origin(request.headers()) {
        return refused(Refusal::CrossSiteRequest(foreign));
    }
    let (method, uri) = (request.method().clone(), request.uri().clone());
    match (&method, uri.path()) {
        (&Method::POST, "/session") => redeem(shared, request).await,
        (&Method::POST, path) => match routes::action(&uri) {
            Some(action) => act(shared, action, request).await,
            None => unknown(&method, path),
        },
        (&Method::GET, "/begun") => match shared.access.check_question(request.headers()) {
            Ok(()) => json_response(StatusCode::OK, &shared.pulls.list()),
            Err(refusal) => refused(refusal),
        },
        (&Method::GET, path) => match routes::asset(path) {
            Some(asset) => response(StatusCode::OK, asset.media_type, asset.in_mode(shared.mode).into()),
            None => match (routes::question(&uri), shared.access.check_question(request.headers())) {
                (Some(question), Ok(())) => answer(shared, &shared.questions, question).await,
                (Some(_), Err(refusal)) => refused(refusal),
                (None, _) => unknown(&method, path),
            },
        },
        (method, path) => unknown(method, path),
    }
}

async fn redeem(shared: &Shared, request: Request<Incoming>) -> LoopbackResponse {
    if let Err(refusal) = check_page(request.headers()) {
        return refused(refusal);
    }
    let Some(body) = body(request).await else {
        let message = "session: the token was not received";
        return error_response(ErrorBody::new(ErrorCode::InvalidRequest, message));
    };
    match shared.access.redeem(&body) {
        Ok(key) => json_response(StatusCode::OK, &Session { key: key.as_str() }),
        Err(refusal) => refused(refusal),
    }
}

/// Does what the user of the page has confirmed. The daemon decides whether the user may do it.
async fn act(shared: &Arc<Shared>, action: Action, request: Request<Incoming>) -> LoopbackResponse {
    if let Err(refusal) = shared.access.check_action(request.headers()) {
        return refused(refusal);
    }
    if shared.mode == Mode::ReadOnly {
        let message = format!("{}: this page was started with --read-only", action.verb());
        return error_response(
            ErrorBody::new(ErrorCode::Denied, message).with_hint("start `blobd web` without it"),
        );
    }
    let Some(body) = body(request).await else {
        let message = format!("{}: the parameters were not received", action.verb());
        return error_response(ErrorBody::new(ErrorCode::InvalidRequest, message));
    };
    match action {
        Action::Send(Route::Pull) => told(shared.pulls.begin(&body)),
        Action::StopPull => told(shared.pulls.stop(&body)),
        Action::Compare => compare(shared).await,
        Action::Send(route) => match routes::request(route, body.into()) {
            Ok(request) => answer(shared, &shared.actions, request).await,
            Err(error) => error_response(error),
        },
    }
}

async fn compare(shared: &Arc<Shared>) -> LoopbackResponse {
    let Ok(_permit) = shared.actions.acquire().await else { return ending() };
    let client = shared.relay.client();
    match tokio::task::spawn_blocking(move || outdated::updates(&client)).await {
        Ok(updates) => told(updates.map_err(client_error)),
        Err(panic) => error_response(ErrorBody::new(ErrorCode::Internal, panic)),
    }
}

/// The page gets an answer, so the status is OK also for an error: another one would be an error on the browser's console.
fn told(result: Result<impl Serialize, ErrorBody>) -> LoopbackResponse {
    match result {
        Ok(document) => json_response(StatusCode::OK, &document),
        Err(error) => json_response(StatusCode::OK, &ErrorResponse { error }),
    }
}

fn ending() -> LoopbackResponse {
    error_response(ErrorBody::new(ErrorCode::Internal, "web: the server is ending"))
}

/// The body of a request; `None` if it is too long or does not arrive.
async fn body(request: Request<Incoming>) -> Option<Bytes> {
    let body = Limited::new(request.into_body(), MAX_BODY_BYTES).collect();
    Some(timeout(HEAD_TIMEOUT, body).await.ok()?.ok()?.to_bytes())
}

async fn answer(shared: &Arc<Shared>, turns: &Semaphore, request: routes::Request) -> LoopbackResponse {
    let Ok(_permit) = turns.acquire().await else { return ending() };
    let relay = shared.relay.clone();
    let asked = tokio::task::spawn_blocking(move || relay.ask(&request)).await;
    match asked {
        Ok(Ok(bytes)) => response(StatusCode::OK, "application/json", bytes.into()),
        Ok(Err(ClientError::Daemon(body))) => told(Err::<(), _>(body)),
        Ok(Err(failure)) => told(Err::<(), _>(ErrorBody::new(failure.code(), failure))),
        Err(panic) => error_response(ErrorBody::new(ErrorCode::Internal, panic)),
    }
}

/// A refusal that only a new link can end.
#[derive(Serialize)]
struct Refused {
    refused: bool,
    error: ErrorBody,
}

fn refused(refusal: Refusal) -> LoopbackResponse {
    const AGAIN: &str = "run `blobd web` again, and open the link that it prints";
    let (message, hint) = match refusal {
        Refusal::CrossSiteRequest(CrossSiteRequest::Host) => {
            ("the host of the request is not this machine", "open http://127.0.0.1 with the port")
        }
        Refusal::CrossSiteRequest(CrossSiteRequest::Origin) => ("the request comes from another site", AGAIN),
        Refusal::Token => ("the link has been used already, or is wrong", AGAIN),
        Refusal::Key => ("the request has no valid key of a session", AGAIN),
    };
    let error = ErrorBody::new(ErrorCode::Denied, message).with_hint(hint);
    json_response(StatusCode::FORBIDDEN, &Refused { refused: true, error })
}

fn unknown(method: &Method, path: &str) -> LoopbackResponse {
    // As much of it as fits a line.
    let path: String = path.chars().take(80).collect();
    error_response(ErrorBody::new(ErrorCode::NotFound, format!("{method} {path}: no such request")))
}

/// Adds the headers that protect the page to any response.
fn with_headers(mut response: LoopbackResponse) -> LoopbackResponse {
    for (name, value) in HEADERS {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response
}

#[cfg(test)]
mod tests;
