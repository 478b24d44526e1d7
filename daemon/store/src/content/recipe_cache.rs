//! A cache of parsed recipes.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Weak};

use blobd_store_format::digest::Digest;
use blobd_store_format::recipe::Recipe;
use tracing_mutex::stdsync::{Mutex, MutexGuard};

use crate::lock;

/// Keeps recently used recipes, so that reopening a model reads nothing, and all in use, so that none is there twice.
#[derive(Debug, Default)]
pub(crate) struct RecipeCache {
    recipes: Mutex<Recipes>,
    /// The only permit to read a large recipe. It protects no data but bounds the memory of readers, so it may be held
    /// during disk access.
    large: Mutex<()>,
}

/// Recipes of at least this size are read one at a time: the largest takes 40 MiB, and a hundred may be requested.
const LARGE_FROM_BYTES: u64 = 1 << 20;

#[derive(Debug, Default)]
struct Recipes {
    /// Most recently used first.
    recent: VecDeque<(Digest, Arc<Recipe>)>,
    /// Recipes that are too large for `recent` or were evicted from it, while they are in use.
    in_use: BTreeMap<Digest, Weak<Recipe>>,
    readings: BTreeMap<Digest, Readings>,
}

/// The reads of one recipe in progress.
#[derive(Debug, Default)]
struct Readings {
    count: usize,
    /// How often [`RecipeCache::forget`] was called since the first of them began.
    generation: u64,
}

/// A recipe is being read from disk, until this is dropped.
#[derive(Debug)]
pub(crate) struct Reading<'c> {
    cache: &'c RecipeCache,
    file: Digest,
    generation: u64,
}

impl RecipeCache {
    /// The most tensors and pieces of all recipes in `recent`: about 40 MiB.
    const MAX_ENTRIES: usize = 1 << 17;

    pub(crate) fn find(&self, file: Digest) -> Option<Arc<Recipe>> {
        lock(&self.recipes).find(file)
    }

    /// Waits for the permit to read a recipe, if it is large enough to need one. Held until the recipe is parsed.
    pub(crate) fn permit(&self, bytes: u64) -> Option<MutexGuard<'_, ()>> {
        (bytes >= LARGE_FROM_BYTES).then(|| lock(&self.large))
    }

    /// Asked by another thread, because one that holds a lock must not try it.
    #[cfg(test)]
    pub(crate) fn is_large_one_read(&self) -> bool {
        let is_locked = || self.large.try_lock().is_err();
        std::thread::scope(|scope| scope.spawn(is_locked).join().unwrap())
    }

    /// Must be called before the recipe of `file` is read.
    pub(crate) fn begin(&self, file: Digest) -> Reading<'_> {
        let mut recipes = lock(&self.recipes);
        let readings = recipes.readings.entry(file).or_default();
        readings.count += 1;
        Reading { cache: self, file, generation: readings.generation }
    }

    /// Removes a recipe that is about to be deleted. Reads of it in progress are not kept.
    pub(crate) fn forget(&self, file: Digest) {
        let mut recipes = lock(&self.recipes);
        if let Some(readings) = recipes.readings.get_mut(&file) {
            readings.generation += 1;
        }
        recipes.recent.retain(|(digest, _)| *digest != file);
        recipes.in_use.remove(&file);
    }
}

impl Reading<'_> {
    /// Adds the recipe, unless it was forgotten meanwhile. Returns the copy of another reader who finished first.
    pub(crate) fn keep(self, recipe: Recipe) -> Arc<Recipe> {
        let recipe = Arc::new(recipe);
        let mut recipes = lock(&self.cache.recipes);
        let generation = recipes.readings.get(&self.file).map(|readings| readings.generation);
        if generation != Some(self.generation) {
            return recipe;
        }
        if let Some(kept) = recipes.find(self.file) {
            return kept;
        }
        recipes.keep(self.file, &recipe);
        recipe
    }
}

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        let mut recipes = lock(&self.cache.recipes);
        if let Some(readings) = recipes.readings.get_mut(&self.file) {
            readings.count -= 1;
            if readings.count == 0 {
                recipes.readings.remove(&self.file);
            }
        }
    }
}

impl Recipes {
    fn find(&mut self, file: Digest) -> Option<Arc<Recipe>> {
        if let Some(place) = self.recent.iter().position(|(digest, _)| *digest == file) {
            let found = self.recent.remove(place)?;
            let recipe = Arc::clone(&found.1);
            self.recent.push_front(found);
            return Some(recipe);
        }
        self.in_use.get(&file).and_then(Weak::upgrade)
    }

    fn keep(&mut self, file: Digest, recipe: &Arc<Recipe>) {
        self.in_use.retain(|_, recipe| recipe.strong_count() > 0);
        if entries(recipe) > RecipeCache::MAX_ENTRIES {
            self.in_use.insert(file, Arc::downgrade(recipe));
            return;
        }
        self.recent.push_front((file, Arc::clone(recipe)));
        while self.recent.iter().map(|(_, recipe)| entries(recipe)).sum::<usize>() > RecipeCache::MAX_ENTRIES
        {
            let Some((file, recipe)) = self.recent.pop_back() else { break };
            self.in_use.insert(file, Arc::downgrade(&recipe));
        }
    }
}

fn entries(recipe: &Recipe) -> usize {
    recipe.tensors().len() + recipe.pieces().len()
}

#[cfg(test)]
mod tests {
    use blobd_store_format::testing;

    use super::*;

    fn recipe(file: Digest, tensors: usize) -> Recipe {
        testing::recipe(file, (0..tensors).map(|number| format!("t{number}")))
    }

    fn read(cache: &RecipeCache, file: Digest, tensors: usize) -> Arc<Recipe> {
        cache.begin(file).keep(recipe(file, tensors))
    }

    fn is_found(cache: &RecipeCache, file: Digest, recipe: &Arc<Recipe>) -> bool {
        cache.find(file).is_some_and(|found| Arc::ptr_eq(&found, recipe))
    }

    #[test]
    fn recipe_is_kept_if_others_are_forgotten_while_it_is_read() {
        let (cache, file, other) = (RecipeCache::default(), Digest::of(b"file"), Digest::of(b"other"));
        for tensors in [1, RecipeCache::MAX_ENTRIES] {
            let reading = cache.begin(file);
            cache.forget(other);
            let recipe = reading.keep(recipe(file, tensors));
            assert!(is_found(&cache, file, &recipe), "{tensors} tensors");
            cache.forget(file);
            assert!(cache.find(file).is_none());
        }
    }

    #[test]
    fn recipe_that_is_forgotten_while_it_is_read_is_not_kept() {
        let (cache, file) = (RecipeCache::default(), Digest::of(b"file"));
        let first = cache.begin(file);
        cache.forget(file);
        let second = cache.begin(file);
        let before = first.keep(recipe(file, 1));
        assert!(cache.find(file).is_none());
        let after = second.keep(recipe(file, 1));
        assert!(is_found(&cache, file, &after) && !Arc::ptr_eq(&before, &after));
        assert!(lock(&cache.recipes).readings.is_empty());
    }

    #[test]
    fn concurrent_readers_of_a_recipe_share_one_copy() {
        let (cache, file) = (RecipeCache::default(), Digest::of(b"file"));
        for tensors in [1, RecipeCache::MAX_ENTRIES] {
            let (first, second) = (cache.begin(file), cache.begin(file));
            let first = first.keep(recipe(file, tensors));
            let second = second.keep(recipe(file, tensors));
            assert!(Arc::ptr_eq(&first, &second), "{tensors} tensors");
            assert!(lock(&cache.recipes).recent.len() <= 1);
            cache.forget(file);
        }
    }

    #[test]
    fn recipe_in_use_is_found_even_if_large_or_evicted() {
        let cache = RecipeCache::default();
        let (small, large, last) = (Digest::of(b"small"), Digest::of(b"large"), Digest::of(b"last"));
        let (few, most) = (read(&cache, small, 10), read(&cache, large, RecipeCache::MAX_ENTRIES));
        drop(read(&cache, last, RecipeCache::MAX_ENTRIES - 1));
        assert!(is_found(&cache, small, &few) && is_found(&cache, large, &most));
        assert!(cache.find(last).is_some(), "it is small enough to be kept although it is not in use");
        drop((few, most));
        assert!(cache.find(small).is_none() && cache.find(large).is_none());
    }

    #[test]
    fn recipes_are_kept_up_to_a_number_of_entries_the_latest_first() {
        let cache = RecipeCache::default();
        let file = |number: u8| Digest::of(&[number]);
        let most = RecipeCache::MAX_ENTRIES;
        let size = |tensors: usize| entries(&recipe(file(0), tensors));
        // Each tensor is an entry, and so is the piece that it is in.
        let (one, two) = (size(1), size(2));
        let each = two - one;
        let tensors = |part: usize| (most / part - (one - each)) / each;
        drop(read(&cache, file(1), tensors(2)));
        drop(read(&cache, file(2), tensors(2)));
        let recent = || lock(&cache.recipes).recent.iter().map(|(file, _)| *file).collect::<Vec<_>>();
        assert_eq!(recent(), [file(2), file(1)]);
        assert!(cache.find(file(1)).is_some());
        assert_eq!(recent(), [file(1), file(2)], "it was used last");
        drop(read(&cache, file(3), 10));
        assert_eq!(recent(), [file(3), file(1)]);
        assert!(cache.find(file(2)).is_none());
        assert!(each >= 1 && size(tensors(1)) <= most && size(tensors(1) + 1) > most);
        drop(read(&cache, file(4), tensors(1)));
        assert_eq!(recent(), [file(4)], "it fills all");
        drop(read(&cache, file(5), tensors(1) + 1));
        assert_eq!(recent(), [file(4)], "it is too large");
    }

    #[test]
    fn only_large_recipes_need_the_permit() {
        let cache = RecipeCache::default();
        assert!(cache.permit(LARGE_FROM_BYTES - 1).is_none());
        let permit = cache.permit(LARGE_FROM_BYTES);
        assert!(permit.is_some() && cache.is_large_one_read());
        drop(permit);
        assert!(!cache.is_large_one_read());
    }
}
