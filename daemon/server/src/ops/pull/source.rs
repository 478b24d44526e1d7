//! Common parts of a pull and its plan: the arguments, the model's name, its remote files, and the errors.

use std::collections::BTreeSet;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use blobd_client::protocol::event::{Phase, Progress as _, State};
use blobd_client::protocol::pull::{ChosenFile, ChosenFiles, PullProgress};
use blobd_client::protocol::request::PullParams;
use blobd_registry::{Chosen, KnownFile, PublishedModel, RegistryClient, RemoteFile, RemoteModel};
use blobd_store::leases::Lease;
use blobd_store::{FileVersion, Store, Verb};
use blobd_store_format::derived_name::name_at_revision;
use blobd_store_format::descriptor::{Descriptor, MediaType};
use blobd_store_format::digest::Digest;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::recipe::Recipe;
use blobd_store_format::reference::Reference;
use blobd_store_format::source::{PullSource, PulledSource};
use tokio::runtime::Handle;
use tokio::sync::mpsc::Sender;

use super::reusable::{Download, Reusable};
use crate::arriving::Arriving;
use crate::ingest::IngestError;
use crate::memory_gauge::MemoryGauge;
use crate::ops::name_change::{NameChange, TargetName};
use crate::ops::policy::CallerPolicy;
use crate::ops::{OpError, send_progress};
use crate::permits::{Limits, PermitPool};
use crate::requester::Requester;
use crate::running_pulls::PullWatch;
use crate::transfer::{Flag, Job, RateLimit, TransferError, TransferPlan, Transfers};

/// Limits concurrent downloads per user and in total. Each takes up to some 20 MiB of memory, depending on its
/// speed, besides the tables of its tensors.
#[derive(Debug)]
pub struct FetchLimit {
    pub(super) turns: PermitPool,
    /// The memory of the tables of models with very many tensors, in KiB. The largest take all of it.
    pub(super) tables: PermitPool,
}

impl Default for FetchLimit {
    fn default() -> Self {
        const TABLES_KIB: u32 = 64 << 10;
        Self {
            turns: PermitPool::with_first_for_each(Limits { per_principal: 4, total: 4 }),
            tables: PermitPool::new(Limits { per_principal: TABLES_KIB, total: TABLES_KIB }),
        }
    }
}

/// The arguments of a pull or of its plan.
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "the types of the fields say what they are")]
pub struct Pull<'p> {
    pub store: &'p Arc<Store>,
    pub registry: &'p RegistryClient,
    pub transfers: &'p Transfers,
    /// A pull that waits for another pull's transfer is not counted.
    pub fetches: &'p FetchLimit,
    /// The runtime for network I/O.
    pub handle: &'p Handle,
    pub requester: Requester,
    pub policy: &'p CallerPolicy,
    pub params: &'p PullParams,
    /// Receives progress; a plan sends none. Both stop when the receiver is dropped.
    pub events: &'p Sender<PullProgress>,
    /// Shows the pull's progress to others; a plan has none.
    pub watch: Option<&'p PullWatch>,
    /// Shows what arrives to those who read the model meanwhile.
    pub arriving: Option<&'p Arriving>,
    /// Counts the memory of headers.
    pub gauge: Option<&'p MemoryGauge<'p>>,
}

impl Pull<'_> {
    /// Sends progress to the client, and shows it to others.
    pub(super) fn send(&self, progress: PullProgress) {
        let progress = match self.watch {
            Some(watch) => watch.step(progress),
            None => progress,
        };
        send_progress(self.events, progress);
    }

    /// A transfer of a file for the user of this request, which uses nothing of the store.
    pub(super) fn job<'j>(
        &'j self,
        file: &'j RemoteFile,
        own_limit: &RateLimit,
        report: &'j (dyn Fn(u64) -> bool + Sync),
    ) -> Job<'j> {
        let Self { registry, transfers, fetches, handle, requester, gauge, .. } = self;
        let (limits, tables) = (transfers.limits(own_limit), Some(&fetches.tables));
        Job { limits, tables, gauge: *gauge, ..Job::new(registry, file, handle, requester.uid(), report) }
    }

    /// As [`Self::send`], for progress of a file.
    pub(super) fn send_of_file(&self, file: &RemoteFile, progress: PullProgress) {
        if let Some(watch) = self.watch
            && let Some(completed) = progress.completed
        {
            watch.note(file.identity(), completed);
        }
        self.send(progress);
    }
}

/// Lists the stored files that come from a URL, with their versions. Their servers are asked for other versions only.
pub(super) fn known_files(pull: Pull<'_>, reusable: &Reusable<'_>) -> Result<Vec<KnownFile>, OpError> {
    let Pull { store, registry, params, .. } = pull;
    // The query of a URL may select a version, and is not recorded.
    let PullSource::Url(url) = &params.source else { return Ok(Vec::new()) };
    if params.source.origin().is_none() {
        return Ok(Vec::new());
    }
    let urls: Vec<_> = registry.shards(url)?.iter().map(ToString::to_string).collect();
    let mut known = Vec::new();
    for FileVersion { url, validator, size, digest } in store.names().file_versions(&urls)? {
        let file = Descriptor { media_type: MediaType::new(MediaType::OLLAMA_MODEL), digest, size };
        if reusable.has_file(&file)? {
            known.push(KnownFile { url, validator, size, digest });
        }
    }
    Ok(known)
}

/// The remote model, whose files without a digest have that of a stored file if it is the same version.
pub(super) fn with_stored_versions(
    pull: Pull<'_>,
    reusable: &Reusable<'_>,
    remote: RemoteModel,
) -> Result<RemoteModel, OpError> {
    let RemoteModel::Files { files, origin, chosen } = remote else { return Ok(remote) };
    let urls: Vec<_> = files.iter().filter(|file| file.git_id().is_some()).map(RemoteFile::label).collect();
    if urls.is_empty() {
        return Ok(RemoteModel::Files { files, origin, chosen });
    }
    let versions = pull.store.names().file_versions(&urls)?;
    let stored = reusable.git_files(&files)?;
    let unchanged = |file: RemoteFile| {
        let version = version_of(&file);
        let is_it = |known: &&FileVersion| {
            known.url == file.label()
                && known.size == file.size()
                && Some(&known.validator) == version.as_ref()
        };
        let digest = version.as_ref().and_then(|_| versions.iter().find(is_it)).map(|known| known.digest);
        let named = |id| stored.iter().find(|(known, _)| *known == id).map(|(_, digest)| *digest);
        let digest = digest.or_else(|| file.git_id().and_then(named));
        let (media_type, size) = (file.media_type().clone(), file.size());
        let stored = digest.map(|digest| reusable.has_file(&Descriptor { media_type, digest, size }));
        let digest = digest.filter(|_| matches!(stored, Some(Ok(true))));
        stored.transpose().map(|_| if digest.is_some() { file.with_unchanged(digest) } else { file })
    };
    let files = files.into_iter().map(unchanged).collect::<Result<_, _>>()?;
    Ok(RemoteModel::Files { files, origin, chosen })
}

/// What identifies the version of a file without a digest, if no other bytes can have the same.
pub(super) fn version_of(file: &RemoteFile) -> Option<String> {
    match (file.digest(), file.git_id()) {
        (_, Some(id)) => Some(format!("git:{id}")),
        (Some(_), None) => None,
        (None, None) => file.lasting_validator().map(str::to_owned),
    }
}

pub(super) async fn resolve(
    registry: &RegistryClient,
    params: &PullParams,
    known: &[KnownFile],
    client_gone: impl Future<Output = ()>,
) -> Result<RemoteModel, OpError> {
    tokio::select! {
        remote = registry.resolve_known(&params.source, &params.components, known) => Ok(remote?),
        () = client_gone => Err(unwanted(params)),
    }
}

/// Waits for an answer, and tells the user when it takes long.
pub(super) async fn reporting_silence<T>(pull: &Pull<'_>, answer: impl Future<Output = T>) -> T {
    const POLL_INTERVAL: Duration = Duration::from_secs(1);
    let (host, started) = (pull.params.source.host(), Instant::now());
    let mut answer = pin!(answer);
    loop {
        if let Ok(answer) = tokio::time::timeout(POLL_INTERVAL, answer.as_mut()).await {
            return answer;
        }
        if let Some(status) = pull.transfers.waiting_status(host, "answer", started.elapsed()) {
            pull.send(PullProgress::waiting(status, Phase::Resolving));
        }
    }
}

/// The source that the name follows from now on, with the requested components. `None` if it is fixed to a digest or a
/// commit, or has a query, which may expire and is not recorded.
pub(super) fn followed_source(params: &PullParams) -> Option<String> {
    if params.components.are_fixed() {
        return None;
    }
    let source = params.source.followed()?.origin()?;
    Some(PulledSource::record(&source, &params.components))
}

/// The error of a pull whose client has gone.
pub(super) fn unwanted(params: &PullParams) -> OpError {
    OpError::Interrupted { name: params.source.to_string(), source: Box::new(TransferError::Unwanted) }
}

/// The name that the model gets: the requested one, that of the model at its registry, or one made from the file's
/// address.
pub(super) fn target_name(params: &PullParams) -> Result<TargetName, OpError> {
    let refused = |source| OpError::Name { from: params.source.to_string(), source };
    match (&params.name, params.source.derived_name().map_err(refused)?) {
        (Some(name), _) => TargetName::given(name),
        (None, Some(names)) => Ok(TargetName::Derived(names)),
        (None, None) => {
            let name = params.source.name().map_err(refused)?;
            let is_default = name.tag() == Reference::DEFAULT_TAG;
            let revision = params.components.revision.as_ref().filter(|_| is_default);
            let named = revision.map(|revision| name_at_revision(&name, revision));
            Ok(TargetName::Given(named.transpose().map_err(refused)?.unwrap_or(name)))
        }
    }
}

/// Whether a model may be the remote one. That is certain only if the remote one has a manifest; otherwise the sizes of the
/// files are compared.
pub(super) fn may_be(present: &Manifest, remote: &RemoteModel) -> bool {
    match remote {
        RemoteModel::Published(published) => present.digest() == published.manifest.digest(),
        RemoteModel::Files { files, .. } => {
            files.iter().all(|file| present.layers().iter().any(|layer| layer.size == file.size()))
        }
    }
}

pub(super) fn name_change<'p>(pull: Pull<'p>, name: &Reference) -> NameChange<'p> {
    let Pull { store, requester, params, .. } = pull;
    let change = NameChange::new(store, requester, Verb::Pull, format!("pull of {}", name.short()));
    let source = PulledSource { source: params.source.clone(), components: params.components.clone() };
    change.replacing(params.force).updating_from(source, params.name.is_none())
}

/// The name that a pull shows to others until the model has its name: the source if no name can be made from it.
pub(crate) fn pulled_name(params: &PullParams) -> String {
    target_name(params).map_or_else(|_unnamed| params.source.to_string(), |name| name.preferred().short())
}

/// The files of a manifest without duplicates: layers first, the configuration last.
pub(super) fn layers(source: &PullSource, published: &PublishedModel) -> Vec<RemoteFile> {
    // Only registries publish manifests.
    let PullSource::Registry(upstream) = source else { return Vec::new() };
    let (manifest, mut seen) = (&published.manifest, BTreeSet::new());
    let files = manifest.layers().iter().chain([manifest.config()]);
    files.filter(|file| seen.insert(file.digest)).map(|file| published.remote(upstream, file)).collect()
}

/// The files that were chosen of a repository, for the client.
pub(super) fn chosen_files(remote: &RemoteModel) -> Option<ChosenFiles> {
    let (RemoteModel::Published(PublishedModel { chosen, .. }) | RemoteModel::Files { chosen, .. }) = remote;
    let Chosen { files, listed, beside, notes } = chosen.as_ref()?;
    let files = files.iter().map(|file| ChosenFile {
        component: file.media_type.component().to_owned(),
        path: file.path.clone(),
    });
    Some(ChosenFiles {
        files: files.collect(),
        listed: *listed as u64,
        beside: beside.map(|beside| beside as u64),
        notes: notes.clone(),
    })
}

/// Determines how much of a file need not be downloaded, and the disk space for the rest. Requests only its head and
/// samples; none of them for tensors that the index names.
pub(super) fn transfer_plan(
    pull: Pull<'_>,
    reusable: &Reusable<'_>,
    index: Option<&Recipe>,
    lease: &Lease,
    download: &Download,
) -> Result<TransferPlan, OpError> {
    let Download { file, continues } = download;
    let Pull { store, transfers, params, events, .. } = pull;
    let report = |_arrived| !events.is_closed();
    let may_read = |name: &Reference, manifest| reusable.may_read(name, manifest);
    let job = pull.job(file, &RateLimit::new(params.limit_rate), &report);
    let job = Job { continues: *continues, may_read: &may_read, index, ..job };
    transfers.plan(store, lease, &job).map_err(|error| transfer_error(file, error))
}

pub(super) fn transfer_error(file: &RemoteFile, error: TransferError) -> OpError {
    let name = file.label();
    match error {
        TransferError::Registry(error) => error.into(),
        TransferError::Store(error) => error.into(),
        TransferError::Format(error) => {
            OpError::Ingest { name, source: IngestError::DownloadedFormat(error) }
        }
        TransferError::Recipe(error) => OpError::Ingest { name, source: error.into() },
        TransferError::NoMemory { .. } => OpError::NoMemory { name, source: Box::new(error) },
        TransferError::Archive(_)
        | TransferError::ArchiveHeaders { .. }
        | TransferError::ArchiveGap { .. }
        | TransferError::ArchiveTooLarge { .. }
        | TransferError::ArchiveEnds { .. }
        | TransferError::EmptyArchive
        | TransferError::Compression { .. }
        | TransferError::NotInspected { .. }
        | TransferError::SeveralServers
        | TransferError::NoRanges => OpError::Archive { name, reason: error.to_string() },
        TransferError::Digest(copies) => OpError::DigestMismatch { what: name, copies },
        TransferError::StreamDigest { .. }
        | TransferError::WrongHeader { .. }
        | TransferError::GitId { .. }
        | TransferError::TooLargeForGit { .. }
        | TransferError::Incomplete
        | TransferError::MemoryInUse
        | TransferError::Unwanted
        | TransferError::StreamEnded
        | TransferError::HandedOver => OpError::Interrupted { name, source: Box::new(error) },
    }
}

/// The progress when all of the file has arrived.
pub(super) fn verifying(file: &RemoteFile, again: &Flag, hashed: u64) -> PullProgress {
    PullProgress {
        phase: Some(Phase::Hashing),
        phase_completed: Some(hashed.min(file.size())),
        phase_total: Some(file.size()),
        ..file_progress(file, again, file.size(), None)
    }
}

pub(super) fn file_progress(
    file: &RemoteFile,
    again: &Flag,
    completed: u64,
    reused: Option<u64>,
) -> PullProgress {
    let name = file.digest().map_or_else(|| file.label(), Digest::short);
    PullProgress {
        status: format!("pulling {name}{}", if again.is_set() { " again: wrong digest" } else { "" }),
        state: State::Working,
        phase: Some(Phase::Receiving),
        digest: file.digest(),
        total: Some(file.size()),
        completed: Some(completed),
        reused,
        ..PullProgress::default()
    }
}
