//! `pull --dry-run`: reports what a pull would download and what it would reuse.

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
use super::pull_source::{layers, model_name, resolve, transfer_error};
use crate::transfer::{Job, RateLimit, Transfers};

/// The arguments of a plan.
#[derive(Clone, Copy, Debug)]
pub struct Planning<'p> {
    /// The store to compare with.
    pub store: &'p Arc<Store>,
    /// The client for the model's registry.
    pub registry: &'p RegistryClient,
    /// The transfers of all users.
    pub transfers: &'p Transfers,
    /// The runtime for network I/O.
    pub handle: &'p Handle,
    /// The client's user.
    pub uid: u32,
    /// The request.
    pub params: &'p PullParams,
    /// Closed when the client disconnects.
    pub wanted: &'p Sender<Infallible>,
}

/// Plans what [`super::pull`] would do, and stores nothing. Blocks the calling thread.
///
/// # Errors
/// [`OpError`], as for the pull.
pub fn plan_pull(planning: &Planning<'_>) -> Result<PullPlan, OpError> {
    let Planning { store, registry, handle, params, wanted, .. } = planning;
    let reference = model_name(params)?;
    let remote = handle.block_on(resolve(registry, &params.source, wanted.closed()))?;
    let (digest, files) = match remote {
        RemoteModel::Published(manifest) => (Some(manifest.digest()), layers(&params.source, &manifest)),
        RemoteModel::Files { files, .. } => (None, files),
    };
    // Protects what is found until it has been compared.
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
    let plan = transfers.plan(store, lease, &job).map_err(|error| transfer_error(file, error))?;
    let (resumed_bytes, similar_bytes) = (plan.resumed_bytes, plan.similar_bytes);
    let download_bytes = size.saturating_sub(resumed_bytes).saturating_sub(similar_bytes);
    Ok(PlannedFile { resumed_bytes, similar_bytes, download_bytes, ..bare })
}
