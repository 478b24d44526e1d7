//! Disk space: what models take, what nothing needs, and the verbs that report and free it. Everything is counted from the
//! store's catalog.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::SystemTime;

use blobd_store::gc::{GcPlan, Node, Owner, check_models, evictable_bytes, walk_beside_tags};
use blobd_store::index::{Catalog, ModelShare, UnreadableRecipe, Usage, UsageInputs};
use blobd_store::{ManifestSummary, Store, StoreError, TagSummary, VisitedFiles};
use blobd_store_format::digest::Digest;
use blobd_store_format::reference::Reference;
use blobd_store_format::size::human_bytes;

mod charges;
mod evict;
mod footprint;
mod gc;
mod lost_models;
mod partial;
mod remove;
mod usage;
mod usage_detail;

pub(super) use charges::soft_quota_notes;
pub(crate) use charges::user_usage;
pub use evict::{EvictionReport, Evictor, LastOpened, evict_excess, eviction_plan};
pub(crate) use footprint::{residency, sharing};
pub use gc::gc;
pub use lost_models::StoredBlobs;
pub(super) use lost_models::{Evictions, ReportsTo, displaced};
pub(crate) use partial::{partials, remove_partials};
pub use remove::remove;
pub(super) use remove::remove_name;
pub use usage::usage;
pub(crate) use usage::usage_in_detail;
pub(crate) use usage_detail::detail_bytes;

/// The bytes that `gc` would free; `None` if that is unknown, for instance because the catalog is not loaded.
pub(super) fn reclaimable_bytes(store: &Store) -> Option<u64> {
    store.content().index().catalog_unless_building().ok()?.map(drop)?;
    let models = Model::all(store).ok()?;
    let measured = measure(store, &models).ok()?.measured;
    Some(plan(store, &models, &measured).ok()?.freed_bytes())
}

/// The commands that free space when something does not fit, and how much they would free.
pub(super) fn space_hint(store: &Store, is_over_quota: bool) -> String {
    let evictable = store.ledger().can_make_space().then(|| evictable_bytes(store.liveness()).ok()).flatten();
    hint_text(reclaimable_bytes(store), evictable, is_over_quota)
}

/// `reclaimable` is `None` if it is unknown, `evictable` if eviction is off or would be refused.
fn hint_text(reclaimable: Option<u64>, evictable: Option<u64>, is_over_quota: bool) -> String {
    let collection = match reclaimable {
        None => "`blobd gc --dry-run` shows what could be freed".to_owned(),
        Some(0) => "`blobd gc` would free nothing".to_owned(),
        Some(bytes) => format!("`blobd gc` would free {}", human_bytes(bytes)),
    };
    let eviction = match evictable {
        None => String::new(),
        Some(0) => ", evicting models nothing".to_owned(),
        Some(bytes) => format!(", evicting models at most {}", human_bytes(bytes)),
    };
    let quota = if is_over_quota { ", or set a larger quota" } else { "" };
    format!("{collection}{eviction}; `blobd rm` frees models{quota}")
}

/// A model of the writable store.
struct Model {
    tag: Arc<TagSummary>,
    manifest: ManifestSummary,
}

impl Model {
    fn all(store: &Store) -> Result<Vec<Self>, StoreError> {
        Self::all_with_files(store, &mut VisitedFiles::default())
    }

    /// Also adds the files of their manifests to `files`.
    fn all_with_files(store: &Store, files: &mut VisitedFiles) -> Result<Vec<Self>, StoreError> {
        let mut models = Vec::new();
        for tag in store.names().summaries_with_files(files)? {
            match &tag.manifest {
                Ok(manifest) => models.push(Self { manifest: manifest.clone(), tag }),
                // Reading it again gives the error, unless it was repaired or removed meanwhile.
                Err(_damage) => match store.names().manifest(&tag.reference) {
                    Ok(_) | Err(StoreError::NoSuchModel { .. }) => {}
                    Err(error) => return Err(error),
                },
            }
        }
        Ok(models)
    }

    fn reference(&self) -> &Reference {
        &self.tag.reference
    }

    /// The size of its files, as far as they are stored.
    fn unshared_bytes(&self, share: ModelShare) -> u64 {
        let there = share.unique_bytes.saturating_add(share.shared_bytes);
        if share.is_partial { self.manifest.size.min(there) } else { self.manifest.size }
    }
}

/// The models by their content: names of one manifest are one model.
struct Distinct<'m> {
    /// The names of each, in order.
    models: Vec<Vec<&'m Model>>,
}

impl<'m> Distinct<'m> {
    fn new(models: &'m [Model]) -> Self {
        let mut places: HashMap<Digest, usize> = HashMap::new();
        let mut distinct: Vec<Vec<&Model>> = Vec::new();
        for model in models {
            let place = *places.entry(model.manifest.digest).or_insert(distinct.len());
            match distinct.get_mut(place) {
                Some(names) => names.push(model),
                None => distinct.push(vec![model]),
            }
        }
        for names in &mut distinct {
            names.sort_by_cached_key(|model| model.reference().short());
        }
        Self { models: distinct }
    }

    fn files(&self) -> Vec<Arc<[Digest]>> {
        let first = self.models.iter().filter_map(|names| names.first());
        first.map(|model| Arc::clone(&model.manifest.files)).collect()
    }
}

struct Totals {
    /// One share for each of the [`Distinct`] models.
    measured: Arc<Usage>,
    /// The files of the unfinished downloads, in the order of [`Usage::download_bytes`].
    downloads: Vec<Digest>,
    physical_bytes: u64,
    blob_count: u64,
}

fn measure(store: &Store, models: &[Model]) -> Result<Totals, StoreError> {
    let (mut leased, mut trash, mut downloads) = (Vec::new(), Vec::new(), Vec::new());
    walk_beside_tags(store.liveness(), SystemTime::now(), &mut |owned| {
        match owned.owner {
            Owner::Trash(_) => trash.push(names(&owned.roots)),
            Owner::Download(file) => downloads.push((file, owned.roots)),
            Owner::Leases => leased = names(&owned.roots),
            // Counted from the cached summaries.
            Owner::Tag(_) => {}
        }
        Ok(())
    })?;
    // Data that several downloads need counts for the first of them.
    downloads.sort_unstable_by_key(|(file, _)| *file);
    let inputs = UsageInputs { models: Distinct::new(models).files(), trash, leased, downloads };
    let sum = |catalog: &Catalog| -> Result<Totals, UnreadableRecipe> {
        let measured = store.content().index().usage(catalog, &inputs)?;
        let (physical_bytes, blob_count) = (catalog.used_bytes(), catalog.blob_count());
        let downloads = inputs.downloads.iter().map(|(file, _)| *file).collect();
        Ok(Totals { measured, downloads, physical_bytes, blob_count })
    };
    counted(store, sum)
}

/// Counts over the catalog. Fails when a recipe cannot be read.
fn counted<T>(
    store: &Store,
    count: impl Fn(&Catalog) -> Result<T, UnreadableRecipe>,
) -> Result<T, StoreError> {
    loop {
        // The catalog is released before the recipe is read again.
        let unreadable = match count(&*store.content().index().catalog()?) {
            Ok(counted) => return Ok(counted),
            Err(unreadable) => unreadable,
        };
        store.content().recipe_outline(unreadable.file)?;
        // It is readable again: somebody has repaired it.
        store.content().index().note(Node::Recipe(unreadable.file));
    }
}

fn names(roots: &[Node]) -> Vec<Digest> {
    let mut digests: Vec<Digest> = roots.iter().map(|node| node.digest()).collect();
    digests.sort_unstable();
    digests.dedup();
    digests
}

/// Plans a `gc`; the plan is empty if `gc` would refuse.
fn plan(store: &Store, models: &[Model], measured: &Usage) -> Result<GcPlan, StoreError> {
    let unneeded = unneeded(store, measured)?;
    if may_collect(store, models, &unneeded)? { Ok(unneeded) } else { Ok(GcPlan::default()) }
}

/// Plans to free all unneeded bytes, even if `gc` would refuse that.
fn unneeded(store: &Store, measured: &Usage) -> Result<GcPlan, StoreError> {
    let recipes = measured.unneeded_recipes.iter().copied().map(Node::Recipe);
    let unneeded = recipes.chain(measured.unneeded_blobs.iter().copied().map(Node::Blob));
    // Unneeded digests are not leased.
    GcPlan::new(store.liveness(), unneeded, &BTreeSet::new())?
        .with_litter(store.liveness(), SystemTime::now())
}

/// Whether `gc` would execute this plan. It refuses if a model's needs are unknown.
fn may_collect(store: &Store, models: &[Model], plan: &GcPlan) -> Result<bool, StoreError> {
    if *plan == GcPlan::default() {
        return Ok(true);
    }
    let files = models.iter().map(|model| (model.reference(), &*model.manifest.files));
    match check_models(store.liveness(), files) {
        Ok(()) => Ok(true),
        Err(StoreError::ForeignFile { .. } | StoreError::Incomplete { .. }) => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hint_says_what_collection_and_eviction_would_free() {
        let hint =
            |reclaimable, evictable: Option<u64>| hint_text(reclaimable, evictable, evictable.is_some());
        assert_eq!(hint(Some(2 << 20), None), "`blobd gc` would free 2.00 MiB; `blobd rm` frees models");
        assert_eq!(
            hint(Some(0), Some(3 << 20)),
            "`blobd gc` would free nothing, evicting models at most 3.00 MiB; `blobd rm` frees models, or set a larger quota"
        );
        assert_eq!(
            hint(None, None),
            "`blobd gc --dry-run` shows what could be freed; `blobd rm` frees models"
        );
    }
}
