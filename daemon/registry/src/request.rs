//! One GET, with credentials and redirects.
//!
//! [`Shared::authorized`] (in `auth`) shows credentials when asked for them, [`Shared::follow`]
//! follows redirects.

use std::time::{Duration, SystemTime};

use blobd_store_format::digest::Digest;
use blobd_store_format::reference::Reference;
use hyper::body::{Body as _, Incoming};
use hyper::header::{
    AUTHORIZATION, CONTENT_ENCODING, CONTENT_TYPE, HeaderName, HeaderValue, RANGE, RETRY_AFTER,
};
use hyper::{HeaderMap, StatusCode};
use url::Url;

use super::Shared;
use super::address_scope::AddressScope;
use super::credentials::RegistryHost;
use super::error::{Advice, RedirectRefusal, RegistryError};
use super::origin::{Origin, Registry, host_of};
use super::redirect;
use super::stream::ResponseBody;
use super::token_cache::Authorization;
use super::transport::Request;

/// What to get, and what to say when it cannot be had.
#[derive(Debug)]
pub(super) struct Target<'a> {
    pub(super) origin: &'a Origin,
    /// What the user has named: a model, or a file's address without its query.
    subject: String,
    /// The file of a manifest that this is, if it is one.
    blob: Option<Digest>,
    /// What a token for this opens.
    pub(super) repository: String,
    url: Url,
    headers: HeaderMap,
}

impl<'a> Target<'a> {
    /// `path` of the repository that `reference` names.
    pub(super) fn new(
        registry: &'a Registry,
        reference: &Reference,
        path: &str,
    ) -> Result<Self, RegistryError> {
        let repository = format!("{}/{}", reference.namespace(), reference.model());
        let url = registry.url(&format!("{repository}/{path}"))?;
        let (origin, subject) = (registry.origin(), format!("model {reference}"));
        Ok(Self { origin, subject, blob: None, repository, url, headers: HeaderMap::new() })
    }

    /// A file that a manifest in that repository names.
    pub(super) fn blob(
        registry: &'a Registry,
        reference: &Reference,
        digest: Digest,
    ) -> Result<Self, RegistryError> {
        let target = Self::new(registry, reference, &format!("blobs/{digest}"))?;
        Ok(Self { blob: Some(digest), ..target })
    }

    /// `path_and_query` of a server that is no registry. `address` is what people know it by,
    /// `repository` what is behind the same lock.
    pub(super) fn of_file(
        server: &'a Registry,
        address: &str,
        repository: &str,
        path_and_query: &str,
    ) -> Result<Self, RegistryError> {
        let url = server.url_at(path_and_query)?;
        let (origin, subject, repository) = (server.origin(), address.to_owned(), repository.to_owned());
        Ok(Self { origin, subject, blob: None, repository, url, headers: HeaderMap::new() })
    }

    /// The same at another place that the server itself has named, if that is on the same server.
    pub(super) fn moved(self, url: Url) -> Option<Self> {
        (Origin::of(&url).as_ref() == Some(self.origin)).then_some(Self { url, ..self })
    }

    /// The same with another header field.
    pub(super) fn with(mut self, name: HeaderName, value: HeaderValue) -> Self {
        self.headers.insert(name, value);
        self
    }

    fn missing(&self, host: String) -> RegistryError {
        match self.blob {
            Some(digest) => RegistryError::BlobMissing { digest, host },
            None => RegistryError::NotFound { subject: self.subject.clone(), host },
        }
    }

    /// `host` refuses; what may help against that.
    pub(super) fn denied(&self, host: String, advice: Advice) -> RegistryError {
        RegistryError::Denied { subject: self.subject.clone(), host, advice: Box::new(advice) }
    }

    /// What may help against a refusal as Hugging Face words it for gated models.
    fn gated(&self) -> Advice {
        let page = format!("https://huggingface.co/{}", self.repository);
        Advice::Gated { page, host: RegistryHost::of(self.origin).to_string() }
    }
}

/// A response, who gave it, and how near the registry is that led there.
#[derive(Debug)]
pub(super) struct Response {
    pub(super) response: hyper::Response<Incoming>,
    pub(super) url: Url,
    pub(super) reach: AddressScope,
    /// What may help if this is a refusal.
    pub(super) advice: Advice,
}

impl Response {
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

    /// What is wrong if this is a web page where a file should be, as networks with a login page
    /// response whatever they are asked.
    pub(super) fn web_page(&self) -> Option<RegistryError> {
        let kind = self.headers().get(CONTENT_TYPE).map(HeaderValue::as_bytes).unwrap_or_default();
        let is_html = kind.get(..HTML.len()).is_some_and(|start| start.eq_ignore_ascii_case(HTML));
        is_html.then(|| RegistryError::WebPage { host: self.host() })
    }

    /// How long the body is, if that is known beforehand.
    pub(super) fn announced_bytes(&self) -> Option<u64> {
        self.response.body().size_hint().exact()
    }

    /// The body, still to be read.
    pub(super) fn into_body(self) -> ResponseBody {
        ResponseBody::new(self.host(), self.response.into_body())
    }

    /// The whole body, if it has at most `max_bytes` and comes within `patience`.
    pub(super) async fn document(
        self,
        what: &'static str,
        max_bytes: u64,
        patience: Duration,
    ) -> Result<Vec<u8>, RegistryError> {
        let host = self.host();
        match tokio::time::timeout(patience, self.into_body().read(what, max_bytes)).await {
            Ok(document) => document,
            Err(_elapsed) => Err(RegistryError::Stalled { host, seconds: patience.as_secs() }),
        }
    }

    /// A response with the thing asked for, or what it says instead.
    fn checked(self, target: &Target<'_>) -> Result<Self, RegistryError> {
        let host = self.host();
        match self.response.status() {
            StatusCode::OK => self.uncompressed(),
            StatusCode::PARTIAL_CONTENT if target.headers.contains_key(RANGE) => self.uncompressed(),
            StatusCode::NOT_FOUND => Err(target.missing(host)),
            // Elsewhere it means that a signed URL is wrong, which is not about the user's rights.
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN if self.is_from(target.origin) => {
                Err(target.denied(host, if self.is_gated() { target.gated() } else { self.advice }))
            }
            status => {
                let (status, retry_after) = (status.as_u16(), retry_after(self.headers()));
                Err(match status {
                    429 => RegistryError::TooManyRequests { host, retry_after },
                    _ => RegistryError::Status { host, status, retry_after },
                })
            }
        }
    }

    /// Whether it is the registry itself that answered, and not whoever it redirected to.
    pub(super) fn is_from(&self, registry: &Origin) -> bool {
        Origin::of(&self.url).as_ref() == Some(registry)
    }

    /// Whether Hugging Face says that the model's terms have to be accepted first.
    pub(super) fn is_gated(&self) -> bool {
        self.headers().get("x-error-code").is_some_and(|code| code.as_bytes() == b"GatedRepo")
    }

    /// The same, unless the body is compressed: nobody asked for that.
    pub(super) fn uncompressed(self) -> Result<Self, RegistryError> {
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
    /// The response that has what `target` names.
    pub(super) async fn get(&self, target: &Target<'_>) -> Result<Response, RegistryError> {
        self.authorized(target).await?.checked(target)
    }

    /// The first response that is no redirect.
    pub(super) async fn follow(
        &self,
        target: &Target<'_>,
        authorization: Option<Authorization>,
    ) -> Result<Response, RegistryError> {
        // The user named the registry, so it may be anywhere; from there on it is the measure.
        let mut reach = AddressScope::Reserved;
        let (mut token, advice) = match authorization {
            Some(authorization) => (Some(authorization.header), authorization.advice),
            None => (None, Advice::LogIn { host: RegistryHost::of(target.origin).to_string() }),
        };
        let mut url = target.url.clone();
        for hop in 0..=RedirectRefusal::MAX_REDIRECTS {
            let mut headers = target.headers.clone();
            headers.extend(token.clone().map(|token| (AUTHORIZATION, token)));
            let (response, scope) = self.transport.send(Request::get(&url, headers), reach).await?;
            tracing::debug!(host = host_of(&url), status = response.status().as_u16(), "response");
            if hop == 0 {
                reach = scope;
            }
            if !redirect::is_redirect(response.status()) {
                return Ok(Response { response, url, reach, advice });
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

const HTML: &[u8] = b"text/html";
/// How long a server asks to be left alone: `Retry-After`, in seconds or as a date (RFC 9110, 10.2.3).
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let value = headers.get(RETRY_AFTER)?.to_str().ok()?.trim();
    let seconds = value.parse().map(Duration::from_secs);
    seconds.ok().or_else(|| httpdate::parse_http_date(value).ok()?.duration_since(SystemTime::now()).ok())
}
