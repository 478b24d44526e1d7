//! Credentials for registries: where they are stored, and the host that each belongs to.
//!
//! They belong to the user that runs the process: the daemon's user, or the caller if the command opens the store
//! itself. They are not read until a registry requires them, so a `login` takes effect with the next pull.
//!
//! A lookup by [`RegistryHost`] returns only credentials configured for that host. Errors and `Debug` output never
//! contain a secret. `auth` decides whether a connection is safe enough to send them.

mod docker;
mod file;
mod host;
mod ollama;

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use hyper::header::HeaderValue;

pub use self::file::CredentialFile;
pub use self::host::RegistryHost;
pub(super) use self::ollama::OllamaKey;
use super::origin::Origin;
use super::regular_file::read_regular;

#[cfg(test)]
pub(super) use self::ollama::tests::is_signed;

/// Which credentials may be used, and the user's exceptions. By default there are none.
#[derive(Clone, Debug, Default)]
pub struct CredentialPolicy {
    /// blobd's own credentials, which have priority.
    pub file: Option<CredentialFile>,
    /// Docker's `config.json`.
    pub docker_config: Option<PathBuf>,
    /// Whether the programs that Docker's configuration names are run.
    pub docker_helpers: DockerHelpers,
    /// Hugging Face's token, from the environment.
    pub hugging_face_token: Option<Secret>,
    /// The file with Hugging Face's token.
    pub hugging_face_file: Option<PathBuf>,
    /// The path of the key that signs token requests for Ollama's registry.
    pub ollama_key: Option<PathBuf>,
    /// More hosts for which that key may sign, as `HOST[:PORT]`.
    pub ollama_key_hosts: Vec<String>,
    /// Hosts to which credentials may be sent over plain HTTP, as `HOST:PORT`.
    pub insecure_hosts: Vec<String>,
    /// Maps a registry's host to the host of its token service, where they differ.
    pub token_services: BTreeMap<String, String>,
}

/// Whether programs named `docker-credential-…` are run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DockerHelpers {
    /// The program is not run; the error about a refusal mentions it.
    #[default]
    Ignored,
    /// The program is run.
    Run,
}

/// What a registry accepts as proof of an account.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Credential {
    /// For `Basic` challenges and for token services.
    Password {
        user: String,
        /// The password, or what a registry calls an access token.
        password: Secret,
    },
    /// Sent unchanged as a bearer token, as Hugging Face requires.
    Token(Secret),
}

#[derive(Debug)]
pub(super) enum Found {
    Nothing,
    /// A credential, and the place where it is configured.
    Credential(Credential, String),
    /// The name of a Docker helper that was not run.
    Helper(String),
}

impl CredentialPolicy {
    /// Drops the credentials that belong to other programs.
    #[must_use]
    pub fn own_alone(self) -> Self {
        Self { docker_config: None, hugging_face_file: None, ollama_key: None, ..self }
    }

    /// The first credential for a host, in the order blobd, Docker, Hugging Face. Reads files and may run a
    /// program, so it blocks.
    pub(super) fn find(&self, host: &RegistryHost) -> Result<Found, CredentialError> {
        if let Some(file) = &self.file
            && let Some(credential) = file.get(host)?
        {
            return Ok(Found::Credential(credential, file.path().display().to_string()));
        }
        let found = self.find_at_docker(host)?;
        match self.hugging_face(host)? {
            Some((token, place)) if matches!(found, Found::Nothing | Found::Helper(_)) => {
                Ok(Found::Credential(Credential::Token(token), place))
            }
            _ => Ok(found),
        }
    }

    fn find_at_docker(&self, host: &RegistryHost) -> Result<Found, CredentialError> {
        let Some(path) = &self.docker_config else { return Ok(Found::Nothing) };
        let helper = match docker::look_up(path, host)? {
            Found::Helper(name) if self.docker_helpers == DockerHelpers::Run => name,
            found => return Ok(found),
        };
        let credential = docker::run_helper(&helper, host)?;
        Ok(credential.map_or(Found::Nothing, |credential| {
            Found::Credential(credential, format!("docker-credential-{helper}"))
        }))
    }

    /// The token of Hugging Face's own programs, only for its host.
    fn hugging_face(&self, host: &RegistryHost) -> Result<Option<(Secret, String)>, CredentialError> {
        if !host.is_hugging_face() {
            return Ok(None);
        }
        if let Some(token) = &self.hugging_face_token {
            return Ok(Some((token.clone(), "HF_TOKEN".to_owned())));
        }
        let Some(path) = &self.hugging_face_file else { return Ok(None) };
        let Some(text) = read_if_there(path)? else { return Ok(None) };
        let text = String::from_utf8(text).map_err(|_binary| CredentialError::Malformed {
            path: path.clone(),
            what: "expected a token, found something that is not text".to_owned(),
        })?;
        let token = text.trim();
        Ok((!token.is_empty()).then(|| (Secret::new(token), path.display().to_string())))
    }

    /// The key's path, if `origin` is Ollama's registry or a configured host.
    pub(super) fn ollama_key_for(&self, origin: &Origin) -> Option<&Path> {
        self.ollama_key.as_deref().filter(|_| self.may_sign_for(origin))
    }

    fn may_sign_for(&self, origin: &Origin) -> bool {
        let host = RegistryHost::from_origin(origin);
        host.as_str() == OLLAMA || is_listed(&self.ollama_key_hosts, &host)
    }

    /// Whether credentials may be sent to `origin`: over TLS, to this machine, or because the user allows it.
    /// Of the names, only `localhost` counts as this machine.
    pub(super) fn may_carry(&self, origin: &Origin) -> bool {
        origin.is_https()
            || origin.is_loopback()
            || is_listed(&self.insecure_hosts, &RegistryHost::from_origin(origin))
    }
}

/// A password or a token. It cannot be printed, compared or serialised; [`Secret::reveal`] gives the text.
#[derive(Clone)]
pub struct Secret(String);

impl Secret {
    /// Wraps a text.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// The text, for use in a request or a file, never in a message.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[hidden]")
    }
}

/// A header that `Debug` does not print; `None` if the text contains characters that are not allowed in a header.
pub(super) fn hidden_header(text: &str) -> Option<HeaderValue> {
    let mut header = HeaderValue::try_from(text).ok()?;
    header.set_sensitive(true);
    Some(header)
}

fn is_listed(hosts: &[String], host: &RegistryHost) -> bool {
    hosts.iter().any(|listed| listed.eq_ignore_ascii_case(host.as_str()))
}

const OLLAMA: &str = "registry.ollama.ai";
/// Much larger than any real credential file.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// Reads a small file; `None` if it does not exist.
fn read_if_there(path: &Path) -> Result<Option<Vec<u8>>, CredentialError> {
    match read_regular(path, MAX_FILE_BYTES) {
        Ok(content) => Ok(Some(content)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(CredentialError::Io { path: path.to_owned(), source }),
    }
}

/// The position of a syntax error, without the parser's own message, which may quote a password.
fn error_position(error: &serde_json::Error) -> String {
    format!("not in the expected form at line {}, column {}", error.line(), error.column())
}

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CredentialError {
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("{}: {what}", path.display())]
    Malformed { path: PathBuf, what: String },
    #[error("docker-credential-{name}: {reason}")]
    Helper { name: String, reason: String },
    #[error("credentials from {place}: contain characters that cannot be sent; log in again")]
    Unsendable { place: String },
    #[error("credentials: {reason}")]
    Interrupted { reason: String },
    #[error("host: expected HOST or HOST:PORT, found {found:?}")]
    Host { found: String },
    #[error(
        "{host}: credentials are not sent over plain HTTP; use https, or name it in credentials.insecure_hosts"
    )]
    PlainHttp { host: String },
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(policy: &CredentialPolicy, host: &str) -> Found {
        policy.find(&host.parse().unwrap()).unwrap()
    }

    #[test]
    fn hugging_faces_token_is_for_its_host_only() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        std::fs::write(&path, "hf_file\n").unwrap();
        let mut policy = CredentialPolicy { hugging_face_file: Some(path), ..CredentialPolicy::default() };
        let is = |found: Found, text: &str| matches!(found, Found::Credential(Credential::Token(token), _) if token.reveal() == text);
        assert!(is(find(&policy, "hf.co"), "hf_file"));
        assert!(is(find(&policy, "huggingface.co"), "hf_file"));
        for host in ["registry.ollama.ai", "hf.co:444", "cdn.hf.co", "hf.co.evil.example"] {
            assert!(matches!(find(&policy, host), Found::Nothing), "{host}");
        }
        policy.hugging_face_token = Some(Secret::new("hf_env"));
        assert!(is(find(&policy, "hf.co"), "hf_env"));
        assert!(!format!("{policy:?}").contains("hf_env"));
    }

    #[test]
    fn blobds_own_come_first_and_helpers_are_run_only_if_configured() {
        let dir = tempfile::tempdir().unwrap();
        let docker = dir.path().join("config.json");
        std::fs::write(&docker, r#"{"credsStore":"of-no-machine"}"#).unwrap();
        let file = CredentialFile::at(dir.path().join("credentials.json"));
        file.set(&"a.example".parse().unwrap(), &Credential::Token(Secret::new("t"))).unwrap();
        let mut policy = CredentialPolicy {
            file: Some(file),
            docker_config: Some(docker),
            hugging_face_token: Some(Secret::new("t")),
            ..CredentialPolicy::default()
        };
        assert!(matches!(find(&policy, "a.example"), Found::Credential(Credential::Token(_), _)));
        assert!(matches!(find(&policy, "b.example"), Found::Helper(name) if name == "of-no-machine"));
        assert!(matches!(find(&policy, "hf.co"), Found::Credential(Credential::Token(_), _)));
        policy.docker_helpers = DockerHelpers::Run;
        assert!(policy.find(&"b.example".parse().unwrap()).is_err());
        assert!(matches!(find(&policy.own_alone(), "b.example"), Found::Nothing));
    }

    #[test]
    fn credentials_need_tls_or_this_machine() {
        let policy =
            CredentialPolicy { insecure_hosts: vec!["Lan:5000".to_owned()], ..CredentialPolicy::default() };
        let may = |url: &str| policy.may_carry(&Origin::from_url(&url.parse().unwrap()).unwrap());
        for url in [
            "https://r.example",
            "http://127.0.0.1:1",
            "http://127.1",
            "http://[::1]",
            "http://localhost:1",
            "http://lan:5000",
        ] {
            assert!(may(url), "{url}");
        }
        for url in [
            "http://r.example",
            "http://lan",
            "http://10.0.0.1",
            "http://0.0.0.0",
            "http://localhost.example",
        ] {
            assert!(!may(url), "{url}");
        }
    }

    #[test]
    fn ollamas_key_signs_for_ollama_and_configured_mirrors() {
        let hosts = vec!["mirror.example".to_owned()];
        let policy = CredentialPolicy { ollama_key_hosts: hosts, ..CredentialPolicy::default() };
        let may = |url: &str| policy.may_sign_for(&Origin::from_url(&url.parse().unwrap()).unwrap());
        assert!(may("https://registry.ollama.ai/x") && may("https://mirror.example"));
        for url in [
            "http://registry.ollama.ai",
            "https://ollama.ai",
            "https://r.example",
            "https://mirror.example:1",
        ] {
            assert!(!may(url), "{url}");
        }
    }

    #[test]
    fn secrets_are_not_printed() {
        let secret = Secret::new("hunter2");
        assert_eq!(format!("{secret:?} {:#?}", Some(&secret)).matches("hidden").count(), 2);
        assert!(!format!("{:?}", hidden_header("Basic hunter2")).contains("hunter2"));
        assert!(hidden_header("a\r\nX-Injected: b").is_none());
        assert_eq!(secret.reveal(), "hunter2");
    }
}
