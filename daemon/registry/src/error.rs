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

/// Why a request to a registry failed, or its response cannot be used.
///
/// Messages name hosts, never URLs, because the query of a signed URL is a credential.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegistryError {
    /// There is no such model, tag or file.
    #[error("{subject}: not found at {host}{reason}")]
    NotFound {
        /// The request.
        subject: String,
        /// The host that responded.
        host: String,
        /// What the host said.
        reason: ServerReason,
    },
    /// A manifest names a file that its registry does not have.
    #[error("blob {digest}: missing at {host} although the manifest names it{reason}; try again later")]
    BlobMissing {
        /// The file.
        digest: Digest,
        /// The host that responded.
        host: String,
        /// What the host said.
        reason: ServerReason,
    },
    /// A repository does not have this tag or file, but has others.
    #[error("{subject}: not found at {host}{reason}{}", nearest_names(.nearest))]
    NoSuchName {
        /// The request.
        subject: String,
        /// The host that responded.
        host: String,
        /// What the host said.
        reason: ServerReason,
        /// The most similar names.
        nearest: String,
    },
    /// A registry that does not list its tags does not have this one.
    #[error("{subject}: not found at {host}{reason}{}", latest.as_ref().map_or_else(String::new, |name| format!(", which has {name}")))]
    NoSuchTag {
        /// What was requested.
        subject: String,
        /// The host that responded.
        host: String,
        /// What the host said.
        reason: ServerReason,
        /// The name of the model with the tag `latest`, if the registry has one.
        latest: Option<Box<str>>,
        /// The web page that lists the model's tags, if the registry has such pages.
        page: Option<Box<str>>,
        /// What the name would be at Hugging Face: the user may have copied it from there without the host.
        hub: Option<Box<str>>,
    },
    /// A tag means several models of a repository.
    #[error("{subject}: means several models at {host}: {}", few(candidates))]
    Ambiguous {
        /// The request.
        subject: String,
        /// The host that listed them.
        host: String,
        /// The path of each.
        candidates: Vec<String>,
        /// The address of the first.
        example: String,
    },
    /// A repository has no model in a supported format.
    #[error("{subject}: no GGUF file with a model at {host}, of {} GGUF files", others.len())]
    NoModel {
        /// The request.
        subject: String,
        /// The host that responded.
        host: String,
        /// The paths of the GGUF files that are not models.
        others: Vec<String>,
        /// The address of the first.
        example: String,
    },
    /// Some shards of a model are missing.
    #[error("{subject}: {} at {host}: {}", shards_missing(*count, missing), few(missing.iter().map(|(_, path)| path)))]
    MissingShards {
        /// The request.
        subject: String,
        /// The host that has the others.
        host: String,
        /// How many shards the model has.
        count: usize,
        /// The number of each missing shard, from 1, and its name.
        missing: Vec<(usize, String)>,
    },
    /// The user chose a projector or a draft, but the source has no list of files.
    #[error("{subject}: projector and draft can be chosen only from repositories at Hugging Face")]
    NoChoice {
        /// The request.
        subject: String,
    },
    /// The registry requires other credentials.
    #[error("{subject}: denied by {host}{reason}; {advice}")]
    Denied {
        /// The request.
        subject: String,
        /// The host that responded.
        host: String,
        /// What the host said.
        reason: ServerReason,
        /// Advice for the user.
        advice: Box<Advice>,
    },
    /// The credentials for a registry cannot be used.
    #[error(transparent)]
    Credentials(#[from] CredentialError),
    /// The name leads to something that cannot be stored as a model.
    #[error("model {reference}: {what}")]
    UnusableModel {
        /// The request.
        reference: Box<Reference>,
        /// The fault in it.
        what: String,
    },
    /// A response or file is unusable, or a redirect or token service is refused.
    #[error("{subject}: {what}")]
    Unusable {
        /// The host that responded, or the file.
        subject: String,
        /// The value found and the one expected.
        what: String,
    },
    /// A file without a known digest over plain HTTP.
    #[error(
        "{host}: files are not pulled over plain HTTP, where they can be changed in transit; use https, or \
         name the host in insecure_registries"
    )]
    PlainHttp {
        /// The server.
        host: String,
    },
    /// The connection could not be opened, or broke before the response began.
    #[error("{host}: {reason}")]
    Unreachable {
        /// The host that was requested.
        host: String,
        /// Why.
        reason: ConnectFailure,
    },
    /// The server closed the connection inside a body.
    #[error("{host}: connection broke after {received_bytes} bytes: {reason}")]
    Broken {
        /// The host that responded.
        host: String,
        /// How much of the body was received.
        received_bytes: u64,
        /// The root cause.
        reason: String,
    },
    /// Too few bytes were received for too long.
    #[error("{host}: stalled for {seconds} s")]
    Stalled {
        /// The host that was requested.
        host: String,
        /// The time limit.
        seconds: u64,
    },
    /// The server responded with an unexpected HTTP status.
    #[error("{host}: {}{}", refusal(*.status, .reason), tls_hint(*.status, .reason, *.is_plain_http))]
    Status {
        /// The host that responded.
        host: String,
        /// The HTTP status.
        status: u16,
        /// What the host said.
        reason: ServerReason,
        /// Whether the request was sent without TLS.
        is_plain_http: bool,
        /// The response's `Retry-After`.
        retry_after: Option<Duration>,
    },
    /// The server responded 429 and asks for a longer wait than the retry policy allows.
    #[error("{host}: too many requests{reason}; try again {}", later(.retry_after.as_ref()))]
    TooManyRequests {
        /// The host that responded.
        host: String,
        /// What the host said.
        reason: ServerReason,
        /// When it accepts requests again, if it says so.
        retry_after: Option<Duration>,
        /// Whether the request had no credentials.
        is_anonymous: bool,
    },
    /// A refusal whose cause is known. The message is that of the refusal.
    #[error("{error}")]
    Explained {
        /// The refusal.
        error: Box<RegistryError>,
        /// The cause, or what to do.
        hint: String,
    },
    /// A manifest, list or token is too long.
    #[error("{host}: {what} has more than {max_bytes} bytes, the limit")]
    TooLong {
        /// The host that responded.
        host: String,
        /// The expected kind of body.
        what: &'static str,
        /// The limit.
        max_bytes: u64,
    },
    /// A file has the wrong length.
    #[error("{subject}: wrong size at {host}: expected {expected_bytes} bytes, found {found_bytes}")]
    SizeDiffers {
        /// The file.
        subject: String,
        /// The host that responded.
        host: String,
        /// Bytes announced or received. If the body is too long, the bytes read before that was noticed.
        found_bytes: u64,
        /// Bytes that the manifest or the server's first response announces.
        expected_bytes: u64,
    },
    /// The server sent another part of a file than the requested one.
    #[error("{subject}: wrong part from {host}: expected {expected}, found {found}")]
    RangeDiffers {
        /// The file.
        subject: String,
        /// The host that responded.
        host: String,
        /// The response's `Content-Range` or length, cut to a printable length.
        found: String,
        /// The expected `Content-Range`.
        expected: String,
    },
    /// The host in a reference is not a host name with an optional port.
    #[error("host: expected a host name with at most a port, found {host:?}")]
    Host {
        /// The text in the reference.
        host: String,
    },
    /// A mirror's base URL is not usable.
    #[error("mirror of {host}: expected http://HOST[:PORT] or https://HOST[:PORT], found {base:?}")]
    Mirror {
        /// The host that it is a mirror of.
        host: String,
        /// The configured URL without its user and password.
        base: String,
    },
    /// All mirrors of a host failed. The message is that of the most informative error.
    #[error("{error}")]
    AllFailed {
        /// The most informative error.
        error: Box<RegistryError>,
        /// What the other servers answered, each with its host.
        others: Vec<String>,
    },
    /// The environment variable that names the proxy for this request is malformed.
    #[error(transparent)]
    Proxy(ProxyFault),
    /// The certificate authorities could not be set up.
    #[error("certificate authorities {}: {reason}", path.display())]
    Certificates {
        /// The file; empty when TLS itself failed.
        path: PathBuf,
        /// The fault.
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

    /// The kind of failure.
    #[must_use]
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
            | Self::Certificates { .. }
            | Self::PlainHttp { .. }
            | Self::Proxy(_)
            | Self::Ambiguous { .. }
            | Self::NoChoice { .. } => FailureKind::InvalidRequest,
            Self::BlobMissing { .. }
            | Self::Unreachable { .. }
            | Self::Broken { .. }
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
            | Self::TooManyRequests { .. }
            | Self::SizeDiffers { .. }
            | Self::RangeDiffers { .. } => true,
            // 501 is "not implemented", which is permanent.
            Self::Status { status, .. } => *status >= 500 && *status != 501 || *status == 408,
            _ => self.is_no_response(),
        }
    }

    /// Whether the failure is in the body of a response, so that another request for the file may succeed.
    #[must_use]
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
    /// No credentials are configured.
    #[error("it is private, gated or misspelt; `blobd login {host}` if you have an account there")]
    LogIn {
        /// The host to log in to.
        host: String,
    },
    /// A Docker credential helper may have credentials, but blobd did not run it.
    #[error(
        "it is private or misspelt; credentials may be with docker-credential-{name}, which blobd runs only \
         with use_docker_helpers in the section [credentials]; or `blobd login {host}`"
    )]
    Helper {
        /// The end of the program's name.
        name: String,
        /// The host to log in to.
        host: String,
    },
    /// There is no key to sign with.
    #[error("it is private or misspelt; private models need Ollama's key {}, known to your account at ollama.com", path.display())]
    OllamaKey {
        /// The expected path of the key.
        path: PathBuf,
    },
    /// The credentials that were sent do not grant access.
    #[error("the credentials from {place} do not suffice, or it is misspelt")]
    Credential {
        /// Where they are configured.
        place: String,
    },
    /// Hugging Face requires that the user accepts a licence.
    #[error(
        "it is gated: accept its terms at {page}, then `blobd login {host}` with a token of that account"
    )]
    Gated {
        /// The model's page.
        page: String,
        /// The host to log in to.
        host: String,
    },
}
