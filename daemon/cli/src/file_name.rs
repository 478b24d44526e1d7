//! The paths of the files of an open model, below the folder that they are exported to.

use blobd_client::model::OpenModel;
use blobd_store_format::file_format::{FileFormat, FileKind};
use blobd_store_format::file_paths::{ListedFile, paths};
use blobd_store_format::reference::Reference;

/// A file name has at most 255 bytes, and the longest names of models have more. What follows the stem is shorter than
/// the rest.
const MAX_STEM_BYTES: usize = 200;

/// The name of a model's files that have none of their own: `llama3-8b` of `llama3:8b`.
pub(super) fn stem(reference: &Reference) -> String {
    let stem = format!("{}-{}", reference.model(), reference.tag());
    stem.get(..MAX_STEM_BYTES).unwrap_or(&stem).to_owned()
}

/// The path of each layer: its own from the manifest, or one made from the model's name.
pub(super) fn file_paths(reference: &Reference, model: &OpenModel) -> Vec<String> {
    let listed = model.layers().iter().enumerate().map(|(layer, open)| ListedFile {
        media_type: &open.media_type,
        name: open.name.as_deref(),
        digest: open.digest,
        extension: extension(model, layer),
    });
    paths(&stem(reference), &listed.collect::<Vec<_>>())
}

/// The extension of a file's format by its first bytes. `None` if it cannot be read here; then exporting it fails too.
fn extension(model: &OpenModel, layer: usize) -> Option<&'static str> {
    const START_BYTES: usize = 512;
    let mut start = vec![0; START_BYTES];
    let read = model.file(layer).ok()?.read_at(0, &mut start, |fd, at, bytes| model.read_at(fd, at, bytes));
    start.truncate(read.ok()?);
    let format = FileFormat::of_start(&start).map(FileFormat::extension);
    format.or_else(|| FileKind::of_start(&start).extension())
}
