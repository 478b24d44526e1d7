//! Checks that a repository's folder is a model that programs can load, once its files have arrived. The list of files that
//! was compared before the download has no contents.

use std::collections::BTreeMap;

use blobd_store::{FileReader, Ingest};
use blobd_store_format::descriptor::Descriptor;
use blobd_store_format::model_folder::{FolderFault, FolderFile, ListedFolder, Selection};
use blobd_store_format::recipe::Recipe;

use crate::ops::OpError;
use crate::ops::new_model::NewFile;

/// The contents of received files that [`check`] needs, by path.
pub(super) type Texts = BTreeMap<String, Vec<u8>>;

/// Whether a file with this path may be one that [`check`] needs.
pub(super) fn is_text(path: &str) -> bool {
    path.ends_with(".json")
}

/// Compares the indexes of shards with the files and their tensors, as an import of the same folder does. Returns what the
/// user should know. `received` has the texts that are not in the store yet.
///
/// # Errors
/// [`OpError::Shards`] if no program can load the model.
pub(super) fn check(
    ingest: &Ingest,
    name: &str,
    files: &[NewFile],
    received: &Texts,
) -> Result<Vec<String>, OpError> {
    let by_path: BTreeMap<&str, &Descriptor> =
        files.iter().filter_map(|file| Some((file.name.as_deref()?, &file.descriptor))).collect();
    let listed = by_path.iter().map(|(path, file)| FolderFile { path: (*path).to_owned(), size: file.size });
    // One file, or GGUF files, are not a folder.
    let Ok(folder) = ListedFolder::new(listed, &Selection::default()) else { return Ok(Vec::new()) };
    let mut texts = Texts::new();
    for path in folder.texts() {
        let text = match (received.get(path), by_path.get(path)) {
            (Some(text), _) => text.clone(),
            (None, Some(file)) => stored_text(ingest, file)?,
            (None, None) => continue,
        };
        texts.insert(path.to_owned(), text);
    }
    let Ok(plan) = folder.plan(&texts) else { return Ok(Vec::new()) };
    let mut faults = plan.faults().to_vec();
    let mut tensors = Vec::new();
    for path in plan.indexed_files() {
        if let Some(file) = by_path.get(path) {
            tensors.extend(tensors_of(ingest, file)?.map(|tensors| (path, tensors)));
        }
    }
    let borrowed = tensors.iter().map(|(path, tensors)| {
        (*path, tensors.iter().map(|(name, size)| (name.as_str(), *size)).collect::<Vec<_>>())
    });
    faults.extend(plan.check_tensors(borrowed));
    match faults.iter().find(|fault| fault.is_fatal()) {
        Some(fault) => Err(refused(name, fault)),
        None => Ok(faults.iter().map(ToString::to_string).collect()),
    }
}

fn refused(name: &str, fault: &FolderFault) -> OpError {
    let advice = "only its publisher can correct this; `--exclude PATTERN` leaves files out";
    OpError::Shards { model: name.to_owned(), what: fault.to_string(), advice }
}

fn stored_text(ingest: &Ingest, file: &Descriptor) -> Result<Vec<u8>, OpError> {
    let content = ingest.store().content();
    let length = file.size.min(ListedFolder::MAX_TEXT_BYTES);
    Ok(FileReader::new(content, &content.stored_file(file)?).read_range(0..length)?)
}

/// The name and the size of each tensor of a file; `None` if it is not split.
fn tensors_of(ingest: &Ingest, file: &Descriptor) -> Result<Option<Vec<(String, u64)>>, OpError> {
    let list = |recipe: &Recipe| {
        recipe.tensors().iter().map(|tensor| (tensor.name.into_owned(), tensor.size)).collect::<Vec<_>>()
    };
    if let Some(added) = ingest.added_recipe(file.digest) {
        return Ok(Some(list(added)));
    }
    let stored = ingest.store().content().stored_file(file)?;
    Ok(stored.recipe.as_deref().map(list))
}
