//! How a tensor is quantised whose file does not say it: by its shape and its scale's.
//!
//! Sources: those of [`super::quantization`].

use std::collections::BTreeMap;

use super::quantization::Quantization;
use super::table::{Weight, bias_name};

/// The sizes of a group that occur.
const GROUP_SIZES: [u64; 4] = [16, 32, 64, 128];

/// What scales in layers of their own suggest, as Ollama read them in February 2026: without biases
/// `NVFP4`, else by the sizes of weights and scales.
pub(super) fn of_separate_layers(tensors: &BTreeMap<String, Weight>) -> Option<String> {
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

/// What the shapes say. A row of the tensor is packed into numbers of 32 bits, its scales stand one per
/// group; so many elements make a group, or half as many of 8 bits. Where both can be, `hint`, the
/// model's own quantisation, decides, and 4 bits without one.
pub(super) fn infer(weight: &Weight, scale: &Weight, has_bias: bool, hint: Option<&str>) -> Quantization {
    let columns = |of: &Weight| of.shape.last().copied().filter(|columns| *columns > 0);
    let (Some(packed), Some(groups)) = (columns(weight), columns(scale)) else {
        return Quantization::default();
    };
    let per_group = |per_number: u64| {
        let elements = packed.checked_mul(per_number)?;
        elements.is_multiple_of(groups).then(|| elements / groups).filter(|size| GROUP_SIZES.contains(size))
    };
    let hinted = hint.is_some_and(|hint| hint.contains('8'));
    let (bits, size) = match (per_group(8), per_group(4)) {
        (Some(32), _) => (4, 32),
        (_, Some(64)) => (8, 64),
        (Some(_), Some(size)) if hinted => (8, size),
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
