//! HTTP on a port of loopback: limits of connections, heads and time, and the check that a request is meant for this
//! machine. The page of `blobd web` and the metrics use it.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::header::{CACHE_CONTROL, CONTENT_TYPE, HOST, HeaderMap, HeaderValue, ORIGIN};
use hyper::{Request, Response, StatusCode};
use serde::Serialize;

use crate::listener::{HttpListener, ListenerLimits};
use crate::protocol::error::{ErrorBody, ErrorResponse};

/// How long a client may take to send the head of a request, or to begin the next one.
pub const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// The smallest limit that hyper accepts. A browser's head has less than one kilobyte.
pub const MAX_HEAD_BYTES: usize = 8 << 10;
/// A browser opens six connections to a server, and perhaps a few windows.
pub const MAX_CONNECTIONS: usize = 64;
/// After this, a connection takes no further request; its client opens another one.
const CONNECTION_AGE: Duration = Duration::from_secs(120);
/// How long a connection of that age may take to receive what it has requested.
const LAST_RESPONSE: Duration = Duration::from_secs(120);

/// A response whose body is in memory.
pub type LoopbackResponse = Response<Full<Bytes>>;

/// A response of this type, which no cache may keep.
#[must_use]
pub fn response(status: StatusCode, media_type: &'static str, content: Bytes) -> LoopbackResponse {
    let mut response = Response::new(Full::new(content));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(media_type));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

/// A response with a JSON document.
#[must_use]
pub fn json_response(status: StatusCode, value: &impl Serialize) -> LoopbackResponse {
    // Strings can always be serialised.
    response(status, "application/json", serde_json::to_vec(value).unwrap_or_default().into())
}

/// The response to a request that failed.
#[must_use]
pub fn error_response(error: ErrorBody) -> LoopbackResponse {
    let status = StatusCode::from_u16(error.code.http_status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    json_response(status, &ErrorResponse { error })
}

/// A server that listens.
#[derive(Debug)]
pub struct LoopbackServer(HttpListener);

impl LoopbackServer {
    /// Listens on an address of loopback; on any free port for port 0.
    pub async fn bind(address: SocketAddr, head_timeout: Duration) -> io::Result<Self> {
        let limits = ListenerLimits {
            head_timeout,
            head_bytes: MAX_HEAD_BYTES,
            connections: MAX_CONNECTIONS,
            connections_per_client: MAX_CONNECTIONS,
            stall_timeout: CONNECTION_AGE,
            age: Some((CONNECTION_AGE, LAST_RESPONSE)),
        };
        HttpListener::bind(address, limits).await.map(Self)
    }

    /// The address on which it listens.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.0.address()
    }

    /// Serves until the future is dropped. Connections that have begun go on.
    pub async fn serve<F>(&self, respond: impl Fn(Request<Incoming>) -> F + Clone + Send + Sync + 'static)
    where
        F: Future<Output = LoopbackResponse> + Send,
    {
        let secured = |stream| async { Some(stream) };
        self.0.serve(secured, move |request, _client| respond(request)).await;
    }
}

/// A request that a page of another site may have sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CrossSiteRequest {
    /// The `Host` is not a name of this machine: a page of another site may use this address.
    Host,
    /// A page of another origin has sent it.
    Origin,
}

/// Checks the `Host`, and the `Origin` if there is one. A site whose name is changed to the address 127.0.0.1 (DNS
/// rebinding) still sends its own name in both.
///
/// # Errors
/// The header that shows that another site may have sent the request.
pub fn check_origin(headers: &HeaderMap) -> Result<(), CrossSiteRequest> {
    check_origin_of(headers, "http", is_loopback)
}

/// As [`check_origin`], for a server that is reached by this scheme and by names for which `is_own` is true. It gets the
/// name without the port, because a tunnel may have another port than the server.
///
/// # Errors
/// As [`check_origin`].
pub fn check_origin_of(
    headers: &HeaderMap,
    scheme: &str,
    is_own: impl Fn(&str) -> bool,
) -> Result<(), CrossSiteRequest> {
    let mut hosts = headers.get_all(HOST).iter();
    let (Some(host), None) = (hosts.next(), hosts.next()) else { return Err(CrossSiteRequest::Host) };
    let host = host.to_str().map_err(|_not_ascii| CrossSiteRequest::Host)?;
    if !is_own(without_port(host)) {
        return Err(CrossSiteRequest::Host);
    }
    let expected = format!("{scheme}://{host}");
    match headers.get_all(ORIGIN).iter().all(|origin| origin.as_bytes() == expected.as_bytes()) {
        true => Ok(()),
        false => Err(CrossSiteRequest::Origin),
    }
}

fn without_port(host: &str) -> &str {
    match host.rsplit_once(':') {
        Some((name, port)) if !port.is_empty() && port.bytes().all(|digit| digit.is_ascii_digit()) => name,
        _ => host,
    }
}

/// Whether a host's name is this machine: `localhost` or an address of loopback.
pub fn is_loopback(name: &str) -> bool {
    name.eq_ignore_ascii_case("localhost") || address_of(name).is_some_and(|address| address.is_loopback())
}

/// The address that a `Host` has instead of a name; those of IPv6 are in brackets.
pub fn address_of(name: &str) -> Option<IpAddr> {
    let address = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name);
    address.parse().ok()
}

#[cfg(test)]
mod tests {
    use hyper::header::{HeaderName, HeaderValue};

    use super::*;

    fn headers(list: &[(HeaderName, &str)]) -> HeaderMap {
        let pairs = list.iter().map(|(name, value)| (name.clone(), HeaderValue::from_str(value).unwrap()));
        pairs.collect()
    }

    #[test]
    fn only_names_of_this_machine_are_hosts() {
        for host in ["127.0.0.1:8080", "localhost:1", "LOCALHOST", "[::1]:80", "127.1.2.3", "localhost:65535"]
        {
            assert_eq!(check_origin(&headers(&[(HOST, host)])), Ok(()), "{host}");
        }
        for host in [
            "evil.example:8080",
            "127.0.0.1.evil.example",
            "localhost.evil.example:80",
            "10.0.0.1",
            "",
            ":80",
            "0.0.0.0:80",
            "127.0.0.1:x",
            "[::2]:80",
            "user@127.0.0.1",
            "127.0.0.1:80:80",
        ] {
            assert_eq!(check_origin(&headers(&[(HOST, host)])), Err(CrossSiteRequest::Host), "{host}");
        }
        assert_eq!(check_origin(&headers(&[])), Err(CrossSiteRequest::Host));
        let mut twice = headers(&[(HOST, "localhost")]);
        twice.append(HOST, HeaderValue::from_static("localhost"));
        assert_eq!(check_origin(&twice), Err(CrossSiteRequest::Host));
    }

    #[test]
    fn origin_is_that_of_the_host() {
        let origin = |value| check_origin(&headers(&[(HOST, "127.0.0.1:80"), (ORIGIN, value)]));
        assert_eq!(origin("http://127.0.0.1:80"), Ok(()));
        for other in [
            "http://127.0.0.1:81",
            "https://127.0.0.1:80",
            "http://localhost:80",
            "null",
            "",
            "http://evil.example",
        ] {
            assert_eq!(origin(other), Err(CrossSiteRequest::Origin), "{other}");
        }
    }
}
