//! A client for model sources: OCI registries, Ollama's, Hugging Face, and plain files over HTTP.
//!
//! [`RegistryClient`] resolves a name to a [`RemoteModel`] and opens its [`RemoteFile`]s as streams of bytes,
//! whole or by range. It sends the user's [`credentials`] where a registry requires them.
//!
//! ```
//! # use std::io::{Read as _, Write as _};
//! use blobd_registry::{RegistryClient, RegistryPolicy};
//! # let manifest = r#"{"schemaVersion":2,"config":{"mediaType":"application/vnd.docker.container.image.v1+json","digest":"sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a","size":2},"layers":[{"mediaType":"application/vnd.ollama.image.model","digest":"sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad","size":3}]}"#;
//! # let listener = std::net::TcpListener::bind("127.0.0.1:0")?;
//! # let address = listener.local_addr()?;
//! # std::thread::spawn(move || {
//! #     for stream in listener.incoming() {
//! #         let mut stream = stream.unwrap();
//! #         let _request = stream.read(&mut [0; 4096]).unwrap();
//! #         let length = manifest.len();
//! #         write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n{manifest}").unwrap();
//! #     }
//! # });
//! # tokio::runtime::Runtime::new()?.block_on(async {
//! // A mirror that listens at `address`.
//! let mirrors = [("registry.ollama.ai".to_owned(), vec![format!("http://{address}")])];
//! let policy = RegistryPolicy { mirrors: mirrors.into(), ..RegistryPolicy::default() };
//! let client = RegistryClient::new(&policy)?;
//! let manifest = client.manifest(&"llama3:8b".parse()?).await?;
//! assert_eq!(manifest.layers()[0].size, 3);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! # })?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Servers are not trusted: every body has a limit that is enforced while reading, every wait has a time
//! limit, credentials are sent only to the registry they were configured for and to its token service, and no
//! registry can make this machine connect to an address of narrower [`AddressScope`] than the registry's own.
//!
//! Files are neither hashed nor stored here: a stream yields as many bytes as the manifest or the range says,
//! and the caller verifies the digest. The caller also resumes broken transfers, by the same [`RetryPolicy`]
//! that is used here for manifests.

// These macros panic if the descriptor cannot be written, such as a closed pipe.
#![warn(clippy::print_stdout, clippy::print_stderr)]

mod address_scope;
mod auth;
mod challenge;
mod connect_failure;
mod connector;
mod content_encoding;
mod counts;
pub mod credentials;
mod decoder;
mod error;
mod hint;
mod hub_model;
mod huggingface;
mod listing;
mod mirrors;
mod origin;
mod part;
mod proxy;
mod redirect;
mod refusal;
mod remote;
mod request;
mod resolve;
mod retry;
mod server_reason;
mod stream;
mod tags;
#[cfg(test)]
mod tests;
mod token_cache;
mod transport;
mod web;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use blobd_store_format::descriptor::Archive;
use blobd_store_format::digest::Digest;
use blobd_store_format::index::{IndexError, ManifestIndex};
use blobd_store_format::manifest::{Manifest, ManifestError};
use blobd_store_format::reference::Reference;
use hyper::header::{ACCEPT, HeaderValue};

pub use self::address_scope::AddressScope;
pub use self::connect_failure::ConnectFailure;
use self::counts::Counts;
pub use self::counts::Troubles;
use self::credentials::CredentialPolicy;
pub use self::decoder::Decoder;
pub use self::error::{Advice, FailureKind, RegistryError};
use self::mirrors::{Mirrors, first_of};
use self::origin::Registry;
pub use self::proxy::{Proxies, ProxyFault};
pub use self::remote::{Chosen, ChosenFile, KnownFile, PublishedModel, RemoteFile, RemoteModel};
use self::request::{Response, Target};
pub use self::retry::{Retry, RetryPolicy};
pub use self::server_reason::ServerReason;
pub use self::stream::{ByteStream, Sender};
use self::token_cache::TokenCache;
use self::transport::Transport;

/// The default of [`RegistryPolicy::stall_timeout`]. A working connection pauses for a few seconds at most, and a
/// broken one never sends anything. If a content network is still loading a cold file, the repeated request benefits
/// from what it has loaded.
pub const DEFAULT_STALL_TIMEOUT: Duration = Duration::from_secs(15);

/// The configuration of a [`RegistryClient`].
#[derive(Clone, Debug, Default)]
pub struct RegistryPolicy {
    /// Base URLs used instead of a registry's host, in this order, such as `http://127.0.0.1:4711` for
    /// `registry.ollama.ai`.
    pub mirrors: BTreeMap<String, Vec<String>>,
    /// Registries, as `HOST:PORT`, that are requested over plain HTTP.
    pub insecure: Vec<String>,
    /// PEM files with certificate authorities that are trusted in addition to the machine's own.
    pub ca_files: Vec<PathBuf>,
    /// The credentials that may be used.
    pub credentials: CredentialPolicy,
    /// When a failed request is repeated.
    pub retry: RetryPolicy,
    /// How long a file may arrive without a byte before its connection is given up; [`DEFAULT_STALL_TIMEOUT`] if
    /// absent.
    pub stall_timeout: Option<Duration>,
}

impl RegistryPolicy {
    /// Whether this can be the base URL of a mirror: `http` or `https`, a host, and perhaps a port and a path.
    #[must_use]
    pub fn is_base_url(text: &str) -> bool {
        origin::Registry::at(text).is_some()
    }

    /// Restricts the policy to blobd's own credentials, for a daemon that serves several users. All of them can read
    /// what the daemon pulls, so it must not use the personal credentials of the user that it runs as.
    #[must_use]
    pub fn for_many_users(self) -> Self {
        Self { credentials: self.credentials.own_alone(), ..self }
    }
}

/// A client of all registries. Its clones share connections and tokens.
#[derive(Clone, Debug)]
pub struct RegistryClient {
    shared: Arc<Shared>,
    counts: Arc<Counts>,
}

#[derive(Debug)]
struct Shared {
    mirrors: Arc<Mirrors>,
    transport: Transport,
    tokens: Arc<TokenCache>,
    credentials: Arc<CredentialPolicy>,
    retry: RetryPolicy,
    limits: Limits,
}

impl RegistryClient {
    /// Makes a client without connecting. Reads the certificate files, so it blocks for some milliseconds:
    /// call it at start-up, not on an async worker.
    ///
    /// Uses the proxies that the environment names ([`Proxies`]). A malformed proxy variable is reported by each
    /// request that would use it, not here.
    ///
    /// # Errors
    /// [`RegistryError::Mirror`] and [`RegistryError::Certificates`] when the policy is unusable.
    pub fn new(policy: &RegistryPolicy) -> Result<Self, RegistryError> {
        let limits = Limits::default();
        let limits = Limits { silence: policy.stall_timeout.unwrap_or(limits.silence), ..limits };
        Self::with_limits(policy, limits, Proxies::from_environment())
    }

    fn with_limits(policy: &RegistryPolicy, limits: Limits, proxies: Proxies) -> Result<Self, RegistryError> {
        let shared = Shared {
            mirrors: Arc::new(Mirrors::new(policy)?),
            transport: Transport::new(&policy.ca_files, &limits, proxies)?,
            tokens: Arc::default(),
            credentials: Arc::new(policy.credentials.clone()),
            retry: policy.retry,
            limits,
        };
        Ok(Self { shared: Arc::new(shared), counts: Arc::default() })
    }

    /// A copy of this client with new connections, so that a connection that delivered wrong bytes, for example through
    /// a damaged proxy, is not used again.
    #[must_use]
    pub fn with_fresh_connections(&self) -> Self {
        let Shared { mirrors, transport, tokens, credentials, retry, limits } = &*self.shared;
        let shared = Shared {
            mirrors: Arc::clone(mirrors),
            transport: transport.without_connections(),
            tokens: Arc::clone(tokens),
            credentials: Arc::clone(credentials),
            retry: *retry,
            limits: *limits,
        };
        Self { shared: Arc::new(shared), counts: Arc::clone(&self.counts) }
    }

    /// This client with the counters of `earlier`, which it replaces.
    #[must_use]
    pub fn continuing(self, earlier: &Self) -> Self {
        Self { counts: Arc::clone(&earlier.counts), ..self }
    }

    /// The manifest that `reference` names, or the only model in the image index that it names. Its digest is
    /// checked if the reference has one.
    ///
    /// # Errors
    /// [`RegistryError`] when there is none, it is malformed or not a model that blobd can serve, or
    /// the registry fails.
    pub async fn manifest(&self, reference: &Reference) -> Result<Manifest, RegistryError> {
        let servers = &self.shared.mirrors.for_model(reference)?;
        let ask = |registry| self.manifest_at(registry, reference);
        self.retried(|| first_of(servers, reference.host(), ask)).await
    }

    async fn manifest_at(
        &self,
        registry: &Registry,
        reference: &Reference,
    ) -> Result<Manifest, RegistryError> {
        match self.manifest_of(registry, reference).await {
            Err(error @ RegistryError::NotFound { .. }) => {
                Err(self.with_known_tags(registry, reference, error).await)
            }
            outcome => outcome,
        }
    }

    async fn manifest_of(
        &self,
        registry: &Registry,
        reference: &Reference,
    ) -> Result<Manifest, RegistryError> {
        let response = match reference.digest() {
            None => self.get_manifest(registry, reference, reference.tag()).await?,
            Some(pin) => match self.get_manifest(registry, reference, &pin.to_string()).await {
                // Ollama's registry may not serve manifests by digest, since its own client never requests one. The tag
                // works too while it still points to the pinned manifest.
                Err(RegistryError::NotFound { .. }) => {
                    self.get_manifest(registry, reference, reference.tag()).await?
                }
                response => response?,
            },
        };
        let raw = self.manifest_bytes(response, reference.digest()).await?;
        let malformed = |error| RegistryError::unusable_model(reference, &error);
        let manifest = match Manifest::parse(raw.clone()) {
            Err(ManifestError::Index) => self.indexed_manifest(registry, reference, &raw).await?,
            parsed => parsed.map_err(malformed)?,
        };
        refuse_unusable(reference, &manifest)?;
        Ok(manifest)
    }

    /// The only model of an image index. A nested index is refused, like anything else that is not a manifest.
    async fn indexed_manifest(
        &self,
        registry: &Registry,
        reference: &Reference,
        raw: &[u8],
    ) -> Result<Manifest, RegistryError> {
        let malformed = |error: IndexError| RegistryError::unusable_model(reference, &error);
        let index = ManifestIndex::parse(raw).map_err(malformed)?;
        let chosen = index.model().map_err(malformed)?.digest;
        let response = match self.get_manifest(registry, reference, &chosen.to_string()).await {
            Err(RegistryError::NotFound { host, reason, .. }) => {
                return Err(RegistryError::BlobMissing { digest: chosen, host, reason });
            }
            response => response?,
        };
        let raw = self.manifest_bytes(response, Some(chosen)).await?;
        Manifest::parse(raw).map_err(|error| RegistryError::unusable_model(reference, &error))
    }

    /// Reads the body and checks it against the announced and the expected digest.
    async fn manifest_bytes(
        &self,
        response: Response,
        expected: Option<Digest>,
    ) -> Result<Vec<u8>, RegistryError> {
        let (host, announced) = (response.host(), announced_digest(&response));
        let raw = response.document("manifest", Manifest::MAX_BYTES, self.shared.limits.document).await?;
        if raw.trim_ascii_start().starts_with(b"<") {
            return Err(RegistryError::web_page(host));
        }
        let found = Digest::of(&raw);
        match announced.into_iter().chain(expected).find(|expected| *expected != found) {
            Some(expected) => Err(RegistryError::unusable(
                host,
                format!("manifest: wrong digest: expected {expected}, found {found}"),
            )),
            None => Ok(raw),
        }
    }

    async fn get_manifest(
        &self,
        registry: &Registry,
        reference: &Reference,
        name: &str,
    ) -> Result<Response, RegistryError> {
        let path = format!("manifests/{name}");
        let target = Target::new(registry, reference, &path)?;
        self.shared.get(&target.with(ACCEPT, HeaderValue::from_static(MANIFEST_TYPES))).await
    }
}

/// Refuses models that could be stored but not opened, before anything is downloaded.
fn refuse_unusable(reference: &Reference, manifest: &Manifest) -> Result<(), RegistryError> {
    for (file, name) in manifest.files().zip(manifest.names()) {
        if file.media_type.archive_of_weights() != Some(Archive::Unknown) {
            continue;
        }
        let name = name.map_or_else(|| file.digest.short(), str::to_owned);
        let what = format!(
            "weights {name}: wrong type of archive: expected one without compression, or with gzip or zstd, found {}; pull \
             another variant, or unpack them and `blobd import` the file",
            file.media_type
        );
        return Err(RegistryError::unusable_model(reference, &what));
    }
    let layers = manifest.layers();
    if !layers.is_empty() && layers.iter().all(|layer| layer.media_type.is_container_layer()) {
        return Err(RegistryError::unusable_model(reference, &"is a container image, not a model"));
    }
    Ok(())
}

/// Time limits for one registry. Tests shorten them.
#[derive(Clone, Copy, Debug)]
struct Limits {
    /// For opening a TCP connection.
    connect: Duration,
    /// From a request to the head of its response, including connecting and TLS. Requests for files also have the limit
    /// `silence`.
    head: Duration,
    /// For the whole body of a manifest or a token.
    document: Duration,
    /// For the body of a refusal. The error quotes what has arrived by then.
    refusal: Duration,
    /// For the next byte of a file, or the head of the response with it.
    silence: Duration,
    /// The window in which at least `slowest_bytes` of a blob must arrive.
    stall: Duration,
    /// The fewest bytes of a blob that must arrive in `stall`.
    slowest_bytes: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(10),
            // A server may compute a list or ask another one before it responds.
            head: Duration::from_secs(30),
            // 4 MiB at 70 KB/s. With the stall limit alone, a server could send one byte a second for weeks.
            document: Duration::from_secs(60),
            // A short body arrives together with the head of the response.
            refusal: Duration::from_secs(2),
            silence: DEFAULT_STALL_TIMEOUT,
            // Ollama's client uses the same limit.
            stall: Duration::from_secs(30),
            // 1 KiB/s: slower than any link on which a model is worth waiting for.
            slowest_bytes: 30 << 10,
        }
    }
}

/// Accepted media types: manifests and image indexes of Docker and OCI. Some registries serve only one of the two.
const MANIFEST_TYPES: &str = "application/vnd.docker.distribution.manifest.v2+json, \
    application/vnd.oci.image.manifest.v1+json, \
    application/vnd.oci.image.index.v1+json, \
    application/vnd.docker.distribution.manifest.list.v2+json";

/// The digest in the response's header, if it is well-formed. Ollama's registry writes its own header without
/// `sha256:`.
fn announced_digest(response: &Response) -> Option<Digest> {
    let claim = |name: &str| {
        let text = response.headers().get(name)?.to_str().ok()?;
        text.parse().or_else(|_| Digest::from_hex(text)).ok()
    };
    claim("docker-content-digest").or_else(|| claim("ollama-content-digest"))
}
