//! `pull --dry-run`: reports what a pull would download, what it would reuse, and whether there is space for it.

use blobd_client::protocol::pull::{PlannedFile, PlannedSpace, PullPlan, SpaceLimit};
use blobd_registry::{RemoteFile, RemoteModel};
use blobd_store::leases::Lease;
use blobd_store::{Store, gc};

use super::indexes::Indexes;
use super::remote_model::check_pull;
use super::reusable::Reusable;
use super::signed::Signatures;
use super::source::{
    Pull, chosen_files, known_files, layers, may_be, name_change, resolve, target_name, transfer_plan,
    with_stored_versions,
};
use crate::ops::space::reclaimable_bytes;
use crate::ops::{LastOpened, OpError, eviction_plan};

/// Plans a [`pull`](super::pull) and stores nothing. Blocks the calling thread.
pub(crate) fn plan_pull(pull: Pull<'_>, last_opened: &LastOpened) -> Result<PullPlan, OpError> {
    let Pull { store, registry, handle, params, policy, events, .. } = pull;
    let target = target_name(params)?;
    let reference = target.preferred();
    policy.check_source(&params.source, Some(reference))?;
    let reusable = Reusable::new(store, policy);
    let known = known_files(pull, &reusable)?;
    let remote = handle.block_on(resolve(registry, params, &known, events.closed()))?;
    let remote = with_stored_versions(pull, &reusable, remote)?;
    Signatures::fetch(pull, reference, &remote)?;
    check_pull(pull, &reusable, reference, &remote)?;
    name_change(pull, reference).check(&target, |present| may_be(present, &remote))?;
    let chosen = chosen_files(&remote);
    let indexes = Indexes::new(pull, remote.manifest());
    let (digest, files) = match remote {
        RemoteModel::Published(published) => {
            (Some(published.manifest.digest()), layers(&params.source, &published))
        }
        RemoteModel::Files { files, .. } => (None, files),
    };
    // Protects stored data until it has been compared.
    let lease = store.liveness().leases().grant(format!("plan of a pull of {}", reference.short()));
    let planned = |file| planned(pull, &lease, &reusable, &indexes, file);
    let planned: Vec<_> = files.iter().map(planned).collect::<Result<_, OpError>>()?;
    let (files, needs): (Vec<_>, Vec<_>) = planned.into_iter().unzip();
    let sum = |sizes: &mut dyn Iterator<Item = u64>| sizes.fold(0, u64::saturating_add);
    let download_bytes = sum(&mut files.iter().map(|file| file.download_bytes));
    drop(lease);
    let space = planned_space(pull, last_opened, sum(&mut needs.into_iter()))?;
    let evicted_bytes = space.evicted.last().map_or(0, |last| last.freed_bytes);
    let is_of_store = matches!(space.limit, SpaceLimit::Disk | SpaceLimit::Quota);
    let evicted_bytes = match store.ledger().can_make_space() && is_of_store {
        true => evicted_bytes.saturating_add(space.reclaimable_bytes.unwrap_or_default()),
        false => 0,
    };
    let freed_bytes = evicted_bytes.saturating_add(space.replaced_bytes.unwrap_or_default());
    let enough_space = freed_bytes >= space.missing_bytes;
    Ok(PullPlan { name: reference.short(), digest, download_bytes, enough_space, space, chosen, files })
}

/// Compares the disk space that the pull needs with the available space and what could be freed.
fn planned_space(
    pull: Pull<'_>,
    last_opened: &LastOpened,
    needed_bytes: u64,
) -> Result<PlannedSpace, OpError> {
    let space = space_of_store(pull.store, last_opened, needed_bytes)?;
    // A pull that needs no space is not refused, however much is charged to the user.
    if needed_bytes == 0 {
        return Ok(space);
    }
    let limits = pull.requester.limits(pull.store);
    let left = limits.iter().zip(pull.store.liveness().quotas_left(&limits)?);
    // A quota that is too small refuses the pull before anything is freed.
    let tightest = left.min_by_key(|(_, left_bytes)| *left_bytes);
    let tightest = tightest.filter(|(_, left_bytes)| *left_bytes < needed_bytes.max(space.available_bytes));
    let Some((limit, available_bytes)) = tightest else { return Ok(space) };
    let missing_bytes = needed_bytes.saturating_sub(available_bytes);
    let replaced_bytes = gc::displaced_bytes(pull.store.liveness(), Some(&limit.payer)).ok();
    let group = limit.payer.group().map(str::to_owned);
    let limit = if group.is_some() { SpaceLimit::GroupQuota } else { SpaceLimit::UserQuota };
    Ok(PlannedSpace {
        needed_bytes,
        available_bytes,
        limit,
        group,
        missing_bytes,
        replaced_bytes,
        ..PlannedSpace::default()
    })
}

fn space_of_store(
    store: &Store,
    last_opened: &LastOpened,
    needed_bytes: u64,
) -> Result<PlannedSpace, OpError> {
    let available = store.ledger().available_space()?;
    let missing_bytes = store.ledger().shortage(needed_bytes);
    let mut space = PlannedSpace {
        needed_bytes,
        available_bytes: available.bytes,
        limit: if available.is_limited_by_quota { SpaceLimit::Quota } else { SpaceLimit::Disk },
        missing_bytes,
        ..PlannedSpace::default()
    };
    if missing_bytes == 0 {
        return Ok(space);
    }
    space.reclaimable_bytes = reclaimable_bytes(store);
    space.replaced_bytes = gc::displaced_bytes(store.liveness(), None).ok();
    let missing_bytes = missing_bytes.saturating_sub(space.replaced_bytes.unwrap_or_default());
    // It is refused if a collection would be, and then nothing is evicted.
    if store.ledger().can_make_space()
        && missing_bytes > 0
        && let Ok(plan) = eviction_plan(store, last_opened, Some(missing_bytes))
    {
        space.reclaimable_bytes = Some(plan.garbage_bytes);
        space.evictable_bytes = gc::evictable_bytes(store.liveness()).ok();
        space.evicted = plan.evicted;
    }
    Ok(space)
}

/// A file, and the disk space that it would take.
fn planned(
    pull: Pull<'_>,
    lease: &Lease,
    reusable: &Reusable<'_>,
    indexes: &Indexes<'_>,
    file: &RemoteFile,
) -> Result<(PlannedFile, u64), OpError> {
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
        && reusable.has_file(&descriptor)?
    {
        return Ok((PlannedFile { stored_bytes: size, download_bytes: 0, ..bare }, 0));
    }
    let download = reusable.download(file, (&pull.params.source, pull.requester.uid()))?;
    let index = indexes.recipe(&download.file);
    let plan = transfer_plan(pull, reusable, index.as_deref(), lease, &download)?;
    let (resumed_bytes, similar_bytes) = (plan.resumed_bytes, plan.similar_bytes);
    let download_bytes = size.saturating_sub(resumed_bytes).saturating_sub(similar_bytes);
    Ok((PlannedFile { resumed_bytes, similar_bytes, download_bytes, ..bare }, plan.needed_bytes))
}
