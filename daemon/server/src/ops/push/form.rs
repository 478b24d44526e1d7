//! The forms in which a model is published: its own manifest, or one that is made for the programs of another publisher.
//!
//! A manifest that is made refers to the same files as the stored one, so a registry that has the model in one form gets only
//! a manifest and a configuration for the next. Both depend on nothing but the files, their names and what is recorded about
//! the model: a second push makes the same bytes. Every file of the model is in it, under its own path: none is left out, and
//! a file that the form has no media type for refuses the whole model.
//!
//! Sources: `docker/model-runner` (`pkg/distribution`) and `modelpack/model-spec`.

use blobd_client::protocol::push::PushForm;
use blobd_store::{Model, RecordedFacts, StoredFile};
use blobd_store_format::descriptor::{Descriptor, MediaType};
use blobd_store_format::digest::Digest;
use blobd_store_format::file_format::FileFormat;
use blobd_store_format::file_paths::{ListedFile, paths};
use blobd_store_format::manifest::Manifest;
use blobd_store_format::tensor::TensorFormat;
use bytes::Bytes;
use serde_json::{Map, Value as Json, json};

use super::super::OpError;

/// What is published of a model besides its stored files.
#[derive(Debug)]
pub(super) struct Published {
    pub(super) manifest: Manifest,
    /// The configuration, unless it is the stored one.
    pub(super) config: Option<Bytes>,
}

impl Published {
    /// A model in a form.
    ///
    /// # Errors
    /// [`OpError::NotPushable`] if the form has no media type for one of its files.
    pub(super) fn new(form: PushForm, model: &Model, facts: &RecordedFacts) -> Result<Self, OpError> {
        let target = match form {
            PushForm::Docker => Target::Docker,
            PushForm::Modelpack => Target::ModelPack,
            _ => return Ok(Self::stored(model)),
        };
        if target.is_form_of(&model.manifest) {
            return Ok(Self::stored(model));
        }
        let files = files(model);
        let layers = files.iter().map(|file| target.layer(file));
        let layers = layers.collect::<Result<Vec<_>, _>>().map_err(|reason| {
            let model = model.reference.short();
            OpError::NotPushable {
                model,
                reason: format!("{reason}; push it in its original form, without --as"),
            }
        })?;
        let format = files.iter().find_map(|file| file.format);
        let config = target.config(format, facts, &files).to_string().into_bytes();
        let raw = target.manifest(&layers, &config).to_string().into_bytes();
        Ok(Self { manifest: Manifest::parse(raw)?, config: Some(config.into()) })
    }

    fn stored(model: &Model) -> Self {
        Self { manifest: model.manifest.clone(), config: None }
    }
}

/// A file of a model, with what a form needs to know about it.
pub(super) struct FormFile<'f> {
    pub(super) stored: &'f StoredFile,
    pub(super) path: String,
    /// The format of its tensors.
    format: Option<TensorFormat>,
}

/// The layers of a model. Paths do not depend on the model's name in the store.
pub(super) fn files(model: &Model) -> Vec<FormFile<'_>> {
    let layers = || model.files.iter().zip(model.manifest.names()).skip(1);
    let format = |(file, name): &(&StoredFile, Option<&str>)| match &file.recipe {
        Some(recipe) => recipe.format(),
        None => FileFormat::announced(&file.descriptor.media_type, *name).map(FileFormat::tensor_format),
    };
    let listed = layers().map(|(file, name)| ListedFile {
        media_type: &file.descriptor.media_type,
        name,
        digest: file.descriptor.digest,
        extension: None,
    });
    let paths = paths("model", &listed.collect::<Vec<_>>());
    let files = layers().zip(paths);
    files.map(|(file, path)| FormFile { stored: file.0, path, format: format(&file) }).collect()
}

/// A form that is not the stored one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Target {
    /// Docker Model Runner's own.
    Docker,
    /// CNCF ModelPack.
    ModelPack,
}

/// The path of a file, for both forms.
const PATH: &str = "org.cncf.model.filepath";

impl Target {
    const fn name(self) -> &'static str {
        match self {
            Self::Docker => "docker",
            Self::ModelPack => "modelpack",
        }
    }

    /// Whether a manifest has this form already. It is published as it is then.
    fn is_form_of(self, manifest: &Manifest) -> bool {
        let config = manifest.config().media_type.as_str();
        match self {
            Self::Docker => {
                [MediaType::DOCKER_MODEL_CONFIG, MediaType::DOCKER_FILES_CONFIG].contains(&config)
            }
            Self::ModelPack => config == MediaType::PACK_MODEL_CONFIG,
        }
    }

    fn layer(self, file: &FormFile<'_>) -> Result<Json, String> {
        let Descriptor { media_type, digest, size } = &file.stored.descriptor;
        let found = self.media_type(media_type, file.format);
        let found = found.ok_or_else(|| {
            format!(
                "{}: the form {} has no media type for files of type {media_type}",
                file.path,
                self.name()
            )
        })?;
        Ok(json!({ "mediaType": found, "digest": digest, "size": size, "annotations": { PATH: file.path } }))
    }

    /// The media type of a file in this form; `None` if it has none.
    fn media_type(self, stored: &MediaType, format: Option<TensorFormat>) -> Option<&'static str> {
        match (self, stored.component()) {
            (_, _) if is_packed(stored) => None,
            (Self::Docker, "model") => match format? {
                TensorFormat::Gguf => Some(MediaType::DOCKER_GGUF),
                TensorFormat::Safetensors => Some(MediaType::DOCKER_SAFETENSORS),
                _ => None,
            },
            (Self::Docker, "projector") if format == Some(TensorFormat::Gguf) => {
                Some(MediaType::DOCKER_PROJECTOR)
            }
            (Self::Docker, "license") => Some(MediaType::DOCKER_LICENSE),
            (Self::Docker, "template") if stored.as_str() == MediaType::DOCKER_TEMPLATE => {
                Some(MediaType::DOCKER_TEMPLATE)
            }
            (Self::Docker, component) => is_beside_weights(component).then_some(MediaType::DOCKER_FILE),
            (Self::ModelPack, "model") => Some(MediaType::PACK_OTHER_WEIGHTS),
            (Self::ModelPack, "license" | "doc") => Some(MediaType::PACK_DOC),
            (Self::ModelPack, component) => is_beside_weights(component).then_some(MediaType::PACK_CONFIG),
        }
    }

    fn config(self, format: Option<TensorFormat>, facts: &RecordedFacts, files: &[FormFile<'_>]) -> Json {
        let digests: Vec<Digest> = files.iter().map(|file| file.stored.descriptor.digest).collect();
        let (architecture, quantization) = (&facts.architecture, &facts.quantization);
        let format = format.map(TensorFormat::name);
        match self {
            Self::Docker => json!({
                "config": known([
                    ("format", format),
                    ("architecture", architecture.as_deref()),
                    ("quantization", quantization.as_deref()),
                ]),
                "descriptor": {},
                "rootfs": { "type": "rootfs", "diff_ids": digests },
            }),
            Self::ModelPack => json!({
                "descriptor": known([("family", architecture.as_deref())]),
                "config": known([("format", format), ("quantization", quantization.as_deref())]),
                "modelfs": { "type": "layers", "diffIds": digests },
            }),
        }
    }

    fn manifest(self, layers: &[Json], config: &[u8]) -> Json {
        const FILES: [&str; 2] = [MediaType::DOCKER_SAFETENSORS, MediaType::DOCKER_FILE];
        let has_files = layers.iter().any(|layer| FILES.iter().any(|files| layer["mediaType"] == *files));
        let config_type = match self {
            Self::Docker if has_files => MediaType::DOCKER_FILES_CONFIG,
            Self::Docker => MediaType::DOCKER_MODEL_CONFIG,
            Self::ModelPack => MediaType::PACK_MODEL_CONFIG,
        };
        let mut manifest = json!({
            "schemaVersion": 2,
            "mediaType": MediaType::OCI_MANIFEST,
            "config": { "mediaType": config_type, "digest": Digest::of(config), "size": config.len() },
            "layers": layers,
        });
        if self == Self::ModelPack {
            manifest["artifactType"] = MediaType::PACK_MANIFEST.into();
        }
        manifest
    }
}

/// Whether a file is an archive of other files.
pub(super) fn is_packed(media_type: &MediaType) -> bool {
    media_type.archive_of_weights().is_some() || media_type.as_str().contains(".tar")
}

/// Whether files of this component are in a form as files with a path, without a meaning of their own: those of a folder, and
/// the settings that only Ollama knows.
fn is_beside_weights(component: &str) -> bool {
    const FILES: [&str; 6] = ["json", "file", "weight.config", "doc", "code", "dataset"];
    const SETTINGS: [&str; 4] = ["template", "params", "system", "messages"];
    FILES.contains(&component) || SETTINGS.contains(&component)
}

/// The facts that are known.
fn known<const N: usize>(facts: [(&str, Option<&str>); N]) -> Map<String, Json> {
    facts.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?.into()))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn media_type(target: Target, stored: &str, format: Option<TensorFormat>) -> Option<&'static str> {
        target.media_type(&MediaType::new(stored), format)
    }

    #[test]
    fn files_have_the_media_types_of_the_form() {
        let gguf = Some(TensorFormat::Gguf);
        for (stored, format, docker, model_pack) in [
            (MediaType::OLLAMA_MODEL, gguf, Some("gguf.v3"), Some("weight.v1.raw")),
            (
                MediaType::PACK_SAFETENSORS,
                Some(TensorFormat::Safetensors),
                Some("safetensors"),
                Some("weight.v1.raw"),
            ),
            (MediaType::PACK_OTHER_WEIGHTS, None, None, Some("weight.v1.raw")),
            (MediaType::OLLAMA_PROJECTOR, gguf, Some("mmproj"), None),
            (MediaType::OLLAMA_ADAPTER, gguf, None, None),
            (MediaType::OLLAMA_DRAFT, gguf, None, None),
            (MediaType::OLLAMA_LICENSE, None, Some("license"), Some("doc.v1.raw")),
            (MediaType::OLLAMA_JSON, None, Some("model.file"), Some("weight.config.v1.raw")),
            (MediaType::PACK_CONFIG, None, Some("model.file"), Some("weight.config.v1.raw")),
            (MediaType::DOCKER_TEMPLATE, None, Some("chat.template.jinja"), Some("weight.config.v1.raw")),
            ("application/vnd.ollama.image.template", None, Some("model.file"), Some("weight.config.v1.raw")),
            ("application/vnd.ollama.image.params", None, Some("model.file"), Some("weight.config.v1.raw")),
            ("application/vnd.ollama.image.tensor", None, None, None),
            ("application/vnd.docker.ai.dir.tar", None, None, None),
            ("application/vnd.cncf.model.doc.v1.tar", None, None, None),
            ("text/plain", None, None, None),
        ] {
            let with = |prefix: &str, kind: Option<&str>| kind.map(|kind| format!("{prefix}{kind}"));
            let found = media_type(Target::Docker, stored, format).map(str::to_owned);
            assert_eq!(found, with("application/vnd.docker.ai.", docker), "{stored}");
            let found = media_type(Target::ModelPack, stored, format).map(str::to_owned);
            assert_eq!(found, with("application/vnd.cncf.model.", model_pack), "{stored}");
        }
    }
}
