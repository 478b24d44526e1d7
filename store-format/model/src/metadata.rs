//! Typed access to the metadata of a GGUF header, as Ollama and llama.cpp read it.
//!
//! Most keys of a model start with its architecture: `llama.block_count`. [`Metadata`] takes them without it. A value
//! of another type than the requested one, even of another integer width, counts as missing. Every accessor returns an
//! `Option`, so the caller chooses the default: `get("x").unwrap_or(1)`.
//!
//! ```
//! use blobd_store_format::gguf::{GgufWriter, Header};
//! use blobd_model::metadata::Metadata;
//!
//! let mut writer = GgufWriter::new();
//! writer.metadata("general.architecture", "llama")?;
//! writer.metadata("llama.block_count", 32_u32)?;
//! writer.metadata("llama.embedding_length", 4096_u32)?;
//! writer.metadata("llama.attention.head_count", vec![32_u32, 16])?;
//! let header = Header::parse(&writer.header()?)?;
//! let metadata = Metadata::new(&header);
//! assert_eq!(metadata.get::<u32>("block_count"), Some(32));
//! assert_eq!(metadata.get::<u64>("block_count"), None);
//! assert_eq!(metadata.array::<u32>("attention.head_count").map(Vec::from_iter), Some(vec![32, 16]));
//! assert_eq!((metadata.head_count_max(), metadata.head_count_min()), (32, 16));
//! assert_eq!(metadata.head_size_max(), 4096 / 16);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Source: `KV` in Ollama's `fs/ggml/ggml.go`, of August 2025 and of 0.33.0 (25 August 2026), which added numbers per
//! block and those of state-space models.

mod named;
mod ollama;
#[cfg(test)]
mod tests;

use std::borrow::Cow;

pub use self::ollama::{OllamaRules, is_quantized_kv_cache_type};

use blobd_store_format::gguf::{Header, MetadataValue, ValueType};

/// The architecture of a header that names none.
const UNKNOWN: &str = "unknown";

/// The metadata of a header. Keys are given without the architecture.
#[derive(Clone, Copy, Debug)]
pub struct Metadata<'a> {
    header: &'a Header,
    architecture: &'a str,
}

impl<'a> Metadata<'a> {
    pub fn new(header: &'a Header) -> Self {
        Self { header, architecture: header.architecture().unwrap_or(UNKNOWN) }
    }

    /// The model's architecture, such as `llama`: `general.architecture`, by default `unknown`.
    pub const fn architecture(&self) -> &'a str {
        self.architecture
    }

    /// The full key in the file: the architecture is prepended, except to keys that start with `general.` or
    /// `tokenizer.`.
    pub fn full_key<'k>(&self, key: &'k str) -> Cow<'k, str> {
        if key.starts_with("general.") || key.starts_with("tokenizer.") {
            return Cow::Borrowed(key);
        }
        Cow::Owned(format!("{}.{key}", self.architecture))
    }

    /// The value of a key, of any type.
    pub fn value(&self, key: &str) -> Option<MetadataValue<'a>> {
        self.header.value(&self.full_key(key))
    }

    /// The value of a key, if it has exactly this type.
    pub fn get<T: Scalar<'a>>(&self, key: &str) -> Option<T> {
        T::of(self.value(key)?)
    }

    /// The elements of an array, if they have exactly this type. Texts that are not UTF-8 are skipped.
    pub fn array<T: Scalar<'a>>(&self, key: &str) -> Option<impl Iterator<Item = T> + use<'a, T>> {
        let array = self.value(key)?.as_array().filter(|array| array.element_type() == T::TYPE)?;
        Some(array.iter().filter_map(T::of))
    }

    /// Minimum and maximum of a `u32`, or of an array of `u32` or `i32`, as many keys are a number or one
    /// number per block. An array that is empty counts as missing.
    ///
    /// The elements of an `i32` array are ordered as signed numbers; a negative minimum or maximum is then
    /// read as unsigned, so -1 becomes 4,294,967,295.
    pub fn range(&self, key: &str) -> Option<Range> {
        if let Some(value) = self.get::<u32>(key) {
            return Some(Range { min: value, max: value });
        }
        let (min, max) = match self.array::<u32>(key) {
            Some(values) => least_and_most(values)?,
            None => {
                let (min, max) = least_and_most(self.array::<i32>(key)?)?;
                (min.cast_unsigned(), max.cast_unsigned())
            }
        };
        Some(Range { min, max })
    }
}

/// The smallest and the largest number of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    pub min: u32,
    pub max: u32,
}

/// A Rust type of metadata values.
pub trait Scalar<'a>: Sized {
    const TYPE: ValueType;

    /// The value, if it has exactly this type; for text, if it is UTF-8.
    fn of(value: MetadataValue<'a>) -> Option<Self>;
}

macro_rules! scalars {
    ($($variant:ident $native:ty;)*) => {$(
        impl Scalar<'_> for $native {
            const TYPE: ValueType = ValueType::$variant;

            fn of(value: MetadataValue<'_>) -> Option<Self> {
                match value {
                    MetadataValue::$variant(value) => Some(value),
                    _ => None,
                }
            }
        }
    )*};
}

scalars! {
    U8 u8;
    I8 i8;
    U16 u16;
    I16 i16;
    U32 u32;
    I32 i32;
    F32 f32;
    Bool bool;
    U64 u64;
    I64 i64;
    F64 f64;
}

impl<'a> Scalar<'a> for &'a str {
    const TYPE: ValueType = ValueType::String;

    fn of(value: MetadataValue<'a>) -> Option<Self> {
        value.as_str()
    }
}

fn least_and_most<T: Copy + Ord>(mut values: impl Iterator<Item = T>) -> Option<(T, T)> {
    let first = values.next()?;
    Some(values.fold((first, first), |(min, max), value| (min.min(value), max.max(value))))
}
