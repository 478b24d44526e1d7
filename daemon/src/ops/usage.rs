//! `df`: where the bytes go.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::SystemTime;

use blobd_client::protocol::response::{DiskUsage, ModelUsage};
use blobd_store::gc::{self, GcPlan, Node, Owner, walk_beside_tags};
use blobd_store::index::{Catalog, ModelShare, UnreadableRecipe, Usage, UsageCounter};
use blobd_store::{ManifestSummary, Store, StoreError, TagSummary};
use blobd_store_format::digest::Digest;
use blobd_store_format::reference::Reference;

use super::OpError;
use super::list::rfc3339;

/// Measures the store by its catalog. Sizes on disk are what the file system has allocated.
///
/// # Errors
/// [`StoreError`]: a damaged manifest or recipe among them, since what it needs is unknown;
/// [`StoreError::IndexBuilding`].
pub fn usage(
    store: &Store,
    last_opened: impl Fn(&Reference) -> Option<String>,
) -> Result<DiskUsage, OpError> {
    let models = Model::all(store)?;
    let Totals { measured, physical_bytes, blob_count } = measure(store, &models)?;
    let logical_bytes = models.iter().map(|model| model.manifest().size).fold(0, u64::saturating_add);
    let parts = models.iter().zip(&measured.models).map(|(model, share)| model.unshared_bytes(*share));
    let unshared_bytes = parts.fold(0, u64::saturating_add);
    let plan = plan(store, &models, &measured)?;
    let mut rows: Vec<_> = models
        .iter()
        .zip(&measured.models)
        .map(|(model, share)| model.usage(store, *share, &last_opened))
        .collect();
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

/// What a collection would free, if the catalog is there to tell.
pub(super) fn reclaimable_bytes(store: &Store) -> Option<u64> {
    store.catalog_now().map(drop)?;
    let models = Model::all(store).ok()?;
    let measured = measure(store, &models).ok()?.measured;
    Some(plan(store, &models, &measured).ok()?.freed_bytes())
}

/// A tag whose manifest can be read.
struct Model(Arc<TagSummary>, ManifestSummary);

impl Model {
    fn all(store: &Store) -> Result<Vec<Self>, StoreError> {
        let mut models = Vec::new();
        for tag in store.summaries()? {
            match &tag.manifest {
                Ok(manifest) => {
                    let manifest = manifest.clone();
                    models.push(Self(tag, manifest));
                }
                // It says again what is wrong, unless it has been mended or removed meanwhile.
                Err(_damage) => match store.manifest(&tag.reference) {
                    Ok(_) | Err(StoreError::NoSuchModel { .. }) => {}
                    Err(error) => return Err(error),
                },
            }
        }
        Ok(models)
    }

    const fn manifest(&self) -> &ManifestSummary {
        &self.1
    }

    /// What there is of it would take alone. What it lacks is not saved.
    fn unshared_bytes(&self, share: ModelShare) -> u64 {
        let there = share.unique_bytes.saturating_add(share.shared_bytes);
        if share.is_partial { self.manifest().size.min(there) } else { self.manifest().size }
    }

    fn usage(
        &self,
        store: &Store,
        share: ModelShare,
        last_opened: &impl Fn(&Reference) -> Option<String>,
    ) -> ModelUsage {
        let before = || store.last_use(self.manifest().digest).map(rfc3339);
        ModelUsage {
            name: self.0.reference.short(),
            logical_bytes: self.manifest().size,
            unique_bytes: share.unique_bytes,
            shared_bytes: share.shared_bytes,
            last_opened: last_opened(&self.0.reference).or_else(before),
        }
    }
}

struct Totals {
    measured: Usage,
    physical_bytes: u64,
    blob_count: u64,
}

fn measure(store: &Store, models: &[Model]) -> Result<Totals, StoreError> {
    let (mut pinned, mut trash, mut downloads) = (Vec::new(), Vec::new(), Vec::new());
    walk_beside_tags(store, SystemTime::now(), &mut |owned| {
        match owned.owner {
            Owner::Trash(_) => trash.push(names(&owned.roots)),
            Owner::Download(_) => downloads.extend(owned.roots),
            Owner::Leases => pinned = names(&owned.roots),
            // They come from what the store remembers of them.
            Owner::Tag(_) => {}
        }
        Ok(())
    })?;
    let sum = |catalog: &Catalog| -> Result<Totals, UnreadableRecipe> {
        let mut counter = UsageCounter::new(catalog);
        models.iter().try_for_each(|model| counter.add(&model.manifest().files))?;
        trash.iter().try_for_each(|files| counter.add_trashed(files))?;
        counter.keep(pinned.iter().copied());
        for node in &downloads {
            match node {
                Node::Blob(blob) => counter.keep_for_download(*blob, false),
                Node::Recipe(file) => counter.keep_for_download(*file, true),
            }
        }
        let (physical_bytes, blob_count) = (catalog.used_bytes(), catalog.blob_count());
        Ok(Totals { measured: counter.finish(), physical_bytes, blob_count })
    };
    loop {
        // The catalog is let go of before the recipe is looked at again.
        let unreadable = match sum(&*store.catalog()?) {
            Ok(totals) => return Ok(totals),
            Err(unreadable) => unreadable,
        };
        store.recipe_outline(unreadable.file)?;
        // It has been mended by hand since.
        store.note_recipe(unreadable.file);
    }
}

/// The digests of roots, each once.
fn names(roots: &[Node]) -> Vec<Digest> {
    let mut digests: Vec<Digest> = roots.iter().map(|node| node.digest()).collect();
    digests.sort_unstable();
    digests.dedup();
    digests
}

/// What `gc` would do: nothing if it would refuse to.
fn plan(store: &Store, models: &[Model], measured: &Usage) -> Result<GcPlan, StoreError> {
    let recipes = measured.unneeded_recipes.iter().copied().map(Node::Recipe);
    let unneeded = recipes.chain(measured.unneeded_blobs.iter().copied().map(Node::Blob));
    // What is pinned is not among what is unneeded.
    let plan = GcPlan::new(store, unneeded, &BTreeSet::new())?.with_litter(store, SystemTime::now())?;
    if plan == GcPlan::default() {
        return Ok(plan);
    }
    let files = models.iter().map(|model| (&model.0.reference, &*model.manifest().files));
    match gc::check_models(store, files) {
        Ok(()) => Ok(plan),
        Err(StoreError::ForeignFile { .. } | StoreError::Incomplete { .. }) => Ok(GcPlan::default()),
        Err(error) => Err(error),
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
    fn what_is_missing_is_not_saved() {
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
        assert_eq!(usage(&store, |_| None).unwrap().saved_bytes, 0);
        std::fs::remove_file(folder.path().join("store").join(layout::blob(weights.digest))).unwrap();
        store.reindex().unwrap();
        let usage = usage(&store, |_| None).unwrap();
        assert_eq!((usage.saved_bytes, usage.logical_bytes), (0, (1 << 20) + 2));
    }
}
