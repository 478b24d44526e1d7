//! Uploads the files of a model that a registry lacks, then its manifest, and what belongs beside it.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use blobd_client::protocol::event::{Phase, Progress as _, WorkProgress};
use blobd_client::protocol::push::{
    ArtifactDelivery, FileDelivery, Publication, PushedFile, PushedIndex, PushedSignature,
};
use blobd_registry::{
    Delivery, Destination, NewSignature, NewTensorIndex, RegistryClient, RegistryError, RemoteFile,
    UploadContent, UploadError,
};
use blobd_store::{FileReader, Store, StoredFile};
use blobd_store_format::descriptor::Descriptor;
use blobd_store_format::digest::Digest;
use blobd_store_format::manifest::Manifest;
use bytes::Bytes;
use tokio::runtime::Handle;

use super::super::OpError;
use super::image::{ArchiveReader, ImageLayer};
use super::passing_file::PassingFile;
use super::progress::{Listeners, Progress};
use super::stopped;
use crate::transfer::RateLimit;

/// The files that are uploaded at the same time.
const AT_ONCE: usize = 4;

/// Works on some items at a time; the first error ends all.
async fn each<'i, T, F: Future<Output = Result<(), OpError>>>(
    items: &'i [T],
    work: impl Fn(&'i T) -> F,
) -> Result<(), OpError> {
    let next = Cell::new(0);
    let worker = || async {
        while let Some(item) = items.get(next.replace(next.get() + 1)) {
            Box::pin(work(item)).await?;
        }
        Ok(())
    };
    let [first, second, third, fourth] = std::array::from_fn::<_, AT_ONCE, _>(|_| worker());
    tokio::try_join!(first, second, third, fourth).map(|_all| ())
}

/// A file to be uploaded.
pub(super) struct Upload<'u> {
    pub(super) file: Descriptor,
    pub(super) name: String,
    pub(super) bytes: UploadBytes<'u>,
}

/// Where the bytes of a file come from.
pub(super) enum UploadBytes<'u> {
    Stored(&'u StoredFile),
    /// Another registry has it.
    Remote(Box<RemoteFile>),
    Layer(&'u ImageLayer<'u>),
    /// They were made for this push.
    Made(Bytes),
}

/// What is uploaded, where to, and how.
pub(super) struct Uploads<'u> {
    pub(super) store: &'u Arc<Store>,
    pub(super) registry: &'u RegistryClient,
    pub(super) listeners: Listeners<'u>,
    pub(super) is_dry_run: bool,
    pub(super) destination: Destination,
    pub(super) files: Vec<Upload<'u>>,
    pub(super) manifest: &'u Manifest,
    pub(super) index: Option<NewTensorIndex>,
    pub(super) signatures: Vec<(Option<String>, NewSignature)>,
    /// The rate limits of this upload and of all transfers together.
    pub(super) limits: [RateLimit; 2],
    pub(super) deliveries: RefCell<BTreeMap<Digest, FileDelivery>>,
    pub(super) progress: Progress<'u>,
}

impl Uploads<'_> {
    /// Uploads everything, unless the client goes.
    pub(super) fn run(&self, handle: &Handle) -> Result<Publication, OpError> {
        handle.block_on(async {
            tokio::select! {
                pushed = self.upload() => pushed,
                () = self.listeners.events.closed() => Err(stopped()),
            }
        })
    }

    async fn upload(&self) -> Result<Publication, OpError> {
        let Self { registry, listeners, manifest, .. } = self;
        let status = format!("asking {}", self.destination.reference().host());
        listeners.tell(WorkProgress::working(status, Phase::Resolving));
        let before = registry.pushed_manifest(&self.destination).await?;
        each(&self.files, |upload| self.ask_for(&upload.file)).await?;
        let missing = |upload: &&Upload<'_>| self.delivery(&upload.file) == FileDelivery::Sent;
        let missing: Vec<&Upload<'_>> = self.files.iter().filter(missing).collect();
        if !self.is_dry_run {
            self.progress.expect(missing.iter().map(|upload| upload.file.size));
            each(&missing, |upload| self.send(upload)).await?;
            if before != Some(manifest.digest()) || !missing.is_empty() {
                listeners.tell(WorkProgress::working("publishing the manifest", Phase::Committing));
                registry.push_manifest(&self.destination, manifest).await?;
            }
        }
        let index = match &self.index {
            Some(index) => Some(self.publish_index(index).await),
            None => None,
        };
        let mut signatures = Vec::new();
        for (key_id, signature) in &self.signatures {
            signatures.push(self.publish_signature(key_id.clone(), signature).await);
        }
        Ok(Publication { index, signatures, ..self.publication(before) })
    }

    /// As [`Self::publish_index`], for a signature.
    async fn publish_signature(&self, key_id: Option<String>, signature: &NewSignature) -> PushedSignature {
        let registry = self.registry;
        let published = if self.is_dry_run {
            let present = registry.has_signature(&self.destination, signature).await;
            present.map(|present| if present { Delivery::Present } else { Delivery::Sent })
        } else {
            registry.push_signature(&self.destination, signature).await
        };
        let (delivery, reason) = outcome(published);
        PushedSignature { key_id, delivery, reason }
    }

    /// Publishes the tensor index, or in a dry run finds out whether the registry has it. The model is published already, so
    /// a failure is only reported.
    async fn publish_index(&self, index: &NewTensorIndex) -> PushedIndex {
        let registry = self.registry;
        let published: Result<Delivery, RegistryError> = if self.is_dry_run {
            let present = registry.has_tensor_index(&self.destination, index).await;
            present.map(|present| if present { Delivery::Present } else { Delivery::Sent })
        } else {
            registry.push_tensor_index(&self.destination, index).await
        };
        let (delivery, reason) = outcome(published);
        PushedIndex { size: index.size(), delivery, reason }
    }

    async fn ask_for(&self, file: &Descriptor) -> Result<(), OpError> {
        let digest = file.digest;
        let is_present = self.registry.has_blob(&self.destination, digest).await?;
        let delivery = if is_present { FileDelivery::Present } else { FileDelivery::Sent };
        self.deliveries.borrow_mut().insert(digest, delivery);
        Ok(())
    }

    async fn send(&self, Upload { file, name, bytes }: &Upload<'_>) -> Result<(), OpError> {
        let Self { store, progress, limits, .. } = self;
        let source = match bytes {
            UploadBytes::Stored(stored) => ContentSource::Stored(FileReader::new(store.content(), stored)),
            UploadBytes::Remote(remote) => {
                let passing = PassingFile::new(self.registry, remote, (name, file));
                ContentSource::Remote(Box::new(passing))
            }
            UploadBytes::Layer(layer) => ContentSource::Layer(layer.reader(store.content())),
            UploadBytes::Made(bytes) => ContentSource::Made(bytes),
        };
        let mut content = Content { source, file, progress, limits };
        let sent = self.registry.push_blob(&self.destination, file, &mut content).await;
        let delivery = match sent {
            Ok(Delivery::Mounted) => FileDelivery::Mounted,
            Ok(Delivery::Present | Delivery::Sent) => FileDelivery::Sent,
            Err(UploadError::Registry(error)) => return Err(error.into()),
            Err(UploadError::Content(error)) => return Err(error),
        };
        progress.set(file.digest, file.size);
        self.deliveries.borrow_mut().insert(file.digest, delivery);
        Ok(())
    }

    fn delivery(&self, file: &Descriptor) -> FileDelivery {
        self.deliveries.borrow().get(&file.digest).copied().unwrap_or(FileDelivery::Sent)
    }

    fn publication(&self, before: Option<Digest>) -> Publication {
        let digest = self.manifest.digest();
        let file = |Upload { file, name, .. }: &Upload<'_>| PushedFile {
            name: name.clone(),
            digest: file.digest,
            size: file.size,
            delivery: self.delivery(file),
        };
        let files: Vec<PushedFile> = self.files.iter().map(file).collect();
        let bytes = |wanted: &[FileDelivery]| {
            let sizes = files.iter().filter(|file| wanted.contains(&file.delivery)).map(|file| file.size);
            sizes.fold(0, u64::saturating_add)
        };
        let [sent, mounted, present] = [FileDelivery::Sent, FileDelivery::Mounted, FileDelivery::Present];
        Publication {
            destination: self.destination.reference().to_string(),
            digest,
            replaced: before.filter(|before| *before != digest),
            unchanged: before == Some(digest),
            size: bytes(&[sent, mounted, present]),
            sent_bytes: bytes(&[sent]),
            mounted_bytes: bytes(&[mounted]),
            present_bytes: bytes(&[present]),
            files,
            index: None,
            signatures: Vec::new(),
            dry_run: self.is_dry_run,
        }
    }
}

/// Whether the registry got an artifact, and why not.
fn outcome(published: Result<Delivery, RegistryError>) -> (ArtifactDelivery, Option<String>) {
    match published {
        Ok(Delivery::Present) => (ArtifactDelivery::Present, None),
        Ok(Delivery::Mounted | Delivery::Sent) => (ArtifactDelivery::Sent, None),
        Err(error) => (ArtifactDelivery::Refused, Some(error.to_string())),
    }
}

/// A file while it is sent.
struct Content<'c> {
    source: ContentSource<'c>,
    file: &'c Descriptor,
    progress: &'c Progress<'c>,
    limits: &'c [RateLimit],
}

enum ContentSource<'c> {
    Stored(FileReader<'c>),
    Remote(Box<PassingFile<'c>>),
    Layer(ArchiveReader<'c>),
    Made(&'c Bytes),
}

impl ContentSource<'_> {
    async fn read(&mut self, range: Range<u64>) -> Result<Bytes, OpError> {
        match self {
            Self::Remote(file) => file.read(range.start).await,
            Self::Stored(reader) => Ok(reader.read_range(range)?.into()),
            Self::Layer(reader) => reader.read(range),
            Self::Made(bytes) => {
                let place = |offset: u64| usize::try_from(offset).unwrap_or(usize::MAX).min(bytes.len());
                Ok(bytes.slice(place(range.start)..place(range.end)))
            }
        }
    }
}

/// The bytes that are read at once. A connection must take as many within the time limit for silence.
const CHUNK_BYTES: u64 = 128 << 10;

impl UploadContent for Content<'_> {
    type Error = OpError;

    async fn read(&mut self, offset: u64) -> Result<Bytes, OpError> {
        self.progress.set(self.file.digest, offset);
        let end = offset.saturating_add(CHUNK_BYTES).min(self.file.size);
        let bytes = self.source.read(offset..end).await?;
        if bytes.is_empty() {
            return Err(OpError::Internal(format!("{}: ends at {offset}", self.file.digest)));
        }
        for limit in self.limits {
            limit.wait(bytes.len() as u64).await;
        }
        Ok(bytes)
    }
}
