//! Groups a model's tensors into layers by name.
//!
//! Source: `GroupLayers`, `Items` and `block` in Ollama's `fs/ggml/ggml.go`, August 2025.
//!
//! ```
//! use blobd_store_format::gguf::{GgmlType, GgufWriter, Header};
//! use blobd_model::layers::group_layers;
//!
//! let mut writer = GgufWriter::new();
//! writer.tensor("token_embd.weight", GgmlType::F32, &[8, 2])?;
//! writer.tensor("blk.0.attn_q.weight", GgmlType::F32, &[8, 8])?;
//! writer.tensor("blk.0.attn_q.bias", GgmlType::F32, &[8])?;
//! let header = Header::parse(&writer.header()?)?;
//! let layers = group_layers(header.tensors());
//! assert_eq!(layers["token_embd"].size_bytes(), 64);
//! assert_eq!(layers["blk.0"].size_bytes(), 256 + 32);
//! assert_eq!(layers["blk.0"].tensor("attn_q.bias").map(|tensor| tensor.name()), Some("blk.0.attn_q.bias"));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::collections::BTreeMap;

use blobd_store_format::tensor::TensorInfo;

/// The tensors of one layer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Layer<'a> {
    tensors: BTreeMap<&'a str, TensorInfo<'a>>,
}

impl<'a> Layer<'a> {
    /// The tensor with this name in the layer, such as `attn_q.weight`.
    pub fn tensor(&self, name: &str) -> Option<TensorInfo<'a>> {
        self.tensors.get(name).copied()
    }

    /// The tensors with their names in the layer, sorted by name.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = (&'a str, TensorInfo<'a>)> {
        self.tensors.iter().map(|(name, tensor)| (*name, *tensor))
    }

    /// The size of the tensors in bytes, without padding; at most 2^64 - 1. Tensors of a type without a
    /// known size count as 0, see [`unsized_tensors`](Self::unsized_tensors).
    pub fn size_bytes(&self) -> u64 {
        let sizes = self.tensors.values().filter_map(TensorInfo::size_bytes);
        sizes.fold(0, u64::saturating_add)
    }

    /// How many tensors have a type without a known size.
    pub fn unsized_tensors(&self) -> usize {
        self.tensors.values().filter(|tensor| tensor.size_bytes().is_none()).count()
    }
}

/// The tensors by layer, see [`split_name`].
pub fn group_layers<'a>(tensors: impl IntoIterator<Item = TensorInfo<'a>>) -> BTreeMap<&'a str, Layer<'a>> {
    let mut layers: BTreeMap<&str, Layer<'_>> = BTreeMap::new();
    for tensor in tensors {
        let (layer, name) = split_name(tensor.name());
        layers.entry(layer).or_default().tensors.insert(name, tensor);
    }
    layers
}

/// Splits a tensor's name into the name of its layer and its name in the layer: `blk.0` and
/// `attn_q.weight`, `token_embd` and `weight`.
///
/// The name is split at its dots. If one of the parts is `blk` or `mm` and at least two follow, the layer's
/// name ends with the part after it, which is a number except in some projectors
/// (`mm.mm_input_projection.weight`). Otherwise it is the first part.
pub fn split_name(name: &str) -> (&str, &str) {
    split_at_block(name).or_else(|| name.split_once('.')).unwrap_or((name, ""))
}

/// The number of the block to which a tensor belongs: 31 for `blk.31.attn_q.weight`. `None` for a tensor outside the
/// blocks, and for the blocks of a vision tower.
pub fn block_number(name: &str) -> Option<u64> {
    let (number, _name) = name.strip_prefix("blk.")?.split_once('.')?;
    let is_number = number.bytes().all(|byte| byte.is_ascii_digit());
    number.parse().ok().filter(|_| is_number)
}

/// The tensors whose names start with a prefix, in order.
pub fn with_prefix<'a>(
    tensors: impl IntoIterator<Item = TensorInfo<'a>>,
    prefix: &str,
) -> impl Iterator<Item = TensorInfo<'a>> {
    tensors.into_iter().filter(move |tensor| tensor.name().starts_with(prefix))
}

/// The number of parameters: the elements of all tensors, at most 2^64 - 1. Ignores `general.parameter_count`, because
/// it is often wrong.
pub fn parameter_count<'a>(tensors: impl IntoIterator<Item = TensorInfo<'a>>) -> u64 {
    let elements = tensors.into_iter().map(|tensor| tensor.shape().element_count());
    elements.fold(0, u64::saturating_add)
}

/// Splits a name after the part that follows the first `blk` or `mm`, if something is left.
fn split_at_block(name: &str) -> Option<(&str, &str)> {
    let mut end = 0_usize;
    for part in name.split('.') {
        end += part.len();
        if part == "blk" || part == "mm" {
            let (number, rest) = name.get(end + 1..)?.split_once('.')?;
            return Some((name.get(..end + 1 + number.len())?, rest));
        }
        end += 1;
    }
    None
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;
    use blobd_store_format::gguf::GgmlType;
    use blobd_store_format::tensor::Shape;

    fn info<'a>(name: &'a str, ggml_type: GgmlType, shape: &'a [u64]) -> TensorInfo<'a> {
        TensorInfo::new(name, ggml_type, Shape::new(shape).unwrap(), 0).unwrap()
    }

    #[test]
    fn names_are_split_as_ollama_splits_them() {
        // The tests of the clients in other languages use the same names.
        let table: Vec<(String, String, String)> =
            serde_json::from_str(include_str!("../../../client/tests/layer_names.json")).unwrap();
        for (name, layer, rest) in &table {
            assert_eq!(split_name(name), (&**layer, &**rest), "{name}");
        }
    }

    #[test]
    fn tensors_are_grouped_and_their_bytes_added() {
        let layers = group_layers([
            info("blk.0.attn_k.weight", GgmlType::F32, &[4, 4]),
            info("token_embd.weight", GgmlType::Q4_0, &[32, 10]),
            info("blk.1.attn_k.weight", GgmlType::F16, &[4, 4]),
            info("blk.0.new.weight", GgmlType::from_id(77), &[5]),
            info("blk.0.attn_q.weight", GgmlType::F32, &[4, 4]),
        ]);
        let sizes: Vec<_> = layers.iter().map(|(name, layer)| (*name, layer.size_bytes())).collect();
        assert_eq!(sizes, [("blk.0", 128), ("blk.1", 32), ("token_embd", 180)]);
        let names: Vec<_> = layers["blk.0"].tensors().map(|(name, _)| name).collect();
        assert_eq!(names, ["attn_k.weight", "attn_q.weight", "new.weight"]);
        assert_eq!(layers["blk.0"].unsized_tensors(), 1);
        assert_eq!(layers["blk.1"].unsized_tensors(), 0);
        assert_eq!(layers["blk.1"].tensor("attn_q.weight"), None);
    }

    #[test]
    fn sizes_beyond_64_bits_stay_at_the_largest_number() {
        let shape = [1 << 61];
        let tensors = ["a.0", "a.1", "a.2"].map(|name| info(name, GgmlType::F32, &shape[..]));
        assert_eq!(group_layers(tensors)["a"].size_bytes(), u64::MAX);
        assert_eq!(parameter_count(tensors), 3 << 61);
        assert_eq!(parameter_count(tensors.into_iter().chain(tensors).chain(tensors)), u64::MAX);
    }

    #[test]
    fn block_numbers_are_read_from_names() {
        assert_eq!(block_number("blk.31.attn_q.weight"), Some(31));
        assert_eq!(block_number("blk.0."), Some(0));
        for name in ["blk.31", "v.blk.3.attn_q", "blk.-1.x", "blk.+1.x", "blk..x", "blk.x.y", "output.weight"]
        {
            assert_eq!(block_number(name), None, "{name}");
        }
        assert_eq!(block_number("blk.99999999999999999999.x"), None);
    }

    #[test]
    fn tensors_are_found_by_prefix() {
        let names = ["v.a", "blk.0.x.y", "v.b", "vision"];
        let tensors = names.map(|name| info(name, GgmlType::F32, &[1]));
        let found: Vec<_> = with_prefix(tensors, "v.").map(|tensor| tensor.name()).collect();
        assert_eq!(found, ["v.a", "v.b"]);
        assert_eq!(with_prefix(tensors, "").count(), 4);
    }

    proptest! {
        #[test]
        fn layer_and_rest_together_are_the_name(parts in vec("blk|mm|v|[0-9]{0,2}|[a-zä]{1,3}", 0..7)) {
            let name = parts.join(".");
            let (layer, rest) = split_name(&name);
            let joined = format!("{layer}.{rest}");
            prop_assert!(joined == name || (rest.is_empty() && layer == name), "{name}: {layer} {rest}");
        }
    }
}
