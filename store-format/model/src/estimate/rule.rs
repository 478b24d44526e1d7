//! Decides which basis has a rule for a model's memory beyond its weights.
//!
//! Source of the names: `llm_arch_name` of llama.cpp b11434 of October 2026, without those that it cannot run.

use blobd_store_format::gguf::Header;

use super::Basis;
use crate::kind::ModelKind;
use crate::layers::block_number;
use crate::metadata::Metadata;

/// The architectures that llama.cpp runs as a model.
#[rustfmt::skip]
const KNOWN: [&str; 152] = [
    "afmoe", "apertus", "arcee", "arctic", "arwkv7", "baichuan", "bailingmoe", "bailingmoe2", "bailingmoe3",
    "bert", "bitnet", "bloom", "chameleon", "chatglm", "clef", "codeshell", "cogvlm", "cohere2", "cohere2moe",
    "command-r", "dbrx", "deci", "deepseek", "deepseek2", "deepseek2-ocr", "deepseek32", "deepseek4", "dflash",
    "dots1", "dots3note", "dream", "eagle3", "ernie4_5", "ernie4_5-moe", "eurobert", "exaone", "exaone-moe",
    "exaone4", "falcon", "falcon-h1", "gemma", "gemma-embedding", "gemma2", "gemma3", "gemma3n", "gemma4",
    "gemma4-assistant", "glm-dsa", "glm4", "glm4moe", "glm5-next", "gpt-oss", "gpt2", "gptneox", "granite",
    "granite_swa", "granitehybrid", "granitemoe", "graniteswitch", "grok", "grovemoe", "hrm_text",
    "hunyuan-dense", "hunyuan-moe", "hunyuan_vl", "hy_v3", "hy_v4", "internlm2", "jais", "jais2", "jamba",
    "jina-bert-v2", "jina-bert-v3", "kimi-k3", "kimi-linear", "laguna", "lfm2", "lfm2moe", "llada", "llada-moe",
    "llama", "llama-embed", "llama4", "maincoder", "mamba", "mamba2", "maple", "mellum", "mimo2", "minicpm",
    "minicpm3", "minimax-01", "minimax-m2", "minimax-m3", "mistral3", "mistral4", "modern-bert", "mpt",
    "muse-glimmer", "nanbeige", "nemotron", "nemotron_h", "nemotron_h_moe", "neo-bert", "nomic-bert",
    "nomic-bert-moe", "olmo", "olmo2", "olmoe", "openelm", "orion", "paddleocr", "pangu-embedded", "phi2",
    "phi3", "phimoe", "plamo", "plamo2", "plamo3", "plm", "pockettts", "qwen", "qwen2", "qwen2moe", "qwen2vl",
    "qwen3", "qwen35", "qwen35moe", "qwen3moe", "qwen3next", "qwen3tts", "qwen3vl", "qwen3vlmoe", "qwen4exp",
    "refact", "rnd1", "rwkv6", "rwkv6qwen2", "rwkv7", "seed_oss", "smallthinker", "smollm3", "spark2_5",
    "stablelm", "starcoder", "starcoder2", "step35", "t5", "t5encoder", "talkie", "wavtokenizer-dec", "xverse",
];

/// The known architectures with an unusual cache or graph, for example for sparse attention, which the general rules do
/// not cover.
const OWN_RULES: [&str; 21] = [
    "bailingmoe3",
    "chameleon",
    "deepseek32",
    "deepseek4",
    "dflash",
    "dots3note",
    "gemma4-assistant",
    "glm-dsa",
    "glm5-next",
    "graniteswitch",
    "grok",
    "hy_v4",
    "kimi-k3",
    "kimi-linear",
    "minimax-01",
    "minimax-m3",
    "nanbeige",
    "pockettts",
    "qwen3tts",
    "qwen4exp",
    "wavtokenizer-dec",
];

/// The architectures to which the general rules apply, but for which nobody has compared KV cache and graph with what
/// llama.cpp allocates. `docs/ESTIMATES.md` lists them.
pub(super) const NOT_COMPARED: [&str; 16] = [
    "arwkv7",
    "clef",
    "deepseek2-ocr",
    "dots1",
    "eagle3",
    "gemma4",
    "jina-bert-v2",
    "minicpm3",
    "nomic-bert-moe",
    "olmoe",
    "plm",
    "rwkv6",
    "rwkv6qwen2",
    "rwkv7",
    "t5",
    "t5encoder",
];

/// Tensors that engines leave in the machine's memory: they are read row by row, or are tiny.
const INPUT_LAYERS: [&str; 8] = [
    "token_embd",
    "token_embd_norm",
    "token_types",
    "position_embd",
    "per_layer_token_embd",
    "rope_freqs",
    "rope_factors_long",
    "rope_factors_short",
];

/// The rules that apply to a model's memory beyond its weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rule {
    /// Both llama.cpp's rules and Ollama's apply.
    Known { is_compared: bool },
    /// Only Ollama's apply, which have a fallback for any architecture: llama.cpp does not support it, or treats it
    /// differently from all others.
    Ollama,
    /// No rule applies, because the file has no blocks.
    NoBlocks,
    /// No rule applies, because the file does not name its architecture.
    NoArchitecture,
    /// No rule applies, because the file is not a model that runs by itself.
    Kind(ModelKind),
}

impl Rule {
    pub(super) fn read(header: &Header, blocks: usize) -> Self {
        let architecture = Metadata::new(header).architecture();
        let kind = ModelKind::from_header(header);
        let has_tensors = header.tensors().len() > 0;
        match kind {
            ModelKind::Model
            | ModelKind::Embedding
            | ModelKind::Reranker
            | ModelKind::Encoder
            | ModelKind::Draft => {}
            // A first shard without tensors looks like a vocabulary.
            ModelKind::Vocabulary if !has_tensors => {}
            other => return Self::Kind(other),
        }
        if header.architecture().is_none() {
            return Self::NoArchitecture;
        }
        let has_own_rules = OWN_RULES.contains(&architecture);
        match is_known(architecture) && !has_own_rules {
            _ if blocks == 0 => Self::NoBlocks,
            true => Self::Known { is_compared: !NOT_COMPARED.contains(&architecture) },
            false => Self::Ollama,
        }
    }

    pub(super) fn is_ollama(self) -> bool {
        self == Self::Ollama
    }

    /// Whether KV cache and graph were compared with what llama.cpp allocates for the architecture.
    pub(super) fn is_compared(self) -> bool {
        self != Self::Known { is_compared: false }
    }

    /// Why the basis has no rule; `None` if it has one.
    pub(super) fn missing(self, basis: Basis, metadata: Metadata<'_>) -> Option<String> {
        let architecture = metadata.architecture();
        match self {
            Self::Known { .. } => None,
            Self::Ollama if basis == Basis::Ollama => None,
            Self::Kind(kind) if metadata.get::<&str>("general.architecture").is_none() => {
                Some(format!("no rule for the kind `{kind}`"))
            }
            Self::NoArchitecture => Some("the file names no architecture".to_owned()),
            _ if !is_known(architecture) => Some(format!("no rule for `{architecture}`")),
            Self::Kind(kind) => Some(format!("no rule for `{architecture}` of the kind `{kind}`")),
            Self::NoBlocks => Some(format!("`{architecture}.block_count` is missing")),
            Self::Ollama => Some(format!("no rule for the cache and graph of `{architecture}`")),
        }
    }
}

fn is_known(architecture: &str) -> bool {
    KNOWN.binary_search(&architecture).is_ok()
}

/// Whether a layer stays in the machine's memory.
pub(super) fn is_input(layer: &str) -> bool {
    INPUT_LAYERS.contains(&layer)
}

/// The block number of a layer such as `blk.7`, or `enc.blk.7` in an encoder.
pub(super) fn block_of(layer: &str) -> Option<u64> {
    let layer = ["enc.", "dec."].into_iter().find_map(|side| layer.strip_prefix(side)).unwrap_or(layer);
    block_number(&format!("{layer}."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_sorted_and_unique() {
        assert!(KNOWN.is_sorted_by(|a, b| a < b));
        let mut general = KNOWN.iter().filter(|name| !OWN_RULES.contains(name));
        assert!(NOT_COMPARED.iter().all(|name| general.any(|known| known == name)), "in the order of KNOWN");
    }

    #[test]
    fn blocks_of_encoders_and_decoders_have_numbers() {
        assert_eq!(["blk.3", "enc.blk.12", "dec.blk.0"].map(block_of), [Some(3), Some(12), Some(0)]);
        assert_eq!(["v.blk.3", "output", "enc.output_norm", "blk.x"].map(block_of), [None; 4]);
    }
}
