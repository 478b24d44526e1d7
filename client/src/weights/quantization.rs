//! How a tensor is quantised, as its file declares it.
//!
//! A file's metadata has `quant_type` and `group_size` for all its tensors, or `T.quant_type` and
//! `T.group_size` for a tensor `T`. Sources: Ollama's `x/create` (writing) and
//! `x/mlxrunner/model` (reading).

use blobd_store_format::safetensors::Header;
use serde_json::Value as Json;

/// How a tensor is quantised, as far as it is known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Quantization {
    /// The type, as the file has it: `int4`, `int8`, `nvfp4`, `mxfp4`, `mxfp8`, ….
    pub quant_type: Option<String>,
    /// How many elements of a row share a scale.
    pub group_size: Option<u32>,
}

/// What a file declares for all its tensors.
pub(super) fn of_file(header: &Header) -> Quantization {
    declared(header, "quant_type", "group_size")
}

/// What a file declares for its tensor `name`; if nothing, what it declares for all its tensors.
pub(super) fn of_tensor(header: &Header, name: &str) -> Quantization {
    let own = declared(header, &format!("{name}.quant_type"), &format!("{name}.group_size"));
    let all = of_file(header);
    Quantization {
        quant_type: own.quant_type.or(all.quant_type),
        group_size: own.group_size.or(all.group_size),
    }
}

/// A group size in JSON: a number, or a string with a number.
pub(super) fn group_size_of(json: &Json) -> Option<u32> {
    let number = json.as_u64().or_else(|| json.as_str()?.parse().ok())?;
    u32::try_from(number).ok().filter(|size| *size > 0)
}

fn declared(header: &Header, type_key: &str, size_key: &str) -> Quantization {
    let text = |key: &str| header.metadata().get(key).filter(|text| !text.is_empty());
    let group_size = text(size_key).and_then(|text| text.parse().ok()).filter(|size| *size > 0);
    Quantization { quant_type: text(type_key).cloned(), group_size }
}
