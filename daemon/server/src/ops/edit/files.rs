//! The changes of a model's small files: which are allowed, and what the layers are after them.

use std::collections::BTreeSet;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use blobd_client::protocol::lists::MAX_IMPORTED_FILES;
use blobd_client::protocol::naming::{ChangedFile, FileChange};
use blobd_store_format::digest::Digest;
use blobd_store_format::file_format::FileFormat;
use blobd_store_format::model_file::{check_paths, has_other_weights, layer_type};
use blobd_store_format::model_folder::is_index_of_weights;

use super::layers::{EditedLayer, EditedLayers};

#[derive(Default)]
pub(super) struct FileEdits {
    pub(super) changed: Vec<ChangedFile>,
    pub(super) notes: Vec<String>,
}

/// Makes the changes in the layers. `keeps_licenses` refuses changes of license files, on which the user's policy may
/// depend. The error says why a change is refused.
pub(super) fn edit_files(
    layers: &mut EditedLayers<'_>,
    changes: &[FileChange],
    keeps_licenses: bool,
) -> Result<FileEdits, String> {
    let (mut edits, mut seen) = (FileEdits::default(), BTreeSet::new());
    for change in changes {
        if !seen.insert(&change.path) {
            return Err(format!("{:?}: two changes of this file", change.path));
        }
        let is_this = |layer: &EditedLayer| layer.name.as_deref() == Some(&change.path);
        let place = layers.layers.iter().position(is_this);
        if let Some(reason) =
            refusal(&change.path, place.and_then(|place| layers.layers.get(place)), keeps_licenses)
        {
            return Err(format!("{}: {reason}", change.path));
        }
        let content = content(change)?;
        match (content, place) {
            (Some(content), Some(place)) => edits.replace(layers, place, content),
            (Some(content), None) => edits.add(layers, &change.path, content)?,
            (None, Some(place)) => edits.remove(layers, place),
            (None, None) => edits.notes.push(format!(
                "{} has no file {:?}: there was nothing to remove",
                layers.model.reference.short(),
                change.path
            )),
        }
    }
    Ok(edits)
}

/// Why a file is not edited. `layer` is the one with this path, if there is one.
fn refusal(path: &str, layer: Option<&EditedLayer>, keeps_licenses: bool) -> Option<&'static str> {
    let media_type =
        layer.map_or_else(|| layer_type(path, None), |layer| layer.descriptor.media_type.clone());
    let is_weights = media_type.holds_tensors() || media_type.component() == "tensor";
    if is_weights || FileFormat::split_name(path).is_some() || has_other_weights(path) {
        return Some("a file of weights; only a model's other files can be edited");
    }
    if is_index_of_weights(path) {
        return Some("describes the files of weights, which cannot be edited");
    }
    (keeps_licenses && media_type.component() == "license")
        .then_some("a license, which the policy for your user may depend on")
}

fn content(change: &FileChange) -> Result<Option<Vec<u8>>, String> {
    let FileChange { path, text, base64 } = change;
    let content = match (text, base64) {
        (None, None) => return Ok(None),
        (Some(text), None) => text.as_bytes().to_vec(),
        (None, Some(encoded)) => {
            STANDARD.decode(encoded).map_err(|error| format!("{path}: wrong base64: {error}"))?
        }
        (Some(_), Some(_)) => return Err(format!("{path}: expected text or base64, found both")),
    };
    match FileFormat::from_start(&content) {
        Some(_) => Err(format!("{path}: the new content is a file of weights; `blobd import` stores these")),
        None => Ok(Some(content)),
    }
}

impl FileEdits {
    fn replace(&mut self, layers: &mut EditedLayers<'_>, place: usize, content: Vec<u8>) {
        let Some(layer) = layers.layers.get_mut(place) else { return };
        let from = layer.descriptor.digest;
        if layer.set(content) {
            self.note_change(layer, Some(from));
        }
    }

    fn remove(&mut self, layers: &mut EditedLayers<'_>, place: usize) {
        let EditedLayer { descriptor, name, .. } = layers.layers.remove(place);
        let path = name.unwrap_or_default();
        self.changed.push(ChangedFile { path, from: Some(descriptor.digest), to: None, size: 0 });
    }

    /// Adds a file. The order of the layers is that of an import of the folder: by their paths.
    fn add(&mut self, layers: &mut EditedLayers<'_>, path: &str, content: Vec<u8>) -> Result<(), String> {
        check_new_path(layers, path)?;
        let layer = EditedLayer::added(Some(path.to_owned()), layer_type(path, None), content);
        self.note_change(&layer, None);
        let layers = &mut layers.layers;
        let is_sorted = layers.is_sorted_by(|a, b| a.name.is_some() && a.name <= b.name);
        let first_after = || layers.iter().position(|layer| layer.name.as_deref() > Some(path));
        let place = if is_sorted { first_after() } else { None };
        layers.insert(place.unwrap_or(layers.len()), layer);
        Ok(())
    }

    fn note_change(&mut self, layer: &EditedLayer, from: Option<Digest>) {
        let path = layer.name.clone().unwrap_or_default();
        let (to, size) = (Some(layer.descriptor.digest), layer.descriptor.size);
        self.changed.push(ChangedFile { path, from, to, size });
    }
}

/// Checks the path as an import does. What the model's own paths are does not matter: its publisher has chosen them.
fn check_new_path(layers: &EditedLayers<'_>, path: &str) -> Result<(), String> {
    if layers.layers.len() >= MAX_IMPORTED_FILES {
        return Err(format!("{path}: too many files: expected at most {MAX_IMPORTED_FILES}"));
    }
    let present = || layers.layers.iter().filter_map(|layer| layer.name.as_deref());
    if present().next().is_none() {
        return Err(format!(
            "{path}: the files of this model have no paths, so that none can be added; import it from a folder"
        ));
    }
    let is_gguf = present().any(|name| FileFormat::GGUF.stem_of(name).is_some());
    let is_json = |layer: &EditedLayer| layer.descriptor.media_type.component() == "json";
    // With a JSON file it would be a folder, which engines open in another way.
    if is_gguf && !layers.layers.iter().any(is_json) {
        return Err(format!(
            "{path}: a model of GGUF files is not a folder, so that it can have no such file"
        ));
    }
    let with_present = check_paths(present()).is_ok();
    let paths = present().filter(|_| with_present).chain([path]);
    check_paths(paths).map_err(|error| error.to_string())
}
