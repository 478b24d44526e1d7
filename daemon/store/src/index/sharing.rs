//! Counts over the catalog what models share: each model with each other, and which models share which bytes.

use std::collections::HashMap;

use blobd_store_format::digest::Digest;

use super::UnreadableRecipe;
use super::catalog::{Catalog, RowState};

/// The bytes on disk of one model, and what it shares.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sharing {
    /// Bytes that no other model needs.
    pub unique_bytes: u64,
    /// Bytes that others need too.
    pub shared_bytes: u64,
    /// For each of the other models, the bytes that both need.
    pub with_others: Vec<u64>,
}

impl Sharing {
    /// Compares the model with these `files` with the others, which are given by their files.
    ///
    /// # Errors
    /// [`UnreadableRecipe`] when the blobs of a file are unknown.
    pub fn count(
        catalog: &Catalog,
        files: &[Digest],
        others: &[&[Digest]],
    ) -> Result<Self, UnreadableRecipe> {
        let own = needs(catalog, files)?;
        let mut is_shared = vec![false; own.len()];
        let mut with_others = Vec::with_capacity(others.len());
        for files in others {
            let mut bytes = 0_u64;
            for need in needs(catalog, files)? {
                if let Ok(place) = own.binary_search(&need) {
                    bytes = bytes.saturating_add(need.bytes);
                    is_shared.get_mut(place).into_iter().for_each(|shared| *shared = true);
                }
            }
            with_others.push(bytes);
        }
        let sum = |wanted: bool| {
            let needs = own.iter().zip(&is_shared).filter(|(_, shared)| **shared == wanted);
            needs.fold(0_u64, |sum, (need, _)| sum.saturating_add(need.bytes))
        };
        Ok(Self { unique_bytes: sum(false), shared_bytes: sum(true), with_others })
    }
}

/// A blob by the number of its row, or a recipe by its file, with its size on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Need {
    node: NeedNode,
    bytes: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum NeedNode {
    Blob(u32),
    Recipe(Digest),
}

/// What the files need of what is present, sorted and each once.
fn needs(catalog: &Catalog, files: &[Digest]) -> Result<Vec<Need>, UnreadableRecipe> {
    let mut needs = Vec::new();
    for file in files {
        needs.extend(catalog.find(*file).and_then(|number| blob(catalog, number)));
        if let Some(recipe) = catalog.recipes().get(file) {
            let numbers = recipe.needs.as_deref().ok_or(UnreadableRecipe { file: *file })?;
            needs.push(Need { node: NeedNode::Recipe(*file), bytes: recipe.bytes_on_disk });
            needs.extend(numbers.iter().filter_map(|number| blob(catalog, *number)));
        }
    }
    needs.sort_unstable();
    needs.dedup();
    Ok(needs)
}

fn blob(catalog: &Catalog, number: u32) -> Option<Need> {
    let row = catalog.rows().get(number as usize)?;
    let need = Need { node: NeedNode::Blob(number), bytes: row.bytes_on_disk };
    (row.state == RowState::Present).then_some(need)
}

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
