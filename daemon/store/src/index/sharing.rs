//! Counts over the catalog what models share: each model with each other, and which models share which bytes.

use std::collections::HashMap;

use blobd_store_format::digest::Digest;

use super::UnreadableRecipe;
use super::catalog::{Catalog, RowState};
use super::payers::{Part, each_part};
use crate::node::Node;

/// The bytes on disk of one model, and what it shares.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sharing {
    pub unique_bytes: u64,
    pub shared_bytes: u64,
    /// For each of the other models, the bytes that both need.
    pub with_others: Vec<u64>,
}

impl Sharing {
    /// Compares the model with these `files` with the others, which are given by their files.
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
                    bytes = bytes.saturating_add(need.1);
                    is_shared.get_mut(place).into_iter().for_each(|shared| *shared = true);
                }
            }
            with_others.push(bytes);
        }
        let sum = |wanted: bool| {
            let needs = own.iter().zip(&is_shared).filter(|(_, shared)| **shared == wanted);
            needs.fold(0_u64, |sum, (need, _)| sum.saturating_add(need.1))
        };
        Ok(Self { unique_bytes: sum(false), shared_bytes: sum(true), with_others })
    }
}

/// What the files need of what is present, with the sizes on disk: sorted and each once.
fn needs(catalog: &Catalog, files: &[Digest]) -> Result<Vec<(Part, u64)>, UnreadableRecipe> {
    let mut needs = Vec::new();
    for file in files {
        check_readable(catalog, *file)?;
        each_part(catalog, &Node::both(*file), |part, bytes| {
            needs.push((part, bytes));
            true
        });
    }
    needs.sort_unstable();
    needs.dedup();
    Ok(needs)
}

fn check_readable(catalog: &Catalog, file: Digest) -> Result<(), UnreadableRecipe> {
    match catalog.recipes().get(&file) {
        Some(recipe) if recipe.needs.is_none() => Err(UnreadableRecipe { file }),
        _ => Ok(()),
    }
}

/// Bytes on disk that the same two or more models need.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedPart {
    /// The places of these models among those that were counted, in ascending order.
    pub models: Vec<usize>,
    pub bytes: u64,
}

impl SharedPart {
    /// The most parts that are returned: without a limit, lists of models take the square of the catalog's memory.
    pub const MAX_PARTS: usize = 1 << 12;

    /// Divides what several of the models share by who shares it. The largest part is first; of more than
    /// [`Self::MAX_PARTS`], the smallest are left out. A model is given by its files.
    pub fn count(catalog: &Catalog, models: &[&[Digest]]) -> Result<Vec<Self>, UnreadableRecipe> {
        let mut sets = Sets::default();
        let mut blobs = vec![NOBODY; catalog.rows().len()];
        let mut recipes: HashMap<Digest, SetId> = HashMap::new();
        for (model, files) in models.iter().enumerate() {
            for file in *files {
                check_readable(catalog, *file)?;
                let recipe = catalog.recipes().get(file);
                if recipe.is_some() {
                    let set = recipes.entry(*file).or_insert(NOBODY);
                    *set = sets.with(*set, model);
                }
                let parts = recipe.and_then(|recipe| recipe.needs.as_deref()).unwrap_or_default();
                for number in parts.iter().copied().chain(catalog.find(*file)) {
                    let set = blobs.get_mut(number as usize);
                    set.into_iter().for_each(|set| *set = sets.with(*set, model));
                }
            }
        }
        // Only here, and in their order: for each part of each model, the rows would be read in no order.
        for (row, set) in catalog.rows().iter().zip(&blobs) {
            if row.state == RowState::Present {
                sets.add_bytes(*set, row.bytes_on_disk);
            }
        }
        for (file, set) in &recipes {
            let bytes = catalog.recipes().get(file).map_or(0, |recipe| recipe.bytes_on_disk);
            sets.add_bytes(*set, bytes);
        }
        Ok(sets.parts())
    }
}

/// The place of a set in [`Sets`]. A store has a number for each blob, so it is small.
type SetId = u32;

/// The empty set.
const NOBODY: SetId = 0;

/// Sets of models. Each is made from a smaller one by adding a model, so a blob that gets one more user only changes
/// its number, and the work is proportional to what the models need in all.
#[derive(Debug)]
struct Sets(Vec<Set>);

#[derive(Clone, Copy, Debug)]
struct Set {
    before: SetId,
    /// The model that was added last: the greatest, because models are counted in order.
    last: usize,
    bytes: u64,
    /// The model that was last added to this set, and the larger set. No earlier one is asked for again.
    larger: Option<(usize, SetId)>,
}

impl Default for Sets {
    /// The empty set.
    fn default() -> Self {
        Self(vec![Set { before: NOBODY, last: usize::MAX, bytes: 0, larger: None }])
    }
}

impl Sets {
    fn get(&self, id: SetId) -> Option<&Set> {
        self.0.get(id as usize).filter(|_| id != NOBODY)
    }

    /// The set `id` with `model`, which is not smaller than any that was added before.
    fn with(&mut self, id: SetId, model: usize) -> SetId {
        // More sets than that would need a hundred gigabytes.
        let new = SetId::try_from(self.0.len()).unwrap_or(SetId::MAX);
        let Some(set) = self.0.get_mut(id as usize) else { return id };
        match set.larger {
            _ if set.last == model => id,
            Some((added, larger)) if added == model => larger,
            _ => {
                set.larger = Some((model, new));
                self.0.push(Set { before: id, last: model, bytes: 0, larger: None });
                new
            }
        }
    }

    fn add_bytes(&mut self, id: SetId, bytes: u64) {
        if let Some(set) = self.0.get_mut(id as usize) {
            set.bytes = set.bytes.saturating_add(bytes);
        }
    }

    /// The sets of two and more models that have bytes, the largest first.
    fn parts(&self) -> Vec<SharedPart> {
        let shared = self.0.iter().filter(|set| set.before != NOBODY && set.bytes > 0);
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
    use crate::index::catalog::BlobFacts;

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
