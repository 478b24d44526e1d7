//! The kind of a model file: language model, embedding model, adapter, projector, ….
//!
//! All commands use this one rule. The kind is determined, in this order, by `general.type`, the architecture, the
//! names of the tensors, and the pooling type. In a model of several files, the media type of the layer comes first,
//! because it says how the file is used.
//!
//! ```
//! use blobd_store_format::gguf::{GgufWriter, Header};
//! use blobd_model::kind::ModelKind;
//!
//! let mut writer = GgufWriter::new();
//! writer.metadata("general.architecture", "bert")?;
//! writer.metadata("bert.pooling_type", 1_u32)?;
//! assert_eq!(ModelKind::from_header(&Header::parse(&writer.header()?)?), ModelKind::Embedding);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Sources: `GGUFType` and `PoolingType` of gguf-py 0.19; `tools/imatrix`, `tools/cvector-generator` and
//! `convert_lora_to_gguf.py` of llama.cpp (October 2026); the lists of architectures in ComfyUI-GGUF's
//! `loader.py` (January 2026).

#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::layers::block_number;
use crate::metadata::Metadata;
use blobd_store_format::descriptor::MediaType;
use blobd_store_format::gguf::{Header, ValueType};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ModelKind {
    /// A model that generates text or speech, or that no other kind describes.
    #[default]
    Model,
    /// A model whose output is one embedding per text.
    Embedding,
    /// A model that rates how well a text answers a query.
    Reranker,
    /// A model whose output is one embedding per token, such as T5's encoder.
    Encoder,
    /// A model that generates images or video.
    Diffusion,
    /// A vocabulary without weights.
    Vocabulary,
    /// A low-rank adapter (LoRA) of another model.
    Adapter,
    /// Directions that are added to the activations of another model.
    ControlVector,
    /// Statistics of activations, for quantisation.
    Imatrix,
    /// An encoder of images or audio for another model.
    Projector,
    /// A model that predicts the tokens of another one, for speculative decoding.
    Draft,
}

/// Every kind with its name in output, filters and JSON.
const NAMES: [(ModelKind, &str); 11] = [
    (ModelKind::Model, "model"),
    (ModelKind::Embedding, "embedding"),
    (ModelKind::Reranker, "reranker"),
    (ModelKind::Encoder, "encoder"),
    (ModelKind::Diffusion, "diffusion"),
    (ModelKind::Vocabulary, "vocabulary"),
    (ModelKind::Adapter, "adapter"),
    (ModelKind::ControlVector, "control-vector"),
    (ModelKind::Imatrix, "imatrix"),
    (ModelKind::Projector, "projector"),
    (ModelKind::Draft, "draft"),
];

/// The values of `general.type` that are more specific than `model`.
const TYPES: [(&str, ModelKind); 10] = [
    ("adapter", ModelKind::Adapter),
    ("lora", ModelKind::Adapter),
    ("imatrix", ModelKind::Imatrix),
    ("mmproj", ModelKind::Projector),
    ("projector", ModelKind::Projector),
    ("clip-vision", ModelKind::Encoder),
    ("vocab", ModelKind::Vocabulary),
    ("vocabulary", ModelKind::Vocabulary),
    ("controlvector", ModelKind::ControlVector),
    ("draft", ModelKind::Draft),
];

const CONTROL_VECTOR_ARCHITECTURE: &str = "controlvector";
const PROJECTOR_ARCHITECTURE: &str = "clip";
/// Heads for speculative decoding. They use embeddings or hidden states of their model.
const DRAFT_ARCHITECTURES: [&str; 5] = ["eagle", "eagle3", "dflash", "dspark", "medusa"];
/// Speech recognition: an encoder of audio and a decoder of text in one file.
const SPEECH_ARCHITECTURES: [&str; 2] = ["whisper", "parakeet"];
/// Encoders whose architecture does not contain `bert`.
const ENCODER_ARCHITECTURES: [&str; 3] = ["t5encoder", "gemma-embedding", "llama-embed"];
/// Turns tokens of a language model into spectra of speech. Its pooling type says nothing about its use.
pub(crate) const SPEECH_DECODER: &str = "wavtokenizer-dec";

/// The denoising networks of image and video generators, by architecture, and whether they generate video.
const DIFFUSION_ARCHITECTURES: [(&str, bool); 26] = [
    ("flux", false),
    ("flux2", false),
    ("chroma", false),
    ("sd1", false),
    ("sd2", false),
    ("sdxl", false),
    ("sd3", false),
    ("aura", false),
    ("hidream", false),
    ("ideogram4", false),
    ("lumina2", false),
    ("omnigen2", false),
    ("pixart", false),
    ("qwen_image", false),
    ("qwen_image21", false),
    ("z_image", false),
    ("pig", false),
    ("cosmos", true),
    ("hunyuan_video", true),
    ("hyvid", true),
    ("hyvideo", true),
    ("ltx2", true),
    ("ltxv", true),
    ("mochi", true),
    ("motif_video", true),
    ("wan", true),
];
/// Prefixes of tensor names in denoising networks, for files without an architecture. Language models in GGUF use other
/// names.
const DIFFUSION_PREFIXES: [&str; 9] = [
    "model.diffusion_model.",
    "diffusion_model.",
    "first_stage_model.",
    "double_blocks.",
    "single_blocks.",
    "joint_blocks.",
    "input_blocks.",
    "transformer_blocks.",
    "single_transformer_blocks.",
];
/// Prefixes of tensor names in projectors: vision, audio, and the layers that follow them.
const PROJECTOR_PREFIXES: [&str; 5] = ["v.", "a.", "mm.", "resampler.", "model.image_newline"];

impl ModelKind {
    pub fn all() -> impl Iterator<Item = Self> {
        NAMES.into_iter().map(|(kind, _)| kind)
    }

    /// The kind of a GGUF file, by its header.
    pub fn from_header(header: &Header) -> Self {
        let metadata = Metadata::new(header);
        let declared = TYPES.into_iter().find(|(name, _)| name.eq_ignore_ascii_case(metadata.kind()));
        declared
            .map(|(_, kind)| kind)
            .or_else(|| by_architecture(metadata.architecture()))
            .or_else(|| by_content(header, &metadata))
            .unwrap_or_else(|| by_pooling(header, &metadata))
    }

    /// The kind of a model's file with this component (see [`MediaType::component`]); `header` is its header, if
    /// it has one that can be read.
    pub fn for_layer(component: &str, header: Option<&Header>) -> Self {
        Self::used_as(component).or_else(|| header.map(Self::from_header)).unwrap_or_default()
    }

    /// The kind that a component implies; `None` if it depends on the header, as for `model`.
    pub fn used_as(component: &str) -> Option<Self> {
        let told = [Self::Adapter, Self::Projector, Self::Draft];
        told.into_iter().find(|kind| kind.name() == component)
    }

    /// The name in output, filters and JSON.
    pub fn name(self) -> &'static str {
        NAMES.into_iter().find(|(kind, _)| *kind == self).map_or("model", |(_, name)| name)
    }

    /// The media type of a layer of this kind. Ollama has one media type for each use of a file; a vocabulary, for
    /// example, is used as a model.
    pub const fn media_type(self) -> &'static str {
        match self {
            Self::Adapter => MediaType::OLLAMA_ADAPTER,
            Self::Projector => MediaType::OLLAMA_PROJECTOR,
            Self::Draft => MediaType::OLLAMA_DRAFT,
            _ => MediaType::OLLAMA_MODEL,
        }
    }

    /// Reads the optional kind in a record or response. A kind that only a later version knows counts as missing.
    pub fn deserialize_known<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Self>, D::Error> {
        let name = Option::<Cow<'de, str>>::deserialize(deserializer)?;
        Ok(name.and_then(|name| name.parse().ok()))
    }
}

impl fmt::Display for ModelKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("kind: wrong value: expected {}, found {found:?}", names())]
pub struct UnknownKind {
    found: String,
}

fn names() -> String {
    NAMES.map(|(_, name)| name).join(", ")
}

impl FromStr for ModelKind {
    type Err = UnknownKind;

    fn from_str(text: &str) -> Result<Self, UnknownKind> {
        let found = NAMES.into_iter().find(|(_, name)| *name == text);
        found.map(|(kind, _)| kind).ok_or_else(|| UnknownKind { found: text.to_owned() })
    }
}

impl Serialize for ModelKind {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl<'de> Deserialize<'de> for ModelKind {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Cow::<'de, str>::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// Whether an architecture recognises speech.
pub fn is_speech(architecture: &str) -> bool {
    SPEECH_ARCHITECTURES.contains(&architecture)
}

/// Whether a diffusion model of this architecture generates video instead of images.
pub fn generates_video(architecture: &str) -> bool {
    DIFFUSION_ARCHITECTURES.contains(&(architecture, true))
}

fn by_architecture(architecture: &str) -> Option<ModelKind> {
    let is_assistant = ["-assistant", "_assistant"].iter().any(|end| architecture.ends_with(end));
    match architecture {
        CONTROL_VECTOR_ARCHITECTURE => Some(ModelKind::ControlVector),
        PROJECTOR_ARCHITECTURE => Some(ModelKind::Projector),
        SPEECH_DECODER => Some(ModelKind::Model),
        draft if is_assistant || DRAFT_ARCHITECTURES.contains(&draft) => Some(ModelKind::Draft),
        other => {
            let is_diffusion = DIFFUSION_ARCHITECTURES.iter().any(|(name, _)| *name == other);
            is_diffusion.then_some(ModelKind::Diffusion)
        }
    }
}

/// Determines the kind from the tensors, for files whose metadata does not determine it.
fn by_content(header: &Header, metadata: &Metadata<'_>) -> Option<ModelKind> {
    let names = || header.tensors().map(|tensor| tensor.name());
    if header.tensors().len() == 0 {
        return is_vocabulary(header, metadata).then_some(ModelKind::Vocabulary);
    }
    let starts = |name: &str, prefixes: &[&str]| prefixes.iter().any(|prefix| name.starts_with(prefix));
    let has_text = names().any(|name| name.starts_with("token_embd.") || name.starts_with("blk."));
    if names().any(|name| name.ends_with(".lora_a") || name.ends_with(".lora_b")) {
        Some(ModelKind::Adapter)
    } else if names().all(|name| name.ends_with(".in_sum2") || name.ends_with(".counts")) {
        Some(ModelKind::Imatrix)
    } else if names().all(|name| name.starts_with("direction.")) {
        Some(ModelKind::ControlVector)
    } else if !has_text && names().all(|name| starts(name, &PROJECTOR_PREFIXES)) {
        Some(ModelKind::Projector)
    } else if !has_text && names().any(|name| starts(name, &DIFFUSION_PREFIXES)) {
        Some(ModelKind::Diffusion)
    } else {
        has_only_prediction_blocks(header, metadata).then_some(ModelKind::Draft)
    }
}

/// Whether a file without tensors is a vocabulary: it has tokens and is not a shard, because the first shard of a model
/// may have no tensors either.
fn is_vocabulary(header: &Header, metadata: &Metadata<'_>) -> bool {
    let is_shard =
        header.value("split.count").and_then(|count| count.as_u64()).is_some_and(|count| count > 1);
    !is_shard && metadata.vocabulary_size().is_some_and(|size| size > 0)
}

/// Whether the file contains only blocks for multi-token prediction. llama.cpp's `mtp-` files have the architecture and
/// metadata of their model, but only its last `nextn_predict_layers` blocks.
fn has_only_prediction_blocks(header: &Header, metadata: &Metadata<'_>) -> bool {
    let predicting = metadata.get::<u32>("nextn_predict_layers").unwrap_or(0);
    let first = metadata.block_count().saturating_sub(predicting.into());
    let mut blocks = header.tensors().filter_map(|tensor| block_number(tensor.name())).peekable();
    predicting > 0 && first > 0 && blocks.peek().is_some() && blocks.all(|block| block >= first)
}

/// The kind of a language model. The pooling types are those of llama.cpp: 0 none, 4 rank.
fn by_pooling(header: &Header, metadata: &Metadata<'_>) -> ModelKind {
    const NONE: u64 = 0;
    const RANK: u64 = 4;
    let architecture = metadata.architecture();
    let is_encoder = is_encoder(architecture);
    let pooling = metadata.value("pooling_type");
    // Like Ollama, treats a pooling type that is not an integer as that of an embedding model.
    match pooling.map(|value| value.as_u64()) {
        Some(Some(RANK)) => ModelKind::Reranker,
        _ if is_encoder && has_classifier(header, metadata) => ModelKind::Reranker,
        Some(Some(NONE)) | None if is_encoder => ModelKind::Encoder,
        Some(_) => ModelKind::Embedding,
        None => ModelKind::Model,
    }
}

fn is_encoder(architecture: &str) -> bool {
    architecture.contains("bert") || ENCODER_ARCHITECTURES.contains(&architecture)
}

fn has_classifier(header: &Header, metadata: &Metadata<'_>) -> bool {
    let labels = metadata.value("classifier.output_labels").and_then(|value| value.as_array());
    labels.is_some_and(|labels| labels.element_type() == ValueType::String && !labels.is_empty())
        || header.tensors().any(|tensor| tensor.name().starts_with("cls.output."))
}
