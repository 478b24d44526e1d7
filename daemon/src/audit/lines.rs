//! The lines of a file of the audit log, from a place to the end or from the end to the beginning.
//!
//! Neither needs more memory than a block and the longest line of a record, whatever the file contains.

use std::fs::File;
use std::io::{self, BufRead as _, BufReader, Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::FileExt as _;

use blobd_client::protocol::audit::{AuditRecord, MAX_LINE_BYTES};

const BLOCK_BYTES: usize = 64 << 10;

pub(super) struct Line {
    pub(super) offset: u64,
    /// With its line break. Not all of them if it is too long for a record.
    bytes: Vec<u8>,
    is_complete: bool,
}

impl Line {
    pub(super) fn record(&self) -> Option<AuditRecord> {
        if self.is_complete { AuditRecord::parse(&self.bytes) } else { None }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.is_complete && self.bytes.iter().all(u8::is_ascii_whitespace)
    }
}

/// The lines from a place on, up to the last line break.
pub(super) struct Lines {
    file: BufReader<File>,
    /// Where the next line begins.
    pub(super) offset: u64,
}

impl Lines {
    pub(super) fn new(mut file: File, offset: u64) -> io::Result<Self> {
        file.seek(SeekFrom::Start(offset))?;
        Ok(Self { file: BufReader::with_capacity(BLOCK_BYTES, file), offset })
    }

    pub(super) fn next_line(&mut self) -> io::Result<Option<Line>> {
        let (mut bytes, offset) = (Vec::new(), self.offset);
        let limit = u64::try_from(MAX_LINE_BYTES).unwrap_or(u64::MAX);
        let mut length = (&mut self.file).take(limit).read_until(b'\n', &mut bytes)? as u64;
        let is_complete = bytes.ends_with(b"\n");
        if !is_complete && length == limit {
            let Some(rest) = self.skip_line()? else { return Ok(None) };
            length = length.saturating_add(rest);
        } else if !is_complete {
            return Ok(None);
        }
        self.offset = self.offset.saturating_add(length);
        Ok(Some(Line { offset, bytes, is_complete }))
    }

    /// The length of the rest of a line; `None` if the file ends before its line break.
    fn skip_line(&mut self) -> io::Result<Option<u64>> {
        let mut skipped = 0_u64;
        loop {
            let buffered = self.file.fill_buf()?;
            if buffered.is_empty() {
                return Ok(None);
            }
            let end = buffered.iter().position(|byte| *byte == b'\n').map(|at| at + 1);
            let length = end.unwrap_or(buffered.len());
            self.file.consume(length);
            skipped = skipped.saturating_add(length as u64);
            if end.is_some() {
                return Ok(Some(skipped));
            }
        }
    }
}

/// The lines from the last line break to the beginning of the file, the last one first.
pub(super) struct LinesBackward {
    file: File,
    /// Bytes of the file from `start` on that belong to lines that were not returned yet.
    buffer: Vec<u8>,
    start: u64,
    /// Whether the buffer has only the beginning of its last line, because that is too long.
    is_cut: bool,
    /// After the last line break.
    pub(super) end: u64,
}

impl LinesBackward {
    pub(super) fn new(file: File) -> io::Result<Self> {
        let start = file.metadata()?.len();
        let mut lines = Self { file, buffer: Vec::new(), start, is_cut: false, end: 0 };
        // What follows the last line break is not complete yet.
        let last_break = lines.find_break(0)?;
        lines.is_cut = false;
        let length = last_break.map_or(0, |at| at + 1);
        lines.buffer.truncate(length);
        lines.end = lines.start.saturating_add(length as u64);
        Ok(lines)
    }

    pub(super) fn next_line(&mut self) -> io::Result<Option<Line>> {
        if self.start == 0 && self.buffer.is_empty() {
            return Ok(None);
        }
        // The last byte is the line break of this line itself.
        let begin = self.find_break(1)?.map_or(0, |at| at + 1);
        let bytes = self.buffer.split_off(begin.min(self.buffer.len()));
        let offset = self.start.saturating_add(begin as u64);
        let is_complete = !std::mem::take(&mut self.is_cut) && bytes.len() <= MAX_LINE_BYTES;
        Ok(Some(Line { offset, bytes, is_complete }))
    }

    /// The last line break in the buffer except in its last `but_last` bytes. Reads more blocks until there is one;
    /// `None` at the beginning of the file. Forgets the end of a line that is too long.
    fn find_break(&mut self, but_last: usize) -> io::Result<Option<usize>> {
        let mut searched = but_last;
        loop {
            let unsearched = self.buffer.len().saturating_sub(searched);
            let found = self.buffer.get(..unsearched).unwrap_or_default();
            if let Some(at) = found.iter().rposition(|byte| *byte == b'\n') {
                return Ok(Some(at));
            }
            if self.start == 0 {
                return Ok(None);
            }
            if self.buffer.len() > MAX_LINE_BYTES {
                self.buffer.truncate(MAX_LINE_BYTES);
                self.is_cut = true;
            }
            searched = self.buffer.len().max(but_last);
            self.read_block()?;
        }
    }

    /// Reads the block before the buffer.
    fn read_block(&mut self) -> io::Result<()> {
        let length = usize::try_from(self.start).unwrap_or(usize::MAX).min(BLOCK_BYTES);
        let start = self.start.saturating_sub(length as u64);
        let mut block = vec![0; length];
        self.file.read_exact_at(&mut block, start)?;
        block.append(&mut self.buffer);
        (self.buffer, self.start) = (block, start);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use proptest::prelude::*;

    use super::*;

    fn file(content: &[u8]) -> File {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(content).unwrap();
        file
    }

    fn forward(content: &[u8]) -> Vec<(u64, bool)> {
        let mut lines = Lines::new(file(content), 0).unwrap();
        std::iter::from_fn(|| lines.next_line().unwrap())
            .map(|line| (line.offset, line.is_complete))
            .collect()
    }

    fn backward(content: &[u8]) -> (Vec<(u64, bool)>, u64) {
        let mut lines = LinesBackward::new(file(content)).unwrap();
        let mut found: Vec<_> = std::iter::from_fn(|| lines.next_line().unwrap())
            .map(|line| (line.offset, line.is_complete))
            .collect();
        found.reverse();
        (found, lines.end)
    }

    proptest! {
        /// With lines around the length of the longest record and of a block.
        #[test]
        fn lines_are_the_same_in_both_directions(
            lengths in proptest::collection::vec(
                prop_oneof![0..4_usize, 16_382..16_387_usize, 65_530..65_540_usize, 0..200_000_usize], 0..12,
            ),
            rest in 0..70_000_usize,
        ) {
            let mut content = Vec::new();
            for length in lengths {
                content.resize(content.len() + length, b'x');
                content.push(b'\n');
            }
            let end = content.len() as u64;
            content.resize(content.len() + rest, b'y');
            prop_assert_eq!(backward(&content), (forward(&content), end));
        }
    }

    #[test]
    fn lines_backward_have_the_bytes_of_the_file() {
        let mut lines = LinesBackward::new(file(b"one\ntwo\n\nthr")).unwrap();
        let texts: Vec<_> =
            std::iter::from_fn(|| lines.next_line().unwrap()).map(|line| line.bytes).collect();
        assert_eq!(texts, [&b"\n"[..], b"two\n", b"one\n"]);
    }
}
