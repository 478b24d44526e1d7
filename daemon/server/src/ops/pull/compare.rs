//! Compares the files of a stored model with those at its source, without downloading any.
//!
//! A copy of a repository often lacks files that the model does not need, so only the files that it has count.

use std::collections::BTreeMap;

use blobd_registry::{PublishedModel, RemoteFile, RemoteModel};
use blobd_store::{FileReader, Model, Store, StoredFile};
use blobd_store_format::git_id::GitId;

use super::MAX_GIT_BYTES;
use crate::ops::OpError;

/// The paths of the files that have other content at the source, or are missing there.
pub(super) fn changed_files(
    store: &Store,
    stored: &Model,
    remote: &RemoteModel,
) -> Result<Vec<String>, OpError> {
    let files = match remote {
        RemoteModel::Published(PublishedModel { manifest, .. }) => {
            let digests = manifest.digests();
            let others = layers(stored).filter(|(_, file)| !digests.contains(&file.descriptor.digest));
            return Ok(others.map(|(path, _)| path.to_owned()).collect());
        }
        RemoteModel::Files { files, .. } => files,
    };
    let by_path: BTreeMap<&str, &RemoteFile> =
        files.iter().filter_map(|file| Some((file.name()?, file))).collect();
    let mut changed = Vec::new();
    for (path, file) in layers(stored) {
        let is_same = match by_path.get(path) {
            Some(remote) => is_same(store, file, remote)?,
            // The only file of a model has no path.
            None => files.iter().any(|remote| remote.digest() == Some(file.descriptor.digest)),
        };
        if !is_same {
            changed.push(path.to_owned());
        }
    }
    Ok(changed)
}

/// The layers of a model with their paths, or the names of their components.
fn layers(model: &Model) -> impl Iterator<Item = (&str, &StoredFile)> {
    let files = model.files.iter().zip(model.manifest.names()).skip(1);
    files.map(|(file, name)| (name.unwrap_or(file.descriptor.media_type.component()), file))
}

/// Whether both have the same content, as far as the hub says it. A hub gives git's SHA-1 of files in git.
fn is_same(store: &Store, file: &StoredFile, remote: &RemoteFile) -> Result<bool, OpError> {
    let size = file.descriptor.size;
    match (remote.digest(), remote.git_id()) {
        (Some(digest), _) => Ok(digest == file.descriptor.digest),
        (None, _) if remote.size() != size => Ok(false),
        (None, Some(id)) if size <= MAX_GIT_BYTES => {
            Ok(GitId::of(&FileReader::new(store.content(), file).read_range(0..size)?) == id)
        }
        (None, _) => Ok(true),
    }
}
