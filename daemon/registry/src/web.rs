//! Files at a URL on a web server.

use blobd_store_format::descriptor::MediaType;
use blobd_store_format::source::{FileUrl, ShardName, SourceError};
use hyper::header::{CONTENT_RANGE, HeaderValue, RANGE};

use super::mirrors::first_of;
use super::origin::Registry;
use super::remote::{RemoteFile, WebFile};
use super::request::Response;
use super::{RegistryClient, RegistryError};

impl RegistryClient {
    /// The file at a URL, or all shards of the model if the file is a shard.
    pub(super) async fn web_files(&self, url: &FileUrl) -> Result<Vec<RemoteFile>, RegistryError> {
        let servers = self.shared.mirrors.of_url(url)?;
        let urls = match ShardName::of(url.file_name()) {
            Some(shard) => shard.all().iter().map(|name| url.with_file_name(name)).collect(),
            None => Ok(vec![url.clone()]),
        };
        let urls: Vec<FileUrl> = urls.map_err(|error: SourceError| {
            RegistryError::unusable(url.host(), format!("list of files refused: {error}"))
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

    /// Size and validator of a file. Sends a GET of the first bytes and not a HEAD: signed URLs are often
    /// valid for one method only.
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
        let size = size.ok_or_else(|| {
            let host = response.host();
            let what = format!("{host} does not say how long it is; download it and `blobd import` the file");
            RegistryError::unusable(file.address(), what)
        });
        Ok((size?, response.validator()))
    }
}

/// The length of the whole file, from `bytes 0-3/1234`.
fn total(response: &Response) -> Option<u64> {
    let range = response.headers().get(CONTENT_RANGE)?.to_str().ok()?;
    range.strip_prefix("bytes ")?.rsplit_once('/')?.1.parse().ok()
}
