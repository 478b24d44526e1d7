//! `df`: reports disk usage.

use blobd_client::protocol::space::{DiskUsage, ModelUsage, UsageKind};
use blobd_store::index::ModelShare;
use blobd_store::{Eviction, Store};

use super::disk_rows::Parts;
use super::measure::{Model, Totals, may_collect, measure, unneeded};
use super::{LastOpened, OpError, rfc3339, usage_detail};
use crate::names::Names;

/// Reports disk usage from the catalog, without details.
///
/// # Errors
/// As [`usage_in_detail`].
pub fn usage(store: &Store, last_opened: &LastOpened) -> Result<DiskUsage, OpError> {
    usage_in_detail(store, last_opened, None)
}

/// Reports disk usage from the catalog. With `detail`, also which models share what, with at most that many names in
/// each list, what is in quarantine, how far unfinished downloads are and whose they are. Sizes on disk are what the
/// file system has allocated.
///
/// # Errors
/// [`blobd_store::StoreError`], also for a damaged manifest or recipe, because what it needs is unknown;
/// [`blobd_store::StoreError::IndexBuilding`].
pub fn usage_in_detail(
    store: &Store,
    last_opened: &LastOpened,
    detail: Option<usize>,
) -> Result<DiskUsage, OpError> {
    let linked = store.content().index().recheck_sizes()?;
    let (others, models, totals, plan) = std::thread::scope(|scope| {
        let others = scope.spawn(|| store.content().other_files(linked));
        let models = Model::all(store)?;
        let totals = measure(store, &models)?;
        let plan = unneeded(store, &totals.measured)?;
        let panicked = |_panic| OpError::Internal("the count of other files has panicked".to_owned());
        Ok::<_, OpError>((others.join().map_err(panicked)??, models, totals, plan))
    })?;
    let reclaimable_bytes = if may_collect(store, &models, &plan)? { plan.freed_bytes() } else { 0 };
    let rows = Parts { store, models: &models, totals: &totals, plan: &plan, others: &others }.rows();
    let Totals { measured, physical_bytes, blob_count, .. } = totals;
    let logical_bytes = models.iter().map(|model| model.manifest().size).fold(0, u64::saturating_add);
    let parts = models.iter().zip(&measured.models).map(|(model, share)| model.unshared_bytes(*share));
    let unshared_bytes = parts.fold(0, u64::saturating_add);
    let of_kinds = |kinds: &[UsageKind]| {
        rows.iter().filter(|row| kinds.contains(&row.kind)).map(|row| row.bytes).fold(0, u64::saturating_add)
    };
    let policy = store.ledger().space_policy();
    // Without eviction nothing happens at the watermarks.
    let evicting = Some(policy).filter(|policy| policy.eviction != Eviction::Never);
    let mut usage = DiskUsage {
        logical_bytes,
        physical_bytes,
        saved_bytes: unshared_bytes.saturating_sub(measured.needed_bytes),
        reclaimable_bytes,
        partial_bytes: of_kinds(&[UsageKind::Download, UsageKind::Staging]),
        trash_bytes: of_kinds(&[UsageKind::Trash]),
        quarantine_bytes: others.quarantine,
        held_bytes: plan.held_bytes(),
        reserve_bytes: store.ledger().reserve_bytes().unwrap_or_default(),
        quota_bytes: policy.quota_bytes,
        used_bytes: store.ledger().used_bytes(),
        high_watermark_bytes: evicting.and_then(|policy| policy.high_bytes()),
        low_watermark_bytes: evicting.and_then(|policy| policy.low_bytes()),
        min_free_bytes: store.ledger().min_free_bytes(),
        free_bytes: store.ledger().free_bytes()?,
        blob_count,
        disk_bytes: rows.iter().map(|row| row.bytes).fold(0, u64::saturating_add),
        rows,
        models: sorted_models(store, &models, &measured.models, last_opened),
        ..DiskUsage::default()
    };
    if let Some(limit) = detail {
        usage_detail::add(store, &models, limit, &mut usage)?;
    }
    Ok(usage)
}

fn sorted_models(
    store: &Store,
    models: &[Model],
    shares: &[ModelShare],
    last_opened: &LastOpened,
) -> Vec<ModelUsage> {
    let users = Names::system();
    let pairs = models.iter().zip(shares);
    let mut rows: Vec<_> =
        pairs.map(|(model, share)| row(store, model, *share, last_opened, &users)).collect();
    rows.sort_by(|a, b| a.name.cmp(&b.name));
    rows
}

fn row(
    store: &Store,
    model: &Model,
    share: ModelShare,
    last_opened: &LastOpened,
    users: &Names,
) -> ModelUsage {
    let manifest = model.manifest().digest;
    let opened =
        last_opened(model.reference(), manifest).or_else(|| store.content().index().last_use(manifest));
    let opened_by = opened.and_then(|opened| opened.uid);
    ModelUsage {
        name: model.reference().short(),
        logical_bytes: model.manifest().size,
        unique_bytes: share.unique_bytes,
        shared_bytes: share.shared_bytes,
        last_opened: opened.map(|opened| rfc3339(opened.at)),
        last_opened_by: opened_by.map(|uid| users.user_id(uid)),
        shared_with: Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use blobd_store::SpacePolicy;
    use blobd_store::testing::{begin, new_store};
    use blobd_store_format::descriptor::{Descriptor, MediaType};
    use blobd_store_format::layout;
    use blobd_store_format::manifest::Manifest;

    use super::*;

    #[test]
    fn watermarks_are_reported_only_with_eviction() {
        let (_folder, store) = new_store();
        let watermarks = |eviction| {
            let quota_bytes = Some(100 << 20);
            store
                .ledger()
                .set_space_policy(SpacePolicy { quota_bytes, eviction, ..SpacePolicy::default() })
                .unwrap();
            let usage = usage(&store, &|_, _| None).unwrap();
            (usage.quota_bytes, usage.high_watermark_bytes, usage.low_watermark_bytes)
        };
        assert_eq!(watermarks(Eviction::Never), (Some(100 << 20), None, None));
        assert_eq!(watermarks(Eviction::Pullable), (Some(100 << 20), Some(95 << 20), Some(85 << 20)));
    }

    #[test]
    fn missing_blob_does_not_count_as_saved() {
        let (folder, store) = new_store();
        let mut ingest = begin(&store);
        let mut file = |bytes: &[u8]| Descriptor {
            media_type: MediaType::new("text/plain"),
            digest: ingest.add_bytes(bytes).unwrap(),
            size: bytes.len() as u64,
        };
        let (config, weights) = (file(b"{}"), file(&[7; 1 << 20]));
        let manifest = Manifest::compose(config, vec![weights.clone()]).unwrap();
        ingest.commit(&"m".parse().unwrap(), &manifest, None).unwrap();
        assert_eq!(usage(&store, &|_, _| None).unwrap().saved_bytes, 0);
        std::fs::remove_file(folder.path().join("store").join(layout::blob(weights.digest))).unwrap();
        store.reindex().unwrap();
        let usage = usage(&store, &|_, _| None).unwrap();
        assert_eq!((usage.saved_bytes, usage.logical_bytes), (0, (1 << 20) + 2));
    }
}
