//! A registry that costs as little as one can: the kernel sends its file from the page cache.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::thread;

use blobd_store_format::descriptor::{Descriptor, MediaType};
use blobd_store_format::digest::Digest;
use blobd_store_format::manifest::Manifest;

use crate::measure::{Outcome, digest_of};

/// One model, served to anybody on this machine until the process ends.
pub(crate) struct Server {
    model: String,
    layer_url: String,
}

/// What is served.
struct Offer {
    manifest: Manifest,
    layer_path: String,
    layer: File,
    layer_bytes: u64,
}

const REPOSITORY: &str = "library/bench";
const CONFIG: &[u8] = br#"{"model_format":"gguf","model_family":"llama"}"#;

impl Server {
    /// Serves a file as a model with that one layer.
    pub(crate) fn start(path: &Path) -> Outcome<Self> {
        let layer = File::open(path)?;
        let layer_bytes = layer.metadata()?.len();
        let digest = digest_of(path)?;
        let descriptor = |media_type: &str, digest, size| Descriptor {
            media_type: MediaType::new(media_type),
            digest,
            size,
        };
        let config = descriptor(MediaType::DOCKER_CONFIG, Digest::of(CONFIG), CONFIG.len() as u64);
        let manifest =
            Manifest::compose(config, vec![descriptor(MediaType::OLLAMA_MODEL, digest, layer_bytes)])?;
        let layer_path = format!("/v2/{REPOSITORY}/blobs/{digest}");
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let url = format!("http://{}", listener.local_addr()?);
        let server = Self { model: format!("{url}/{REPOSITORY}"), layer_url: format!("{url}{layer_path}") };
        let offer = Arc::new(Offer { manifest, layer_path, layer, layer_bytes });
        thread::spawn(move || offer.accept(&listener));
        Ok(server)
    }

    /// What to pull.
    pub(crate) fn model(&self) -> &str {
        &self.model
    }

    /// Where its layer is.
    pub(crate) fn layer_url(&self) -> &str {
        &self.layer_url
    }
}

impl Offer {
    fn accept(self: &Arc<Self>, listener: &TcpListener) {
        for stream in listener.incoming().flatten() {
            let offer = Arc::clone(self);
            // A client that hangs up is no news.
            thread::spawn(move || drop(offer.serve(&stream)));
        }
    }

    /// Answers one request after the other until the client closes the connection.
    fn serve(&self, mut stream: &TcpStream) -> io::Result<()> {
        stream.set_nodelay(true)?;
        let mut reader = BufReader::new(stream);
        while let Some(request) = Request::read(&mut reader)? {
            let wants_body = request.method != "HEAD";
            if request.path == self.layer_path {
                self.answer_layer(stream, &request)?;
                continue;
            }
            let (status, body) = match request.path.as_str() {
                path if path.contains("/manifests/") => ("200 OK", self.manifest.raw()),
                path if path.contains("/blobs/") => ("200 OK", CONFIG),
                _ => ("404 Not Found", &[][..]),
            };
            let head = format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\n\r\n", body.len());
            stream.write_all(head.as_bytes())?;
            if wants_body {
                stream.write_all(body)?;
            }
        }
        Ok(())
    }

    fn answer_layer(&self, mut stream: &TcpStream, request: &Request) -> io::Result<()> {
        let size = self.layer_bytes;
        let (status, range) = match request.range {
            Some((start, end)) if start < size => {
                ("206 Partial Content", start..end.saturating_add(1).min(size))
            }
            _ => ("200 OK", 0..size),
        };
        let length = range.end.saturating_sub(range.start);
        let mut head = format!("HTTP/1.1 {status}\r\nContent-Length: {length}\r\nAccept-Ranges: bytes\r\n");
        if request.range.is_some() {
            head.push_str(&format!("Content-Range: bytes {}-{}/{size}\r\n", range.start, range.end - 1));
        }
        stream.write_all(format!("{head}\r\n").as_bytes())?;
        let mut offset = range.start;
        while request.method != "HEAD" && offset < range.end {
            let left = usize::try_from(range.end - offset).unwrap_or(usize::MAX);
            // Advances the offset.
            if rustix::fs::sendfile(stream, &self.layer, Some(&mut offset), left)? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        Ok(())
    }
}

struct Request {
    method: String,
    path: String,
    /// The first byte and the last.
    range: Option<(u64, u64)>,
}

impl Request {
    /// None when the client has closed the connection.
    fn read(reader: &mut impl BufRead) -> io::Result<Option<Self>> {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        let mut words = line.split(' ').map(str::to_owned);
        let (Some(method), Some(path)) = (words.next(), words.next()) else { return Ok(None) };
        let mut request = Self { method, path, range: None };
        loop {
            let mut line = String::new();
            if reader.read_line(&mut line)? == 0 || line.trim().is_empty() {
                return Ok(Some(request));
            }
            let line = line.trim().to_ascii_lowercase();
            if let Some(range) = line.strip_prefix("range: bytes=") {
                request.range = range.split_once('-').and_then(|(start, end)| {
                    Some((start.parse().ok()?, if end.is_empty() { u64::MAX } else { end.parse().ok()? }))
                });
            }
        }
    }
}
