//! `transfer`: a model of one registry is published at another, without being stored here.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::sync::Arc;

use blobd_client::protocol::event::{Phase, Progress as _, WorkProgress};
use blobd_client::protocol::push::{TransferParams, Transferred};
use blobd_registry::{
    Destination, NewSignature, NewTensorIndex, PackedRecipe, PublishedModel, RegistryClient, RemoteModel,
};
use blobd_store::Store;
use blobd_store_format::descriptor::Descriptor;
use blobd_store_format::reference::Reference;
use blobd_store_format::source::{Components, PullSource};
use blobd_store_format::tensor_index::TensorIndex;
use tokio::runtime::Handle;

use super::super::OpError;
use super::super::policy::CallerPolicy;
use super::progress::{Listeners, Progress};
use super::uploads::{Upload, UploadBytes, Uploads};
use super::{check_destination, new_signatures, stopped};
use crate::transfer::RateLimit;

/// The arguments of a transfer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Transfer<'t> {
    pub(crate) store: &'t Arc<Store>,
    pub(crate) registry: &'t RegistryClient,
    /// The runtime for network I/O.
    pub(crate) handle: &'t Handle,
    pub(crate) policy: &'t CallerPolicy,
    pub(crate) params: &'t TransferParams,
    /// Are told of the progress. The transfer stops when the receiver of the events is dropped.
    pub(crate) listeners: Listeners<'t>,
    /// The rate limit of all transfers together.
    pub(crate) limit: &'t RateLimit,
}

/// Publishes a model under another name, with the bytes of its manifest, its tensor index and its signatures. Files that the
/// destination has are not received. Blocks the calling thread.
///
/// # Errors
/// [`OpError`]; the destination then keeps the files that it has received wholly.
pub(crate) fn transfer(transfer: Transfer<'_>) -> Result<Transferred, OpError> {
    let Transfer { store, registry, handle, policy, params, listeners, limit } = transfer;
    let TransferParams { source, destination: name, .. } = params;
    check_destination(source, name, true)?;
    policy.check_source(&PullSource::Registry(source.clone()), None)?;
    let mut destination = registry.destination(name, params.insecure)?;
    if source.host().eq_ignore_ascii_case(name.host()) {
        destination = destination.mounting_from(source.repository());
    }
    let status = format!("asking {}", source.host());
    listeners.tell(WorkProgress::working(status, Phase::Resolving));
    let found = handle.block_on(async {
        tokio::select! {
            found = transfer.look_up(&destination) => found,
            () = listeners.events.closed() => Err(stopped()),
        }
    })?;
    let uploads = Uploads {
        store,
        registry,
        listeners,
        is_dry_run: params.dry_run,
        destination,
        files: files(source, &found.model),
        manifest: &found.model.manifest,
        index: found.index,
        signatures: found.signatures,
        limits: [RateLimit::new(params.limit_rate), limit.clone()],
        deliveries: RefCell::default(),
        progress: Progress::new(listeners, "passing on", Phase::Sending),
    };
    Ok(Transferred { source: source.to_string(), publication: uploads.run(handle)? })
}

/// What the source has.
struct Found {
    model: PublishedModel,
    index: Option<NewTensorIndex>,
    signatures: Vec<(Option<String>, NewSignature)>,
}

impl Transfer<'_> {
    async fn look_up(&self, destination: &Destination) -> Result<Found, OpError> {
        let Self { registry, params, .. } = self;
        let source = PullSource::Registry(params.source.clone());
        let remote = registry.resolve(&source).await?;
        let artifacts = match (&remote, destination.takes_artifacts()) {
            (RemoteModel::Published(_), true) => {
                Some(registry.signatures(&source, &Components::default(), &remote).await?.bundles)
            }
            _ => None,
        };
        let RemoteModel::Published(model) = remote else {
            let reason = "its registry has files and no manifest; pull it, and push it from here".to_owned();
            return Err(OpError::NotPushable { model: params.source.short(), reason });
        };
        let Some(bundles) = artifacts else {
            return Ok(Found { model, index: None, signatures: Vec::new() });
        };
        let signatures = new_signatures(&model.manifest, bundles.into_iter());
        Ok(Found { index: self.index(&model).await, signatures, model })
    }

    /// The tensor index, with the recipes that can be had: a model is usable without.
    async fn index(&self, PublishedModel { manifest, .. }: &PublishedModel) -> Option<NewTensorIndex> {
        let Self { registry, params, .. } = self;
        if !TensorIndex::in_manifest(manifest).is_empty() {
            // It is one of the layers.
            return None;
        }
        let index = registry.tensor_index(&params.source, manifest).await?;
        let (mut seen, mut recipes) = (BTreeSet::new(), Vec::new());
        for Descriptor { digest, size, .. } in
            manifest.layers().iter().filter(|layer| seen.insert(layer.digest))
        {
            let Some(recipe) = index.recipe(*digest) else { continue };
            if recipe.size > TensorIndex::max_recipe_bytes(*size) {
                continue;
            }
            let packed = registry.packed_recipe(&params.source, recipe).await;
            let checked = packed.map_err(|error| error.to_string()).and_then(|packed| {
                PackedRecipe::checked(packed, *digest, *size).map_err(|error| error.to_string())
            });
            match checked {
                Ok(recipe) => recipes.push(recipe),
                Err(error) => tracing::debug!("{digest}: no recipe: {error}"),
            }
        }
        NewTensorIndex::new(manifest, recipes)
    }
}

/// The files of a model without duplicates, the layers first.
fn files<'u>(source: &Reference, model: &PublishedModel) -> Vec<Upload<'u>> {
    let manifest = &model.manifest;
    let mut seen = BTreeSet::new();
    let mut files: Vec<_> = manifest.files().zip(manifest.names()).collect();
    let configs = files.len().min(1);
    files.rotate_left(configs);
    files.retain(|(file, _)| seen.insert(file.digest));
    let upload = |(file, name): (&Descriptor, Option<&str>)| Upload {
        file: file.clone(),
        name: name.unwrap_or_else(|| file.media_type.component()).to_owned(),
        bytes: UploadBytes::Remote(Box::new(model.remote(source, file))),
    };
    files.into_iter().map(upload).collect()
}
