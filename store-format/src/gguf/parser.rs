//! An incremental parser of GGUF headers.
//!
//! The parser keeps the header's bytes once and ranges into them. It resumes after the last complete
//! field, also inside an array of strings, so only an incomplete entry is parsed again.

use std::fmt;

use super::cursor::{ByteOrder, Cursor, Stop};
use super::error::{GgufError, printable};
use super::header::{Header, MetadataRecord, Preamble, Span, TensorRecord};
use super::value::MetadataValue;
use super::value_type::ValueType;
use super::{ALIGNMENT_KEY, DEFAULT_ALIGNMENT, MAGIC, MAX_ALIGNMENT};
use crate::ggml_type::GgmlType;
use crate::tensor::{Shape, TensorError, TensorInfo, check_name, size_bytes};

/// Parses the header of a file incrementally.
pub struct HeaderParser {
    state: State,
    /// The bytes pushed, up to the end of the header.
    bytes: Vec<u8>,
    /// The bytes before it have been parsed.
    position: usize,
    preamble: Preamble,
    alignment: u32,
    metadata: Vec<MetadataRecord>,
    tensors: Vec<TensorRecord>,
    dimensions: Vec<u64>,
}

impl Header {
    /// Reads the header at the start of `bytes`; what follows it is ignored.
    pub fn parse(bytes: &[u8]) -> Result<Self, GgufError> {
        let mut parser = HeaderParser::new();
        parser.push(bytes)?;
        parser.finish()
    }

    /// The header at the start of `bytes`, without a copy of them.
    pub(super) fn from_bytes(bytes: Vec<u8>) -> Result<Self, GgufError> {
        let mut parser = HeaderParser { bytes, ..HeaderParser::new() };
        parser.continue_parsing()?;
        parser.finish()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    NeedMore,
    /// The header is complete; further bytes are ignored.
    Done,
}

impl HeaderParser {
    pub fn new() -> Self {
        let preamble = Preamble { order: ByteOrder::Little, version: 0, tensor_count: 0, key_count: 0 };
        Self {
            state: State::Preamble,
            bytes: Vec::new(),
            position: 0,
            preamble,
            alignment: DEFAULT_ALIGNMENT,
            metadata: Vec::new(),
            tensors: Vec::new(),
            dimensions: Vec::new(),
        }
    }

    /// Takes the next bytes of the file, any number. Bytes after the header are ignored.
    ///
    /// # Errors
    /// [`GgufError`] at the first byte that proves the header invalid; later calls return the same
    /// error.
    pub fn push(&mut self, bytes: &[u8]) -> Result<Progress, GgufError> {
        // In pieces, so that only a little more than the header is copied from a whole file.
        for piece in bytes.chunks(PIECE_BYTES) {
            match &self.state {
                State::Done => break,
                State::Refused(error) => return Err(error.clone()),
                _ => self.push_piece(piece)?,
            }
        }
        Ok(if matches!(self.state, State::Done) { Progress::Done } else { Progress::NeedMore })
    }

    /// The header.
    pub fn finish(self) -> Result<Header, GgufError> {
        let inside = match self.state {
            State::Done => return Ok(self.into_header()),
            State::Refused(error) => return Err(error),
            State::Preamble => "its first 24 bytes".to_owned(),
            State::Metadata | State::Strings { .. } => {
                format!("metadata entry {} of {}", self.metadata.len() + 1, self.preamble.key_count)
            }
            State::Tensors => {
                format!("tensor info {} of {}", self.tensors.len() + 1, self.preamble.tensor_count)
            }
        };
        Err(GgufError::Ends { offset: self.bytes.len() as u64, inside })
    }

    fn push_piece(&mut self, piece: &[u8]) -> Result<(), GgufError> {
        reserve(&mut self.bytes, piece.len());
        self.bytes.extend_from_slice(piece);
        self.continue_parsing()
    }

    fn continue_parsing(&mut self) -> Result<(), GgufError> {
        match self.advance() {
            Ok(()) => self.bytes.truncate(self.position),
            Err(Stop::NeedMore) => {}
            Err(Stop::Refused(error)) => {
                *self = Self { state: State::Refused(error.clone()), ..Self::new() };
                return Err(error);
            }
        }
        Ok(())
    }

    fn advance(&mut self) -> Result<(), Stop> {
        loop {
            match &self.state {
                State::Preamble => self.read_preamble()?,
                State::Metadata if self.metadata.len() < self.preamble.key_count => self.read_entry()?,
                State::Metadata => self.end_metadata()?,
                State::Strings { entry, left } => self.read_strings(*entry, *left)?,
                State::Tensors if self.tensors.len() < self.preamble.tensor_count => self.read_tensor()?,
                State::Tensors => self.end_tensors()?,
                State::Done | State::Refused(_) => return Ok(()),
            }
        }
    }

    fn read_preamble(&mut self) -> Result<(), Stop> {
        let mut cursor = Cursor::new(&self.bytes, 0, ByteOrder::Little);
        let found = cursor.number::<4>()?;
        if found != MAGIC {
            return Err(GgufError::Magic { found }.into());
        }
        let (order, version) = read_version(&mut cursor)?;
        let mut cursor = Cursor::new(&self.bytes, cursor.position(), order);
        let tensor_count = read_count(&mut cursor, "tensors", Header::MAX_TENSORS)?;
        let key_count = read_count(&mut cursor, "metadata keys", Header::MAX_KEYS)?;
        self.position = cursor.position();
        self.preamble = Preamble { order, version, tensor_count, key_count };
        self.state = State::Metadata;
        Ok(())
    }

    /// Reads a metadata entry, or only its start if it is an array of strings.
    fn read_entry(&mut self) -> Result<(), Stop> {
        let mut cursor = self.cursor();
        let (key, key_span) = read_key(&mut cursor)?;
        let start = cursor.position();
        let value_type = read_value_type(&mut cursor, key)?;
        let strings = match value_type {
            ValueType::Array => read_array(&mut cursor, key)?,
            ValueType::String => cursor.string().map(|_| None)?,
            _ => cursor.take(value_type.least_bytes()).map(|_| None)?,
        };
        let entry = MetadataRecord { key: key_span, value: Span::new(start, cursor.position()) };
        self.position = cursor.position();
        match strings {
            Some(left) => self.state = State::Strings { entry, left },
            None => self.end_entry(entry)?,
        }
        Ok(())
    }

    /// Skips the strings of an array that have arrived.
    fn read_strings(&mut self, mut entry: MetadataRecord, mut left: usize) -> Result<(), Stop> {
        let mut cursor = self.cursor();
        let mut stop = None;
        while left > 0 && stop.is_none() {
            let position = cursor.position();
            match cursor.string() {
                Ok(_) => left -= 1,
                Err(reason) => {
                    cursor = Cursor::new(&self.bytes, position, self.preamble.order);
                    stop = Some(reason);
                }
            }
        }
        let position = cursor.position();
        self.position = position;
        self.state = State::Strings { entry, left };
        if let Some(stop) = stop {
            return Err(stop);
        }
        entry.value = entry.value.ending_at(position);
        self.state = State::Metadata;
        self.end_entry(entry)
    }

    fn end_entry(&mut self, entry: MetadataRecord) -> Result<(), Stop> {
        if entry.key.slice(&self.bytes) == ALIGNMENT_KEY.as_bytes() {
            self.alignment = check_alignment(entry.value.slice(&self.bytes), self.preamble.order)?;
        }
        self.metadata.push(entry);
        Ok(())
    }

    fn end_metadata(&mut self) -> Result<(), Stop> {
        let keys = self.metadata.iter().map(|entry| entry.key.slice(&self.bytes));
        if let Some(key) = duplicate(keys) {
            return Err(GgufError::DuplicateKey { key: printable(key) }.into());
        }
        self.state = State::Tensors;
        Ok(())
    }

    fn read_tensor(&mut self) -> Result<(), Stop> {
        let mut cursor = self.cursor();
        let start = cursor.position();
        let (name, name_span) = read_name(&mut cursor)?;
        let refused = |problem| tensor_error(name.as_bytes(), start, problem);
        let rank = usize::try_from(cursor.u32()?).unwrap_or(usize::MAX);
        if rank > Shape::MAX_DIMENSIONS {
            return Err(refused(TensorError::Rank { found: rank as u64 }).into());
        }
        let dimensions = (0..rank).map(|_| cursor.u64()).collect::<Result<Vec<_>, _>>()?;
        let shape = Shape::new(&dimensions).map_err(refused)?;
        let ggml_type = GgmlType::from_id(cursor.u32()?);
        size_bytes(ggml_type, shape).map_err(refused)?;
        let offset = cursor.u64()?;
        self.position = cursor.position();
        let first = self.dimensions.len();
        self.dimensions.extend(dimensions);
        let dimensions = Span::new(first, self.dimensions.len());
        let record = TensorRecord { name: name_span, ggml_type, dimensions, offset };
        self.tensors.push(record);
        Ok(())
    }

    fn end_tensors(&mut self) -> Result<(), Stop> {
        let names = self.tensors.iter().map(|tensor| tensor.name.slice(&self.bytes));
        if let Some(name) = duplicate(names) {
            return Err(GgufError::DuplicateTensor { name: printable(name) }.into());
        }
        self.state = State::Done;
        Ok(())
    }

    fn cursor(&self) -> Cursor<'_> {
        Cursor::new(&self.bytes, self.position, self.preamble.order)
    }

    fn into_header(self) -> Header {
        let Self { bytes, preamble, alignment, metadata, tensors, dimensions, .. } = self;
        Header { preamble, alignment, bytes, metadata, tensors, dimensions }
    }
}

impl Default for HeaderParser {
    fn default() -> Self {
        Self::new()
    }
}

/// The state instead of the content, which may be megabytes.
impl fmt::Debug for HeaderParser {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HeaderParser")
            .field("state", &self.state)
            .field("position", &self.position)
            .finish_non_exhaustive()
    }
}

#[derive(Debug)]
enum State {
    Preamble,
    Metadata,
    /// Inside the value of `entry`, with `left` strings to come.
    Strings {
        entry: MetadataRecord,
        left: usize,
    },
    Tensors,
    Done,
    Refused(GgufError),
}

/// The size of a copy of pushed bytes, which may be after the header.
const PIECE_BYTES: usize = 64 << 10;

/// Grows the buffer by doubling, limited to the longest header, so that a hostile file cannot use twice
/// that memory.
fn reserve(bytes: &mut Vec<u8>, more: usize) {
    let needed = bytes.len().saturating_add(more);
    if needed > bytes.capacity() {
        let longest = usize::try_from(Header::MAX_BYTES).unwrap_or(usize::MAX).saturating_add(PIECE_BYTES);
        let capacity = bytes.capacity().saturating_mul(2).min(longest).max(needed);
        bytes.reserve_exact(capacity.saturating_sub(bytes.len()));
    }
}

/// The version and the byte order, which follows from it: the lower half of a version is never zero.
fn read_version(cursor: &mut Cursor<'_>) -> Result<(ByteOrder, u32), Stop> {
    let little = cursor.u32()?;
    let (order, found) = match little {
        0 => (ByteOrder::Little, 0),
        _ if little.trailing_zeros() >= 16 => (ByteOrder::Big, little.swap_bytes()),
        _ => (ByteOrder::Little, little),
    };
    match found {
        2 | 3 => Ok((order, found)),
        0 | 1 => Err(GgufError::OldVersion { found }.into()),
        _ => Err(GgufError::NewVersion { found }.into()),
    }
}

fn read_count(cursor: &mut Cursor<'_>, what: &'static str, limit: u64) -> Result<usize, Stop> {
    let offset = cursor.position() as u64;
    let found = cursor.u64()?;
    let count = usize::try_from(found).ok().filter(|_| found <= limit);
    count.ok_or_else(|| GgufError::Count { what, offset, found, limit }.into())
}

fn read_key<'a>(cursor: &mut Cursor<'a>) -> Result<(&'a [u8], Span), Stop> {
    let offset = cursor.position() as u64;
    let key = cursor.string()?;
    if key.is_empty() {
        return Err(GgufError::EmptyKey { offset }.into());
    }
    Ok((key, Span::new(cursor.position().saturating_sub(key.len()), cursor.position())))
}

fn read_value_type(cursor: &mut Cursor<'_>, key: &[u8]) -> Result<ValueType, Stop> {
    let offset = cursor.position() as u64;
    let found = cursor.u32()?;
    let known = ValueType::from_id(found);
    known.ok_or_else(|| GgufError::ValueType { key: printable(key), offset, found }.into())
}

/// Skips an array. For an array of strings, skips only its start and returns the number of strings.
fn read_array(cursor: &mut Cursor<'_>, key: &[u8]) -> Result<Option<usize>, Stop> {
    let offset = cursor.position() as u64;
    let element = read_value_type(cursor, key)?;
    if element == ValueType::Array {
        // Nested arrays could overflow the stack of a recursive parser.
        return Err(GgufError::NestedArray { key: printable(key), offset }.into());
    }
    let count = cursor.count(element.least_bytes() as u64)?;
    if element == ValueType::String {
        return Ok(Some(count));
    }
    cursor.take(count.saturating_mul(element.least_bytes()))?;
    Ok(None)
}

/// Checks the value of `general.alignment`: its type's id and its bytes.
fn check_alignment(value: &[u8], order: ByteOrder) -> Result<u32, Stop> {
    let mut cursor = Cursor::new(value, 0, order);
    let found = ValueType::from_id(cursor.u32()?).ok_or(Stop::NeedMore)?;
    let MetadataValue::U32(alignment) = MetadataValue::read(&mut cursor, found)? else {
        return Err(GgufError::AlignmentType { found }.into());
    };
    if !alignment.is_power_of_two() || alignment > MAX_ALIGNMENT {
        return Err(GgufError::Alignment { found: alignment }.into());
    }
    Ok(alignment)
}

fn read_name<'a>(cursor: &mut Cursor<'a>) -> Result<(&'a str, Span), Stop> {
    let start = cursor.position();
    let length = cursor.count(1)?;
    if length > TensorInfo::MAX_NAME_BYTES {
        // Refused by its length; the error contains the part of the name that has arrived.
        let problem = TensorError::NameLength { found: length as u64 };
        return Err(tensor_error(cursor.rest(), start, problem).into());
    }
    let bytes = cursor.take(length)?;
    let name = check_name(bytes).map_err(|problem| tensor_error(bytes, start, problem))?;
    Ok((name, Span::new(cursor.position().saturating_sub(length), cursor.position())))
}

fn tensor_error(name: &[u8], start: usize, problem: TensorError) -> GgufError {
    GgufError::Tensor { name: printable(name), offset: start as u64, problem }
}

/// The first of two equal names. Sorts, because comparing all pairs takes a minute for 100,000 names.
fn duplicate<'a>(names: impl Iterator<Item = &'a [u8]>) -> Option<&'a [u8]> {
    let mut sorted: Vec<&[u8]> = names.collect();
    sorted.sort_unstable();
    sorted.array_windows().find_map(|[a, b]| (a == b).then_some(*a))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffer_doubles_but_never_beyond_the_longest_header() {
        let longest = usize::try_from(Header::MAX_BYTES).unwrap() + PIECE_BYTES;
        for (capacity, length, more, expected) in [
            (0, 0, 10, 10),
            (10, 9, 1, 10),
            (10, 10, 1, 20),
            (10, 10, 30, 40),
            (longest - 9, longest - 9, 1, longest),
            (longest, longest, 1, longest + 1),
        ] {
            let mut bytes = Vec::with_capacity(capacity);
            bytes.resize(length, 0);
            reserve(&mut bytes, more);
            assert_eq!(bytes.capacity(), expected, "{length} of {capacity} bytes and {more} more");
        }
    }
}
