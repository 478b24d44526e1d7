//! Folders that hold several models, each in a folder of its own.

use std::collections::{BTreeMap, BTreeSet};

use super::{CONFIG, FolderFile, ListedFolder, MODEL_INDEX, Selection};
use crate::file_format::FileFormat;

/// Files that say what the weights beside them, or below, are: those of transformers, diffusers, PEFT and Mistral.
const MARKERS: [&str; 4] = [CONFIG, MODEL_INDEX, "adapter_config.json", "params.json"];

impl ListedFolder {
    /// Whether a file of this name, directly in a folder, shows that the folder may be a model: it has weights that are split,
    /// or says what the weights below are.
    pub fn is_sign_of_model(name: &str) -> bool {
        MARKERS.contains(&name) || FileFormat::split_name(name).is_some()
    }

    /// The paths of the folders that are models by themselves: they have a configuration, and safetensors files in them or
    /// below. Empty if the folder itself is one model, or if patterns say which of its files are one.
    pub fn model_folders(
        files: impl IntoIterator<Item = FolderFile>,
        selection: &Selection,
    ) -> BTreeSet<String> {
        let taken = files.into_iter().take(Self::MAX_FILES);
        let taken: Vec<_> = taken.filter(|file| selection.reason_against(file).is_none()).collect();
        if selection.has_includes() {
            return BTreeSet::new();
        }
        let mut marked = BTreeSet::new();
        for (folder, name) in taken.iter().map(|file| split(&file.path)) {
            if MARKERS.contains(&name) {
                marked.insert(folder);
            }
        }
        // Of folders in each other, the outer one is the model: a pipeline has components.
        let mut with_weights: BTreeMap<&str, bool> = BTreeMap::new();
        for (folder, name) in taken.iter().map(|file| split(&file.path)) {
            let is_weights = FileFormat::SAFETENSORS.stem_of(name).is_some();
            if let Some(outer) = outermost(folder, &marked) {
                *with_weights.entry(outer).or_default() |= is_weights;
            }
        }
        let models = with_weights.into_iter().filter(|(_, has_weights)| *has_weights);
        let models: BTreeSet<String> = models.map(|(folder, _)| folder.to_owned()).collect();
        if models.contains("") { BTreeSet::new() } else { models }
    }
}

fn split(path: &str) -> (&str, &str) {
    path.rsplit_once('/').unwrap_or(("", path))
}

/// The outermost of these folders that a folder is in, or that it is.
fn outermost<'f>(folder: &'f str, marked: &BTreeSet<&str>) -> Option<&'f str> {
    let ends = folder.match_indices('/').map(|(end, _)| end).chain([folder.len()]);
    let folders = std::iter::once(0).chain(ends).filter_map(|end| folder.get(..end));
    folders.into_iter().find(|folder| marked.contains(folder))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folders(paths: &[&str], selection: &Selection) -> Vec<String> {
        let files = paths.iter().map(|path| FolderFile { path: (*path).to_owned(), size: 1 });
        ListedFolder::model_folders(files, selection).into_iter().collect()
    }

    #[test]
    fn folders_with_a_configuration_and_weights_are_models() {
        let none = Selection::default();
        let found = folders(
            &[
                "a-Q8_0.gguf",
                "notes/config.json",
                "org/llama/config.json",
                "org/llama/model.safetensors",
                "pipeline/model_index.json",
                "pipeline/unet/config.json",
                "pipeline/unet/model.safetensors",
                "qwen/config.json",
                "qwen/model-00001-of-00001.safetensors",
                "stray.safetensors",
            ],
            &none,
        );
        assert_eq!(found, ["org/llama", "pipeline", "qwen"]);
        let files = ["a/config.json", "a/x.safetensors", "b/config.json", "b/x.safetensors"];
        assert_eq!(folders(&files, &Selection::new([], ["b/"])), ["a"]);
        assert_eq!(folders(&files, &Selection::new(["*"], [])), [""; 0], "patterns say what the model is");
    }

    #[test]
    fn folder_that_is_a_model_holds_no_others() {
        for paths in [
            ["config.json", "1_Pooling/config.json", "model.safetensors"],
            ["model_index.json", "vae/config.json", "vae/x.safetensors"],
            ["x.safetensors", "y.safetensors", "more/z.safetensors"],
        ] {
            assert_eq!(folders(&paths, &Selection::default()), [""; 0], "{paths:?}");
        }
    }
}
