//! A bounded cursor over header bytes that may be incomplete.
//!
//! Only this module converts header bytes to numbers and ranges. It reports that more bytes are
//! needed, and refuses a field at once if it cannot fit a header of the largest size.

use super::MAX_HEADER_BYTES;
use super::error::GgufError;

/// The byte order of all numbers in a file, including its tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ByteOrder {
    /// Least significant byte first: practically every file.
    Little,
    /// Most significant byte first: files converted for big-endian machines.
    Big,
}

impl ByteOrder {
    /// Converts the bytes of a number between this order and little-endian.
    pub(super) fn swap<const N: usize>(self, mut bytes: [u8; N]) -> [u8; N] {
        if self == Self::Big {
            bytes.reverse();
        }
        bytes
    }
}

#[derive(Debug)]
pub(super) enum Stop {
    /// The bytes end inside the field.
    NeedMore,
    Refused(GgufError),
}

impl From<GgufError> for Stop {
    fn from(error: GgufError) -> Self {
        Self::Refused(error)
    }
}

pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    position: usize,
    order: ByteOrder,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(bytes: &'a [u8], position: usize, order: ByteOrder) -> Self {
        Self { bytes, position, order }
    }

    pub(super) fn position(&self) -> usize {
        self.position
    }

    pub(super) fn order(&self) -> ByteOrder {
        self.order
    }

    pub(super) fn take(&mut self, length: usize) -> Result<&'a [u8], Stop> {
        let end = self.end_of(length as u64, 1)?;
        let bytes = self.bytes.get(self.position..end).ok_or(Stop::NeedMore)?;
        self.position = end;
        Ok(bytes)
    }

    /// The next number's bytes, least significant first.
    pub(super) fn number<const N: usize>(&mut self) -> Result<[u8; N], Stop> {
        let bytes = self.take(N)?.first_chunk::<N>().ok_or(Stop::NeedMore)?;
        Ok(self.order.swap(*bytes))
    }

    pub(super) fn u32(&mut self) -> Result<u32, Stop> {
        self.number().map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self) -> Result<u64, Stop> {
        self.number().map(u64::from_le_bytes)
    }

    /// A count of items of at least `size` bytes each; refused if they cannot fit the header.
    pub(super) fn count(&mut self, size: u64) -> Result<usize, Stop> {
        let count = self.u64()?;
        self.end_of(count, size)?;
        usize::try_from(count).map_err(|_beyond_memory| self.too_long(count, size).into())
    }

    pub(super) fn string(&mut self) -> Result<&'a [u8], Stop> {
        let length = self.count(1)?;
        self.take(length)
    }

    pub(super) fn rest(&self) -> &'a [u8] {
        self.bytes.get(self.position..).unwrap_or_default()
    }

    /// The end position of `count` items of `size` bytes, if a header can be that long.
    fn end_of(&self, count: u64, size: u64) -> Result<usize, Stop> {
        count
            .checked_mul(size)
            .and_then(|length| usize::try_from(length).ok())
            .and_then(|length| self.position.checked_add(length))
            .filter(|end| *end as u64 <= MAX_HEADER_BYTES)
            .ok_or_else(|| self.too_long(count, size).into())
    }

    fn too_long(&self, count: u64, size: u64) -> GgufError {
        GgufError::TooLong { offset: self.position as u64, count, size }
    }
}
