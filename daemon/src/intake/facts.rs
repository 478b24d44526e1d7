//! What a GGUF header says about its model, for people.

use blobd_store_format::file_type::file_type_name;
use blobd_store_format::gguf::{Header, MetadataValue};

/// Architecture, size and quantisation of a model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelFacts {
    /// `general.architecture`.
    pub architecture: Option<String>,
    /// The number of elements of all tensors.
    pub parameters: u64,
    /// The name of `general.file_type`, such as `Q4_K_M`.
    pub quantization: Option<String>,
    /// How many tensors there are.
    pub tensor_count: u64,
    /// Which part of a model the file is, if it is not all of it.
    pub shard: Option<Shard>,
}

/// One shard, as its header tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    /// Which it is, from 0 on: `split.no`.
    pub number: Option<u64>,
    /// How many there are: `split.count`.
    pub count: u64,
    /// How many tensors all of them have together: `split.tensors.count`.
    pub total_tensor_count: Option<u64>,
}

impl Shard {
    fn of(header: &Header) -> Option<Self> {
        let value = |key| header.value(key).and_then(|value| value.as_u64());
        let count = value("split.count").filter(|count| *count > 1)?;
        Some(Self { number: value("split.no"), count, total_tensor_count: value("split.tensors.count") })
    }
}

impl ModelFacts {
    /// Reads them from a header.
    #[must_use]
    pub fn of(header: &Header) -> Self {
        let elements = header.tensors().map(|tensor| tensor.shape().element_count());
        let file_type = match header.value("general.file_type") {
            Some(MetadataValue::U32(id)) => file_type_name(id),
            _ => None,
        };
        Self {
            architecture: header.architecture().map(str::to_owned),
            parameters: elements.fold(0, u64::saturating_add),
            quantization: file_type.map(str::to_owned),
            tensor_count: header.tensors().len() as u64,
            shard: Shard::of(header),
        }
    }

    /// The number of parameters as Ollama writes it: `8.0B`, `22.6M`.
    #[must_use]
    pub fn parameter_size(&self) -> String {
        let parameters = self.parameters;
        let (unit, suffix) = match parameters {
            1_000_000_000.. => (1_000_000_000, "B"),
            1_000_000.. => (1_000_000, "M"),
            1_000.. => (1_000, "K"),
            _ => return parameters.to_string(),
        };
        let tenths = (u128::from(parameters) * 10 + unit / 2) / unit;
        format!("{}.{}{suffix}", tenths / 10, tenths % 10)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_written_as_ollama_writes_them() {
        for (parameters, text) in
            [(0, "0"), (999, "999"), (1000, "1.0K"), (22_565_376, "22.6M"), (8_030_261_248, "8.0B")]
        {
            assert_eq!(ModelFacts { parameters, ..ModelFacts::default() }.parameter_size(), text);
        }
    }
}
