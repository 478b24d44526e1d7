//! Reads of regular files that end even if the file system interrupts every read.
//!
//! The standard library repeats an interrupted read for ever. A local file system interrupts none, but the server of a
//! FUSE file system can answer each read with EINTR or EAGAIN, and its reader would spin without an end.

use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::fs::FileExt as _;
use std::time::Duration;

use blobd_store_format::digest::{Digest, Hasher};

/// Bytes per read and write. Writes of this size and alignment let the page cache build 2 MiB folios, which makes the
/// first access to a mapped blob ten times cheaper.
pub const CHUNK_BYTES: usize = 4 << 20;

/// Reads that may be interrupted one after the other before the last error is returned.
const MAX_INTERRUPTIONS: u32 = 100;
/// Between two attempts, so that the reader uses no processor time.
const PAUSE: Duration = Duration::from_millis(1);

/// Repeats a read while it is interrupted or would block, at most `MAX_INTERRUPTIONS` times.
pub fn read_uninterrupted(mut read: impl FnMut() -> io::Result<usize>) -> io::Result<usize> {
    for _ in 0..MAX_INTERRUPTIONS {
        match read() {
            Err(error) if matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock) => {
                std::thread::sleep(PAUSE);
            }
            done => return done,
        }
    }
    read()
}

/// Fills `buffer` from `offset` on; returns how many bytes, fewer at the end. `read` is `read_at` of a file.
pub fn fill(
    mut read: impl FnMut(&mut [u8], u64) -> io::Result<usize>,
    buffer: &mut [u8],
    offset: u64,
) -> io::Result<usize> {
    let mut filled = 0_usize;
    while let Some(rest) = buffer.get_mut(filled..).filter(|rest| !rest.is_empty()) {
        match read_uninterrupted(|| read(rest, offset.saturating_add(filled as u64)))? {
            0 => break,
            count => filled = filled.saturating_add(count),
        }
    }
    Ok(filled)
}

pub(crate) fn read_exact(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<()> {
    let filled = fill(|rest, offset| file.read_at(rest, offset), buffer, offset)?;
    if filled == buffer.len() { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
}

/// Reads a file from its beginning. If it is longer than `limit`, reads one byte more than that.
pub(crate) fn read_limited(file: &File, length: u64, limit: u64) -> io::Result<Vec<u8>> {
    let most = usize::try_from(limit.saturating_add(1)).unwrap_or(usize::MAX);
    let mut content = Vec::new();
    // One read if the length is right. The file may grow meanwhile.
    let mut step = usize::try_from(length.min(limit)).unwrap_or(usize::MAX).saturating_add(1);
    loop {
        let start = content.len();
        content.resize(start.saturating_add(step).min(most), 0);
        let rest = content.get_mut(start..).unwrap_or_default();
        let count = fill(|rest, offset| file.read_at(rest, offset), rest, start as u64)?;
        let end = start.saturating_add(count);
        if end < content.len() || end >= most {
            content.truncate(end);
            return Ok(content);
        }
        step = content.len().max(4096);
    }
}

pub(crate) fn digest_of(file: &mut File) -> io::Result<Digest> {
    let (mut hasher, mut buffer) = (Hasher::new(), vec![0; 1 << 20]);
    loop {
        match read_uninterrupted(|| file.read(&mut buffer))? {
            0 => return Ok(hasher.finish()),
            count => hasher.update(buffer.get(..count).unwrap_or_default()),
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::io::Errno;

    use super::*;

    #[test]
    fn read_that_is_always_interrupted_fails_in_the_end() {
        for errno in [Errno::INTR, Errno::AGAIN] {
            let mut reads = 0;
            let read = |_: &mut [u8], _| {
                reads += 1;
                Err(errno.into())
            };
            let error = fill(read, &mut [0; 8], 0).unwrap_err();
            assert_eq!(Errno::from_io_error(&error), Some(errno));
            assert_eq!(reads, MAX_INTERRUPTIONS + 1);
        }
    }

    #[test]
    fn interruptions_between_bytes_are_retried() {
        let mut calls = 0;
        let read = |rest: &mut [u8], offset: u64| {
            calls += 1;
            if calls % 4 != 0 {
                return Err(Errno::INTR.into());
            }
            rest[0] = u8::try_from(offset).unwrap();
            Ok(1)
        };
        let mut buffer = [0; 200];
        assert_eq!(fill(read, &mut buffer, 7).unwrap(), 200);
        assert!(buffer.iter().enumerate().all(|(index, byte)| usize::from(*byte) == index + 7));
    }

    #[test]
    fn file_is_read_up_to_one_byte_more_than_the_limit() {
        use std::io::Write as _;
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[7; 10_000]).unwrap();
        for (length, limit, read) in [
            (10_000, 20_000, 10_000),
            (10_000, 9_999, 10_000),
            (10_000, 5, 6),
            (0, 20_000, 10_000),
            (3, 8, 9),
        ] {
            let content = read_limited(&file, length, limit).unwrap();
            assert_eq!(content, vec![7; read], "{length} {limit}");
        }
    }

    #[test]
    fn other_failures_are_not_repeated() {
        let mut reads = 0;
        let failed = read_uninterrupted(|| {
            reads += 1;
            Err(Errno::IO.into())
        });
        assert_eq!((Errno::from_io_error(&failed.unwrap_err()), reads), (Some(Errno::IO), 1));
    }

    #[test]
    fn bytes_are_read_exactly_or_not_at_all() {
        use std::io::Write as _;
        let mut file = tempfile::tempfile().unwrap();
        let content: Vec<u8> = (0..3_000_000_u32).map(|number| (number % 251).to_le_bytes()[0]).collect();
        file.write_all(&content).unwrap();
        let mut buffer = [0; 100];
        read_exact(&file, &mut buffer, 2_999_900).unwrap();
        assert_eq!(buffer, content[2_999_900..]);
        let short = read_exact(&file, &mut buffer, 2_999_901).unwrap_err();
        assert_eq!(short.kind(), io::ErrorKind::UnexpectedEof);
        std::io::Seek::rewind(&mut file).unwrap();
        assert_eq!(digest_of(&mut file).unwrap(), Digest::of(&content));
        for (length, limit) in [(0, 2_999_999), (0, 3_000_000), (9_000_000, 3_000_000), (1 << 20, 5_000_000)]
        {
            let read = read_limited(&file, length, limit).unwrap();
            assert!(read == content[..read.len()] && read.len() == 3_000_000, "{length} {limit}");
        }
    }
}
