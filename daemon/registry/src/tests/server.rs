//! A server that responds as a closure says, byte for byte, and closes the connection.

use std::io::{self, Write as _};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread::sleep;
use std::time::Duration;

use blobd_fixtures::server;
pub(super) use blobd_fixtures::server::Request as Seen;

/// A response, and what follows it.
pub(super) enum Reply {
    /// The connection is closed.
    Whole(Vec<u8>),
    /// The connection stays open and silent.
    ThenSilence(Vec<u8>),
    /// Another byte every few milliseconds, forever.
    ThenDrip(Vec<u8>),
    /// Bytes without end.
    ThenFlood(Vec<u8>),
}

/// A server that records its requests.
pub(super) struct Server {
    server: server::Server,
    seen: Arc<Mutex<Vec<Seen>>>,
}

impl Server {
    /// `respond` makes the response from the request and the number of earlier ones.
    pub(super) async fn start(respond: impl Fn(&Seen, usize) -> Reply + Send + Sync + 'static) -> Self {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let record = Arc::clone(&seen);
        let serve = move |stream: &mut TcpStream| match Seen::read(stream)? {
            None => Ok(()),
            Some(request) => {
                let earlier = note(&record, &request);
                respond(&request, earlier).send(stream)
            }
        };
        Self { server: server::Server::start(serve).unwrap(), seen }
    }

    /// Always responds with `bytes`.
    pub(super) async fn always(bytes: impl Into<Vec<u8>>) -> Self {
        let bytes = bytes.into();
        Self::start(move |_, _| Reply::Whole(bytes.clone())).await
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.server.address()
    }

    pub(super) fn url(&self, path: &str) -> String {
        self.server.url(path)
    }

    pub(super) fn seen(&self) -> Vec<Seen> {
        self.seen.lock().unwrap().clone()
    }

    pub(super) fn paths(&self) -> Vec<String> {
        self.seen().into_iter().map(|seen| seen.path).collect()
    }
}

/// Records a request; returns the number of earlier ones.
fn note(record: &Mutex<Vec<Seen>>, request: &Seen) -> usize {
    let mut record = record.lock().unwrap();
    record.push(request.clone());
    record.len() - 1
}

impl Reply {
    fn send(self, stream: &mut TcpStream) -> io::Result<()> {
        let (Self::Whole(bytes) | Self::ThenSilence(bytes) | Self::ThenDrip(bytes) | Self::ThenFlood(bytes)) =
            &self;
        stream.write_all(bytes)?;
        loop {
            match self {
                Self::Whole(_) => return stream.shutdown(Shutdown::Write),
                Self::ThenSilence(_) => sleep(Duration::from_secs(60)),
                Self::ThenDrip(_) => {
                    stream.write_all(b"x")?;
                    sleep(Duration::from_millis(10));
                }
                Self::ThenFlood(_) => stream.write_all(&[b'x'; 1 << 16])?,
            }
        }
    }
}

/// A response with extra header lines, each ended by `\r\n`.
pub(super) fn response(status: u16, headers: &str, body: &[u8]) -> Vec<u8> {
    let head = format!(
        "HTTP/1.1 {status} X\r\nConnection: close\r\nContent-Length: {}\r\n{headers}\r\n",
        body.len()
    );
    [head.as_bytes(), body].concat()
}

pub(super) fn ok(body: &[u8]) -> Vec<u8> {
    response(200, "", body)
}

/// The head of a 200 with exactly these header lines.
pub(super) fn head(headers: &str) -> Vec<u8> {
    format!("HTTP/1.1 200 OK\r\n{headers}\r\n").into_bytes()
}

pub(super) fn redirect(status: u16, location: &str) -> Reply {
    Reply::Whole(response(status, &format!("Location: {location}\r\n"), b"moved"))
}
