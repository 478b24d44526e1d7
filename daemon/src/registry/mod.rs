//! The client of model registries: what a reference names, fetched over HTTP.
//!
//! It speaks the pull half of the OCI distribution protocol as registry.ollama.ai, hf.co and
//! plain OCI registries serve it, with the user's credentials where a registry asks for them.
//!
//! It promises that a broken or lying server does no harm: every body has a limit that is kept
//! while reading, every wait ends, credentials and tokens go only to the registry they were given
//! or made for and to its token service, and no registry can make the daemon speak to a host
//! nearer to it than the registry itself.
//!
//! It does not hash blobs: [`BlobStream`] yields as many bytes as the manifest says,
//! [`RangeStream`] as many as were asked for, and the store's ingest decides whether they are the
//! right ones. It does not resume a broken transfer.

mod access;
mod auth;
pub mod credentials;
mod dial;
mod error;
mod fetch;
mod grant;
mod origin;
mod range;
mod redirect;
mod stream;
#[cfg(test)]
mod tests;
mod zone;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use blobd_store_format::descriptor::Descriptor;
use blobd_store_format::digest::Digest;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::reference::Reference;
use hyper::header::HeaderValue;
use hyper_util::client::proxy::matcher::Matcher;

use self::credentials::CredentialPolicy;
use self::dial::Transport;
pub use self::error::{Advice, RealmRefusal, RedirectRefusal, RegistryError};
use self::fetch::{Answer, Target, What};
use self::grant::TokenCache;
use self::origin::Registry;
pub use self::range::{Part, RangeStream};
pub use self::stream::BlobStream;
pub use self::zone::Zone;

/// How registries are reached.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct RegistryPolicy {
    /// A registry's host and the base URL used in its place, such as `registry.ollama.ai` and
    /// `http://127.0.0.1:4711`.
    pub mirrors: BTreeMap<String, String>,
    /// PEM files with certificate authorities that are trusted beside the machine's own.
    pub ca_files: Vec<PathBuf>,
    /// The credentials there are.
    pub credentials: CredentialPolicy,
}

impl RegistryPolicy {
    /// The same for a daemon that serves several users: with no credentials but blobd's own. What
    /// it can pull all of them can read, so the rest of what its user has is none of theirs.
    #[must_use]
    pub fn for_many_users(self) -> Self {
        Self { credentials: self.credentials.own_alone(), ..self }
    }
}

/// A client of all registries. Its clones share connections and tokens.
#[derive(Clone, Debug)]
pub struct RegistryClient {
    shared: Arc<Shared>,
}

/// What the clones of a client share.
#[derive(Debug)]
struct Shared {
    mirrors: BTreeMap<String, Registry>,
    transport: Transport,
    tokens: TokenCache,
    credentials: Arc<CredentialPolicy>,
    limits: Limits,
}

impl RegistryClient {
    /// A client that has connected to nothing yet. It reads the certificate files, so it blocks
    /// for some milliseconds: call it at start-up, not on an async worker.
    ///
    /// Of the environment it honours `HTTPS_PROXY`, `ALL_PROXY` and `NO_PROXY`; plain HTTP never
    /// goes through a proxy.
    ///
    /// # Errors
    /// [`RegistryError::Mirror`] and [`RegistryError::Certificates`] when the policy is unusable.
    pub fn new(policy: &RegistryPolicy) -> Result<Self, RegistryError> {
        Self::with_limits(policy, Limits::default(), Matcher::from_env())
    }

    fn with_limits(policy: &RegistryPolicy, limits: Limits, proxies: Matcher) -> Result<Self, RegistryError> {
        let mirrors = policy.mirrors.iter().map(|(host, base)| {
            let mirror = Registry::at(base)
                .ok_or_else(|| RegistryError::Mirror { host: host.clone(), base: base.clone() })?;
            Ok((host.to_ascii_lowercase(), mirror))
        });
        let shared = Shared {
            mirrors: mirrors.collect::<Result<_, RegistryError>>()?,
            transport: Transport::new(&policy.ca_files, &limits, proxies)?,
            tokens: TokenCache::default(),
            credentials: Arc::new(policy.credentials.clone()),
            limits,
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// The manifest that `reference` names, checked, and equal to the digest it is pinned to.
    ///
    /// # Errors
    /// [`RegistryError`] when there is none, it is malformed, or the registry misbehaves.
    pub async fn manifest(&self, reference: &Reference) -> Result<Manifest, RegistryError> {
        let answer = match reference.digest() {
            None => self.get_manifest(reference, reference.tag()).await?,
            Some(pin) => match self.get_manifest(reference, &pin.to_string()).await {
                // Ollama's own client never asks by digest, so its registry need not answer that;
                // the tag does as well if it still points at the pinned manifest.
                Err(RegistryError::NotFound { .. }) => self.get_manifest(reference, reference.tag()).await?,
                answer => answer?,
            },
        };
        let announced = announced_digest(&answer);
        let host = answer.host();
        let raw = answer.document("manifest", Manifest::MAX_BYTES, self.shared.limits.document).await?;
        let manifest = parse_manifest(reference, &host, raw)?;
        for expected in announced.into_iter().chain(reference.digest()) {
            if manifest.digest() != expected {
                let found = manifest.digest();
                return Err(RegistryError::DigestDiffers { host, expected, found });
            }
        }
        Ok(manifest)
    }

    /// Starts to fetch one of the files that `reference`'s manifest lists.
    ///
    /// # Errors
    /// [`RegistryError`] when the registry does not have it, announces another size than
    /// `file.size`, or misbehaves.
    pub async fn blob(&self, reference: &Reference, file: &Descriptor) -> Result<BlobStream, RegistryError> {
        let registry = self.registry(reference)?;
        let path = format!("blobs/{}", file.digest);
        let target = Target::new(&registry, reference, &path, What::Blob(file.digest), None)?;
        let answer = self.shared.get(&target).await?;
        BlobStream::open(answer, file, &self.shared.limits)
    }

    async fn get_manifest(&self, reference: &Reference, name: &str) -> Result<Answer, RegistryError> {
        let registry = self.registry(reference)?;
        let path = format!("manifests/{name}");
        let accept = HeaderValue::from_static(ACCEPT);
        let target = Target::new(&registry, reference, &path, What::Manifest, Some(accept))?;
        self.shared.get(&target).await
    }

    fn registry(&self, reference: &Reference) -> Result<Registry, RegistryError> {
        match self.shared.mirrors.get(&reference.host().to_ascii_lowercase()) {
            Some(mirror) => Ok(mirror.clone()),
            None => Registry::named(reference),
        }
    }
}

/// How long a registry may take, and how patient blobd is. Tests shorten them.
#[derive(Clone, Copy, Debug)]
struct Limits {
    /// Until a TCP connection stands.
    connect: Duration,
    /// From a request to the head of its answer, connecting and TLS included.
    head: Duration,
    /// For the whole body of a manifest or a token.
    document: Duration,
    /// Waiting for the bytes of a blob while fewer than `slowest_bytes` come.
    stall: Duration,
    /// The fewest bytes of a blob that must come in `stall`.
    slowest_bytes: u64,
    /// Before the second try; doubled before the third.
    backoff: Duration,
    /// The longest wait that a `Retry-After` can ask for.
    longest_wait: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(10),
            // The same as for a stall: a content network may fetch a cold file before it answers.
            head: Duration::from_secs(30),
            // 4 MiB at 70 KB/s; the stall rule alone would let one byte a second go on for weeks.
            document: Duration::from_secs(60),
            // Ollama waits as long.
            stall: Duration::from_secs(30),
            // 1 KiB/s: slower than any link on which a model is worth waiting for.
            slowest_bytes: 30 << 10,
            backoff: Duration::from_millis(500),
            // A user waits at the prompt: rather fail and say so.
            longest_wait: Duration::from_secs(5),
        }
    }
}

/// Manifests of both families; also their indexes, because a registry that has nothing else would
/// answer 404, and "is an index of manifests" says more.
const ACCEPT: &str = "application/vnd.docker.distribution.manifest.v2+json, \
    application/vnd.oci.image.manifest.v1+json, \
    application/vnd.oci.image.index.v1+json, \
    application/vnd.docker.distribution.manifest.list.v2+json";

/// The digest that the registry claims for the manifest, if it claims one that is well-formed.
/// Ollama's registry writes its own header without `sha256:`.
fn announced_digest(answer: &Answer) -> Option<Digest> {
    let claim = |name: &str| {
        let text = answer.headers().get(name)?.to_str().ok()?;
        text.parse().or_else(|_| Digest::from_hex(text)).ok()
    };
    claim("docker-content-digest").or_else(|| claim("ollama-content-digest"))
}

fn parse_manifest(reference: &Reference, host: &str, raw: Vec<u8>) -> Result<Manifest, RegistryError> {
    if raw.trim_ascii_start().starts_with(b"<") {
        return Err(RegistryError::WebPage { host: host.to_owned() });
    }
    Manifest::parse(raw)
        .map_err(|error| RegistryError::Manifest { reference: Box::new(reference.clone()), error })
}
