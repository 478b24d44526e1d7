//! Parsed recipes in memory.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use blobd_store_format::digest::Digest;
use blobd_store_format::recipe::Recipe;

use super::lock;

/// The recipes used last, so that opening a model again reads nothing, and all that are in use, so that
/// none is in memory twice.
#[derive(Debug, Default)]
pub(super) struct RecipeCache {
    recipes: Mutex<Recipes>,
    /// Held while a recipe with much text is read.
    large: Mutex<()>,
}

/// From so many bytes of text on, recipes are read one at a time: text and parsed form of the largest take
/// 40 MiB, and a hundred requests may want them at once.
const LARGE_FROM_BYTES: u64 = 1 << 20;

#[derive(Debug, Default)]
struct Recipes {
    /// The last used comes first.
    recent: VecDeque<(Digest, Arc<Recipe>)>,
    /// Those that are too large for the above, or no longer among them, while somebody uses them.
    in_use: BTreeMap<Digest, Weak<Recipe>>,
    /// Those that are being read from disk.
    readings: BTreeMap<Digest, Readings>,
}

/// The readings of one recipe that are under way.
#[derive(Debug, Default)]
struct Readings {
    count: usize,
    /// How often the recipe was forgotten since the first of them began.
    generation: u64,
}

/// A recipe is being read from disk, until this is dropped.
#[derive(Debug)]
pub(super) struct Reading<'c> {
    cache: &'c RecipeCache,
    file: Digest,
    generation: u64,
}

impl RecipeCache {
    /// Tensors and pieces over all recipes that are kept though nobody uses them: some 40 MiB at the most.
    const MAX_ENTRIES: usize = 1 << 17;

    pub(super) fn find(&self, file: Digest) -> Option<Arc<Recipe>> {
        let mut recipes = lock(&self.recipes);
        if let Some(place) = recipes.recent.iter().position(|(digest, _)| *digest == file) {
            let found = recipes.recent.remove(place)?;
            let recipe = Arc::clone(&found.1);
            recipes.recent.push_front(found);
            return Some(recipe);
        }
        recipes.in_use.get(&file).and_then(Weak::upgrade)
    }

    /// Waits until no other recipe with much text is read. To be held while one of `bytes` bytes is.
    pub(super) fn turn(&self, bytes: u64) -> Option<MutexGuard<'_, ()>> {
        (bytes >= LARGE_FROM_BYTES).then(|| lock(&self.large))
    }

    /// To be called before the recipe of `file` is read.
    pub(super) fn begin(&self, file: Digest) -> Reading<'_> {
        let mut recipes = lock(&self.recipes);
        let readings = recipes.readings.entry(file).or_default();
        readings.count += 1;
        Reading { cache: self, file, generation: readings.generation }
    }

    /// Forgets a recipe that is about to be removed. What is being read of it now is not kept.
    pub(super) fn forget(&self, file: Digest) {
        let mut recipes = lock(&self.recipes);
        if let Some(readings) = recipes.readings.get_mut(&file) {
            readings.generation += 1;
        }
        recipes.recent.retain(|(digest, _)| *digest != file);
        recipes.in_use.remove(&file);
    }
}

impl Reading<'_> {
    /// Keeps what was read, unless it was forgotten meanwhile.
    pub(super) fn keep(self, recipe: &Arc<Recipe>) {
        let mut recipes = lock(&self.cache.recipes);
        let generation = recipes.readings.get(&self.file).map(|readings| readings.generation);
        if generation == Some(self.generation) {
            recipes.keep(self.file, recipe);
        }
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
    use blobd_store_format::recipe::{Piece, TensorEntry};

    use super::*;

    fn recipe(file: Digest, tensors: usize) -> Arc<Recipe> {
        let blob = Digest::of(b"x");
        let tensor = |number| TensorEntry {
            name: format!("t{number}"),
            type_name: "F32".to_owned(),
            shape: vec![1],
            digest: blob,
            offset: 0,
            size: 4,
            experts: None,
        };
        let pieces = vec![Piece::Blob { blob, offset: 0, length: 4 }];
        Arc::new(Recipe::new(file, pieces, (0..tensors).map(tensor).collect()).unwrap())
    }

    fn read(cache: &RecipeCache, file: Digest, tensors: usize) -> Arc<Recipe> {
        let recipe = recipe(file, tensors);
        cache.begin(file).keep(&recipe);
        recipe
    }

    fn is_same(cache: &RecipeCache, file: Digest, recipe: &Arc<Recipe>) -> bool {
        cache.find(file).is_some_and(|found| Arc::ptr_eq(&found, recipe))
    }

    #[test]
    fn recipe_is_kept_though_others_are_forgotten_while_it_is_read() {
        let (cache, file, other) = (RecipeCache::default(), Digest::of(b"file"), Digest::of(b"other"));
        for tensors in [1, RecipeCache::MAX_ENTRIES] {
            let recipe = recipe(file, tensors);
            let reading = cache.begin(file);
            cache.forget(other);
            reading.keep(&recipe);
            assert!(is_same(&cache, file, &recipe), "{tensors} tensors");
            cache.forget(file);
            assert!(cache.find(file).is_none());
        }
    }

    #[test]
    fn recipe_that_is_forgotten_while_it_is_read_is_not_kept() {
        let (cache, file) = (RecipeCache::default(), Digest::of(b"file"));
        let (before, after) = (recipe(file, 1), recipe(file, 1));
        let first = cache.begin(file);
        cache.forget(file);
        let second = cache.begin(file);
        first.keep(&before);
        assert!(cache.find(file).is_none());
        second.keep(&after);
        assert!(is_same(&cache, file, &after));
        assert!(lock(&cache.recipes).readings.is_empty());
    }

    #[test]
    fn recipe_in_use_is_found_though_it_is_large_or_crowded_out() {
        let cache = RecipeCache::default();
        let (small, large, last) = (Digest::of(b"small"), Digest::of(b"large"), Digest::of(b"last"));
        let (few, most) = (read(&cache, small, 10), read(&cache, large, RecipeCache::MAX_ENTRIES));
        drop(read(&cache, last, RecipeCache::MAX_ENTRIES - 1));
        assert!(is_same(&cache, small, &few) && is_same(&cache, large, &most));
        assert!(cache.find(last).is_some(), "it is small enough to be kept though nobody uses it");
        drop((few, most));
        assert!(cache.find(small).is_none() && cache.find(large).is_none());
    }
}
