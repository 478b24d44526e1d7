//! `pull --dry-run`: what a pull would move, and why not more.

use std::convert::Infallible;
use std::sync::Arc;

use blobd_client::protocol::request::PullParams;
use blobd_client::protocol::response::{PlannedFile, PullPlan};
use blobd_registry::{RegistryClient, RemoteFile, RemoteModel};
use blobd_store::Store;
use blobd_store::leases::Lease;
use tokio::runtime::Handle;
use tokio::sync::mpsc::Sender;

use super::OpError;
use super::pull::{failed, layers, name, resolved};
use crate::transfer::{Job, RateLimit, Transfers};

/// What a plan is made with.
#[derive(Clone, Copy, Debug)]
pub struct Planning<'p> {
    /// Where the model would go.
    pub store: &'p Arc<Store>,
    /// Where it would come from.
    pub registry: &'p RegistryClient,
    /// What is being transferred.
    pub transfers: &'p Transfers,
    /// The runtime on which the network is.
    pub handle: &'p Handle,
    /// Who asks.
    pub uid: u32,
    /// What is asked for.
    pub params: &'p PullParams,
    /// Closed as soon as nobody wants to know any more.
    pub wanted: &'p Sender<Infallible>,
}

/// Plans a pull as [`super::pull`] does, and keeps nothing. Blocks the calling thread.
///
/// # Errors
/// [`OpError`]: those that the pull would end with, as far as it gets.
pub fn plan_pull(planning: &Planning<'_>) -> Result<PullPlan, OpError> {
    let Planning { store, registry, handle, params, wanted, .. } = planning;
    let reference = name(params)?;
    let remote = handle.block_on(resolved(registry, &params.source, wanted.closed()))?;
    let (digest, files) = match remote {
        RemoteModel::Published(manifest) => (Some(manifest.digest()), layers(&params.source, &manifest)),
        RemoteModel::Files { files, .. } => (None, files),
    };
    // What is found must still be there when it is compared.
    let lease = store.leases().grant(format!("plan of a pull of {}", reference.short()));
    let files: Vec<_> =
        files.iter().map(|file| planned(planning, &lease, file)).collect::<Result<_, OpError>>()?;
    let download_bytes = files.iter().map(|file| file.download_bytes).fold(0, u64::saturating_add);
    Ok(PullPlan { name: reference.short(), digest, download_bytes, files })
}

fn planned(planning: &Planning<'_>, lease: &Lease, file: &RemoteFile) -> Result<PlannedFile, OpError> {
    let Planning { store, registry, transfers, handle, uid, params, wanted } = planning;
    let size = file.size();
    let name = file.digest().map_or_else(|| file.label(), |_| file.media_type().component().to_owned());
    let bare = PlannedFile {
        name,
        digest: file.digest(),
        size,
        stored_bytes: 0,
        resumed_bytes: 0,
        similar_bytes: 0,
        download_bytes: size,
    };
    if let Some(descriptor) = file.descriptor()
        && store.stored_file_now(&descriptor)?.is_some()
        && store.has_file(&descriptor)?
    {
        return Ok(PlannedFile { stored_bytes: size, download_bytes: 0, ..bare });
    }
    let limits = transfers.limits(&RateLimit::new(params.limit_rate));
    let job = Job { registry, file, handle, uid: *uid, limits, report: &|_arrived| !wanted.is_closed() };
    let plan = transfers.plan(store, lease, &job).map_err(|error| failed(file, error))?;
    let (resumed_bytes, similar_bytes) = (plan.resumed_bytes, plan.similar_bytes);
    let download_bytes = size.saturating_sub(resumed_bytes).saturating_sub(similar_bytes);
    Ok(PlannedFile { resumed_bytes, similar_bytes, download_bytes, ..bare })
}
