//! `push`: uploads a model to a registry, read out of its tensors while it is sent.

mod form;
mod image;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use blobd_client::protocol::event::{Phase, Progress as _, WorkProgress};
use blobd_client::protocol::pull::{
    ArtifactDelivery, FileDelivery, PushForm, PushParams, Pushed, PushedFile, PushedIndex, PushedSignature,
};
use blobd_registry::{
    Delivery, Destination, NewSignature, NewTensorIndex, PackedRecipe, RegistryClient, RegistryError,
    UploadContent, UploadError,
};
use blobd_store::{FileReader, Model, Store, StoredFile};
use blobd_store_format::descriptor::Descriptor;
use blobd_store_format::digest::Digest;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::reference::Reference;
use blobd_store_format::signature::Bundle;
use blobd_store_format::source::{PullSource, PulledSource};
use blobd_store_format::tensor_index::TensorIndex;
use bytes::Bytes;
use tokio::runtime::Handle;
use tokio::sync::mpsc::Sender;

use self::form::Published;
use self::image::{ArchiveReader, ImageLayer};
use super::policy::CallerPolicy;
use super::{OpError, damage, send_progress};
use crate::transfer::RateLimit;

/// The arguments of a push.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Push<'p> {
    pub(crate) store: &'p Arc<Store>,
    pub(crate) registry: &'p RegistryClient,
    /// The runtime for network I/O.
    pub(crate) handle: &'p Handle,
    pub(crate) policy: &'p CallerPolicy,
    pub(crate) params: &'p PushParams,
    /// Receives progress. The push stops when the receiver is dropped.
    pub(crate) events: &'p Sender<WorkProgress>,
}

/// Uploads the files that the registry lacks, then the manifest, whose bytes are those of the store unless another form is
/// requested. Blocks the calling
/// thread, also to read the files.
///
/// # Errors
/// [`OpError`]; the registry then keeps the files that it has received wholly.
pub(crate) fn push(push: Push<'_>) -> Result<Pushed, OpError> {
    let Push { store, registry, handle, policy, params, events } = push;
    send_progress(events, WorkProgress::working("reading the manifest", Phase::Reading));
    let lease = store.liveness().leases().grant(format!("push of {}", params.reference.short()));
    let _held = store.content().hold_lower_stores();
    let model = store.names().leased_model(&params.reference, &lease)?;
    policy.check_content(store, &model)?;
    damage::refuse(store, &model, &model.blob_sizes().collect::<Vec<_>>())?;
    let name = destination_name(&model, params)?;
    let mut destination = registry.destination(&name, params.insecure)?;
    if let Some(source) = mount_source(store, &model, &name) {
        destination = destination.mounting_from(source);
    }
    let stored = files(&model)?;
    let (published, layers) = match params.form {
        PushForm::Image => image::image(store.content(), &model, events)?,
        form => {
            let facts = store.names().facts(model.manifest.digest());
            (Published::new(form, &model, &facts)?, Vec::new())
        }
    };
    let index = if params.no_index { None } else { tensor_index(&published.manifest, &stored, &destination) };
    // They are of the stored manifest and its files.
    let is_stored_form = published.config.is_none();
    let signatures = if is_stored_form { signatures(store, &model, &destination)? } else { Vec::new() };
    let uploads = Uploads {
        push,
        signatures,
        destination,
        files: sources(stored, &layers, &published),
        published: &published,
        index,
        limit: RateLimit::new(params.limit_rate),
        deliveries: RefCell::default(),
        progress: Progress::new(events, "sending", Phase::Sending),
    };
    handle.block_on(async {
        tokio::select! {
            pushed = uploads.run(&model) => pushed,
            () = events.closed() => Err(stopped()),
        }
    })
}

fn stopped() -> OpError {
    OpError::Internal("the client of this push has disconnected".to_owned())
}

/// The name to publish a model as, which must not be one that nobody can push to.
fn destination_name(model: &Model, params: &PushParams) -> Result<Reference, OpError> {
    let name = params.destination.as_ref().unwrap_or(&model.reference);
    if name.digest().is_some() && params.destination.is_some() {
        return Err(OpError::PinnedTarget { name: name.to_string() });
    }
    if name.host() == Reference::DEFAULT_HOST && name.namespace() == Reference::DEFAULT_NAMESPACE {
        let (host, example) = (Reference::DEFAULT_HOST, name.model());
        return Err(OpError::NotPushable {
            model: model.reference.short(),
            reason: format!(
                "{} belongs to the library of {host}, which takes no models of users; give a destination, such as \
                 registry.example/team/{example}",
                name.short()
            ),
        });
    }
    Ok(name.clone())
}

/// A repository of the same registry that may have the files: the one that the model comes from, or that of its name.
fn mount_source(store: &Store, model: &Model, destination: &Reference) -> Option<String> {
    let origin = store.names().origin(model.manifest.digest()).and_then(|origin| origin.parse().ok());
    let origin = origin.and_then(|origin: PulledSource| match origin.source {
        PullSource::Registry(reference) => Some(reference),
        _ => None,
    });
    let mut sources = origin.into_iter().chain([model.reference.clone()]);
    let is_other = |source: &Reference| {
        source.host().eq_ignore_ascii_case(destination.host())
            && source.repository() != destination.repository()
    };
    sources.find(is_other).map(|source| source.repository())
}

/// The files of a model without duplicates, with their names: layers first, the configuration last.
fn files(model: &Model) -> Result<Vec<(&StoredFile, String)>, OpError> {
    let mut seen = BTreeSet::new();
    let mut files: Vec<_> = model.files.iter().zip(model.manifest.names()).collect();
    let configs = files.len().min(1);
    files.rotate_left(configs);
    files.retain(|(file, _)| seen.insert(file.descriptor.digest));
    let named = |(file, name): (&'_ StoredFile, Option<&str>)| {
        name.map_or_else(|| file.descriptor.media_type.component().to_owned(), str::to_owned)
    };
    let packed =
        files.iter().find(|(file, _)| file.recipe.as_ref().is_some_and(|recipe| recipe.unpacked().is_some()));
    if let Some((file, name)) = packed {
        let reason = format!(
            "{} was stored decompressed, and its compressed form cannot be made again",
            named((file, *name))
        );
        return Err(OpError::NotPushable { model: model.reference.short(), reason });
    }
    Ok(files.into_iter().map(|(file, name)| (file, named((file, name)))).collect())
}

/// What is uploaded: the files of a model, or the layers that they are in, with the configuration that was made for it in place
/// of its own.
fn sources<'m>(
    stored: Vec<(&'m StoredFile, String)>,
    layers: &'m [ImageLayer<'m>],
    published: &Published,
) -> Vec<Upload<'m>> {
    let published_files = published.manifest.digests();
    let stored = stored.into_iter().filter(|(file, _)| published_files.contains(&file.descriptor.digest));
    let upload = |(file, name): (&'m StoredFile, String)| Upload {
        file: file.descriptor.clone(),
        name,
        bytes: UploadBytes::Stored(file),
    };
    let layer = |layer: &'m ImageLayer<'m>| Upload {
        file: layer.file.clone(),
        name: layer.name(),
        bytes: UploadBytes::Layer(layer),
    };
    let mut uploads: Vec<_> = stored.map(upload).chain(layers.iter().map(layer)).collect();
    if let Some(config) = &published.config {
        let (file, name) = (published.manifest.config().clone(), "config".to_owned());
        uploads.push(Upload { file, name, bytes: UploadBytes::Made(config.clone()) });
    }
    uploads
}

/// The tensor index of a model: the recipes of its files with tensors. `None` if none is worth it, and for registries that
/// take none.
fn tensor_index(
    manifest: &Manifest,
    files: &[(&StoredFile, String)],
    destination: &Destination,
) -> Option<NewTensorIndex> {
    if !destination.takes_artifacts() {
        return None;
    }
    let recipes = files.iter().filter_map(|(file, _)| file.recipe.as_deref());
    let split = recipes.filter(|recipe| !recipe.tensors().is_empty() && recipe.format().is_some());
    let large = split.filter(|recipe| recipe.size() >= TensorIndex::MIN_FILE_BYTES);
    NewTensorIndex::new(manifest, large.filter_map(PackedRecipe::new).collect())
}

/// The signatures of a model, with the IDs of their keys; none for registries that take none.
fn signatures(
    store: &Store,
    model: &Model,
    destination: &Destination,
) -> Result<Vec<(Option<String>, NewSignature)>, OpError> {
    if !destination.takes_artifacts() {
        return Ok(Vec::new());
    }
    let bundles = store.names().signatures(model.manifest.digest())?;
    let bundles = bundles.iter().filter_map(|text| Bundle::parse(text.as_bytes()).ok());
    let new = |bundle: Bundle| {
        Some((bundle.key_id().map(str::to_owned), NewSignature::new(&model.manifest, &bundle)?))
    };
    Ok(bundles.filter_map(new).collect())
}

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
struct Upload<'u> {
    file: Descriptor,
    name: String,
    bytes: UploadBytes<'u>,
}

/// Where the bytes of a file come from.
enum UploadBytes<'u> {
    Stored(&'u StoredFile),
    Layer(&'u ImageLayer<'u>),
    /// They were made for this push.
    Made(Bytes),
}

struct Uploads<'u> {
    push: Push<'u>,
    destination: Destination,
    files: Vec<Upload<'u>>,
    published: &'u Published,
    index: Option<NewTensorIndex>,
    signatures: Vec<(Option<String>, NewSignature)>,
    limit: RateLimit,
    deliveries: RefCell<BTreeMap<Digest, FileDelivery>>,
    progress: Progress<'u>,
}

impl Uploads<'_> {
    async fn run(&self, model: &Model) -> Result<Pushed, OpError> {
        let Push { store, registry, params, events, .. } = self.push;
        let status = format!("asking {}", self.destination.reference().host());
        send_progress(events, WorkProgress::working(status, Phase::Resolving));
        let before = registry.pushed_manifest(&self.destination).await?;
        each(&self.files, |upload| self.ask_for(&upload.file)).await?;
        let missing = |upload: &&Upload<'_>| self.delivery(&upload.file) == FileDelivery::Sent;
        let missing: Vec<&Upload<'_>> = self.files.iter().filter(missing).collect();
        let manifest = &self.published.manifest;
        if !params.dry_run {
            self.progress.expect(missing.iter().map(|upload| upload.file.size));
            each(&missing, |upload| self.send(store, upload)).await?;
            if before != Some(manifest.digest()) || !missing.is_empty() {
                send_progress(events, WorkProgress::working("publishing the manifest", Phase::Committing));
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
        Ok(Pushed { index, signatures, ..self.pushed(model, before) })
    }

    /// As [`Self::publish_index`], for a signature.
    async fn publish_signature(&self, key_id: Option<String>, signature: &NewSignature) -> PushedSignature {
        let Push { registry, params, .. } = self.push;
        let published = if params.dry_run {
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
        let Push { registry, params, .. } = self.push;
        let published: Result<Delivery, RegistryError> = if params.dry_run {
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
        let is_present = self.push.registry.has_blob(&self.destination, digest).await?;
        let delivery = if is_present { FileDelivery::Present } else { FileDelivery::Sent };
        self.deliveries.borrow_mut().insert(digest, delivery);
        Ok(())
    }

    async fn send(&self, store: &Store, Upload { file, bytes, .. }: &Upload<'_>) -> Result<(), OpError> {
        let Self { progress, limit, .. } = self;
        let source = match bytes {
            UploadBytes::Stored(stored) => ContentSource::Stored(FileReader::new(store.content(), stored)),
            UploadBytes::Layer(layer) => ContentSource::Layer(layer.reader(store.content())),
            UploadBytes::Made(bytes) => ContentSource::Made(bytes),
        };
        let mut content = Content { source, file, progress, limit };
        let sent = self.push.registry.push_blob(&self.destination, file, &mut content).await;
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

    fn pushed(&self, model: &Model, before: Option<Digest>) -> Pushed {
        let params = self.push.params;
        let digest = self.published.manifest.digest();
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
        Pushed {
            name: model.reference.short(),
            destination: self.destination.reference().to_string(),
            digest,
            form: params.form,
            replaced: before.filter(|before| *before != digest),
            unchanged: before == Some(digest),
            size: bytes(&[sent, mounted, present]),
            sent_bytes: bytes(&[sent]),
            mounted_bytes: bytes(&[mounted]),
            present_bytes: bytes(&[present]),
            files,
            index: None,
            signatures: Vec::new(),
            dry_run: params.dry_run,
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
    limit: &'c RateLimit,
}

enum ContentSource<'c> {
    Stored(FileReader<'c>),
    Layer(ArchiveReader<'c>),
    Made(&'c Bytes),
}

impl ContentSource<'_> {
    fn read(&mut self, range: Range<u64>) -> Result<Bytes, OpError> {
        match self {
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
        let bytes = self.source.read(offset..end)?;
        if bytes.is_empty() {
            return Err(OpError::Internal(format!("{}: ends at {offset}", self.file.digest)));
        }
        self.limit.wait(bytes.len() as u64).await;
        Ok(bytes)
    }
}

/// Adds up how much of all files has been sent, or read, and tells the client now and then.
struct Progress<'p> {
    events: &'p Sender<WorkProgress>,
    status: &'static str,
    phase: Phase,
    total: Cell<u64>,
    completed: RefCell<BTreeMap<Digest, u64>>,
    last_event: Cell<Option<Instant>>,
}

impl<'p> Progress<'p> {
    const INTERVAL: Duration = Duration::from_millis(100);

    fn new(events: &'p Sender<WorkProgress>, status: &'static str, phase: Phase) -> Self {
        let (total, last_event) = (Cell::new(0), Cell::new(None));
        Self { events, status, phase, total, completed: RefCell::default(), last_event }
    }

    fn expect(&self, sizes: impl Iterator<Item = u64>) {
        self.total.set(sizes.fold(0, u64::saturating_add));
    }

    fn set(&self, file: Digest, completed: u64) {
        self.completed.borrow_mut().insert(file, completed);
        let sum = self.completed.borrow().values().fold(0, |sum: u64, bytes| sum.saturating_add(*bytes));
        let is_last = sum == self.total.get();
        if !is_last && self.last_event.get().is_some_and(|last| last.elapsed() < Self::INTERVAL) {
            return;
        }
        self.last_event.set(Some(Instant::now()));
        let (total, completed) = (Some(self.total.get()), Some(sum));
        send_progress(
            self.events,
            WorkProgress { total, completed, ..WorkProgress::working(self.status, self.phase) },
        );
    }
}
