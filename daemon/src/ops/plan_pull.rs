//! `pull --dry-run`: reports what a pull would download and what it would reuse.

use blobd_client::protocol::response::{PlannedFile, PullPlan};
use blobd_registry::{RemoteFile, RemoteModel};
use blobd_store::leases::Lease;

use super::pull_source::{known_files, layers, model_name, resolve, transfer_error};
use super::{OpError, Pull};
use crate::transfer::{Job, RateLimit, Silence};

/// Plans what [`super::pull`] would do, and stores nothing. Blocks the calling thread.
pub fn plan_pull(pull: Pull<'_>) -> Result<PullPlan, OpError> {
    let Pull { store, registry, handle, params, events, .. } = pull;
    let reference = model_name(params)?;
    let known = known_files(store, registry, &params.source)?;
    let remote = handle.block_on(resolve(registry, &params.source, &known, events.closed()))?;
    let (digest, files) = match remote {
        RemoteModel::Published(manifest) => (Some(manifest.digest()), layers(&params.source, &manifest)),
        RemoteModel::Files { files, .. } => (None, files),
    };
    // Protects what is found until it has been compared.
    let lease = store.leases().grant(format!("plan of a pull of {}", reference.short()));
    let files: Vec<_> =
        files.iter().map(|file| planned(pull, &lease, file)).collect::<Result<_, OpError>>()?;
    let download_bytes = files.iter().map(|file| file.download_bytes).fold(0, u64::saturating_add);
    Ok(PullPlan { name: reference.short(), digest, download_bytes, files })
}

fn planned(pull: Pull<'_>, lease: &Lease, file: &RemoteFile) -> Result<PlannedFile, OpError> {
    let Pull { store, registry, transfers, handle, requester, params, events, .. } = pull;
    let uid = requester.uid();
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
    if let Some(descriptor) = file.descriptor().or_else(|| file.unchanged())
        && store.stored_file_now(&descriptor)?.is_some()
        && store.has_file(&descriptor)?
    {
        return Ok(PlannedFile { stored_bytes: size, download_bytes: 0, ..bare });
    }
    let limits = transfers.limits(&RateLimit::new(params.limit_rate));
    let (silence, report) = (Silence::default(), |_arrived| !events.is_closed());
    let job = Job { registry, file, handle, uid, about: None, limits, silence, report: &report };
    let plan = transfers.plan(store, lease, &job).map_err(|error| transfer_error(file, error))?;
    let (resumed_bytes, similar_bytes) = (plan.resumed_bytes, plan.similar_bytes);
    let download_bytes = size.saturating_sub(resumed_bytes).saturating_sub(similar_bytes);
    Ok(PlannedFile { resumed_bytes, similar_bytes, download_bytes, ..bare })
}
