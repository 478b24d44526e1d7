//! The metadata of synthetic models: the keys of real files, with a vocabulary made of syllables.

use blobd_store_format::gguf::{GgufError, GgufWriter};

use super::{EXPERT_COUNT, SyntheticModel};

/// In the form that transformers and llama.cpp share.
pub(super) const LLAMA3_CHAT_TEMPLATE: &str = "{% for message in messages %}\
    {{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}\
    {{ message['content'] | trim + '<|eot_id|>' }}{% endfor %}\
    {% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}";

pub(super) const MIXTRAL_CHAT_TEMPLATE: &str = "{{ bos_token }}{% for message in messages %}\
    {% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}\
    {% else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}";

impl SyntheticModel {
    /// Adds the metadata in the order of llama.cpp's converter.
    pub(super) fn write_metadata(&self, writer: &mut GgufWriter) -> Result<(), GgufError> {
        let sizes = &self.dimensions;
        let is_mixture = self.experts.is_some();
        writer.metadata("general.architecture", "llama")?;
        writer.metadata("general.name", self.name.as_str())?;
        writer.metadata("llama.block_count", sizes.block_count)?;
        writer.metadata("llama.context_length", if is_mixture { 32_768u32 } else { 8192 })?;
        writer.metadata("llama.embedding_length", sizes.embedding_length)?;
        writer.metadata("llama.feed_forward_length", sizes.feed_forward_length)?;
        writer.metadata("llama.attention.head_count", sizes.head_count)?;
        writer.metadata("llama.attention.head_count_kv", sizes.head_count_kv)?;
        writer.metadata("llama.rope.freq_base", if is_mixture { 1_000_000f32 } else { 500_000.0 })?;
        writer.metadata("llama.attention.layer_norm_rms_epsilon", 1e-5f32)?;
        if is_mixture {
            writer.metadata("llama.expert_count", EXPERT_COUNT)?;
            writer.metadata("llama.expert_used_count", 2u32)?;
        }
        writer.metadata("general.file_type", Q4_K_M)?;
        writer.metadata("llama.vocab_size", sizes.vocabulary_length)?;
        writer.metadata("llama.rope.dimension_count", sizes.embedding_length / sizes.head_count.max(1))?;
        self.write_tokenizer(writer)?;
        writer.metadata("tokenizer.chat_template", self.chat_template.as_str())?;
        writer.metadata("general.quantization_version", 2u32)?;
        Ok(())
    }

    fn write_tokenizer(&self, writer: &mut GgufWriter) -> Result<(), GgufError> {
        let count = self.dimensions.vocabulary_length;
        let words = count.saturating_sub(SPECIAL_COUNT);
        let tokens: Vec<String> = (0..words).map(word).chain((0..count - words).map(special)).collect();
        let types = (0..count).map(|token| if token < words { NORMAL } else { CONTROL }).collect::<Vec<_>>();
        let byte_pairs = self.experts.is_none();
        writer.metadata("tokenizer.ggml.model", if byte_pairs { "gpt2" } else { "llama" })?;
        writer.metadata("tokenizer.ggml.pre", if byte_pairs { "llama-bpe" } else { "default" })?;
        writer.metadata("tokenizer.ggml.tokens", tokens)?;
        if byte_pairs {
            let merges: Vec<String> = (FIRST_PAIR..words).map(merge).collect();
            writer.metadata("tokenizer.ggml.merges", merges)?;
        } else {
            let scores: Vec<f32> = (0..count).map(|token| -(token as f32)).collect();
            writer.metadata("tokenizer.ggml.scores", scores)?;
        }
        writer.metadata("tokenizer.ggml.token_type", types)?;
        writer.metadata("tokenizer.ggml.bos_token_id", words)?;
        writer.metadata("tokenizer.ggml.eos_token_id", words + 1)?;
        Ok(())
    }
}

/// The token with this number: its digits in base 32, as syllables.
fn word(token: u32) -> String {
    let mut rest = token;
    let mut text = space(token).to_owned();
    loop {
        text.push_str(syllable(rest));
        rest /= SYLLABLE_COUNT;
        if rest == 0 {
            return text;
        }
    }
}

/// The pair that makes the token with this number: its first syllable and the others.
fn merge(token: u32) -> String {
    let rest = word(token / SYLLABLE_COUNT);
    format!("{}{} {}", space(token), syllable(token), rest.trim_start_matches('Ġ'))
}

/// Every other token starts a word: byte-level BPE writes the space before it as `Ġ`.
fn space(token: u32) -> &'static str {
    if token.is_multiple_of(2) { "Ġ" } else { "" }
}

fn special(index: u32) -> String {
    match index {
        0 => "<|begin_of_text|>".to_owned(),
        1 => "<|end_of_text|>".to_owned(),
        2 => "<|start_header_id|>".to_owned(),
        3 => "<|end_header_id|>".to_owned(),
        4 => "<|eot_id|>".to_owned(),
        reserved => format!("<|reserved_special_token_{}|>", reserved - 5),
    }
}

fn syllable(digit: u32) -> &'static str {
    let index = usize::try_from(digit % SYLLABLE_COUNT).unwrap_or_default();
    SYLLABLES.get(index).copied().unwrap_or_default()
}

const SYLLABLES: [&str; 32] = [
    "a", "be", "ce", "di", "en", "fo", "ga", "hu", "in", "jo", "ka", "le", "mo", "ne", "or", "pi", "qu",
    "re", "st", "ti", "un", "ve", "wa", "xi", "yo", "ze", "al", "ch", "ou", "sh", "th", "ng",
];
const SYLLABLE_COUNT: u32 = 32;
/// The first token of two syllables.
const FIRST_PAIR: u32 = SYLLABLE_COUNT;
/// As many as Llama 3 keeps for control tokens.
const SPECIAL_COUNT: u32 = 256;
/// `general.file_type` of `Q4_K_M`.
const Q4_K_M: u32 = 15;
/// Kinds of token in llama.cpp.
const NORMAL: i32 = 1;
const CONTROL: i32 = 3;
