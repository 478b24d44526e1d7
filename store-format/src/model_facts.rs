//! The facts about a model in its header, for display.

/// Architecture, size and quantisation of a model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelFacts {
    /// The file's format, see [`FileFormat::name`](crate::file_format::FileFormat::name).
    pub format: Option<&'static str>,
    /// The model family, such as `llama`.
    pub architecture: Option<String>,
    /// The number of elements of all tensors.
    pub parameters: u64,
    /// The name of the file type, such as `Q4_K_M`.
    pub quantization: Option<String>,
    /// The number of tensors.
    pub tensor_count: u64,
    /// The shard, if the model is sharded.
    pub shard: Option<Shard>,
}

/// The shard fields of a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    /// Its number, from 0.
    pub number: Option<u64>,
    /// The number of shards.
    pub count: u64,
    /// The number of tensors of all shards.
    pub total_tensor_count: Option<u64>,
}

impl ModelFacts {
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
