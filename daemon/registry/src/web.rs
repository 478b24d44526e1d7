//! Files with an address of their own: on a web server, or in a repository at Hugging Face.

use std::fmt;

use blobd_store_format::descriptor::MediaType;
use blobd_store_format::source::{FileUrl, ShardName, SourceError};
use hyper::header::{CONTENT_RANGE, ETAG, HeaderValue, LAST_MODIFIED, RANGE};

use super::mirrors::first_of;
use super::origin::Registry;
use super::remote::RemoteFile;
use super::request::{Response, Target};
use super::{RegistryClient, RegistryError};

/// Where a file is.
#[derive(Clone)]
pub(super) struct WebFile {
    servers: Vec<Registry>,
    /// The query may hold a signature.
    path_and_query: String,
    /// What the same credentials open.
    repository: String,
    address: String,
}

impl fmt::Debug for WebFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WebFile({})", self.address)
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
        Self { servers: servers.to_vec(), path_and_query, repository: repository.to_owned(), address }
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

    pub(super) fn target<'t>(&'t self, server: &'t Registry) -> Result<Target<'t>, RegistryError> {
        Target::of_file(server, &self.address, &self.repository, &self.path_and_query)
    }
}

impl RegistryClient {
    /// The file at a URL; all shards if it is one.
    pub(super) async fn web_files(&self, url: &FileUrl) -> Result<Vec<RemoteFile>, RegistryError> {
        let servers = self.shared.mirrors.of_url(url)?;
        let urls = match ShardName::of(url.file_name()) {
            Some(shard) => shard.all().iter().map(|name| url.with_file_name(name)).collect(),
            None => Ok(vec![url.clone()]),
        };
        let urls: Vec<FileUrl> = urls.map_err(|error: SourceError| RegistryError::Listing {
            host: url.host().to_owned(),
            what: error.to_string(),
        })?;
        let mut files = Vec::new();
        for url in &urls {
            let file = WebFile::new(&servers, url.path_and_query(), url.host(), url.to_string());
            let inspect = |server| self.inspect(&file, server);
            let (size, version) = self.retried(|| first_of(&servers, url.host(), inspect)).await?;
            let remote = RemoteFile::web(file, MediaType::OLLAMA_MODEL, url.file_name(), size, None);
            files.push(remote.with_validator(version));
        }
        Ok(files)
    }

    /// How long a file is, and which version. Its first bytes are asked for and not its head:
    /// signed URLs are often good for one method only.
    async fn inspect(
        &self,
        file: &WebFile,
        server: &Registry,
    ) -> Result<(u64, Option<String>), RegistryError> {
        let target = file.target(server)?.with(RANGE, HeaderValue::from_static("bytes=0-3"));
        let response = self.shared.get(&target).await?;
        if let Some(page) = response.web_page() {
            return Err(page);
        }
        let size = if response.is_partial() { total(&response) } else { response.announced_bytes() };
        let size = size.ok_or_else(|| RegistryError::NoLength {
            address: file.address().to_owned(),
            host: response.host(),
        });
        Ok((size?, validator(&response)))
    }
}

/// The length of the whole from `bytes 0-3/1234`.
fn total(response: &Response) -> Option<u64> {
    let range = response.headers().get(CONTENT_RANGE)?.to_str().ok()?;
    range.strip_prefix("bytes ")?.rsplit_once('/')?.1.parse().ok()
}

/// Longer than any that is not an attack.
const MAX_VALIDATOR_BYTES: usize = 256;

/// A strong `ETag`, or else the time of the last change.
pub(super) fn validator(response: &Response) -> Option<String> {
    let text = |name| response.headers().get(name).and_then(|value| value.to_str().ok());
    let etag = text(ETAG).filter(|etag| !etag.starts_with("W/"));
    etag.or_else(|| text(LAST_MODIFIED)).filter(|text| text.len() <= MAX_VALIDATOR_BYTES).map(str::to_owned)
}
