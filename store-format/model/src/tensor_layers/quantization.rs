//! A tensor's quantisation as its file declares it, or as the shapes and types of the tensor and its scale imply it.
//!
//! A file's metadata has `quant_type` and `group_size` for all its tensors, or `T.quant_type` and
//! `T.group_size` for a tensor `T`.

use blobd_store_format::safetensors::{Dtype, Header};
use serde_json::Value as Json;

use super::{LayerTensor, TensorLayers, bias_name};

/// How a tensor or a model is quantised. Unknown parts are `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Quantization {
    /// The name of the type in the file: `int4`, `int8`, `nvfp4`, `mxfp4`, `mxfp8`, ….
    pub quant_type: Option<String>,
    /// How many elements of a row share a scale.
    pub group_size: Option<u32>,
}

/// Name, bits of an element, default group size. Source: `x/create` of Ollama, with its aliases. For types with block
/// scales (`nv…`, `mx…`), the size is part of the definition.
const TYPES: [(&str, u64, u32); 9] = [
    ("int4", 4, 64),
    ("int8", 8, 64),
    ("nvfp4", 4, 16),
    ("mxfp4", 4, 32),
    ("mxfp8", 8, 32),
    ("q4", 4, 64),
    ("q8", 8, 64),
    ("fp4", 4, 64),
    ("fp8", 8, 64),
];

impl Quantization {
    /// Reads the model's quantisation from `model_index.json`.
    pub fn from_model_index(index: &Json) -> Self {
        let quant_type = index.get("quantization").and_then(Json::as_str).filter(|name| !name.is_empty());
        let group_size = index.get("group_size").and_then(|size| match size {
            Json::String(text) => text.parse().ok(),
            _ => size.as_u64().and_then(|size| u32::try_from(size).ok()),
        });
        Self { quant_type: quant_type.map(str::to_owned), group_size: group_size.filter(|size| *size > 0) }
    }

    /// The bits of a packed element; `None` if the type is unknown.
    pub fn bits(&self) -> Option<u64> {
        self.row().map(|(_, bits, _)| bits)
    }

    /// Reads what a file declares for all its tensors.
    pub(super) fn declared_for_file(header: &Header) -> Self {
        Self::declared(header, "quant_type", "group_size")
    }

    /// Reads what a file declares for its tensor `name`, or else for all its tensors. A size for all tensors does not
    /// apply to a tensor with its own type.
    pub(super) fn declared_for_tensor(header: &Header, name: &str) -> Self {
        let own = Self::declared(header, &format!("{name}.quant_type"), &format!("{name}.group_size"));
        let all = Self::declared_for_file(header);
        let is_other = own.quant_type.iter().zip(&all.quant_type).any(|(own, all)| !is_same(own, all));
        Self {
            group_size: own.group_size.or(all.group_size.filter(|_| !is_other)),
            quant_type: own.quant_type.or(all.quant_type),
        }
    }

    /// Whether the type's definition includes the group size.
    pub(super) fn has_fixed_size(&self) -> bool {
        self.row().is_some_and(|(name, ..)| name.starts_with("nv") || name.starts_with("mx"))
    }

    /// Fills in the default size of its type.
    pub(super) fn or_default_size(mut self) -> Self {
        self.group_size = self.group_size.or_else(|| self.row().map(|(_, _, size)| size));
        self
    }

    fn declared(header: &Header, type_key: &str, size_key: &str) -> Self {
        let text = |key: &str| header.metadata().get(key).filter(|text| !text.is_empty());
        let group_size = text(size_key).and_then(|text| text.parse().ok()).filter(|size| *size > 0);
        Self { quant_type: text(type_key).cloned(), group_size }
    }

    fn row(&self) -> Option<(&'static str, u64, u32)> {
        let named = self.quant_type.as_deref()?;
        TYPES.into_iter().find(|(name, ..)| name.eq_ignore_ascii_case(named))
    }
}

/// Whether both are names of one type; `Q4` and `FP4` are aliases of `int4`, `Q8` and `FP8` of `int8`.
pub(super) fn is_same(first: &str, second: &str) -> bool {
    let canonical = |name: &str| match name.to_ascii_lowercase().as_str() {
        "q4" | "fp4" => "int4".to_owned(),
        "q8" | "fp8" => "int8".to_owned(),
        other => other.to_owned(),
    };
    canonical(first) == canonical(second)
}

/// The group sizes in use.
const GROUP_SIZES: [u64; 4] = [16, 32, 64, 128];

/// Infers the model's quantisation from a scale in a separate layer, as Ollama did in February 2026:
/// without a bias, a type with block scales, `NVFP4` unless their type and number tell another; otherwise by the
/// ratio of the sizes of weight and scale.
pub(super) fn infer_from_separate_scales(layers: &TensorLayers) -> Option<String> {
    const Q4_BELOW_RATIO: u64 = 12;
    let (name, weight, scale) = layers.tensors.iter().find_map(|(name, scale)| {
        let name = name.strip_suffix("_scale")?;
        let weight = layers.tensors.get(name).filter(|weight| weight.layer_name != scale.layer_name)?;
        Some((name, weight, scale))
    })?;
    let ratio = weight.size_bytes().checked_div(scale.size_bytes())?;
    if !layers.tensors.contains_key(&bias_name(name)) {
        let told = infer_block_scales(weight, scale).and_then(|told| told.quant_type);
        return Some(told.map_or_else(|| "NVFP4".to_owned(), |told| told.to_uppercase()));
    }
    Some(if ratio < Q4_BELOW_RATIO { "Q4".to_owned() } else { "Q8".to_owned() })
}

/// Infers a tensor's quantisation. Scales of one byte mean a type with block scales. Otherwise the shapes decide: a row
/// of the tensor is packed into numbers of 4-bit or 8-bit elements, and each group of elements has one scale. So the
/// shapes give one group size for 4 bits, and half of it for 8 bits. A declared size must match. The first rule that
/// applies decides: bits and size of `model`, the model's quantisation; 4 bits if their group size is 32; 8 bits if
/// theirs is 64; the only valid size; 8 bits if `model` has 8 bits; 4 bits.
pub(super) fn infer(
    weight: &LayerTensor,
    scale: &LayerTensor,
    has_bias: bool,
    model: &Quantization,
) -> Quantization {
    if !has_bias && is_block_scale(scale.dtype()) {
        return infer_block_scales(weight, scale).unwrap_or_default();
    }
    let declared = weight.declared.group_size;
    let size_for = |bits| {
        group_size(weight, scale, bits).filter(|size| declared.is_none_or(|declared| declared == *size))
    };
    let hint_says_8_bits = model.quant_type.as_deref().is_some_and(|name| name.contains('8'));
    let of_model = model.bits().zip(model.group_size).filter(|(bits, size)| size_for(*bits) == Some(*size));
    let of_shapes = match (size_for(4), size_for(8)) {
        (Some(32), _) => Some((4, 32)),
        (_, Some(64)) => Some((8, 64)),
        (Some(_), Some(size)) if hint_says_8_bits => Some((8, size)),
        (Some(size), _) => Some((4, size)),
        (None, Some(size)) => Some((8, size)),
        (None, None) => None,
    };
    let Some((bits, size)) = of_model.or(of_shapes) else { return Quantization::default() };
    match (bits, size) {
        (4, 16) if !has_bias => known("nvfp4", size),
        (4, _) => known("int4", size),
        _ => known("int8", size),
    }
}

/// How many elements of `bits` share a scale, computed from the shapes; `None` if no model uses that size.
pub(super) fn group_size(weight: &LayerTensor, scale: &LayerTensor, bits: u64) -> Option<u32> {
    let columns = |tensor: &LayerTensor| tensor.shape().last().copied().filter(|columns| *columns > 0);
    let (elements, groups) = (unpacked(columns(weight)?, weight.dtype(), bits)?, columns(scale)?);
    let size = elements.checked_div(groups).filter(|_| elements.is_multiple_of(groups))?;
    u32::try_from(size).ok().filter(|_| GROUP_SIZES.contains(&size))
}

/// How many elements of `bits` are packed into `columns` numbers of the type `dtype`; `None` if that is not a packing
/// type.
pub(super) fn unpacked(columns: u64, dtype: Dtype, bits: u64) -> Option<u64> {
    let is_number =
        matches!(dtype, Dtype::U8 | Dtype::I8 | Dtype::U16 | Dtype::U32 | Dtype::I32 | Dtype::U64);
    let is_packed = is_number || dtype.is_float() && dtype.bits() == bits;
    columns.checked_mul(dtype.bits().checked_div(bits)?).filter(|_| is_packed)
}

/// Infers a type with block scales. A scale is a byte: E8M0 for `mxfp4` and `mxfp8`, E4M3 for `nvfp4`. Ollama stores
/// both as `U8`, so the group size decides.
fn infer_block_scales(weight: &LayerTensor, scale: &LayerTensor) -> Option<Quantization> {
    let is_byte = is_block_scale(scale.dtype());
    match (group_size(weight, scale, 4), group_size(weight, scale, 8)) {
        (Some(16), _) if is_byte && scale.dtype() != Dtype::F8_E8M0 => Some(known("nvfp4", 16)),
        (Some(32), _) if is_byte && scale.dtype() != Dtype::F8_E4M3 => Some(known("mxfp4", 32)),
        (_, Some(32)) if is_byte && scale.dtype() != Dtype::F8_E4M3 => Some(known("mxfp8", 32)),
        _ => None,
    }
}

const fn is_block_scale(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::U8 | Dtype::F8_E8M0 | Dtype::F8_E4M3)
}

fn known(quant_type: &str, group_size: u32) -> Quantization {
    Quantization { quant_type: Some(quant_type.to_owned()), group_size: Some(group_size) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FORMATS: &str = include_str!("../../../../docs/FORMATS.md");

    #[test]
    fn document_describes_every_type() {
        let section =
            FORMATS.split("\n## ").find(|section| section.starts_with("Quantised tensors of models"));
        let section = section.unwrap();
        for (name, bits, group_size) in TYPES {
            let mut rows = section.lines().filter(|line| line.starts_with('|'));
            let row = rows.find(|row| row.contains(&format!("`{name}`"))).unwrap_or_else(|| panic!("{name}"));
            let cells: Vec<_> = row.trim_matches('|').split('|').map(str::trim).collect();
            let size = cells[2].split(',').next();
            assert_eq!((cells[1], size), (&*bits.to_string(), Some(&*group_size.to_string())), "{name}");
        }
    }
}
