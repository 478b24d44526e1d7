//! HTTP/1.1 on a TCP port, with limits of connections, heads and time. What is on [`crate::loopback`] uses it, and so do
//! models that are served to other machines.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::error::Error;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use hyper::body::{Body, Incoming};
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::{Sleep, sleep, timeout};

/// What the clients of a port may use.
#[derive(Clone, Copy, Debug)]
pub struct ListenerLimits {
    /// How long a client may take to send the head of a request, or to begin the next one.
    pub head_timeout: Duration,
    /// The longest head, and about what a connection keeps of a response that its client has not taken yet.
    pub head_bytes: usize,
    /// Connections at a time. Further clients wait in the kernel's queue.
    pub connections: usize,
    /// Connections of one client at a time; further ones are refused with the status 429.
    pub connections_per_client: usize,
    /// How long a client may take none of a response before its connection is closed.
    pub stall_timeout: Duration,
    /// After the first time a connection takes no further request, and it is closed after the second one.
    pub age: Option<(Duration, Duration)>,
}

/// A server that listens.
#[derive(Debug)]
pub struct HttpListener {
    listener: TcpListener,
    connections: Arc<Semaphore>,
    clients: Clients,
    limits: ListenerLimits,
}

impl HttpListener {
    /// Listens on an address; on any free port for port 0.
    pub async fn bind(address: SocketAddr, limits: ListenerLimits) -> io::Result<Self> {
        let listener = TcpListener::bind(address).await?;
        let connections = Arc::new(Semaphore::new(limits.connections));
        Ok(Self { listener, connections, clients: Clients::default(), limits })
    }

    /// The address on which it listens.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Serves until the future is dropped. Connections that have begun go on. `secured` makes a stream of a connection,
    /// such as one with TLS, or `None` if that fails.
    pub async fn serve<S, T, F, B>(
        &self,
        secured: impl Fn(TcpStream) -> S + Clone + Send + 'static,
        respond: impl Fn(Request<Incoming>, IpAddr) -> F + Clone + Send + Sync + 'static,
    ) where
        S: Future<Output = Option<T>> + Send,
        T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
        F: Future<Output = Response<B>> + Send,
        B: Body<Data = Bytes> + Send + 'static,
        B::Error: Into<Box<dyn Error + Send + Sync>>,
    {
        let limits = self.limits;
        loop {
            let Ok(permit) = Arc::clone(&self.connections).acquire_owned().await else { return };
            let (stream, address) = match self.listener.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    // Out of descriptors or memory: wait until some connections have ended.
                    tracing::warn!("HTTP: cannot accept a connection: {error}");
                    sleep(Duration::from_millis(100)).await;
                    continue;
                }
            };
            let client = self.clients.enter(address.ip(), limits.connections_per_client);
            let (secured, respond) = (secured.clone(), respond.clone());
            tokio::spawn(async move {
                match client {
                    Some(client) => {
                        let secured = timeout(limits.head_timeout, secured(stream)).await;
                        if let Ok(Some(stream)) = secured {
                            let respond = |request| respond(request, client.address);
                            serve_connection(respond, stream, limits).await;
                        }
                    }
                    None => refuse(stream).await,
                }
                drop(permit);
            });
        }
    }
}

/// Sends a constant response, and waits a moment so that the client receives it: the kernel would drop it if the request
/// were left unread.
async fn refuse(mut stream: TcpStream) {
    const REFUSAL: &[u8] = b"HTTP/1.1 429 Too Many Requests\r\nconnection: close\r\nretry-after: 1\r\n\
        content-type: text/plain\r\ncontent-length: 38\r\n\r\ntoo many connections from this address";
    const LINGER: Duration = Duration::from_secs(1);
    let refused = async {
        stream.write_all(REFUSAL).await?;
        stream.shutdown().await?;
        let mut unread = [0; 1 << 10];
        while stream.read(&mut unread).await? > 0 {}
        Ok::<_, io::Error>(())
    };
    let _best_effort = timeout(LINGER, refused).await;
}

async fn serve_connection<T, F, B>(
    respond: impl Fn(Request<Incoming>) -> F,
    stream: T,
    limits: ListenerLimits,
) where
    T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    F: Future<Output = Response<B>>,
    B: Body<Data = Bytes> + 'static,
    B::Error: Into<Box<dyn Error + Send + Sync>>,
{
    let service = service_fn(|request: Request<Incoming>| {
        let response = respond(request);
        async { Ok::<_, Infallible>(response.await) }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.head_timeout)
        .max_buf_size(limits.head_bytes)
        .serve_connection(Unstalled::new(stream, limits.stall_timeout), service);
    let mut connection = pin!(connection);
    let Some((age, last_response)) = limits.age else {
        // A client may close its connection at any time.
        let _ended = connection.await;
        return;
    };
    tokio::select! {
        _ended = connection.as_mut() => return,
        () = sleep(age) => connection.as_mut().graceful_shutdown(),
    }
    let _ended_or_too_slow = timeout(last_response, connection).await;
}

/// The connections of each client.
#[derive(Clone, Debug, Default)]
struct Clients(Arc<Mutex<BTreeMap<IpAddr, usize>>>);

/// A connection of a client until it is dropped.
#[derive(Debug)]
struct Client {
    clients: Clients,
    address: IpAddr,
}

impl Clients {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<IpAddr, usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn enter(&self, address: IpAddr, most: usize) -> Option<Client> {
        let address = client_of(address);
        let mut counts = self.lock();
        let count = counts.entry(address).or_default();
        if *count >= most {
            return None;
        }
        *count = count.saturating_add(1);
        Some(Client { clients: self.clone(), address })
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let mut counts = self.clients.lock();
        if let Some(count) = counts.get_mut(&self.address) {
            *count = count.saturating_sub(1);
        }
        counts.retain(|_, count| *count > 0);
    }
}

/// What counts as one client: an IPv4 address, or the 64 bits of an IPv6 address that a network gets, because each of its
/// machines may have as many addresses as it likes.
fn client_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) if !address.is_loopback() => {
            IpAddr::V6((address.to_bits() & !u128::from(u64::MAX)).into())
        }
        address => address,
    }
}

/// A stream that fails if its client takes nothing for some time.
struct Unstalled<T> {
    stream: TokioIo<T>,
    limit: Duration,
    /// Set while the client takes nothing.
    waiting: Option<Pin<Box<Sleep>>>,
}

impl<T: AsyncRead + AsyncWrite + Unpin> Unstalled<T> {
    fn new(stream: T, limit: Duration) -> Self {
        Self { stream: TokioIo::new(stream), limit, waiting: None }
    }

    fn within_limit<R>(
        &mut self,
        context: &mut Context<'_>,
        poll: Poll<io::Result<R>>,
    ) -> Poll<io::Result<R>> {
        if poll.is_ready() {
            self.waiting = None;
            return poll;
        }
        let limit = self.limit;
        let waiting = self.waiting.get_or_insert_with(|| Box::pin(sleep(limit)));
        waiting.as_mut().poll(context).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> Read for Unstalled<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> Write for Unstalled<T> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.within_limit(context, written)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(context);
        self.within_limit(context, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let shut_down = Pin::new(&mut self.stream).poll_shutdown(context);
        self.within_limit(context, shut_down)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, parts);
        self.within_limit(context, written)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_client_has_its_share_and_networks_count_as_one() {
        let clients = Clients::default();
        let address = |text: &str| text.parse::<IpAddr>().unwrap();
        let held = [clients.enter(address("10.0.0.1"), 2), clients.enter(address("::ffff:10.0.0.1"), 2)];
        assert!(held.iter().all(Option::is_some));
        assert!(clients.enter(address("10.0.0.1"), 2).is_none());
        assert!(clients.enter(address("10.0.0.2"), 2).is_some());
        drop(held);
        assert!(clients.enter(address("10.0.0.1"), 2).is_some());
        assert!(clients.lock().is_empty());
        assert_eq!(client_of(address("2001:db8::1")), client_of(address("2001:db8::9:2")));
        assert_ne!(client_of(address("2001:db8:0:1::1")), client_of(address("2001:db8::1")));
        assert_eq!(client_of(address("::1")), address("::1"));
    }

    #[tokio::test]
    async fn stream_whose_client_takes_nothing_fails_after_the_limit() {
        let (ours, _theirs) = tokio::io::duplex(4);
        let mut stream = Unstalled::new(ours, Duration::from_millis(20));
        let mut write = async || {
            std::future::poll_fn(|context| Pin::new(&mut stream).poll_write(context, b"12345678")).await
        };
        assert_eq!(write().await.unwrap(), 4);
        let start = tokio::time::Instant::now();
        assert_eq!(write().await.unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert!(start.elapsed() >= Duration::from_millis(20));
    }
}
