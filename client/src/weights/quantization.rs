//! How a tensor is quantised: by what its file says, or else by its shape and its scale's.
//!
//! A file's metadata has `quant_type` and `group_size` for all of its tensors, or
//! `T.quant_type` and `T.group_size` for one. Sources: Ollama's `x/create` (writing) and
//! `x/mlxrunner/model` (reading).

use std::collections::BTreeMap;

use blobd_store_format::safetensors::Header;
use serde_json::Value as Json;

use super::table::{Weight, bias_name};

/// How a tensor is quantised, as far as it is known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Quantization {
    /// The type, as written: `int4`, `int8`, `nvfp4`, `mxfp4`, `mxfp8`, ….
    pub quant_type: Option<String>,
    /// How many elements of a row share a scale.
    pub group_size: Option<u32>,
}

/// The sizes of a group that occur.
const GROUP_SIZES: [u64; 4] = [16, 32, 64, 128];

/// What a file says about all of its tensors.
pub(super) fn of_file(header: &Header) -> Quantization {
    said(header, "quant_type", "group_size")
}

/// What a file says about a tensor of this name in it: about this very one, or else about all.
pub(super) fn of_tensor(header: &Header, name: &str) -> Quantization {
    let own = said(header, &format!("{name}.quant_type"), &format!("{name}.group_size"));
    let all = of_file(header);
    Quantization {
        quant_type: own.quant_type.or(all.quant_type),
        group_size: own.group_size.or(all.group_size),
    }
}

/// A group's size as JSON has it: a number, or a text of one.
pub(super) fn group_size_of(json: &Json) -> Option<u32> {
    let number = json.as_u64().or_else(|| json.as_str()?.parse().ok())?;
    u32::try_from(number).ok().filter(|size| *size > 0)
}

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

fn said(header: &Header, type_key: &str, size_key: &str) -> Quantization {
    let text = |key: &str| header.metadata().get(key).filter(|text| !text.is_empty());
    let group_size = text(size_key).and_then(|text| text.parse().ok()).filter(|size| *size > 0);
    Quantization { quant_type: text(type_key).cloned(), group_size }
}
