//! Models that are folders, as `blobd mount` and `blobd exec` show them: which models are, and the paths of their files.

use std::sync::Arc;

use blobd_client::error::ClientError;
use blobd_store_format::descriptor::{Descriptor, MediaType};
use blobd_store_format::file_paths::{self, ListedFile};
use blobd_store_format::manifest::Manifest;

use crate::{Client, Reference};

/// Whether the model is a folder: programs that read its weights need the JSON files beside them.
pub(super) fn is_folder(manifest: &Manifest) -> bool {
    is_folder_of(manifest.layers().iter().map(|layer| &layer.media_type))
}

/// As [`is_folder`], by the media types of the model's files.
pub(super) fn is_folder_of<'m>(layers: impl Iterator<Item = &'m MediaType>) -> bool {
    let (mut has_weights, mut has_json) = (false, false);
    for layer in layers {
        has_weights |= layer.holds_tensors();
        has_json |= layer.component() == "json";
    }
    has_weights && has_json
}

/// The files of a folder, each with its path in it: `config.json`, `tokenizer/vocab.txt`.
pub(super) fn files<'m>(
    reference: &Reference,
    manifest: &'m Manifest,
) -> impl Iterator<Item = (String, &'m Descriptor)> {
    let files = || manifest.files().zip(manifest.names()).skip(1);
    let listed = files().map(|(file, name)| ListedFile {
        media_type: &file.media_type,
        name,
        digest: file.digest,
        extension: None,
    });
    let paths = file_paths::paths(reference.tag(), &listed.collect::<Vec<_>>());
    paths.into_iter().zip(files().map(|(file, _name)| file))
}

/// A manifest, and its copy that lists the files in archives instead of the archives.
pub(super) type Manifests = (Arc<Manifest>, Arc<Manifest>);

pub(super) fn manifests(client: &Client, reference: &Reference) -> Result<Manifests, ClientError> {
    let manifest = Arc::new(client.manifest(reference)?);
    if !manifest.files().any(|file| file.media_type.archive_of_weights().is_some()) {
        return Ok((Arc::clone(&manifest), manifest));
    }
    let files = client.model(reference)?.layers.into_iter().map(|layer| {
        (Descriptor { media_type: layer.media_type, digest: layer.digest, size: layer.size }, layer.name)
    });
    let config = manifest.config().clone();
    let layers = files.filter(|(file, _)| file.digest != config.digest).collect();
    match Manifest::compose_named(config, layers) {
        Ok(contents) => Ok((manifest, Arc::new(contents))),
        Err(error) => {
            tracing::warn!("model {}: the files in its archives are not shown: {error}", reference.short());
            Ok((Arc::clone(&manifest), manifest))
        }
    }
}
