//! What a model can do, in Ollama's words.
//!
//! Sources: `Model.Capabilities` in `server/images.go`, `thinking/template.go` and `model/parsers` of Ollama 0.34.2
//! (September 2026). blobd differs in two points: only a model that generates text has `completion`, because
//! Ollama takes every file for one; and a reranker has `rerank`, for which Ollama has no word.

mod template;
#[cfg(test)]
mod tests;

use self::template::{ChatTemplate, GoTemplate};
use crate::kind::{ModelKind, SPEECH_DECODER, generates_video, is_speech};
use crate::manifest_config::ManifestConfig;
use crate::metadata::Metadata;
use blobd_store_format::gguf::Header;

/// The parts of a model from which its capabilities are derived.
#[derive(Clone, Copy, Debug, Default)]
pub struct CapabilitySources<'m> {
    /// What the model is.
    pub kind: ModelKind,
    /// The header of its weights; `None` for a model without a GGUF file.
    pub header: Option<&'m Header>,
    /// The headers of its projectors, without unreadable ones.
    pub projectors: &'m [&'m Header],
    /// Whether it has a projector, even one with an unreadable header.
    pub has_projector: bool,
    /// The template layer of its manifest, in the syntax of Go.
    pub template: Option<&'m str>,
    /// The configuration of its manifest.
    pub config: Option<&'m ManifestConfig>,
}

/// Ollama's parsers, and whether each finds tool calls and thoughts. Parsers that are not listed find neither.
const PARSERS: [(&str, bool, bool); 27] = [
    ("cogito", true, true),
    ("cohere", true, true),
    ("deepseek3", true, true),
    ("functiongemma", true, false),
    ("gemma4", true, true),
    ("gemma4-no-thinking", true, false),
    ("glimmer", true, true),
    ("glm-4.7", true, true),
    ("glm-ocr", true, false),
    ("harmony", true, true),
    ("laguna", true, true),
    ("lfm2", true, false),
    ("lfm2-thinking", true, true),
    ("ministral", true, false),
    ("nemotron-3-nano", true, true),
    ("nemotron-3.5-nano", true, true),
    ("olmo3", true, false),
    ("olmo3-think", false, true),
    ("ornith", true, true),
    ("poolside-v1", true, true),
    ("qwen3", true, false),
    ("qwen3-coder", true, false),
    ("qwen3-thinking", true, true),
    ("qwen3-vl-instruct", true, false),
    ("qwen3-vl-thinking", true, true),
    ("qwen3.5", true, true),
    ("passthrough", false, false),
];

/// Omni models whose audio Ollama cannot use yet.
const WITHOUT_AUDIO: [&str; 1] = ["nemotron_h_omni"];
/// Projectors whose audio part Ollama cannot use yet.
const PROJECTORS_WITHOUT_AUDIO: [&str; 1] = ["gemma3nv"];

/// The capabilities of a model: first those that its configuration lists, then those derived from its files.
pub fn capabilities(model: &CapabilitySources<'_>) -> Vec<String> {
    let mut found = Capabilities::default();
    for name in model.config.iter().flat_map(|config| &config.capabilities) {
        found.add(name);
    }
    model.add_of_kind(&mut found);
    if model.kind == ModelKind::Model {
        model.add_of_text(&mut found);
    }
    model.add_of_senses(&mut found);
    found.0
}

impl CapabilitySources<'_> {
    fn metadata(&self) -> Option<Metadata<'_>> {
        self.header.map(Metadata::new)
    }

    fn architecture(&self) -> &str {
        self.metadata().map_or("", |metadata| metadata.architecture())
    }

    fn family(&self) -> &str {
        let configured = self.config.and_then(|config| config.model_family.as_deref());
        configured.unwrap_or_else(|| self.architecture())
    }

    fn add_of_kind(&self, found: &mut Capabilities) {
        match self.kind {
            ModelKind::Model if self.completes() => found.add("completion"),
            ModelKind::Model if is_speech(self.architecture()) => found.add("audio"),
            ModelKind::Embedding | ModelKind::Encoder => found.add("embedding"),
            ModelKind::Reranker => found.add("rerank"),
            ModelKind::Diffusion if generates_video(self.architecture()) => found.add("video"),
            ModelKind::Diffusion => found.add("image"),
            _ => {}
        }
    }

    /// Whether the weights can continue a text. For that, a file of unknown kind must have tokens, embeddings or
    /// blocks.
    fn completes(&self) -> bool {
        let Some((header, metadata)) = self.header.zip(self.metadata()) else { return false };
        let has_embeddings = || header.tensors().any(|tensor| tensor.name() == "token_embd.weight");
        let is_language_model = header.tensors().len() == 0
            || metadata.value("block_count").is_some()
            || metadata.value("tokenizer.ggml.model").is_some()
            || has_embeddings();
        let architecture = metadata.architecture();
        is_language_model && !is_speech(architecture) && architecture != SPEECH_DECODER
    }

    /// Adds tools, insert and thinking, derived from the template that Ollama uses and from the parser.
    fn add_of_text(&self, found: &mut Capabilities) {
        let chat = self.metadata().and_then(|metadata| metadata.chat_template()).unwrap_or_default();
        let (chat, go) = (ChatTemplate(chat), self.template.map(GoTemplate::new));
        let named = |text: fn(&ManifestConfig) -> Option<&String>| self.config.and_then(text);
        let parser = named(|config| config.parser.as_ref());
        let is_harmony = self.is_gpt_oss() && go.as_ref().is_some_and(GoTemplate::is_harmony);
        let is_rendered =
            parser.is_some() || named(|config| config.renderer.as_ref()).is_some() || is_harmony;
        match &go {
            Some(go) if is_rendered || !chat.is_preferred_to(go) => found.add_all(go.capabilities()),
            _ if is_rendered => {}
            _ => found.add_all(chat.capabilities()),
        }
        let parser = PARSERS.iter().find(|(name, ..)| parser.is_some_and(|parser| parser == name));
        if let Some((_, tools, thinking)) = parser {
            found.add_all([("tools", *tools), ("thinking", *thinking)]);
        }
        if self.is_gpt_oss() {
            found.add("thinking");
        }
    }

    fn is_gpt_oss(&self) -> bool {
        [self.family(), self.architecture()].iter().any(|name| matches!(*name, "gptoss" | "gpt-oss"))
    }

    /// Adds vision and audio, derived from towers in the weights and from projectors.
    fn add_of_senses(&self, found: &mut Capabilities) {
        if let Some(metadata) = self.metadata() {
            let has = |key| metadata.value(key).is_some();
            let is_projector = self.kind == ModelKind::Projector;
            let (vision, audio) = if is_projector { senses_of_projector(&metadata) } else { (false, false) };
            found.add_all([
                ("vision", vision || has("vision.block_count") && !is_projector),
                ("audio", audio || has("audio.block_count") && !is_projector),
            ]);
        }
        for projector in self.projectors {
            let (vision, audio) = senses_of_projector(&Metadata::new(projector));
            found.add_all([("vision", vision), ("audio", audio)]);
        }
        found.add_all([("vision", self.has_projector && self.projectors.is_empty())]);
        let is_safetensors =
            self.config.is_some_and(|config| config.model_format.as_deref() == Some("safetensors"));
        let without_audio = |name: &str| WITHOUT_AUDIO.contains(&name);
        if without_audio(self.family()) || without_audio(self.architecture()) {
            found.remove("audio");
            if is_safetensors {
                found.remove("vision");
            }
        }
    }
}

/// Whether a projector encodes images, and whether it encodes audio. A projector that declares neither encodes images.
fn senses_of_projector(metadata: &Metadata<'_>) -> (bool, bool) {
    let vision = metadata.get::<bool>("has_vision_encoder");
    let audio = metadata.get::<bool>("has_audio_encoder").unwrap_or(false);
    let projector = metadata.get::<&str>("vision.projector_type").unwrap_or_default();
    (vision.unwrap_or(!audio), audio && !PROJECTORS_WITHOUT_AUDIO.contains(&projector))
}

/// Names without repetition, in the order in which they are found.
#[derive(Debug, Default)]
struct Capabilities(Vec<String>);

impl Capabilities {
    fn add(&mut self, name: &str) {
        if !self.0.iter().any(|known| known == name) {
            self.0.push(name.to_owned());
        }
    }

    fn add_all<'n>(&mut self, names: impl IntoIterator<Item = (&'n str, bool)>) {
        names.into_iter().filter(|(_, is_there)| *is_there).for_each(|(name, _)| self.add(name));
    }

    fn remove(&mut self, name: &str) {
        self.0.retain(|known| known != name);
    }
}
