//! The types of a KV cache.

use std::fmt;
use std::str::FromStr;

use super::EstimateError;
use blobd_store_format::gguf::GgmlType;

/// Writes the enum, and what the table says of each type.
macro_rules! cache_types {
    ($($variant:ident $ggml_type:ident $name:literal;)*) => {
        /// The number format of the keys or values in a KV cache.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum CacheType {
            $($variant),*
        }

        impl CacheType {
            /// All types that llama.cpp accepts.
            pub const ALL: [Self; 9] = [$(Self::$variant),*];

            /// The name in llama.cpp's and Ollama's settings, such as `q8_0`.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name),*
                }
            }

            pub const fn ggml_type(self) -> GgmlType {
                match self {
                    $(Self::$variant => GgmlType::$ggml_type),*
                }
            }
        }
    };
}

cache_types! {
    F32 F32 "f32";
    F16 F16 "f16";
    BF16 BF16 "bf16";
    Q8_0 Q8_0 "q8_0";
    Q4_0 Q4_0 "q4_0";
    Q4_1 Q4_1 "q4_1";
    Q5_0 Q5_0 "q5_0";
    Q5_1 Q5_1 "q5_1";
    IQ4NL IQ4_NL "iq4_nl";
}

impl fmt::Display for CacheType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for CacheType {
    type Err = EstimateError;

    fn from_str(text: &str) -> Result<Self, EstimateError> {
        let found = Self::ALL.into_iter().find(|cache_type| cache_type.name().eq_ignore_ascii_case(text));
        found.ok_or_else(|| EstimateError::UnknownCacheType { found: text.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_parsed_back_and_equal_those_of_the_tensor_types() {
        for cache_type in CacheType::ALL {
            assert_eq!(cache_type.name().parse(), Ok(cache_type));
            assert_eq!(cache_type.name().to_uppercase().parse(), Ok(cache_type));
            assert_eq!(cache_type.ggml_type().name().to_lowercase(), cache_type.name());
        }
        let error = CacheType::from_str("q3_k").unwrap_err().to_string();
        assert!(error.contains("q3_k") && error.contains("iq4_nl"), "{error}");
    }
}
