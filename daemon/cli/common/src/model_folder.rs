//! Models that are folders, as `blobd mount` and `blobd exec` show them: which models are, and the paths of their files.

use std::sync::Arc;

use blobd_client::error::ClientError;
use blobd_store_format::descriptor::{Descriptor, MediaType};
use blobd_store_format::file_format::FileFormat;
use blobd_store_format::file_paths::{self, ListedFile};
use blobd_store_format::manifest::Manifest;

use crate::{Client, Reference};

/// Whether the model is a folder: it has weights and JSON files, or several files with names, and one of them is a
/// safetensors file.
pub fn is_folder(manifest: &Manifest) -> bool {
    let layers = manifest.layers().iter().map(|layer| &layer.media_type);
    is_folder_of(layers.zip(manifest.names().skip(1)))
}

/// As [`is_folder`], by the media types and names of the model's files.
pub fn is_folder_of<'m>(layers: impl Iterator<Item = (&'m MediaType, Option<&'m str>)>) -> bool {
    let (mut has_weights, mut has_json, mut has_safetensors, mut named) = (false, false, false, 0_usize);
    for (media_type, name) in layers {
        has_weights |= media_type.holds_tensors();
        has_json |= media_type.component() == "json";
        has_safetensors |= media_type.holds_tensors() && is_safetensors(media_type, name);
        named += usize::from(name.is_some());
    }
    (has_weights && has_json) || (has_safetensors && named > 1)
}

fn is_safetensors(media_type: &MediaType, name: Option<&str>) -> bool {
    FileFormat::announced(media_type, name).is_some_and(|format| !format.tensor_format().is_gguf())
}

/// The files of a folder, each with its path in it: `config.json`, `tokenizer/vocab.txt`.
pub fn files<'m>(
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
pub type Manifests = (Arc<Manifest>, Arc<Manifest>);

/// Fetches the manifest of a stored model. Fails if the model is not stored.
pub fn manifests(client: &Client, reference: &Reference) -> Result<Manifests, ClientError> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_are_weights_with_json_or_several_files_with_safetensors_among_them() {
        const DOCKER: &str = "application/vnd.docker.ai.safetensors";
        let is_folder = |layers: &[(&str, Option<&str>)]| {
            let layers: Vec<_> = layers.iter().map(|(text, name)| (MediaType::new(*text), *name)).collect();
            is_folder_of(layers.iter().map(|(media_type, name)| (media_type, *name)))
        };
        let (json, other) = (MediaType::OLLAMA_JSON, MediaType::PACK_CONFIG);
        let (gguf, safetensors) = (MediaType::OLLAMA_MODEL, MediaType::PACK_SAFETENSORS);
        let raw = MediaType::PACK_OTHER_WEIGHTS;
        assert!(is_folder(&[(gguf, None), (json, None)]));
        assert!(is_folder(&[(safetensors, Some("lora.safetensors")), (other, Some("README.md"))]));
        assert!(is_folder(&[
            (safetensors, Some("m.safetensors")),
            (safetensors, Some("m.fp16.safetensors"))
        ]));
        assert!(is_folder(&[(raw, Some("model.safetensors")), (other, Some("config.json"))]));
        let file = "application/vnd.docker.ai.model.file";
        assert!(is_folder(&[(DOCKER, Some("model.safetensors")), (file, Some("tokenizer.json"))]));
        assert!(!is_folder(&[(safetensors, Some("m.safetensors"))]));
        assert!(!is_folder(&[(gguf, Some("m.gguf")), (other, Some("README.md"))]));
        assert!(!is_folder(&[(DOCKER, None), (DOCKER, None)]));
        assert!(!is_folder(&[(json, Some("config.json")), (other, Some("README.md"))]));
    }
}
