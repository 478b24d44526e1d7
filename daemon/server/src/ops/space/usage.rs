//! `df`: reports disk usage, whose rows are disjoint parts that add up to what the store's directory takes on disk.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::thread::{self, ScopedJoinHandle};

use blobd_client::protocol::space::{DiskUsage, ModelUsage, UsageKind, UsageRow};
use blobd_store::gc::{GcPlan, OtherDeletion};
use blobd_store::index::{ModelShare, SharedPart};
use blobd_store::{Eviction, OtherFiles, Store, StoreError, VisitedFiles};
use blobd_store_format::digest::Digest;

use super::evict::LastOpened;
use super::{Distinct, Model, Totals, may_collect, measure, unneeded, usage_detail};
use crate::names::Names;
use crate::ops::{OpError, rfc3339};

/// Reports disk usage from the catalog, without details.
pub fn usage(store: &Store, last_opened: &LastOpened) -> Result<DiskUsage, OpError> {
    usage_in_detail(store, last_opened, None)
}

/// Reports disk usage from the catalog. With `detail`, also which models share what, with at most that many names in each
/// list, what is in quarantine, and the progress and users of unfinished downloads. Sizes on disk are those that the file
/// system has allocated.
///
/// # Errors
/// [`blobd_store::StoreError`], also for a damaged manifest or recipe, because what it needs is unknown;
/// [`blobd_store::StoreError::IndexBuilding`].
pub(crate) fn usage_in_detail(
    store: &Store,
    last_opened: &LastOpened,
    detail: Option<usize>,
) -> Result<DiskUsage, OpError> {
    let Counted { others, models, totals, plan, shared } = count(store, detail.is_some())?;
    let reclaimable_bytes = if may_collect(store, &models, &plan)? { plan.freed_bytes() } else { 0 };
    let distinct = Distinct::new(&models);
    let rows = Parts { store, distinct: &distinct, totals: &totals, plan: &plan, others: &others }.rows();
    let Totals { measured, physical_bytes, blob_count, .. } = totals;
    let logical_bytes = distinct.unshared_bytes(&measured.models);
    let stored_bytes = measured.needed_bytes;
    let of_kinds = |kinds: &[UsageKind]| {
        rows.iter().filter(|row| kinds.contains(&row.kind)).map(|row| row.bytes).fold(0, u64::saturating_add)
    };
    let policy = store.ledger().space_policy();
    // Without eviction nothing happens at the watermarks.
    let evicting = Some(policy).filter(|policy| policy.eviction != Eviction::Never);
    let mut usage = DiskUsage {
        logical_bytes,
        physical_bytes,
        stored_bytes,
        saved_bytes: logical_bytes.saturating_sub(stored_bytes),
        model_count: distinct.models.len() as u64,
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
        models: sorted_models(store, &distinct, &measured.models, last_opened),
        ..DiskUsage::default()
    };
    if let Some(limit) = detail {
        usage_detail::add(store, (&distinct, &shared), limit, &mut usage)?;
    }
    Ok(usage)
}

/// What the store's directory and its catalog contain.
struct Counted {
    others: OtherFiles,
    models: Vec<Model>,
    totals: Totals,
    /// The collection of all unneeded data.
    plan: GcPlan,
    /// What several models need; empty if that was not asked for.
    shared: Arc<Vec<SharedPart>>,
}

/// Lists other files, sums what the models need, and finds what they share, each on a thread of its own.
fn count(store: &Store, with_shared: bool) -> Result<Counted, OpError> {
    let linked = store.content().index().recheck_sizes()?;
    let mut manifests = VisitedFiles::default();
    let models = Model::all_with_files(store, &mut manifests)?;
    let (others, totals, plan, shared) = thread::scope(|scope| {
        let others = scope.spawn(|| store.content().other_files(linked, &manifests));
        let shared = with_shared.then(|| scope.spawn(|| usage_detail::shared_parts(store, &models)));
        let totals = measure(store, &models)?;
        let plan = unneeded(store, &totals.measured)?;
        let shared = shared.map(joined).transpose()?.unwrap_or_default();
        Ok::<_, OpError>((joined(others)?, totals, plan, shared))
    })?;
    Ok(Counted { others, models, totals, plan, shared })
}

fn joined<T>(thread: ScopedJoinHandle<'_, Result<T, StoreError>>) -> Result<T, OpError> {
    let panicked = |_panic| OpError::Internal("a thread that counts disk usage has panicked".to_owned());
    Ok(thread.join().map_err(panicked)??)
}

impl Distinct<'_> {
    /// The sum of all files, as if each model were stored alone. Missing files count nothing.
    fn unshared_bytes(&self, shares: &[ModelShare]) -> u64 {
        let models = self.models.iter().zip(shares);
        let sizes = models.filter_map(|(names, share)| Some(names.first()?.unshared_bytes(*share)));
        sizes.fold(0, u64::saturating_add)
    }
}

fn sorted_models(
    store: &Store,
    distinct: &Distinct<'_>,
    shares: &[ModelShare],
    last_opened: &LastOpened,
) -> Vec<ModelUsage> {
    let users = Names::system();
    let models = distinct.models.iter().zip(shares).flat_map(|(names, share)| {
        let share = if names.len() > 1 { share.all_shared() } else { *share };
        names.iter().map(move |model| (*model, share))
    });
    let mut rows: Vec<_> =
        models.map(|(model, share)| model_usage(store, model, share, last_opened, &users)).collect();
    rows.sort_by(|a, b| a.name.cmp(&b.name));
    rows
}

fn model_usage(
    store: &Store,
    model: &Model,
    share: ModelShare,
    last_opened: &LastOpened,
    users: &Names,
) -> ModelUsage {
    let manifest = model.manifest.digest;
    let opened =
        last_opened(model.reference(), manifest).or_else(|| store.content().index().last_use(manifest));
    let opened_by = opened.and_then(|opened| opened.uid);
    ModelUsage {
        name: model.reference().short(),
        logical_bytes: model.manifest.size,
        unique_bytes: share.unique_bytes,
        shared_bytes: share.shared_bytes,
        last_opened: opened.map(|opened| rfc3339(opened.at)),
        last_opened_by: opened_by.map(|uid| users.user_id(uid)),
        shared_with: Vec::new(),
    }
}

struct Parts<'p> {
    store: &'p Store,
    distinct: &'p Distinct<'p>,
    totals: &'p Totals,
    /// The collection of all unneeded data.
    plan: &'p GcPlan,
    others: &'p OtherFiles,
}

/// Files other than blobs and recipes that nothing needs. They are subtracted from the rows that they would be part of.
#[derive(Default)]
struct Unneeded {
    trash: u64,
    staging: u64,
    downloads: BTreeMap<Digest, u64>,
}

impl Parts<'_> {
    /// Models first, the largest first; then downloads, and one row of each other kind.
    fn rows(&self) -> Vec<UsageRow> {
        let (measured, others) = (&self.totals.measured, self.others);
        let unneeded = self.unneeded();
        let mut rows = self.models();
        rows.push(row(UsageKind::Shared, measured.shared_bytes));
        rows.push(self.in_use());
        rows.extend(self.downloads(&unneeded));
        let trash = others.trash_bytes().saturating_sub(unneeded.trash).saturating_add(measured.trash_bytes);
        rows.extend([
            row(UsageKind::Staging, others.staging_bytes().saturating_sub(unneeded.staging)),
            row(UsageKind::Trash, trash),
            row(UsageKind::Quarantine, others.quarantine),
            row(UsageKind::Unneeded, self.plan.freed_bytes()),
            row(UsageKind::Records, others.records),
            row(UsageKind::Index, others.index),
            row(UsageKind::Audit, others.audit),
            row(UsageKind::Reserve, others.reserve),
            row(UsageKind::Directories, others.directories),
        ]);
        let by = others.foreign_paths.iter().map(|path| path.display().to_string()).collect();
        rows.push(UsageRow { by, ..row(UsageKind::Other, others.foreign) });
        rows
    }

    fn models(&self) -> Vec<UsageRow> {
        let shares = self.distinct.models.iter().zip(&self.totals.measured.models);
        let rows = shares.map(|(names, share)| {
            let mut names = names.iter().map(|model| model.reference().short());
            let (name, other_names) = (names.next(), names.collect());
            UsageRow { name, other_names, ..row(UsageKind::Model, share.unique_bytes) }
        });
        sorted(rows.collect())
    }

    /// Bytes that nothing needs but that are leased, or open or mapped in a program.
    fn in_use(&self) -> UsageRow {
        let measured = &self.totals.measured;
        let mut by = BTreeSet::new();
        if !measured.kept.is_empty() {
            by.extend(self.store.liveness().leases().holders_of_any(&measured.kept));
        }
        by.extend(self.plan.kept(self.store.liveness()).into_iter().flat_map(|kept| kept.by));
        let bytes = measured.kept_bytes.saturating_add(self.plan.held_bytes());
        UsageRow { by: by.into_iter().collect(), ..row(UsageKind::InUse, bytes) }
    }

    fn downloads(&self, unneeded: &Unneeded) -> Vec<UsageRow> {
        let mut bytes = self.others.downloads.clone();
        for (file, abandoned) in &unneeded.downloads {
            bytes.entry(*file).and_modify(|bytes| *bytes = bytes.saturating_sub(*abandoned));
        }
        let published = self.totals.downloads.iter().zip(&self.totals.measured.download_bytes);
        for (file, published) in published {
            let sum = bytes.entry(*file).or_default();
            *sum = sum.saturating_add(*published);
        }
        let rows = bytes.into_iter().map(|(file, bytes)| UsageRow {
            name: self.store.content().download_about(file).map(|about| about.name),
            digest: Some(file),
            ..row(UsageKind::Download, bytes)
        });
        sorted(rows.collect())
    }

    fn unneeded(&self) -> Unneeded {
        let mut unneeded = Unneeded::default();
        for deletion in &self.plan.other_deletions {
            match deletion {
                OtherDeletion::Trash { bytes, .. } => unneeded.trash = unneeded.trash.saturating_add(*bytes),
                OtherDeletion::Staging { bytes, .. } => {
                    unneeded.staging = unneeded.staging.saturating_add(*bytes);
                }
                OtherDeletion::Partial { file, bytes } => drop(unneeded.downloads.insert(*file, *bytes)),
            }
        }
        unneeded
    }
}

const fn row(kind: UsageKind, bytes: u64) -> UsageRow {
    let (name, digest, size, received_bytes, user) = (None, None, None, None, None);
    UsageRow {
        kind,
        name,
        other_names: Vec::new(),
        digest,
        bytes,
        size,
        received_bytes,
        user,
        by: Vec::new(),
    }
}

fn sorted(mut rows: Vec<UsageRow>) -> Vec<UsageRow> {
    rows.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.name.cmp(&b.name)));
    rows
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
        assert_eq!((usage.saved_bytes, usage.logical_bytes), (0, usage.stored_bytes));
    }

    #[test]
    fn names_of_one_model_save_nothing() {
        let (_folder, store) = new_store();
        let mut ingest = begin(&store);
        let mut file = |bytes: &[u8]| Descriptor {
            media_type: MediaType::new("text/plain"),
            digest: ingest.add_bytes(bytes).unwrap(),
            size: bytes.len() as u64,
        };
        let (config, weights) = (file(&[1; 4096]), file(&[7; 1 << 20]));
        let manifest = Manifest::compose(config, vec![weights]).unwrap();
        ingest.commit(&"m".parse().unwrap(), &manifest, None).unwrap();
        let alone = usage(&store, &|_, _| None).unwrap();
        for name in ["m:b", "m:c", "a", "z"] {
            begin(&store).commit(&name.parse().unwrap(), &manifest, None).unwrap();
        }
        let usage = usage(&store, &|_, _| None).unwrap();
        assert_eq!(usage.models.len(), 5);
        assert_eq!((usage.model_count, usage.saved_bytes), (1, 0));
        assert_eq!(usage.logical_bytes, alone.logical_bytes);
        assert_eq!(usage.stored_bytes, alone.stored_bytes);
        let models: Vec<_> = usage.rows.iter().filter(|row| row.kind == UsageKind::Model).collect();
        assert_eq!(models.len(), 1, "{models:?}");
        assert_eq!(models[0].name.as_deref(), Some("a:latest"));
        assert_eq!(models[0].other_names, ["m:b", "m:c", "m:latest", "z:latest"]);
        assert_eq!(models[0].bytes, usage.stored_bytes);
    }
}
