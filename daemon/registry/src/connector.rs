//! Opens connections: to an allowed address, or through the user's proxy.

use std::error::Error;
use std::future::{Ready, ready};
use std::io::{self, IoSlice};
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use hyper::Uri;
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder, MaybeHttpsStream};
use hyper_util::client::legacy::connect::dns::{GaiResolver, Name};
use hyper_util::client::legacy::connect::proxy::{SocksV4, SocksV5, Tunnel};
use hyper_util::client::legacy::connect::{Connected, Connection, HttpConnector};
use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use tokio::net::TcpStream;
use tower_service::Service;

use super::address_scope::AddressScope;
use super::connect_failure::{ConnectFailure, innermost};
use super::policy::Limits;
use super::proxy::{Protocol, Proxies, Proxy, Resolver};

pub(super) type BoxError = Box<dyn Error + Send + Sync>;
type Connecting<T> = Pin<Box<dyn Future<Output = Result<T, BoxError>> + Send>>;
type MaybeTls = MaybeHttpsStream<TokioIo<TcpStream>>;

/// Opens connections to hosts within an address scope, directly or through a proxy. The caller adds TLS to the host
/// itself.
#[derive(Clone, Debug)]
pub(super) struct Connector {
    resolver: GuardedResolver,
    direct: HttpConnector<GuardedResolver>,
    to_proxy: HttpsConnector<HttpConnector>,
    proxies: Arc<Proxies>,
    /// How long to wait for a proxy's answer.
    time_limit: Duration,
}

impl Connector {
    pub(super) fn new(
        reach: AddressScope,
        limits: &Limits,
        proxies: &Arc<Proxies>,
        tls: ClientConfig,
    ) -> Self {
        let resolver = GuardedResolver { reach };
        let mut direct = HttpConnector::new_with_resolver(resolver.clone());
        let mut to_proxy = HttpConnector::new();
        direct.set_connect_timeout(Some(limits.connect));
        direct.set_nodelay(true);
        // Both also connect to https hosts; TLS is added by `HttpsConnector`.
        direct.enforce_http(false);
        to_proxy.set_connect_timeout(Some(limits.connect));
        to_proxy.set_nodelay(true);
        to_proxy.enforce_http(false);
        let builder = HttpsConnectorBuilder::new().with_tls_config(tls).https_or_http().enable_http1();
        let to_proxy = builder.wrap_connector(to_proxy);
        Self { resolver, direct, to_proxy, proxies: Arc::clone(proxies), time_limit: limits.connect }
    }

    async fn through(mut self, proxy: Proxy, target: Uri) -> Result<Stream, BoxError> {
        let target = match proxy.protocol {
            Protocol::Socks4(Resolver::Machine) | Protocol::Socks5(Resolver::Machine) => {
                self.resolved(&target, proxy.protocol).await?
            }
            _ => with_port(&target, None)?,
        };
        let failed = |reason: String| ConnectFailure::Proxy { variable: proxy.variable, reason };
        let connection = self.to_proxy.call(proxy.uri.clone()).await;
        let connection = connection.map_err(|error| failed(innermost(&*error).to_string()))?;
        if proxy.forwards(&target) {
            return Ok(Stream { inner: connection, is_forwarded: true });
        }
        match tokio::time::timeout(self.time_limit, tunnel(&proxy, connection, target)).await {
            Ok(tunnel) => Ok(Stream { inner: tunnel.map_err(failed)?, is_forwarded: false }),
            Err(_elapsed) => Err(failed(format!("no answer for {} s", self.time_limit.as_secs())).into()),
        }
    }

    /// Replaces the target's host name by its address. If this machine cannot resolve the name, the proxy does,
    /// provided that its protocol carries names.
    async fn resolved(&mut self, target: &Uri, protocol: Protocol) -> Result<Uri, BoxError> {
        let host = target.host().unwrap_or_default();
        if host.trim_matches(['[', ']']).parse::<IpAddr>().is_ok() {
            return with_port(target, None);
        }
        let is_usable = |address: &SocketAddr| address.is_ipv4() || matches!(protocol, Protocol::Socks5(_));
        match self.resolver.call(host.parse()?).await {
            Ok(mut addresses) => match addresses.find(is_usable) {
                Some(address) => with_port(target, Some(address.ip())),
                None => {
                    Err(ConnectFailure::NoAddress("no IPv4 address, which SOCKS 4 needs".to_owned()).into())
                }
            },
            Err(error) => match error.downcast_ref::<ConnectFailure>() {
                Some(ConnectFailure::NoAddress(_)) if matches!(protocol, Protocol::Socks5(_)) => {
                    with_port(target, None)
                }
                _ => Err(error),
            },
        }
    }
}

/// The origin of a URL with an explicit port, and with `address` in place of its host if there is one.
fn with_port(target: &Uri, address: Option<IpAddr>) -> Result<Uri, BoxError> {
    let scheme = target.scheme_str().unwrap_or("https");
    let port = target.port_u16().unwrap_or(if scheme == "https" { 443 } else { 80 });
    let host = match address {
        Some(IpAddr::V6(address)) => format!("[{address}]"),
        Some(address) => address.to_string(),
        None => target.host().unwrap_or_default().to_owned(),
    };
    Ok(format!("{scheme}://{host}:{port}/").parse()?)
}

/// Asks the proxy to connect to the target; fails with the reason.
async fn tunnel(proxy: &Proxy, connection: MaybeTls, target: Uri) -> Result<MaybeTls, String> {
    let (uri, connection) = (proxy.uri.clone(), Established(Some(connection)));
    match proxy.protocol {
        Protocol::Http => {
            let tunnel = Tunnel::new(uri, connection);
            let mut tunnel = match proxy.basic_authorization() {
                Some(credentials) => tunnel.with_auth(credentials),
                None => tunnel,
            };
            tunnel.call(target).await.map_err(|error| reason(&error))
        }
        Protocol::Socks4(_) => {
            SocksV4::new(uri, connection).call(target).await.map_err(|error| reason(&error))
        }
        Protocol::Socks5(_) => {
            let tunnel = SocksV5::new(uri, connection);
            let mut tunnel = match proxy.user.clone() {
                Some((user, password)) => tunnel.with_auth(user, password),
                None => tunnel,
            };
            tunnel.call(target).await.map_err(|error| reason(&error))
        }
    }
}

/// The text of the library's error without its prefix.
fn reason(error: &(dyn Error + 'static)) -> String {
    let text = innermost(error).to_string();
    let introduced = ["tunnel error: ", "SOCKS error: "].iter().find_map(|words| text.strip_prefix(words));
    introduced.unwrap_or(&text).to_owned()
}

impl Service<Uri> for Connector {
    type Response = Stream;
    type Error = BoxError;
    type Future = Connecting<Self::Response>;

    fn poll_ready(&mut self, _context: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, target: Uri) -> Self::Future {
        let proxy = match self.proxies.for_target(&target) {
            Ok(None) => {
                let connecting = self.direct.call(target);
                return Box::pin(async {
                    Ok(Stream { inner: connecting.await?.into(), is_forwarded: false })
                });
            }
            Ok(Some(proxy)) => proxy.clone(),
            Err(fault) => {
                let fault = fault.clone();
                return Box::pin(async { Err(fault.into()) });
            }
        };
        Box::pin(self.clone().through(proxy, target))
    }
}

/// A connector whose only connection, to the proxy, is open already.
struct Established(Option<MaybeTls>);

impl Service<Uri> for Established {
    type Response = MaybeTls;
    type Error = io::Error;
    type Future = Ready<io::Result<MaybeTls>>;

    fn poll_ready(&mut self, _context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _proxy: Uri) -> Self::Future {
        ready(self.0.take().ok_or_else(|| io::ErrorKind::NotConnected.into()))
    }
}

/// A connection to a server or to a proxy.
#[derive(Debug)]
pub(super) struct Stream {
    inner: MaybeTls,
    /// Whether requests go to a proxy, and so contain the whole URL.
    is_forwarded: bool,
}

impl Connection for Stream {
    fn connected(&self) -> Connected {
        self.inner.connected().proxy(self.is_forwarded)
    }
}

impl Read for Stream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_read(context, buffer)
    }
}

impl Write for Stream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(context)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write_vectored(context, slices)
    }
}

/// Resolves names and drops the addresses outside `reach`.
#[derive(Clone, Debug)]
struct GuardedResolver {
    reach: AddressScope,
}

impl Service<Name> for GuardedResolver {
    type Response = std::vec::IntoIter<SocketAddr>;
    type Error = BoxError;
    type Future = Connecting<Self::Response>;

    fn poll_ready(&mut self, _context: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, name: Name) -> Self::Future {
        let reach = self.reach;
        let lookup = GaiResolver::new().call(name);
        Box::pin(async move {
            let no_address = |error| ConnectFailure::NoAddress(innermost(&error).to_string());
            let addresses = lookup.await.map_err(no_address)?;
            let (allowed, refused): (Vec<_>, Vec<_>) =
                addresses.partition(|address| AddressScope::from_address(address.ip()) <= reach);
            match refused.first() {
                Some(address) if allowed.is_empty() => {
                    Err(ConnectFailure::ForbiddenAddress(AddressScope::from_address(address.ip())).into())
                }
                _ => Ok(allowed.into_iter()),
            }
        })
    }
}
