//! The bytes of a header, read from the start of a file in pieces, so that they are never in memory at once.

use std::io::{self, Read};

use super::{Limit, SafetensorsError};
use crate::digest::{Digest, Hasher};

// `Header` says what these are for.
pub(super) const LENGTH_BYTES: usize = 8;
pub(super) const MAX_BYTES: u64 = 100_000_000;
pub(super) const MAX_TEXT_BYTES: usize = 16 << 20;

/// Where a header ends, by the length before it.
pub(super) fn end(length: [u8; LENGTH_BYTES]) -> Result<u64, SafetensorsError> {
    let found = u64::from_le_bytes(length);
    if found > MAX_BYTES {
        return Err(SafetensorsError::HeaderLength { found });
    }
    Ok(found + LENGTH_BYTES as u64)
}

/// The JSON of a header, as a reader that ends where the header does. The file must have all of it.
pub(super) struct HeaderBytes<'r> {
    source: &'r mut dyn Read,
    chunk: Vec<u8>,
    /// How many bytes of the chunk were read.
    read: usize,
    /// Where the chunk ends, in bytes from the start of the file.
    chunk_end: u64,
    /// Where the header ends.
    end: u64,
    hash: Hasher,
    strings: Option<StringLengths>,
    failure: Option<io::Result<SafetensorsError>>,
}

impl<'r> HeaderBytes<'r> {
    /// Reads the length.
    pub(super) fn open(source: &'r mut dyn Read) -> io::Result<Result<Self, SafetensorsError>> {
        let mut length = [0; LENGTH_BYTES];
        let found = read_fully(source, &mut length)?;
        if found < LENGTH_BYTES {
            let (found, expected) = (found as u64, LENGTH_BYTES as u64);
            return Ok(Err(SafetensorsError::Truncated { found, expected }));
        }
        let mut hash = Hasher::new();
        hash.update(&length);
        // Shorter ones have no string that is too long.
        let strings = |end| (end > MAX_TEXT_BYTES as u64).then(StringLengths::default);
        let (chunk, chunk_end) = (Vec::new(), LENGTH_BYTES as u64);
        Ok(end(length).map(|end| {
            let strings = strings(end);
            Self { source, chunk, read: 0, chunk_end, end, hash, strings, failure: None }
        }))
    }

    /// Where the header ends, in bytes from the start of the file.
    pub(super) const fn end(&self) -> u64 {
        self.end
    }

    /// Where the byte is that was read last, in bytes from the start of the file.
    pub(super) fn last_offset(&self) -> u64 {
        let unread = self.chunk.len().saturating_sub(self.read) as u64;
        self.chunk_end.saturating_sub(unread).saturating_sub(1)
    }

    /// Why reading has failed.
    pub(super) const fn take_failure(&mut self) -> Option<io::Result<SafetensorsError>> {
        self.failure.take()
    }

    /// The digest of the length and the header, if all of it was read.
    pub(super) fn digest(self) -> Digest {
        self.hash.finish()
    }

    /// Receives the next bytes; none at the end.
    fn fill(&mut self) -> io::Result<Result<(), SafetensorsError>> {
        const CHUNK_BYTES: u64 = 64 << 10;
        let left = self.end.saturating_sub(self.chunk_end);
        self.chunk.resize(usize::try_from(left.min(CHUNK_BYTES)).unwrap_or_default(), 0);
        let found = read_fully(self.source, &mut self.chunk)?;
        self.chunk_end = self.chunk_end.saturating_add(found as u64);
        self.read = 0;
        if found < self.chunk.len() {
            self.chunk.truncate(found);
            return Ok(Err(SafetensorsError::Truncated { found: self.chunk_end, expected: self.end }));
        }
        self.hash.update(&self.chunk);
        let Some(strings) = &mut self.strings else { return Ok(Ok(())) };
        // More white space means nothing after white space.
        let skipped = if strings.is_between() { spaces(&self.chunk) } else { 0 };
        self.read = skipped;
        let is_short = strings.push(self.chunk.get(skipped..).unwrap_or_default());
        Ok(if is_short { Ok(()) } else { Err(SafetensorsError::TooMany(Limit::Text)) })
    }
}

impl Read for HeaderBytes<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        // The parser reads single bytes.
        if let ([first], Some(byte)) = (&mut *buffer, self.chunk.get(self.read)) {
            *first = *byte;
            self.read = self.read.saturating_add(1);
            return Ok(1);
        }
        while self.read >= self.chunk.len() && self.chunk_end < self.end {
            self.failure = match self.fill() {
                Ok(Ok(())) => continue,
                Ok(Err(refused)) => Some(Ok(refused)),
                Err(error) => Some(Err(error)),
            };
            return Err(io::Error::other("no more of the header"));
        }
        let count = self.chunk.get(self.read..).unwrap_or_default().read(buffer)?;
        self.read = self.read.saturating_add(count);
        Ok(count)
    }
}

/// Reads until the buffer is full or the file ends.
fn read_fully(source: &mut dyn Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut found = 0;
    while let Some(rest) = buffer.get_mut(found..).filter(|rest| !rest.is_empty()) {
        match source.read(rest) {
            Ok(0) => break,
            Ok(count) => found = found.saturating_add(count),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(found)
}

/// The number of bytes of white space at the start.
fn spaces(json: &[u8]) -> usize {
    json.iter().position(|byte| !SPACES.contains(byte)).unwrap_or(json.len())
}

/// The white space of JSON.
const SPACES: [u8; 4] = *b" \t\n\r";

/// Finds a string that is too long before the parser has copied it.
#[derive(Default)]
struct StringLengths {
    /// The byte before.
    last: Option<u8>,
    /// The length of the string that has begun.
    within: Option<usize>,
    is_escaped: bool,
}

impl StringLengths {
    /// Whether the byte before is white space, and not in a string.
    fn is_between(&self) -> bool {
        self.within.is_none() && self.last.is_some_and(|last| SPACES.contains(&last))
    }

    /// Takes the next bytes; false if a string is too long.
    fn push(&mut self, bytes: &[u8]) -> bool {
        self.last = bytes.last().copied().or(self.last);
        for byte in bytes {
            let Some(length) = &mut self.within else {
                self.within = (*byte == b'"').then_some(0);
                continue;
            };
            match byte {
                _ if self.is_escaped => self.is_escaped = false,
                b'\\' => self.is_escaped = true,
                b'"' => {
                    self.within = None;
                    continue;
                }
                _ => {}
            }
            *length = length.saturating_add(1);
            if *length > MAX_TEXT_BYTES {
                return false;
            }
        }
        true
    }
}
