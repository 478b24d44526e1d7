//! One request, with credentials and redirects.
//!
//! [`Shared::follow`] follows redirects. Requests that may need credentials go through [`Shared::get`] (in `auth`).
//! Bodies that are streamed go through `upload`.

use std::time::Duration;

use blobd_store_format::digest::Digest;
use blobd_store_format::reference::Reference;
use bytes::Bytes;
use hyper::body::{Body as _, Incoming};
use hyper::header::{
    AUTHORIZATION, CONTENT_TYPE, DATE, ETAG, HeaderName, HeaderValue, IF_RANGE, LAST_MODIFIED, LOCATION,
    RANGE,
};
use hyper::{HeaderMap, Method, StatusCode};
use url::Url;

use super::Shared;
use super::address_scope::AddressScope;
use super::content_encoding::{self, ContentEncoding, Unpacked};
use super::credentials::RegistryHost;
use super::error::{Advice, RegistryError, Result};
use super::origin::{Origin, Registry, host_of, names_user};
use super::server_reason::{Secrets, ServerReason};
use super::stream::ResponseBody;
use super::token_cache::Authorization;
use super::transport::Request;

/// A request's method, URL, headers and body, and its name in errors.
#[derive(Debug)]
pub(super) struct Target<'a> {
    pub(super) origin: &'a Origin,
    /// The user's name for it: a model, or a file's address without its query.
    pub(super) subject: String,
    /// The digest, if a manifest lists the file.
    pub(super) blob: Option<Digest>,
    /// The repository. A token is valid for all of it, and for no other scopes.
    pub(super) repository: String,
    /// What a token must allow besides what the registry's challenge says.
    pub(super) scopes: Vec<String>,
    pub(super) method: Method,
    pub(super) url: Url,
    pub(super) headers: HeaderMap,
    pub(super) body: Bytes,
    /// The statuses of success besides 200.
    pub(super) accepted: &'static [StatusCode],
    /// The narrowest scope of an address that the URL may lead to.
    pub(super) reach: AddressScope,
}

impl<'a> Target<'a> {
    /// `path` of the repository that `reference` names.
    pub(super) fn new(registry: &'a Registry, reference: &Reference, path: &str) -> Result<Self> {
        let repository = reference.repository();
        let url = registry.url(&format!("{repository}/{path}"))?;
        Ok(Self::at(registry.origin(), format!("model {reference}"), repository, url))
    }

    /// A GET of `url`, without headers. The user named the registry, so its address may have any scope.
    pub(super) fn at(origin: &'a Origin, subject: String, repository: String, url: Url) -> Self {
        let (headers, body) = (HeaderMap::new(), Bytes::new());
        let (scopes, accepted, reach) = (Vec::new(), &[][..], AddressScope::Reserved);
        let (blob, method) = (None, Method::GET);
        Self { origin, subject, blob, repository, scopes, method, url, headers, body, accepted, reach }
    }

    pub(super) fn blob(registry: &'a Registry, reference: &Reference, digest: Digest) -> Result<Self> {
        let target = Self::new(registry, reference, &format!("blobs/{digest}"))?;
        Ok(Self { blob: Some(digest), ..target })
    }

    /// The blob of a repository at a server that has those of several hosts, as mirrors of containerd have.
    pub(super) fn at_peer(peer: &'a Registry, repository: &str, host: &str, digest: Digest) -> Result<Self> {
        let mut url = peer.url(&format!("{repository}/blobs/{digest}"))?;
        url.query_pairs_mut().append_pair("ns", host);
        let target = Self::at(peer.origin(), format!("blob {digest}"), repository.to_owned(), url);
        Ok(Self { blob: Some(digest), ..target })
    }

    /// `address` is the name in messages; one token is valid for all of `repository`.
    pub(super) fn for_file(
        server: &'a Registry,
        address: &str,
        repository: &str,
        path_and_query: &str,
    ) -> Result<Self> {
        let url = server.url_at(path_and_query)?;
        Ok(Self::at(server.origin(), address.to_owned(), repository.to_owned(), url))
    }

    /// Drops the range, to request the whole file.
    pub(super) fn without_range(mut self) -> Self {
        for name in [RANGE, IF_RANGE] {
            self.headers.remove(name);
        }
        self
    }

    pub(super) fn with(mut self, name: HeaderName, value: HeaderValue) -> Self {
        self.headers.insert(name, value);
        self
    }

    pub(super) fn missing(&self, host: String, reason: ServerReason) -> RegistryError {
        match self.blob {
            Some(digest) => RegistryError::BlobMissing { digest, host, reason },
            None => RegistryError::NotFound { subject: self.subject.clone(), host, reason },
        }
    }

    pub(super) fn denied(&self, host: String, reason: ServerReason, advice: Advice) -> RegistryError {
        RegistryError::Denied { subject: self.subject.clone(), host, reason, advice: Box::new(advice) }
    }

    /// Whether errors may quote a response from `url`. `scope` is that of the host's address, if known. Quoting is safe
    /// for the registry, which the user named, and for hosts on the internet, which everybody can reach. The registry
    /// may have redirected to any other host because only this daemon can reach it.
    pub(super) fn may_quote(&self, url: &Url, scope: Option<AddressScope>) -> bool {
        scope == Some(AddressScope::Public) || Origin::from_url(url).as_ref() == Some(self.origin)
    }

    /// The token that is sent, and the advice if it is refused. Only the registry itself gets one.
    pub(super) fn credentials(&self, authorization: Option<Authorization>) -> (Option<HeaderValue>, Advice) {
        let is_own = Origin::from_url(&self.url).as_ref() == Some(self.origin);
        match authorization {
            Some(authorization) => (is_own.then_some(authorization.header), authorization.advice),
            None => (None, Advice::LogIn { host: RegistryHost::from_origin(self.origin).to_string() }),
        }
    }

    pub(super) fn gated(&self) -> Advice {
        let page = format!("https://huggingface.co/{}", self.repository);
        Advice::Gated { page, host: RegistryHost::from_origin(self.origin).to_string() }
    }
}

/// A response, its URL, and the narrowest scope that a redirect from it may lead to.
#[derive(Debug)]
pub(super) struct Response {
    pub(super) response: hyper::Response<Incoming>,
    pub(super) url: Url,
    pub(super) reach: AddressScope,
    /// Whether errors may quote it.
    pub(super) is_quotable: bool,
    /// The advice in the error if this is a refusal.
    pub(super) advice: Advice,
    /// The credentials that this host has received with the request.
    pub(super) authorization: Option<HeaderValue>,
    /// The file's SHA-256, if the server announced it in its redirect.
    pub(super) linked: Option<Digest>,
}

impl Response {
    pub(super) fn host(&self) -> String {
        host_of(&self.url)
    }

    pub(super) fn is_partial(&self) -> bool {
        self.response.status() == StatusCode::PARTIAL_CONTENT
    }

    pub(super) fn headers(&self) -> &HeaderMap {
        self.response.headers()
    }

    /// The error if this is a web page: networks with a login page send one for every request.
    pub(super) fn web_page(&self) -> Option<RegistryError> {
        let kind = self.headers().get(CONTENT_TYPE).map(HeaderValue::as_bytes).unwrap_or_default();
        let is_html = kind.get(..HTML.len()).is_some_and(|start| start.eq_ignore_ascii_case(HTML));
        is_html.then(|| RegistryError::web_page(self.host()))
    }

    /// Identifies this version of the file: a strong `ETag`, or else `Last-Modified`.
    pub(super) fn validator(&self) -> Option<String> {
        let text = |name| self.headers().get(name).and_then(|value| value.to_str().ok());
        let etag = text(ETAG).filter(|etag| !etag.starts_with("W/"));
        let validator = etag.or_else(|| text(LAST_MODIFIED))?;
        (validator.len() <= MAX_VALIDATOR_BYTES).then(|| validator.to_owned())
    }

    /// Whether an equal validator will prove equal bytes. A date does not if the file changed so recently that it may
    /// change again before the clock's next tick (RFC 9110, section 8.8.2.2).
    pub(super) fn is_validator_lasting(&self) -> bool {
        const TICK: Duration = Duration::from_secs(60);
        let Some(validator) = self.validator() else { return false };
        if is_tag(&validator) {
            return true;
        }
        let date =
            self.headers().get(DATE).and_then(|date| httpdate::parse_http_date(date.to_str().ok()?).ok());
        let modified = httpdate::parse_http_date(&validator).ok();
        let age = modified.and_then(|modified| date?.duration_since(modified).ok());
        age.is_some_and(|age| age >= TICK)
    }

    /// Whether the server says that the file is still the version named in the request.
    pub(super) fn is_not_modified(&self) -> bool {
        self.response.status() == StatusCode::NOT_MODIFIED
    }

    /// The length of the body, if the response announces it.
    pub(super) fn announced_bytes(&self) -> Option<u64> {
        self.response.body().size_hint().exact()
    }

    pub(super) fn into_body(self) -> ResponseBody {
        ResponseBody::new(self.host(), self.response.into_body())
    }

    /// The whole body, decompressed, if it has at most `max_bytes` and arrives within `time_limit`.
    pub(super) async fn document(
        self,
        what: &'static str,
        max_bytes: u64,
        time_limit: Duration,
    ) -> Result<Vec<u8>> {
        let (host, encoding) = (self.host(), ContentEncoding::from_headers(self.headers()));
        let (secrets, status) =
            (Secrets::new(self.authorization.as_ref(), &self.url), self.response.status());
        let (is_plain_http, is_quotable) = (self.url.scheme() == "http", self.is_quotable);
        let received = match tokio::time::timeout(time_limit, self.into_body().read(what, max_bytes)).await {
            Ok(document) => document?,
            Err(_elapsed) => return Err(RegistryError::Stalled { host, seconds: time_limit.as_secs() }),
        };
        let Unpacked { content, is_complete } = content_encoding::unpacked(received, max_bytes);
        // All documents are JSON. If one is not, blobd may not support its encoding.
        let is_json = matches!(content.trim_ascii_start().first(), Some(b'{' | b'['));
        if content.len() as u64 > max_bytes {
            Err(RegistryError::TooLong { host, what, max_bytes })
        } else if !is_complete {
            Err(RegistryError::unusable(host, format!("compressed {what} is damaged or cut off")))
        } else if let Some(reason) = ServerReason::in_place_of_document(&content, &secrets) {
            let (status, reason) = (status.as_u16(), reason.only_if(is_quotable));
            Err(RegistryError::Status { host, status, reason, is_plain_http, retry_after: None })
        } else if is_json || encoding.is_none() {
            Ok(content)
        } else {
            Err(RegistryError::unusable(host, format!("{encoding}: expected none, gzip or zstd")))
        }
    }

    /// Whether the registry itself responded, and not the target of a redirect.
    pub(super) fn is_from(&self, registry: &Origin) -> bool {
        Origin::from_url(&self.url).as_ref() == Some(registry)
    }

    pub(super) fn is_gated(&self) -> bool {
        self.headers().get("x-error-code").is_some_and(|code| code.as_bytes() == b"GatedRepo")
    }
}

impl Shared {
    /// Follows redirects and returns the first other response.
    pub(super) async fn follow(
        &self,
        target: &Target<'_>,
        authorization: Option<Authorization>,
    ) -> Result<Response> {
        // A redirect must not lead to a narrower scope than that of any earlier server.
        let mut reach = target.reach;
        let (mut token, advice) = target.credentials(authorization);
        let (mut url, mut linked) = (target.url.clone(), None);
        let refused = |url: &Url, reason: String| {
            RegistryError::unusable(host_of(url), format!("redirect refused: {reason}"))
        };
        for _hop in 0..=MAX_REDIRECTS {
            let mut headers = target.headers.clone();
            headers.extend(token.clone().map(|token| (AUTHORIZATION, token)));
            let request = Request::new(target.method.clone(), &url, headers, target.body.clone());
            let (response, scope) = self.transport.send(request, reach).await?;
            tracing::debug!(host = host_of(&url), status = response.status().as_u16(), "response");
            // Behind a proxy, the address is unknown. Each server of the chain limits the next ones: if a registry in
            // the local network redirects to the internet, that host must not redirect back into the local network.
            reach = reach.min(scope.unwrap_or(AddressScope::Public));
            if !is_redirect(response.status(), &target.method) {
                linked = linked.or_else(|| linked_digest(response.headers()));
                let is_quotable = target.may_quote(&url, scope);
                return Ok(Response {
                    response,
                    url,
                    reach,
                    is_quotable,
                    advice,
                    authorization: token,
                    linked,
                });
            }
            linked = linked.or_else(|| linked_digest(response.headers()));
            let next = redirect_target(&url, response.headers());
            let next = next.map_err(|reason| refused(&url, reason.to_owned()))?;
            if Origin::from_url(&next).as_ref() != Some(target.origin) {
                token = None;
            }
            url = next;
        }
        Err(refused(&url, format!("more than {MAX_REDIRECTS} redirects in a row")))
    }
}

/// Whether a validator is an `ETag` rather than a date.
pub(super) fn is_tag(validator: &str) -> bool {
    validator.starts_with('"')
}

/// The SHA-256 that Hugging Face sends with the redirect to a large file. The `ETag` of a small file, or from the
/// content network, is not a SHA-256.
fn linked_digest(headers: &HeaderMap) -> Option<Digest> {
    Digest::from_hex(headers.get("x-linked-etag")?.to_str().ok()?.trim_matches('"')).ok()
}

/// The most redirects followed in a row. hf.co needs three.
pub(super) const MAX_REDIRECTS: usize = 5;
const HTML: &[u8] = b"text/html";
/// Longer validators are ignored; servers send fewer than 100 bytes.
const MAX_VALIDATOR_BYTES: usize = 256;

/// `Location` is missing or not a URL.
const MALFORMED: &str = "target is not a URL";
const NAMES_USER: &str = "target contains a user name";
/// A redirect from TLS to plain HTTP, which networks with a login page send.
const DOWNGRADE: &str = "it leads from https to http; is this network behind a login page?";

/// 300 and 304 are not redirects for a plain GET. The others than 307 and 308 would turn a request that sends something into
/// a GET.
pub(super) fn is_redirect(status: StatusCode, method: &Method) -> bool {
    let keeps_method = matches!(status.as_u16(), 307 | 308);
    keeps_method || method.is_safe() && matches!(status.as_u16(), 301..=303)
}

/// The target of a `Location`, or the reason why it is refused.
pub(super) fn redirect_target(from: &Url, headers: &HeaderMap) -> Result<Url, &'static str> {
    let location = headers.get(LOCATION).and_then(|value| value.to_str().ok());
    let target = location.and_then(|location| resolve_location(from, location)).ok_or(MALFORMED)?;
    if names_user(&target) {
        return Err(NAMES_USER);
    }
    let is_https = |url| Origin::from_url(url).map(|origin| origin.is_https());
    match (is_https(from), is_https(&target)) {
        (_, None) => Err(MALFORMED),
        (Some(true), Some(false)) => Err(DOWNGRADE),
        _ => Ok(target),
    }
}

pub(super) fn resolve_location(from: &Url, location: &str) -> Option<Url> {
    let mut url = from.join(location).ok()?;
    url.set_fragment(None);
    Some(url)
}

#[cfg(test)]
mod tests {
    use hyper::header::HeaderValue;

    use super::*;

    fn redirect(from: &str, location: &str) -> Result<String, &'static str> {
        let mut headers = HeaderMap::new();
        headers.insert(LOCATION, HeaderValue::from_str(location).unwrap());
        redirect_target(&from.parse().unwrap(), &headers).map(|uri| uri.to_string())
    }

    #[test]
    fn relative_locations_are_resolved() {
        for (location, url) in [
            ("https://cdn.example/x?sig=1#part", "https://cdn.example/x?sig=1"),
            ("HTTPS://cdn.example/x", "https://cdn.example/x"),
            ("//cdn.example/x", "https://cdn.example/x"),
            ("/x?q=a:b", "https://r.example:1/x?q=a:b"),
            ("?__sign=abc", "https://r.example:1/v2/a/blobs?__sign=abc"),
            ("x/y?u=http://z/..", "https://r.example:1/v2/a/x/y?u=http://z/.."),
            ("./x", "https://r.example:1/v2/a/x"),
            ("../x", "https://r.example:1/v2/x"),
            ("../../../../x", "https://r.example:1/x"),
            ("..", "https://r.example:1/v2/"),
            ("", "https://r.example:1/v2/a/blobs?q"),
        ] {
            assert_eq!(redirect("https://r.example:1/v2/a/blobs?q", location), Ok(url.into()), "{location}");
        }
    }

    #[test]
    fn locations_that_are_not_http_urls_are_refused() {
        for location in
            ["file:///etc/passwd", "gopher://x/", "data:x", "javascript:x", "https://", "//", "http://a b/"]
        {
            assert_eq!(redirect("http://r.example/a", location), Err(MALFORMED), "{location}");
        }
        let none = redirect_target(&"http://r.example/".parse().unwrap(), &HeaderMap::new());
        assert_eq!(none, Err(MALFORMED));
    }

    #[test]
    fn tls_is_never_downgraded() {
        assert_eq!(redirect("https://a.example/", "http://a.example/"), Err(DOWNGRADE));
        assert_eq!(redirect("http://a.example/", "https://b.example/"), Ok("https://b.example/".into()));
        assert_eq!(redirect("http://a.example/", "http://b.example/"), Ok("http://b.example/".into()));
    }

    #[test]
    fn user_names_in_a_target_are_refused() {
        let refused = Err(NAMES_USER);
        assert_eq!(redirect("https://a.example/", "https://a.example@b.example/"), refused);
        assert_eq!(redirect("https://a.example/", "//user:password@b.example/"), refused);
    }
}
