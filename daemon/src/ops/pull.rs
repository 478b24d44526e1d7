//! `pull`: a model comes from its registry.

use std::sync::Arc;

use blobd_client::protocol::request::PullParams;
use blobd_client::protocol::response::{PullDone, PullEvent, PullProgress};
use blobd_store_format::descriptor::Descriptor;
use blobd_store_format::manifest::Manifest;
use tokio::runtime::Handle;
use tokio::sync::mpsc::Sender;

use super::{OpError, commit::leaving_nothing};
use crate::intake;
use crate::registry::{RegistryClient, RegistryError};
use crate::store::{Ingest, Store, StoreError, disk};
use crate::transfer::{Job, RateLimit, RemoteFile, TransferError, Transfers};

/// What a pull works with.
#[derive(Clone, Copy, Debug)]
pub struct Pull<'p> {
    /// Where the model goes.
    pub store: &'p Arc<Store>,
    /// Where it comes from.
    pub registry: &'p RegistryClient,
    /// What is being transferred, for whomever.
    pub transfers: &'p Transfers,
    /// The runtime on which the network is.
    pub handle: &'p Handle,
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
    leaving_nothing(pull.store, || take_model(pull))
}

fn take_model(pull: Pull<'_>) -> Result<PullDone, OpError> {
    let Pull { store, registry, handle, events, .. } = pull;
    let reference = &pull.params.reference;
    tell(events, PullProgress { status: "pulling manifest".to_owned(), ..PullProgress::default() });
    let manifest = handle.block_on(registry.manifest(reference))?;
    let lease = store.leases().grant(format!("pull of {}", reference.short()));
    let ingest = Ingest::begin(store, lease)?;
    let limit = RateLimit::new(pull.params.limit_rate);
    let mut files = Files { pull, limit, ingest, downloaded_bytes: 0, present_bytes: 0 };
    for file in files_in_order(&manifest) {
        files.expect(file)?;
    }
    for file in files_in_order(&manifest) {
        files.take(file)?;
    }
    tell(events, PullProgress { status: "writing manifest".to_owned(), ..PullProgress::default() });
    let origin = reference.to_string();
    let committed = files.ingest.commit(reference, &manifest, Some(&origin))?;
    Ok(PullDone {
        status: "success".to_owned(),
        name: reference.short(),
        digest: manifest.digest(),
        downloaded_bytes: files.downloaded_bytes,
        reused_bytes: files.present_bytes.saturating_add(committed.reused_bytes),
    })
}

/// The files of one model.
struct Files<'p> {
    pull: Pull<'p>,
    limit: RateLimit,
    ingest: Ingest,
    downloaded_bytes: u64,
    present_bytes: u64,
}

impl Files<'_> {
    fn take(&mut self, file: &Descriptor) -> Result<(), OpError> {
        if self.is_present(file)? {
            self.present_bytes += file.size;
            self.tell(file, file.size, Some(file.size));
            return Ok(());
        }
        self.admit(file)?;
        self.receive(file)
    }

    /// What is missing may have to be stored; then room for all of it is made at once.
    fn expect(&self, file: &Descriptor) -> Result<(), OpError> {
        if !self.is_present(file)? {
            self.ingest.staging().expect(file.size);
        }
        Ok(())
    }

    /// Refuses what no disk of this size could hold before a byte of it is asked for: a manifest
    /// may claim anything. What is really new is known once the file's header is.
    fn admit(&self, file: &Descriptor) -> Result<(), OpError> {
        let store = self.ingest.store();
        let root = store.root().to_path_buf();
        let (needed_bytes, capacity) = (file.size, disk::capacity_bytes(&root)?);
        if let Some(quota_bytes) = store.space_policy().quota_bytes.filter(|quota| needed_bytes > *quota) {
            let used_bytes = store.used_bytes();
            return Err(StoreError::Quota { root, needed_bytes, used_bytes, quota_bytes }.into());
        }
        let is_plain = !file.media_type.is_gguf();
        if needed_bytes > capacity || is_plain && store.shortage(needed_bytes) > 0 && !store.can_make_room() {
            let free_bytes = disk::free_bytes(&root)?;
            return Err(StoreError::NoRoom { root, needed_bytes, free_bytes }.into());
        }
        Ok(())
    }

    /// Pinned first: what is found present must not be collected before the tag needs it. The
    /// recipe is read from the disk, so that a damaged one is mended.
    fn is_present(&self, file: &Descriptor) -> Result<bool, OpError> {
        let (store, lease) = (self.ingest.store(), self.ingest.lease());
        lease.pin(file.digest);
        let Some(stored) = store.stored_file_now(file)? else { return Ok(false) };
        lease.pin_all(stored.blob_sizes().into_iter().map(|(digest, _)| digest));
        Ok(store.has_file(file)?)
    }

    fn receive(&mut self, file: &Descriptor) -> Result<(), OpError> {
        let events = self.pull.events;
        let look = |arrived: u64| {
            tell(events, file_progress(file, arrived.min(file.size), None));
            !events.is_closed()
        };
        let flight = self.pull.transfers.board(file.digest, look).map_err(|error| self.failed(file, error))?;
        // Whoever has just brought it has brought it for all.
        if self.is_present(file)? {
            self.present_bytes += file.size;
            look(file.size);
            return Ok(());
        }
        if file.size <= SMALL_BYTES {
            return self.receive_small(file);
        }
        let source = RemoteFile {
            registry: self.pull.registry.clone(),
            reference: self.pull.params.reference.clone(),
            file: file.clone(),
        };
        let job = Job { source, handle: self.pull.handle, limit: &self.limit, look: &look };
        let received = self.pull.transfers.receive(&flight, &mut self.ingest, &job);
        let received = received.map_err(|error| self.failed(file, error))?;
        self.downloaded_bytes += received.downloaded_bytes;
        self.present_bytes += received.resumed_bytes.saturating_add(received.reused_bytes);
        Ok(())
    }

    /// Not worth a journal, nor a directory of its own.
    fn receive_small(&mut self, file: &Descriptor) -> Result<(), OpError> {
        let Pull { registry, handle, params, .. } = self.pull;
        let bytes = handle.block_on(async {
            let mut stream = registry.blob(&params.reference, file).await?;
            let mut bytes = Vec::new();
            while let Some(more) = stream.next().await? {
                bytes.extend_from_slice(&more);
            }
            Ok::<_, RegistryError>(bytes)
        })?;
        self.downloaded_bytes += bytes.len() as u64;
        let taken = if file.media_type.is_gguf() && bytes.starts_with(b"GGUF") {
            intake::take_gguf(&mut self.ingest, &mut &*bytes, file.size, &mut |_| {})
        } else {
            intake::take_whole(&mut self.ingest, &mut &*bytes, file.size, &mut |_| {})
        };
        let name = self.name_of(file);
        let taken = taken.map_err(|source| OpError::Intake { name, source })?;
        if taken.digest == file.digest {
            return Ok(());
        }
        Err(OpError::DigestMismatch { what: self.name_of(file), found: taken.digest, expected: file.digest })
    }

    fn failed(&self, file: &Descriptor, error: TransferError) -> OpError {
        let name = self.name_of(file);
        match error {
            TransferError::Registry(error) => error.into(),
            TransferError::Store(error) => error.into(),
            TransferError::Gguf(error) => OpError::Intake { name, source: error.into() },
            TransferError::Split(error) => OpError::Intake { name, source: error.into() },
            TransferError::Recipe(error) => OpError::Intake { name, source: error.into() },
            TransferError::Digest { found, expected } => {
                OpError::DigestMismatch { what: name, found, expected }
            }
            TransferError::Incomplete | TransferError::Unwanted => OpError::Interrupted { name, source: error },
        }
    }

    fn name_of(&self, file: &Descriptor) -> String {
        format!("{} of {}", file.media_type.component(), self.pull.params.reference.short())
    }

    fn tell(&self, file: &Descriptor, completed: u64, reused: Option<u64>) {
        tell(self.pull.events, file_progress(file, completed, reused));
    }
}

/// A file up to this is fetched by one request into memory.
const SMALL_BYTES: u64 = 256 << 10;

/// Layers first, the configuration last, no file twice.
fn files_in_order(manifest: &Manifest) -> Vec<&Descriptor> {
    let mut seen = std::collections::BTreeSet::new();
    let layers = manifest.layers().iter().chain([manifest.config()]);
    layers.filter(|file| seen.insert(file.digest)).collect()
}

fn file_progress(file: &Descriptor, completed: u64, reused: Option<u64>) -> PullProgress {
    PullProgress {
        status: format!("pulling {}", file.digest.short()),
        digest: Some(file.digest),
        total: Some(file.size),
        completed: Some(completed),
        reused,
    }
}

/// Progress is dropped when the client does not keep up; the next line says more anyway.
fn tell(events: &Sender<PullEvent>, progress: PullProgress) {
    let _ = events.try_send(PullEvent::Progress(progress));
}
