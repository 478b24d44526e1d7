//! Measures what the models take on disk and what nothing needs, from the store's catalog.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::SystemTime;

use blobd_store::gc::{self, GcPlan, Node, Owner, walk_beside_tags};
use blobd_store::index::{Catalog, ModelShare, UnreadableRecipe, Usage, UsageCounter};
use blobd_store::{ManifestSummary, Store, StoreError, TagSummary};
use blobd_store_format::digest::Digest;
use blobd_store_format::reference::Reference;

/// What `gc` would free; `None` if that is unknown, for instance because the catalog is not loaded.
pub(super) fn reclaimable_bytes(store: &Store) -> Option<u64> {
    store.content().index().catalog_unless_building().ok()?.map(drop)?;
    let models = Model::all(store).ok()?;
    let measured = measure(store, &models).ok()?.measured;
    Some(plan(store, &models, &measured).ok()?.freed_bytes())
}

pub(super) struct Model(Arc<TagSummary>, ManifestSummary);

impl Model {
    pub(super) fn all(store: &Store) -> Result<Vec<Self>, StoreError> {
        let mut models = Vec::new();
        for tag in store.names().summaries()? {
            match &tag.manifest {
                Ok(manifest) => {
                    let manifest = manifest.clone();
                    models.push(Self(tag, manifest));
                }
                // Reading it again gives the error, unless it was repaired or removed meanwhile.
                Err(_damage) => match store.names().manifest(&tag.reference) {
                    Ok(_) | Err(StoreError::NoSuchModel { .. }) => {}
                    Err(error) => return Err(error),
                },
            }
        }
        Ok(models)
    }

    pub(super) fn reference(&self) -> &Reference {
        &self.0.reference
    }

    pub(super) const fn manifest(&self) -> &ManifestSummary {
        &self.1
    }

    /// What its stored part would take without sharing. Missing files do not count as saved.
    pub(super) fn unshared_bytes(&self, share: ModelShare) -> u64 {
        let there = share.unique_bytes.saturating_add(share.shared_bytes);
        if share.is_partial { self.manifest().size.min(there) } else { self.manifest().size }
    }
}

pub(super) struct Totals {
    pub(super) measured: Usage,
    /// The files of the unfinished downloads, in the order of [`Usage::download_bytes`].
    pub(super) downloads: Vec<Digest>,
    pub(super) physical_bytes: u64,
    pub(super) blob_count: u64,
}

pub(super) fn measure(store: &Store, models: &[Model]) -> Result<Totals, StoreError> {
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
    let sum = |catalog: &Catalog| -> Result<Totals, UnreadableRecipe> {
        let mut counter = UsageCounter::new(catalog);
        models.iter().try_for_each(|model| counter.add(&model.manifest().files))?;
        trash.iter().try_for_each(|files| counter.add_trashed(files))?;
        counter.keep(leased.iter().copied());
        downloads.iter().for_each(|(_, needs)| counter.add_download(needs));
        let (physical_bytes, blob_count) = (catalog.used_bytes(), catalog.blob_count());
        let files = downloads.iter().map(|(file, _)| *file).collect();
        Ok(Totals { measured: counter.finish(), downloads: files, physical_bytes, blob_count })
    };
    counted(store, sum)
}

/// Counts over the catalog. Fails when a recipe cannot be read.
pub(super) fn counted<T>(
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
        // Readable again: somebody has repaired it.
        store.content().index().note(Node::Recipe(unreadable.file));
    }
}

fn names(roots: &[Node]) -> Vec<Digest> {
    let mut digests: Vec<Digest> = roots.iter().map(|node| node.digest()).collect();
    digests.sort_unstable();
    digests.dedup();
    digests
}

/// What `gc` would do; an empty plan if it would refuse.
pub(super) fn plan(store: &Store, models: &[Model], measured: &Usage) -> Result<GcPlan, StoreError> {
    let unneeded = unneeded(store, measured)?;
    if may_collect(store, models, &unneeded)? { Ok(unneeded) } else { Ok(GcPlan::default()) }
}

/// Unneeded bytes, whether `gc` would free them or refuse.
pub(super) fn unneeded(store: &Store, measured: &Usage) -> Result<GcPlan, StoreError> {
    let recipes = measured.unneeded_recipes.iter().copied().map(Node::Recipe);
    let unneeded = recipes.chain(measured.unneeded_blobs.iter().copied().map(Node::Blob));
    // Unneeded digests are not leased.
    GcPlan::new(store.liveness(), unneeded, &BTreeSet::new())?
        .with_litter(store.liveness(), SystemTime::now())
}

/// Whether `gc` would carry out this plan. It refuses if a model's needs are unknown.
pub(super) fn may_collect(store: &Store, models: &[Model], plan: &GcPlan) -> Result<bool, StoreError> {
    if *plan == GcPlan::default() {
        return Ok(true);
    }
    let files = models.iter().map(|model| (model.reference(), &*model.manifest().files));
    match gc::check_models(store.liveness(), files) {
        Ok(()) => Ok(true),
        Err(StoreError::ForeignFile { .. } | StoreError::Incomplete { .. }) => Ok(false),
        Err(error) => Err(error),
    }
}
