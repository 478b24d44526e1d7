//! `push`: uploads a model to a registry, read out of its tensors while it is sent. `transfer`: the same for a model of another
//! registry, whose files pass through.

mod between;
mod form;
mod image;
mod passing_file;
mod progress;
mod tensors;
mod uploads;

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::sync::Arc;

use blobd_client::protocol::event::{Phase, Progress as _, WorkProgress};
use blobd_client::protocol::push::{PushForm, PushParams, Pushed};
use blobd_registry::{Destination, NewSignature, NewTensorIndex, PackedRecipe, RegistryClient};
use blobd_store::{Model, Store, StoredFile};
use blobd_store_format::manifest::Manifest;
use blobd_store_format::reference::Reference;
use blobd_store_format::signature::Bundle;
use blobd_store_format::source::{PullSource, PulledSource};
use blobd_store_format::tensor_index::TensorIndex;
use tokio::runtime::Handle;

pub(crate) use self::between::{Transfer, transfer};
use self::form::Published;
use self::image::ImageLayer;
pub(crate) use self::progress::Listeners;
use self::progress::Progress;
use self::tensors::SeparateLayers;
use self::uploads::{Upload, UploadBytes, Uploads};
use super::policy::CallerPolicy;
use super::{OpError, damage};
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
    /// Are told of the progress. The push stops when the receiver of the events is dropped.
    pub(crate) listeners: Listeners<'p>,
    /// The rate limit of all transfers together.
    pub(crate) limit: &'p RateLimit,
}

/// Uploads the files that the registry lacks, then the manifest, whose bytes are those of the store unless another form is
/// requested. Blocks the calling
/// thread, also to read the files.
///
/// # Errors
/// [`OpError`]; the registry then keeps the files that it has received wholly.
pub(crate) fn push(push: Push<'_>) -> Result<Pushed, OpError> {
    let Push { store, registry, handle, policy, params, listeners, limit } = push;
    listeners.tell(WorkProgress::working("reading the manifest", Phase::Reading));
    let lease = store.liveness().leases().grant(format!("push of {}", params.reference.short()));
    let _held = store.content().hold_lower_stores();
    let model = store.names().leased_model(&params.reference, &lease)?;
    policy.check_content(store, &model)?;
    damage::refuse(store, &model, &model.blob_sizes().collect::<Vec<_>>())?;
    let name = params.destination.as_ref().unwrap_or(&model.reference);
    check_destination(&model.reference, name, params.destination.is_some())?;
    let mut destination = registry.destination(name, params.insecure)?;
    if let Some(source) = mount_source(store, &model, name) {
        destination = destination.mounting_from(source);
    }
    let stored = files(&model)?;
    let separate = match params.form {
        PushForm::Tensors => Some(SeparateLayers::new(&model, &stored)?),
        _ => None,
    };
    let (published, layers) = match params.form {
        PushForm::Image => image::image(store.content(), &model, listeners)?,
        form => {
            let facts = store.names().facts(model.manifest.digest());
            (Published::new(form, &model, &facts)?, Vec::new())
        }
    };
    // The layers of an image are not the model's files, so nobody could use an index of these. A layer per tensor needs none.
    let has_index = !params.no_index && !matches!(params.form, PushForm::Image | PushForm::Tensors);
    let index = has_index.then(|| tensor_index(&published.manifest, &stored, &destination)).flatten();
    // They are of the stored manifest and its files.
    let is_stored_form = published.config.is_none();
    let signatures = if is_stored_form { signatures(store, &model, &destination)? } else { Vec::new() };
    let uploads = Uploads {
        store,
        registry,
        listeners,
        is_dry_run: params.dry_run,
        destination,
        files: match &separate {
            Some(separate) => separate.uploads(),
            None => sources(stored, &layers, &published),
        },
        manifest: separate.as_ref().map_or(&published.manifest, |separate| &separate.manifest),
        index,
        signatures,
        limits: [RateLimit::new(params.limit_rate), limit.clone()],
        deliveries: RefCell::default(),
        progress: Progress::new(listeners, "sending", Phase::Sending),
    };
    Ok(Pushed { name: model.reference.short(), form: params.form, publication: uploads.run(handle)? })
}

fn stopped() -> OpError {
    OpError::Internal("the client of this upload has disconnected".to_owned())
}

/// Refuses a name to publish a model as that nobody can push to. `is_given` is whether it is not the model's own.
fn check_destination(model: &Reference, name: &Reference, is_given: bool) -> Result<(), OpError> {
    if name.digest().is_some() && is_given {
        return Err(OpError::PinnedTarget { name: name.to_string() });
    }
    if name.host() == Reference::DEFAULT_HOST && name.namespace() == Reference::DEFAULT_NAMESPACE {
        let (host, example) = (Reference::DEFAULT_HOST, name.model());
        return Err(OpError::NotPushable {
            model: model.short(),
            reason: format!(
                "{} belongs to the library of {host}, which takes no models of users; give a destination, such as \
                 registry.example/team/{example}",
                name.short()
            ),
        });
    }
    Ok(())
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
    Ok(new_signatures(&model.manifest, bundles))
}

fn new_signatures(
    manifest: &Manifest,
    bundles: impl Iterator<Item = Bundle>,
) -> Vec<(Option<String>, NewSignature)> {
    let new =
        |bundle: Bundle| Some((bundle.key_id().map(str::to_owned), NewSignature::new(manifest, &bundle)?));
    bundles.filter_map(new).collect()
}
