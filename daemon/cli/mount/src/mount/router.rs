//! The trees of programs that take a folder of models: one folder for each model and tag, with names by which llama.cpp's
//! `--models-dir` and LM Studio tell weights, projectors and drafts apart.

use blobd_store_format::descriptor::Descriptor;
use blobd_store_format::file_format::FileFormat;
use blobd_store_format::file_paths::{self, ListedFile};
use blobd_store_format::manifest::Manifest;

use super::names::NamedFile;
use crate::{Digest, Reference};

/// The directory for llama.cpp's `--models-dir`: a folder per model.
pub(super) const MODELS: [&str; 1] = ["models"];
/// The directory for LM Studio, which wants a folder per publisher and in it one per model.
pub(super) const LM_STUDIO: [&str; 2] = ["lmstudio", "blobd"];

/// What the names of drafts start with; llama.cpp takes another file for a model.
const DRAFTS: [&str; 4] = ["mtp-", "eagle3-", "dflash-", "dspark-"];

/// The name of a model's folder: `llama3:8b`, `hf.co--me--llama3:Q4_K_M`.
pub(super) fn folder_name(reference: &Reference) -> String {
    /// Names of files have at most 255 bytes, with what comes before and after the name.
    const MAX_BYTES: usize = 200;
    const DIGITS: usize = 8;
    let name = reference.short().replace('/', "--");
    if name.len() <= MAX_BYTES {
        return name;
    }
    let digits: String = Digest::of(name.as_bytes()).to_hex().chars().take(DIGITS).collect();
    format!("{}-{digits}", name.get(..MAX_BYTES).unwrap_or(&name))
}

/// The GGUF files of a model: weights, a projector and a draft. Engines take any other file for weights.
pub(super) fn files<'m>(name: &str, manifest: &'m Manifest) -> Vec<NamedFile<'m>> {
    let gguf = || {
        let all = manifest.files().zip(manifest.names());
        all.filter(|(file, name)| FileFormat::announced(&file.media_type, *name).is_some_and(is_gguf))
    };
    let of =
        |component: &'static str| gguf().filter(move |(file, _)| file.media_type.component() == component);
    let weights: Vec<(&Descriptor, Option<&str>)> = of("model").collect();
    if weights.is_empty() {
        return Vec::new();
    }
    let listed = weights.iter().map(|(file, name)| ListedFile {
        media_type: &file.media_type,
        name: *name,
        digest: file.digest,
        extension: Some(FileFormat::GGUF.extension()),
    });
    let names = file_paths::names(name, &listed.collect::<Vec<_>>());
    let weights = names.into_iter().zip(weights).map(|(name, (file, _))| NamedFile { name, file });
    let extension = FileFormat::GGUF.extension();
    let projector = of("projector").next().map(|(file, _)| (format!("mmproj-{name}{extension}"), file));
    let draft = of("draft").next().map(|(file, own)| {
        let own = own.and_then(|own| own.rsplit('/').next()).unwrap_or_default();
        let start = DRAFTS.into_iter().find(|start| own.starts_with(start)).unwrap_or("mtp-");
        (format!("{start}{name}{extension}"), file)
    });
    let companions = projector.into_iter().chain(draft).map(|(name, file)| NamedFile { name, file });
    weights.chain(companions).collect()
}

fn is_gguf(format: &FileFormat) -> bool {
    format.extension() == FileFormat::GGUF.extension()
}

#[cfg(test)]
mod tests {
    use blobd_store_format::descriptor::MediaType;

    use super::*;

    fn names(layers: &[(&str, Option<&str>)]) -> Vec<String> {
        let descriptor = |number: usize, media_type: &str| Descriptor {
            media_type: MediaType::new(media_type),
            digest: Digest::of(&number.to_le_bytes()),
            size: 1,
        };
        let layers = layers.iter().enumerate();
        let layers = layers.map(|(n, (kind, name))| (descriptor(n, kind), name.map(str::to_owned)));
        let config = descriptor(99, MediaType::DOCKER_CONFIG);
        let manifest = Manifest::compose_named(config, layers.collect()).unwrap();
        files("llama3:8b", &manifest).into_iter().map(|file| file.name).collect()
    }

    #[test]
    fn folder_is_named_after_model_and_tag() {
        let name = |text: &str| folder_name(&text.parse().unwrap());
        assert_eq!(name("llama3"), "llama3:latest");
        assert_eq!(name("hf.co/me/llama3-GGUF:Q4_K_M"), "hf.co--me--llama3-GGUF:Q4_K_M");
        let long = format!("{}/{}:{}", "a".repeat(80), "b".repeat(80), "c".repeat(100));
        let other = format!("{}d", &long[..long.len() - 1]);
        assert_eq!(name(&long).len(), 209);
        assert_ne!(name(&long), name(&other));
    }

    #[test]
    fn files_have_the_names_that_engines_look_for() {
        const DRAFT: &str = "application/vnd.ollama.image.draft";
        let model = MediaType::OLLAMA_MODEL;
        assert_eq!(names(&[(model, None)]), ["llama3:8b.gguf"]);
        assert_eq!(
            names(&[(model, None), (model, None), (MediaType::OLLAMA_PROJECTOR, None), (DRAFT, None)]),
            [
                "llama3:8b-00001-of-00002.gguf",
                "llama3:8b-00002-of-00002.gguf",
                "mmproj-llama3:8b.gguf",
                "mtp-llama3:8b.gguf"
            ]
        );
        let named = [(model, Some("x.gguf")), (DRAFT, Some("MTP/eagle3-x.gguf"))];
        assert_eq!(names(&named), ["llama3:8b.gguf", "eagle3-llama3:8b.gguf"]);
    }

    #[test]
    fn files_that_engines_would_take_for_weights_are_left_out() {
        let adapter = "application/vnd.ollama.image.adapter";
        let template = "application/vnd.ollama.image.template";
        assert_eq!(names(&[(MediaType::OLLAMA_MODEL, None), (adapter, None), (template, None)]).len(), 1);
        assert!(names(&[(MediaType::PACK_SAFETENSORS, Some("model.safetensors"))]).is_empty());
        assert!(names(&[(MediaType::OLLAMA_PROJECTOR, None)]).is_empty());
    }
}
