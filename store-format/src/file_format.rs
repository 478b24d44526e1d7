//! The table of model file formats.
//!
//! A format is recognised by a file's first bytes, name or media type. [`HeaderReader`] parses the
//! start of a file of any format into a [`ModelHeader`]: its [`FileLayout`], by which the file is
//! split, and its metadata. [`stream_header`] does the same in less memory. To add a format, write a parser, a `FileFormat` like that in
//! `gguf_format`, and a line in `FORMATS`.

mod gguf_format;
mod kind;
mod safetensors_format;

use std::fmt;
use std::io::{self, Read};

use self::kind::START_BYTES;
pub use self::kind::{FileKind, FileOrigin, FoundFile};
use crate::descriptor::MediaType;
use crate::digest::Digest;
use crate::file_layout::{FileLayout, LayoutError};
use crate::gguf::{GgufError, Header};
pub use crate::gguf::{MetadataValue, Progress};
use crate::safetensors::SafetensorsError;
use crate::tensor::TensorFormat;

/// The formats that are split.
static FORMATS: [&FileFormat; 2] = [&gguf_format::FORMAT, &safetensors_format::FORMAT];
/// Formats that media types name and that are stored without splitting.
const WHOLE_FORMATS: [&str; 1] = ["dduf"];
/// The longest header of any format in bytes, including the padding before its data section.
pub const MAX_HEADER_BYTES: u64 = longest_header();

#[derive(Debug)]
pub struct FileFormat {
    format: TensorFormat,
    title: &'static str,
    extension: &'static str,
    /// Others that files of this format have, with the dot.
    other_extensions: &'static [&'static str],
    /// The longest header with padding, in bytes.
    max_header_bytes: u64,
    /// Whether a file that starts with these bytes, at most [`START_BYTES`], has the format. False as long as they can be
    /// the start of other files. At most one format recognises a file.
    is_start: fn(&[u8]) -> bool,
    parser: fn() -> Box<dyn FormatParser>,
    read: HeaderFn,
}

/// Reads the header at the start of a file. The inner errors are those of the header.
type HeaderFn = fn(&mut dyn Read) -> io::Result<Result<Box<dyn ModelHeader>, FormatError>>;

const fn longest_header() -> u64 {
    let (mut longest, mut rest) = (0, FORMATS.as_slice());
    while let Some((format, others)) = rest.split_first() {
        if format.max_header_bytes > longest {
            longest = format.max_header_bytes;
        }
        rest = others;
    }
    longest
}

impl FileFormat {
    pub const GGUF: &Self = &gguf_format::FORMAT;
    pub const SAFETENSORS: &Self = &safetensors_format::FORMAT;
    /// The format assumed for weights; most media types name none.
    pub const DEFAULT: &Self = Self::GGUF;

    pub const fn tensor_format(&self) -> TensorFormat {
        self.format
    }

    /// The name that registries use, such as `gguf`.
    pub const fn name(&self) -> &'static str {
        self.format.name()
    }

    /// The name for people, such as `GGUF`.
    pub const fn title(&self) -> &'static str {
        self.title
    }

    /// The usual file name extension, with the dot.
    pub const fn extension(&self) -> &'static str {
        self.extension
    }

    /// The format of a file that starts with these bytes: the first 512, or all of a shorter file.
    pub fn from_start(start: &[u8]) -> Option<&'static Self> {
        recognise(start).ok()
    }

    /// Splits a path into the part before the extension and the format; ignores case.
    pub fn split_name(path: &str) -> Option<(&str, &'static Self)> {
        FORMATS.into_iter().find_map(|format| Some((format.stem_of(path)?, format)))
    }

    /// The part of a path before an extension of this format; `None` if it has another one. Ignores case.
    pub fn stem_of<'p>(&self, path: &'p str) -> Option<&'p str> {
        let mut extensions = std::iter::once(&self.extension).chain(self.other_extensions);
        extensions.find_map(|extension| {
            let (stem, end) = path.split_at_checked(path.len().checked_sub(extension.len())?)?;
            end.eq_ignore_ascii_case(extension).then_some(stem)
        })
    }

    /// The format of a file according to its manifest entry. `None` if the file has no tensors, is an
    /// archive, or has another format.
    pub fn announced(media_type: &MediaType, name: Option<&str>) -> Option<&'static Self> {
        let is_named = |format: &str| media_type.as_str().contains(format);
        let named = FORMATS.into_iter().find(|format| is_named(format.name()));
        let is_whole = media_type.archive_of_weights().is_some()
            || (named.is_none() && WHOLE_FORMATS.into_iter().any(is_named));
        if is_whole || !media_type.holds_tensors() {
            return None;
        }
        match name {
            Some(name) => Self::split_name(name).map(|(_stem, format)| format),
            None => Some(named.unwrap_or(Self::DEFAULT)),
        }
    }
}

/// Detects the format of a file and parses its header, incrementally.
#[derive(Debug, Default)]
pub struct HeaderReader {
    /// The first bytes, at most [`START_BYTES`].
    start: Vec<u8>,
    parser: Option<Box<dyn FormatParser>>,
}

impl HeaderReader {
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes the next bytes of the file, any number. Bytes after the header are ignored.
    ///
    /// # Errors
    /// [`FormatError`] at the first byte that proves the header invalid, or when a file of no known format has
    /// shown enough bytes to say what it is; later calls return the same error.
    pub fn push(&mut self, bytes: &[u8]) -> Result<Progress, FormatError> {
        if let Some(parser) = &mut self.parser {
            return parser.push(bytes);
        }
        let missing = START_BYTES.saturating_sub(self.start.len());
        let (start, rest) = bytes.split_at(missing.min(bytes.len()));
        self.start.extend_from_slice(start);
        match recognise(&self.start) {
            Ok(format) => {
                let parser = self.parser.insert((format.parser)());
                parser.push(&self.start)?;
                parser.push(rest)
            }
            // More bytes can say what it is.
            Err(_) if self.start.len() < START_BYTES => Ok(Progress::NeedMore),
            Err(error) => Err(error),
        }
    }

    /// The header.
    pub fn finish(self) -> Result<Box<dyn ModelHeader>, FormatError> {
        match self.parser {
            Some(parser) => parser.finish(),
            None => (recognise(&self.start)?.parser)().finish(),
        }
    }
}

/// Reads the header at the start of `bytes`; what follows it is ignored.
pub fn read_header(bytes: &[u8]) -> Result<Box<dyn ModelHeader>, FormatError> {
    let mut reader = HeaderReader::new();
    reader.push(bytes)?;
    reader.finish()
}

/// Reads the header at the start of a file. Does not keep its bytes, unless the format needs them: a header of 100 MB that is
/// mostly white space takes little memory.
///
/// # Errors
/// Those of the file. The inner ones are those of the header.
pub fn stream_header(file: &mut dyn Read) -> io::Result<Result<Box<dyn ModelHeader>, FormatError>> {
    let mut start = Vec::with_capacity(START_BYTES);
    file.take(START_BYTES as u64).read_to_end(&mut start)?;
    match recognise(&start) {
        Ok(format) => (format.read)(&mut start.as_slice().chain(file)),
        Err(error) => Ok(Err(error)),
    }
}

/// A validated header of any format.
pub trait ModelHeader: fmt::Debug + Send + Sync {
    /// The header's bytes, without padding, if they were kept.
    fn bytes(&self) -> Option<&[u8]>;

    /// The digest of these bytes.
    fn digest(&self) -> Digest;

    /// How many these are.
    fn size(&self) -> u64;

    /// Where the data section starts, in bytes from the start of the file.
    fn data_offset(&self) -> u64;

    /// The layout of a file of `file_size` bytes that starts with this header.
    fn file_layout(&self, file_size: u64) -> Result<FileLayout, FormatError>;

    fn format(&self) -> &'static FileFormat;

    fn tensor_count(&self) -> u64;

    /// The number of elements of all tensors; at most 2^64 - 1.
    fn parameters(&self) -> u64;

    /// The shard fields, if the file is one of several.
    fn shard(&self) -> Option<Shard>;

    /// The header of a GGUF file, whose metadata describes the model.
    fn as_gguf(&self) -> Option<&Header> {
        None
    }

    /// All metadata in the order of the file. Keys may be any bytes, and texts may hold control characters.
    fn metadata(&self) -> Box<dyn Iterator<Item = (&[u8], MetadataValue<'_>)> + '_>;
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    /// Its number, from 0.
    pub number: Option<u64>,
    pub count: u64,
    /// The number of tensors of all shards.
    pub total_tensor_count: Option<u64>,
}

trait FormatParser: fmt::Debug + Send + Sync {
    fn push(&mut self, bytes: &[u8]) -> Result<Progress, FormatError>;

    fn finish(self: Box<Self>) -> Result<Box<dyn ModelHeader>, FormatError>;
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FormatError {
    #[error("wrong format: expected a {expected} file, found {0}", expected = titles())]
    Unknown(FoundFile),
    #[error(transparent)]
    Gguf(#[from] GgufError),
    #[error(transparent)]
    Safetensors(#[from] SafetensorsError),
    #[error(transparent)]
    Layout(#[from] LayoutError),
}

impl FormatError {
    /// Whether the file may have a format that is not split.
    pub const fn is_unknown_format(&self) -> bool {
        matches!(self, Self::Unknown(_))
    }

    /// The error for a file that starts with these bytes, which are those of no known format.
    pub fn unknown(start: &[u8]) -> Self {
        Self::Unknown(FoundFile::new(start.get(..START_BYTES).unwrap_or(start)))
    }

    /// What a user can do about a file from this origin.
    pub const fn advice(&self, origin: FileOrigin) -> &'static str {
        match self {
            Self::Unknown(found) => found.advice(origin),
            Self::Gguf(error) => gguf_format::advice(error, origin),
            Self::Safetensors(error) if error.is_over_limit() => {
                "models that are in use are far below this limit: the file may be damaged"
            }
            Self::Safetensors(_) | Self::Layout(_) => match origin {
                FileOrigin::Disk => "it is incomplete or damaged: copy or download it again",
                FileOrigin::Download => {
                    "it is incomplete or damaged at its source: only its publisher can correct this"
                }
            },
        }
    }
}

fn titles() -> String {
    FORMATS.into_iter().map(|format| format.title).collect::<Vec<_>>().join(" or ")
}

fn recognise(start: &[u8]) -> Result<&'static FileFormat, FormatError> {
    let start = start.get(..START_BYTES).unwrap_or(start);
    FORMATS.into_iter().find(|format| (format.is_start)(start)).ok_or_else(|| FormatError::unknown(start))
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;
    use crate::gguf::MAGIC;
    use crate::gguf::generate::file;
    use crate::recipe::Recipe;
    use crate::safetensors::{Dtype, HeaderWriter};
    use crate::split::{SplitPlan, Splitter};

    /// Pushes a file in pieces of these sizes, repeated.
    fn read_in_pieces(file: &[u8], sizes: &[usize]) -> Result<Box<dyn ModelHeader>, FormatError> {
        let (mut reader, mut rest) = (HeaderReader::new(), file);
        for size in sizes.iter().cycle() {
            let (piece, more) = rest.split_at((*size).min(rest.len()));
            if reader.push(piece)? == Progress::Done || more.is_empty() {
                break;
            }
            rest = more;
        }
        reader.finish()
    }

    proptest! {
        #[test]
        fn incremental_parsing_gives_the_same_layout(
            sample in file(),
            sizes in vec(1..5000_usize, 1..6),
        ) {
            let size = sample.file.len() as u64;
            let expected = Header::parse(&sample.file).unwrap();
            for header in [read_header(&sample.file).unwrap(), read_in_pieces(&sample.file, &sizes).unwrap()] {
                prop_assert_eq!(header.bytes(), Some(expected.bytes()));
                prop_assert_eq!(header.file_layout(size).unwrap(), expected.file_layout(size).unwrap());
                prop_assert_eq!(header.tensor_count(), expected.tensors().len() as u64);
                prop_assert_eq!(header.metadata().count(), expected.metadata().count());
            }
        }

        #[test]
        fn incremental_parsing_fails_for_the_same_reason(
            known in any::<bool>(),
            bytes in vec(any::<u8>(), 0..64),
            sizes in vec(1..10_usize, 1..6),
        ) {
            let bytes = if known { [&MAGIC[..], &bytes].concat() } else { bytes };
            if let (Err(whole), Err(pieces)) = (read_header(&bytes), read_in_pieces(&bytes, &sizes)) {
                prop_assert_eq!(whole.is_unknown_format(), pieces.is_unknown_format());
            }
        }
    }

    #[test]
    fn file_of_another_format_is_refused_once_it_is_recognised_and_stays_refused() {
        let mut reader = HeaderReader::new();
        assert_eq!(reader.push(b"<!d"), Ok(Progress::NeedMore));
        assert_eq!(reader.push(b"octype html>"), Ok(Progress::NeedMore));
        let error = reader.push(&[b' '; 600]).unwrap_err();
        assert_eq!(error.to_string(), "wrong format: expected a GGUF or safetensors file, found a web page");
        assert_eq!(reader.push(b"GGUF"), Err(error.clone()));
        assert_eq!(reader.finish().unwrap_err(), error);
        assert!(read_header(b"PK\x03\x04").unwrap_err().to_string().contains("zip"));
    }

    #[test]
    fn short_file_has_unknown_format() {
        for start in [&b""[..], b"G", b"GGU"] {
            assert!(read_header(start).unwrap_err().is_unknown_format());
        }
        let error = read_header(b"GGUF").unwrap_err();
        assert!(matches!(error, FormatError::Gguf(GgufError::Ends { offset: 4, .. })));
        assert!(!error.is_unknown_format());
    }

    #[test]
    fn refused_header_is_named_and_advised_about_by_its_format() {
        assert_eq!(FileFormat::DEFAULT.title(), "GGUF");
        let old = read_header(b"GGUF\x01\0\0\0").unwrap_err();
        assert!(old.advice(FileOrigin::Disk).contains("version 1"), "{old}");
        let unknown = read_header(b"\x1f\x8b\x08\0").unwrap_err();
        assert!(unknown.advice(FileOrigin::Disk).len() > 20, "{unknown}");
    }

    #[test]
    fn longest_header_is_that_of_one_of_the_formats() {
        let longest = FORMATS.iter().map(|format| format.max_header_bytes).max();
        assert_eq!(longest, Some(MAX_HEADER_BYTES));
        assert_eq!(FileFormat::DEFAULT.max_header_bytes, 33 << 20);
    }

    #[test]
    fn format_is_found_by_file_name() {
        let stem = |path| FileFormat::split_name(path).map(|(stem, format)| (stem, format.name()));
        assert_eq!(stem("a/x-Q4_0.gguf"), Some(("a/x-Q4_0", "gguf")));
        assert_eq!(stem("X.GGUF"), Some(("X", "gguf")));
        assert_eq!(stem(".gguf"), Some(("", "gguf")));
        assert_eq!(
            stem("a/model-00001-of-00002.SafeTensors"),
            Some(("a/model-00001-of-00002", "safetensors"))
        );
        assert_eq!(stem("flux/ae.SFT"), Some(("flux/ae", "safetensors")));
        for path in ["", "x.gguf.txt", "gguf", "größe", "safetensors", "x.safetensors.index.json"] {
            assert_eq!(stem(path), None, "{path}");
        }
        assert_eq!(FileFormat::GGUF.stem_of("x.safetensors"), None);
    }

    #[test]
    fn format_is_found_by_media_type_and_name() {
        let format = |media_type: &str, name| {
            FileFormat::announced(&MediaType::new(media_type), name).map(FileFormat::name)
        };
        for (media_type, name) in [
            (MediaType::OLLAMA_MODEL, None),
            ("application/vnd.docker.ai.gguf.v3", None),
            ("application/vnd.cncf.model.weight.v1.raw", Some("m.GGUF")),
        ] {
            assert_eq!(format(media_type, name), Some("gguf"), "{media_type} {name:?}");
        }
        for (media_type, name) in [
            (MediaType::OLLAMA_MODEL, Some("m.safetensors")),
            ("application/vnd.docker.ai.safetensors", None),
            ("application/vnd.cncf.model.weight.v1.raw", Some("unet/m.safetensors")),
        ] {
            assert_eq!(format(media_type, name), Some("safetensors"), "{media_type} {name:?}");
        }
        for (media_type, name) in [
            // Models with one file per tensor are read by their layers.
            ("application/vnd.ollama.image.tensor", Some("m.safetensors")),
            ("application/vnd.docker.ai.dduf", Some("m.gguf")),
            ("application/vnd.cncf.model.weight.v1.tar", None),
            ("application/vnd.ollama.image.license", None),
        ] {
            assert_eq!(format(media_type, name), None, "{media_type} {name:?}");
        }
    }

    /// Name, type and shape of each tensor.
    type Table = Vec<(String, Dtype, Vec<u64>)>;

    /// A table of tensors with any names, and the file, whose header lists them by name.
    fn safetensors_file() -> impl Strategy<Value = (Table, Vec<u8>)> {
        let dtypes = [Dtype::F4, Dtype::F6_E2M3, Dtype::F6_E3M2, Dtype::Bool, Dtype::BF16, Dtype::C64];
        let tensor = (any::<String>(), prop::sample::select(dtypes.to_vec()), vec(0..9_u64, 0..4));
        (vec(tensor, 0..9), 0..40_usize).prop_map(|(table, spaces)| {
            let (mut writer, mut written, mut size) = (HeaderWriter::new(), Vec::new(), 0);
            for (name, dtype, shape) in table {
                if writer.tensor(&name, dtype, &shape).is_ok() {
                    size += shape.iter().product::<u64>() * dtype.bits() / 8;
                    written.push((name, dtype, shape));
                }
            }
            let mut header = writer.metadata("format", "pt").header().unwrap();
            // The data need not be aligned.
            header.resize(header.len() + spaces, b' ');
            let length = (header.len() as u64 - 8).to_le_bytes();
            header[..8].copy_from_slice(&length);
            header.extend((0..size).map(|place| u8::try_from(place % 251).unwrap()));
            (written, header)
        })
    }

    proptest! {
        #[test]
        fn safetensors_file_is_recognised_split_and_rebuilt(
            (table, file) in safetensors_file(),
            sizes in vec(1..5000_usize, 1..6),
        ) {
            let header = read_in_pieces(&file, &sizes).unwrap();
            prop_assert_eq!(header.format().name(), "safetensors");
            let layout = header.file_layout(file.len() as u64).unwrap();
            prop_assert!(header.file_layout(file.len() as u64 + 1).is_err());
            let found: Vec<_> = layout
                .tensors()
                .iter()
                .map(|tensor| (tensor.name.to_owned(), tensor.type_name.to_string(), tensor.shape.to_vec()))
                .collect();
            let expected: Vec<_> = table
                .iter()
                .map(|(name, dtype, shape)| (name.clone(), dtype.name().to_owned(), shape.clone()))
                .collect();
            let sorted = |mut tensors: Vec<_>| {
                tensors.sort();
                tensors
            };
            prop_assert_eq!(sorted(found), sorted(expected));
            // One blob for each tensor with bytes, and one for the header.
            let plan = SplitPlan::new(layout);
            let with_bytes = plan.tensors().filter(|tensor| tensor.size > 0).count();
            prop_assert_eq!((plan.blobs().len(), plan.literal_count()), (with_bytes + 1, 0));
            let parts = Splitter::new(&plan).push(&file).unwrap();
            let blobs: Vec<&[u8]> = parts.iter().map(|part| part.bytes).collect();
            let digests: Vec<Digest> = blobs.iter().map(|blob| Digest::of(blob)).collect();
            let recipe = plan.recipe(Digest::of(&file), &digests, Vec::new()).unwrap();
            prop_assert_eq!(recipe.format(), Some(TensorFormat::Safetensors));
            prop_assert_eq!(&Recipe::parse(recipe.to_json()).unwrap(), &recipe);
            let mut rebuilt = vec![0; file.len()];
            let read = recipe.pieces().read_at(0, &mut rebuilt, |blob, offset, buffer| {
                let from = digests.iter().position(|digest| *digest == blob).unwrap();
                let start = usize::try_from(offset).unwrap();
                buffer.copy_from_slice(&blobs[from][start..start + buffer.len()]);
                Ok::<_, std::convert::Infallible>(())
            });
            prop_assert_eq!(read, Ok(file.len()));
            prop_assert!(rebuilt == file);
        }
    }

    #[test]
    fn safetensors_header_is_recognised_when_all_of_it_has_arrived() {
        let file = [&16_u64.to_le_bytes()[..], br#" {}             "#].concat();
        let mut reader = HeaderReader::new();
        for byte in &file[..file.len() - 1] {
            assert_eq!(reader.push(&[*byte]), Ok(Progress::NeedMore));
        }
        assert_eq!(reader.push(b" and more"), Ok(Progress::Done));
        assert_eq!(reader.finish().unwrap().bytes(), Some(file.as_slice()));
        let too_long = [&100_000_001_u64.to_le_bytes()[..], b"{"].concat();
        assert!(read_header(&too_long).unwrap_err().is_unknown_format());
        let error = read_header(&file[..20]).unwrap_err();
        assert!(matches!(error, FormatError::Safetensors(SafetensorsError::Truncated { .. })), "{error}");
    }
}
