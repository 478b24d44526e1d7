//! Files read from the disk itself.
//!
//! What is in the page cache may be right while the disk is wrong, and then stays right for as
//! long as the page stays: a verification that reads through it verifies memory. So the reader
//! asks for `O_DIRECT`; where the file system refuses that, it has the kernel drop what it has
//! cached of the file before, and after, which works for pages that nobody has mapped.

use std::fs::File;
use std::io;
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};

use rustix::fs::{Advice, AtFlags, OFlags, StatxFlags, fadvise, fcntl_getfl, fcntl_setfl, statx};
use rustix::io::Errno;

/// How much is read at once, in bytes: enough that a disk is not slowed by the requests.
const CHUNK_BYTES: usize = 1 << 20;
/// The alignment of `O_DIRECT` where the kernel does not tell: no disk has larger sectors.
const USUAL_ALIGNMENT: usize = 4096;

/// What is to happen next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Read.
    Go,
    /// Ask again, some time has passed.
    Wait,
    /// Give up.
    Stop,
}

/// Says before each chunk whether it may be read now. It is told how many bytes the chunk has, in
/// the end 0, and may sleep before it answers.
pub type Gate<'g> = dyn FnMut(u64) -> Step + 'g;

/// How a reading that did not fail ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// At the end of the file.
    Complete,
    /// Where the gate said so.
    Stopped,
    /// The last name of the file was removed meanwhile: what it holds is nobody's business any
    /// more, and holding it would keep its space.
    Unlinked,
}

/// Reads files from the disk, one after the other, through one buffer.
#[derive(Debug, Default)]
pub struct DiskReader {
    buffer: Vec<u8>,
}

impl DiskReader {
    /// Hands all bytes of `file`, which nobody else may be reading with, to `sink` in order.
    ///
    /// # Errors
    /// Those of the disk.
    pub fn read(
        &mut self,
        file: &File,
        gate: &mut Gate<'_>,
        sink: &mut dyn FnMut(&[u8]),
    ) -> io::Result<Ended> {
        match Direct::of(file) {
            Some(direct) => match self.pass(file, direct.alignment, gate, sink)? {
                Passed::Ended(ended) => Ok(ended),
                // Refused at its first read: nothing has been handed out.
                Passed::Refused => self.read_buffered(file, gate, sink),
            },
            None => self.read_buffered(file, gate, sink),
        }
    }

    fn read_buffered(
        &mut self,
        file: &File,
        gate: &mut Gate<'_>,
        sink: &mut dyn FnMut(&[u8]),
    ) -> io::Result<Ended> {
        if let Ok(flags) = fcntl_getfl(file) {
            // It was never set, or refused: then this cannot fail in a way that matters.
            let _ = fcntl_setfl(file, flags - OFlags::DIRECT);
        }
        drop_cached(file);
        let passed = self.pass(file, 1, gate, sink);
        drop_cached(file);
        match passed? {
            Passed::Ended(ended) => Ok(ended),
            Passed::Refused => Err(Errno::INVAL.into()),
        }
    }

    fn pass(
        &mut self,
        file: &File,
        alignment: usize,
        gate: &mut Gate<'_>,
        sink: &mut dyn FnMut(&[u8]),
    ) -> io::Result<Passed> {
        let part = self.aligned(alignment);
        let buffer = self.buffer.get_mut(part).unwrap_or_default();
        let mut offset = 0;
        loop {
            let metadata = file.metadata()?;
            let left = metadata.len().saturating_sub(offset);
            if metadata.nlink() == 0 {
                return Ok(Passed::Ended(Ended::Unlinked));
            }
            match gate(left.min(CHUNK_BYTES as u64)) {
                Step::Go if left > 0 => {}
                Step::Go => return Ok(Passed::Ended(Ended::Complete)),
                Step::Wait => continue,
                Step::Stop => return Ok(Passed::Ended(Ended::Stopped)),
            }
            let count = match file.read_at(buffer, offset) {
                Err(error) if offset == 0 && Errno::from_io_error(&error) == Some(Errno::INVAL) => {
                    return Ok(Passed::Refused);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                read => whole_units(read?, alignment, left),
            };
            if count == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            sink(buffer.get(..count).unwrap_or_default());
            offset = offset.saturating_add(count as u64);
        }
    }

    /// The part of the buffer that starts at a multiple of `alignment` in memory.
    fn aligned(&mut self, alignment: usize) -> Range<usize> {
        let length = CHUNK_BYTES.next_multiple_of(alignment);
        if self.buffer.len() < length + alignment {
            // Memory that the kernel has zeroed; `resize` would write the zeros itself.
            self.buffer = vec![0; length + alignment];
        }
        let start = self.buffer.as_ptr().align_offset(alignment);
        start..start + length
    }
}

enum Passed {
    Ended(Ended),
    /// The file system does not read in this way.
    Refused,
}

/// Of a read that ended early, inside the file, what leaves the next offset aligned. Only the end
/// of the file may be at any offset.
const fn whole_units(count: usize, alignment: usize, left: u64) -> usize {
    if count as u64 >= left { count } else { count - count % alignment }
}

/// A file whose reads go to the disk.
struct Direct {
    /// Of offsets, lengths and memory, in bytes; a power of two.
    alignment: usize,
}

impl Direct {
    fn of(file: &File) -> Option<Self> {
        let told = statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN).ok();
        let told = told.filter(|stat| stat.stx_mask & StatxFlags::DIOALIGN.bits() != 0);
        let alignment = match told {
            Some(stat) if stat.stx_dio_offset_align == 0 => return None,
            Some(stat) => usize::try_from(stat.stx_dio_offset_align.max(stat.stx_dio_mem_align)).ok()?,
            None => USUAL_ALIGNMENT,
        };
        // Never less than usual: some kernels tell what the disk takes and not what they take.
        let alignment = alignment.max(USUAL_ALIGNMENT);
        if !alignment.is_power_of_two() || alignment > CHUNK_BYTES {
            return None;
        }
        let flags = fcntl_getfl(file).ok()?;
        fcntl_setfl(file, flags | OFlags::DIRECT).ok()?;
        Some(Self { alignment })
    }
}

/// Only advice: a kernel that does not take it leaves the reader with what is cached.
fn drop_cached(file: &File) {
    const TO_THE_END: Option<NonZeroU64> = None;
    let _ = fadvise(file, 0, TO_THE_END, Advice::DontNeed);
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn go(_: u64) -> Step {
        Step::Go
    }

    fn read(path: &Path) -> Vec<u8> {
        let mut bytes = Vec::new();
        let file = File::open(path).unwrap();
        let ended =
            DiskReader::default().read(&file, &mut go, &mut |chunk| bytes.extend_from_slice(chunk)).unwrap();
        assert_eq!(ended, Ended::Complete);
        bytes
    }

    fn pattern(length: usize) -> Vec<u8> {
        (0..length).map(|index| u8::try_from(index * 31 % 251).unwrap()).collect()
    }

    #[test]
    fn files_of_any_length_are_read_whole_on_disk_and_in_memory() {
        let folders =
            [tempfile::tempdir(), tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir())];
        for folder in folders.map(Result::unwrap) {
            for length in [0, 1, 511, 4096, 4097, CHUNK_BYTES - 1, CHUNK_BYTES, 2 * CHUNK_BYTES + 12_345] {
                let path = folder.path().join(length.to_string());
                std::fs::write(&path, pattern(length)).unwrap();
                assert!(read(&path) == pattern(length), "{length} in {}", folder.path().display());
            }
        }
    }

    #[test]
    fn reading_stops_where_the_gate_says_so() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, pattern(3 * CHUNK_BYTES)).unwrap();
        let mut answers = [Step::Go, Step::Wait, Step::Go, Step::Stop].into_iter();
        let (mut told, mut seen) = (Vec::new(), 0);
        let mut gate = |bytes| {
            told.push(bytes);
            answers.next().unwrap()
        };
        let file = File::open(&path).unwrap();
        let ended = DiskReader::default().read(&file, &mut gate, &mut |chunk| seen += chunk.len()).unwrap();
        assert_eq!((ended, seen), (Ended::Stopped, 2 * CHUNK_BYTES));
        assert_eq!(told, [CHUNK_BYTES as u64; 4]);
    }

    #[test]
    fn file_that_loses_its_name_is_let_go() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, pattern(3 * CHUNK_BYTES)).unwrap();
        let file = File::open(&path).unwrap();
        let mut gate = |_| {
            // Gone the second time.
            let _ = std::fs::remove_file(&path);
            Step::Wait
        };
        let ended = DiskReader::default().read(&file, &mut gate, &mut |_| ()).unwrap();
        assert_eq!(ended, Ended::Unlinked);
    }

    #[test]
    fn early_end_of_a_read_keeps_the_next_one_aligned() {
        assert_eq!(whole_units(5000, 4096, 100_000), 4096);
        assert_eq!(whole_units(5000, 4096, 5000), 5000);
        assert_eq!(whole_units(100, 4096, 5000), 0);
        assert_eq!(whole_units(5000, 1, 100_000), 5000);
    }
}
