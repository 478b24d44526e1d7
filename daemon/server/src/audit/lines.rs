//! The lines of a file of the audit log, from any place to the end or from the end to the beginning.
//!
//! Neither direction needs more memory than a block and the longest line of a record, whatever the file contains. A
//! hole in a damaged file takes no time: the kernel says where it ends. A line that is too long for a record is read in
//! steps, so that a reader can stop between them.

use std::fs::File;
use std::io::{self, BufRead as _, BufReader, Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::FileExt as _;

use blobd_client::protocol::audit::{AuditRecord, MAX_LINE_BYTES};
use rustix::fs::seek;
use rustix::io::Errno;

const BLOCK_BYTES: usize = 64 << 10;
/// Bytes that one call reads of a line that is too long for a record.
const MAX_STEP_BYTES: u64 = 1 << 20;

/// A line, or a part of one that is too long for a record.
pub(super) struct Line {
    pub(super) offset: u64,
    /// With the line break; only a part of a line that is too long for a record.
    bytes: Vec<u8>,
    is_complete: bool,
    /// Whether an earlier part of the same line was returned.
    is_rest: bool,
}

impl Line {
    pub(super) fn record(&self) -> Option<AuditRecord> {
        if self.is_complete { AuditRecord::parse(&self.bytes) } else { None }
    }

    /// Whether it is a line of its own that should be a record.
    pub(super) fn is_expected_to_be_record(&self) -> bool {
        let is_blank = self.is_complete && self.bytes.iter().all(u8::is_ascii_whitespace);
        !is_blank && !self.is_rest
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Position {
    pub(super) offset: u64,
    /// Whether this is inside a line that is too long for a record.
    is_inside_line: bool,
}

impl From<u64> for Position {
    fn from(offset: u64) -> Self {
        Self { offset, is_inside_line: false }
    }
}

/// The lines from any place to the last line break.
pub(super) struct Lines {
    file: BufReader<File>,
    pub(super) next: Position,
}

impl Lines {
    pub(super) fn new(mut file: File, next: Position) -> io::Result<Self> {
        file.seek(SeekFrom::Start(next.offset))?;
        Ok(Self { file: BufReader::with_capacity(BLOCK_BYTES, file), next })
    }

    pub(super) fn next_line(&mut self) -> io::Result<Option<Line>> {
        let (mut bytes, Position { offset, is_inside_line: is_rest }) = (Vec::new(), self.next);
        let limit = u64::try_from(MAX_LINE_BYTES).unwrap_or(u64::MAX);
        if is_rest {
            self.skip_part()?;
            let is_at_end = self.next.offset == offset;
            return Ok((!is_at_end).then_some(Line { offset, bytes, is_complete: false, is_rest }));
        }
        let length = (&mut self.file).take(limit).read_until(b'\n', &mut bytes)? as u64;
        let is_complete = bytes.ends_with(b"\n");
        if !is_complete && length < limit {
            return Ok(None);
        }
        self.next = Position { offset: offset.saturating_add(length), is_inside_line: !is_complete };
        if !is_complete {
            self.skip_part()?;
        }
        Ok(Some(Line { offset, bytes, is_complete, is_rest }))
    }

    /// Skips the rest of a line, up to the length of one step.
    fn skip_part(&mut self) -> io::Result<()> {
        let mut read = 0_u64;
        while read < MAX_STEP_BYTES {
            let buffered = self.file.fill_buf()?;
            if buffered.is_empty() {
                return Ok(());
            }
            let end = buffered.iter().position(|byte| *byte == b'\n').map(|at| at + 1);
            let length = end.unwrap_or(buffered.len());
            self.file.consume(length);
            self.next.offset = self.next.offset.saturating_add(length as u64);
            read = read.saturating_add(length as u64);
            if end.is_some() {
                self.next.is_inside_line = false;
                return Ok(());
            }
            self.skip_hole()?;
        }
        Ok(())
    }

    /// Continues after the hole that begins here, if there is one. The buffer is empty, so the file's own offset is that
    /// of the next byte.
    fn skip_hole(&mut self) -> io::Result<()> {
        let file = self.file.get_mut();
        self.next.offset = match seek(&*file, rustix::fs::SeekFrom::Data(self.next.offset)) {
            Ok(data) => data,
            Err(Errno::NXIO) => file.seek(SeekFrom::End(0))?.max(self.next.offset),
            // The file system does not know about holes.
            Err(_) => return Ok(()),
        };
        Ok(())
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
    /// Reading fails with [`io::ErrorKind::Interrupted`] as soon as `is_wanted` does not hold any more.
    pub(super) fn new(file: File, is_wanted: &dyn Fn() -> bool) -> io::Result<Self> {
        let start = file.metadata()?.len();
        let mut lines = Self { file, buffer: Vec::new(), start, is_cut: false, end: 0 };
        // What follows the last line break is not complete yet.
        let last_break = lines.find_break(0, is_wanted)?;
        lines.is_cut = false;
        let length = last_break.map_or(0, |at| at + 1);
        lines.buffer.truncate(length);
        lines.end = lines.start.saturating_add(length as u64);
        Ok(lines)
    }

    pub(super) fn next_line(&mut self, is_wanted: &dyn Fn() -> bool) -> io::Result<Option<Line>> {
        if self.start == 0 && self.buffer.is_empty() {
            return Ok(None);
        }
        // The last byte is the line break of this line itself.
        let begin = self.find_break(1, is_wanted)?.map_or(0, |at| at + 1);
        let bytes = self.buffer.split_off(begin.min(self.buffer.len()));
        let offset = self.start.saturating_add(begin as u64);
        let is_complete = !std::mem::take(&mut self.is_cut) && bytes.len() <= MAX_LINE_BYTES;
        Ok(Some(Line { offset, bytes, is_complete, is_rest: false }))
    }

    /// The last line break in the buffer except in its last `but_last` bytes. Reads more blocks until there is one;
    /// `None` at the beginning of the file. Forgets the end of a line that is too long.
    fn find_break(&mut self, but_last: usize, is_wanted: &dyn Fn() -> bool) -> io::Result<Option<usize>> {
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
                // Otherwise the caller asks before the next line.
                if !is_wanted() {
                    return Err(io::ErrorKind::Interrupted.into());
                }
                self.buffer.truncate(MAX_LINE_BYTES);
                self.is_cut = true;
            }
            searched = self.buffer.len().max(but_last);
            match self.hole_before_start() {
                // Longer than any record, so the line that contains it is none.
                Some(hole) => {
                    self.buffer.clear();
                    (self.start, self.is_cut, searched) = (hole, true, 0);
                }
                None => self.read_block()?,
            }
        }
    }

    /// The start of the hole that ends at `start`, if there is one of a block or more.
    fn hole_before_start(&self) -> Option<u64> {
        let is_hole_from = |offset: u64| match seek(&self.file, rustix::fs::SeekFrom::Data(offset)) {
            Ok(data) => data >= self.start,
            // There is no data after it. Other errors mean that the file system does not know about holes.
            Err(errno) => errno == Errno::NXIO,
        };
        let mut begin = self.start.checked_sub(BLOCK_BYTES as u64).filter(|block| is_hole_from(*block))?;
        let mut data = 0;
        while data < begin {
            let middle = data.midpoint(begin);
            if is_hole_from(middle) { begin = middle } else { data = middle.saturating_add(1) }
        }
        Some(begin)
    }

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

    fn forward(file: File) -> Vec<(u64, bool)> {
        let mut lines = Lines::new(file, Position::default()).unwrap();
        std::iter::from_fn(|| lines.next_line().unwrap())
            .filter(|line| !line.is_rest)
            .map(|line| (line.offset, line.is_complete))
            .collect()
    }

    fn backward(file: File) -> (Vec<(u64, bool)>, u64) {
        let mut lines = LinesBackward::new(file, &|| true).unwrap();
        let mut found: Vec<_> = std::iter::from_fn(|| lines.next_line(&|| true).unwrap())
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
            let (backward, last_break) = backward(file(&content));
            prop_assert_eq!(last_break, end);
            // Forward, a line without an end is reported if it is too long for a record.
            let forward: Vec<_> = forward(file(&content)).into_iter().filter(|(offset, _)| *offset < end).collect();
            prop_assert_eq!(backward, forward);
        }
    }

    #[test]
    fn lines_backward_have_the_bytes_of_the_file() {
        let mut lines = LinesBackward::new(file(b"one\ntwo\n\nthr"), &|| true).unwrap();
        let texts: Vec<_> =
            std::iter::from_fn(|| lines.next_line(&|| true).unwrap()).map(|line| line.bytes).collect();
        assert_eq!(texts, [&b"\n"[..], b"two\n", b"one\n"]);
    }

    #[test]
    fn holes_are_skipped_in_both_directions() {
        const HOLE: u64 = 1 << 40;
        for (before, after) in [("one\n", "\ntwo\n"), ("", "\ntwo\n"), ("one\ntor", "n\n\n"), ("one\n", "")] {
            let file = file(before.as_bytes());
            let end = before.len() as u64 + HOLE;
            file.set_len(end).unwrap();
            file.write_all_at(after.as_bytes(), end).unwrap();
            let lines = forward(file.try_clone().unwrap());
            // The line with the hole is one that is not complete, unless it has no end.
            let is_ended = !after.is_empty();
            let long = lines.iter().filter(|(_, is_complete)| !is_complete).count();
            assert!(!lines.is_empty() && long == 1, "{before:?} {after:?}: {lines:?}");
            let found = backward(file).0;
            let expected = if is_ended { lines } else { lines[..lines.len() - 1].to_vec() };
            assert_eq!(found, expected, "{before:?} {after:?}");
        }
    }

    #[test]
    fn long_line_is_read_in_steps_that_continue_where_the_last_one_ended() {
        let mut content = vec![b'x'; 3 << 20];
        content.extend(b"\nlast\n");
        let file = file(&content);
        let (mut next, mut steps) = (Position::default(), 0);
        let last = loop {
            let mut lines = Lines::new(file.try_clone().unwrap(), next).unwrap();
            let line = lines.next_line().unwrap().unwrap();
            if line.is_complete {
                break line;
            }
            assert_eq!(line.is_expected_to_be_record(), steps == 0, "counted once");
            next = lines.next;
            steps += 1;
        };
        assert!(steps >= 3 && last.bytes == b"last\n", "{steps}");
    }

    #[test]
    fn search_backward_ends_inside_a_long_line_when_it_is_cancelled() {
        let file = file(&vec![b'x'; 10 * BLOCK_BYTES]);
        let blocks = std::cell::Cell::new(0);
        let is_wanted = || blocks.replace(blocks.get() + 1) < 3;
        let stopped = LinesBackward::new(file, &is_wanted).map(|_| ()).unwrap_err();
        assert_eq!((stopped.kind(), blocks.get()), (io::ErrorKind::Interrupted, 4));
    }
}
