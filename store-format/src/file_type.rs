//! The names of llama.cpp's file types (`general.file_type`).
//!
//! Source: `enum llama_ftype` in llama.cpp's `include/llama.h`. (`enum ggml_ftype` in `ggml.h`
//! has other numbers, which files do not use.)

/// The bit that says the type was guessed by the converter.
const GUESSED: u32 = 1024;

/// The name of a file type, such as `Q4_K_M` for 15; `None` for one that is removed or unknown.
#[must_use]
pub fn file_type_name(id: u32) -> Option<&'static str> {
    NAMES.iter().find(|(known, _)| *known == id & !GUESSED).map(|(_, name)| *name)
}

/// Whether a text is the name of a file type, in upper or lower case.
#[must_use]
pub fn is_file_type_name(text: &str) -> bool {
    NAMES.iter().any(|(_, name)| name.eq_ignore_ascii_case(text))
}

/// `Llama-3.2-1B-Instruct` and `Q4_K_M` of `Llama-3.2-1B-Instruct-Q4_K_M`; nothing for a name that does
/// not end in a file type.
#[must_use]
pub fn split_file_type(stem: &str) -> Option<(&str, &str)> {
    stem.rsplit_once(['-', '.']).filter(|(_, file_type)| is_file_type_name(file_type))
}

const NAMES: [(u32, &str); 36] = [
    (0, "F32"),
    (1, "F16"),
    (2, "Q4_0"),
    (3, "Q4_1"),
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
        assert_eq!(file_type_name(15), Some("Q4_K_M"));
        assert_eq!(file_type_name(1024 | 1), Some("F16"));
        assert_eq!(file_type_name(4), None);
        assert_eq!(file_type_name(u32::MAX), None);
        assert!(is_file_type_name("q4_k_m"));
        assert!(!is_file_type_name("8b"));
    }
}
