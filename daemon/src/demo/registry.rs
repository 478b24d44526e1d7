//! The registry that `blobd demo` pulls from: a real server on this machine's loopback interface.
//!
//! It speaks the protocol of registry.ollama.ai, with its habits: manifests come as `text/plain`
//! with their digest in `Ollama-Content-Digest`; a blob's URL redirects to a "content network",
//! here the same server under `/cdn/`, with a signed URL; ranges are honoured there. It counts
//! the bytes of files that it sends, so that the demo can show what was moved and what was not.
//!
//! It serves only what its [`Catalogue`] lists, only to this machine, and takes nothing in.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fs::File;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};

use blobd_store_format::digest::Digest;
use blobd_store_format::reference::Reference;
use bytes::Bytes;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::header::{self, HeaderName, HeaderValue};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::{AbortHandle, JoinSet};

/// What a registry has to offer.
#[derive(Debug, Default)]
pub struct Catalogue {
    manifests: BTreeMap<String, Bytes>,
    blobs: BTreeMap<Digest, Source>,
}

/// Where a blob's bytes are.
#[derive(Debug)]
enum Source {
    Memory(Bytes),
    File { file: Arc<File>, size: u64 },
}

impl Catalogue {
    /// Offers a manifest under a reference's namespace, model and tag, and under its own digest.
    /// The reference's host does not matter.
    pub fn add_manifest(&mut self, reference: &Reference, raw: impl Into<Bytes>) {
        let raw = raw.into();
        let repository = format!("{}/{}", reference.namespace(), reference.model());
        self.manifests.insert(format!("{repository}/manifests/{}", Digest::of(&raw)), raw.clone());
        self.manifests.insert(format!("{repository}/manifests/{}", reference.tag()), raw);
    }

    /// Offers bytes as a blob.
    pub fn add_blob(&mut self, bytes: impl Into<Bytes>) {
        let bytes = bytes.into();
        self.blobs.insert(Digest::of(&bytes), Source::Memory(bytes));
    }

    /// Offers a file as a blob; it is read as it is sent. Nobody checks that it has this digest:
    /// that is the client's business.
    ///
    /// # Errors
    /// When the file cannot be opened.
    pub fn add_file(&mut self, digest: Digest, path: &Path) -> io::Result<()> {
        let file = File::open(path)?;
        let size = file.metadata()?.len();
        self.blobs.insert(digest, Source::File { file: Arc::new(file), size });
        Ok(())
    }
}

/// A registry that runs until it is dropped.
#[derive(Debug)]
pub struct LoopbackRegistry {
    address: SocketAddr,
    bytes_served: Arc<AtomicU64>,
    accepting: AbortHandle,
}

impl LoopbackRegistry {
    /// Serves `catalogue` on a port that the kernel picks. Needs a tokio runtime.
    ///
    /// # Errors
    /// When there is no port to listen on.
    pub async fn start(catalogue: Catalogue) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let address = listener.local_addr()?;
        let bytes_served = Arc::new(AtomicU64::new(0));
        let shelf = Shelf { catalogue, address, bytes_served: Arc::clone(&bytes_served) };
        let accepting = tokio::spawn(accept(listener, Arc::new(shelf))).abort_handle();
        Ok(Self { address, bytes_served, accepting })
    }

    /// The base URL, such as `http://127.0.0.1:4711`: a mirror for any registry.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// How many bytes of blobs have been handed to clients so far.
    #[must_use]
    pub fn bytes_served(&self) -> u64 {
        self.bytes_served.load(Ordering::Relaxed)
    }
}

impl Drop for LoopbackRegistry {
    /// Ends the connections too: they belong to the accepting task.
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

/// What every connection needs.
struct Shelf {
    catalogue: Catalogue,
    address: SocketAddr,
    bytes_served: Arc<AtomicU64>,
}

type Answer = Response<BlobBody>;

async fn accept(listener: TcpListener, shelf: Arc<Shelf>) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _peer)) => drop(connections.spawn(serve(stream, Arc::clone(&shelf)))),
                // Out of descriptors, say: those of connections that end come free again.
                Err(error) => {
                    tracing::warn!(%error, "demo registry: accept");
                    tokio::time::sleep(std::time::Duration::from_millis(100)).await;
                }
            },
            Some(_ended) = connections.join_next() => {}
        }
    }
}

async fn serve(stream: TcpStream, shelf: Arc<Shelf>) {
    let service = service_fn(|request| {
        let answer = shelf.answer(&request);
        async { Ok::<_, Infallible>(answer) }
    });
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .serve_connection(TokioIo::new(stream), service);
    // A client may hang up at any time.
    if let Err(error) = connection.await {
        tracing::debug!(%error, "demo registry: connection");
    }
}

impl Shelf {
    fn answer(&self, request: &Request<Incoming>) -> Answer {
        if !matches!(*request.method(), Method::GET | Method::HEAD) {
            return refusal(StatusCode::METHOD_NOT_ALLOWED, "UNSUPPORTED");
        }
        let path = request.uri().path();
        let answer = match (path.strip_prefix("/v2/"), path.strip_prefix("/cdn/")) {
            (Some(name), _) if name.contains("/manifests/") => self.manifest(name),
            (Some(name), _) => self.redirect(name),
            (_, Some(digest)) => self.blob(digest, request),
            _ => refusal(StatusCode::NOT_FOUND, "NAME_UNKNOWN"),
        };
        if request.method() == Method::HEAD { without_body(answer) } else { answer }
    }

    fn manifest(&self, name: &str) -> Answer {
        let Some(raw) = self.catalogue.manifests.get(name) else {
            return refusal(StatusCode::NOT_FOUND, "MANIFEST_UNKNOWN");
        };
        let mut answer = Response::new(BlobBody::of(raw.clone()));
        set(&mut answer, header::CONTENT_TYPE, "text/plain; charset=utf-8");
        set(&mut answer, HeaderName::from_static("ollama-content-digest"), &Digest::of(raw).to_hex());
        answer
    }

    fn redirect(&self, name: &str) -> Answer {
        let digest = name.rsplit_once("/blobs/").and_then(|(_repository, digest)| digest.parse().ok());
        let Some(digest) = digest.filter(|digest| self.catalogue.blobs.contains_key(digest)) else {
            return refusal(StatusCode::NOT_FOUND, "BLOB_UNKNOWN");
        };
        let mut answer = Response::new(BlobBody::of(Bytes::new()));
        *answer.status_mut() = StatusCode::TEMPORARY_REDIRECT;
        let query = self.signed_query(digest);
        set(&mut answer, header::LOCATION, &format!("http://{}/cdn/{digest}?{query}", self.address));
        answer
    }

    /// Stands for a content network's signature: without it the URL is worth nothing.
    fn signed_query(&self, digest: Digest) -> String {
        let signature = Digest::of(format!("{}{digest}", self.address).as_bytes());
        format!("X-Amz-Expires=86400&X-Amz-Signature={}", signature.to_hex())
    }

    fn blob(&self, digest: &str, request: &Request<Incoming>) -> Answer {
        let found = digest.parse().ok().and_then(|digest| self.catalogue.blobs.get_key_value(&digest));
        let Some((&digest, source)) = found else {
            return refusal(StatusCode::NOT_FOUND, "BLOB_UNKNOWN");
        };
        if request.uri().query() != Some(&self.signed_query(digest)) {
            return refusal(StatusCode::FORBIDDEN, "DENIED");
        }
        let range = request.headers().get(header::RANGE).and_then(|range| range.to_str().ok());
        let asked = range.and_then(|range| parse_range(range, source.size()));
        self.part(source, asked)
    }

    /// The whole of a blob, or the part asked for.
    fn part(&self, source: &Source, asked: Option<Range<u64>>) -> Answer {
        let size = source.size();
        let (status, part, content_range) = match asked {
            None => (StatusCode::OK, 0..size, None),
            Some(part) if part.is_empty() => {
                (StatusCode::RANGE_NOT_SATISFIABLE, 0..0, Some(format!("bytes */{size}")))
            }
            Some(part) => {
                let content_range = format!("bytes {}-{}/{size}", part.start, part.end - 1);
                (StatusCode::PARTIAL_CONTENT, part, Some(content_range))
            }
        };
        let mut answer = Response::new(BlobBody {
            left_bytes: part.end - part.start,
            bytes_served: Some(Arc::clone(&self.bytes_served)),
            chunks: source.chunks(part),
        });
        *answer.status_mut() = status;
        set(&mut answer, header::CONTENT_TYPE, "application/octet-stream");
        set(&mut answer, header::ACCEPT_RANGES, "bytes");
        if let Some(content_range) = content_range {
            set(&mut answer, header::CONTENT_RANGE, &content_range);
        }
        answer
    }
}

impl Source {
    fn size(&self) -> u64 {
        match self {
            Self::Memory(bytes) => bytes.len() as u64,
            Self::File { size, .. } => *size,
        }
    }

    /// `part` lies within the size.
    fn chunks(&self, part: Range<u64>) -> Chunks {
        match self {
            Self::Memory(bytes) => {
                let index = |offset| usize::try_from(offset).unwrap_or(bytes.len());
                Chunks::Ready(Some(bytes.slice(index(part.start)..index(part.end))))
            }
            Self::File { file, .. } => {
                let (sender, chunks) = mpsc::channel(CHUNKS_AHEAD);
                let file = Arc::clone(file);
                tokio::task::spawn_blocking(move || read_ahead(&file, part, &sender));
                Chunks::Read(chunks)
            }
        }
    }
}

/// How much of a file is read at once.
const CHUNK_BYTES: u64 = 1 << 20;
/// How many chunks are read before the client has taken the first.
const CHUNKS_AHEAD: usize = 2;

/// Sends `part` of a file until it ends or nobody listens any more.
fn read_ahead(file: &File, part: Range<u64>, sender: &mpsc::Sender<io::Result<Bytes>>) {
    let mut offset = part.start;
    while offset < part.end {
        let length = CHUNK_BYTES.min(part.end - offset);
        // At most CHUNK_BYTES, which fits.
        let mut chunk = vec![0; usize::try_from(length).unwrap_or_default()];
        let read = file.read_exact_at(&mut chunk, offset).map(|()| Bytes::from(chunk));
        if sender.blocking_send(read).is_err() {
            return;
        }
        offset += length;
    }
}

/// A body of known length that counts what is taken of it.
struct BlobBody {
    chunks: Chunks,
    left_bytes: u64,
    bytes_served: Option<Arc<AtomicU64>>,
}

enum Chunks {
    /// At hand.
    Ready(Option<Bytes>),
    /// Sent by [`read_ahead`].
    Read(mpsc::Receiver<io::Result<Bytes>>),
}

impl BlobBody {
    /// Bytes that do not count as a blob's.
    fn of(bytes: Bytes) -> Self {
        Self { left_bytes: bytes.len() as u64, chunks: Chunks::Ready(Some(bytes)), bytes_served: None }
    }

    fn poll_chunk(&mut self, context: &mut Context<'_>) -> Poll<Option<io::Result<Bytes>>> {
        match &mut self.chunks {
            Chunks::Ready(bytes) => Poll::Ready(bytes.take().filter(|bytes| !bytes.is_empty()).map(Ok)),
            Chunks::Read(chunks) => chunks.poll_recv(context),
        }
    }
}

impl Body for BlobBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        let Some(chunk) = ready!(self.poll_chunk(context)).transpose()? else {
            return Poll::Ready(None);
        };
        self.left_bytes = self.left_bytes.saturating_sub(chunk.len() as u64);
        if let Some(bytes_served) = &self.bytes_served {
            bytes_served.fetch_add(chunk.len() as u64, Ordering::Relaxed);
        }
        Poll::Ready(Some(Ok(Frame::data(chunk))))
    }

    fn is_end_stream(&self) -> bool {
        self.left_bytes == 0
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.left_bytes)
    }
}

/// The bytes that a `Range` header asks for: `bytes=FIRST-LAST`, `bytes=FIRST-` or `bytes=-COUNT`.
/// Empty if there are none of them; none for other forms, which a server may ignore.
fn parse_range(range: &str, size: u64) -> Option<Range<u64>> {
    let (first, last) = range.strip_prefix("bytes=")?.split_once('-')?;
    if first.is_empty() {
        return Some(size.saturating_sub(last.parse().ok()?)..size);
    }
    let first = first.parse().ok()?;
    let end = if last.is_empty() { size } else { last.parse::<u64>().ok()?.saturating_add(1).min(size) };
    Some(first..end)
}

/// An error in the form of the OCI distribution protocol.
fn refusal(status: StatusCode, code: &str) -> Answer {
    let body = format!(r#"{{"errors":[{{"code":"{code}","message":"{status}"}}]}}"#);
    let mut answer = Response::new(BlobBody::of(body.into()));
    *answer.status_mut() = status;
    set(&mut answer, header::CONTENT_TYPE, "application/json");
    answer
}

/// The same head without the body that it announces.
fn without_body(answer: Answer) -> Answer {
    let (head, body) = answer.into_parts();
    let mut answer = Response::from_parts(head, BlobBody::of(Bytes::new()));
    answer.headers_mut().insert(header::CONTENT_LENGTH, body.left_bytes.into());
    answer
}

/// Sets a header to a value made by this file, which is always a valid one.
fn set(answer: &mut Answer, name: HeaderName, value: &str) {
    if let Ok(value) = HeaderValue::from_str(value) {
        answer.headers_mut().insert(name, value);
    }
}
