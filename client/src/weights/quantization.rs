//! How a tensor is quantised, by what its file says.
//!
//! A file's metadata has `quant_type` and `group_size` for all of its tensors, or
//! `T.quant_type` and `T.group_size` for one. Sources: Ollama's `x/create` (writing) and
//! `x/mlxrunner/model` (reading).

use blobd_store_format::safetensors::Header;
use serde_json::Value as Json;

/// How a tensor is quantised, as far as it is known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Quantization {
    /// The type, as written: `int4`, `int8`, `nvfp4`, `mxfp4`, `mxfp8`, ….
    pub quant_type: Option<String>,
    /// How many elements of a row share a scale.
    pub group_size: Option<u32>,
}

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

fn said(header: &Header, type_key: &str, size_key: &str) -> Quantization {
    let text = |key: &str| header.metadata().get(key).filter(|text| !text.is_empty());
    let group_size = text(size_key).and_then(|text| text.parse().ok()).filter(|size| *size > 0);
    Quantization { quant_type: text(type_key).cloned(), group_size }
}
