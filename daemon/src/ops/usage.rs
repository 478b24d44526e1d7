//! `df`: reports disk usage.

use blobd_client::protocol::response::{DiskUsage, ModelUsage};
use blobd_store::Store;
use blobd_store::index::ModelShare;

use super::measure::{Model, Totals, measure, plan};
use super::{LastOpened, OpError, rfc3339};

/// Reports disk usage from the catalog. Sizes on disk are what the file system has allocated.
///
/// # Errors
/// [`blobd_store::StoreError`], also for a damaged manifest or recipe, because what it needs is unknown;
/// [`blobd_store::StoreError::IndexBuilding`].
pub fn usage(store: &Store, last_opened: &LastOpened) -> Result<DiskUsage, OpError> {
    let models = Model::all(store)?;
    let Totals { measured, physical_bytes, blob_count } = measure(store, &models)?;
    let logical_bytes = models.iter().map(|model| model.manifest().size).fold(0, u64::saturating_add);
    let parts = models.iter().zip(&measured.models).map(|(model, share)| model.unshared_bytes(*share));
    let unshared_bytes = parts.fold(0, u64::saturating_add);
    let plan = plan(store, &models, &measured)?;
    let parts = models.iter().zip(&measured.models);
    let mut rows: Vec<_> = parts.map(|(model, share)| row(store, model, *share, last_opened)).collect();
    rows.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(DiskUsage {
        logical_bytes,
        physical_bytes,
        saved_bytes: unshared_bytes.saturating_sub(measured.needed_bytes),
        reclaimable_bytes: plan.freed_bytes(),
        partial_bytes: store.unfinished_bytes().saturating_add(measured.download_bytes),
        trash_bytes: measured.trash_bytes,
        quarantine_bytes: store.quarantine_bytes(),
        held_bytes: plan.held_bytes(),
        reserve_bytes: store.reserve_bytes().unwrap_or_default(),
        quota_bytes: store.space_policy().quota_bytes,
        free_bytes: store.free_bytes()?,
        blob_count,
        models: rows,
    })
}

fn row(store: &Store, model: &Model, share: ModelShare, last_opened: &LastOpened) -> ModelUsage {
    let recorded = || store.last_use(model.manifest().digest);
    ModelUsage {
        name: model.reference().short(),
        logical_bytes: model.manifest().size,
        unique_bytes: share.unique_bytes,
        shared_bytes: share.shared_bytes,
        last_opened: last_opened(model.reference()).or_else(recorded).map(rfc3339),
    }
}

#[cfg(test)]
mod tests {
    use blobd_store::testing::{begin, new_store};
    use blobd_store_format::descriptor::{Descriptor, MediaType};
    use blobd_store_format::layout;
    use blobd_store_format::manifest::Manifest;

    use super::*;

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
        assert_eq!(usage(&store, &|_| None).unwrap().saved_bytes, 0);
        std::fs::remove_file(folder.path().join("store").join(layout::blob(weights.digest))).unwrap();
        store.reindex().unwrap();
        let usage = usage(&store, &|_| None).unwrap();
        assert_eq!((usage.saved_bytes, usage.logical_bytes), (0, (1 << 20) + 2));
    }
}
