//! Parses, validates and writes a safetensors header.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Read};

use serde_json::{Map, Value, json};

use super::json::{self, METADATA, RawHeader, RawTensor};
use super::stream::{self, HeaderBytes};
use super::{Dtype, SafetensorsError};
use crate::digest::Digest;
use crate::tensor::Shape;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    data_offset: u64,
    /// Where the last tensor ends.
    data_end: u64,
    metadata: BTreeMap<String, String>,
    /// In the order of the data.
    tensors: Vec<Tensor>,
    /// The indices in `tensors` in the order of their names.
    by_name: Box<[u32]>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    name: Box<str>,
    dtype: Dtype,
    shape: Box<[u64]>,
    offset_in_file: u64,
    size: u64,
}

impl Header {
    /// The longest header read, in bytes: the limit of the `safetensors` library.
    pub const MAX_BYTES: u64 = stream::MAX_BYTES;
    /// The most tensors of a file: as many as a GGUF file may have.
    pub const MAX_TENSORS: usize = json::MAX_TENSORS;
    pub const MAX_DIMENSIONS: usize = Shape::MAX_DIMENSIONS;
    /// The most dimensions of all tensors together: eight for each.
    pub const MAX_TOTAL_DIMENSIONS: usize = json::MAX_TOTAL_DIMENSIONS;
    /// The most entries of the metadata.
    pub const MAX_METADATA: usize = json::MAX_METADATA;
    /// The most bytes of all names and the metadata together, and of any other string. Metadata of training tools has
    /// some MiB.
    pub const MAX_TEXT_BYTES: usize = stream::MAX_TEXT_BYTES;
    /// The longest name of a tensor, in bytes. The format has no limit; this one keeps the description of a tensor below
    /// the size of a frame of the protocol, in which a byte may take six.
    pub const MAX_NAME_BYTES: usize = 64 << 10;
    /// The longest name of a tensor in a file that is [parsed](Self::parse) for its tensors, in bytes.
    pub const MAX_PRINTABLE_NAME_BYTES: usize = 1024;
    /// The size of the length field at the start of a file.
    pub const LENGTH_BYTES: usize = stream::LENGTH_BYTES;

    /// How many bytes of a file [`parse`](Self::parse) needs, by the first eight of it.
    pub fn end(length: [u8; Self::LENGTH_BYTES]) -> Result<u64, SafetensorsError> {
        stream::end(length)
    }

    /// Parses the start of a file of `file_size` bytes; bytes after the header are ignored. Names must be printable.
    pub fn parse(start: &[u8], file_size: u64) -> Result<Self, SafetensorsError> {
        let header = Self::parse_start(start)?;
        header.tensors.iter().try_for_each(|tensor| check_printable(&tensor.name))?;
        header.check_file_size(file_size)?;
        Ok(header)
    }

    /// Parses the start of a file; bytes after the header are ignored. Names are any text up to
    /// [`MAX_NAME_BYTES`](Self::MAX_NAME_BYTES), never a path: escape them before they reach a terminal.
    pub fn parse_start(start: &[u8]) -> Result<Self, SafetensorsError> {
        let mut rest = start;
        match Self::read(&mut rest) {
            Ok(read) => read.map(|(header, _digest)| header),
            // Reading memory does not fail.
            Err(_) => Err(SafetensorsError::Truncated { found: 0, expected: start.len() as u64 }),
        }
    }

    /// As [`parse_start`](Self::parse_start), for a file that is read from its start: of its bytes, few are in memory at
    /// once. Also returns the digest of the header's bytes, with their length.
    ///
    /// # Errors
    /// Those of the file. The inner ones are those of the header.
    pub fn read(file: &mut dyn Read) -> io::Result<Result<(Self, Digest), SafetensorsError>> {
        let mut json = match HeaderBytes::open(file)? {
            Ok(json) => json,
            Err(refused) => return Ok(Err(refused)),
        };
        let raw = RawHeader::parse(&mut json)?;
        let header = raw.and_then(|raw| Self::from_raw(raw, json.end()));
        Ok(header.map(|header| (header, json.digest())))
    }

    fn from_raw(raw: RawHeader, data_offset: u64) -> Result<Self, SafetensorsError> {
        let RawHeader { metadata, tensors: raw } = raw;
        let mut tensors = check_tensors(without_replaced(raw), data_offset)?;
        // Sorts an empty tensor before the one at the same offset.
        tensors.sort_by_key(|tensor| (tensor.offset_in_file, tensor.size));
        let data_end = check_cover(&tensors, data_offset)?;
        let mut by_name: Box<[u32]> = (0..).take(tensors.len()).collect();
        let name = |place: u32| tensors.get(place as usize).map(|tensor| &tensor.name);
        by_name.sort_unstable_by(|a, b| name(*a).cmp(&name(*b)));
        Ok(Self { data_offset, data_end, metadata, tensors, by_name })
    }

    /// The last tensor must end at the end of the file.
    pub fn check_file_size(&self, file_size: u64) -> Result<(), SafetensorsError> {
        let found = self.data_end;
        if found == file_size { Ok(()) } else { Err(SafetensorsError::End { found, file_size }) }
    }

    /// Where the data starts, in bytes from the start of the file.
    pub const fn data_offset(&self) -> u64 {
        self.data_offset
    }

    pub const fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// The tensors in the order of their data.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// The tensor with this name.
    pub fn tensor(&self, name: &str) -> Option<&Tensor> {
        let at = |place: &u32| self.tensors.get(*place as usize);
        let place =
            self.by_name.binary_search_by(|place| at(place).map(Tensor::name).cmp(&Some(name))).ok()?;
        self.by_name.get(place).and_then(at)
    }
}

impl Tensor {
    /// Its name: the key in the header.
    pub fn name(&self) -> &str {
        &self.name
    }

    pub const fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Its dimensions, the slowest first; a scalar has none.
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    pub const fn offset_in_file(&self) -> u64 {
        self.offset_in_file
    }

    pub const fn size_bytes(&self) -> u64 {
        self.size
    }
}

/// Makes a header from metadata and tensors, in the order of their data.
#[derive(Clone, Debug, Default)]
pub struct HeaderWriter {
    metadata: BTreeMap<String, String>,
    entries: Map<String, Value>,
    names: BTreeSet<String>,
    position: u64,
}

impl HeaderWriter {
    pub fn new() -> Self {
        Self::default()
    }

    pub fn metadata(&mut self, key: impl Into<String>, value: impl Into<String>) -> &mut Self {
        self.metadata.insert(key.into(), value.into());
        self
    }

    /// Adds a tensor after the previous one; `shape` has the slowest dimension first.
    pub fn tensor(&mut self, name: &str, dtype: Dtype, shape: &[u64]) -> Result<&mut Self, SafetensorsError> {
        check_name(name)?;
        if name == METADATA || !self.names.insert(name.to_owned()) {
            return Err(SafetensorsError::Name { length: name.len(), problem: "is taken" });
        }
        let size = size_bytes(dtype, shape).and_then(|size| self.position.checked_add(size));
        let Some(end) = size else {
            return Err(SafetensorsError::Size { name: name.to_owned(), dtype, shape: shape.to_vec() });
        };
        let entry = json!({ "dtype": dtype.name(), "shape": shape, "data_offsets": [self.position, end] });
        self.entries.insert(name.to_owned(), entry);
        self.position = end;
        Ok(self)
    }

    /// The bytes before the data: the length, the JSON, and spaces up to a multiple of eight.
    pub fn header(&self) -> Result<Vec<u8>, SafetensorsError> {
        let mut entries = self.entries.clone();
        if !self.metadata.is_empty() {
            entries.insert(METADATA.to_owned(), json!(self.metadata));
        }
        let mut json = Value::Object(entries).to_string().into_bytes();
        json.resize(json.len().next_multiple_of(Header::LENGTH_BYTES), b' ');
        let length = (json.len() as u64).to_le_bytes();
        Header::end(length)?;
        Ok([&length, json.as_slice()].concat())
    }
}

/// The size of a tensor; `None` if it overflows or is not a whole number of bytes. As in the library, an overflow before a
/// dimension of zero is one.
pub(super) fn size_bytes(dtype: Dtype, shape: &[u64]) -> Option<u64> {
    let count = shape.iter().try_fold(1_u64, |count, dimension| count.checked_mul(*dimension))?;
    let bits = count.checked_mul(dtype.bits())?;
    bits.is_multiple_of(8).then_some(bits / 8)
}

/// Any text is a name if a frame of the protocol can carry it.
fn check_name(name: &str) -> Result<(), SafetensorsError> {
    match name.len() {
        0..=Header::MAX_NAME_BYTES => Ok(()),
        length => Err(SafetensorsError::Name { length, problem: "too long" }),
    }
}

fn check_printable(name: &str) -> Result<(), SafetensorsError> {
    let problem = match name {
        "" => "is empty",
        _ if name.len() > Header::MAX_PRINTABLE_NAME_BYTES => "too long",
        _ if name.chars().any(char::is_control) => "has control characters",
        _ => return Ok(()),
    };
    Err(SafetensorsError::Name { length: name.len(), problem })
}

/// Without the entries whose name comes again after them.
fn without_replaced(mut raw: Vec<RawTensor>) -> Vec<RawTensor> {
    let mut by_name: Vec<usize> = (0..raw.len()).collect();
    let name = |place: usize| raw.get(place).map(|tensor| &tensor.name);
    by_name.sort_unstable_by(|a, b| (name(*a), a).cmp(&(name(*b), b)));
    let pairs = by_name.array_windows().filter(|[first, second]| name(*first) == name(*second));
    let replaced: BTreeSet<usize> = pairs.map(|[first, _]| *first).collect();
    if !replaced.is_empty() {
        let mut places = 0..;
        raw.retain(|_| places.next().is_some_and(|place| !replaced.contains(&place)));
    }
    raw
}

fn check_tensors(raw: Vec<RawTensor>, data_offset: u64) -> Result<Vec<Tensor>, SafetensorsError> {
    raw.into_iter().map(|tensor| check_tensor(tensor, data_offset)).collect()
}

fn check_tensor(raw: RawTensor, data_offset: u64) -> Result<Tensor, SafetensorsError> {
    let RawTensor { name, dtype, shape, data_offsets: (begin, end) } = raw;
    check_name(&name)?;
    let Some(size) = size_bytes(dtype, &shape) else {
        return Err(SafetensorsError::Size { name: name.into(), dtype, shape: shape.into() });
    };
    match (end.checked_sub(begin), data_offset.checked_add(begin), data_offset.checked_add(end)) {
        (Some(found), Some(offset_in_file), Some(_)) if found == size => {
            Ok(Tensor { name, dtype, shape, offset_in_file, size })
        }
        _ => Err(SafetensorsError::Length { name: name.into(), begin, end, expected: size }),
    }
}

/// Checks that the tensors cover the data exactly once; returns where the last one ends.
fn check_cover(tensors: &[Tensor], data_offset: u64) -> Result<u64, SafetensorsError> {
    let mut position = data_offset;
    for Tensor { name, offset_in_file, size, .. } in tensors {
        if *offset_in_file != position {
            return Err(SafetensorsError::Position {
                name: name.to_string(),
                begin: offset_in_file - data_offset,
                expected: position - data_offset,
            });
        }
        // `check_tensor` has proved that the end fits.
        position = position.saturating_add(*size);
    }
    Ok(position)
}
