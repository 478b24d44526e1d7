//! `pull`: a model comes from its registry, or from where its files are.

use std::sync::Arc;

use blobd_client::protocol::error::ErrorCode;
use blobd_client::protocol::request::PullParams;
use blobd_client::protocol::response::{PullDone, PullEvent, PullProgress};
use blobd_registry::{RegistryClient, RemoteFile, RemoteModel};
use blobd_store::{Ingest, Store, StoreError};
use blobd_store_format::descriptor::Descriptor;
use blobd_store_format::digest::Digest;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::model_facts::ModelFacts;
use blobd_store_format::reference::Reference;
use blobd_store_format::source::PullSource;
use tokio::runtime::Handle;
use tokio::sync::mpsc::Sender;

use super::compose::{Part, compose};
use super::show::read_header;
use super::{OpError, commit::leaving_nothing, error::refuse_pinned, shards, usage};
use crate::permits::{Limits, Permit, PermitPool};
use crate::transfer::{Job, RateLimit, Received, TransferError, TransferGuard, Transfers};

/// How many pulls may fetch something at once: of one user, and of all. Each takes some 20 MiB at full speed,
/// next to nothing when it crawls.
#[derive(Debug)]
pub struct FetchLimit(PermitPool);

impl Default for FetchLimit {
    fn default() -> Self {
        Self(PermitPool::with_first_for_each(Limits { per_principal: 4, total: 12 }))
    }
}

/// What a pull works with.
#[derive(Clone, Copy, Debug)]
pub struct Pull<'p> {
    /// Where the model goes.
    pub store: &'p Arc<Store>,
    /// Where it comes from.
    pub registry: &'p RegistryClient,
    /// What is being transferred, for whomever.
    pub transfers: &'p Transfers,
    /// How many may fetch something at once. Who waits for another's transfer is not counted.
    pub fetches: &'p FetchLimit,
    /// The runtime on which the network is.
    pub handle: &'p Handle,
    /// Who asks.
    pub uid: u32,
    /// What is asked for.
    pub params: &'p PullParams,
    /// Who is told; when nobody listens any more, the pull stops.
    pub events: &'p Sender<PullEvent>,
}

/// Pulls a model: its manifest, then every file that the store lacks. Blocks the calling thread.
///
/// # Errors
/// [`OpError`]; of the model nothing is kept then but what has arrived of its files, for the next
/// pull to go on with.
pub fn pull(pull: Pull<'_>) -> Result<PullDone, OpError> {
    leaving_nothing(pull.store, || take_model(pull)).map_err(|error| match error.code() {
        ErrorCode::NoSpace => {
            let reclaimable_bytes = usage::reclaimable_bytes(pull.store);
            OpError::NoSpaceForPull { source: Box::new(error), reclaimable_bytes }
        }
        _ => error,
    })
}

fn take_model(pull: Pull<'_>) -> Result<PullDone, OpError> {
    let Pull { store, registry, handle, params, events, .. } = pull;
    let reference = &name(params)?;
    tell(events, PullProgress { status: "pulling manifest".to_owned(), ..PullProgress::default() });
    let remote = handle.block_on(resolved(registry, &params.source, events.closed()))?;
    let lease = store.leases().grant(format!("pull of {}", reference.short()));
    let ingest = Ingest::begin(store, lease)?;
    let limit = RateLimit::new(params.limit_rate);
    let mut model = Incoming { pull, reference, limit, ingest, downloaded_bytes: 0, present_bytes: 0 };
    let (manifest, origin) = match remote {
        RemoteModel::Published(manifest) => {
            let files = layers(&params.source, &manifest);
            model.keeping_what_is_of_use(&files, |model| model.take_published(&files))?;
            (manifest, params.source.origin())
        }
        RemoteModel::Files { files, origin } => {
            (model.keeping_what_is_of_use(&files, |model| model.take_files(&files))?, origin)
        }
    };
    tell(events, PullProgress { status: "writing manifest".to_owned(), ..PullProgress::default() });
    // What cannot be had again is as if it were imported.
    let origin = origin.unwrap_or_else(|| format!("import {}", params.source));
    let committed = model.ingest.commit(reference, &manifest, Some(&origin))?;
    Ok(PullDone {
        status: "success".to_owned(),
        name: reference.short(),
        digest: manifest.digest(),
        downloaded_bytes: model.downloaded_bytes,
        reused_bytes: model.present_bytes.saturating_add(committed.reused_bytes),
    })
}

/// What a source stands for, unless `nobody_wants_it` comes first.
pub(super) async fn resolved(
    registry: &RegistryClient,
    source: &PullSource,
    nobody_wants_it: impl Future<Output = ()>,
) -> Result<RemoteModel, OpError> {
    tokio::select! {
        remote = registry.resolve(source) => Ok(remote?),
        () = nobody_wants_it => {
            let unwanted = Box::new(TransferError::Unwanted);
            Err(OpError::Interrupted { name: source.to_string(), source: unwanted })
        }
    }
}

/// What the model is to be called.
pub(super) fn name(params: &PullParams) -> Result<Reference, OpError> {
    let address = || params.source.to_string();
    match &params.name {
        Some(name) => refuse_pinned(name).map(|()| name.clone()),
        None => params.source.name().map_err(|source| OpError::Address { address: address(), source }),
    }
}

/// A model on its way.
struct Incoming<'p> {
    pull: Pull<'p>,
    reference: &'p Reference,
    limit: RateLimit,
    ingest: Ingest,
    downloaded_bytes: u64,
    present_bytes: u64,
}

/// A file that is in the store now, or will be with the commit.
struct Held {
    file: Descriptor,
    /// What its header says, if it is of a known format.
    facts: Option<ModelFacts>,
}

impl Incoming<'_> {
    /// What has arrived is kept for the next pull, unless that would fail for the same reason.
    fn keeping_what_is_of_use<T>(
        &mut self,
        files: &[RemoteFile],
        take: impl FnOnce(&mut Self) -> Result<T, OpError>,
    ) -> Result<T, OpError> {
        let taken = take(self);
        if taken.as_ref().is_err_and(|error| error.code() == ErrorCode::InvalidInput) {
            self.ingest.lease().release();
            self.pull.store.forget_partials(files.iter().map(RemoteFile::identity));
        }
        taken
    }

    /// Takes all files of a manifest.
    fn take_published(&mut self, files: &[RemoteFile]) -> Result<(), OpError> {
        let held = self.take_all(files)?;
        shards::joined(&self.reference.short(), &facts_of_weights(held)).map(drop)
    }

    /// Takes files that have no manifest and composes one.
    fn take_files(&mut self, files: &[RemoteFile]) -> Result<Manifest, OpError> {
        let held = self.take_all(files)?;
        // The name of a file that is alone says nothing, and would make another manifest of it.
        let is_alone = files.len() == 1;
        let name = |file: &RemoteFile| file.name().filter(|_| !is_alone).map(str::to_owned);
        let parts = held.iter().zip(files);
        let parts: Vec<_> =
            parts.map(|(held, file)| Part { file: held.file.clone(), name: name(file) }).collect();
        let facts = shards::joined(&self.reference.short(), &facts_of_weights(held))?;
        compose(&mut self.ingest, &parts, &facts)
    }

    fn take_all(&mut self, files: &[RemoteFile]) -> Result<Vec<Held>, OpError> {
        for file in files {
            self.expect(file)?;
        }
        files.iter().map(|file| self.take(file)).collect()
    }

    fn take(&mut self, file: &RemoteFile) -> Result<Held, OpError> {
        if let Some(held) = self.take_present(file)? {
            return Ok(held);
        }
        self.admit(file)?;
        let events = self.pull.events;
        let report = |arrived: u64| {
            // None may be there, or not be known yet.
            let completed = (arrived > 0).then(|| arrived.min(file.size()));
            tell(events, PullProgress { completed, ..file_progress(file, 0, None) });
            !events.is_closed()
        };
        report(0);
        let (guard, _permit) = self.acquire(file, report)?;
        // Whoever has just brought it has brought it for all.
        if let Some(held) = self.take_present(file)? {
            return Ok(held);
        }
        let Pull { registry, handle, transfers, uid, .. } = self.pull;
        let report = |arrived: u64| report(arrived) && !guard.should_yield();
        let job = Job { registry, file, handle, uid, limits: transfers.limits(&self.limit), report: &report };
        if file.size() <= SMALL_BYTES && !file.media_type().holds_tensors() {
            return self.receive_small(&job);
        }
        let received = transfers.receive(&guard, &mut self.ingest, &job);
        let Received { file: descriptor, facts, downloaded_bytes, resumed_bytes, reused_bytes } =
            received.map_err(|error| failed(file, error))?;
        self.downloaded_bytes += downloaded_bytes;
        let reused_bytes = resumed_bytes.saturating_add(reused_bytes);
        self.present_bytes += reused_bytes;
        self.tell(file, file.size(), Some(reused_bytes));
        Ok(Held { file: descriptor, facts })
    }

    fn take_present(&mut self, file: &RemoteFile) -> Result<Option<Held>, OpError> {
        let Some(descriptor) = self.present(file)? else { return Ok(None) };
        let facts = match self.stored_facts(&descriptor) {
            // It is missing from now on, and is fetched with the file.
            Err(OpError::Damaged { digest, .. }) if self.set_aside_if_damaged(digest)? => return Ok(None),
            facts => facts?,
        };
        self.present_bytes += file.size();
        self.tell(file, file.size(), Some(file.size()));
        Ok(Some(Held { file: descriptor, facts }))
    }

    /// Takes the right to transfer a file and a permit to fetch, as soon as both can be had. Who waits for
    /// one of them holds none, so that nobody waits for who waits.
    fn acquire(
        &self,
        file: &RemoteFile,
        report: impl Fn(u64) -> bool,
    ) -> Result<(TransferGuard, Permit), OpError> {
        let Pull { transfers, fetches, uid, .. } = self.pull;
        loop {
            let guard = transfers.acquire(file.identity(), &self.limit, &report);
            let guard = guard.map_err(|error| failed(file, error))?;
            if let Ok(permit) = fetches.0.try_acquire(uid) {
                return Ok((guard, permit));
            }
            drop(guard);
            let permit = self.fetch_permit(file)?;
            // Somebody else may have taken it up meanwhile.
            if let Ok(guard) = transfers.acquire(file.identity(), &self.limit, |_| false) {
                return Ok((guard, permit));
            }
        }
    }

    fn fetch_permit(&self, file: &RemoteFile) -> Result<Permit, OpError> {
        let Pull { fetches, handle, events, uid, .. } = self.pull;
        let status = "waiting for other pulls to end".to_owned();
        tell(events, PullProgress { status, ..PullProgress::default() });
        let permit = handle.block_on(async {
            tokio::select! {
                permit = fetches.0.acquire(uid) => Some(permit),
                () = events.closed() => None,
            }
        });
        permit.ok_or_else(|| failed(file, TransferError::Unwanted))
    }

    /// Not worth a journal, nor a directory of its own.
    fn receive_small(&mut self, job: &Job<'_>) -> Result<Held, OpError> {
        let file = job.file;
        let bytes = job.read_small().map_err(|error| failed(file, error))?;
        self.downloaded_bytes += bytes.len() as u64;
        let size = bytes.len() as u64;
        self.ingest.admit(std::iter::once(size))?;
        let digest = self.ingest.add_bytes(&bytes)?;
        if let Some(expected) = file.digest().filter(|expected| *expected != digest) {
            return Err(OpError::DigestMismatch { what: file.label(), found: digest, expected });
        }
        self.tell(file, size, Some(0));
        let media_type = file.media_type().clone();
        Ok(Held { file: Descriptor { media_type, digest, size }, facts: None })
    }

    /// What is missing may have to be stored; then room for all of it is made at once.
    fn expect(&self, file: &RemoteFile) -> Result<(), OpError> {
        if self.present(file)?.is_none() {
            self.ingest.staging().expect(file.size());
        }
        Ok(())
    }

    /// Refuses what no disk of this size could hold before a byte of it is asked for: a manifest
    /// may claim anything. What is really new is known once the file's header is.
    fn admit(&self, file: &RemoteFile) -> Result<(), OpError> {
        let store = self.ingest.store();
        let root = store.place();
        let (needed_bytes, capacity) = (file.size(), store.capacity_bytes()?);
        if let Some(quota_bytes) = store.space_policy().quota_bytes.filter(|quota| needed_bytes > *quota) {
            let used_bytes = store.used_bytes();
            return Err(StoreError::Quota { root, needed_bytes, used_bytes, quota_bytes }.into());
        }
        let is_plain = !file.media_type().holds_tensors();
        if needed_bytes > capacity || is_plain && store.shortage(needed_bytes) > 0 && !store.can_make_space()
        {
            let free_bytes = store.free_bytes()?;
            return Err(StoreError::NoSpace { root, needed_bytes, free_bytes }.into());
        }
        Ok(())
    }

    /// The file's descriptor if all of it is stored. Pinned first: what is found present must not be
    /// collected before the tag needs it. The recipe is read from the disk, so that a damaged one
    /// is mended.
    fn present(&self, file: &RemoteFile) -> Result<Option<Descriptor>, OpError> {
        let Some(file) = file.descriptor() else { return Ok(None) };
        let (store, lease) = (self.ingest.store(), self.ingest.lease());
        lease.pin(file.digest);
        let Some(stored) = store.stored_file_now(&file)? else { return Ok(None) };
        lease.pin_all(stored.blob_sizes().into_iter().map(|(digest, _)| digest));
        Ok(store.has_file(&file)?.then_some(file))
    }

    /// Moves a blob to quarantine unless its content has the digest that it is named by.
    fn set_aside_if_damaged(&self, digest: Digest) -> Result<bool, OpError> {
        let place = self.ingest.store().set_aside_if_damaged(digest)?;
        if let Some(place) = &place {
            tracing::warn!("blob {digest} was damaged; it is in {}", place.display());
        }
        Ok(place.is_some())
    }

    /// What a file that is stored says about itself, if it is one of weights.
    fn stored_facts(&self, file: &Descriptor) -> Result<Option<ModelFacts>, OpError> {
        let store = self.ingest.store();
        match store.stored_file(file)?.recipe {
            Some(recipe) if file.media_type.component() == WEIGHTS => {
                Ok(read_header(store, &recipe)?.map(|header| header.facts()))
            }
            _ => Ok(None),
        }
    }

    fn tell(&self, file: &RemoteFile, completed: u64, reused: Option<u64>) {
        tell(self.pull.events, file_progress(file, completed, reused));
    }
}

/// A template or the like up to this is fetched by one request into memory.
const SMALL_BYTES: u64 = 256 << 10;

pub(super) fn failed(file: &RemoteFile, error: TransferError) -> OpError {
    let name = file.label();
    match error {
        TransferError::Registry(error) => error.into(),
        TransferError::Store(error) => error.into(),
        TransferError::Format(error) => OpError::Intake { name, source: error.into() },
        TransferError::Recipe(error) => OpError::Intake { name, source: error.into() },
        TransferError::Digest { found, expected } => OpError::DigestMismatch { what: name, found, expected },
        TransferError::Incomplete | TransferError::Unwanted | TransferError::HandedOver => {
            OpError::Interrupted { name, source: Box::new(error) }
        }
    }
}

/// The part of those files that shards are parts of.
const WEIGHTS: &str = "model";

fn facts_of_weights(held: Vec<Held>) -> Vec<ModelFacts> {
    let weights = held.into_iter().filter(|held| held.file.media_type.component() == WEIGHTS);
    weights.filter_map(|held| held.facts).collect()
}

/// The files of a registry's model.
pub(super) fn layers(source: &PullSource, manifest: &Manifest) -> Vec<RemoteFile> {
    // Nothing else has a manifest.
    let PullSource::Registry(upstream) = source else { return Vec::new() };
    files_in_order(manifest).into_iter().map(|file| RemoteFile::layer(upstream, file)).collect()
}

/// Layers first, the configuration last, no file twice.
fn files_in_order(manifest: &Manifest) -> Vec<&Descriptor> {
    let mut seen = std::collections::BTreeSet::new();
    let layers = manifest.layers().iter().chain([manifest.config()]);
    layers.filter(|file| seen.insert(file.digest)).collect()
}

fn file_progress(file: &RemoteFile, completed: u64, reused: Option<u64>) -> PullProgress {
    let name = file.digest().map_or_else(|| file.label(), Digest::short);
    PullProgress {
        status: format!("pulling {name}"),
        digest: file.digest(),
        total: Some(file.size()),
        completed: Some(completed),
        reused,
    }
}

/// Progress is dropped when the client does not keep up; the next line says more anyway.
fn tell(events: &Sender<PullEvent>, progress: PullProgress) {
    let _ = events.try_send(PullEvent::Progress(progress));
}
