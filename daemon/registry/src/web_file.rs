//! A file at a URL: the same path on one server or on several. The address is printed without its query, which may contain a
//! signature.

use std::fmt;

use super::error::Result;
use super::origin::Registry;
use super::request::Target;

/// The address of a file that is not a layer.
#[derive(Clone)]
pub(super) struct WebFile {
    servers: Vec<Registry>,
    /// Never printed, because the query may contain a signature.
    path_and_query: String,
    /// The repository. A token is valid for all of it.
    repository: String,
    address: String,
    /// Whether the repository is one of the hub, whose files peers may have.
    is_at_hub: bool,
}

impl fmt::Debug for WebFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WebFile({})", self.address)
    }
}

impl WebFile {
    /// `address` is the name in messages; the path is the same on all `servers`.
    pub(super) fn new(
        servers: &[Registry],
        path_and_query: String,
        repository: &str,
        address: String,
    ) -> Self {
        let (servers, repository) = (servers.to_vec(), repository.to_owned());
        Self { servers, path_and_query, repository, address, is_at_hub: false }
    }

    /// The file, whose repository is one of the hub.
    pub(super) fn of_hub(self) -> Self {
        Self { is_at_hub: true, ..self }
    }

    pub(super) const fn is_at_hub(&self) -> bool {
        self.is_at_hub
    }

    pub(super) fn repository(&self) -> &str {
        &self.repository
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

    pub(super) fn target<'t>(&'t self, server: &'t Registry) -> Result<Target<'t>> {
        Target::for_file(server, &self.address, &self.repository, &self.path_and_query)
    }
}
