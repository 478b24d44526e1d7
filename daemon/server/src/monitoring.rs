//! Metrics and health of the daemon, as `Route::Metrics` and `Route::Health` on the socket, and here on a loopback port,
//! for programs that cannot use the socket. Every user of the machine can read them there.

// A request takes a thread only with its user's turn, see `clippy.toml`.
#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

mod health;
mod scrape;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use blobd_client::loopback::{
    HEAD_TIMEOUT, LoopbackResponse, LoopbackServer, check_origin, error_response, json_response, response,
};
use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use blobd_client::protocol::upkeep::HealthStatus;
use hyper::body::Incoming;
use hyper::{Method, Request, StatusCode};
use tokio::sync::Semaphore;

pub(crate) use health::health;
pub(crate) use scrape::scrape;

use crate::state::Daemon;

/// The content type of Prometheus's text format.
pub(crate) const TEXT_FORMAT: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Responses that are made at a time; each has a thread.
const MAX_RESPONSES: usize = 2;

/// A server that listens.
#[derive(Debug)]
pub(crate) struct MetricsServer(LoopbackServer);

impl MetricsServer {
    pub(crate) async fn bind(address: SocketAddr) -> Result<Self, ErrorBody> {
        let server = LoopbackServer::bind(address, HEAD_TIMEOUT).await;
        server.map(Self).map_err(|error| cannot_listen("metrics.listen", address, &error))
    }

    pub(crate) fn address(&self) -> io::Result<SocketAddr> {
        self.0.address()
    }

    /// Serves until the future is dropped.
    pub(crate) async fn serve(&self, daemon: &Arc<Daemon>) {
        let (daemon, turns) = (Arc::clone(daemon), Arc::new(Semaphore::new(MAX_RESPONSES)));
        let respond = move |request: Request<Incoming>| {
            let (daemon, turns) = (Arc::clone(&daemon), Arc::clone(&turns));
            async move {
                let _turn = turns.acquire().await;
                respond(&daemon, &request).await
            }
        };
        self.0.serve(respond).await;
    }
}

/// The error of a port of the configuration; `key` is its key.
pub(crate) fn cannot_listen(key: &str, address: SocketAddr, error: &io::Error) -> ErrorBody {
    let (code, hint) = match error.kind() {
        io::ErrorKind::AddrInUse => {
            (ErrorCode::Busy, "this port is in use by another program; choose another one".to_owned())
        }
        io::ErrorKind::PermissionDenied => {
            (ErrorCode::Denied, "ports below 1024 are for root; choose another one".to_owned())
        }
        io::ErrorKind::AddrNotAvailable => {
            (ErrorCode::InvalidRequest, "choose an address of this machine, or 0.0.0.0 for all".to_owned())
        }
        _ => (ErrorCode::Internal, format!("choose another address, or leave out {key}")),
    };
    ErrorBody::new(code, format!("{key}: cannot listen on {address}: {error}")).with_hint(hint)
}

async fn respond(daemon: &Arc<Daemon>, request: &Request<Incoming>) -> LoopbackResponse {
    if check_origin(request.headers()).is_err() {
        let message = "the request is not for this machine, or comes from a page of another site";
        return error_response(
            ErrorBody::new(ErrorCode::Denied, message).with_hint("use the address of metrics.listen"),
        );
    }
    match (request.method(), request.uri().path()) {
        (&Method::GET, "/metrics") => {
            match scrape(daemon, daemon.work.scrapes.acquire(own_uid()).await.into()).await {
                Ok(text) => response(StatusCode::OK, TEXT_FORMAT, text.into()),
                Err(body) => error_response(body),
            }
        }
        (&Method::GET, "/health") => {
            let health = health(daemon, own_uid()).await;
            let status = match health.status {
                HealthStatus::Failing => StatusCode::SERVICE_UNAVAILABLE,
                HealthStatus::Ok | HealthStatus::Degraded => StatusCode::OK,
            };
            json_response(status, &health)
        }
        _ => {
            let message = "request: not known on this port: expected GET /metrics or GET /health";
            error_response(ErrorBody::new(ErrorCode::NotFound, message))
        }
    }
}

/// All clients of the port count as the daemon's own user: TCP does not tell who they are.
fn own_uid() -> u32 {
    rustix::process::geteuid().as_raw()
}
