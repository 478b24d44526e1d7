//! Parses and validates a safetensors header.

use std::collections::{BTreeMap, HashMap};

use super::json::{RawHeader, RawTensor, TOO_MANY};
use super::{Dtype, MAX_DIMENSIONS, MAX_HEADER_BYTES, MAX_TENSORS, SafetensorsError};

/// A checked header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    data_offset: u64,
    /// Where the last tensor ends.
    data_end: u64,
    metadata: BTreeMap<String, String>,
    /// In the order of the data.
    tensors: Vec<Tensor>,
    /// The index in `tensors` by name.
    places: HashMap<Box<str>, usize>,
}

/// A tensor of a safetensors file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    name: String,
    dtype: Dtype,
    shape: Vec<u64>,
    offset_in_file: u64,
    size: u64,
}

impl Header {
    /// The longest header read, in bytes: the limit of the `safetensors` library.
    pub const MAX_BYTES: u64 = MAX_HEADER_BYTES;
    /// The most tensors of a file: as many as a GGUF file may have.
    pub const MAX_TENSORS: usize = MAX_TENSORS;
    /// The most dimensions of a tensor.
    pub const MAX_DIMENSIONS: usize = MAX_DIMENSIONS;
    /// The longest name of a tensor, in bytes. The format has no limit; this one keeps the description of a tensor below
    /// the size of a frame of the protocol, in which a byte may take six.
    pub const MAX_NAME_BYTES: usize = 64 << 10;
    /// The longest name of a tensor in a file that is [parsed](Self::parse) for its tensors, in bytes.
    pub const MAX_PRINTABLE_NAME_BYTES: usize = 1024;
    /// The size of the length field at the start of a file.
    pub const LENGTH_BYTES: usize = 8;

    /// How many bytes of a file [`parse`](Self::parse) needs, by the first eight of it.
    ///
    /// # Errors
    /// [`SafetensorsError::HeaderLength`] when that is more than any header has.
    pub fn end(length: [u8; Self::LENGTH_BYTES]) -> Result<u64, SafetensorsError> {
        let found = u64::from_le_bytes(length);
        if found > Self::MAX_BYTES {
            return Err(SafetensorsError::HeaderLength { found });
        }
        Ok(found + Self::LENGTH_BYTES as u64)
    }

    /// Parses the start of a file of `file_size` bytes; bytes after the header are ignored. Names must be printable.
    ///
    /// # Errors
    /// [`SafetensorsError`] when `start` does not contain the whole header, the header is invalid, or its tensors do
    /// not end at the end of the file.
    pub fn parse(start: &[u8], file_size: u64) -> Result<Self, SafetensorsError> {
        let header = Self::parse_start(start)?;
        header.tensors.iter().try_for_each(|tensor| check_printable(&tensor.name))?;
        header.check_file_size(file_size)?;
        Ok(header)
    }

    /// Parses the start of a file; bytes after the header are ignored. Names are any text up to
    /// [`MAX_NAME_BYTES`](Self::MAX_NAME_BYTES), never a path: escape them before they reach a terminal.
    ///
    /// # Errors
    /// [`SafetensorsError`] when `start` does not contain the whole header, or the header is invalid.
    pub fn parse_start(start: &[u8]) -> Result<Self, SafetensorsError> {
        let truncated = |expected| SafetensorsError::Truncated { found: start.len() as u64, expected };
        let (length, rest) = start.split_first_chunk().ok_or_else(|| truncated(Self::LENGTH_BYTES as u64))?;
        let data_offset = Self::end(*length)?;
        let json_bytes = usize::try_from(data_offset).unwrap_or(usize::MAX) - Self::LENGTH_BYTES;
        let json = rest.get(..json_bytes).ok_or_else(|| truncated(data_offset))?;
        let raw: RawHeader = serde_json::from_slice(json).map_err(|error| refusal(&error))?;
        let mut tensors = check_tensors(raw.tensors, data_offset)?;
        // Sorts an empty tensor before the one at the same offset.
        tensors.sort_by_key(|tensor| (tensor.offset_in_file, tensor.size));
        let data_end = check_cover(&tensors, data_offset)?;
        let named = tensors.iter().enumerate();
        let places = named.map(|(place, tensor)| (tensor.name.as_str().into(), place)).collect();
        Ok(Self { data_offset, data_end, metadata: raw.metadata, tensors, places })
    }

    /// The last tensor must end at the end of the file.
    ///
    /// # Errors
    /// [`SafetensorsError::End`]
    pub fn check_file_size(&self, file_size: u64) -> Result<(), SafetensorsError> {
        let found = self.data_end;
        if found == file_size { Ok(()) } else { Err(SafetensorsError::End { found, file_size }) }
    }

    /// Where the data starts, in bytes from the start of the file.
    #[must_use]
    pub const fn data_offset(&self) -> u64 {
        self.data_offset
    }

    /// The metadata.
    #[must_use]
    pub const fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// The tensors in the order of their data.
    #[must_use]
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// The tensor with this name, in constant time.
    #[must_use]
    pub fn tensor(&self, name: &str) -> Option<&Tensor> {
        self.tensors.get(*self.places.get(name)?)
    }
}

impl Tensor {
    /// Its name: the key in the header.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its element type.
    #[must_use]
    pub const fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Its dimensions, the slowest first; a scalar has none.
    #[must_use]
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// Its offset in the file.
    #[must_use]
    pub const fn offset_in_file(&self) -> u64 {
        self.offset_in_file
    }

    /// Its size in bytes.
    #[must_use]
    pub const fn size_bytes(&self) -> u64 {
        self.size
    }
}

/// The size of a tensor; `None` if it overflows or is not a whole number of bytes.
pub(super) fn size_bytes(dtype: Dtype, shape: &[u64]) -> Option<u64> {
    // Zero is checked first: an intermediate product above 2^64 is then no overflow.
    if shape.contains(&0) {
        return Some(0);
    }
    let count = shape.iter().try_fold(1_u64, |count, dimension| count.checked_mul(*dimension))?;
    let bits = u128::from(count) * u128::from(dtype.bits());
    u64::try_from(bits / 8).ok().filter(|_| bits.is_multiple_of(8))
}

/// Any text is a name, but for a length that no frame of the protocol could carry.
pub(super) fn check_name(name: &str) -> Result<(), SafetensorsError> {
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

fn check_tensors(raw: Vec<(String, RawTensor)>, data_offset: u64) -> Result<Vec<Tensor>, SafetensorsError> {
    raw.into_iter().map(|(name, tensor)| check_tensor(name, tensor, data_offset)).collect()
}

fn check_tensor(name: String, raw: RawTensor, data_offset: u64) -> Result<Tensor, SafetensorsError> {
    const SHOWN_CHARS: usize = 16;
    check_name(&name)?;
    let RawTensor { dtype, shape, data_offsets: (begin, end) } = raw;
    let Some(dtype) = Dtype::from_name(&dtype) else {
        let found = dtype.chars().take(SHOWN_CHARS).collect();
        return Err(SafetensorsError::UnknownDtype { name, found });
    };
    if shape.len() > Header::MAX_DIMENSIONS {
        return Err(SafetensorsError::Rank { name, found: shape.len() });
    }
    let Some(size) = size_bytes(dtype, &shape) else {
        return Err(SafetensorsError::Size { name, dtype, shape });
    };
    match (end.checked_sub(begin), data_offset.checked_add(begin), data_offset.checked_add(end)) {
        (Some(found), Some(offset_in_file), Some(_)) if found == size => {
            Ok(Tensor { name, dtype, shape, offset_in_file, size })
        }
        _ => Err(SafetensorsError::Length { name, begin, end, expected: size }),
    }
}

/// Checks that the tensors cover the data exactly once; returns where the last one ends.
fn check_cover(tensors: &[Tensor], data_offset: u64) -> Result<u64, SafetensorsError> {
    let mut position = data_offset;
    for Tensor { name, offset_in_file, size, .. } in tensors {
        if *offset_in_file != position {
            return Err(SafetensorsError::Position {
                name: name.clone(),
                begin: offset_in_file - data_offset,
                expected: position - data_offset,
            });
        }
        // `check_tensor` has proved that the end fits.
        position = position.saturating_add(*size);
    }
    Ok(position)
}

fn refusal(error: &serde_json::Error) -> SafetensorsError {
    const SHOWN_CHARS: usize = 200;
    let text = error.to_string();
    if text.starts_with(TOO_MANY) {
        return SafetensorsError::TooManyTensors;
    }
    // The parser quotes unknown input, including control characters.
    let harmless = |c: char| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c };
    SafetensorsError::Json { reason: text.chars().take(SHOWN_CHARS).map(harmless).collect() }
}
