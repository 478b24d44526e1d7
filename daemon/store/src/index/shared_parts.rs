//! Counts over the catalog which models share which bytes.

use std::collections::HashMap;

use blobd_store_format::digest::Digest;

use super::UnreadableRecipe;
use super::catalog::{Catalog, RowState};

/// Bytes on disk that the same two or more models need.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedPart {
    /// The places of these models among those that were counted, in ascending order.
    pub models: Vec<usize>,
    /// Their size.
    pub bytes: u64,
}

impl SharedPart {
    /// The most parts that are returned. Models of one family share a few parts each; without a limit, the lists of
    /// models could take the square of the memory of the catalog.
    pub const MAX_PARTS: usize = 1 << 12;

    /// Divides what several of the models share by who shares it. The largest part is first; of more than
    /// [`Self::MAX_PARTS`], the smallest are left out. A model is given by its files.
    ///
    /// # Errors
    /// [`UnreadableRecipe`] when the blobs of a file are unknown.
    pub fn count(catalog: &Catalog, models: &[&[Digest]]) -> Result<Vec<Self>, UnreadableRecipe> {
        let mut sets = Sets::default();
        let mut blobs = vec![NOBODY; catalog.rows().len()];
        let mut recipes: HashMap<Digest, SetId> = HashMap::new();
        for (model, files) in models.iter().enumerate() {
            for file in *files {
                let mut add_blob = |number: u32| {
                    if let Some(set) = blobs.get_mut(number as usize) {
                        *set = sets.with(*set, model);
                    }
                };
                catalog.find(*file).into_iter().for_each(&mut add_blob);
                if let Some(recipe) = catalog.recipes().get(file) {
                    let numbers = recipe.needs.as_deref().ok_or(UnreadableRecipe { file: *file })?;
                    numbers.iter().copied().for_each(&mut add_blob);
                    let set = recipes.entry(*file).or_insert(NOBODY);
                    *set = sets.with(*set, model);
                }
            }
        }
        let rows = catalog.rows().iter().zip(&blobs);
        let present = rows.filter(|(row, _)| row.state == RowState::Present);
        present.for_each(|(row, set)| sets.add_bytes(*set, row.bytes_on_disk));
        for (file, set) in &recipes {
            let bytes = catalog.recipes().get(file).map_or(0, |recipe| recipe.bytes_on_disk);
            sets.add_bytes(*set, bytes);
        }
        Ok(sets.parts())
    }
}

/// The place of a set in [`Sets`], from 1 on.
type SetId = usize;

/// The empty set.
const NOBODY: SetId = 0;

/// Sets of models. Each is made from a smaller one by adding a model, so a blob that gets one more user only changes
/// its number, and the work is proportional to what the models need in all.
#[derive(Debug, Default)]
struct Sets {
    sets: Vec<Set>,
    /// A set and a model that is added to it → the larger set.
    larger: HashMap<(SetId, usize), SetId>,
}

#[derive(Debug)]
struct Set {
    before: SetId,
    /// The model that was added last: the greatest, because models are counted in order.
    last: usize,
    bytes: u64,
}

impl Sets {
    fn get(&self, id: SetId) -> Option<&Set> {
        self.sets.get(id.checked_sub(1)?)
    }

    fn with(&mut self, id: SetId, model: usize) -> SetId {
        if self.get(id).is_some_and(|set| set.last == model) {
            return id;
        }
        *self.larger.entry((id, model)).or_insert_with(|| {
            self.sets.push(Set { before: id, last: model, bytes: 0 });
            self.sets.len()
        })
    }

    fn add_bytes(&mut self, id: SetId, bytes: u64) {
        if let Some(set) = id.checked_sub(1).and_then(|place| self.sets.get_mut(place)) {
            set.bytes = set.bytes.saturating_add(bytes);
        }
    }

    /// The sets of two and more models that have bytes, the largest first.
    fn parts(&self) -> Vec<SharedPart> {
        let shared = self.sets.iter().filter(|set| set.before != NOBODY && set.bytes > 0);
        let mut shared: Vec<&Set> = shared.collect();
        shared.sort_by_key(|set| (u64::MAX - set.bytes, set.last, set.before));
        shared.truncate(SharedPart::MAX_PARTS);
        shared.into_iter().map(|set| SharedPart { models: self.models(set), bytes: set.bytes }).collect()
    }

    fn models(&self, set: &Set) -> Vec<usize> {
        let mut models = vec![set.last];
        let mut before = set.before;
        while let Some(set) = self.get(before) {
            models.push(set.last);
            before = set.before;
        }
        models.reverse();
        models
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::facts::BlobFacts;

    fn digest(name: u8) -> Digest {
        Digest::of(&[name])
    }

    fn catalog(blobs: &[(u8, u64)]) -> Catalog {
        let mut catalog = Catalog::default();
        for (name, bytes) in blobs {
            let facts = BlobFacts { length: *bytes, bytes_on_disk: *bytes };
            catalog.set_blob(digest(*name), Some(facts));
        }
        catalog
    }

    fn count(catalog: &Catalog, models: &[&[u8]]) -> Vec<(Vec<usize>, u64)> {
        let files: Vec<Vec<Digest>> =
            models.iter().map(|names| names.iter().map(|name| digest(*name)).collect()).collect();
        let files: Vec<&[Digest]> = files.iter().map(Vec::as_slice).collect();
        let parts = SharedPart::count(catalog, &files).unwrap();
        parts.into_iter().map(|part| (part.models, part.bytes)).collect()
    }

    #[test]
    fn bytes_are_divided_by_the_models_that_share_them() {
        let catalog = catalog(&[(1, 100), (2, 20), (3, 3), (4, 4000), (5, 5)]);
        // 4 is needed by one model only, 5 by none, 9 is not stored.
        let parts = count(&catalog, &[&[1, 2, 3, 9], &[1, 2, 4, 9], &[1, 3, 1], &[2, 1]]);
        assert_eq!(parts, [(vec![0, 1, 2, 3], 100), (vec![0, 1, 3], 20), (vec![0, 2], 3)]);
    }

    #[test]
    fn equal_models_share_one_part() {
        let catalog = catalog(&[(1, 7), (2, 8)]);
        let models: Vec<&[u8]> = vec![&[1, 2]; 300];
        assert_eq!(count(&catalog, &models), [((0..300).collect(), 15)]);
        assert!(count(&catalog, &[&[1, 2]]).is_empty());
    }

    #[test]
    fn smallest_of_too_many_parts_are_left_out() {
        let names = SharedPart::MAX_PARTS + 5;
        let digest = |name: usize| Digest::of(&name.to_le_bytes());
        let mut catalog = Catalog::default();
        for name in 0..names {
            let facts = BlobFacts { length: 1, bytes_on_disk: 1 + name as u64 };
            catalog.set_blob(digest(name), Some(facts));
        }
        // Every blob has a model of its own, and one that has all.
        let all: Vec<Digest> = (0..names).map(digest).collect();
        let mut models: Vec<&[Digest]> = all.chunks(1).collect();
        models.push(&all);
        let parts = SharedPart::count(&catalog, &models).unwrap();
        assert_eq!(parts.len(), SharedPart::MAX_PARTS);
        assert_eq!((parts[0].bytes, parts.last().unwrap().bytes), (names as u64, 6));
    }
}
