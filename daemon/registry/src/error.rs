//! The errors of requests to registries.

use std::path::PathBuf;
use std::time::Duration;

use blobd_store_format::digest::Digest;
use blobd_store_format::reference::Reference;
use hyper::StatusCode;

use super::connect_failure::ConnectFailure;
use super::credentials::CredentialError;
use super::origin::InvalidHost;
use super::proxy::ProxyFault;
use super::server_reason::ServerReason;

/// The result of a request to a registry.
pub(super) type Result<T, E = RegistryError> = std::result::Result<T, E>;

/// Why a request to a registry failed, or its response cannot be used.
///
/// Messages name hosts, never URLs, because the query of a signed URL is a credential.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegistryError {
    #[error("{subject}: not found at {host}{reason}")]
    NotFound { subject: String, host: String, reason: ServerReason },
    #[error("blob {digest}: missing at {host} although the manifest names it{reason}; try again later")]
    BlobMissing { digest: Digest, host: String, reason: ServerReason },
    #[error("{subject}: not found at {host}{reason}{}", nearest_names(.nearest))]
    NoSuchName { subject: String, host: String, reason: ServerReason, nearest: String },
    #[error("{subject}: not found at {host}{reason}{}", latest.as_ref().map_or_else(String::new, |name| format!(", which has {name}")))]
    NoSuchTag {
        subject: String,
        host: String,
        reason: ServerReason,
        /// The name of the model with the tag `latest`, if the registry has one.
        latest: Option<Box<str>>,
        /// The web page that lists the model's tags, if the registry has such pages.
        page: Option<Box<str>>,
        /// What the name would be at Hugging Face: the user may have copied it from there without the host.
        hub: Option<Box<str>>,
    },
    #[error("{subject}: means several models at {host}: {}", few(candidates))]
    Ambiguous { subject: String, host: String, candidates: Vec<String>, example: String },
    #[error("{subject}: no GGUF file with a model at {host}, of {} GGUF files", others.len())]
    NoModel { subject: String, host: String, others: Vec<String>, example: String },
    #[error("{subject}: {} at {host}: {}", shards_missing(*count, missing), few(missing.iter().map(|(_, path)| path)))]
    MissingShards {
        subject: String,
        host: String,
        count: usize,
        /// The number of each missing shard, from 1, and its name.
        missing: Vec<(usize, String)>,
    },
    #[error(
        "{subject}: a projector and a draft can be chosen only from repositories at Hugging Face, patterns and a revision only for the name of one without a tag"
    )]
    NoChoice { subject: String },
    #[error("{subject}: denied by {host}{reason}; {advice}")]
    Denied { subject: String, host: String, reason: ServerReason, advice: Box<Advice> },
    #[error(transparent)]
    Credentials(#[from] CredentialError),
    #[error("model {reference}: {what}")]
    UnusableModel { reference: Box<Reference>, what: String },
    #[error("{subject}: {what}")]
    Unusable { subject: String, what: String },
    #[error(
        "{host}: files are not pulled over plain HTTP, where they can be changed in transit; use https, or \
         name the host in insecure_registries"
    )]
    PlainHttp { host: String },
    #[error("{host}: {reason}")]
    Unreachable { host: String, reason: ConnectFailure },
    #[error("{host}: connection broke after {received_bytes} bytes: {reason}")]
    Broken { host: String, received_bytes: u64, reason: String },
    #[error("{host}: connection broke after {sent_bytes} bytes were sent: {reason}")]
    BrokenUpload { host: String, sent_bytes: u64, reason: String },
    #[error("{host}: takes no models by the protocol of registries; publish the files with `hf upload`")]
    NoUploads { host: String },
    #[error("{host}: stalled for {seconds} s")]
    Stalled { host: String, seconds: u64 },
    #[error("{host}: {}{}", refusal(*.status, .reason), tls_hint(*.status, .reason, *.is_plain_http))]
    Status {
        host: String,
        status: u16,
        reason: ServerReason,
        is_plain_http: bool,
        /// The response's `Retry-After`.
        retry_after: Option<Duration>,
    },
    #[error("{host}: too many requests{reason}; try again {}", later(.retry_after.as_ref()))]
    TooManyRequests {
        host: String,
        reason: ServerReason,
        /// When it accepts requests again, if it says so.
        retry_after: Option<Duration>,
        is_anonymous: bool,
    },
    /// A refusal whose cause is known. The message is that of the refusal.
    #[error("{error}")]
    Explained { error: Box<RegistryError>, hint: String },
    #[error("{host}: {what} has more than {max_bytes} bytes, the limit")]
    TooLong { host: String, what: &'static str, max_bytes: u64 },
    #[error("{subject}: wrong size at {host}: expected {expected_bytes} bytes, found {found_bytes}")]
    SizeDiffers {
        subject: String,
        host: String,
        /// Bytes announced or received. If the body is too long, the bytes read before that was noticed.
        found_bytes: u64,
        /// Bytes that the manifest or the server's first response announces.
        expected_bytes: u64,
    },
    #[error("{subject}: wrong part from {host}: expected {expected}, found {found}")]
    RangeDiffers {
        subject: String,
        host: String,
        /// The response's `Content-Range` or length, cut to a printable length.
        found: String,
        expected: String,
    },
    #[error("host: expected a host name with at most a port, found {host:?}")]
    Host { host: String },
    #[error("mirror of {host}: expected http://HOST[:PORT] or https://HOST[:PORT], found {base:?}")]
    Mirror {
        host: String,
        /// The configured URL without its user and password.
        base: String,
    },
    #[error("headers: expected the base URL of a server with names and values of headers, found {found:?}")]
    Header {
        /// The wrong URL or name.
        found: String,
    },
    /// All mirrors of a host failed. The message is that of the most informative error.
    #[error("{error}")]
    AllFailed { error: Box<RegistryError>, others: Vec<String> },
    #[error(transparent)]
    Proxy(ProxyFault),
    #[error("certificate authorities {}: {reason}", path.display())]
    Certificates {
        /// The file; empty when TLS itself failed.
        path: PathBuf,
        reason: String,
    },
}

/// The kind of a [`RegistryError`], by what can be done about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureKind {
    /// There is no such model, tag or file.
    NotFound,
    /// The registry refuses, or the credentials for it cannot be used.
    Denied,
    /// The registry has no model under this name that blobd can store.
    UnusableModel,
    /// The name or the configuration is wrong.
    InvalidRequest,
    /// The registry or the connection to it fails.
    Upstream,
}

fn nearest_names(names: &str) -> String {
    if names.is_empty() { String::new() } else { format!("; the nearest names are {names}") }
}

/// When to try again, rounded up: a request that is a moment too early is refused again.
pub(super) fn later(wait: Option<&Duration>) -> String {
    let Some(seconds) = wait.map(Duration::as_secs) else { return "later".to_owned() };
    match seconds {
        0..=120 => format!("in {seconds} s"),
        121..=7200 => format!("in {} min", seconds.div_ceil(60)),
        _ => format!("in {} h", seconds.div_ceil(3600)),
    }
}

/// The meaning of a status, with the server's own sentence or else the standard name of the status.
fn refusal(status: u16, reason: &ServerReason) -> String {
    let phrase = StatusCode::from_u16(status).ok().and_then(|status| status.canonical_reason());
    let why = match (reason.sentence(), phrase) {
        (None, Some(phrase)) => format!(" ({phrase})"),
        _ => reason.to_string(),
    };
    match status {
        200 => format!("sent an error instead of a document{why}"),
        ..400 => format!("unexpected status {status}{why}"),
        400..500 => format!("refused with status {status}{why}"),
        500.. => format!("failed with status {status}{why}"),
    }
}

/// The first names of a list, and the number of the others.
pub(super) fn few(names: impl IntoIterator<Item = impl AsRef<str>>) -> String {
    const MAX: usize = 8;
    let names: Vec<_> = names.into_iter().collect();
    let first: Vec<&str> = names.iter().take(MAX).map(AsRef::as_ref).collect();
    match names.len().saturating_sub(MAX) {
        0 => first.join(", "),
        more => format!("{} and {more} more", first.join(", ")),
    }
}

fn shards_missing(count: usize, missing: &[(usize, String)]) -> String {
    let numbers = few(missing.iter().map(|(number, _)| number.to_string()));
    match missing.len() {
        1 => format!("shard {numbers} of {count} is missing"),
        _ => format!("shards {numbers} of {count} are missing"),
    }
}

/// Many servers that expect TLS respond 400 to a request without it.
fn tls_hint(status: u16, reason: &ServerReason, is_plain_http: bool) -> &'static str {
    let may_be_meant = |sentence: &str| ["HTTPS", "TLS", "SSL"].iter().any(|word| sentence.contains(word));
    match (status, is_plain_http) {
        (400, true) if reason.sentence().is_none_or(may_be_meant) => {
            "; if it expects TLS, put https:// before its name"
        }
        _ => "",
    }
}

impl From<InvalidHost> for RegistryError {
    fn from(InvalidHost { host }: InvalidHost) -> Self {
        Self::Host { host }
    }
}

impl RegistryError {
    pub(super) fn unusable(subject: impl Into<String>, what: impl Into<String>) -> Self {
        Self::Unusable { subject: subject.into(), what: what.into() }
    }

    pub(super) fn unusable_model(reference: &Reference, what: &impl ToString) -> Self {
        Self::UnusableModel { reference: Box::new(reference.clone()), what: what.to_string() }
    }

    pub(super) fn web_page(host: impl Into<String>) -> Self {
        Self::unusable(host, "response is a web page, not a registry's; is this network behind a login page?")
    }

    pub fn kind(&self) -> FailureKind {
        match self {
            Self::AllFailed { error, .. } | Self::Explained { error, .. } => error.kind(),
            Self::NotFound { .. }
            | Self::NoSuchName { .. }
            | Self::NoSuchTag { .. }
            | Self::NoModel { .. }
            | Self::MissingShards { .. } => FailureKind::NotFound,
            Self::Denied { .. } | Self::Credentials(_) => FailureKind::Denied,
            Self::UnusableModel { .. } => FailureKind::UnusableModel,
            Self::Host { .. }
            | Self::Mirror { .. }
            | Self::Header { .. }
            | Self::Certificates { .. }
            | Self::PlainHttp { .. }
            | Self::Proxy(_)
            | Self::NoUploads { .. }
            | Self::Ambiguous { .. }
            | Self::NoChoice { .. } => FailureKind::InvalidRequest,
            Self::BlobMissing { .. }
            | Self::Unreachable { .. }
            | Self::Broken { .. }
            | Self::BrokenUpload { .. }
            | Self::Stalled { .. }
            | Self::Status { .. }
            | Self::TooManyRequests { .. }
            | Self::TooLong { .. }
            | Self::SizeDiffers { .. }
            | Self::RangeDiffers { .. }
            | Self::Unusable { .. } => FailureKind::Upstream,
        }
    }

    /// Adds what is known about the cause of a refusal.
    pub(super) fn explained(self, hint: String) -> Self {
        Self::Explained { error: Box::new(self), hint }
    }

    /// The error without the explanation and the answers of other mirrors.
    pub(super) fn main(&self) -> &Self {
        match self {
            Self::AllFailed { error, .. } | Self::Explained { error, .. } => error.main(),
            _ => self,
        }
    }

    /// The server's own sentence, if the error has one.
    pub(super) fn reason(&self) -> ServerReason {
        match self.main() {
            Self::NotFound { reason, .. }
            | Self::BlobMissing { reason, .. }
            | Self::NoSuchName { reason, .. }
            | Self::NoSuchTag { reason, .. }
            | Self::Denied { reason, .. }
            | Self::Status { reason, .. }
            | Self::TooManyRequests { reason, .. } => reason.clone(),
            _ => ServerReason::default(),
        }
    }

    /// The host and what went wrong there, without naming the requested model or file.
    pub(super) fn brief(&self) -> String {
        match self {
            Self::NotFound { host, reason, .. }
            | Self::NoSuchTag { host, reason, .. }
            | Self::BlobMissing { host, reason, .. } => format!("{host} does not have it{reason}"),
            Self::NoSuchName { host, reason, nearest, .. } => {
                let others = if nearest.is_empty() { String::new() } else { format!(", but {nearest}") };
                format!("{host} does not have it{reason}{others}")
            }
            Self::Denied { host, reason, advice, .. } => format!("{host} denies it{reason}, {advice}"),
            other => other.to_string(),
        }
    }

    /// Whether the same request may succeed a moment later.
    pub(super) fn is_transient(&self) -> bool {
        match self.main() {
            Self::Broken { .. }
            | Self::BrokenUpload { .. }
            | Self::TooManyRequests { .. }
            | Self::SizeDiffers { .. }
            | Self::RangeDiffers { .. } => true,
            // 501 is "not implemented", which is permanent.
            Self::Status { status, .. } => *status >= 500 && *status != 501 || *status == 408,
            _ => self.is_no_response(),
        }
    }

    /// Whether the failure is in the body of a response, so that another request for the file may succeed.
    pub fn is_of_body(&self) -> bool {
        matches!(self.main(), Self::Broken { .. } | Self::SizeDiffers { .. } | Self::RangeDiffers { .. })
    }

    /// Whether the server sent no response although it seemed reachable.
    pub(super) fn is_no_response(&self) -> bool {
        matches!(
            self.main(),
            Self::Stalled { .. } | Self::Unreachable { reason: ConnectFailure::Other(_), .. }
        )
    }

    pub(super) fn retry_after(&self) -> Option<Duration> {
        match self.main() {
            Self::TooManyRequests { retry_after, .. } | Self::Status { retry_after, .. } => *retry_after,
            _ => None,
        }
    }

    /// Whether the name or port is wrong, or the server is being restarted.
    pub(super) fn is_absent_host(&self) -> bool {
        use ConnectFailure::{NoAddress, Refused};
        matches!(self.main(), Self::Unreachable { reason: NoAddress(_) | Refused, .. })
    }

    /// Whether the server answers, and only does not send this file.
    pub(super) fn is_about_file(&self) -> bool {
        matches!(self, Self::BlobMissing { .. })
            || matches!(self.kind(), FailureKind::NotFound | FailureKind::Denied)
    }

    /// Whether another mirror may succeed. False after a refusal that protects the user's network, and if the request
    /// or the model itself is wrong.
    pub(super) fn may_be_elsewhere(&self) -> bool {
        use ConnectFailure::{ForbiddenAddress, Proxy};
        match self {
            Self::Unreachable { reason, .. } => !matches!(reason, ForbiddenAddress(_) | Proxy { .. }),
            Self::Credentials(_) => false,
            _ => match self.kind() {
                FailureKind::NotFound | FailureKind::Denied | FailureKind::Upstream => true,
                FailureKind::UnusableModel | FailureKind::InvalidRequest => false,
            },
        }
    }
}

/// Advice for a user after a refusal, which depends on the credentials that were sent.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Advice {
    #[error("it is private, gated or misspelt; `blobd login {host}` if you have an account there")]
    LogIn { host: String },
    #[error(
        "it is private or misspelt; credentials may be with docker-credential-{name}, which blobd runs only \
         with use_docker_helpers in the section [credentials]; or `blobd login {host}`"
    )]
    Helper { name: String, host: String },
    #[error("it is private or misspelt; private models need Ollama's key {}, known to your account at ollama.com", path.display())]
    OllamaKey { path: PathBuf },
    #[error("the credentials from {place} do not suffice, or it is misspelt")]
    Credential { place: String },
    #[error(
        "it is gated: accept its terms at {page}, then `blobd login {host}` with a token of that account"
    )]
    Gated { page: String, host: String },
}
