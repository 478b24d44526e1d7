//! The blobs and recipes that a model needs, read from its manifest and recipes.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use serde_json::Value as Json;

/// Blobs and recipes, by their paths below the root.
pub(super) type Content = BTreeSet<String>;

#[derive(Clone, Debug)]
pub(super) struct Needs {
    /// Its files, as blobs and as recipes.
    pub(super) files: Content,
    /// The same, and the blobs that the recipes name.
    pub(super) all: Content,
}

impl Needs {
    pub(super) fn of(root: &Path, manifest: &str) -> Self {
        let manifest = json(&root.join(manifest));
        let layers = manifest["layers"].as_array().unwrap().iter();
        let (mut files, mut all) = (Content::new(), Content::new());
        for file in layers.chain([&manifest["config"]]) {
            let digest = file["digest"].as_str().unwrap().replace(':', "-");
            files.extend([format!("blobs/{digest}"), format!("recipes/{digest}.json")]);
            all.extend(file_and_blobs(root, &digest));
        }
        Self { files, all }
    }
}

/// A file as a blob or recipe, with the blobs that its recipe names.
pub(super) fn file_and_blobs(root: &Path, digest: &str) -> Content {
    let recipe = format!("recipes/{digest}.json");
    let mut all = Content::from([format!("blobs/{digest}"), recipe.clone()]);
    if root.join(&recipe).exists() {
        let json = json(&root.join(recipe));
        let blobs = json["blobs"].as_array().unwrap_or_else(|| panic!("{json}"));
        let blobs = blobs.iter().map(|blob| blob.as_str().unwrap());
        all.extend(blobs.map(|blob| format!("blobs/{}", blob.replace(':', "-"))));
    }
    all
}

fn json(path: &Path) -> Json {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}
