//! `pull`: a model comes from its registry, or from where its files are.

use std::io::{self, Cursor, Read};
use std::sync::Arc;

use blobd_client::protocol::request::PullParams;
use blobd_client::protocol::response::{PullDone, PullEvent, PullProgress};
use blobd_store_format::descriptor::Descriptor;
use blobd_store_format::digest::Digest;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::reference::Reference;
use blobd_store_format::source::PullSource;
use bytes::{Buf, Bytes};
use tokio::runtime::Handle;
use tokio::sync::mpsc::Sender;

use super::compose::{Part, compose};
use super::show::read_header;
use super::{OpError, commit::leaving_nothing, error::refuse_pinned, shards};
use crate::intake::{self, ModelFacts, TakenFile};
use crate::registry::{RegistryClient, RemoteFile, RemoteModel, RemoteStream};
use crate::store::{Ingest, Store, StoreError, StoredForm, disk};

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
    let reference = &name(params)?;
    tell(events, PullProgress { status: "pulling manifest".to_owned(), ..PullProgress::default() });
    let remote = handle.block_on(registry.resolve(&params.source))?;
    let lease = store.leases().grant(format!("pull of {}", reference.short()));
    let ingest = Ingest::begin(store, lease)?;
    let mut pull =
        Pull { registry, handle, reference, events, ingest, downloaded_bytes: 0, present_bytes: 0 };
    let (manifest, origin) = match remote {
        RemoteModel::Published(manifest) => {
            pull.take_published(&params.source, &manifest)?;
            (manifest, params.source.origin())
        }
        RemoteModel::Files { files, origin } => (pull.take_files(&files)?, origin),
    };
    tell(events, PullProgress { status: "writing manifest".to_owned(), ..PullProgress::default() });
    // What cannot be had again is as if it were imported.
    let origin = origin.unwrap_or_else(|| format!("import {}", params.source));
    let committed = pull.ingest.commit(reference, &manifest, Some(&origin))?;
    Ok(PullDone {
        status: "success".to_owned(),
        name: reference.short(),
        digest: manifest.digest(),
        downloaded_bytes: pull.downloaded_bytes,
        reused_bytes: pull.present_bytes.saturating_add(committed.reused_bytes),
    })
}

/// What the model is to be called.
fn name(params: &PullParams) -> Result<Reference, OpError> {
    let address = || params.source.to_string();
    match &params.name {
        Some(name) => refuse_pinned(name).map(|()| name.clone()),
        None => params.source.name().map_err(|source| OpError::Address { address: address(), source }),
    }
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

/// A file that is in the store now, or will be with the commit.
struct Held {
    file: Descriptor,
    /// What its header says, if it is a GGUF file.
    facts: Option<ModelFacts>,
}

impl Pull<'_> {
    /// Takes all files of a manifest, layers first.
    fn take_published(&mut self, source: &PullSource, manifest: &Manifest) -> Result<(), OpError> {
        let PullSource::Registry(upstream) = source else { return Ok(()) };
        let files: Vec<_> =
            files_in_order(manifest).into_iter().map(|file| RemoteFile::layer(upstream, file)).collect();
        let held = self.take_all(&files)?;
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
        if let Some(descriptor) = self.present(file)? {
            self.present_bytes += file.size();
            self.tell(file, file.size(), Some(file.size()));
            let facts = self.stored_facts(&descriptor)?;
            return Ok(Held { file: descriptor, facts });
        }
        self.admit(file)?;
        self.tell(file, 0, None);
        let stream = self.handle.block_on(self.registry.open(file))?;
        let taken = self.receive(file, stream);
        let TakenFile { digest, size, facts } =
            taken.map_err(|source| OpError::Intake { name: file.label(), source })?;
        if let Some(expected) = file.digest().filter(|expected| *expected != digest) {
            return Err(OpError::DigestMismatch { what: file.label(), found: digest, expected });
        }
        self.downloaded_bytes += size;
        let media_type = file.media_type().clone();
        Ok(Held { file: Descriptor { media_type, digest, size }, facts })
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
        let root = store.root().to_path_buf();
        let (needed_bytes, capacity) = (file.size(), disk::capacity_bytes(&root)?);
        if let Some(quota_bytes) = store.space_policy().quota_bytes.filter(|quota| needed_bytes > *quota) {
            let used_bytes = store.used_bytes();
            return Err(StoreError::Quota { root, needed_bytes, used_bytes, quota_bytes }.into());
        }
        let is_plain = !file.media_type().is_gguf();
        if needed_bytes > capacity || is_plain && store.shortage(needed_bytes) > 0 && !store.can_make_room() {
            let free_bytes = disk::free_bytes(&root)?;
            return Err(StoreError::NoRoom { root, needed_bytes, free_bytes }.into());
        }
        Ok(())
    }

    /// The file's descriptor if all of it is stored. Pinned first: what is found present must not be
    /// collected before the tag needs it.
    fn present(&self, file: &RemoteFile) -> Result<Option<Descriptor>, OpError> {
        let Some(file) = file.descriptor() else { return Ok(None) };
        let (store, lease) = (self.ingest.store(), self.ingest.lease());
        lease.pin(file.digest);
        lease.pin_all(store.stored_file(&file)?.blob_sizes().into_iter().map(|(digest, _)| digest));
        Ok(store.has_file(&file)?.then_some(file))
    }

    /// What a file that is stored says about itself, if it is one of weights.
    fn stored_facts(&self, file: &Descriptor) -> Result<Option<ModelFacts>, OpError> {
        let store = self.ingest.store();
        match store.stored_file(file)?.form {
            StoredForm::Recipe(recipe) if file.media_type.component() == WEIGHTS => {
                Ok(read_header(store, &recipe)?.as_ref().map(ModelFacts::of))
            }
            _ => Ok(None),
        }
    }

    /// A layer of weights is split if it is a GGUF file; everything else is one blob. What is named
    /// by its address alone must be one.
    fn receive(&mut self, file: &RemoteFile, stream: RemoteStream) -> Result<TakenFile, intake::IntakeError> {
        const MAGIC: &[u8] = b"GGUF";
        let (handle, events, ingest) = (self.handle, self.events, &mut self.ingest);
        let mut source = StreamSource { handle, events, stream, arrived: Bytes::new() };
        let mut progress = |completed| {
            tell(events, file_progress(file, completed, None));
        };
        if !file.media_type().is_gguf() {
            return intake::take_whole(ingest, &mut source, file.size(), &mut progress);
        }
        let mut start = Vec::new();
        let wanted = MAGIC.len() as u64;
        source.by_ref().take(wanted).read_to_end(&mut start).map_err(intake::IntakeError::Source)?;
        let is_gguf = start == MAGIC || file.digest().is_none();
        let mut source = Read::chain(Cursor::new(start), source);
        if is_gguf {
            intake::take_gguf(ingest, &mut source, file.size(), &mut progress)
        } else {
            intake::take_whole(ingest, &mut source, file.size(), &mut progress)
        }
    }

    fn tell(&self, file: &RemoteFile, completed: u64, reused: Option<u64>) {
        tell(self.events, file_progress(file, completed, reused));
    }
}

/// The part of those files that shards are parts of.
const WEIGHTS: &str = "model";

fn facts_of_weights(held: Vec<Held>) -> Vec<ModelFacts> {
    let weights = held.into_iter().filter(|held| held.file.media_type.component() == WEIGHTS);
    weights.filter_map(|held| held.facts).collect()
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

/// Reads a registry's answer from a thread that may block.
struct StreamSource<'p> {
    handle: &'p Handle,
    events: &'p Sender<PullEvent>,
    stream: RemoteStream,
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
