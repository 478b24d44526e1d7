//! Files with an address of their own: on a web server, or in a repository at Hugging Face.

use std::ops::Range;

use blobd_store_format::descriptor::{Descriptor, MediaType};
use blobd_store_format::source::{FileUrl, ShardName, SourceError};
use hyper::body::Body as _;
use hyper::header::{CONTENT_RANGE, HeaderValue};

use super::fetch::Answer;
use super::mirrors::Failures;
use super::origin::Registry;
use super::remote::RemoteFile;
use super::web_file::{WebFile, validator};
use super::{BlobStream, Part, RegistryClient, RegistryError};

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

    async fn web_file(&self, file: WebFile, name: &str) -> Result<RemoteFile, RegistryError> {
        let mut failures = Failures::default();
        for server in file.servers() {
            let Some(settled) = failures.settle(self.inspect(&file, server).await) else { continue };
            let (size, validator) = settled?;
            return Ok(RemoteFile::web(
                file.with_validator(validator),
                MediaType::OLLAMA_MODEL,
                name,
                size,
                None,
            ));
        }
        Err(failures.into_error(file.address()))
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
        let size = size.ok_or_else(|| RegistryError::NoLength {
            address: file.address().to_owned(),
            host: answer.host(),
        });
        Ok((size?, validator(&answer)))
    }

    pub(super) async fn web_stream(
        &self,
        file: &WebFile,
        counted: &Descriptor,
        seen: Option<&str>,
    ) -> Result<BlobStream, RegistryError> {
        let mut failures = Failures::default();
        for server in file.servers() {
            let opened = async {
                let answer = self.shared.get(&file.target(server)?).await?;
                let (page, version) = (answer.web_page(), file.check_version(&answer, seen));
                let stream =
                    BlobStream::open(answer.host(), answer.into_body(), counted, &self.shared.limits);
                // A page or a length that cannot be says more than that it is another version.
                stream.map_err(|error| page.unwrap_or(error)).and_then(|stream| version.map(|()| stream))
            };
            if let Some(settled) = failures.settle(opened.await) {
                return settled;
            }
        }
        Err(failures.into_error(file.address()))
    }

    pub(super) async fn web_part(
        &self,
        file: &WebFile,
        counted: &Descriptor,
        seen: Option<&str>,
        range: Range<u64>,
    ) -> Result<Part, RegistryError> {
        let mut failures = Failures::default();
        for server in file.servers() {
            let target = file.target(server)?;
            let check = |answer: &Answer| file.check_version(answer, seen);
            if let Some(settled) = failures.settle(self.part_of(target, counted, &range, check).await) {
                return settled;
            }
        }
        Err(failures.into_error(file.address()))
    }
}

/// The length of the whole from `bytes 0-3/1234`.
fn total(answer: &Answer) -> Option<u64> {
    let range = answer.headers().get(CONTENT_RANGE)?.to_str().ok()?;
    range.strip_prefix("bytes ")?.rsplit_once('/')?.1.parse().ok()
}
