//! A registry that a test can make misbehave in every way that registries are known to.
//!
//! Two servers on loopback ports: the registry, and the "content network" to which it redirects
//! for blobs. Both answer one request per connection, from threads, byte for byte as a [`Fault`]
//! says; all that they are asked is kept. Without faults they behave as registry.ollama.ai does.
//!
//! ```
//! use blobd_tests::registry::{Fault, FakeRegistry};
//!
//! let registry = FakeRegistry::start()?;
//! registry.add_model("library/tiny:latest", b"{}", &[("application/vnd.ollama.image.model", b"weights")])?;
//! registry.add_fault("/cdn/", 1, Fault::CutAfter(3));
//! // blobd pull http://127.0.0.1:…/library/tiny: the first try breaks, the second is whole.
//! let name = registry.name("library/tiny:latest");
//! # assert!(name.starts_with("http://127.0.0.1:"));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod answer;

use std::collections::BTreeMap;
use std::error::Error;
use std::io::{self, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use blobd_store_format::descriptor::{Descriptor, MediaType};
use blobd_store_format::digest::Digest;
use blobd_store_format::manifest::Manifest;
use serde_json::{Value as Json, json};

use self::answer::{Answer, altered, blob_answer, challenge, read_request, replaced};

/// How blobs are handed out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Manner {
    /// 307 to a signed URL on the content network, as registry.ollama.ai does.
    Redirect,
    /// 200 with the bytes and a relative `Location` that leads to them again, as hf.co does.
    RelativeLocation,
    /// 200 with the bytes, as plain OCI registries do.
    Direct,
}

/// One way to answer wrongly.
#[derive(Clone, Debug)]
pub enum Fault {
    /// Another status and no more.
    Status(u16),
    /// 429, to be tried again in so many seconds.
    TooManyRequests(u64),
    /// 401 whose token service is at this URL.
    Unauthorized(String),
    /// 307 to this `Location`.
    RedirectTo(String),
    /// 307 to the same URL, again and again.
    RedirectLoop,
    /// 200 with the login page of a hotel.
    WebPage,
    /// 200 with other bytes.
    Body(Vec<u8>),
    /// A `Content-Length` that is not the body's.
    ContentLength(u64),
    /// The last bytes are missing and the `Content-Length` agrees with that.
    ShortBy(usize),
    /// More bytes than the file has, and no `Content-Length`.
    ExtraBytes(usize),
    /// The connection closes after so many bytes.
    CutAfter(usize),
    /// Silence after so many bytes, for so long; then the rest.
    StallAfter(usize, Duration),
    /// So many bytes at a time, and a pause after each.
    Slow(usize, Duration),
    /// The bits of the byte at this offset are inverted.
    FlipByte(usize),
    /// The body claims to be compressed.
    Gzip,
    /// The body never ends; there is no `Content-Length`.
    Endless,
    /// All of a blob although a part of it was asked for, as servers do that know no ranges.
    IgnoreRange,
    /// The part that was asked for, under the name of another.
    WrongRange,
}

/// Which of the two servers was asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The registry.
    Registry,
    /// The content network.
    Cdn,
}

/// A request as it came.
#[derive(Clone, Debug)]
pub struct Request {
    /// Who was asked.
    pub side: Side,
    /// `GET`, `HEAD`, ….
    pub method: String,
    /// Path and query.
    pub path: String,
    /// The header lines, names in lower case.
    pub headers: BTreeMap<String, String>,
}

/// A registry that runs until it is dropped.
#[derive(Debug)]
pub struct FakeRegistry {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    registry: SocketAddr,
    cdn: SocketAddr,
    stock: Mutex<Stock>,
    requests: Mutex<Vec<Request>>,
    bytes_served: AtomicU64,
    stopping: AtomicBool,
}

#[derive(Debug)]
struct Stock {
    manifests: BTreeMap<String, Vec<u8>>,
    blobs: BTreeMap<Digest, Arc<Vec<u8>>>,
    pages: BTreeMap<String, Page>,
    manner: Manner,
    wants_token: bool,
    faults: Vec<PlannedFault>,
}

/// What is at a path that is no registry's.
#[derive(Clone, Debug)]
enum Page {
    /// Bytes, with these header lines.
    Bytes(Arc<Vec<u8>>, Vec<(&'static str, String)>),
    /// A blob on the content network.
    Elsewhere(Digest),
}

#[derive(Debug)]
struct PlannedFault {
    path_part: String,
    times_left: usize,
    fault: Fault,
}

impl FakeRegistry {
    /// The token that the registry hands out and, once told to, asks for.
    pub const TOKEN: &str = "anonymous-token";

    /// Two servers with nothing to offer.
    ///
    /// # Errors
    /// When there are no ports to listen on.
    pub fn start() -> io::Result<Self> {
        let registry = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let cdn = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let stock = Stock {
            manifests: BTreeMap::new(),
            blobs: BTreeMap::new(),
            pages: BTreeMap::new(),
            manner: Manner::Redirect,
            wants_token: false,
            faults: Vec::new(),
        };
        let shared = Arc::new(Shared {
            registry: registry.local_addr()?,
            cdn: cdn.local_addr()?,
            stock: Mutex::new(stock),
            requests: Mutex::default(),
            bytes_served: AtomicU64::new(0),
            stopping: AtomicBool::new(false),
        });
        for (listener, side) in [(registry, Side::Registry), (cdn, Side::Cdn)] {
            let shared = Arc::clone(&shared);
            thread::spawn(move || shared.accept(&listener, side));
        }
        Ok(Self { shared })
    }

    /// The base URL of the registry, `http://127.0.0.1:PORT`.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.shared.registry)
    }

    /// The base URL of the content network.
    #[must_use]
    pub fn cdn_url(&self) -> String {
        format!("http://{}", self.shared.cdn)
    }

    /// A reference to `model`, written `namespace/model:tag`, at this registry.
    #[must_use]
    pub fn name(&self, model: &str) -> String {
        format!("{}/{model}", self.url())
    }

    /// Offers a model: a configuration and layers by media type. Answers with its manifest.
    ///
    /// # Errors
    /// When they do not make a manifest.
    pub fn add_model(
        &self,
        model: &str,
        config: &[u8],
        layers: &[(&str, &[u8])],
    ) -> Result<Manifest, Box<dyn Error>> {
        let config = self.add_file(MediaType::DOCKER_CONFIG, config);
        let layers = layers.iter().map(|(media_type, bytes)| self.add_file(media_type, bytes)).collect();
        let manifest = Manifest::compose(config, layers)?;
        self.add_manifest(model, manifest.raw());
        Ok(manifest)
    }

    /// Offers bytes as the manifest of `model`, whatever they are.
    pub fn add_manifest(&self, model: &str, raw: &[u8]) {
        let (repository, tag) = model.split_once(':').unwrap_or((model, "latest"));
        let path = |name: &str| format!("/v2/{repository}/manifests/{name}");
        let mut stock = self.shared.stock();
        stock.manifests.insert(path(&Digest::of(raw).to_string()), raw.to_vec());
        stock.manifests.insert(path(tag), raw.to_vec());
    }

    /// Offers a blob in every repository.
    pub fn add_blob(&self, bytes: impl Into<Vec<u8>>) -> Digest {
        let bytes = bytes.into();
        let digest = Digest::of(&bytes);
        self.shared.stock().blobs.insert(digest, Arc::new(bytes));
        digest
    }

    /// Offers bytes at a path, as a web server does; a query does not matter.
    pub fn add_page(&self, path: &str, bytes: &[u8], headers: &[(&'static str, &str)]) {
        let headers = headers.iter().map(|(name, value)| (*name, (*value).to_owned())).collect();
        let page = Page::Bytes(Arc::new(bytes.to_vec()), headers);
        self.shared.stock().pages.insert(path.to_owned(), page);
    }

    /// Offers a repository as Hugging Face does: its branch `main` stands for `commit`, its files
    /// are listed with their digests and handed out by redirects to the content network.
    pub fn add_repository(&self, repository: &str, commit: &str, files: &[(&str, &[u8])]) {
        let refs =
            json!({ "branches": [{ "name": "main", "ref": "refs/heads/main", "targetCommit": commit }] });
        self.add_page(&format!("/api/models/{repository}/refs"), refs.to_string().as_bytes(), &[]);
        let mut tree = vec![json!({ "type": "file", "oid": "1f", "size": 3, "path": "README.md" })];
        for (path, bytes) in files {
            let digest = self.add_blob(*bytes);
            let oid = digest.to_string().replace("sha256:", "");
            let lfs = json!({ "oid": oid, "size": bytes.len(), "pointerSize": 130 });
            tree.push(json!({ "type": "file", "oid": "1f", "size": bytes.len(), "path": path, "lfs": lfs }));
            let place = format!("/{repository}/resolve/{commit}/{path}");
            self.shared.stock().pages.insert(place, Page::Elsewhere(digest));
        }
        let tree = Json::from(tree).to_string();
        self.add_page(&format!("/api/models/{repository}/tree/{commit}"), tree.as_bytes(), &[]);
    }

    fn add_file(&self, media_type: &str, bytes: &[u8]) -> Descriptor {
        let digest = self.add_blob(bytes);
        Descriptor { media_type: MediaType::new(media_type), digest, size: bytes.len() as u64 }
    }

    /// From now on blobs are handed out in this manner.
    pub fn set_manner(&self, manner: Manner) {
        self.shared.stock().manner = manner;
    }

    /// From now on the registry answers 401 unless it is shown [`Self::TOKEN`], which its own
    /// token service gives to anybody.
    pub fn require_token(&self) {
        self.shared.stock().wants_token = true;
    }

    /// The next `times` requests whose path contains `path_part` are answered wrongly. Paths are
    /// `/v2/…/manifests/…`, `/v2/…/blobs/…`, `/token` and, on the content network, `/cdn/…`; in
    /// the [`Manner`]s without redirects a blob's bytes come from `/blobs/`.
    pub fn add_fault(&self, path_part: &str, times: usize, fault: Fault) {
        let planned = PlannedFault { path_part: path_part.to_owned(), times_left: times, fault };
        self.shared.stock().faults.push(planned);
    }

    /// From now on nothing is answered wrongly.
    pub fn clear_faults(&self) {
        self.shared.stock().faults.clear();
    }

    /// From now on those requests are answered rightly that were to be answered wrongly for having
    /// `path_part` in their path.
    pub fn clear_faults_of(&self, path_part: &str) {
        self.shared.stock().faults.retain(|planned| planned.path_part != path_part);
    }

    /// All that both servers were asked so far.
    #[must_use]
    pub fn requests(&self) -> Vec<Request> {
        self.shared.requests.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// How many bytes of blobs were written to clients so far.
    #[must_use]
    pub fn bytes_served(&self) -> u64 {
        self.shared.bytes_served.load(Ordering::Relaxed)
    }

    /// Whether the content network was shown a token or cookie.
    #[must_use]
    pub fn credentials_leaked(&self) -> bool {
        let secret =
            |request: &Request| ["authorization", "cookie"].map(|name| request.headers.contains_key(name));
        self.requests().iter().any(|request| request.side == Side::Cdn && secret(request).contains(&true))
    }
}

impl Drop for FakeRegistry {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Ordering::Relaxed);
        for address in [self.shared.registry, self.shared.cdn] {
            // Wakes the thread that accepts. If that fails, it ends with the process.
            drop(TcpStream::connect(address));
        }
    }
}

impl Shared {
    fn stock(&self) -> MutexGuard<'_, Stock> {
        self.stock.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn accept(self: &Arc<Self>, listener: &TcpListener, side: Side) {
        for stream in listener.incoming() {
            if self.stopping.load(Ordering::Relaxed) {
                return;
            }
            let Ok(stream) = stream else { continue };
            let shared = Arc::clone(self);
            // A client that hangs up is no news.
            thread::spawn(move || drop(shared.serve(stream, side)));
        }
    }

    fn serve(&self, mut stream: TcpStream, side: Side) -> io::Result<()> {
        let Some(request) = read_request(&mut stream, side)? else { return Ok(()) };
        self.requests.lock().unwrap_or_else(PoisonError::into_inner).push(request.clone());
        let answer = self.answer(&request);
        let mut head = format!("HTTP/1.1 {} Fake\r\nConnection: close\r\n", answer.status);
        let length = answer.content_length.map(|length| ("Content-Length", length.to_string()));
        for (name, value) in answer.headers.iter().cloned().chain(length) {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        stream.write_all(format!("{head}\r\n").as_bytes())?;
        if request.method == "HEAD" { Ok(()) } else { self.write_body(&mut stream, &answer) }
    }

    fn answer(&self, request: &Request) -> Answer {
        let fault = self.stock().next_fault(&request.path);
        let mut request = request.clone();
        if matches!(fault, Some(Fault::IgnoreRange)) {
            request.headers.remove("range");
        }
        let answer = match fault.as_ref().and_then(|fault| replaced(fault, &request)) {
            Some(answer) => return answer,
            None => self.honest_answer(&request),
        };
        match fault {
            Some(fault) => altered(answer, fault),
            None => answer,
        }
    }

    fn honest_answer(&self, request: &Request) -> Answer {
        let stock = self.stock();
        let path = request.path.split('?').next().unwrap_or_default();
        let digest = path.rsplit('/').next().and_then(|name| name.parse::<Digest>().ok());
        let blob = digest.and_then(|digest| stock.blobs.get(&digest));
        let token = format!("Bearer {}", FakeRegistry::TOKEN);
        let may_read = !stock.wants_token || request.headers.get("authorization") == Some(&token);
        match (request.side, blob) {
            (Side::Cdn, Some(blob)) if request.path.contains("?signature=") => blob_answer(blob, request),
            (Side::Cdn, _) => Answer::new(403, ""),
            _ if path == "/token" => Answer::new(200, format!(r#"{{"token":"{}"}}"#, FakeRegistry::TOKEN)),
            _ if !may_read => challenge(&format!("http://{}/token", self.registry)),
            (_, Some(blob)) if path.contains("/blobs/") => match stock.manner {
                Manner::Direct => blob_answer(blob, request),
                Manner::RelativeLocation => blob_answer(blob, request).with("Location", "?__sign=fake"),
                Manner::Redirect => self.moved(digest),
            },
            _ => match stock.manifests.get(path) {
                Some(raw) => Answer::new(200, raw.clone()).with("Content-Type", "text/plain; charset=utf-8"),
                None => match stock.pages.get(path) {
                    Some(Page::Bytes(bytes, headers)) => {
                        let mut answer = blob_answer(bytes, request);
                        // Lists of files are no blobs; files are, wherever they lie.
                        answer.is_blob = path.ends_with(".gguf");
                        headers.iter().fold(answer, |answer, (name, value)| answer.with(name, value))
                    }
                    Some(Page::Elsewhere(digest)) => self.moved(Some(*digest)),
                    None => Answer::new(404, r#"{"errors":[{"code":"MANIFEST_UNKNOWN"}]}"#),
                },
            },
        }
    }

    /// To the content network.
    fn moved(&self, digest: Option<Digest>) -> Answer {
        let name = digest.map(|digest| digest.to_string()).unwrap_or_default();
        Answer::new(307, "moved").with("Location", format!("http://{}/cdn/{name}?signature=1", self.cdn))
    }

    fn write_body(&self, stream: &mut TcpStream, answer: &Answer) -> io::Result<()> {
        let (first, rest) = match answer.fault {
            Some(Fault::StallAfter(count, _)) => answer.body.split_at(count.min(answer.body.len())),
            _ => (answer.body.as_slice(), [].as_slice()),
        };
        let (chunk_bytes, pause) = match answer.fault {
            Some(Fault::Slow(chunk_bytes, pause)) => (chunk_bytes.max(1), pause),
            _ => (1 << 16, Duration::ZERO),
        };
        let mut send = |bytes: &[u8]| {
            stream.write_all(bytes)?;
            if answer.is_blob {
                self.bytes_served.fetch_add(bytes.len() as u64, Ordering::Relaxed);
            }
            thread::sleep(pause);
            Ok::<_, io::Error>(())
        };
        first.chunks(chunk_bytes).try_for_each(&mut send)?;
        if let Some(Fault::StallAfter(_, pause)) = answer.fault {
            thread::sleep(pause);
        }
        rest.chunks(chunk_bytes).try_for_each(&mut send)?;
        if matches!(answer.fault, Some(Fault::Endless)) {
            loop {
                send(&[0; 1 << 16])?;
            }
        }
        Ok(())
    }
}

impl Stock {
    fn next_fault(&mut self, path: &str) -> Option<Fault> {
        let applies =
            |planned: &&mut PlannedFault| planned.times_left > 0 && path.contains(&planned.path_part);
        let planned = self.faults.iter_mut().find(applies)?;
        planned.times_left -= 1;
        Some(planned.fault.clone())
    }
}
