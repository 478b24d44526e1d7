//! Counts over the catalog which bytes a model shares with each other model.

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
