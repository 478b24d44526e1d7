//! A model at its registry: `resolve` and `inspect`, its headers and short texts, and the policy's decision about it.
//!
//! Texts are verified: one that does not have its digest is an error, and one without a digest is left out. The rest of
//! a file with a header is not downloaded, so a header is not verified; it is complete and valid, and from one server.

use blobd_client::protocol::pull::Resolved;
use blobd_client::protocol::response::{Content, FileHead, ModelHeads};
use blobd_model::manifest_config::ManifestConfig;
use blobd_registry::{PublishedModel, RemoteFile, RemoteModel};
use blobd_store::{Model, Store};
use blobd_store_format::archive::member_type;
use blobd_store_format::descriptor::{Archive, Descriptor};
use blobd_store_format::file_format::{FileFormat, MAX_HEADER_BYTES, ModelHeader, read_header};
use blobd_store_format::file_layout::ArchiveFile;
use blobd_store_format::manifest::{Manifest, ManifestError};
use blobd_store_format::reference::Reference;
use blobd_store_format::source::PullSource;

use super::compare;
use super::reusable::Reusable;
use super::source::{self, Pull, target_name, transfer_error, with_stored_versions};
use crate::ops::OpError;
use crate::ops::describe::Texts;
use crate::ops::policy::terms_of;
use crate::policy::{Terms, TermsBuilder};
use crate::transfer::{HEADER_COPIES, Job, RateLimit, TransferError};

/// Finds out what a source names at its server now: requests its manifest, or its list of files, and nothing else. Blocks
/// the calling thread.
pub(crate) fn resolve(pull: Pull<'_>) -> Result<Resolved, OpError> {
    let Pull { store, registry, handle, params, policy, events, .. } = pull;
    policy.check_source(&params.source, None)?;
    let remote = handle.block_on(source::resolve(registry, params, &[], events.closed()))?;
    let remote = with_stored_versions(pull, &Reusable::new(store, policy), remote)?;
    let stored = params.name.as_ref().map(|name| stored_for_comparison(pull, name)).transpose()?;
    let changed = stored.map(|stored| compare::changed_files(store, &stored, &remote)).transpose()?;
    Ok(match remote {
        RemoteModel::Published(PublishedModel { manifest, .. }) => {
            let files = manifest.digests().into_iter().collect();
            Resolved { digest: Some(manifest.digest()), files, has_new_version: false, changed }
        }
        RemoteModel::Files { files, .. } => {
            let known = |file: &RemoteFile| file.digest().or_else(|| Some(file.unchanged()?.digest));
            let is_new = |file: &RemoteFile| file.git_id().is_some() && known(file).is_none();
            let has_new_version = files.iter().any(is_new);
            Resolved {
                digest: None,
                files: files.iter().filter_map(known).collect(),
                has_new_version,
                changed,
            }
        }
    })
}

fn stored_for_comparison(pull: Pull<'_>, name: &Reference) -> Result<Model, OpError> {
    pull.policy.check_named(pull.store, name)?;
    Ok(pull.store.names().model(name)?)
}

/// Describes a model at its registry. Stores nothing; downloads its manifest, the headers of its files and its short texts.
/// Blocks the calling thread.
pub(crate) fn inspect(pull: Pull<'_>) -> Result<ModelHeads, OpError> {
    let Pull { registry, handle, params, policy, events, .. } = pull;
    let name = target_name(params)?.preferred().short();
    policy.check_source(&params.source, None)?;
    let origin = params.source.to_string();
    let remote = handle.block_on(source::resolve(registry, params, &[], events.closed()))?;
    let files = remote_heads(pull, &remote)?;
    check_layers(&remote, &files)?;
    check_heads(pull, &remote, &files)?;
    let digest = match &remote {
        RemoteModel::Published(published) => Some(published.manifest.digest()),
        RemoteModel::Files { .. } => None,
    };
    Ok(ModelHeads { name, digest, origin: Some(origin), files })
}

/// Refuses a pull. Downloads the headers and the license texts if the decision depends on them.
pub(super) fn check_pull(
    pull: Pull<'_>,
    reusable: &Reusable<'_>,
    name: &Reference,
    remote: &RemoteModel,
) -> Result<(), OpError> {
    let Pull { store, policy, params, .. } = pull;
    let manifest = remote.manifest();
    let terms = || {
        let stored = manifest.map(|manifest| stored_model(store, reusable, name, manifest));
        let stored = stored.transpose()?.flatten();
        match stored {
            Some(model) => terms_of(store, &model),
            None => Ok(terms_in(remote, &readable_heads(pull, remote)?)),
        }
    };
    policy.check_remote(store, (&params.source, Some(name)), manifest.map(Manifest::digest), terms)
}

/// Refuses a model whose headers and texts were downloaded to describe it.
fn check_heads(pull: Pull<'_>, remote: &RemoteModel, heads: &[FileHead]) -> Result<(), OpError> {
    let Pull { store, policy, params, .. } = pull;
    let manifest = remote.manifest().map(Manifest::digest);
    policy.check_remote(store, (&params.source, None), manifest, || Ok(terms_in(remote, heads)))
}

/// The licenses and formats in the headers and texts of a model at a registry.
fn terms_in(remote: &RemoteModel, heads: &[FileHead]) -> Terms {
    let mut terms = TermsBuilder::default();
    remote.manifest().into_iter().for_each(|manifest| terms.add_manifest(manifest));
    for FileHead { media_type, name, content, .. } in heads {
        let content = content.as_ref().map(|content| content.0.as_slice());
        match content.and_then(|content| read_header(content).ok()) {
            Some(header) => terms.add_header(&*header),
            None => terms.add_file(media_type, name.as_deref()),
        }
        if media_type.component() == "license" {
            terms.add_license(content);
        }
    }
    terms.finish()
}

/// Downloads the headers and texts; none of an archive whose headers can only be read with the rest of it.
fn readable_heads(pull: Pull<'_>, remote: &RemoteModel) -> Result<Vec<FileHead>, OpError> {
    match remote_heads(pull, remote) {
        Err(OpError::Archive { .. }) => Ok(Vec::new()),
        heads => heads,
    }
}

/// The stored model, if the user may have all its files. Otherwise the headers are downloaded: a refusal must not quote a
/// model that is denied.
fn stored_model(
    store: &Store,
    reusable: &Reusable<'_>,
    name: &Reference,
    manifest: &Manifest,
) -> Result<Option<Model>, OpError> {
    let mut files = Vec::new();
    for file in manifest.files() {
        match store.content().stored_file_now(file)? {
            Some(stored) if reusable.has_file(file)? => files.push(stored),
            _ => return Ok(None),
        }
    }
    Ok(Some(Model { reference: name.clone(), manifest: manifest.clone(), files }))
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

/// As [`refuse_without_layers`], for a model whose headers and texts are these.
fn check_layers(remote: &RemoteModel, heads: &[FileHead]) -> Result<(), OpError> {
    let RemoteModel::Published(published) = remote else { return Ok(()) };
    let config = heads.first().and_then(|head| head.content.as_ref());
    let runs_elsewhere = config.is_some_and(|config| ManifestConfig::parse(&config.0).remote_host.is_some());
    match published.manifest.layers().is_empty() && !runs_elsewhere {
        true => Err(ManifestError::NoLayers.into()),
        false => Ok(()),
    }
}

/// The bytes after all headers that may be downloaded: the end of a header is known only when it has arrived.
const EXCESS_BYTES: u64 = 512 << 10;
const MIN_REQUEST_BYTES: u64 = 4 << 10;
/// The bytes of all headers together; further ones are left out. Those of the largest known models have 16 MiB.
const MAX_HEADERS_BYTES: u64 = MAX_HEADER_BYTES;

fn remote_heads(pull: Pull<'_>, remote: &RemoteModel) -> Result<Vec<FileHead>, OpError> {
    let files = match remote {
        RemoteModel::Published(published) => published_files(&pull.params.source, published),
        RemoteModel::Files { files, .. } => {
            files.iter().map(|file| (file.clone(), file.name().map(str::to_owned))).collect()
        }
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

/// The files of a manifest with their names, the configuration first.
fn published_files(source: &PullSource, published: &PublishedModel) -> Vec<(RemoteFile, Option<String>)> {
    // Only registries publish manifests.
    let PullSource::Registry(upstream) = source else { return Vec::new() };
    let file = |(file, name): (&Descriptor, Option<&str>)| {
        (published.remote(upstream, file), name.map(str::to_owned))
    };
    published.manifest.files().zip(published.manifest.names()).map(file).collect()
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
        let archive = self.fetch(file, |job| job.read_archive(true))?;
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
        if (file.digest().is_none() && file.git_id().is_none())
            || !self.texts.admit(file.media_type(), file.name(), file.size())
        {
            return Ok(None);
        }
        #[expect(clippy::redundant_closure_for_method_calls, reason = "the method is for one lifetime only")]
        let fetched = self.fetch(file, |job| job.receive_small());
        fetched.map(|text| Some(text.bytes))
    }

    fn header(&mut self, file: &RemoteFile) -> Result<Option<Vec<u8>>, OpError> {
        let (excess, most) = (self.excess, self.headers_left);
        if most == 0 {
            return Ok(None);
        }
        let header = self.fetch(file, |job| job.read_header(excess, most))?;
        Ok(header.and_then(|header| self.admitted(&*header)))
    }

    /// The bytes of a header, unless all headers have too many.
    fn admitted(&mut self, header: &dyn ModelHeader) -> Option<Vec<u8>> {
        let left = self.headers_left.checked_sub(header.size());
        self.headers_left = left.unwrap_or_default();
        let bytes = header.bytes().filter(|_| left.is_some())?;
        self.pull.gauge.inspect(|gauge| gauge.keep(bytes.len().saturating_mul(HEADER_COPIES)));
        Some(bytes.to_vec())
    }

    fn fetch<T>(
        &self,
        file: &RemoteFile,
        fetch: impl FnOnce(&Job<'_>) -> Result<T, TransferError>,
    ) -> Result<T, OpError> {
        let Pull { params, events, .. } = self.pull;
        let report = |_arrived| !events.is_closed();
        // Stored data is not used: the description is of what the server has.
        let job = self.pull.job(file, &RateLimit::new(params.limit_rate), &report);
        fetch(&job).map_err(|error| transfer_error(file, error))
    }
}
