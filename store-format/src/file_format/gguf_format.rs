//! GGUF as a file format.

use std::io::{self, Read};

use super::{FileFormat, FileOrigin, FormatError, FormatParser, ModelHeader, Shard};
use crate::digest::Digest;
use crate::file_layout::{FileLayout, LayoutError};
use crate::gguf::{GgufError, Header, HeaderParser, MAGIC, MAX_PADDED_HEADER_BYTES, MetadataValue, Progress};
use crate::tensor::{TensorError, TensorFormat};

pub(super) static FORMAT: FileFormat = FileFormat {
    format: TensorFormat::Gguf,
    title: "GGUF",
    extension: ".gguf",
    other_extensions: &[],
    max_header_bytes: MAX_PADDED_HEADER_BYTES,
    is_start: |start| start.starts_with(&MAGIC),
    parser: || Box::new(HeaderParser::new()),
    read,
};

/// The header refers to its own bytes, so it keeps them.
fn read(file: &mut dyn Read) -> io::Result<Result<Box<dyn ModelHeader>, FormatError>> {
    const CHUNK_BYTES: usize = 64 << 10;
    let (mut parser, mut chunk) = (HeaderParser::new(), vec![0; CHUNK_BYTES]);
    loop {
        let count = file.read(&mut chunk)?;
        let bytes = chunk.get(..count).unwrap_or_default();
        match parser.push(bytes) {
            Ok(Progress::NeedMore) if count > 0 => {}
            Ok(_) => break,
            Err(error) => return Ok(Err(error.into())),
        }
    }
    Ok(FormatParser::finish(Box::new(parser)))
}

impl FormatParser for HeaderParser {
    fn push(&mut self, bytes: &[u8]) -> Result<Progress, FormatError> {
        Ok(self.push(bytes)?)
    }

    fn finish(self: Box<Self>) -> Result<Box<dyn ModelHeader>, FormatError> {
        Ok(Box::new((*self).finish()?))
    }
}

impl ModelHeader for Header {
    fn bytes(&self) -> Option<&[u8]> {
        Some(self.bytes())
    }

    fn digest(&self) -> Digest {
        Digest::of(self.bytes())
    }

    fn size(&self) -> u64 {
        self.bytes().len() as u64
    }

    fn data_offset(&self) -> u64 {
        self.data_offset()
    }

    fn file_layout(&self, file_size: u64) -> Result<FileLayout, FormatError> {
        Ok(self.file_layout(file_size)?)
    }

    fn format(&self) -> &'static FileFormat {
        &FORMAT
    }

    fn tensor_count(&self) -> u64 {
        self.tensors().len() as u64
    }

    fn parameters(&self) -> u64 {
        let elements = self.tensors().map(|tensor| tensor.shape().element_count());
        elements.fold(0, u64::saturating_add)
    }

    fn shard(&self) -> Option<Shard> {
        let value = |key| self.value(key).and_then(|value| value.as_u64());
        let count = value("split.count").filter(|count| *count > 1)?;
        Some(Shard { number: value("split.no"), count, total_tensor_count: value("split.tensors.count") })
    }

    fn as_gguf(&self) -> Option<&Header> {
        Some(self)
    }

    fn metadata(&self) -> Box<dyn Iterator<Item = (&[u8], MetadataValue<'_>)> + '_> {
        Box::new(self.metadata())
    }
}

/// What to do about a GGUF file that is refused.
pub(super) const fn advice(error: &GgufError, origin: FileOrigin) -> &'static str {
    const LAST_PLAUSIBLE_VERSION: u32 = 99;
    match (error, origin) {
        (GgufError::OldVersion { found: 1 }, _) => {
            "version 1 was used in August 2023 only: convert the original model with a current llama.cpp, or pull \
             another GGUF file of it"
        }
        (GgufError::NewVersion { found }, _) if *found <= LAST_PLAUSIBLE_VERSION => {
            "it is newer than this blobd: upgrade blobd"
        }
        (GgufError::Tensor { problem: TensorError::RemovedType { .. }, .. }, _) => {
            "quantise the original model again with a current llama.cpp, or pull another GGUF file of it"
        }
        (GgufError::Misaligned { .. }, _) => {
            "write the file again with another program, or pull another GGUF file of it"
        }
        (_, FileOrigin::Download) => {
            "it is incomplete or damaged at its source: only its publisher can correct this"
        }
        (GgufError::Ends { .. } | GgufError::FileSize { .. }, FileOrigin::Disk)
        | (GgufError::Layout(LayoutError::Outside { expected: Some(_), .. }), FileOrigin::Disk) => {
            "it is incomplete: copy or download it again"
        }
        (_, FileOrigin::Disk) => "it is damaged: copy or download it again",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gguf::{GgmlType, GgufWriter};

    #[test]
    fn file_is_a_shard_if_there_are_more() {
        let shard = |metadata: &[(&str, u16)]| {
            let mut writer = GgufWriter::new();
            for (key, value) in metadata {
                writer.metadata(key, *value).unwrap();
            }
            Header::parse(&writer.header().unwrap()).unwrap().shard()
        };
        let of = |count, number, total_tensor_count| Some(Shard { number, count, total_tensor_count });
        assert_eq!(shard(&[]), None);
        assert_eq!(shard(&[("split.no", 0), ("split.count", 0)]), None);
        assert_eq!(shard(&[("split.no", 0), ("split.count", 1), ("split.tensors.count", 9)]), None);
        assert_eq!(shard(&[("split.count", 2)]), of(2, None, None));
        let all = [("split.no", 1), ("split.count", 3), ("split.tensors.count", 9)];
        assert_eq!(shard(&all), of(3, Some(1), Some(9)));
    }

    #[test]
    fn data_begins_after_the_header_and_its_padding() {
        let mut writer = GgufWriter::new();
        writer.tensor("t", GgmlType::F32, &[8]).unwrap();
        let bytes = writer.header().unwrap();
        let header: Box<dyn ModelHeader> = Box::new(Header::parse(&bytes).unwrap());
        assert_eq!(header.data_offset(), bytes.len() as u64);
        assert_eq!((header.data_offset() % 32, header.tensor_count()), (0, 1));
    }

    #[test]
    fn advice_depends_on_the_error_and_on_where_the_file_is_from() {
        use FileOrigin::{Disk, Download};
        for (error, origin, expected) in [
            (GgufError::OldVersion { found: 1 }, Download, "convert the original model"),
            (GgufError::NewVersion { found: 4 }, Disk, "upgrade blobd"),
            (GgufError::NewVersion { found: 99 }, Download, "upgrade blobd"),
            (GgufError::NewVersion { found: 100 }, Disk, "it is damaged: copy or download it again"),
            (GgufError::NewVersion { found: 100 }, Download, "only its publisher"),
        ] {
            let found = advice(&error, origin);
            assert!(found.contains(expected), "{error}: {found}");
        }
    }
}
