//! Files with an address of their own: on a web server, or in a repository at Hugging Face.

use std::ops::Range;

use blobd_store_format::descriptor::{Descriptor, MediaType};
use blobd_store_format::source::{FileUrl, ShardName, SourceError};
use hyper::body::Body as _;
use hyper::header::{CONTENT_RANGE, ETAG, HeaderValue, LAST_MODIFIED};

use super::fetch::{Answer, Target};
use super::mirrors::Failures;
use super::origin::Registry;
use super::remote::RemoteFile;
use super::{BlobStream, Part, RegistryClient, RegistryError};

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

    pub(super) fn host(&self) -> &str {
        self.servers.first().map_or("", |server| server.origin().host())
    }

    pub(super) fn address(&self) -> &str {
        &self.address
    }

    pub(super) fn validator(&self) -> Option<&str> {
        self.validator.as_deref()
    }

    fn target<'t>(&'t self, server: &'t Registry) -> Result<Target<'t>, RegistryError> {
        Target::of_file(server, &self.address, self.repository.clone(), &self.path_and_query.0)
    }

    /// Whether this is the version that was seen first. A server that no longer says may have another:
    /// nothing else would show it.
    fn check_version(&self, answer: &Answer, seen: Option<&str>) -> Result<(), RegistryError> {
        match seen {
            Some(_) if validator(answer).as_deref() != seen => {
                Err(RegistryError::FileChanged { address: self.address.clone(), host: answer.host() })
            }
            _ => Ok(()),
        }
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
            files.push(self.web_file(file, url.file_name()).await?);
        }
        Ok(files)
    }

    async fn web_file(&self, mut file: WebFile, name: &str) -> Result<RemoteFile, RegistryError> {
        let mut failures = Failures::default();
        for server in &file.servers {
            let Some(settled) = failures.settle(self.inspect(&file, server).await) else { continue };
            let (size, validator) = settled?;
            file.validator = validator;
            return Ok(RemoteFile::web(file, MediaType::OLLAMA_MODEL, name, size, None));
        }
        Err(failures.into_error(&file.address))
    }

    /// How long a file is, and which version. Its first bytes are asked for and not its head:
    /// signed URLs are often good for one method only.
    async fn inspect(
        &self,
        file: &WebFile,
        server: &Registry,
    ) -> Result<(u64, Option<String>), RegistryError> {
        let range = HeaderValue::from_static("bytes=0-3");
        let answer = self.shared.get(&file.target(server)?.with_range(range)).await?;
        if let Some(page) = answer.web_page() {
            return Err(page);
        }
        let size =
            if answer.is_partial() { total(&answer) } else { answer.response.body().size_hint().exact() };
        let size = size
            .ok_or_else(|| RegistryError::NoLength { address: file.address.clone(), host: answer.host() });
        Ok((size?, validator(&answer)))
    }

    pub(super) async fn web_stream(
        &self,
        file: &WebFile,
        counted: &Descriptor,
        seen: Option<&str>,
    ) -> Result<BlobStream, RegistryError> {
        let mut failures = Failures::default();
        for server in &file.servers {
            let opened = async {
                let answer = self.shared.get(&file.target(server)?).await?;
                let (page, version) = (answer.web_page(), file.check_version(&answer, seen));
                let stream = BlobStream::open(answer, counted, &self.shared.limits);
                // A page or a length that cannot be says more than that it is another version.
                stream.map_err(|error| page.unwrap_or(error)).and_then(|stream| version.map(|()| stream))
            };
            if let Some(settled) = failures.settle(opened.await) {
                return settled;
            }
        }
        Err(failures.into_error(&file.address))
    }

    pub(super) async fn web_part(
        &self,
        file: &WebFile,
        counted: &Descriptor,
        seen: Option<&str>,
        range: Range<u64>,
    ) -> Result<Part, RegistryError> {
        let mut failures = Failures::default();
        for server in &file.servers {
            let target = file.target(server)?;
            let check = |answer: &Answer| file.check_version(answer, seen);
            if let Some(settled) = failures.settle(self.part_of(target, counted, &range, check).await) {
                return settled;
            }
        }
        Err(failures.into_error(&file.address))
    }
}

/// Longer than any that is not an attack.
const MAX_VALIDATOR_BYTES: usize = 256;

/// The length of the whole from `bytes 0-3/1234`.
fn total(answer: &Answer) -> Option<u64> {
    let range = answer.headers().get(CONTENT_RANGE)?.to_str().ok()?;
    range.strip_prefix("bytes ")?.rsplit_once('/')?.1.parse().ok()
}

/// A strong `ETag`, or else the time of the last change.
fn validator(answer: &Answer) -> Option<String> {
    let text = |name| answer.headers().get(name).and_then(|value| value.to_str().ok());
    let etag = text(ETAG).filter(|etag| !etag.starts_with("W/"));
    etag.or_else(|| text(LAST_MODIFIED)).filter(|text| text.len() <= MAX_VALIDATOR_BYTES).map(str::to_owned)
}
