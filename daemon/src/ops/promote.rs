//! `promote`: copies what a model uses of lower stores into the writable one.

use std::sync::Arc;

use blobd_client::protocol::promote::{PromoteParams, Promoted};
use blobd_store::{Ingest, Store, Verb};
use blobd_store_format::digest::Digest;

use super::OpError;
use super::collect_on_failure::explaining_no_space;
use super::lost_models::Evictions;
use super::policy::CallerPolicy;
use super::relief::Leftover;
use super::soft_quota;
use crate::requester::Requester;

/// Gets the bytes copied and the bytes to copy; returns false to stop.
type ReportProgress<'r> = dyn FnMut(u64, u64) -> bool + 'r;

/// Copies the blobs of a model that only lower stores have, verified and durable, and sets its tag in the writable
/// store. Changes no lower store.
///
/// # Errors
/// [`blobd_store::StoreError::DamagedBlob`] if the bytes of a lower store are wrong; then the tag is not set.
/// [`OpError::DeniedByPolicy`].
pub fn promote(
    store: &Arc<Store>,
    requester: Requester,
    policy: &CallerPolicy,
    params: &PromoteParams,
    report: &mut ReportProgress<'_>,
) -> Result<Promoted, OpError> {
    explaining_no_space(store, Leftover::Nothing, promote_model(store, requester, policy, params, report))
}

fn promote_model(
    store: &Arc<Store>,
    requester: Requester,
    policy: &CallerPolicy,
    params: &PromoteParams,
    report: &mut ReportProgress<'_>,
) -> Result<Promoted, OpError> {
    let lease = store.leases().grant(format!("promotion of {}", params.reference.short()));
    let model = store.leased_model(&params.reference, &lease)?;
    policy.check_stored(store, &model, None)?;
    let name = model.reference.short();
    let from = store.lower_place_of(&model.reference)?.map(|place| place.display().to_string());
    let missing = store.not_own_blobs(model.blob_sizes())?;
    let copied_bytes = missing.iter().fold(0, |sum: u64, (_, size)| sum.saturating_add(*size));
    let promoted = Promoted {
        name: name.clone(),
        digest: model.manifest.digest(),
        from,
        copied_bytes,
        copied_blobs: missing.len() as u64,
        dry_run: params.dry_run,
        evicted: Vec::new(),
        notes: Vec::new(),
    };
    let is_done = promoted.from.is_none() && missing.is_empty();
    if params.dry_run || is_done {
        return Ok(promoted);
    }
    let evictions = Evictions::new(requester, format!("promotion of {name}"));
    let ingest = evictions.observe(Ingest::begin(store, lease)?).keeping_own_copies();
    let mut ingest = requester.acting(ingest, Verb::Promote);
    ingest.admit_all(missing.iter().map(|(_, size)| *size))?;
    copy(&mut ingest, &missing, copied_bytes, report)?;
    let origin = store.origin(model.manifest.digest());
    ingest.commit(&model.reference, &model.manifest, origin.as_deref())?;
    Ok(Promoted { evicted: evictions.take(), notes: soft_quota::notes(store, requester), ..promoted })
}

fn copy(
    ingest: &mut Ingest,
    blobs: &[(Digest, u64)],
    total: u64,
    report: &mut ReportProgress<'_>,
) -> Result<(), OpError> {
    let mut completed = 0u64;
    for (digest, size) in blobs {
        let mut add = |bytes: u64| {
            completed = completed.saturating_add(bytes);
            report(completed, total)
        };
        if !ingest.copy_blob(*digest, *size, &mut add)? {
            return Err(OpError::Internal("the client that asked for this copy has gone".to_owned()));
        }
    }
    Ok(())
}
