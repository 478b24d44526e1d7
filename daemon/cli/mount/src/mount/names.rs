//! The names of a model's files in the mount.

use std::sync::Arc;
use std::time::SystemTime;

use blobd_cli_common::model_folder::{self, is_folder};
use blobd_store_format::descriptor::Descriptor;
use blobd_store_format::file_format::FileFormat;
use blobd_store_format::file_paths::{self, ListedFile};
use blobd_store_format::layout;
use blobd_store_format::manifest::Manifest;

use crate::Reference;

/// The directory with the layout of Ollama's models directory.
pub(super) const OLLAMA: &str = "ollama";
pub(super) const OLLAMA_BLOBS: [&str; 2] = [OLLAMA, layout::BLOBS];
pub(super) const OLLAMA_MANIFESTS: [&str; 2] = [OLLAMA, layout::MANIFESTS];

/// A stored model, as far as the tree depends on it.
#[derive(Clone, Debug)]
pub(crate) struct MountedModel {
    pub reference: Reference,
    pub manifest: Arc<Manifest>,
    /// A copy of the manifest that lists the files in archives instead of the archives.
    pub contents: Arc<Manifest>,
    /// Where the model is from, if that is recorded.
    pub origin: Option<String>,
    /// When the tag was last set.
    pub modified: SystemTime,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NamedFile<'m> {
    pub(super) name: String,
    pub(super) file: &'m Descriptor,
}

impl NamedFile<'_> {
    /// A name that no model and no other file has: `8b+model.gguf`, as in paths of `blobd exec`. No tag has a `+`.
    pub(super) fn other_name(&self) -> String {
        let (component, name) = (self.file.media_type.component().replace('/', "-"), self.name.as_str());
        let end = FileFormat::split_name(name).map_or(name.len(), |(stem, _format)| stem.len());
        let (stem, extension) = name.split_at_checked(end).unwrap_or((name, ""));
        format!("{stem}+{component}{extension}")
    }
}

/// The directory of a model's files: `llama3`, `me/llama3`, `hf.co/me/llama3`. Omits the default host and
/// namespace, as a reference does.
pub(super) fn directory(reference: &Reference) -> Vec<&str> {
    let namespace = reference.namespace();
    let host = (!reference.omits_host()).then(|| reference.host());
    let is_default = host.is_none() && namespace == Reference::DEFAULT_NAMESPACE;
    let namespace = namespace.split('/').filter(|_| !is_default);
    host.into_iter().chain(namespace).chain([reference.model()]).collect()
}

/// The directory in which Ollama expects a model's manifest. Of a namespace of several parts, which Ollama does not
/// have, it is that of the store.
pub(super) fn ollama_directory(reference: &Reference) -> Vec<String> {
    let namespace = layout::namespace_directory(reference);
    let parts = [reference.host(), &namespace, reference.model()];
    OLLAMA_MANIFESTS.into_iter().chain(parts).map(str::to_owned).collect()
}

/// The weights: `8b.gguf`, or `8b-00001-of-00003.gguf` and so on, so that engines find the other shards.
pub(super) fn weights<'m>(tag: &str, manifest: &'m Manifest) -> Vec<NamedFile<'m>> {
    named(tag, manifest, is_weights)
}

/// The other files: `mmproj-8b.gguf`, `8b-adapter.gguf`, a second `8b-adapter-2.gguf`.
pub(super) fn companions<'m>(tag: &str, manifest: &'m Manifest) -> Vec<NamedFile<'m>> {
    named(tag, manifest, |file| !is_weights(file))
}

/// A file of a folder: the directory that it is in, and its name there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct FolderFile<'m> {
    pub(super) directory: Vec<String>,
    pub(super) name: String,
    pub(super) file: &'m Descriptor,
}

/// The files of a folder under their own paths: `tiny/latest/config.json`.
pub(super) fn folder<'m>(reference: &Reference, manifest: &'m Manifest) -> Vec<FolderFile<'m>> {
    let top = directory(reference).into_iter().chain([reference.tag()]).map(str::to_owned);
    let top: Vec<String> = top.collect();
    let placed = |(path, file): (String, &'m Descriptor)| {
        let (folders, name) = path.rsplit_once('/').unwrap_or(("", &path));
        let folders = folders.split('/').filter(|folder| !folder.is_empty()).map(str::to_owned);
        FolderFile { directory: top.iter().cloned().chain(folders).collect(), name: name.to_owned(), file }
    };
    model_folder::files(reference, manifest).map(placed).collect()
}

fn is_weights(file: &Descriptor) -> bool {
    file.media_type.component() == "model"
}

/// The files of a model that is not a folder with a known format, and thus a known extension. The tag names them, because the files of all
/// tags of a model are in one directory.
fn named<'m>(tag: &str, manifest: &'m Manifest, is_wanted: fn(&Descriptor) -> bool) -> Vec<NamedFile<'m>> {
    let all = manifest.files().zip(manifest.names()).filter(|_| !is_folder(manifest));
    let wanted = all.filter(|(file, _)| is_wanted(file));
    let (files, listed): (Vec<&Descriptor>, Vec<ListedFile<'_>>) = wanted
        .filter_map(|(file, name)| {
            let format = FileFormat::announced(&file.media_type, name)?;
            let (media_type, extension) = (&file.media_type, Some(format.extension()));
            Some((file, ListedFile { media_type, name, digest: file.digest, extension }))
        })
        .unzip();
    let names = file_paths::names(tag, &listed);
    files.into_iter().zip(names).map(|(file, name)| NamedFile { name, file }).collect()
}

#[cfg(test)]
mod tests {
    use blobd_store_format::descriptor::MediaType;
    use blobd_store_format::digest::Digest;

    use super::*;

    fn manifest(layers: &[(&str, Option<&str>)]) -> Manifest {
        let descriptor = |(number, media_type): (usize, &str)| Descriptor {
            media_type: MediaType::new(media_type),
            digest: Digest::of(&number.to_le_bytes()),
            size: 1,
        };
        let layers = layers.iter().enumerate();
        let layers =
            layers.map(|(n, (media_type, name))| (descriptor((n, media_type)), name.map(str::to_owned)));
        Manifest::compose_named(descriptor((99, MediaType::DOCKER_CONFIG)), layers.collect()).unwrap()
    }

    fn names(files: &[NamedFile<'_>]) -> Vec<String> {
        files.iter().map(|file| file.name.clone()).collect()
    }

    #[test]
    fn directory_omits_the_default_host_and_namespace() {
        for (reference, expected) in [
            ("llama3:8b", "llama3"),
            ("me/llama3:8b", "me/llama3"),
            ("hf.co/me/llama3:8b", "hf.co/me/llama3"),
            ("localhost:5000/library/llama3", "localhost:5000/library/llama3"),
            ("ghcr.io/owner/repo/llama3", "ghcr.io/owner/repo/llama3"),
            ("registry.ollama.ai/owner/repo/llama3", "registry.ollama.ai/owner/repo/llama3"),
            ("registry.ollama.ai/my.models/llama3", "registry.ollama.ai/my.models/llama3"),
        ] {
            assert_eq!(directory(&reference.parse().unwrap()).join("/"), expected);
        }
        let ollama = ollama_directory(&"llama3:8b".parse().unwrap()).join("/");
        assert_eq!(ollama, "ollama/manifests/registry.ollama.ai/library/llama3");
        let ollama = ollama_directory(&"ghcr.io/owner/repo/llama3".parse().unwrap()).join("/");
        assert_eq!(ollama, "ollama/manifests/ghcr.io/owner+repo/llama3");
    }

    #[test]
    fn shards_are_numbered_as_engines_expect() {
        let model = MediaType::OLLAMA_MODEL;
        assert_eq!(names(&weights("8b", &manifest(&[(model, None)]))), ["8b.gguf"]);
        assert_eq!(
            names(&weights("8b", &manifest(&[(model, None), (model, None)]))),
            ["8b-00001-of-00002.gguf", "8b-00002-of-00002.gguf"]
        );
        let own = [(model, Some("x/y-00002-of-00002.gguf")), (model, Some("x/y-00001-of-00002.gguf"))];
        assert_eq!(
            names(&weights("8b", &manifest(&own))),
            ["8b-00002-of-00002.gguf", "8b-00001-of-00002.gguf"]
        );
    }

    #[test]
    fn companions_are_named_after_the_tag_and_their_component() {
        let adapter = "application/vnd.ollama.image.adapter";
        let manifest = manifest(&[
            (MediaType::OLLAMA_MODEL, None),
            (MediaType::OLLAMA_PROJECTOR, None),
            (adapter, None),
            (adapter, None),
            ("application/vnd.ollama.image.license", None),
        ]);
        assert_eq!(
            names(&companions("8b", &manifest)),
            ["mmproj-8b.gguf", "8b-adapter.gguf", "8b-adapter-2.gguf"]
        );
        assert_eq!(names(&weights("8b", &manifest)), ["8b.gguf"]);
    }

    #[test]
    fn file_that_a_manifest_names_twice_has_one_name() {
        let descriptor = |media_type| Descriptor {
            media_type: MediaType::new(media_type),
            digest: Digest::of(b"weights"),
            size: 1,
        };
        let layers = [MediaType::OLLAMA_MODEL, MediaType::OLLAMA_MODEL, MediaType::OLLAMA_PROJECTOR];
        let layers = layers.map(descriptor).to_vec();
        let manifest = Manifest::compose(descriptor(MediaType::DOCKER_CONFIG), layers).unwrap();
        assert_eq!(names(&weights("8b", &manifest)), ["8b.gguf", "8b.gguf"]);
        assert_eq!(names(&companions("8b", &manifest)), ["mmproj-8b.gguf"]);
    }

    #[test]
    fn files_have_the_extension_of_their_format_and_unknown_formats_no_name() {
        let raw = "application/vnd.cncf.model.weight.v1.raw";
        let unknown =
            manifest(&[(raw, Some("model.onnx")), ("application/vnd.cncf.model.weight.v1.tar", None)]);
        assert!(weights("8b", &unknown).is_empty());
        for (media_type, name) in
            [("application/vnd.docker.ai.safetensors", None), (raw, Some("model.safetensors"))]
        {
            assert_eq!(names(&weights("8b", &manifest(&[(media_type, name)]))), ["8b.safetensors"]);
        }
        assert_eq!(names(&weights("8b", &manifest(&[(raw, Some("m.GGUF"))]))), ["8b.gguf"]);
    }

    #[test]
    fn folder_has_its_own_paths_in_a_directory_of_its_tag() {
        let json = MediaType::OLLAMA_JSON;
        let safetensors = MediaType::PACK_SAFETENSORS;
        let folder_of = manifest(&[
            (safetensors, Some("model.safetensors")),
            (json, Some("config.json")),
            (MediaType::PACK_CONFIG, Some("tokenizer/vocab.txt")),
        ]);
        let files = folder(&"me/tiny:v1".parse().unwrap(), &folder_of);
        let paths: Vec<_> =
            files.iter().map(|file| format!("{}/{}", file.directory.join("/"), file.name)).collect();
        let expected = ["model.safetensors", "config.json", "tokenizer/vocab.txt"];
        assert_eq!(paths, expected.map(|path| format!("me/tiny/v1/{path}")));
        assert!(is_folder(&folder_of) && weights("v1", &folder_of).is_empty());
        assert!(!is_folder(&manifest(&[(MediaType::OLLAMA_MODEL, None)])));
    }
}
