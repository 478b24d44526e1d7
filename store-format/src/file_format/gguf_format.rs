//! GGUF as a file format.

use super::{FileFormat, FormatError, FormatParser, ModelHeader};
use crate::file_layout::FileLayout;
use crate::file_type::file_type_name;
use crate::gguf::{Header, HeaderParser, MAGIC, MetadataValue, Progress};
use crate::model_facts::{ModelFacts, Shard};

pub(super) static FORMAT: FileFormat = FileFormat {
    name: "gguf",
    extension: ".gguf",
    signature: "\"GGUF\"",
    is_start: |start| *start == MAGIC,
    parser: || Box::new(HeaderParser::new()),
};

impl FormatParser for HeaderParser {
    fn push(&mut self, bytes: &[u8]) -> Result<Progress, FormatError> {
        Ok(self.push(bytes)?)
    }

    fn finish(self: Box<Self>) -> Result<Box<dyn ModelHeader>, FormatError> {
        Ok(Box::new((*self).finish()?))
    }
}

impl ModelHeader for Header {
    fn bytes(&self) -> &[u8] {
        self.bytes()
    }

    fn file_layout(&self, file_size: u64) -> Result<FileLayout, FormatError> {
        Ok(self.file_layout(file_size)?)
    }

    fn facts(&self) -> ModelFacts {
        let elements = self.tensors().map(|tensor| tensor.shape().element_count());
        let file_type = match self.value("general.file_type") {
            Some(MetadataValue::U32(id)) => file_type_name(id, self.architecture()),
            _ => None,
        };
        ModelFacts {
            format: Some(FORMAT.name()),
            architecture: self.architecture().map(str::to_owned),
            parameters: elements.fold(0, u64::saturating_add),
            quantization: file_type.map(str::to_owned),
            tensor_count: self.tensors().len() as u64,
            shard: shard(self),
        }
    }

    fn metadata(&self) -> Box<dyn Iterator<Item = (&[u8], MetadataValue<'_>)> + '_> {
        Box::new(self.metadata())
    }
}

fn shard(header: &Header) -> Option<Shard> {
    let value = |key| header.value(key).and_then(|value| value.as_u64());
    let count = value("split.count").filter(|count| *count > 1)?;
    Some(Shard { number: value("split.no"), count, total_tensor_count: value("split.tensors.count") })
}
