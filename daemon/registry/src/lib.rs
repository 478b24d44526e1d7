//! A client for model sources: OCI registries, Ollama's, Hugging Face, and plain files over HTTP.
//!
//! [`RegistryClient`] resolves a name to a [`RemoteModel`] and opens its [`RemoteFile`]s as streams of bytes,
//! whole or by range. It uploads files and manifests to a [`Destination`] at a registry. It sends the user's
//! [`credentials`] where a registry requires them.
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
//!
//! Modules, each group built on the next: sources (`resolve`, `hub_model`, `huggingface`, `web`, `manifest`);
//! files and their bytes (`published`, `remote`, `part`, `stream`, `decoder`); uploads (`upload`), tensor indexes (`tensor_index`), models with a layer per tensor (`tensor_layers`); one request (`request`, `auth`, `refusal`, `retry`,
//! `mirrors`); connections (`transport`, `server_headers`, `connector`, `proxy`, `address_scope`).

// These macros panic if the descriptor cannot be written, such as a closed pipe.
#![warn(clippy::print_stdout, clippy::print_stderr)]
#![allow(missing_docs, reason = "a name that says it all needs no comment")]

mod address_scope;
mod artifacts;
mod auth;
mod challenge;
mod connect_failure;
mod connector;
mod content_encoding;
pub mod credentials;
mod decoder;
mod error;
mod hint;
mod hub_model;
mod huggingface;
mod listing;
mod manifest;
mod mirrors;
mod origin;
mod part;
mod peers;
mod policy;
mod proxy;
mod published;
mod refusal;
mod regular_file;
mod remote;
mod request;
mod resolve;
mod retry;
mod server_headers;
mod server_reason;
mod signatures;
mod stream;
mod tensor_index;
mod tensor_layers;

#[cfg(test)]
mod tests;
mod token_cache;
mod transport;
mod upload;
mod web;
mod web_file;

use std::sync::Arc;

use hyper::header::HeaderValue;

pub use self::address_scope::AddressScope;
use self::artifacts::ReferrersLists;
pub use self::connect_failure::ConnectFailure;
use self::credentials::CredentialPolicy;
pub use self::decoder::Decoder;
use self::error::Result;
pub use self::error::{Advice, FailureKind, RegistryError};
pub use self::huggingface::HubListing;
pub use self::listing::TreeFile;
use self::mirrors::Mirrors;
use self::peers::Peers;
use self::policy::Limits;
pub use self::policy::{DEFAULT_STALL_TIMEOUT, RegistryPolicy};
pub use self::proxy::{Proxies, ProxyFault};
pub use self::published::{Chosen, ChosenFile, PublishedModel, RemoteModel};
pub use self::regular_file::{open_regular, read_regular};
pub use self::remote::{ByteStream, KnownFile, RemoteFile};
use self::retry::Counts;
pub use self::retry::{FailureCounts, Retry, RetryPolicy};
pub use self::server_reason::ServerReason;
pub use self::signatures::{FetchedSignatures, NewSignature};
pub use self::stream::Sender;
pub use self::tensor_index::{NewTensorIndex, PackedRecipe, PackedRecipeError};
use self::token_cache::TokenCache;
use self::transport::Transport;
pub use self::upload::{Delivery, Destination, UploadContent, UploadError};

/// A client of all registries. Its clones share connections and tokens.
#[derive(Clone, Debug)]
pub struct RegistryClient {
    shared: Arc<Shared>,
    counts: Arc<Counts>,
}

#[derive(Debug)]
struct Shared {
    mirrors: Arc<Mirrors>,
    peers: Arc<Peers>,
    transport: Transport,
    tokens: Arc<TokenCache>,
    referrers: Arc<ReferrersLists>,
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
    /// [`RegistryError::Mirror`], [`RegistryError::Header`] and [`RegistryError::Certificates`] when the policy is unusable.
    pub fn new(policy: &RegistryPolicy) -> Result<Self> {
        let limits = Limits::default();
        let limits = Limits { silence: policy.stall_timeout.unwrap_or(limits.silence), ..limits };
        Self::with_limits(policy, limits, Proxies::from_environment())
    }

    fn with_limits(policy: &RegistryPolicy, limits: Limits, proxies: Proxies) -> Result<Self> {
        let shared = Shared {
            mirrors: Arc::new(Mirrors::new(policy)?),
            peers: Arc::new(Peers::new(policy)?),
            transport: Transport::new(policy, &limits, proxies)?,
            tokens: Arc::default(),
            referrers: Arc::default(),
            credentials: Arc::new(policy.credentials.clone()),
            retry: policy.retry,
            limits,
        };
        Ok(Self { shared: Arc::new(shared), counts: Arc::default() })
    }

    /// A copy of this client with new connections, so that a connection that delivered wrong bytes, for example through
    /// a damaged proxy, is not used again.
    pub fn with_fresh_connections(&self) -> Self {
        self.with_transport(self.shared.transport.without_connections())
    }

    /// A copy of this client for requests that are sent because another server was asked, with connections of its own. `via`
    /// names the servers in between, as the header of that name does. A value that is not allowed in a header is left out.
    pub fn relaying(&self, via: &str) -> Self {
        match HeaderValue::from_str(via) {
            Ok(via) => self.with_transport(self.shared.transport.relaying(via)),
            Err(_invalid) => self.clone(),
        }
    }

    fn with_transport(&self, transport: Transport) -> Self {
        let Shared { mirrors, peers, transport: _, tokens, referrers, credentials, retry, limits } =
            &*self.shared;
        let shared = Shared {
            mirrors: Arc::clone(mirrors),
            peers: Arc::clone(peers),
            transport,
            tokens: Arc::clone(tokens),
            referrers: Arc::clone(referrers),
            credentials: Arc::clone(credentials),
            retry: *retry,
            limits: *limits,
        };
        Self { shared: Arc::new(shared), counts: Arc::clone(&self.counts) }
    }

    /// Whether other machines are asked for files before their registries.
    pub fn has_peers(&self) -> bool {
        self.shared.peers.has_any()
    }

    /// Whether a peer may have the file: at least one has not said that it lacks it.
    pub fn may_be_at_peer(&self, file: &RemoteFile) -> bool {
        file.digest().is_some_and(|digest| !self.shared.peers.for_file(digest).is_empty())
    }

    /// Asks none of the peers among these senders for a while, because what they sent was wrong.
    pub fn set_peers_aside<'s>(&self, senders: impl IntoIterator<Item = &'s Sender>) {
        senders.into_iter().for_each(|sender| self.shared.peers.set_aside_server(sender.server()));
    }

    /// This client with the counters of `earlier`, which it replaces.
    #[must_use]
    pub fn continuing(self, earlier: &Self) -> Self {
        Self { counts: Arc::clone(&earlier.counts), ..self }
    }
}
