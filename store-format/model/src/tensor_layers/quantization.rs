//! A tensor's quantisation as its file declares it.
//!
//! A file's metadata has `quant_type` and `group_size` for all its tensors, or `T.quant_type` and
//! `T.group_size` for a tensor `T`.

use serde_json::Value as Json;

use blobd_store_format::safetensors::Header;

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
    #[must_use]
    pub fn of_model_index(index: &Json) -> Self {
        let quant_type = index.get("quantization").and_then(Json::as_str).filter(|name| !name.is_empty());
        let group_size = index.get("group_size").and_then(|size| match size {
            Json::String(text) => text.parse().ok(),
            _ => size.as_u64().and_then(|size| u32::try_from(size).ok()),
        });
        Self { quant_type: quant_type.map(str::to_owned), group_size: group_size.filter(|size| *size > 0) }
    }

    /// The bits of a packed element; `None` if the type is unknown.
    #[must_use]
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
