//! What a client may do: the user's configuration, and the time limits.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use super::credentials::CredentialPolicy;
use super::origin;
use super::retry::RetryPolicy;
use super::server_headers;

/// The default of [`RegistryPolicy::stall_timeout`]. A working connection pauses for a few seconds at most, and a
/// broken one never sends anything. If a content network is still loading a cold file, the repeated request benefits
/// from what it has loaded.
pub const DEFAULT_STALL_TIMEOUT: Duration = Duration::from_secs(15);

#[derive(Clone, Debug, Default)]
pub struct RegistryPolicy {
    /// Base URLs used instead of a registry's host, in this order, such as `http://127.0.0.1:4711` for
    /// `registry.ollama.ai`.
    pub mirrors: BTreeMap<String, Vec<String>>,
    /// Base URLs of machines that are asked for the files of all registries by their digests first.
    pub peers: Vec<String>,
    /// Headers that are added to every request to a server, by its base URL.
    pub headers: BTreeMap<String, BTreeMap<String, String>>,
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
    pub fn is_base_url(text: &str) -> bool {
        origin::Registry::at(text).is_some()
    }

    /// Whether a server's requests can have this header besides their own. Those of the connection and those with credentials
    /// are refused.
    pub fn is_header_name(text: &str) -> bool {
        server_headers::name(text).is_some()
    }

    /// Whether a header can have this value.
    pub fn is_header_value(text: &str) -> bool {
        server_headers::value(text).is_some()
    }

    /// Restricts the policy to blobd's own credentials, for a daemon that serves several users. All of them can read
    /// what the daemon pulls, so it must not use the personal credentials of the user that it runs as.
    #[must_use]
    pub fn for_many_users(self) -> Self {
        Self { credentials: self.credentials.own_alone(), ..self }
    }
}

/// Time limits for one registry. Tests shorten them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// For opening a TCP connection.
    pub(super) connect: Duration,
    /// From a request to the head of its response, including connecting and TLS. Requests for files also have the limit
    /// `silence`.
    pub(super) head: Duration,
    /// For the whole body of a manifest or a token.
    pub(super) document: Duration,
    /// For the body of a refusal. The error quotes what has arrived by then.
    pub(super) refusal: Duration,
    /// For the next byte of a file, or the head of the response with it. Of a file that is sent: for the connection to take
    /// the next bytes.
    pub(super) silence: Duration,
    /// From the last byte of an upload to its response.
    pub(super) commit: Duration,
    /// The window in which at least `slowest_bytes` of a blob must arrive.
    pub(super) stall: Duration,
    /// The fewest bytes of a blob that must arrive in `stall`.
    pub(super) slowest_bytes: u64,
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
            // Before it responds, a registry may read the whole file again or copy it within its storage.
            commit: Duration::from_mins(15),
            // Ollama's client uses the same limit.
            stall: Duration::from_secs(30),
            // 1 KiB/s: slower than any link on which a model is worth waiting for.
            slowest_bytes: 30 << 10,
        }
    }
}
