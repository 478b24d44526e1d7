//! Files at a URL on a web server.

use blobd_store_format::descriptor::MediaType;
use blobd_store_format::digest::Digest;
use blobd_store_format::file_type::ShardName;
use blobd_store_format::source::{FileUrl, SourceError};
use hyper::header::{HeaderValue, IF_NONE_MATCH, RANGE};

use super::content_encoding::{ContentEncoding, compression_of};
use super::error::Result;
use super::mirrors::first_of;
use super::origin::Registry;
use super::part::total;
use super::remote::{KnownFile, RemoteFile};
use super::request::{Response, is_tag};
use super::web_file::WebFile;
use super::{FailureKind, RegistryClient, RegistryError};

impl RegistryClient {
    /// The file at a URL, or all shards of the model if the file is a shard. Files that were pulled before (`known`)
    /// are requested only if they have changed.
    pub(super) async fn web_files(&self, url: &FileUrl, known: &[KnownFile]) -> Result<Vec<RemoteFile>> {
        let servers = self.shared.mirrors.for_url(url)?;
        let (mut files, mut missing) = (Vec::new(), Vec::new());
        let shards = self.shards(url)?;
        for (number, url) in (1..).zip(&shards) {
            let file = WebFile::new(&servers, url.path_and_query(), url.host(), url.to_string());
            let known: Vec<_> = known.iter().filter(|known| known.url == file.address()).collect();
            let inspect = |server| self.inspect(&file, server, &known);
            let found = match self.retried(|| first_of(&servers, url.host(), inspect)).await {
                Err(error) if shards.len() > 1 && error.kind() == FailureKind::NotFound => {
                    missing.push(((number, url.file_name().into_owned()), error));
                    continue;
                }
                found => found?,
            };
            let Inspected { size, validator, is_lasting, digest, unchanged } = found;
            let remote = RemoteFile::web(file, MediaType::OLLAMA_MODEL, &url.file_name(), size, digest);
            files.push(remote.with_validator(validator, is_lasting).with_unchanged(unchanged));
        }
        match missing.pop() {
            None => Ok(files),
            // None of the model's files exists.
            Some((_, error)) if files.is_empty() => Err(error),
            Some((last, _)) => {
                let (subject, host) = (url.to_string(), url.host().to_owned());
                let missing = missing.into_iter().map(|(shard, _)| shard).chain([last]).collect();
                Err(RegistryError::MissingShards { subject, host, count: shards.len(), missing })
            }
        }
    }

    /// The URLs of the files that `web_files` requests.
    pub fn shards(&self, url: &FileUrl) -> Result<Vec<FileUrl>> {
        let urls = match ShardName::from_path(&url.file_name()) {
            Some(shard) => shard.all().iter().map(|name| url.with_file_name(name)).collect(),
            None => Ok(vec![url.clone()]),
        };
        urls.map_err(|error: SourceError| {
            RegistryError::unusable(url.host(), format!("list of files refused: {error}"))
        })
    }

    async fn inspect(&self, file: &WebFile, server: &Registry, known: &[&KnownFile]) -> Result<Inspected> {
        let response = self.head_of(file, server, known).await?;
        if !response.is_not_modified() {
            return self.inspected(response, file, server, known).await;
        }
        // A response without a validator confirms the only one that was sent.
        let validator = response.validator();
        let is_confirmed = |known: &&&KnownFile| validator.as_ref().is_none_or(|it| *it == known.validator);
        match known.iter().filter(|known| is_tag(&known.validator)).find(is_confirmed) {
            Some(known) => Ok(Inspected::unchanged(known)),
            None => {
                let response = self.head_of(file, server, &[]).await?;
                self.inspected(response, file, server, &[]).await
            }
        }
    }

    /// Reads the facts from a response, if its bytes are the file's and not encoded.
    async fn inspected(
        &self,
        response: Response,
        file: &WebFile,
        server: &Registry,
        known: &[&KnownFile],
    ) -> Result<Inspected> {
        let inspected = Inspected::from_response(&response, file, known, self.is_hub(server))?;
        let (host, encoding) = (response.host(), ContentEncoding::from_headers(response.headers()));
        if encoding.is_none() || inspected.digest.is_some() {
            return Ok(inspected);
        }
        // The label may be wrong, and nothing else shows whether the length is the file's.
        let beginning = response.into_body().beginning(HEAD_BYTES, self.shared.limits.refusal).await;
        match beginning.len() >= 4 && compression_of(&beginning).is_none() && encoding.is_gzip() {
            true => Ok(inspected),
            false => Err(RegistryError::unusable(
                host,
                format!("{encoding}: expected none, as blobd has requested"),
            )),
        }
    }

    /// Whether the server is Hugging Face, or configured as a mirror of it. Only these are trusted to announce digests:
    /// any other server could announce the digest of a file that it does not have.
    fn is_hub(&self, server: &Registry) -> bool {
        self.shared.mirrors.is_hub(server)
    }

    /// Sends a GET of the first bytes and not a HEAD: signed URLs are often valid for one method only.
    async fn head_of(&self, file: &WebFile, server: &Registry, known: &[&KnownFile]) -> Result<Response> {
        let mut target = file.target(server)?.with(RANGE, HeaderValue::from_static("bytes=0-3"));
        // Dates are compared here instead of by the server, which may treat a file as unchanged when an older one has
        // replaced it.
        let tags: Vec<_> =
            known.iter().map(|known| known.validator.as_str()).filter(|it| is_tag(it)).collect();
        if let Ok(tags) = HeaderValue::try_from(tags.join(", "))
            && !tags.is_empty()
        {
            target = target.with(IF_NONE_MATCH, tags);
        }
        let response = match self.shared.get(&target).await {
            // A part is useless if the response does not announce the length of the file. An empty file has no parts.
            Ok(response) if response.is_partial() && total(&response).is_none() => None,
            Err(RegistryError::Status { status: 416 | 501, .. }) => None,
            response => Some(response?),
        };
        let response = match response {
            Some(response) => response,
            None => self.shared.get(&target.without_range()).await?,
        };
        response.web_page().map_or(Ok(response), Err)
    }
}

/// How many bytes of a file are requested to learn its length.
const HEAD_BYTES: u64 = 4;

/// What a server's response says about a file.
struct Inspected {
    size: u64,
    validator: Option<String>,
    is_lasting: bool,
    /// The SHA-256, which only Hugging Face and its mirrors announce.
    digest: Option<Digest>,
    /// The digest from an earlier pull, if the file is still the same version.
    unchanged: Option<Digest>,
}

impl Inspected {
    fn from_response(
        response: &Response,
        file: &WebFile,
        known: &[&KnownFile],
        is_hub: bool,
    ) -> Result<Self> {
        let size = if response.is_partial() { total(response) } else { response.announced_bytes() };
        let size = size.ok_or_else(|| {
            let host = response.host();
            let what = format!("{host} does not say how long it is; download it and `blobd import` the file");
            RegistryError::unusable(file.address(), what)
        })?;
        let (validator, is_lasting) = (response.validator(), response.is_validator_lasting());
        let is_same =
            |known: &&&KnownFile| known.size == size && validator.as_ref() == Some(&known.validator);
        let unchanged = known.iter().find(is_same).filter(|_| is_lasting).map(|known| known.digest);
        let digest = response.linked.filter(|_| is_hub);
        Ok(Self { size, validator, is_lasting, digest, unchanged })
    }

    fn unchanged(known: &KnownFile) -> Self {
        Self {
            size: known.size,
            validator: Some(known.validator.clone()),
            is_lasting: true,
            digest: None,
            unchanged: Some(known.digest),
        }
    }
}
