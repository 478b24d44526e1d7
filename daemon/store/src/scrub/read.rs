//! Reads files from the disk, bypassing the page cache.
//!
//! The page cache may hold right bytes while the disk has wrong ones, so a verification that reads through it verifies
//! memory. The reader therefore uses `O_DIRECT`. Where the file system refuses that, it asks the kernel to drop the
//! file's cached pages before and after, which works for pages that no process has mapped.

use std::borrow::Borrow;
use std::fs::File;
use std::io;
use std::num::NonZeroU64;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};

use rustix::fs::{Advice, fadvise};
use rustix::io::Errno;

use crate::bounded_read::read_uninterrupted;
use crate::filesystem::{set_direct, unset_direct};

/// Bytes per read: large enough that the number of requests does not slow the disk.
const CHUNK_BYTES: usize = 1 << 20;

/// What a reader does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    Go,
    /// Ask again: some time has passed.
    Wait,
    Stop,
}

/// Decides whether a chunk of this many bytes, 0 at the end of the file, may be read now; may sleep before.
pub type Gate<'g> = dyn FnMut(u64) -> Step + 'g;

/// How a read ended without an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    Complete,
    Stopped,
    /// The last name of the file was removed meanwhile. Keeping it open would keep its space.
    Unlinked,
}

/// Reads files from the disk, one after the other, through one buffer.
#[derive(Debug, Default)]
pub struct DiskReader {
    buffer: Buffer,
}

impl DiskReader {
    /// Passes all bytes of `file` to `sink` in order. The descriptor must not be used for reading elsewhere.
    pub fn read(
        &mut self,
        file: &File,
        gate: &mut Gate<'_>,
        sink: &mut dyn FnMut(&[u8]),
    ) -> io::Result<Ended> {
        let mut file = DiskFile::open(file);
        loop {
            match file.next(&mut self.buffer, gate)? {
                Next::Chunk(bytes) => sink(bytes),
                Next::Ended(ended) => return Ok(ended),
            }
        }
    }
}

/// A buffer for one chunk, with the alignment that the disk needs.
#[derive(Debug, Default)]
pub(super) struct Buffer(Vec<u8>);

impl Buffer {
    fn aligned(&mut self, alignment: usize) -> &mut [u8] {
        let length = CHUNK_BYTES.next_multiple_of(alignment);
        if self.0.len() < length + alignment {
            // `vec!` gets zeroed pages from the kernel; `resize` would write the zeros.
            self.0 = vec![0; length + alignment];
        }
        let start = self.0.as_ptr().align_offset(alignment);
        self.0.get_mut(start..start + length).unwrap_or_default()
    }
}

#[derive(Debug)]
pub(super) struct DiskFile<F: Borrow<File>> {
    file: F,
    offset: u64,
    /// The alignment in bytes; `None` if the file is read through the page cache.
    direct_alignment: Option<usize>,
}

#[derive(Debug)]
pub(super) enum Next<'b> {
    Chunk(&'b [u8]),
    Ended(Ended),
}

impl<F: Borrow<File>> DiskFile<F> {
    pub(super) fn open(file: F) -> Self {
        let direct_alignment = set_direct(file.borrow(), CHUNK_BYTES);
        if direct_alignment.is_none() {
            drop_cached(file.borrow());
        }
        Self { file, offset: 0, direct_alignment }
    }

    /// Reads the next chunk when `gate` allows it.
    pub(super) fn next<'b>(&mut self, buffer: &'b mut Buffer, gate: &mut Gate<'_>) -> io::Result<Next<'b>> {
        let count = loop {
            let metadata = self.file.borrow().metadata()?;
            let left = metadata.len().saturating_sub(self.offset);
            if metadata.nlink() == 0 {
                return Ok(Next::Ended(Ended::Unlinked));
            }
            match gate(left.min(CHUNK_BYTES as u64)) {
                Step::Go if left > 0 => {}
                Step::Go => return Ok(Next::Ended(Ended::Complete)),
                Step::Wait => continue,
                Step::Stop => return Ok(Next::Ended(Ended::Stopped)),
            }
            let alignment = self.direct_alignment.unwrap_or(1);
            let file = self.file.borrow();
            match read_uninterrupted(|| file.read_at(buffer.aligned(alignment), self.offset)) {
                Err(error) if self.is_refused(&error) => self.read_through_page_cache(),
                read => break whole_units(read?, alignment, left),
            }
        };
        if count == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.offset = self.offset.saturating_add(count as u64);
        let alignment = self.direct_alignment.unwrap_or(1);
        Ok(Next::Chunk(buffer.aligned(alignment).get(..count).unwrap_or_default()))
    }

    /// Some file systems allow `O_DIRECT` and refuse the first read.
    fn is_refused(&self, error: &io::Error) -> bool {
        let is_first = self.direct_alignment.is_some() && self.offset == 0;
        is_first && Errno::from_io_error(error) == Some(Errno::INVAL)
    }

    fn read_through_page_cache(&mut self) {
        let file = self.file.borrow();
        // If it fails, the next read is refused again and its error returned.
        unset_direct(file);
        drop_cached(file);
        self.direct_alignment = None;
    }
}

impl<F: Borrow<File>> Drop for DiskFile<F> {
    fn drop(&mut self) {
        if self.direct_alignment.is_none() {
            drop_cached(self.file.borrow());
        }
    }
}

/// Shortens a read that ended inside the file so that the next offset is aligned.
const fn whole_units(count: usize, alignment: usize, left: u64) -> usize {
    if count as u64 >= left { count } else { count - count % alignment }
}

/// Only advice: the kernel may keep the pages, and then they are read.
fn drop_cached(file: &File) {
    const TO_THE_END: Option<NonZeroU64> = None;
    let _ = fadvise(file, 0, TO_THE_END, Advice::DontNeed);
}

/// Why a file could not be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The disk has lost data, or a checksum of the file system is wrong.
    Damage,
    /// This process lacks a resource that reading any file needs; waiting may help.
    Shortage,
    /// Anything else, such as a missing permission: it says nothing about the bytes.
    Refusal,
}

impl Fault {
    /// The errors that disks, cables, file servers and file systems report for lost data.
    const DAMAGE: [Errno; 8] = [
        Errno::IO,
        Errno::REMOTEIO,
        Errno::TIMEDOUT,
        Errno::NOLINK,
        Errno::UCLEAN,
        Errno::BADMSG,
        Errno::NODATA,
        Errno::ILSEQ,
    ];
    const SHORTAGE: [Errno; 3] = [Errno::MFILE, Errno::NFILE, Errno::NOMEM];

    /// Classifies the error of a call.
    pub fn from_error(error: &io::Error) -> Self {
        let is_one_of = |errnos: &[Errno]| Errno::from_io_error(error).is_some_and(|no| errnos.contains(&no));
        if is_one_of(&Self::DAMAGE) || error.kind() == io::ErrorKind::UnexpectedEof {
            Self::Damage
        } else if is_one_of(&Self::SHORTAGE) {
            Self::Shortage
        } else {
            Self::Refusal
        }
    }
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

    #[test]
    fn file_is_read_through_the_page_cache_after_a_refusal() {
        let file = tempfile::tempfile().unwrap();
        let mut refused = DiskFile { file, offset: 0, direct_alignment: Some(4096) };
        refused.read_through_page_cache();
        assert_eq!(refused.direct_alignment, None);
    }

    #[test]
    fn refusal_of_direct_reads_shows_at_the_first_one() {
        for (offset, direct_alignment, errno, is_refused) in [
            (0, Some(4096), Errno::INVAL, true),
            (4096, Some(4096), Errno::INVAL, false),
            (0, None, Errno::INVAL, false),
            (0, Some(4096), Errno::IO, false),
        ] {
            let file = DiskFile { file: tempfile::tempfile().unwrap(), offset, direct_alignment };
            assert_eq!(file.is_refused(&errno.into()), is_refused, "{offset} {direct_alignment:?} {errno}");
        }
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
        let mut steps = [Step::Go, Step::Wait, Step::Go, Step::Stop].into_iter();
        let (mut reported, mut seen) = (Vec::new(), 0);
        let mut gate = |bytes| {
            reported.push(bytes);
            steps.next().unwrap()
        };
        let file = File::open(&path).unwrap();
        let ended = DiskReader::default().read(&file, &mut gate, &mut |chunk| seen += chunk.len()).unwrap();
        assert_eq!((ended, seen), (Ended::Stopped, 2 * CHUNK_BYTES));
        assert_eq!(reported, [CHUNK_BYTES as u64; 4]);
    }

    #[test]
    fn read_of_an_unlinked_file_ends() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, pattern(3 * CHUNK_BYTES)).unwrap();
        let file = File::open(&path).unwrap();
        let mut gate = |_| {
            // Fails the second time, when the file is gone.
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

    #[test]
    fn errors_are_classified_as_damage_shortage_or_refusal() {
        for errno in Fault::DAMAGE {
            assert_eq!(Fault::from_error(&errno.into()), Fault::Damage, "{errno}");
        }
        assert_eq!(Fault::from_error(&io::ErrorKind::UnexpectedEof.into()), Fault::Damage);
        for errno in [Errno::MFILE, Errno::NFILE, Errno::NOMEM] {
            assert_eq!(Fault::from_error(&errno.into()), Fault::Shortage, "{errno}");
        }
        for errno in [Errno::ACCESS, Errno::PERM, Errno::LOOP, Errno::STALE, Errno::INVAL] {
            assert_eq!(Fault::from_error(&errno.into()), Fault::Refusal, "{errno}");
        }
    }
}
