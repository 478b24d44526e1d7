//! `pull`: downloads a model from a registry, or from the URLs of its files.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

use blobd_client::protocol::error::ErrorCode;
use blobd_client::protocol::event::{Phase, Progress as _, State};
use blobd_client::protocol::pull::{CorrectedFile, PullDone, PullProgress, RunningPull, RunningPulls};
use blobd_model::facts::ModelFacts;
use blobd_registry::{RemoteFile, RemoteModel};
use blobd_store::{DownloadAbout, FileVersion, Ingest, NameOrigin, StoreError};
use blobd_store_format::descriptor::Descriptor;
use blobd_store_format::digest::Digest;
use blobd_store_format::file_format::FileFormat;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::origin::expiring_record;
use blobd_store_format::reference::Reference;
use blobd_store_format::source::{PullSource, PulledSource};

use super::describe::read_header;
use super::name_change::{Leftover, NameChange};
use super::new_model::{NewFile, NewModel, WEIGHTS};
use super::{OpError, rfc3339};
use crate::names::Names;
use crate::permits::Permit;
use crate::running_pulls::PullState;
use crate::transfer::{Flag, Job, RateLimit, Received, Silence, SmallFile, TransferError, TransferGuard};

mod compare;
mod cut_experts;
mod indexes;
mod plan;
mod pulled_folder;
mod remote_model;
mod reusable;
mod signed;
mod source;
mod sources;

use cut_experts::{CutExperts, ModelFile};
use indexes::Indexes;
pub(crate) use plan::plan_pull;
use remote_model::{check_pull, refuse_without_layers};
pub(crate) use remote_model::{inspect, resolve};
use reusable::{Download, Reusable};
use signed::Signatures;
pub(crate) use source::pulled_name;
pub use source::{FetchLimit, Pull};
use source::{
    chosen_files, file_progress, followed_source, known_files, layers, may_be, name_change,
    reporting_silence, target_name, transfer_error, transfer_plan, verifying, version_of,
    with_stored_versions,
};
use sources::Sources;

/// Pulls a model: its manifest, then every file that is not in the store. Blocks the calling thread.
///
/// # Errors
/// [`OpError`]; then only unfinished downloads are kept, which the next pull resumes.
pub fn pull(pull: Pull<'_>) -> Result<PullDone, OpError> {
    NameChange::run(pull.store, Leftover::Downloads, || pull_model(pull))
}

fn pull_model(pull: Pull<'_>) -> Result<PullDone, OpError> {
    let Pull { store, registry, handle, params, policy, events, .. } = pull;
    let target = target_name(params)?;
    let reference = target.preferred();
    policy.check_source(&params.source, Some(reference))?;
    pull.send(PullProgress::working("pulling manifest", Phase::Resolving));
    let reusable = Reusable::new(store, policy);
    let known = known_files(pull, &reusable)?;
    let resolved = source::resolve(registry, params, &known, events.closed());
    let remote = handle.block_on(reporting_silence(&pull, resolved))?;
    let remote = with_stored_versions(pull, &reusable, remote)?;
    let chosen = chosen_files(&remote);
    if let Some(chosen) = &chosen {
        pull.send(PullProgress::working(chosen.to_string(), Phase::Resolving));
    }
    let signatures = Signatures::fetch(pull, reference, &remote)?;
    refuse_without_layers(pull, &remote)?;
    check_pull(pull, &reusable, reference, &remote)?;
    pull.arriving.inspect(|arriving| arriving.set_remote(&remote, signatures.may_refuse_later()));
    let change = name_change(pull, reference).reporting_to(events);
    change.check(&target, |present| may_be(present, &remote))?;
    let ingest = change.begin(change.lease())?;
    let limit = RateLimit::new(params.limit_rate);
    let mut model = Incoming {
        pull,
        indexes: Indexes::new(pull, remote.manifest()),
        signatures,
        reference,
        limit,
        ingest,
        reusable: &reusable,
        sources: Sources::default(),
        present: RefCell::default(),
        corrected: Vec::new(),
        texts: pulled_folder::Texts::new(),
        notes: Vec::new(),
        cut_experts: CutExperts::default(),
    };
    let (files, published, origin) = match remote {
        RemoteModel::Published(published) => {
            (layers(&params.source, &published), Some(published.manifest), params.source.origin())
        }
        RemoteModel::Files { files, origin, .. } => (files, None, origin),
    };
    let manifest = model.take_or_forget(&files, published)?;
    pull.send(PullProgress::working("writing manifest", Phase::Syncing));
    let origin = origin.map(|origin| PulledSource::record(&origin, &params.components));
    let origin = origin.unwrap_or_else(|| expiring_record(&params.source));
    let name_origin = NameOrigin { origin: Some(origin.clone()), source: followed_source(params) };
    let Incoming { ingest, sources, corrected, notes, indexes, signatures, cut_experts, .. } = model;
    let ingest = ingest.with_name_origin(name_origin);
    let is_allowed = |name: &Reference| policy.check_source(&params.source, Some(name)).is_ok();
    signatures.keep(&ingest, &manifest)?;
    let mut named = change.commit(ingest, target.clone(), &manifest, Some(&origin), is_allowed)?;
    cut_experts.collect_pieces(store);
    named.effects.notes.extend(notes.into_iter().chain(signatures.note(&manifest)?));
    let Sources { downloaded_bytes, reused_bytes, already_stored_bytes, .. } = sources;
    Ok(PullDone {
        status: "success".to_owned(),
        name: named.name,
        digest: manifest.digest(),
        size: sources.sum(),
        downloaded_bytes,
        reused_bytes,
        already_stored_bytes,
        unchanged: downloaded_bytes == 0 && !named.tag_changed,
        chosen,
        corrected,
        index: indexes.used(sources.indexed_bytes),
        effects: named.effects,
    })
}

/// Lists the pulls, pushes and transfers in progress. Asks for the names of users.
pub(crate) fn pulls(running: &[PullState]) -> RunningPulls {
    let users = Names::system();
    let row = |pull: &PullState| RunningPull {
        kind: pull.subject.kind,
        model: pull.subject.model.clone(),
        source: pull.subject.source.clone(),
        destination: pull.subject.destination.clone(),
        pid: pull.requester.pid(),
        uid: pull.requester.uid(),
        user: users.name_of(pull.requester.uid()),
        since: rfc3339(pull.since),
        status: pull.status.clone(),
        state: pull.state,
        phase: pull.phase,
        total_bytes: pull.total_bytes,
        completed_bytes: pull.completed_bytes(),
        bytes_per_second: pull.bytes_per_second(),
    };
    RunningPulls { pulls: running.iter().map(row).collect() }
}

struct Incoming<'p> {
    pull: Pull<'p>,
    indexes: Indexes<'p>,
    signatures: Signatures<'p>,
    reference: &'p Reference,
    limit: RateLimit,
    ingest: Ingest,
    reusable: &'p Reusable<'p>,
    sources: Sources,
    /// Whether a file is stored and may be reused, as far as it was looked up.
    present: RefCell<BTreeMap<Digest, bool>>,
    corrected: Vec<CorrectedFile>,
    /// Small files that were received.
    texts: pulled_folder::Texts,
    /// What the user should know about the model.
    notes: Vec<String>,
    cut_experts: CutExperts,
}

impl Incoming<'_> {
    /// Receives the model. On invalid input, or if the policy refuses what has arrived, drops the downloads: resuming them would
    /// fail in the same way.
    fn take_or_forget(
        &mut self,
        files: &[RemoteFile],
        published: Option<Manifest>,
    ) -> Result<Manifest, OpError> {
        let taken = self.take_model(files, published);
        let is_final =
            |error: &OpError| matches!(error.code(), ErrorCode::InvalidInput | ErrorCode::DeniedByPolicy);
        if taken.as_ref().is_err_and(is_final) {
            self.ingest.lease().release();
            // Only those that it was allowed to continue.
            let used = files.iter().filter_map(|file| self.reusable.download(file, self.user()).ok());
            self.pull.store.liveness().forget_partials(used.map(|download| download.file.identity()));
        }
        taken
    }

    /// Receives the files. Those without a `published` manifest get a new one.
    fn take_model(&mut self, files: &[RemoteFile], published: Option<Manifest>) -> Result<Manifest, OpError> {
        let model = self.take_all(files)?;
        match published {
            Some(manifest) => {
                model.check_published(&mut self.ingest, &manifest)?;
                let layers =
                    manifest.files().cloned().zip(manifest.names().map(|name| name.map(str::to_owned)));
                self.join_cut_experts(&layers.collect::<Vec<_>>())?;
                Ok(manifest)
            }
            None => {
                // Whoever chooses the files knows that others are missing.
                if !self.pull.params.components.have_patterns() {
                    let (name, files) = (self.reference.short(), model.files());
                    self.notes = pulled_folder::check(&self.ingest, &name, files, &self.texts)?;
                }
                let files = model.files().iter().map(|file| (file.descriptor.clone(), file.name.clone()));
                let files: Vec<ModelFile> = files.collect();
                let manifest = model.compose(&mut self.ingest)?;
                self.join_cut_experts(&files)?;
                Ok(manifest)
            }
        }
    }

    fn join_cut_experts(&mut self, files: &[ModelFile]) -> Result<(), OpError> {
        let name = self.reference.short();
        self.cut_experts = CutExperts::join(self.pull, &mut self.ingest, (&name, files))?;
        self.notes.extend(self.cut_experts.note());
        Ok(())
    }

    fn take_all(&mut self, files: &[RemoteFile]) -> Result<NewModel, OpError> {
        if let Some(watch) = self.pull.watch {
            watch.expect(files.iter().map(RemoteFile::size).fold(0, u64::saturating_add));
        }
        // Missing files are announced, so that space for all of them is freed in one step.
        for file in files {
            if self.present(file)?.is_none() {
                self.ingest.staging().expect(file.size());
            }
        }
        self.reserve_quota(files)?;
        let mut taken = BTreeMap::new();
        for wave in self.signatures.waves(files) {
            self.take_wave(files, wave, &mut taken)?;
            let was_hidden = self.signatures.may_refuse_later();
            self.signatures.check_received(&self.ingest, &taken)?;
            if was_hidden {
                self.show_arrived(taken.iter().map(|(number, file)| (*number, file)))?;
            }
        }
        Ok(NewModel::new(self.reference.short(), taken.into_values().collect()))
    }

    fn take_wave(
        &mut self,
        files: &[RemoteFile],
        mut left: BTreeSet<usize>,
        taken: &mut BTreeMap<usize, NewFile>,
    ) -> Result<(), OpError> {
        while let Some(number) = self.next(&left, files) {
            left.remove(&number);
            let Some(file) = files.get(number) else { continue };
            let new = self.take(file)?;
            self.show_arrived([(number, &new)])?;
            taken.insert(number, new);
        }
        Ok(())
    }

    /// Gives the files that have arrived to those who read the model before its pull has ended, unless it may still be refused.
    fn show_arrived<'f>(
        &mut self,
        files: impl IntoIterator<Item = (usize, &'f NewFile)>,
    ) -> Result<(), OpError> {
        let Some(arriving) = self.pull.arriving.filter(|_| !self.signatures.may_refuse_later()) else {
            return Ok(());
        };
        // Their readers find them in the store.
        self.ingest.publish()?;
        files.into_iter().for_each(|(number, file)| arriving.set_complete(number, &file.descriptor));
        arriving.show();
        Ok(())
    }

    /// The next file to receive.
    fn next(&self, left: &BTreeSet<usize>, files: &[RemoteFile]) -> Option<usize> {
        let arriving = self.pull.arriving;
        arriving.map_or_else(|| left.first().copied(), |arriving| arriving.next(left, files))
    }

    fn take(&mut self, file: &RemoteFile) -> Result<NewFile, OpError> {
        let file = &self.with_digest_of_git(file)?;
        if let Some(stored) = self.take_present(file)? {
            return Ok(stored);
        }
        self.admit(file)?;
        let pull = self.pull;
        let Pull { events, transfers, .. } = pull;
        let (silence, again, as_stream) = (Silence::default(), Flag::default(), Flag::default());
        let report = |arrived: u64| {
            let completed = (arrived > 0).then(|| arrived.min(file.size()));
            let restarts = as_stream.is_set();
            let mut progress = PullProgress { completed, restarts, ..file_progress(file, &again, 0, None) };
            if let Some(status) = transfers.waiting_status(file.host(), "data", silence.lasts()) {
                (progress.status, progress.state) = (status, State::Waiting);
            }
            pull.send_of_file(file, progress);
            !events.is_closed()
        };
        report(0);
        let (Download { file, continues }, guard, _permit) = self.acquire(file, report)?;
        let file = &file;
        pull.arriving.inspect(|arriving| arriving.set_transfer(file));
        // Another pull may have completed it meanwhile.
        self.look_again(file);
        if let Some(stored) = self.take_present(file)? {
            return Ok(stored);
        }
        let verified = |hashed: u64| {
            pull.send_of_file(file, verifying(file, &again, hashed));
            !events.is_closed() && !guard.should_yield()
        };
        let report = |arrived: u64| report(arrived) && !guard.should_yield();
        let source = self.pull.params.source.to_string();
        let uid = pull.requester.uid();
        let about = Some(DownloadAbout::for_pull(self.reference.short(), source, uid));
        let (silence, again, as_stream) = (silence.clone(), again.clone(), as_stream.clone());
        let verified = Some(&verified as &(dyn Fn(u64) -> bool + Sync));
        let reusable = self.reusable;
        let may_read = |name: &Reference, manifest| reusable.may_read(name, manifest);
        let index = self.indexes.recipe(file);
        let (index, job) = (index.as_deref(), pull.job(file, &self.limit, &report));
        let job =
            Job { about, continues, may_read: &may_read, index, silence, again, as_stream, verified, ..job };
        if fits_memory(file) {
            return self.receive_small(&job);
        }
        let received = transfers.receive(&guard, &mut self.ingest, &job);
        let received = received.map_err(|error| transfer_error(file, error))?;
        let Received { file: descriptor, facts, downloaded_bytes, resumed_bytes, reused_bytes, .. } =
            received;
        let (indexed_bytes, corrected) = (received.indexed_bytes, received.corrected);
        self.sources.add(file.size(), resumed_bytes, downloaded_bytes);
        self.sources.indexed_bytes = self.sources.indexed_bytes.saturating_add(indexed_bytes);
        let reused_bytes = resumed_bytes.saturating_add(reused_bytes);
        self.corrected.extend(corrected);
        self.send_file_progress(file, &job.again, Some(reused_bytes));
        Ok(new_file(file, descriptor, facts))
    }

    fn take_present(&mut self, file: &RemoteFile) -> Result<Option<NewFile>, OpError> {
        let Some(descriptor) = self.present(file)? else { return Ok(None) };
        let facts = match self.stored_facts(&descriptor) {
            // It is missing from now on, and is fetched with the file.
            Err(OpError::Damaged { digest, .. }) if self.quarantine_if_damaged(digest)? => {
                // Other files may have used it too.
                self.present.borrow_mut().clear();
                return Ok(None);
            }
            // One in a lower store stays there, and this store gets its own.
            Err(OpError::Damaged { digest, .. }) if !self.ingest.store().content().has_own_blob(digest) => {
                self.ingest.keep_own_copy(digest);
                return Ok(None);
            }
            facts => facts?,
        };
        self.sources.add(file.size(), file.size(), 0);
        self.send_file_progress(file, &Flag::default(), Some(file.size()));
        Ok(Some(new_file(file, descriptor, facts)))
    }

    fn acquire(
        &self,
        file: &RemoteFile,
        report: impl Fn(u64) -> bool,
    ) -> Result<(Download, TransferGuard, Permit), OpError> {
        let (guard, permit) = self.acquire_transfer(file, &report)?;
        // Only now: another pull may have continued this download until the guard was free.
        if self.reusable.may_continue(file, self.user())? {
            return Ok((Download { file: file.clone(), continues: true }, guard, permit));
        }
        drop((guard, permit));
        let file = file.for_user(self.pull.requester.uid());
        let (guard, permit) = self.acquire_transfer(&file, report)?;
        let continues = self.reusable.may_continue(&file, self.user())?;
        Ok((Download { file, continues }, guard, permit))
    }

    fn user(&self) -> (&PullSource, u32) {
        (&self.pull.params.source, self.pull.requester.uid())
    }

    /// Holds neither while waiting for the other, which prevents deadlocks.
    fn acquire_transfer(
        &self,
        file: &RemoteFile,
        report: impl Fn(u64) -> bool,
    ) -> Result<(TransferGuard, Permit), OpError> {
        let Pull { transfers, fetches, requester, .. } = self.pull;
        loop {
            let guard = transfers.acquire(file.identity(), &self.limit, &report);
            let guard = guard.map_err(|error| transfer_error(file, error))?;
            if let Ok(permit) = fetches.turns.try_acquire(requester.uid()) {
                return Ok((guard, permit));
            }
            drop(guard);
            let permit = self.fetch_permit(file)?;
            // Another pull may have acquired the transfer meanwhile.
            if let Ok(guard) = transfers.acquire(file.identity(), &self.limit, |_| false) {
                return Ok((guard, permit));
            }
        }
    }

    fn fetch_permit(&self, file: &RemoteFile) -> Result<Permit, OpError> {
        let Pull { fetches, handle, events, requester, .. } = self.pull;
        self.pull.send(PullProgress::queued("waiting for other pulls to end"));
        let permit = handle.block_on(async {
            tokio::select! {
                permit = fetches.turns.acquire(requester.uid()) => Some(permit),
                () = events.closed() => None,
            }
        });
        permit.ok_or_else(|| transfer_error(file, TransferError::Unwanted))
    }

    fn receive_small(&mut self, job: &Job<'_>) -> Result<NewFile, OpError> {
        let file = job.file;
        let received = job.receive_small().map_err(|error| transfer_error(file, error))?;
        let SmallFile { bytes, digest, corrected } = received;
        let size = bytes.len() as u64;
        self.sources.add(size, 0, size);
        self.ingest.admit(std::iter::once(size))?;
        self.ingest.add_bytes(&bytes)?;
        if let Some(path) = file.name().filter(|path| pulled_folder::is_text(path)) {
            self.texts.insert(path.to_owned(), bytes);
        }
        self.corrected.extend(corrected);
        self.send_file_progress(file, &job.again, Some(0));
        let media_type = file.media_type().clone();
        Ok(new_file(file, Descriptor { media_type, digest, size }, Vec::new()))
    }

    /// A file with tensors that a hub stores in git: downloaded once to compare it with git's name, and then as any file
    /// with this digest. Such files are small.
    fn with_digest_of_git(&self, file: &RemoteFile) -> Result<RemoteFile, OpError> {
        let needs_digest = file.git_id().is_some() && file.digest().is_none() && !fits_memory(file);
        if !needs_digest || self.present(file)?.is_some() {
            return Ok(file.clone());
        }
        if file.size() > MAX_GIT_BYTES {
            let error = TransferError::TooLargeForGit { limit: MAX_GIT_BYTES };
            return Err(transfer_error(file, error));
        }
        let events = self.pull.events;
        let report = |_arrived: u64| !events.is_closed();
        let (Download { file: own, .. }, _guard, _permit) = self.acquire(file, report)?;
        let job = self.pull.job(&own, &self.limit, &report);
        let small = job.receive_small().map_err(|error| transfer_error(file, error))?;
        Ok(file.clone().with_digest(small.digest))
    }

    /// Reserves space of the requester's quota for all missing files, before any of them is requested. If they do not
    /// fit as they are, finds out how much of them is new.
    fn reserve_quota(&self, files: &[RemoteFile]) -> Result<(), OpError> {
        if self.pull.requester.limits(self.ingest.store()).is_empty() {
            return Ok(());
        }
        let (mut missing, mut present) = (Vec::new(), BTreeSet::new());
        for file in files {
            match self.present(file)? {
                Some(stored) => drop(present.insert(stored.digest)),
                None => missing.push(file),
            }
        }
        self.ingest.claim_quota(&present)?;
        let mut whole = 0_u64;
        let mut downloads = Vec::new();
        for file in missing {
            let download = self.reusable.download(file, self.user())?;
            let is_known = file.digest().is_some();
            let begun =
                is_known.then(|| self.ingest.own_download_bytes(download.file.identity())).transpose()?;
            let size = self.ingest.store().ledger().size_on_disk(file.size());
            whole = whole.saturating_add(size.saturating_sub(begun.unwrap_or_default()));
            downloads.push(download);
        }
        match self.ingest.reserve_free_quota(whole) {
            Err(StoreError::OverQuota { .. }) => {}
            reserved => return Ok(reserved?),
        }
        let mut needed_bytes = 0_u64;
        for download in downloads {
            let lease = self.ingest.lease();
            let index = self.indexes.recipe(&download.file);
            let plan = transfer_plan(self.pull, self.reusable, index.as_deref(), lease, &download)?;
            needed_bytes = needed_bytes.saturating_add(plan.needed_bytes);
        }
        Ok(self.ingest.reserve_quota(needed_bytes)?)
    }

    /// Refuses a file that can never fit, before any byte is requested: a manifest may claim any size. How much
    /// of a file with tensors is new is known only after its header.
    fn admit(&self, file: &RemoteFile) -> Result<(), OpError> {
        let store = self.ingest.store();
        let is_plain = !file.media_type().holds_tensors();
        let can_make_space = store.ledger().can_make_space() || store.liveness().has_displaced()?;
        if !store.ledger().could_fit(file.size())? || is_plain && !can_make_space {
            store.ledger().check_fits(file.size())?;
        }
        Ok(())
    }

    /// The file's descriptor if all of it is stored and may be reused. Looked up once, until [`Self::look_again`].
    fn present(&self, file: &RemoteFile) -> Result<Option<Descriptor>, OpError> {
        let Some(file) = file.descriptor().or_else(|| file.unchanged()) else { return Ok(None) };
        let known = self.present.borrow().get(&file.digest).copied();
        let is_present = match known {
            Some(is_present) => is_present,
            None => self.find_present(&file)?,
        };
        self.present.borrow_mut().insert(file.digest, is_present);
        Ok(is_present.then_some(file))
    }

    fn find_present(&self, file: &Descriptor) -> Result<bool, OpError> {
        let (store, lease) = (self.ingest.store(), self.ingest.lease());
        // Before the check, so that the file is not collected before the commit. The recipe is read from the disk, so that
        // a damaged one is replaced.
        lease.protect(file.digest);
        let Some(stored) = store.content().stored_file_now(file)? else { return Ok(false) };
        lease.protect_all(stored.blob_sizes().into_iter().map(|(digest, _)| digest));
        Ok(store.content().has_file(file)? && self.reusable.allows_stored(file.digest)?)
    }

    /// Forgets whether a file is present, because another pull may have completed it.
    fn look_again(&self, file: &RemoteFile) {
        self.reusable.look_again(file);
        if let Some(file) = file.descriptor().or_else(|| file.unchanged()) {
            self.present.borrow_mut().remove(&file.digest);
        }
    }

    /// Moves a blob to quarantine unless its content has the digest that it is named by.
    fn quarantine_if_damaged(&self, digest: Digest) -> Result<bool, OpError> {
        let place = self.ingest.store().content().quarantine_if_damaged(digest)?;
        if let Some(place) = &place {
            tracing::warn!("blob {digest}: damaged; moved to {}", place.display());
        }
        Ok(place.is_some())
    }

    /// The facts from a stored file's header, if it is a file of weights.
    fn stored_facts(&self, file: &Descriptor) -> Result<Vec<ModelFacts>, OpError> {
        let store = self.ingest.store();
        let stored = store.content().stored_file(file)?;
        let members = stored.members()?;
        let files: Vec<_> = match members.is_empty() {
            true => vec![stored],
            false => members.into_iter().map(|member| member.file).collect(),
        };
        let weights = files.iter().filter(|file| file.descriptor.media_type.component() == WEIGHTS);
        let headers =
            weights.filter_map(|file| file.recipe.as_ref()).map(|recipe| read_header(store, recipe));
        headers
            .filter_map(|header| Some(header.transpose()?.map(|header| ModelFacts::from_header(&*header))))
            .collect()
    }

    fn send_file_progress(&self, file: &RemoteFile, again: &Flag, reused: Option<u64>) {
        self.pull.send_of_file(file, file_progress(file, again, file.size(), reused));
    }
}

/// Files without tensors up to this size are downloaded into memory by one request.
const SMALL_BYTES: u64 = 256 << 10;
/// As [`SMALL_BYTES`], for files that a hub stores in git: their digest is git's, of the whole file. Hugging Face stores
/// no file of more than 10 MB in git.
const MAX_GIT_BYTES: u64 = 16 << 20;

/// Whether a file has no tensors that are stored apart, and is short enough for memory.
fn fits_memory(file: &RemoteFile) -> bool {
    let is_split = || file.name().is_some_and(|name| FileFormat::split_name(name).is_some());
    match file.git_id() {
        Some(_) => file.size() <= MAX_GIT_BYTES && !is_split(),
        None => file.size() <= SMALL_BYTES && !file.media_type().holds_tensors(),
    }
}

fn new_file(file: &RemoteFile, descriptor: Descriptor, facts: Vec<ModelFacts>) -> NewFile {
    // The next pull of a file without a digest asks whether it is still the same version.
    let (url, size, digest) = (file.label(), file.size(), descriptor.digest);
    let version = version_of(file).map(|validator| FileVersion { url, validator, size, digest });
    NewFile { facts, version, ..NewFile::new(descriptor, file.name()) }
}
