//! Connections: TCP to an allowed address, through the user's proxy if there is one, then TLS.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::header::{ACCEPT_ENCODING, HeaderMap, HeaderValue, PROXY_AUTHORIZATION, USER_AGENT, VIA};
use hyper::{Method, Response, Uri};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpInfo;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, ConfigBuilder, RootCertStore, WantsVerifier};
use tokio::sync::OnceCell;
use tokio::task::spawn_blocking;
use url::Url;

use super::address_scope::AddressScope;
use super::connect_failure::ConnectFailure;
use super::connector::{BoxError, Connector};
use super::error::{RegistryError, Result};
use super::origin::host_of;
use super::policy::{Limits, RegistryPolicy};
use super::proxy::Proxies;
use super::regular_file::read_regular;
use super::server_headers::ServerHeaders;

/// The HTTP clients, one for each narrowest [`AddressScope`] allowed. Idle connections are reused only by requests with
/// the same limit.
#[derive(Debug)]
pub(super) struct Transport {
    /// Made for the first request: a machine has about 150 certificate authorities to read, and most processes never
    /// contact a registry.
    clients: OnceCell<Clients>,
    tls: ConfigBuilder<ClientConfig, WantsVerifier>,
    authorities: RootCertStore,
    proxies: Arc<Proxies>,
    limits: Limits,
    headers: Arc<ServerHeaders>,
    /// The servers that have passed on the request that these are sent for.
    via: Option<HeaderValue>,
}

type Clients = [(AddressScope, HttpClient); 4];
type HttpClient = Client<HttpsConnector<Connector>, RequestBody>;
pub(super) type RequestBody = UnsyncBoxBody<Bytes, BoxError>;

/// One request to one server.
#[derive(Debug)]
pub(super) struct Request<'u> {
    pub(super) method: Method,
    pub(super) url: &'u Url,
    /// Without `User-Agent` and `Accept-Encoding`, which are the same for all requests.
    pub(super) headers: HeaderMap,
    pub(super) body: RequestBody,
}

impl<'u> Request<'u> {
    pub(super) fn get(url: &'u Url, headers: HeaderMap) -> Self {
        Self::new(Method::GET, url, headers, Bytes::new())
    }

    pub(super) fn new(method: Method, url: &'u Url, headers: HeaderMap, body: Bytes) -> Self {
        let body = Full::new(body).map_err(|never| match never {}).boxed_unsync();
        Self { method, url, headers, body }
    }
}

impl Transport {
    pub(super) fn new(policy: &RegistryPolicy, limits: &Limits, proxies: Proxies) -> Result<Self> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let tls = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| unusable(Path::new(""), &error))?;
        Ok(Self {
            clients: OnceCell::new(),
            tls,
            authorities: read_authorities(&policy.ca_files)?,
            proxies: Arc::new(proxies),
            limits: *limits,
            headers: Arc::new(ServerHeaders::new(&policy.headers)?),
            via: None,
        })
    }

    /// A copy without open connections.
    pub(super) fn without_connections(&self) -> Self {
        Self {
            clients: OnceCell::new(),
            tls: self.tls.clone(),
            authorities: self.authorities.clone(),
            proxies: Arc::clone(&self.proxies),
            limits: self.limits,
            headers: Arc::clone(&self.headers),
            via: self.via.clone(),
        }
    }

    /// A copy without open connections, whose requests name these servers as having passed them on.
    pub(super) fn relaying(&self, via: HeaderValue) -> Self {
        Self { via: Some(via), ..self.without_connections() }
    }

    /// Sends one request to a host whose scope is at most `reach`. Returns the response, whose body is still
    /// to be read, and the scope of the host's address, which is unknown behind a proxy.
    pub(super) async fn send(
        &self,
        request: Request<'_>,
        reach: AddressScope,
    ) -> Result<(Response<Incoming>, Option<AddressScope>)> {
        let (host, limit) = (host_of(request.url), self.limits.head);
        match tokio::time::timeout(limit, self.send_unlimited(request, reach)).await {
            Ok(response) => response,
            Err(_elapsed) => Err(RegistryError::Stalled { host, seconds: limit.as_secs() }),
        }
    }

    /// As [`Self::send`], but waits for the response without limit: its body may take long to send.
    pub(super) async fn send_unlimited(
        &self,
        request: Request<'_>,
        reach: AddressScope,
    ) -> Result<(Response<Incoming>, Option<AddressScope>)> {
        let Request { method, url, mut headers, body } = request;
        let host = host_of(url);
        if let Some(scope) = AddressScope::from_url(url).filter(|scope| *scope > reach) {
            let reason = ConnectFailure::ForbiddenAddress(scope);
            return Err(RegistryError::Unreachable { host, reason });
        }
        let Ok(uri) = Uri::try_from(url.as_str()) else { return Err(RegistryError::Host { host }) };
        let proxy = self.proxies.for_target(&uri).map_err(|fault| RegistryError::Proxy(fault.clone()))?;
        if let Some(proxy) = proxy.filter(|proxy| proxy.forwards(&uri)) {
            headers.extend(proxy.basic_authorization().map(|value| (PROXY_AUTHORIZATION, value)));
        }
        self.headers.add_to(&mut headers, url);
        headers.insert(USER_AGENT, HeaderValue::from_static(AGENT));
        headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        headers.extend(self.via.clone().map(|via| (VIA, via)));
        let mut sent = hyper::Request::new(body);
        (*sent.method_mut(), *sent.uri_mut(), *sent.headers_mut()) = (method, uri.clone(), headers);
        match self.client(reach).await.request(sent).await {
            Ok(response) => {
                let connection = response.extensions().get::<HttpInfo>().filter(|_| proxy.is_none());
                let scope =
                    connection.map(|connection| AddressScope::from_address(connection.remote_addr().ip()));
                Ok((response, scope))
            }
            Err(error) => {
                Err(RegistryError::Unreachable { host, reason: ConnectFailure::from_error(&error) })
            }
        }
    }

    async fn client(&self, reach: AddressScope) -> &HttpClient {
        let [public, nearer @ ..] = self.clients.get_or_init(|| self.make_clients()).await;
        let (_, client) = nearer.iter().find(|(scope, _)| *scope == reach).unwrap_or(public);
        client
    }

    async fn make_clients(&self) -> Clients {
        let authorities = self.authorities.clone();
        let read = spawn_blocking(move || with_machine_authorities(authorities)).await;
        // Fails only while the runtime shuts down.
        let roots = read.unwrap_or_else(|_error| self.authorities.clone());
        let tls = self.tls.clone().with_root_certificates(roots).with_no_client_auth();
        let client = |reach| {
            let connector = Connector::new(reach, &self.limits, &self.proxies, tls.clone());
            (reach, http_client(connector, tls.clone()))
        };
        [AddressScope::Public, AddressScope::Private, AddressScope::Loopback, AddressScope::Reserved]
            .map(client)
    }
}

/// The value of the `User-Agent` header.
const AGENT: &str = concat!("blobd/", env!("CARGO_PKG_VERSION"));
/// hyper's read buffer, which also limits the head of a response. Signed URLs need some 2 KiB; with a quarter
/// of this size, bodies were a third slower.
const READ_BUFFER_BYTES: usize = 400 << 10;
/// Idle connections kept for each host, as many as one pull can reuse.
const MAX_IDLE_CONNECTIONS: usize = 4;
/// Common servers close idle connections after a minute; this is shorter.
const IDLE_TIMEOUT: Duration = Duration::from_secs(30);

fn http_client(connector: Connector, tls: ClientConfig) -> HttpClient {
    let https = HttpsConnectorBuilder::new().with_tls_config(tls).https_or_http().enable_http1();
    Client::builder(TokioExecutor::new())
        .pool_timer(TokioTimer::new())
        .pool_idle_timeout(IDLE_TIMEOUT)
        .pool_max_idle_per_host(MAX_IDLE_CONNECTIONS)
        .http1_max_buf_size(READ_BUFFER_BYTES)
        .build(https.wrap_connector(connector))
}

fn read_authorities(ca_files: &[PathBuf]) -> Result<RootCertStore> {
    let mut roots = RootCertStore::empty();
    for path in ca_files {
        let before = roots.len();
        let content = read_limited(path).map_err(|error| unusable(path, &error))?;
        for certificate in CertificateDer::pem_slice_iter(&content) {
            let certificate = certificate.map_err(|error| unusable(path, &error))?;
            roots.add(certificate).map_err(|error| unusable(path, &error))?;
        }
        if roots.len() == before {
            return Err(unusable(path, &"contains no certificate"));
        }
    }
    Ok(roots)
}

/// Reads a certificate file. One with all authorities of a machine has about 200 KiB.
fn read_limited(path: &Path) -> io::Result<Vec<u8>> {
    const MAX_BYTES: u64 = 16 << 20;
    let content = read_regular(path, MAX_BYTES + 1)?;
    match content.len() as u64 > MAX_BYTES {
        true => Err(io::Error::other("too long: expected at most 16 MiB of certificates")),
        false => Ok(content),
    }
}

/// Adds the machine's authorities. Finding none is not an error, because a local mirror may not use TLS.
fn with_machine_authorities(mut roots: RootCertStore) -> RootCertStore {
    let native = rustls_native_certs::load_native_certs();
    for error in &native.errors {
        tracing::warn!(%error, "certificate authorities of this machine");
    }
    roots.add_parsable_certificates(native.certs);
    if roots.is_empty() {
        tracing::warn!("no certificate authorities found; registries can only be reached without TLS");
    }
    roots
}

fn unusable(path: &Path, reason: &impl ToString) -> RegistryError {
    RegistryError::Certificates { path: path.to_owned(), reason: reason.to_string() }
}
