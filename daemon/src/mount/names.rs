//! The names of a model's files in the mount.

use blobd_store_format::descriptor::Descriptor;
use blobd_store_format::file_format::FileFormat;
use blobd_store_format::layout;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::reference::Reference;

/// The directory with the layout of Ollama's models directory.
pub(super) const OLLAMA: &str = "ollama";
pub(super) const OLLAMA_BLOBS: [&str; 2] = [OLLAMA, layout::BLOBS];
pub(super) const OLLAMA_MANIFESTS: [&str; 2] = [OLLAMA, layout::MANIFESTS];

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
    let found: Vec<_> = files(manifest).filter(|found| is_weights(found.file)).collect();
    let count = found.len();
    let name = |index: usize, Found { own, extension, .. }: &Found<'_>| match own.and_then(shard_suffix) {
        _ if count == 1 => format!("{tag}{extension}"),
        Some(suffix) => format!("{tag}{suffix}{extension}"),
        None => format!("{tag}-{:05}-of-{count:05}{extension}", index + 1),
    };
    let named = found.into_iter().enumerate();
    named.map(|(index, found)| NamedFile { name: name(index, &found), file: found.file }).collect()
}

/// The other files: `8b-projector.gguf`, `8b-adapter.gguf`, a second `8b-adapter-2.gguf`.
pub(super) fn companions<'m>(tag: &str, manifest: &'m Manifest) -> Vec<NamedFile<'m>> {
    let mut named: Vec<NamedFile<'m>> = Vec::new();
    for Found { file, extension, .. } in files(manifest).filter(|found| !is_weights(found.file)) {
        let part = file.media_type.component();
        let earlier = named.iter().filter(|earlier| earlier.file.media_type.component() == part).count();
        let number = if earlier == 0 { String::new() } else { format!("-{}", earlier + 1) };
        named.push(NamedFile { name: format!("{tag}-{part}{number}{extension}"), file });
    }
    named
}

fn is_weights(file: &Descriptor) -> bool {
    file.media_type.component() == "model"
}

/// A file of a known format.
struct Found<'m> {
    file: &'m Descriptor,
    /// The name that its registry gives it.
    own: Option<&'m str>,
    extension: &'static str,
}

/// The files of a model with a known format, and thus a known extension.
fn files(manifest: &Manifest) -> impl Iterator<Item = Found<'_>> {
    manifest.files().zip(manifest.names()).filter_map(|(file, own)| {
        let format = FileFormat::announced(&file.media_type, own)?;
        Some(Found { file, own, extension: format.extension() })
    })
}

/// `-00002-of-00003` of `x-00002-of-00003.gguf`.
fn shard_suffix(name: &str) -> Option<&str> {
    const FORM: &str = "-00000-of-00000";
    let (stem, _format) = FileFormat::split_name(name)?;
    let suffix = stem.get(stem.len().checked_sub(FORM.len())?..)?;
    let fits = |(found, form): (u8, u8)| if form == b'0' { found.is_ascii_digit() } else { found == form };
    suffix.bytes().zip(FORM.bytes()).all(fits).then_some(suffix)
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
            ["8b-projector.gguf", "8b-adapter.gguf", "8b-adapter-2.gguf"]
        );
        assert_eq!(names(&weights("8b", &manifest)), ["8b.gguf"]);
    }

    #[test]
    fn other_formats_have_no_gguf_file() {
        let raw = "application/vnd.cncf.model.weight.v1.raw";
        let other = manifest(&[
            ("application/vnd.docker.ai.safetensors", None),
            (raw, Some("model.safetensors")),
            ("application/vnd.cncf.model.weight.v1.tar", None),
        ]);
        assert!(weights("8b", &other).is_empty());
        assert_eq!(names(&weights("8b", &manifest(&[(raw, Some("m.GGUF"))]))), ["8b.gguf"]);
    }

    #[test]
    fn suffix_of_a_shard_is_found_in_any_text() {
        assert_eq!(shard_suffix("a-00001-of-00002.gguf"), Some("-00001-of-00002"));
        for text in ["", "a.gguf", "-0001-of-00002.gguf", "ä0001-of-00002.gguf", "a-00001-of-0000x.gguf"] {
            assert_eq!(shard_suffix(text), None, "{text}");
        }
    }
}
