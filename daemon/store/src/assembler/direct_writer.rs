//! Writes large pieces of blobs past the page cache.
//!
//! On a machine whose memory is full, every page that an import writes evicts one that an engine may need, and on
//! virtual machines fresh pages are expensive. A direct write takes a fraction of the processor time of a copy into the
//! page cache and its writeback.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::Errno;
use tracing_mutex::stdsync::Mutex;

use crate::disk::GuardedDisk;
use crate::filesystem::set_direct;
use crate::{StoreError, lock};

/// Smaller pieces are not worth a request of their own.
const MIN_BYTES: usize = 1 << 20;

/// Writes through a second descriptor: the first one is also used for pieces that are not aligned.
#[derive(Debug, Default)]
pub(super) struct DirectWriter {
    current: Mutex<Option<Direct>>,
    /// The file system does not support it.
    is_refused: AtomicBool,
}

#[derive(Debug)]
struct Direct {
    path: PathBuf,
    file: File,
    alignment: usize,
}

impl DirectWriter {
    /// Writes as many of a piece's first bytes as possible; returns their number. A refusal is remembered.
    pub(super) fn write(
        &self,
        disk: &GuardedDisk,
        path: &Path,
        bytes: &[u8],
        offset: u64,
    ) -> Result<usize, StoreError> {
        if bytes.len() < MIN_BYTES || self.is_refused.load(Ordering::Relaxed) {
            return Ok(0);
        }
        let mut current = lock(&self.current);
        if current.as_ref().is_none_or(|direct| direct.path != path) {
            *current = Direct::open(disk, path)?;
        }
        let Some(direct) = &*current else {
            self.is_refused.store(true, Ordering::Relaxed);
            return Ok(0);
        };
        let length = direct.writable(bytes, offset);
        if length == 0 {
            return Ok(0);
        }
        match disk.write_at(path, &direct.file, bytes.get(..length).unwrap_or_default(), offset) {
            Err(error) if is_refusal(&error) => {
                self.is_refused.store(true, Ordering::Relaxed);
                *current = None;
                Ok(0)
            }
            written => written.map(|()| length),
        }
    }

    /// Closes the descriptor: a blob that is published must not be open for writing.
    pub(super) fn close(&self, path: &Path) {
        lock(&self.current).take_if(|direct| direct.path == path);
    }
}

impl Direct {
    fn open(disk: &GuardedDisk, path: &Path) -> Result<Option<Self>, StoreError> {
        let file = disk.open_file(path)?;
        let alignment = set_direct(&file, MIN_BYTES);
        Ok(alignment.map(|alignment| Self { path: path.to_owned(), file, alignment }))
    }

    /// How many of the bytes are whole units; none if they start inside one, in the file or in memory.
    fn writable(&self, bytes: &[u8], offset: u64) -> usize {
        let is_aligned = offset.is_multiple_of(self.alignment as u64)
            && bytes.as_ptr().addr().is_multiple_of(self.alignment);
        if is_aligned { bytes.len() - bytes.len() % self.alignment } else { 0 }
    }
}

/// Some file systems allow `O_DIRECT` and refuse the write.
fn is_refusal(error: &StoreError) -> bool {
    matches!(error, StoreError::Io { source, .. } if Errno::from_io_error(source) == Some(Errno::INVAL))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::IoSliceMut;

    use rustix::io::{ReadWriteFlags, preadv2};

    use super::*;
    use crate::testing::{begin, new_store};

    /// Bytes at an address with this remainder by 4096.
    struct Aligned(Vec<u8>, usize, usize);

    impl Aligned {
        fn new(length: usize, remainder: usize) -> Self {
            let memory: Vec<u8> = (0..length + 8192).map(|place| (place % 251).to_le_bytes()[0]).collect();
            let start = memory.as_ptr().align_offset(4096) + remainder;
            Self(memory, start, length)
        }

        fn bytes(&self) -> &[u8] {
            &self.0[self.1..self.1 + self.2]
        }
    }

    /// How many bytes of a piece at this offset are written directly; all that are have the right content.
    fn written(piece: &Aligned, offset: u64) -> usize {
        let (folder, store) = new_store();
        let ingest = begin(&store);
        let (disk, path) = (&store.content.disk, ingest.staging().next_path());
        disk.create_file(&path, 0o600).unwrap();
        let length = DirectWriter::default().write(disk, &path, piece.bytes(), offset).unwrap();
        let content = fs::read(folder.path().join("store").join(&path)).unwrap();
        let start = usize::try_from(offset).unwrap();
        assert!(length == 0 || content[start..] == piece.bytes()[..length]);
        length
    }

    fn is_supported() -> bool {
        let file = tempfile::tempfile().unwrap();
        set_direct(&file, MIN_BYTES).is_some()
    }

    #[test]
    fn whole_units_of_large_aligned_pieces_are_written_directly() {
        if !is_supported() {
            return;
        }
        assert_eq!(written(&Aligned::new(MIN_BYTES, 0), 0), MIN_BYTES);
        assert_eq!(written(&Aligned::new(MIN_BYTES + 5000, 0), 8192), MIN_BYTES + 4096);
    }

    #[test]
    fn small_and_unaligned_pieces_are_not() {
        assert_eq!(written(&Aligned::new(MIN_BYTES - 1, 0), 0), 0);
        assert_eq!(written(&Aligned::new(MIN_BYTES, 32), 0), 0);
        assert_eq!(written(&Aligned::new(MIN_BYTES, 0), 512), 0);
    }

    /// The kernel may write one of them through the page cache all the same, such as while it is short of memory.
    #[test]
    fn direct_writes_leave_nothing_in_the_page_cache() {
        const WRITES: usize = 8;
        let (folder, store) = new_store();
        let ingest = begin(&store);
        let (disk, piece) = (&store.content.disk, Aligned::new(MIN_BYTES, 0));
        let mut cached = Vec::new();
        for _ in 0..WRITES {
            let path = ingest.staging().next_path();
            disk.create_file(&path, 0o600).unwrap();
            let is_tmpfs = store.content.file_system().allocates_slowly();
            if is_tmpfs || DirectWriter::default().write(disk, &path, piece.bytes(), 0).unwrap() == 0 {
                return;
            }
            let file = File::open(folder.path().join("store").join(&path)).unwrap();
            let mut buffer = [0; 4096];
            let read = preadv2(&file, &mut [IoSliceMut::new(&mut buffer)], 0, ReadWriteFlags::NOWAIT);
            cached.extend((!matches!(read, Err(Errno::AGAIN | Errno::OPNOTSUPP))).then_some(read));
        }
        assert!(cached.len() <= WRITES / 4, "{cached:?}");
    }

    #[test]
    fn only_invalid_arguments_are_a_refusal() {
        for (errno, expected) in [(Errno::INVAL, true), (Errno::IO, false), (Errno::NOSPC, false)] {
            let error = StoreError::errno("write", Path::new("f").to_owned())(errno);
            assert_eq!(is_refusal(&error), expected, "{errno}");
        }
    }
}
