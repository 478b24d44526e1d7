//! Facts from a model's headers, for people who choose a model.
//!
//! ```
//! use blobd_store_format::gguf::{GgmlType, GgufWriter, Header};
//! use blobd_model::overview::ModelOverview;
//!
//! let mut writer = GgufWriter::new();
//! writer.metadata("general.architecture", "llama")?;
//! writer.metadata("llama.context_length", 8192_u32)?;
//! writer.tensor("token_embd.weight", GgmlType::Q8_0, &[32, 4])?;
//! let mut file = writer.header()?;
//! file.resize(file.len() + 4 * 34, 0);
//! let header = Header::parse(&file)?;
//! let layout = header.file_layout(file.len() as u64)?;
//! let overview = ModelOverview::new([(&header, &layout)]);
//! assert_eq!(overview.context_length, Some(8192));
//! assert_eq!((overview.types[0].type_name.as_str(), overview.types[0].bytes), ("Q8_0", 4 * 34));
//! assert_eq!(overview.bits_per_weight(), Some(8.5));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::collections::BTreeMap;

use crate::metadata::Metadata;
use blobd_store_format::file_layout::FileLayout;
use blobd_store_format::gguf::Header;

/// Facts from the headers of a model's weights; `None` if the header lacks a number.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelOverview {
    /// The number of elements of all tensors.
    pub parameters: u64,
    pub tensor_count: u64,
    /// How the tensors are stored: one entry per type, the one with the most bytes first.
    pub types: Vec<TypeShare>,
    /// The longest context for which the model was trained, in tokens.
    pub context_length: Option<u64>,
    pub embedding_length: Option<u64>,
    pub block_count: Option<u64>,
    /// The attention heads of a block; the most, if blocks differ.
    pub head_count: Option<u64>,
    /// The heads for keys and values of a block; the most, if blocks differ.
    pub head_count_kv: Option<u64>,
    pub expert_count: Option<u64>,
    /// The experts that are used for one token.
    pub expert_used_count: Option<u64>,
    pub vocabulary_size: Option<u64>,
}

/// The tensors of one type.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TypeShare {
    /// The name of the type, such as `Q4_K`.
    pub type_name: String,
    pub tensor_count: u64,
    /// Their elements.
    pub elements: u64,
    /// Their bytes, without padding.
    pub bytes: u64,
}

impl ModelOverview {
    /// Describes a model by the headers and layouts of its files: one file, or all shards, of which the first
    /// has the metadata.
    pub fn new<'a>(files: impl IntoIterator<Item = (&'a Header, &'a FileLayout)>) -> Self {
        let mut overview = Self::default();
        let mut types = BTreeMap::new();
        for (index, (header, layout)) in files.into_iter().enumerate() {
            if index == 0 {
                overview.read_metadata(&Metadata::new(header));
            }
            overview.add_tensors(layout, &mut types);
        }
        overview.types = types.into_values().collect();
        overview.types.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.type_name.cmp(&b.type_name)));
        overview
    }

    /// The bytes of all tensors, without padding.
    pub fn tensor_bytes(&self) -> u64 {
        self.types.iter().fold(0, |sum, share| sum.saturating_add(share.bytes))
    }

    /// The bits of all tensors divided by their elements; `None` without elements, or if no tensor's size is known.
    #[expect(clippy::cast_precision_loss, reason = "a quotient for display")]
    pub fn bits_per_weight(&self) -> Option<f64> {
        let bytes = self.tensor_bytes();
        (self.parameters > 0 && bytes > 0).then(|| bytes as f64 * 8.0 / self.parameters as f64)
    }

    fn read_metadata(&mut self, metadata: &Metadata<'_>) {
        // Accepts integers of any width, because no formula uses the numbers.
        let number = |key: &str| metadata.value(key).and_then(|value| value.as_u64());
        let most = |key: &str| metadata.range(key).map(|range| u64::from(range.max));
        self.context_length = number("context_length");
        self.embedding_length = number("embedding_length");
        self.block_count = number("block_count");
        self.head_count = most("attention.head_count");
        self.head_count_kv = most("attention.head_count_kv");
        self.expert_count = number("expert_count");
        self.expert_used_count = number("expert_used_count");
        self.vocabulary_size = metadata.vocabulary_size().or_else(|| number("vocab_size"));
    }

    fn add_tensors(&mut self, layout: &FileLayout, types: &mut BTreeMap<String, TypeShare>) {
        for tensor in layout.tensors().iter() {
            // The product cannot overflow: the header's parser has checked it.
            let elements = tensor.shape.iter().fold(1_u64, |product, length| product.saturating_mul(*length));
            self.parameters = self.parameters.saturating_add(elements);
            self.tensor_count += 1;
            let type_name = tensor.type_name.to_string();
            let share =
                types.entry(type_name.clone()).or_insert(TypeShare { type_name, ..TypeShare::default() });
            share.tensor_count += 1;
            share.elements = share.elements.saturating_add(elements);
            share.bytes = share.bytes.saturating_add(tensor.size);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use blobd_store_format::gguf::{GgmlType, GgufWriter};

    fn header(keys: &[(&str, u32)]) -> Header {
        let mut writer = GgufWriter::new();
        writer.metadata("general.architecture", "llama").unwrap();
        for (key, value) in keys {
            writer.metadata(format!("llama.{key}"), *value).unwrap();
        }
        Header::parse(&writer.header().unwrap()).unwrap()
    }

    #[test]
    fn bits_per_weight_need_weights_of_a_known_size() {
        let overview = |parameters, bytes| ModelOverview {
            parameters,
            types: vec![TypeShare { bytes, ..TypeShare::default() }],
            ..ModelOverview::default()
        };
        assert_eq!(overview(32, 34).bits_per_weight(), Some(8.5));
        assert_eq!(overview(0, 34).bits_per_weight(), None);
        assert_eq!(overview(32, 0).bits_per_weight(), None);
    }

    #[test]
    fn types_are_summed_over_shards_and_the_largest_is_first() {
        let shard = |tensors: &[(&str, GgmlType)]| {
            let mut writer = GgufWriter::new();
            tensors.iter().for_each(|(name, ggml_type)| {
                writer.tensor(name, *ggml_type, &[64]).unwrap();
            });
            let size = writer.header().unwrap().len() as u64 + writer.data_size().unwrap();
            let header = Header::parse(&writer.header().unwrap()).unwrap();
            let layout = header.file_layout(size).unwrap();
            (header, layout)
        };
        let shards = [
            shard(&[("a", GgmlType::Q8_0), ("b", GgmlType::F32)]),
            shard(&[("c", GgmlType::Q8_0), ("d", GgmlType::F16)]),
        ];
        let overview = ModelOverview::new(shards.iter().map(|(header, layout)| (header, layout)));
        let types: Vec<_> = overview
            .types
            .iter()
            .map(|share| (share.type_name.as_str(), share.tensor_count, share.elements, share.bytes))
            .collect();
        assert_eq!(types, [("F32", 1, 64, 256), ("Q8_0", 2, 128, 136), ("F16", 1, 64, 128)]);
        assert_eq!((overview.parameters, overview.tensor_count, overview.tensor_bytes()), (256, 4, 520));
        assert_eq!(overview.bits_per_weight(), Some(16.25));
    }

    #[test]
    fn header_without_metadata_and_tensors_has_no_numbers() {
        let header = Header::parse(&GgufWriter::new().header().unwrap()).unwrap();
        let layout = header.file_layout(header.data_offset()).unwrap();
        let overview = ModelOverview::new([(&header, &layout)]);
        assert_eq!(overview, ModelOverview::default());
        assert_eq!(overview.bits_per_weight(), None);
    }

    #[test]
    fn heads_and_experts_are_read_from_the_metadata() {
        let header = header(&[
            ("attention.head_count", 32),
            ("attention.head_count_kv", 8),
            ("expert_count", 8),
            ("expert_used_count", 2),
        ]);
        let layout = header.file_layout(header.data_offset()).unwrap();
        let overview = ModelOverview::new([(&header, &layout)]);
        assert_eq!((overview.head_count, overview.head_count_kv), (Some(32), Some(8)));
        assert_eq!((overview.expert_count, overview.expert_used_count), (Some(8), Some(2)));
    }
}
