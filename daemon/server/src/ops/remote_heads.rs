//! The headers and short texts of a model at its registry.
//!
//! Texts are verified: one that does not have its digest is an error, and one without a digest is left out. The rest of
//! a file with a header is not downloaded, so a header is not verified; it is complete and valid, and from one server.

use blobd_client::protocol::heads::{Content, FileHead};
use blobd_model::manifest_config::ManifestConfig;
use blobd_registry::{PublishedModel, RemoteFile, RemoteModel};
use blobd_store_format::archive::member_type;
use blobd_store_format::descriptor::{Archive, Descriptor};
use blobd_store_format::file_format::{FileFormat, MAX_HEADER_BYTES, ModelHeader};
use blobd_store_format::file_layout::ArchiveFile;
use blobd_store_format::manifest::ManifestError;
use blobd_store_format::source::PullSource;

use super::OpError;
use super::pull_source::{Pull, transfer_error};
use super::texts::Texts;
use crate::transfer::{HEADER_COPIES, Job, RateLimit};

/// How many bytes after all headers may be downloaded: the end of a header is known only when it has arrived.
const EXCESS_BYTES: u64 = 512 << 10;
/// The smallest request for a part of a header.
const MIN_REQUEST_BYTES: u64 = 4 << 10;
/// The bytes of all headers together; further ones are left out. Those of the largest known models have 16 MiB.
const MAX_HEADERS_BYTES: u64 = MAX_HEADER_BYTES;

/// Downloads the headers of a model's files and its short texts. Blocks the calling thread.
///
/// # Errors
/// [`OpError`] when a server fails, or a header is invalid.
pub(super) fn remote_heads(pull: Pull<'_>, remote: &RemoteModel) -> Result<Vec<FileHead>, OpError> {
    let files = match remote {
        RemoteModel::Published(published) => published_files(&pull.params.source, published),
        RemoteModel::Files { files, .. } => named_files(files),
    };
    let headers = files.iter().filter(|(file, _)| holds_header(file)).count() as u64;
    let excess = EXCESS_BYTES.checked_div(headers).unwrap_or(EXCESS_BYTES).max(MIN_REQUEST_BYTES);
    let mut inspector = Inspector { pull, excess, texts: Texts::new(), headers_left: MAX_HEADERS_BYTES };
    let mut heads = Vec::with_capacity(files.len());
    for (file, name) in files {
        match file.media_type().archive_of_weights() {
            Some(Archive::Tar | Archive::Compressed(_)) => heads.extend(inspector.archive(&file)?),
            _ => heads.push(inspector.inspect(&file, name)?),
        }
    }
    Ok(heads)
}

/// Refuses a manifest without layers, unless its configuration says that the model runs on another server.
pub(super) fn refuse_without_layers(pull: Pull<'_>, remote: &RemoteModel) -> Result<(), OpError> {
    match remote {
        RemoteModel::Published(published) if published.manifest.layers().is_empty() => {
            check_layers(remote, &remote_heads(pull, remote)?)
        }
        _ => Ok(()),
    }
}

/// The same for a model whose headers and texts are these.
pub(super) fn check_layers(remote: &RemoteModel, heads: &[FileHead]) -> Result<(), OpError> {
    let RemoteModel::Published(published) = remote else { return Ok(()) };
    let config = heads.first().and_then(|head| head.content.as_ref());
    let runs_elsewhere = config.is_some_and(|config| ManifestConfig::parse(&config.0).remote_host.is_some());
    match published.manifest.layers().is_empty() && !runs_elsewhere {
        true => Err(ManifestError::NoLayers.into()),
        false => Ok(()),
    }
}

/// The files of a manifest with their names, the configuration first.
fn published_files(source: &PullSource, published: &PublishedModel) -> Vec<(RemoteFile, Option<String>)> {
    // Only registries publish manifests.
    let PullSource::Registry(upstream) = source else { return Vec::new() };
    let file = |(file, name): (&Descriptor, Option<&str>)| {
        (published.remote(upstream, file), name.map(str::to_owned))
    };
    let manifest = &published.manifest;
    manifest.files().zip(manifest.names()).map(file).collect()
}

fn named_files(files: &[RemoteFile]) -> Vec<(RemoteFile, Option<String>)> {
    files.iter().map(|file| (file.clone(), file.name().map(str::to_owned))).collect()
}

/// Whether the file has a header of a known format.
fn holds_header(file: &RemoteFile) -> bool {
    FileFormat::announced(file.media_type(), file.name()).is_some()
}

struct Inspector<'p> {
    pull: Pull<'p>,
    /// The bytes after each header that may be downloaded.
    excess: u64,
    texts: Texts,
    headers_left: u64,
}

impl Inspector<'_> {
    fn inspect(&mut self, file: &RemoteFile, name: Option<String>) -> Result<FileHead, OpError> {
        let (media_type, digest, size) = (file.media_type().clone(), file.digest(), file.size());
        let content = self.content(file)?.map(Content);
        Ok(FileHead { media_type, name, digest, size, content })
    }

    /// The files in an archive. Their digests are unknown.
    fn archive(&mut self, file: &RemoteFile) -> Result<Vec<FileHead>, OpError> {
        let read = |job: &Job<'_>| job.describe_archive();
        let archive = self.fetch(file, read)?;
        let head = |(file, header): (ArchiveFile, Option<Box<dyn ModelHeader>>)| {
            let media_type =
                member_type(&file.path, header.as_ref().map(|header| header.format().tensor_format()));
            let content = header.and_then(|header| self.admitted(&*header)).map(Content);
            FileHead { media_type, name: Some(file.path), digest: None, size: file.size, content }
        };
        Ok(archive.files.into_iter().map(head).collect())
    }

    fn content(&mut self, file: &RemoteFile) -> Result<Option<Vec<u8>>, OpError> {
        if holds_header(file) {
            return self.header(file);
        }
        // A text without a digest could be any document to which its server redirects.
        if file.digest().is_none() || !self.texts.admit(file.media_type(), file.size()) {
            return Ok(None);
        }
        let read = |job: &Job<'_>| job.receive_small();
        self.fetch(file, read).map(|text| Some(text.bytes))
    }

    fn header(&mut self, file: &RemoteFile) -> Result<Option<Vec<u8>>, OpError> {
        let excess = self.excess;
        if self.headers_left == 0 {
            return Ok(None);
        }
        let most = self.headers_left;
        let header = self.fetch(file, |job| job.read_header(excess, most))?;
        Ok(header.and_then(|header| self.admitted(&*header)))
    }

    /// The bytes of a header, unless all headers have too many.
    fn admitted(&mut self, header: &dyn ModelHeader) -> Option<Vec<u8>> {
        let left = self.headers_left.checked_sub(header.bytes().len() as u64);
        self.headers_left = left.unwrap_or_default();
        left.map(|_| {
            self.pull.gauge.inspect(|gauge| gauge.keep(header.bytes().len().saturating_mul(HEADER_COPIES)));
            header.bytes().to_vec()
        })
    }

    fn fetch<T>(
        &self,
        file: &RemoteFile,
        fetch: impl FnOnce(&Job<'_>) -> Result<T, crate::transfer::TransferError>,
    ) -> Result<T, OpError> {
        let Pull { params, events, .. } = self.pull;
        let report = |_arrived| !events.is_closed();
        // A description is of what the server has.
        let job = self.pull.job(file, &RateLimit::new(params.limit_rate), &report);
        fetch(&job).map_err(|error| transfer_error(file, error))
    }
}
