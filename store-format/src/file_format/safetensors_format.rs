//! safetensors as a file format.

use std::io::{self, Read};

use super::{FileFormat, FormatError, FormatParser, ModelHeader, Shard, kind};
use crate::digest::Digest;
use crate::expert::safetensors::{expert_groups, stacked_experts};
use crate::file_layout::{FileLayout, TensorRange};
use crate::gguf::{MetadataValue, Progress};
use crate::safetensors::{Header, SafetensorsError, Tensor};
use crate::tensor::TensorFormat;

pub(super) static FORMAT: FileFormat = FileFormat {
    format: TensorFormat::Safetensors,
    title: "safetensors",
    extension: ".safetensors",
    // The extension that Flux and ComfyUI use.
    other_extensions: &[".sft"],
    max_header_bytes: Header::MAX_BYTES + Header::LENGTH_BYTES as u64,
    is_start: kind::is_safetensors,
    parser: || Box::new(Parser::default()),
    read,
};

fn read(file: &mut dyn Read) -> io::Result<Result<Box<dyn ModelHeader>, FormatError>> {
    Ok(match Header::read(file)? {
        Ok((header, digest)) => Ok(Box::new(SafetensorsHeader { bytes: Bytes::Dropped { digest }, header })),
        Err(error) => Err(error.into()),
    })
}

/// Collects the header, whose length its first bytes state.
#[derive(Debug, Default)]
struct Parser {
    bytes: Vec<u8>,
}

impl Parser {
    /// The length of the header with its length field, once that is known.
    fn end(&self) -> Result<Option<usize>, SafetensorsError> {
        let end = self.bytes.first_chunk().map(|length| Header::end(*length)).transpose()?;
        Ok(end.map(|end| usize::try_from(end).unwrap_or(usize::MAX)))
    }
}

impl FormatParser for Parser {
    fn push(&mut self, bytes: &[u8]) -> Result<Progress, FormatError> {
        let (field, rest) =
            bytes.split_at(Header::LENGTH_BYTES.saturating_sub(self.bytes.len()).min(bytes.len()));
        self.bytes.extend_from_slice(field);
        let Some(end) = self.end()? else { return Ok(Progress::NeedMore) };
        let missing = end.saturating_sub(self.bytes.len());
        self.bytes.extend_from_slice(rest.get(..missing).unwrap_or(rest));
        Ok(if self.bytes.len() == end { Progress::Done } else { Progress::NeedMore })
    }

    fn finish(self: Box<Self>) -> Result<Box<dyn ModelHeader>, FormatError> {
        let header = Header::parse_start(&self.bytes)?;
        Ok(Box::new(SafetensorsHeader { bytes: Bytes::Kept(self.bytes), header }))
    }
}

#[derive(Debug)]
struct SafetensorsHeader {
    bytes: Bytes,
    header: Header,
}

#[derive(Debug)]
enum Bytes {
    Kept(Vec<u8>),
    Dropped { digest: Digest },
}

impl ModelHeader for SafetensorsHeader {
    fn format(&self) -> &'static FileFormat {
        &FORMAT
    }

    fn bytes(&self) -> Option<&[u8]> {
        match &self.bytes {
            Bytes::Kept(bytes) => Some(bytes),
            Bytes::Dropped { .. } => None,
        }
    }

    fn digest(&self) -> Digest {
        match &self.bytes {
            Bytes::Kept(bytes) => Digest::of(bytes),
            Bytes::Dropped { digest } => *digest,
        }
    }

    fn size(&self) -> u64 {
        self.header.data_offset()
    }

    fn data_offset(&self) -> u64 {
        self.header.data_offset()
    }

    fn file_layout(&self, file_size: u64) -> Result<FileLayout, FormatError> {
        self.header.check_file_size(file_size)?;
        let data_offset = self.header.data_offset();
        let tensors = self.header.tensors().iter().map(|tensor| TensorRange {
            name: tensor.name(),
            type_name: tensor.dtype().name().into(),
            shape: tensor.shape(),
            offset: tensor.offset_in_file().saturating_sub(data_offset),
            size: tensor.size_bytes(),
            experts: stacked_experts(tensor),
        });
        let groups = expert_groups(self.header.tensors());
        Ok(FileLayout::new(TensorFormat::Safetensors, file_size, data_offset, tensors.collect(), groups)?)
    }

    fn tensor_count(&self) -> u64 {
        self.header.tensors().len() as u64
    }

    fn parameters(&self) -> u64 {
        let elements = |tensor: &Tensor| {
            tensor.shape().iter().fold(1_u64, |count, dimension| count.saturating_mul(*dimension))
        };
        self.header.tensors().iter().map(elements).fold(0, u64::saturating_add)
    }

    /// A shard does not say that it is one: its name and the model's index do.
    fn shard(&self) -> Option<Shard> {
        None
    }

    fn metadata(&self) -> Box<dyn Iterator<Item = (&[u8], MetadataValue<'_>)> + '_> {
        let metadata = self.header.metadata().iter();
        Box::new(metadata.map(|(key, value)| (key.as_bytes(), MetadataValue::String(value.as_bytes()))))
    }
}
