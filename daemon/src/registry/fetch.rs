//! One GET as a registry means it: token, redirects and patience included.
//!
//! Three loops, one inside the other: [`Shared::get`] tries again what may pass,
//! [`Shared::authorized`] gets a token when asked for one, [`Shared::follow`] follows redirects.

use std::time::Duration;

use blobd_store_format::digest::Digest;
use blobd_store_format::reference::Reference;
use bytes::Bytes;
use http_body_util::Empty;
use hyper::body::Incoming;
use hyper::header::{ACCEPT, AUTHORIZATION, CONTENT_ENCODING, HeaderValue, RANGE, RETRY_AFTER, USER_AGENT};
use hyper::{HeaderMap, Request, Response, StatusCode, Uri};

use super::auth::{self, Challenge};
use super::error::{RealmRefusal, RedirectRefusal, RegistryError};
use super::origin::{Origin, Registry, host_of};
use super::redirect;
use super::stream::read_document;
use super::zone::Zone;
use super::{Limits, Shared};

/// The most redirects followed in a row. hf.co needs three.
pub(super) const MAX_REDIRECTS: usize = 5;

/// What to get, and what to say when it cannot be had.
#[derive(Debug)]
pub(super) struct Target<'a> {
    origin: &'a Origin,
    reference: &'a Reference,
    repository: String,
    url: Uri,
    what: What,
    accept: Option<HeaderValue>,
    range: Option<HeaderValue>,
}

/// The two kinds of thing that are got.
#[derive(Clone, Copy, Debug)]
pub(super) enum What {
    /// The manifest of a reference.
    Manifest,
    /// One of its files.
    Blob(Digest),
}

impl<'a> Target<'a> {
    /// `path` of the repository that `reference` names.
    pub(super) fn new(
        registry: &'a Registry,
        reference: &'a Reference,
        path: &str,
        what: What,
        accept: Option<HeaderValue>,
    ) -> Result<Self, RegistryError> {
        let repository = format!("{}/{}", reference.namespace(), reference.model());
        let url = registry.url(&format!("{repository}/{path}"))?;
        Ok(Self { origin: registry.origin(), reference, repository, url, what, accept, range: None })
    }

    /// Only these bytes of it, if the server can.
    pub(super) fn with_range(mut self, range: HeaderValue) -> Self {
        self.range = Some(range);
        self
    }

    fn missing(&self, host: String) -> RegistryError {
        match self.what {
            What::Manifest => RegistryError::NotFound { reference: Box::new(self.reference.clone()), host },
            What::Blob(digest) => RegistryError::BlobMissing { digest, host },
        }
    }

    fn denied(&self, host: String) -> RegistryError {
        RegistryError::Denied { reference: Box::new(self.reference.clone()), host }
    }
}

/// An answer, who gave it, and how near the registry is that led there.
#[derive(Debug)]
pub(super) struct Answer {
    response: Response<Incoming>,
    url: Uri,
    reach: Zone,
}

impl Answer {
    /// Who answered.
    pub(super) fn host(&self) -> String {
        host_of(&self.url)
    }

    /// Whether this is a part of what was asked for.
    pub(super) fn is_partial(&self) -> bool {
        self.response.status() == StatusCode::PARTIAL_CONTENT
    }

    /// The head's fields.
    pub(super) fn headers(&self) -> &HeaderMap {
        self.response.headers()
    }

    /// The body, still to be read.
    pub(super) fn into_body(self) -> Incoming {
        self.response.into_body()
    }

    /// The whole body, if it has at most `max_bytes` and comes within `patience`.
    pub(super) async fn document(
        self,
        what: &'static str,
        max_bytes: u64,
        patience: Duration,
    ) -> Result<Vec<u8>, RegistryError> {
        let host = self.host();
        match tokio::time::timeout(patience, read_document(&host, self.into_body(), what, max_bytes)).await {
            Ok(document) => document,
            Err(_elapsed) => Err(RegistryError::Stalled { host, seconds: patience.as_secs() }),
        }
    }

    /// An answer with the thing asked for, or what it says instead.
    fn checked(self, target: &Target<'_>) -> Result<Self, RegistryError> {
        let host = self.host();
        let at_registry = Origin::of(&self.url).as_ref() == Some(target.origin);
        match self.response.status() {
            StatusCode::OK => self.uncompressed(),
            StatusCode::PARTIAL_CONTENT if target.range.is_some() => self.uncompressed(),
            StatusCode::NOT_FOUND => Err(target.missing(host)),
            // Elsewhere it means that a signed URL is wrong, which is not about the user's rights.
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN if at_registry => Err(target.denied(host)),
            StatusCode::TOO_MANY_REQUESTS => Err(RegistryError::TooManyRequests { host }),
            status => Err(RegistryError::Status { host, status: status.as_u16() }),
        }
    }

    fn uncompressed(self) -> Result<Self, RegistryError> {
        let is_identity = |value: &&HeaderValue| value.as_bytes().eq_ignore_ascii_case(b"identity");
        match self.headers().get_all(CONTENT_ENCODING).iter().find(|value| !is_identity(value)) {
            None => Ok(self),
            Some(value) => {
                let found = String::from_utf8_lossy(value.as_bytes()).chars().take(40).collect();
                Err(RegistryError::Encoding { host: self.host(), found })
            }
        }
    }
}

impl Shared {
    /// The answer that has what `target` names. Refusals that may pass are tried again, until the
    /// body has begun.
    pub(super) async fn get(&self, target: &Target<'_>) -> Result<Answer, RegistryError> {
        let mut backoff = self.limits.backoff;
        for _ in 1..TRIES {
            let answer = self.authorized(target).await?;
            if !may_pass(answer.response.status()) {
                return answer.checked(target);
            }
            let wait = wait_before_retry(answer.headers(), backoff, &self.limits);
            tracing::debug!(host = answer.host(), status = answer.response.status().as_u16(), ?wait, "retry");
            tokio::time::sleep(wait).await;
            backoff *= 2;
        }
        self.authorized(target).await?.checked(target)
    }

    /// The answer to a request with a token, if the registry wants one that anybody can have.
    async fn authorized(&self, target: &Target<'_>) -> Result<Answer, RegistryError> {
        let token = self.tokens.get(target.origin, &target.repository);
        let answer = self.follow(target, token).await?;
        let at_registry = Origin::of(&answer.url).as_ref() == Some(target.origin);
        if answer.response.status() != StatusCode::UNAUTHORIZED || !at_registry {
            return Ok(answer);
        }
        match Challenge::of(answer.headers()) {
            None => Ok(answer),
            Some(challenge) => {
                let token = self.token(target, &challenge, answer.reach).await?;
                self.tokens.insert(target.origin, &target.repository, token.clone());
                self.follow(target, Some(token)).await
            }
        }
    }

    /// Asks the token service once, without credentials and without following it elsewhere.
    async fn token(
        &self,
        target: &Target<'_>,
        challenge: &Challenge,
        reach: Zone,
    ) -> Result<HeaderValue, RegistryError> {
        let refused = |reason| RegistryError::Realm { host: target.origin.host().to_owned(), reason };
        let url = challenge.token_url(target.origin).map_err(refused)?;
        let response = self.transport.send(request(&url), reach).await?;
        let answer = Answer { response, url, reach };
        let status = answer.response.status();
        let no_token = || refused(RealmRefusal::NoToken { status: status.as_u16() });
        match status {
            StatusCode::OK => {}
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => return Err(target.denied(answer.host())),
            _ => return Err(no_token()),
        }
        let document =
            answer.uncompressed()?.document("token", MAX_TOKEN_BYTES, self.limits.document).await?;
        auth::bearer_header(&document).ok_or_else(no_token)
    }

    /// The first answer that is no redirect.
    async fn follow(&self, target: &Target<'_>, token: Option<HeaderValue>) -> Result<Answer, RegistryError> {
        // The user named the registry, so it may be anywhere; from there on it is the measure.
        let mut reach = Zone::Reserved;
        let mut token = token;
        let mut url = target.url.clone();
        for hop in 0..=MAX_REDIRECTS {
            let mut request = request(&url);
            for (name, value) in [(ACCEPT, &target.accept), (AUTHORIZATION, &token), (RANGE, &target.range)] {
                if let Some(value) = value {
                    request.headers_mut().insert(name, value.clone());
                }
            }
            let response = self.transport.send(request, reach).await?;
            tracing::debug!(host = host_of(&url), status = response.status().as_u16(), "answer");
            if hop == 0 {
                reach = self.transport.zone(&url, &response);
            }
            if !redirect::is_redirect(response.status()) {
                return Ok(Answer { response, url, reach });
            }
            let refused = |reason| RegistryError::Redirect { host: host_of(&url), reason };
            let next = redirect::target(&url, response.headers()).map_err(refused)?;
            if Origin::of(&next).as_ref() != Some(target.origin) {
                token = None;
            }
            url = next;
        }
        Err(RegistryError::Redirect { host: host_of(&url), reason: RedirectRefusal::TooMany })
    }
}

/// How often a request is sent before its failure is final.
const TRIES: u32 = 3;
/// Tokens are signed statements of some KiB.
const MAX_TOKEN_BYTES: u64 = 64 << 10;
/// Says who asks, as registries' operators want to know.
const AGENT: &str = concat!("blobd/", env!("CARGO_PKG_VERSION"));

fn request(url: &Uri) -> Request<Empty<Bytes>> {
    let mut request = Request::new(Empty::new());
    *request.uri_mut() = url.clone();
    request.headers_mut().insert(USER_AGENT, HeaderValue::from_static(AGENT));
    request
}

/// Refusals that say nothing about what was asked for.
fn may_pass(status: StatusCode) -> bool {
    matches!(status.as_u16(), 429 | 500 | 502 | 503 | 504)
}

/// `Retry-After` in seconds if it is longer than `backoff`, but never longer than the limit.
fn wait_before_retry(headers: &HeaderMap, backoff: Duration, limits: &Limits) -> Duration {
    let asked = headers.get(RETRY_AFTER).and_then(|value| value.to_str().ok()?.trim().parse().ok());
    asked.map_or(backoff, Duration::from_secs).max(backoff).min(limits.longest_wait)
}
