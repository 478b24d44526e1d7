//! The last counts of the space that models use. A count is a pass over everything that all models need: for ten
//! thousand models some million numbers. So `df` keeps it until the catalog or anything that keeps data has changed.
//!
//! A count is never older than the catalog: it is looked up while the caller has the catalog locked.

use std::sync::Arc;

use blobd_store_format::digest::Digest;
use tracing_mutex::stdsync::Mutex;

use super::catalog::{Catalog, CatalogVersion};
use super::sharing::SharedPart;
use super::usage::{UnreadableRecipe, Usage, UsageCounter};
use crate::lock;
use crate::node::Node;

/// What keeps data, for a count.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UsageInputs {
    /// The files of each model.
    pub models: Vec<Arc<[Digest]>>,
    /// The files of each model in the trash.
    pub trash: Vec<Vec<Digest>>,
    pub leased: Vec<Digest>,
    /// What each unfinished download needs, with the digest of its file.
    pub downloads: Vec<(Digest, Vec<Node>)>,
}

#[derive(Debug, Default)]
pub(super) struct LastCounts {
    usage: LastCount<UsageInputs, Usage>,
    shared_parts: LastCount<Vec<Arc<[Digest]>>, Vec<SharedPart>>,
}

/// A count with the catalog and the inputs that it was made from.
#[derive(Debug)]
struct LastCount<I, C>(Mutex<Option<(CatalogVersion, I, Arc<C>)>>);

impl<I, C> Default for LastCount<I, C> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

/// Larger counts are not kept: most stores have much smaller ones.
const MAX_KEPT_BYTES: usize = 8 << 20;

impl<I: Clone + PartialEq, C> LastCount<I, C> {
    fn get_or_count<E>(
        &self,
        catalog: &Catalog,
        inputs: &I,
        count: impl FnOnce() -> Result<C, E>,
        bytes: impl FnOnce(&C) -> usize,
    ) -> Result<Arc<C>, E> {
        let mut last = lock(&self.0);
        let version = catalog.version();
        if let Some((_, _, counted)) =
            last.as_ref().filter(|(of_catalog, of, _)| *of_catalog == version && of == inputs)
        {
            return Ok(Arc::clone(counted));
        }
        // Before the next one is made, so that they are not in memory together.
        *last = None;
        let counted = Arc::new(count()?);
        *last = (bytes(&counted) <= MAX_KEPT_BYTES).then(|| (version, inputs.clone(), Arc::clone(&counted)));
        Ok(counted)
    }
}

impl LastCounts {
    pub(super) fn usage(
        &self,
        catalog: &Catalog,
        inputs: &UsageInputs,
    ) -> Result<Arc<Usage>, UnreadableRecipe> {
        let count = || inputs.count(catalog);
        self.usage.get_or_count(catalog, inputs, count, Usage::memory_bytes)
    }

    pub(super) fn shared_parts(
        &self,
        catalog: &Catalog,
        models: &Vec<Arc<[Digest]>>,
    ) -> Result<Arc<Vec<SharedPart>>, UnreadableRecipe> {
        let files: Vec<&[Digest]> = models.iter().map(|files| &**files).collect();
        let bytes = |parts: &Vec<SharedPart>| parts.iter().map(|part| size_of_val(&*part.models)).sum();
        let count = || SharedPart::count(catalog, &files);
        self.shared_parts.get_or_count(catalog, models, count, bytes)
    }
}

impl UsageInputs {
    fn count(&self, catalog: &Catalog) -> Result<Usage, UnreadableRecipe> {
        let mut counter = UsageCounter::new(catalog);
        self.models.iter().try_for_each(|files| counter.add(files))?;
        self.trash.iter().try_for_each(|files| counter.add_trashed(files))?;
        counter.keep(self.leased.iter().copied());
        self.downloads.iter().for_each(|(_, needs)| counter.add_download(needs));
        Ok(counter.finish())
    }
}

impl Usage {
    fn memory_bytes(&self) -> usize {
        let digests = self.unneeded_blobs.len() + self.unneeded_recipes.len() + self.kept.len();
        digests * size_of::<Digest>() + size_of_val(&*self.models)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::catalog::BlobFacts;
    use crate::testing::new_store;

    fn facts(bytes: u64) -> Option<BlobFacts> {
        Some(BlobFacts { length: bytes, bytes_on_disk: bytes })
    }

    fn files(names: &[&[u8]]) -> Arc<[Digest]> {
        names.iter().map(|name| Digest::of(name)).collect()
    }

    #[test]
    fn count_is_kept_until_the_catalog_or_an_input_changes() {
        let (_folder, store) = new_store();
        let index = store.content().index();
        let mut catalog = Catalog::default();
        catalog.set_blob(Digest::of(b"a"), facts(100));
        let mut inputs = UsageInputs { models: vec![files(&[b"a"])], ..UsageInputs::default() };
        let count = |catalog: &Catalog, inputs: &UsageInputs| index.usage(catalog, inputs).unwrap();
        let first = count(&catalog, &inputs);
        assert!(Arc::ptr_eq(&first, &count(&catalog, &inputs.clone())));
        catalog.set_blob(Digest::of(b"b"), facts(7));
        let second = count(&catalog, &inputs);
        assert_eq!((first.unneeded_blobs.len(), second.unneeded_blobs.len()), (0, 1));
        catalog.set_blob(Digest::of(b"a"), facts(50));
        assert_eq!(count(&catalog, &inputs).needed_bytes, 50);
        inputs.models.push(files(&[b"a", b"b"]));
        let shared = count(&catalog, &inputs);
        assert_eq!((shared.needed_bytes, shared.shared_bytes), (57, 50));
        for change in [
            |inputs: &mut UsageInputs| drop(inputs.models.pop()),
            |inputs: &mut UsageInputs| inputs.trash.push(vec![Digest::of(b"b")]),
            |inputs: &mut UsageInputs| inputs.leased.push(Digest::of(b"b")),
            |inputs: &mut UsageInputs| inputs.downloads.push((Digest::of(b"d"), Vec::new())),
        ] {
            let before = count(&catalog, &inputs);
            change(&mut inputs);
            let now = count(&catalog, &inputs);
            assert!(!Arc::ptr_eq(&before, &now) && *now == inputs.count(&catalog).unwrap());
        }
    }

    #[test]
    fn count_takes_the_memory_of_its_digests_and_models() {
        let usage = Usage {
            unneeded_blobs: vec![Digest::of(b"a"); 2],
            unneeded_recipes: vec![Digest::of(b"b")],
            ..Usage::default()
        };
        assert_eq!(usage.memory_bytes(), 3 * 32);
        let mut catalog = Catalog::default();
        catalog.set_blob(Digest::of(b"a"), facts(100));
        let inputs = UsageInputs { models: vec![files(&[b"a"])], ..UsageInputs::default() };
        assert!(inputs.count(&catalog).unwrap().memory_bytes() > 0);
    }

    #[test]
    fn shared_parts_are_kept_unless_they_are_large() {
        let (_folder, store) = new_store();
        let index = store.content().index();
        let mut catalog = Catalog::default();
        catalog.set_blob(Digest::of(b"a"), facts(100));
        let parts = |models: usize| {
            let models = vec![files(&[b"a"]); models];
            let [first, second] = [(); 2].map(|()| index.shared_parts(&catalog, &models).unwrap());
            assert_eq!(first[0].models.len(), models.len());
            Arc::ptr_eq(&first, &second)
        };
        assert!(parts(2) && parts(3));
        assert!(!parts(MAX_KEPT_BYTES / size_of::<usize>() + 1));
    }
}
