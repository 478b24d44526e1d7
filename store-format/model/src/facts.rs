//! The facts about a model in its header, for display.

use blobd_store_format::file_format::{ModelHeader, Shard};
use blobd_store_format::file_type::file_type_name;
use blobd_store_format::gguf::{Header, MetadataValue};

use crate::kind::ModelKind;

/// Architecture, size and quantisation of a model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelFacts {
    /// The file's format, see [`FileFormat::name`](blobd_store_format::file_format::FileFormat::name).
    pub format: Option<&'static str>,
    /// The kind of model, [`ModelKind::Model`] by default.
    pub kind: ModelKind,
    /// The model family, such as `llama`.
    pub architecture: Option<String>,
    /// The number of elements of all tensors.
    pub parameters: u64,
    /// The name of the file type, such as `Q4_K_M`.
    pub quantization: Option<String>,
    pub tensor_count: u64,
    /// The shard, if the model is sharded.
    pub shard: Option<Shard>,
}

impl ModelFacts {
    /// The facts in a file's header. Only a GGUF header has the model's kind, architecture and quantisation.
    pub fn from_header(header: &dyn ModelHeader) -> Self {
        let counts = Self {
            format: Some(header.format().name()),
            parameters: header.parameters(),
            tensor_count: header.tensor_count(),
            shard: header.shard(),
            ..Self::default()
        };
        match header.as_gguf() {
            Some(gguf) => Self {
                kind: ModelKind::from_header(gguf),
                architecture: gguf.architecture().map(str::to_owned),
                quantization: quantization(gguf).map(str::to_owned),
                ..counts
            },
            None => counts,
        }
    }

    /// The number of parameters as Ollama writes it, such as `8.0B`, `22.57M` or `500K`.
    ///
    /// Billions have one decimal and millions two; whole billions and millions have none, and thousands
    /// never have. As in Ollama's `format.HumanNumber`, the unit is chosen before rounding (999,999 is
    /// `1000K`), and the quotient is a 64-bit float whose exact value is rounded, ties to even.
    pub fn parameter_size(&self) -> String {
        let parameters = self.parameters;
        let (unit, suffix, decimals) = match parameters {
            1_000_000_000.. => (1_000_000_000, 'B', 1),
            1_000_000.. => (1_000_000, 'M', 2),
            1_000.. => (1_000, 'K', 0),
            _ => return parameters.to_string(),
        };
        let quotient = quotient(parameters, unit);
        let decimals = if quotient.fract() == 0.0 { 0 } else { decimals };
        format!("{quotient:.decimals$}{suffix}")
    }
}

fn quantization(header: &Header) -> Option<&'static str> {
    match header.value("general.file_type") {
        Some(MetadataValue::U32(id)) => file_type_name(id, header.architecture()),
        _ => None,
    }
}

#[expect(clippy::cast_precision_loss, reason = "Ollama rounds the number to a 64-bit float as well")]
fn quotient(number: u64, unit: u64) -> f64 {
    number as f64 / unit as f64
}

#[cfg(test)]
mod tests {
    use blobd_store_format::gguf::{GgmlType, GgufWriter};

    use super::*;

    #[test]
    fn header_of_a_gguf_file_has_all_facts() {
        let mut writer = GgufWriter::new();
        writer.metadata("general.architecture", "llama").unwrap();
        writer.metadata("general.file_type", 15_u32).unwrap();
        writer.metadata("split.no", 1_u16).unwrap();
        writer.metadata("split.count", 3_u16).unwrap();
        writer.tensor("blk.0.attn_q.weight", GgmlType::F32, &[8, 2]).unwrap();
        let header = Header::parse(&writer.header().unwrap()).unwrap();
        let expected = ModelFacts {
            format: Some("gguf"),
            kind: ModelKind::Model,
            architecture: Some("llama".to_owned()),
            parameters: 16,
            quantization: Some("Q4_K_M".to_owned()),
            tensor_count: 1,
            shard: Some(Shard { number: Some(1), count: 3, total_tensor_count: None }),
        };
        assert_eq!(ModelFacts::from_header(&header), expected);
    }

    /// The expected texts follow from Go's `%.0f`, `%.1f` and `%.2f`.
    #[test]
    fn parameters_are_written_as_ollama_writes_them() {
        for (parameters, text) in [
            (0, "0"),
            (999, "999"),
            (1_000, "1K"),
            (1_499, "1K"),
            (1_500, "2K"),
            (2_500, "2K"),
            (2_501, "3K"),
            (999_999, "1000K"),
            (1_000_000, "1M"),
            (1_000_001, "1.00M"),
            (22_000_000, "22M"),
            (22_500_000, "22.50M"),
            (22_565_376, "22.57M"),
            (500_550_000, "500.55M"),
            (999_999_999, "1000.00M"),
            (1_000_000_000, "1B"),
            (1_000_000_001, "1.0B"),
            // The float is exactly halfway between two tenths: it is rounded to even.
            (2_250_000_000, "2.2B"),
            // The floats are just above and just below the middle of two tenths.
            (2_850_000_000, "2.9B"),
            (2_150_000_000, "2.1B"),
            (8_030_261_248, "8.0B"),
            (70_000_000_000, "70B"),
            (671_026_419_200, "671.0B"),
            // Its float is 2^64.
            (u64::MAX, "18446744073.7B"),
        ] {
            assert_eq!(ModelFacts { parameters, ..ModelFacts::default() }.parameter_size(), text);
        }
    }
}
