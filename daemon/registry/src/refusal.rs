//! Turns a refusing response into an error that quotes the server's own sentence.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use hyper::header::{IF_NONE_MATCH, RANGE, RETRY_AFTER};
use hyper::{HeaderMap, StatusCode};

use super::content_encoding;
use super::error::{Advice, RegistryError, Result};
use super::policy::Limits;
use super::request::{Response, Target};
use super::server_reason::{Secrets, ServerReason};

/// How much of a refusal is read. A sentence has about 100 bytes, and a web page around it a few KiB.
const MAX_REFUSAL_BYTES: u64 = 256 << 10;

impl Response {
    /// Turns an HTTP error status into an error.
    pub(super) async fn checked(self, target: &Target<'_>, limits: &Limits) -> Result<Self> {
        match self.response.status() {
            StatusCode::OK => Ok(self),
            StatusCode::PARTIAL_CONTENT if target.headers.contains_key(RANGE) => Ok(self),
            StatusCode::NOT_MODIFIED if target.headers.contains_key(IF_NONE_MATCH) => Ok(self),
            status if target.accepted.contains(&status) => Ok(self),
            _ => Err(self.refused(target, limits).await),
        }
    }

    /// The error for the status of this response to a request for `target`.
    async fn refused(self, target: &Target<'_>, limits: &Limits) -> RegistryError {
        let (host, is_own) = (self.host(), self.is_from(target.origin));
        let advice = if self.is_gated() { target.gated() } else { self.advice.clone() };
        match self.response.status() {
            StatusCode::NOT_FOUND => target.missing(host, self.reason(limits).await),
            // From another host, this status means that a signed URL is invalid, which is unrelated to the user's
            // rights.
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN if is_own => {
                target.denied(host, self.reason(limits).await, advice)
            }
            _ => self.failed(host, is_own, limits).await,
        }
    }

    /// The error for a status that does not depend on the requested model or file. `host` is the server that it names;
    /// `is_own` says whether that is the registry.
    pub(super) async fn failed(self, host: String, is_own: bool, limits: &Limits) -> RegistryError {
        let status = self.response.status().as_u16();
        let is_anonymous = is_own && matches!(self.advice, Advice::LogIn { .. });
        let (is_plain_http, retry_after) = (self.url.scheme() == "http", retry_after(self.headers()));
        let reason = self.reason(limits).await;
        match status {
            429 => RegistryError::TooManyRequests { host, reason, retry_after, is_anonymous },
            _ => RegistryError::Status { host, status, reason, is_plain_http, retry_after },
        }
    }

    /// The server's own sentence, if it arrives in time and may be quoted.
    pub(super) async fn reason(self, limits: &Limits) -> ServerReason {
        if !self.is_quotable {
            return ServerReason::default();
        }
        let secrets = Secrets::new(self.authorization.as_ref(), &self.url);
        let (status, headers) = (self.response.status(), self.headers().clone());
        let body = self.into_body().beginning(MAX_REFUSAL_BYTES, limits.refusal).await;
        // The start of the body is enough, so a truncated body is fine.
        let body = content_encoding::unpacked(body, MAX_REFUSAL_BYTES).content;
        ServerReason::from_response(status, &headers, &body, &secrets)
    }
}

/// When the server accepts requests again: `Retry-After`, in seconds or as a date (RFC 9110, 10.2.3), or else the
/// end of the period in which the number of requests is limited.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let text = |name: &str| Some(headers.get(name)?.to_str().ok()?.trim());
    let until = |date: SystemTime| date.duration_since(SystemTime::now()).ok();
    let asked = text(RETRY_AFTER.as_str()).and_then(|value| {
        let seconds = value.parse().map(Duration::from_secs);
        seconds.ok().or_else(|| until(httpdate::parse_http_date(value).ok()?))
    });
    let period = || {
        let named =
            ["ratelimit-reset", "x-ratelimit-reset"].into_iter().find_map(|name| text(name)?.parse().ok());
        named.or_else(|| text("ratelimit").and_then(period_of))
    };
    // Some servers send a Unix time instead of a number of seconds from now.
    const FIRST_TIME: u64 = 1_000_000_000;
    asked.or_else(|| match period()? {
        time @ FIRST_TIME.. => until(UNIX_EPOCH.checked_add(Duration::from_secs(time))?),
        seconds => Some(Duration::from_secs(seconds)),
    })
}

/// The seconds in `"default";r=0;t=30` or `limit=100, remaining=0, reset=30`, two drafts of the `RateLimit` header.
fn period_of(limit: &str) -> Option<u64> {
    let mut parameters = limit.split([';', ',']).filter_map(|parameter| parameter.trim().split_once('='));
    let (_, seconds) = parameters.find(|(name, _)| matches!(*name, "t" | "reset"))?;
    seconds.parse().ok()
}
