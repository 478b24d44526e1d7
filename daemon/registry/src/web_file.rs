//! The address of a file on a web server, and which version of it was seen.

use hyper::header::{ETAG, LAST_MODIFIED};

use super::RegistryError;
use super::fetch::{Answer, Target};
use super::origin::Registry;

/// Where a file is, and which version of it.
#[derive(Clone, Debug)]
pub(super) struct WebFile {
    servers: Vec<Registry>,
    path_and_query: Hidden,
    /// What the same credentials open.
    repository: String,
    address: String,
    validator: Option<String>,
}

/// A path with a query, which may hold a signature.
#[derive(Clone)]
struct Hidden(String);

impl std::fmt::Debug for Hidden {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("…")
    }
}

impl WebFile {
    /// A file whose path is the same on all of `servers`; `address` is for people.
    pub(super) fn new(
        servers: &[Registry],
        path_and_query: String,
        repository: &str,
        address: String,
    ) -> Self {
        let (servers, repository) = (servers.to_vec(), repository.to_owned());
        Self { servers, path_and_query: Hidden(path_and_query), repository, address, validator: None }
    }

    /// The same in the version that was seen.
    pub(super) fn with_validator(self, validator: Option<String>) -> Self {
        Self { validator, ..self }
    }

    pub(super) fn servers(&self) -> &[Registry] {
        &self.servers
    }

    pub(super) fn host(&self) -> &str {
        self.servers.first().map_or("", |server| server.origin().host())
    }

    pub(super) fn address(&self) -> &str {
        &self.address
    }

    pub(super) fn validator(&self) -> Option<&str> {
        self.validator.as_deref()
    }

    pub(super) fn target<'t>(&'t self, server: &'t Registry) -> Result<Target<'t>, RegistryError> {
        Target::of_file(server, &self.address, self.repository.clone(), &self.path_and_query.0)
    }

    /// Whether this is the version that was seen first. A server that no longer says may have another:
    /// nothing else would show it.
    pub(super) fn check_version(&self, answer: &Answer, seen: Option<&str>) -> Result<(), RegistryError> {
        match seen {
            Some(_) if validator(answer).as_deref() != seen => {
                Err(RegistryError::FileChanged { address: self.address.clone(), host: answer.host() })
            }
            _ => Ok(()),
        }
    }
}

/// Longer than any that is not an attack.
const MAX_VALIDATOR_BYTES: usize = 256;

/// A strong `ETag`, or else the time of the last change.
pub(super) fn validator(answer: &Answer) -> Option<String> {
    let text = |name| answer.headers().get(name).and_then(|value| value.to_str().ok());
    let etag = text(ETAG).filter(|etag| !etag.starts_with("W/"));
    etag.or_else(|| text(LAST_MODIFIED)).filter(|text| text.len() <= MAX_VALIDATOR_BYTES).map(str::to_owned)
}
