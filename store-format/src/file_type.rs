//! What a model file's name says: its file type (`general.file_type`) as llama.cpp names it, and its number among shards.
//!
//! Source: `enum llama_ftype` in llama.cpp's `include/llama.h`. (`enum ggml_ftype` in `ggml.h`
//! has other numbers, which files do not use.)

use crate::file_format::FileFormat;

/// The bit that says that the type was guessed from the tensors.
const GUESSED: u32 = 1024;

/// The name of a file type, such as `Q4_K_M` for 15; `None` for one that is removed or unknown.
///
/// A guessed type (1024 is added to its number) has the name of the type; 1024 alone says that nothing is
/// known. The meaning of 4 depends on the architecture: in Ollama's files of gpt-oss of August 2025 it is
/// MXFP4, in all others `Q4_1_SOME_F16`.
pub fn file_type_name(id: u32, architecture: Option<&str>) -> Option<&'static str> {
    if id == GUESSED {
        return None;
    }
    let id = id & !GUESSED;
    if id == 4 && matches!(architecture, Some("gptoss" | "gpt-oss")) {
        return Some("MXFP4");
    }
    NAMES.iter().find(|(known, _)| *known == id).map(|(_, name)| *name)
}

/// `Llama-3.2-1B-Instruct` and `Q4_K_M` of `Llama-3.2-1B-Instruct-Q4_K_M`; nothing for a name that does
/// not end in a quantisation.
///
/// A quantisation is a file type, or one of the mixes that publishers name themselves (`Q4_K_XL`), in upper
/// or lower case. `UD-` in front of it is part of it: Unsloth's repositories have both `IQ2_M` and
/// `UD-IQ2_M`.
pub fn split_file_type(stem: &str) -> Option<(&str, &str)> {
    let (model, file_type) = stem.rsplit_once(SEPARATORS)?;
    if !is_quantization(file_type) {
        return None;
    }
    match model.rsplit_once(SEPARATORS) {
        Some((model, prefix)) if prefix.eq_ignore_ascii_case("UD") => {
            stem.get(model.len() + 1..).map(|quantization| (model, quantization))
        }
        _ => Some((model, file_type)),
    }
}

/// The name of one shard: `STEM-00002-of-00003.gguf`, or, as diffusers once named those of a variant,
/// `STEM-00002-of-00003.fp16.safetensors`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShardName<'n> {
    set: ShardSetName<'n>,
    number: usize,
    /// The extension as it is written, with the dot.
    extension: &'n str,
}

/// What the names of all shards of a model have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ShardSetName<'n> {
    stem: &'n str,
    /// With the dot; empty without a variant.
    variant: &'n str,
    format: &'static str,
    count: usize,
}

impl<'n> ShardName<'n> {
    /// The most shards of a model; a server is asked for each.
    pub const MAX_COUNT: usize = 512;

    /// Parses the path of a shard; `None` for another file.
    pub fn from_path(path: &'n str) -> Option<Self> {
        let (whole_stem, format) = FileFormat::split_name(path)?;
        let (rest, end) = whole_stem.rsplit_once("-of-")?;
        let (stem, number) = rest.rsplit_once('-')?;
        let (count, variant) = end.split_at(end.find('.').unwrap_or(end.len()));
        let read = |digits: &str| {
            let is_number = digits.len() == 5 && digits.bytes().all(|digit| digit.is_ascii_digit());
            is_number.then(|| digits.parse::<usize>().ok()).flatten()
        };
        let (number, count) = (read(number)?, read(count)?);
        let is_one = (1..=count).contains(&number) && count <= Self::MAX_COUNT;
        let has_variant = !format.tensor_format().is_gguf() && is_variant(variant);
        let set = ShardSetName { stem, variant, format: format.name(), count };
        let extension = path.get(whole_stem.len()..)?;
        (is_one && (variant.is_empty() || has_variant)).then_some(Self { set, number, extension })
    }

    /// The number of the shard, from 1.
    pub const fn number(&self) -> usize {
        self.number
    }

    pub const fn count(&self) -> usize {
        self.set.count
    }

    pub const fn set(&self) -> ShardSetName<'n> {
        self.set
    }

    /// The paths of all shards of this model, in order.
    pub fn all(&self) -> Vec<String> {
        let Self { set: ShardSetName { stem, variant, count, .. }, extension, .. } = self;
        (1..=*count).map(|number| format!("{stem}-{number:05}-of-{count:05}{variant}{extension}")).collect()
    }

    /// A file name without extension and shard number.
    pub fn stem_of(name: &str) -> &str {
        match ShardName::from_path(name) {
            Some(shard) => shard.set.stem,
            None => FileFormat::split_name(name).map_or(name, |(stem, _format)| stem),
        }
    }
}

impl ShardSetName<'_> {
    /// As text, without the number of the shards.
    pub fn text(&self) -> String {
        [self.stem, self.variant].concat()
    }
}

/// Whether a text is the name of a variant, such as `.fp16` or `.non_ema`.
fn is_variant(text: &str) -> bool {
    let is_letter = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-';
    text.strip_prefix('.').is_some_and(|name| !name.is_empty() && name.bytes().all(is_letter))
}

const SEPARATORS: [char; 2] = ['-', '.'];

fn is_quantization(text: &str) -> bool {
    let names = NAMES.iter().map(|(_, name)| name).chain(&OTHER_NAMES);
    names.into_iter().any(|name| name.eq_ignore_ascii_case(text))
}

/// The bits per weight of a quantisation, from its name; `None` for a text that is not the name of one.
///
/// Unlike [`split_file_type`], this knows a quantisation by its form: forks of llama.cpp and publishers name new ones
/// (`IQ4_KSS`, `Q6_K_P`, `TQ1_0`, `MXFP4_MOE`).
pub fn quantization_bits(text: &str) -> Option<u32> {
    let text = text.to_ascii_uppercase();
    let families = ["IQ", "TQ", "Q", "MXFP", "NVFP", "BF", "FP", "F"];
    let rest = families.iter().find_map(|family| text.strip_prefix(family))?;
    let length = rest.bytes().take_while(u8::is_ascii_digit).count();
    let (bits, mix) = rest.split_at_checked(length)?;
    let bits = bits.parse().ok().filter(|bits| (1..=64).contains(bits))?;
    let parts = || mix.split('_').skip(1);
    let is_word =
        |part: &str| (1..=4).contains(&part.len()) && part.bytes().all(|byte| byte.is_ascii_alphanumeric());
    let is_mix = mix.starts_with('_') && parts().all(is_word);
    // Not `Q33` or `F1`, which mean something else.
    let is_usual = if text.contains('F') { [4, 6, 8, 16, 32, 64].contains(&bits) } else { bits < 10 };
    (is_usual && (is_mix || mix.is_empty())).then_some(bits)
}

/// Quantisations in names of files that have no file type of their own: `llama-quantize`'s short forms,
/// mixes with larger embeddings (`_L`, `_XL`), layouts for ARM that llama.cpp removed, other spellings.
const OTHER_NAMES: [&str; 25] = [
    "Q3_K", "Q4_K", "Q5_K", "Q8_K", "Q2_K_L", "Q2_K_XL", "Q3_K_XL", "Q4_K_L", "Q4_K_XL", "Q5_K_L", "Q5_K_XL",
    "Q6_K_L", "Q6_K_XL", "Q8_K_XL", "Q4_0_4_4", "Q4_0_4_8", "Q4_0_8_8", "MXFP4", "MXFP6", "MXFP8", "FP4",
    "FP8", "FP16", "FP32", "F64",
];

const NAMES: [(u32, &str); 37] = [
    (0, "F32"),
    (1, "F16"),
    (2, "Q4_0"),
    (3, "Q4_1"),
    // Removed from llama.cpp, but the number is in files.
    (4, "Q4_1_SOME_F16"),
    (7, "Q8_0"),
    (8, "Q5_0"),
    (9, "Q5_1"),
    (10, "Q2_K"),
    (11, "Q3_K_S"),
    (12, "Q3_K_M"),
    (13, "Q3_K_L"),
    (14, "Q4_K_S"),
    (15, "Q4_K_M"),
    (16, "Q5_K_S"),
    (17, "Q5_K_M"),
    (18, "Q6_K"),
    (19, "IQ2_XXS"),
    (20, "IQ2_XS"),
    (21, "Q2_K_S"),
    (22, "IQ3_XS"),
    (23, "IQ3_XXS"),
    (24, "IQ1_S"),
    (25, "IQ4_NL"),
    (26, "IQ3_S"),
    (27, "IQ3_M"),
    (28, "IQ2_S"),
    (29, "IQ2_M"),
    (30, "IQ4_XS"),
    (31, "IQ1_M"),
    (32, "BF16"),
    (36, "TQ1_0"),
    (37, "TQ2_0"),
    (38, "MXFP4_MOE"),
    (39, "NVFP4"),
    (40, "Q1_0"),
    (41, "Q2_0"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_types_have_their_names() {
        let name = |id| file_type_name(id, Some("llama"));
        assert_eq!((name(0), name(15), name(41)), (Some("F32"), Some("Q4_K_M"), Some("Q2_0")));
        assert_eq!((name(5), name(42), name(u32::MAX)), (None, None, None));
    }

    #[test]
    fn guessed_type_has_its_name_and_a_guess_alone_has_none() {
        assert_eq!(file_type_name(1024 | 1, None), Some("F16"));
        assert_eq!(file_type_name(1024, None), None);
    }

    #[test]
    fn meaning_of_4_depends_on_the_architecture() {
        for (architecture, name) in [
            (Some("gptoss"), "MXFP4"),
            (Some("gpt-oss"), "MXFP4"),
            (Some("llama"), "Q4_1_SOME_F16"),
            (None, "Q4_1_SOME_F16"),
        ] {
            assert_eq!(file_type_name(4, architecture), Some(name), "{architecture:?}");
        }
    }

    #[test]
    fn quantization_is_split_from_the_name() {
        for (stem, model, quantization) in [
            ("Llama-3.2-1B-Instruct-Q4_K_M", "Llama-3.2-1B-Instruct", "Q4_K_M"),
            ("Meta-Llama-3-8B.Q8_0", "Meta-Llama-3-8B", "Q8_0"),
            ("tiny-f16", "tiny", "f16"),
            ("gpt-oss-20b-MXFP4", "gpt-oss-20b", "MXFP4"),
            ("gpt-oss-20b-mxfp4_moe", "gpt-oss-20b", "mxfp4_moe"),
            ("mlx-mxfp8", "mlx", "mxfp8"),
            ("m-Q4_K", "m", "Q4_K"),
            ("m-q8_K_xl", "m", "q8_K_xl"),
            ("Qwen3-8B-UD-Q4_K_XL", "Qwen3-8B", "UD-Q4_K_XL"),
            ("Qwen3-8B.ud-IQ2_M", "Qwen3-8B", "ud-IQ2_M"),
            ("Qwen3-8B.UD.TQ1_0", "Qwen3-8B", "UD.TQ1_0"),
            // There is no name in front of `UD`.
            ("UD-Q4_K_XL", "UD", "Q4_K_XL"),
            ("m-CLOUD-Q4_0", "m-CLOUD", "Q4_0"),
        ] {
            assert_eq!(split_file_type(stem), Some((model, quantization)), "{stem}");
        }
    }

    #[test]
    fn bits_of_quantizations_are_known_by_their_form() {
        for (text, bits) in [
            ("Q4_K_M", 4),
            ("q8_0", 8),
            ("IQ1_S", 1),
            ("IQ4_KSS", 4),
            ("Q4_0_4_4", 4),
            ("Q8_0_L", 8),
            ("TQ2_0", 2),
            ("bf16", 16),
            ("FP8", 8),
            ("MXFP4_MOE", 4),
            ("NVFP4", 4),
            // Microsoft's names.
            ("q4", 4),
        ] {
            assert_eq!(quantization_bits(text), Some(bits), "{text}");
        }
        for text in [
            "",
            "Q",
            "Q10",
            "F1",
            "K_M",
            "0",
            "8b",
            "Qwen3",
            "Q4_",
            "F99",
            "Q4_K-M",
            "Compact",
            "Q99999999999_0",
        ] {
            assert_eq!(quantization_bits(text), None, "{text}");
        }
    }

    #[test]
    fn names_that_end_in_something_else_are_not_split() {
        for stem in ["", "Q4_K_M", "llama-8b", "m-Q4_K_M-v2", "m-Q4", "m-UD", "m_Q4_K_M", "m-Q4_K_M "] {
            assert_eq!(split_file_type(stem), None, "{stem}");
        }
    }
}
