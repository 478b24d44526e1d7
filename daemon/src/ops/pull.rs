//! `pull`: a model comes from its registry.

use std::io::{self, Cursor, Read};
use std::sync::Arc;

use blobd_client::protocol::request::PullParams;
use blobd_client::protocol::response::{PullDone, PullEvent, PullProgress};
use blobd_store_format::descriptor::Descriptor;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::reference::Reference;
use bytes::{Buf, Bytes};
use tokio::runtime::Handle;
use tokio::sync::mpsc::Sender;

use super::{OpError, commit::leaving_nothing};
use crate::intake::{self, TakenFile};
use crate::registry::{BlobStream, RegistryClient};
use crate::store::{Ingest, Store, StoreError, disk};

/// Pulls a model: its manifest, then every file that the store lacks. Blocks the calling thread;
/// the network runs on the runtime of `handle`. Stops when nobody listens to `events` any more.
///
/// # Errors
/// [`OpError`]; nothing of the model is kept then.
pub fn pull(
    store: &Arc<Store>,
    registry: &RegistryClient,
    handle: &Handle,
    params: &PullParams,
    events: &Sender<PullEvent>,
) -> Result<PullDone, OpError> {
    leaving_nothing(store, || take_model(store, registry, handle, params, events))
}

fn take_model(
    store: &Arc<Store>,
    registry: &RegistryClient,
    handle: &Handle,
    params: &PullParams,
    events: &Sender<PullEvent>,
) -> Result<PullDone, OpError> {
    let reference = &params.reference;
    tell(events, PullProgress { status: "pulling manifest".to_owned(), ..PullProgress::default() });
    let manifest = handle.block_on(registry.manifest(reference))?;
    let lease = store.leases().grant(format!("pull of {}", reference.short()));
    let ingest = Ingest::begin(store, lease)?;
    let mut pull =
        Pull { registry, handle, reference, events, ingest, downloaded_bytes: 0, present_bytes: 0 };
    for file in files_in_order(&manifest) {
        pull.expect(file)?;
    }
    let origin = reference.to_string();
    pull.ingest.staging().expect_instead(0, [manifest.raw().len() as u64, origin.len() as u64]);
    for file in files_in_order(&manifest) {
        pull.take(file)?;
    }
    tell(events, PullProgress { status: "writing manifest".to_owned(), ..PullProgress::default() });
    let committed = pull.ingest.commit(reference, &manifest, Some(&origin))?;
    Ok(PullDone {
        status: "success".to_owned(),
        name: reference.short(),
        digest: manifest.digest(),
        downloaded_bytes: pull.downloaded_bytes,
        reused_bytes: pull.present_bytes.saturating_add(committed.reused_bytes),
    })
}

struct Pull<'p> {
    registry: &'p RegistryClient,
    handle: &'p Handle,
    reference: &'p Reference,
    events: &'p Sender<PullEvent>,
    ingest: Ingest,
    downloaded_bytes: u64,
    present_bytes: u64,
}

impl Pull<'_> {
    fn take(&mut self, file: &Descriptor) -> Result<(), OpError> {
        if self.is_present(file)? {
            self.present_bytes += file.size;
            self.tell(file, file.size, Some(file.size));
            return Ok(());
        }
        self.admit(file)?;
        self.tell(file, 0, None);
        let stream = self.handle.block_on(self.registry.blob(self.reference, file))?;
        let taken = self.receive(file, stream).map_err(|source| self.failed(file, source))?;
        if taken.digest != file.digest {
            let what = format!("{} of {}", file.media_type.component(), self.reference.short());
            return Err(OpError::DigestMismatch { what, found: taken.digest, expected: file.digest });
        }
        self.downloaded_bytes += file.size;
        Ok(())
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

    /// A layer of weights is split if it is a GGUF file; everything else is one blob.
    fn receive(&mut self, file: &Descriptor, stream: BlobStream) -> Result<TakenFile, intake::IntakeError> {
        const MAGIC: &[u8] = b"GGUF";
        let (handle, events, ingest) = (self.handle, self.events, &mut self.ingest);
        let mut source = StreamSource { handle, events, stream, arrived: Bytes::new() };
        let mut progress = |completed| {
            tell(events, file_progress(file, completed, None));
        };
        if !file.media_type.is_gguf() {
            return intake::take_whole(ingest, &mut source, file.size, &mut progress);
        }
        let mut start = Vec::new();
        let wanted = MAGIC.len() as u64;
        source.by_ref().take(wanted).read_to_end(&mut start).map_err(intake::IntakeError::Source)?;
        let is_gguf = start == MAGIC;
        let mut source = Read::chain(Cursor::new(start), source);
        if is_gguf {
            intake::take_gguf(ingest, &mut source, file.size, &mut progress)
        } else {
            intake::take_whole(ingest, &mut source, file.size, &mut progress)
        }
    }

    fn failed(&self, file: &Descriptor, source: intake::IntakeError) -> OpError {
        let name = format!("{} of {}", file.media_type.component(), self.reference.short());
        OpError::Intake { name, source }
    }

    fn tell(&self, file: &Descriptor, completed: u64, reused: Option<u64>) {
        tell(self.events, file_progress(file, completed, reused));
    }
}

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

/// Reads a registry's answer from a thread that may block.
struct StreamSource<'p> {
    handle: &'p Handle,
    events: &'p Sender<PullEvent>,
    stream: BlobStream,
    arrived: Bytes,
}

impl Read for StreamSource<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.arrived.is_empty() {
            let next = async {
                tokio::select! {
                    next = self.stream.next() => next.map_err(io::Error::other),
                    () = self.events.closed() => Err(io::Error::other("the client that asked for this pull has gone")),
                }
            };
            match self.handle.block_on(next)? {
                Some(bytes) => self.arrived = bytes,
                None => return Ok(0),
            }
        }
        let length = buffer.len().min(self.arrived.len());
        let (filled, _) = buffer.split_at_mut(length);
        Buf::copy_to_slice(&mut self.arrived, filled);
        Ok(length)
    }
}
