//! The log of requests of other machines: one line for each, when its answer has been sent or its client has gone. They
//! are counted in the metrics, too.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use hyper::header::RANGE;
use hyper::http::request::Parts;
use hyper::{Method, StatusCode};

use crate::ops::OpError;
use crate::state::Daemon;

/// The most characters of a path in the log. Names of models are shorter.
const MAX_LOGGED: usize = 400;

/// A request, until its answer has been sent.
pub(super) struct AccessRecord {
    daemon: Arc<Daemon>,
    client: IpAddr,
    user: Option<String>,
    method: Method,
    target: String,
    status: StatusCode,
    sent: u64,
    began: Instant,
    /// Parts of files are thousands of requests for a model.
    is_detail: bool,
}

impl AccessRecord {
    pub(super) fn new(daemon: &Arc<Daemon>, client: IpAddr, request: &Parts) -> Self {
        Self {
            daemon: Arc::clone(daemon),
            client,
            user: None,
            method: request.method.clone(),
            target: request.uri.to_string().chars().take(MAX_LOGGED).collect(),
            status: StatusCode::OK,
            sent: 0,
            began: Instant::now(),
            is_detail: request.headers.contains_key(RANGE) || request.method == Method::HEAD,
        }
    }

    /// The number of the client in pools that users share otherwise.
    pub(super) fn client_number(&self) -> u32 {
        match self.client {
            IpAddr::V4(address) => address.to_bits(),
            IpAddr::V6(address) => address
                .segments()
                .into_iter()
                .fold(0, |number: u32, segment| number.rotate_left(16) ^ u32::from(segment)),
        }
    }

    pub(super) fn set_user(&mut self, user: &str) {
        self.user = Some(user.to_owned());
    }

    pub(super) const fn set_status(&mut self, status: StatusCode) {
        self.status = status;
    }

    pub(super) fn add_sent(&mut self, bytes: u64) {
        self.sent = self.sent.saturating_add(bytes);
        self.daemon.metrics.events.served.sent(bytes);
    }

    /// Clients are not told: the error may name files of this machine.
    pub(super) fn note_failure(&self, error: &OpError) {
        tracing::warn!("serve: {} {:?}: {error}", self.method, self.target);
    }
}

impl Drop for AccessRecord {
    fn drop(&mut self) {
        let Self { daemon, client, user, method, target, status, sent, began, is_detail } = self;
        daemon.metrics.events.served.answered(*status);
        let (status, milliseconds) = (status.as_u16(), began.elapsed().as_millis());
        let user = user.as_ref().map_or_else(String::new, |user| format!(" ({user:?})"));
        // Refusals of clients are not more urgent than their successes.
        match *is_detail {
            true => tracing::debug!(
                "serve: {client}{user}: {method} {target:?}: {status}, {sent} bytes, {milliseconds} ms"
            ),
            false => tracing::info!(
                "serve: {client}{user}: {method} {target:?}: {status}, {sent} bytes, {milliseconds} ms"
            ),
        }
    }
}
