//! Says what unneeded data belonged to, from what is still on disk: recipes name the blobs of a file, whose header
//! names the model; the records of the trash have names.

use std::collections::BTreeMap;

use blobd_model::facts::ModelFacts;
use blobd_store::Store;
use blobd_store::gc::{GcPlan, Node};
use blobd_store_format::digest::Digest;
use blobd_store_format::recipe::Recipe;

use super::stored_header::read_header;

/// The most recipes that are read. The data of further ones is not described.
const MAX_RECIPES: usize = 1000;

/// The most characters of a name in a header.
const MAX_NAME: usize = 80;

/// The models that digests belonged to, as far as known.
#[derive(Debug, Default)]
pub(super) struct Descriptions(BTreeMap<Digest, String>);

impl Descriptions {
    /// Reads what the plan would delete.
    pub(super) fn of(store: &Store, plan: &GcPlan) -> Self {
        let mut found = BTreeMap::new();
        // Unreadable data is not described.
        for trashed in store.names().trash().unwrap_or_default() {
            found.insert(trashed.record, trashed.reference.short());
            for file in trashed.manifest.digests() {
                found.entry(file).or_insert_with(|| trashed.reference.short());
            }
        }
        let recipes = plan.deletions.iter().filter_map(|(node, _)| match node {
            Node::Recipe(file) => Some(*file),
            Node::Blob(_) => None,
        });
        for file in recipes.take(MAX_RECIPES) {
            let Ok(Some(recipe)) = store.content().recipe(file) else { continue };
            let name = found.get(&file).cloned().unwrap_or_else(|| name_in_header(store, &recipe));
            for blob in recipe.digests() {
                found.entry(blob).or_insert_with(|| name.clone());
            }
            found.insert(file, name);
        }
        Self(found)
    }

    pub(super) fn get(&self, digest: Digest) -> Option<&str> {
        self.0.get(&digest).map(String::as_str)
    }
}

/// The model's name, and how it is quantised; else the digest of the file.
fn name_in_header(store: &Store, recipe: &Recipe) -> String {
    let unnamed = || format!("file {}", recipe.file().short());
    let Ok(Some(header)) = read_header(store, recipe) else { return unnamed() };
    let name = header.metadata().find(|(key, _)| *key == b"general.name");
    let name = name.and_then(|(_, value)| value.as_str().map(ToOwned::to_owned));
    let name = name
        .filter(|name| !name.is_empty())
        .map_or_else(unnamed, |name| name.chars().take(MAX_NAME).collect());
    match ModelFacts::from_header(&*header).quantization {
        Some(quantization) => format!("{name}, {quantization}"),
        None => name,
    }
}
