//! Infers how a tensor is quantised, if its file does not declare it, from its shape and its scale's.
//!
//! The sources are those of [`super::quantization`].

use std::collections::BTreeMap;

use super::quantization::Quantization;
use super::table::{Weight, bias_name};

/// The group sizes in use.
const GROUP_SIZES: [u64; 4] = [16, 32, 64, 128];

/// Infers the model's quantisation from a scale in a separate layer, as Ollama did in February 2026:
/// `NVFP4` if there is no bias, otherwise by the ratio of the sizes of weight and scale.
pub(super) fn infer_from_separate_scales(tensors: &BTreeMap<String, Weight>) -> Option<String> {
    const Q4_BELOW_RATIO: usize = 12;
    let (name, weight, scale) = tensors.iter().find_map(|(name, scale)| {
        let name = name.strip_suffix("_scale")?;
        let weight = tensors.get(name).filter(|weight| weight.layer != scale.layer)?;
        Some((name, weight, scale))
    })?;
    let ratio = weight.bytes.len().checked_div(scale.bytes.len())?;
    Some(match tensors.contains_key(&bias_name(name)) {
        false => "NVFP4".to_owned(),
        true if ratio < Q4_BELOW_RATIO => "Q4".to_owned(),
        true => "Q8".to_owned(),
    })
}

/// Infers a tensor's quantisation from the shapes. A row of the tensor is packed into 32-bit numbers of
/// eight 4-bit or four 8-bit elements, and each group of elements has one scale. This gives one group
/// size for 4 bits and half of it for 8 bits. The first rule that applies decides: 4 bits if their size
/// is 32; 8 bits if theirs is 64; the only valid size; 8 bits if `hint`, the model's quantisation, says
/// so; 4 bits.
pub(super) fn infer(weight: &Weight, scale: &Weight, has_bias: bool, hint: Option<&str>) -> Quantization {
    let columns = |tensor: &Weight| tensor.shape.last().copied().filter(|columns| *columns > 0);
    let (Some(packed), Some(groups)) = (columns(weight), columns(scale)) else {
        return Quantization::default();
    };
    let group_size = |elements_per_number: u64| {
        let elements = packed.checked_mul(elements_per_number)?;
        elements.is_multiple_of(groups).then(|| elements / groups).filter(|size| GROUP_SIZES.contains(size))
    };
    let hint_says_8_bits = hint.is_some_and(|hint| hint.contains('8'));
    let (bits, size) = match (group_size(8), group_size(4)) {
        (Some(32), _) => (4, 32),
        (_, Some(64)) => (8, 64),
        (Some(_), Some(size)) if hint_says_8_bits => (8, size),
        (Some(size), _) => (4, size),
        (None, Some(size)) => (8, size),
        (None, None) => return Quantization::default(),
    };
    let quant_type = match (bits, size) {
        (4, 16) if !has_bias => "nvfp4",
        (4, _) => "int4",
        _ => "int8",
    };
    Quantization { quant_type: Some(quant_type.to_owned()), group_size: u32::try_from(size).ok() }
}
