//! How a pull from a registry fails.

use std::path::PathBuf;
use std::time::Duration;

use blobd_store_format::digest::Digest;
use blobd_store_format::index::IndexError;
use blobd_store_format::manifest::ManifestError;
use blobd_store_format::reference::Reference;

use super::address_scope::AddressScope;
use super::connect_failure::TlsFailure;
use super::credentials::CredentialError;
use super::origin::InvalidHost;

/// Why a registry's answer could not be had or cannot be used.
///
/// Hosts are named, URLs are not: the query of a signed URL is a credential.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegistryError {
    /// There is no such model, tag or file.
    #[error("{subject}: not found at {host}")]
    NotFound {
        /// What was asked for.
        subject: String,
        /// Who answered.
        host: String,
    },
    /// A manifest names a file that its registry does not have.
    #[error("blob {digest}: missing at {host} although the manifest names it; try again later")]
    BlobMissing {
        /// The file.
        digest: Digest,
        /// Who answered.
        host: String,
    },
    /// There is no such tag or file in a repository that has others.
    #[error("{subject}: not found at {host}; there are {nearest}")]
    NoSuchName {
        /// What was asked for.
        subject: String,
        /// Who answered.
        host: String,
        /// The names that come nearest.
        nearest: String,
    },
    /// The registry wants more than it was shown.
    #[error("{subject}: denied by {host}; {advice}")]
    Denied {
        /// What was asked for.
        subject: String,
        /// Who answered.
        host: String,
        /// What may help.
        advice: Box<Advice>,
    },
    /// The credentials for a registry cannot be used.
    #[error(transparent)]
    Credentials(#[from] CredentialError),
    /// The bytes served as the manifest are none.
    #[error("model {reference}: {error}")]
    Manifest {
        /// What was asked for.
        reference: Box<Reference>,
        /// What is wrong with them.
        error: ManifestError,
    },
    /// What the registry has under this name is an index that leads to no model.
    #[error("model {reference}: {error}")]
    Index {
        /// What was asked for.
        reference: Box<Reference>,
        /// What is wrong with it.
        error: IndexError,
    },
    /// Weights in an archive: there is nothing in it that could be mapped.
    #[error(
        "model {reference}: its weights {name} are in an archive ({media_type}); blobd needs them as plain \
         files: ask for a raw variant, or unpack them and `blobd import` the file"
    )]
    PackedWeights {
        /// What was asked for.
        reference: Box<Reference>,
        /// The archive.
        name: String,
        /// Its type.
        media_type: String,
    },
    /// An image to run, not a model.
    #[error("model {reference}: is a container image, not a model")]
    Container {
        /// What was asked for.
        reference: Box<Reference>,
    },
    /// A list of files that cannot be.
    #[error("{host}: its list of files is refused: {what}")]
    Listing {
        /// Who answered.
        host: String,
        /// What is wrong with it.
        what: String,
    },
    /// A file of which nobody says how long it is.
    #[error("{address}: {host} does not say how long it is; download it and `blobd import` the file")]
    NoLength {
        /// The file.
        address: String,
        /// Who answered.
        host: String,
    },
    /// Another version of a file than the one that was begun with.
    #[error("{address}: changed at {host} while it was pulled; pull it again")]
    FileChanged {
        /// The file.
        address: String,
        /// Who answered.
        host: String,
    },
    /// A file whose digest nobody names, over a connection that anybody on the way can change.
    #[error(
        "{host}: files are not pulled over plain HTTP, where anybody on the way could change them; use https, \
         or name the host in insecure_registries"
    )]
    PlainHttp {
        /// The server.
        host: String,
    },
    /// HTML where a manifest or a file should be.
    #[error("{host}: answers with a web page, not a registry; is this network behind a login page?")]
    WebPage {
        /// Who answered.
        host: String,
    },
    /// The manifest is not the one that was announced or pinned.
    #[error("{host}: manifest is {found}, {expected} expected")]
    DigestDiffers {
        /// Who answered.
        host: String,
        /// The digest that the reference or the registry's own header gives.
        expected: Digest,
        /// The digest of what came.
        found: Digest,
    },
    /// No connection, or one that broke before the answer began.
    #[error("{host}: {reason}")]
    Unreachable {
        /// Who was asked.
        host: String,
        /// The innermost cause.
        reason: String,
    },
    /// The proxy does not connect to it, or cannot be reached itself.
    #[error("{host}: no way through the proxy: {reason}; is HTTPS_PROXY right?")]
    Proxy {
        /// Who was to be asked.
        host: String,
        /// What the proxy says, or why it is not reached.
        reason: String,
    },
    /// There is no such host, or nobody to ask about it.
    #[error("{host}: no address found ({reason}); is the name right, and is there a network?")]
    NoAddress {
        /// Who was asked.
        host: String,
        /// What the system says.
        reason: String,
    },
    /// The host is there and nothing listens.
    #[error("{host}: connection refused; is the registry running, and is the port right?")]
    Refused {
        /// Who was asked.
        host: String,
    },
    /// The server cannot show that it is the one that was meant.
    #[error("{host}: {failure}")]
    Tls {
        /// Who was asked.
        host: String,
        /// What is wrong.
        failure: TlsFailure,
    },
    /// The server closed the connection inside a body.
    #[error("{host}: connection broke after {received_bytes} bytes: {reason}")]
    Broken {
        /// Who answered.
        host: String,
        /// How much of the body had come.
        received_bytes: u64,
        /// The innermost cause.
        reason: String,
    },
    /// Nothing, or next to nothing, came for too long.
    #[error("{host}: stalled for {seconds} s")]
    Stalled {
        /// Who was asked.
        host: String,
        /// How long was waited.
        seconds: u64,
    },
    /// An answer that is neither the thing asked for nor a known refusal.
    #[error("{host}: answers with status {status}")]
    Status {
        /// Who answered.
        host: String,
        /// The HTTP status.
        status: u16,
        /// How long it asks to be left alone, if it says.
        retry_after: Option<Duration>,
    },
    /// The registry asked for patience, and more of it than was given.
    #[error("{host}: too many requests; try again {}", later(.retry_after.as_ref()))]
    TooManyRequests {
        /// Who answered.
        host: String,
        /// How long it asks to be left alone, if it says.
        retry_after: Option<Duration>,
    },
    /// A compressed answer, though none was asked for: it could unfold without limit.
    #[error("{host}: content encoding {found:?}, none was asked for")]
    Encoding {
        /// Who answered.
        host: String,
        /// The encoding.
        found: String,
    },
    /// A manifest or token that is longer than any may be.
    #[error("{host}: more than {max_bytes} bytes for a {what}")]
    TooLong {
        /// Who answered.
        host: String,
        /// What the body should be.
        what: &'static str,
        /// The most that is read.
        max_bytes: u64,
    },
    /// A file that is not as long as it should be.
    #[error("{subject}: {found_bytes} bytes at {host}, {expected_bytes} expected")]
    SizeDiffers {
        /// The file.
        subject: String,
        /// Who answered.
        host: String,
        /// How many bytes were announced or came; of a body that is too long, how many were read.
        found_bytes: u64,
        /// How many the manifest says, or the server said first.
        expected_bytes: u64,
    },
    /// A part of a file that is not the one that was asked for.
    #[error("{subject}: {host} answers with {found}, {expected} asked for")]
    RangeDiffers {
        /// The file.
        subject: String,
        /// Who answered.
        host: String,
        /// What its `Content-Range` or its length says, cut to a printable length.
        found: String,
        /// The `Content-Range` that was expected.
        expected: String,
    },
    /// A redirect that is not followed.
    #[error("{host}: redirect refused: {reason}")]
    Redirect {
        /// Who redirected.
        host: String,
        /// What is wrong with it.
        reason: RedirectRefusal,
    },
    /// A host whose address is nearer to this machine than the registry's own.
    #[error("{host}: is a {scope} address, and the registry is not; refused")]
    ForbiddenAddress {
        /// The host that a registry pointed to.
        host: String,
        /// How near it is.
        scope: AddressScope,
    },
    /// A token service that could not be used.
    #[error("{host}: token service refused: {reason}")]
    Realm {
        /// The registry that named it.
        host: String,
        /// What is wrong with it.
        reason: RealmRefusal,
    },
    /// The reference's host is no host name with at most a port.
    #[error("host {host:?}: not a host name and a port")]
    Host {
        /// What stands in the reference.
        host: String,
    },
    /// A mirror's base URL is not usable.
    #[error("mirror of {host}: {base:?}: http://HOST[:PORT] or https://HOST[:PORT] expected")]
    Mirror {
        /// Whose mirror.
        host: String,
        /// The configured URL.
        base: String,
    },
    /// The certificate authorities could not be set up.
    #[error("certificate authorities {}: {reason}", path.display())]
    Certificates {
        /// The file; empty when it is TLS itself that failed.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
}

/// What kind of failure a [`RegistryError`] is: what can be done about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureKind {
    /// There is no such model, tag or file.
    NotFound,
    /// The registry refuses, or the credentials for it cannot be used.
    Denied,
    /// What the registry has is no model that can be stored.
    UnusableModel,
    /// The name or the configuration is wrong.
    InvalidRequest,
    /// The registry, or the way to it, fails.
    Upstream,
}

fn later(wait: Option<&Duration>) -> String {
    wait.map_or_else(|| "later".to_owned(), |wait| format!("in {} s", wait.as_secs()))
}

impl From<InvalidHost> for RegistryError {
    fn from(InvalidHost { host }: InvalidHost) -> Self {
        Self::Host { host }
    }
}

impl RegistryError {
    /// The kind of failure, which says what can be done about it.
    #[must_use]
    pub const fn kind(&self) -> FailureKind {
        match self {
            Self::NotFound { .. } | Self::NoSuchName { .. } => FailureKind::NotFound,
            Self::Denied { .. } | Self::Credentials(_) => FailureKind::Denied,
            Self::Manifest { .. }
            | Self::Index { .. }
            | Self::PackedWeights { .. }
            | Self::Container { .. } => FailureKind::UnusableModel,
            Self::Host { .. } | Self::Mirror { .. } | Self::Certificates { .. } | Self::PlainHttp { .. } => {
                FailureKind::InvalidRequest
            }
            Self::BlobMissing { .. }
            | Self::WebPage { .. }
            | Self::DigestDiffers { .. }
            | Self::Unreachable { .. }
            | Self::Proxy { .. }
            | Self::Broken { .. }
            | Self::Stalled { .. }
            | Self::Status { .. }
            | Self::TooManyRequests { .. }
            | Self::Encoding { .. }
            | Self::TooLong { .. }
            | Self::SizeDiffers { .. }
            | Self::RangeDiffers { .. }
            | Self::Redirect { .. }
            | Self::ForbiddenAddress { .. }
            | Self::Listing { .. }
            | Self::NoLength { .. }
            | Self::FileChanged { .. }
            | Self::NoAddress { .. }
            | Self::Refused { .. }
            | Self::Tls { .. }
            | Self::Realm { .. } => FailureKind::Upstream,
        }
    }

    /// Whether the same request may succeed a moment later.
    pub(super) const fn may_pass(&self) -> bool {
        match self {
            Self::Unreachable { .. }
            | Self::Broken { .. }
            | Self::Stalled { .. }
            | Self::TooManyRequests { .. }
            | Self::SizeDiffers { .. }
            | Self::RangeDiffers { .. } => true,
            // "Not implemented" stays so.
            Self::Status { status, .. } => *status >= 500 && *status != 501 || *status == 408,
            _ => false,
        }
    }

    /// How long the server asks to be left alone.
    pub(super) const fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::TooManyRequests { retry_after, .. } | Self::Status { retry_after, .. } => *retry_after,
            _ => None,
        }
    }

    /// Whether nobody is there: a wrong name or port, unless somebody was there a moment ago.
    pub(super) const fn is_absent_host(&self) -> bool {
        matches!(self, Self::NoAddress { .. } | Self::Refused { .. })
    }

    /// Whether another server may do better.
    pub(super) const fn may_be_elsewhere(&self) -> bool {
        match self {
            Self::Status { status, .. } => *status >= 500,
            Self::Unreachable { .. }
            | Self::NoAddress { .. }
            | Self::Refused { .. }
            | Self::Tls { .. }
            | Self::Stalled { .. }
            | Self::TooManyRequests { .. } => true,
            _ => self.is_absence(),
        }
    }

    /// Whether this says only that a server lacks something.
    pub(super) const fn is_absence(&self) -> bool {
        matches!(self, Self::NotFound { .. } | Self::NoSuchName { .. } | Self::BlobMissing { .. })
    }
}

/// What may help against a refusal: it depends on what the registry was shown.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Advice {
    /// There were no credentials.
    #[error("it is private, gated or misspelt; `blobd login {host}` if you have an account there")]
    LogIn {
        /// For whom to log in.
        host: String,
    },
    /// The credentials may be with a program that was not run.
    #[error(
        "it is private or misspelt; credentials may be with docker-credential-{name}, which blobd runs only \
         with use_docker_helpers in the section [credentials]; or `blobd login {host}`"
    )]
    Helper {
        /// The end of the program's name.
        name: String,
        /// For whom to log in.
        host: String,
    },
    /// There is no key to sign with.
    #[error("it is private or misspelt; private models need Ollama's key {}, known to your account at ollama.com", path.display())]
    OllamaKey {
        /// Where the key would be.
        path: PathBuf,
    },
    /// There were credentials, and they were not enough.
    #[error("the credentials from {place} do not suffice, or it is misspelt")]
    Credential {
        /// Where they are from.
        place: String,
    },
    /// Hugging Face wants a licence accepted first.
    #[error(
        "it is gated: accept its terms at {page}, then `blobd login {host}` with a token of that account"
    )]
    Gated {
        /// The model's page.
        page: String,
        /// For whom to log in.
        host: String,
    },
}

/// Why a redirect is not followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RedirectRefusal {
    /// No `Location`, or one that is not a URL.
    #[error("its target is not a URL")]
    Malformed,
    /// The target's URL holds a user name.
    #[error("its target names a user")]
    NamesUser,
    /// From TLS to plain text, as login pages do.
    #[error("it leads from https to http; is this network behind a login page?")]
    Downgrade,
    /// More in a row than any registry needs.
    #[error("it is one too many; at most {} are followed", Self::MAX_REDIRECTS)]
    TooMany,
}

impl RedirectRefusal {
    /// The most redirects followed in a row. hf.co needs three.
    pub const MAX_REDIRECTS: usize = 5;
}

/// Why a token service is not asked, or its answer is not used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RealmRefusal {
    /// The realm is not an http or https URL.
    #[error("its realm is not a URL")]
    Malformed,
    /// The realm is on a host that the registry has no business to name.
    #[error(
        "realm host {found:?} is not the registry's; if it should be, name it in credentials.token_services"
    )]
    ForeignHost {
        /// The realm's host.
        found: String,
    },
    /// The realm is plain HTTP and the registry is not.
    #[error("its realm is http, the registry https")]
    Downgrade,
    /// The service answered, but with no token.
    #[error("status {status} and no usable token")]
    NoToken {
        /// The HTTP status.
        status: u16,
    },
}
