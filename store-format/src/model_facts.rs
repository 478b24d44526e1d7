//! What a header says about its model, for people.

/// Architecture, size and quantisation of a model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelFacts {
    /// The file's format, as [`FileFormat::name`](crate::file_format::FileFormat::name) has it.
    pub format: Option<&'static str>,
    /// The family that engines choose their code by, such as `llama`.
    pub architecture: Option<String>,
    /// The number of elements of all tensors.
    pub parameters: u64,
    /// The name of the mix of number formats, such as `Q4_K_M`.
    pub quantization: Option<String>,
    /// How many tensors there are.
    pub tensor_count: u64,
    /// Which part of a model the file is, if it is not all of it.
    pub shard: Option<Shard>,
}

/// One shard, as its header tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    /// Which it is, from 0 on.
    pub number: Option<u64>,
    /// How many there are.
    pub count: u64,
    /// How many tensors all of them have together.
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
