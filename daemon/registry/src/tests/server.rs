//! A server that answers each request as a closure says, byte for byte, and closes.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// One request: its line, and its head with the line.
#[derive(Clone, Debug)]
pub(super) struct Seen {
    pub(super) path: String,
    pub(super) head: String,
}

impl Seen {
    pub(super) fn header(&self, name: &str) -> Option<&str> {
        let lines = self.head.lines().skip(1).filter_map(|line| line.split_once(": "));
        lines.filter(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value).next()
    }
}

/// What is sent, and what happens then.
pub(super) enum Reply {
    /// The connection is closed.
    Whole(Vec<u8>),
    /// The connection stays open and silent.
    ThenSilence(Vec<u8>),
    /// Another byte every few milliseconds, forever.
    ThenDrip(Vec<u8>),
    /// As many bytes as the client takes.
    ThenFlood(Vec<u8>),
}

/// Lives as long as the test's runtime.
pub(super) struct Server {
    address: SocketAddr,
    seen: Arc<Mutex<Vec<Seen>>>,
}

impl Server {
    /// Answers with what `answer` makes of the request and the number of earlier ones.
    pub(super) async fn start(answer: impl Fn(&Seen, usize) -> Reply + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let (answer, record) = (Arc::new(answer), Arc::clone(&seen));
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (answer, record) = (Arc::clone(&answer), Arc::clone(&record));
                tokio::spawn(async move { serve(stream, &*answer, &record).await });
            }
        });
        Self { address, seen }
    }

    /// Answers each request with `bytes`.
    pub(super) async fn always(bytes: impl Into<Vec<u8>>) -> Self {
        let bytes = bytes.into();
        Self::start(move |_, _| Reply::Whole(bytes.clone())).await
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    pub(super) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    pub(super) fn seen(&self) -> Vec<Seen> {
        self.seen.lock().unwrap().clone()
    }

    pub(super) fn paths(&self) -> Vec<String> {
        self.seen().into_iter().map(|seen| seen.path).collect()
    }
}

async fn serve(
    mut stream: TcpStream,
    answer: &(impl Fn(&Seen, usize) -> Reply + Sync),
    record: &Mutex<Vec<Seen>>,
) -> Option<()> {
    let seen = read_head(&mut stream).await?;
    let earlier = {
        let mut record = record.lock().unwrap();
        record.push(seen.clone());
        record.len() - 1
    };
    let (Reply::Whole(bytes) | Reply::ThenSilence(bytes) | Reply::ThenDrip(bytes) | Reply::ThenFlood(bytes)) =
        &answer(&seen, earlier);
    stream.write_all(bytes).await.ok()?;
    loop {
        match answer(&seen, earlier) {
            Reply::Whole(_) => return stream.shutdown().await.ok(),
            Reply::ThenSilence(_) => tokio::time::sleep(Duration::from_secs(60)).await,
            Reply::ThenDrip(_) => {
                stream.write_all(b"x").await.ok()?;
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            Reply::ThenFlood(_) => stream.write_all(&[b'x'; 1 << 16]).await.ok()?,
        }
    }
}

/// Reads up to the empty line; gives up on anything that is no HTTP.
async fn read_head(stream: &mut TcpStream) -> Option<Seen> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.ok().filter(u8::is_ascii)?);
        head.first().filter(|byte| byte.is_ascii_uppercase())?;
    }
    let head = String::from_utf8(head).unwrap();
    let path = head.split(' ').nth(1)?.to_owned();
    Some(Seen { path, head })
}

/// An answer with extra header lines, each ended by `\r\n`.
pub(super) fn answer(status: u16, headers: &str, body: &[u8]) -> Vec<u8> {
    let head = format!(
        "HTTP/1.1 {status} X\r\nConnection: close\r\nContent-Length: {}\r\n{headers}\r\n",
        body.len()
    );
    [head.as_bytes(), body].concat()
}

pub(super) fn ok(body: &[u8]) -> Vec<u8> {
    answer(200, "", body)
}

/// The head of a 200 with exactly these header lines.
pub(super) fn head(headers: &str) -> Vec<u8> {
    format!("HTTP/1.1 200 OK\r\n{headers}\r\n").into_bytes()
}

pub(super) fn redirect(status: u16, location: &str) -> Reply {
    Reply::Whole(answer(status, &format!("Location: {location}\r\n"), b"moved"))
}
