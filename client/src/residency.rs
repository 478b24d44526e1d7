//! How much of a tensor is in memory; prefetching, releasing and locking it.
//!
//! Maps share the pages of the page cache, so "in memory" means in the page cache, for all processes.
//! Advice applies to whole pages (usually 4 KiB) and never changes content.
//!
//! ```no_run
//! use blobd_client::residency::{Prefetch, Release};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let client = blobd_client::Client::connect_default()?;
//! let model = client.open(&"mixtral:8x7b".parse()?)?;
//! for part in model.expert("blk.3.", 5)? {
//!     part.bytes().prefetch(Prefetch::ReadAhead)?; // returns at once
//! }
//! for part in model.expert("blk.2.", 5)? {
//!     part.bytes().release(Release::Cold)?;
//! }
//! # Ok(())
//! # }
//! ```

use std::hint::black_box;
use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;

use crate::map::{BlobMap, BlobSlice, PageAdvice};

/// How bytes are read into memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Prefetch {
    /// The kernel reads them in the background, on a best-effort basis (`MADV_WILLNEED`).
    ReadAhead,
    /// They are read before the call returns and are in the page table then, so that no later touch
    /// waits (`MADV_POPULATE_READ`; before Linux 5.14 by touching each page). An error of the disk
    /// is an error here, not a signal.
    Populate,
}

/// How bytes are released.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Release {
    /// They stay cached, but are reclaimed first when memory is short (`MADV_COLD`, since Linux 5.4).
    Cold,
    /// They leave this process's page table and no longer count as its memory; they stay in the
    /// page cache until the kernel reclaims them (`MADV_DONTNEED`).
    Unmap,
}

/// How many bytes are in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Residency {
    /// How many bytes there are.
    pub bytes: u64,
    /// How many of them are in memory.
    pub resident_bytes: u64,
}

impl Residency {
    /// The sum of both.
    #[must_use]
    pub const fn plus(self, other: Self) -> Self {
        Self {
            bytes: self.bytes.saturating_add(other.bytes),
            resident_bytes: self.resident_bytes.saturating_add(other.resident_bytes),
        }
    }
}

impl Residency {
    /// How much of a file is in memory.
    pub fn of_file(file: BorrowedFd<'_>) -> io::Result<Self> {
        let map = BlobMap::new(file)?;
        let length = map.length();
        Ok(Self { bytes: length as u64, resident_bytes: map.resident_bytes(0..length)? })
    }
}

impl BlobSlice {
    /// Brings these bytes into memory.
    ///
    /// # Errors
    /// Those of `madvise`: the disk fails, or memory is too short. They may be ignored: the bytes can
    /// be read all the same.
    pub fn prefetch(&self, how: Prefetch) -> io::Result<()> {
        let Some((map, range)) = self.place() else { return Ok(()) };
        if how == Prefetch::ReadAhead {
            return map.advise(range, PageAdvice::WillNeed);
        }
        match map.advise(range, PageAdvice::Populate) {
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                touch(self);
                Ok(())
            }
            populated => populated,
        }
    }

    /// Releases these bytes. Pages that also contain bytes outside this slice, such as the next
    /// expert's, are not released.
    ///
    /// # Errors
    /// Those of `madvise`, `InvalidInput` on a kernel that is too old.
    pub fn release(&self, how: Release) -> io::Result<()> {
        let Some((map, range)) = self.place() else { return Ok(()) };
        let advice = match how {
            Release::Cold => PageAdvice::Cold,
            Release::Unmap => PageAdvice::Unmap,
        };
        map.advise(whole_pages(range, map.length()), advice)
    }

    /// How much of these bytes is in memory.
    ///
    /// # Errors
    /// [`io::ErrorKind::PermissionDenied`] when this process neither owns the store's files nor is
    /// root: for others the kernel reports all pages as resident.
    pub fn residency(&self) -> io::Result<Residency> {
        let resident_bytes = match self.place() {
            Some((map, range)) => map.resident_bytes(range)?,
            None => 0,
        };
        Ok(Residency { bytes: self.len() as u64, resident_bytes })
    }

    /// Reads these bytes and keeps them in memory, for all processes, until the lock is dropped.
    /// Locks do not add up: of two on one page, the first that is dropped ends both.
    ///
    /// # Errors
    /// Those of `mlock`: `OutOfMemory` or `PermissionDenied` beyond `RLIMIT_MEMLOCK`
    /// (`ulimit -l`, `LimitMEMLOCK=`), which root is free of.
    pub fn lock(&self) -> io::Result<MemoryLock> {
        if let Some((map, range)) = self.place() {
            map.lock(range)?;
        }
        Ok(MemoryLock { bytes: self.clone() })
    }
}

/// Bytes that stay in memory until this is dropped.
#[derive(Debug)]
pub struct MemoryLock {
    bytes: BlobSlice,
}

impl MemoryLock {
    /// The bytes.
    pub const fn bytes(&self) -> &BlobSlice {
        &self.bytes
    }
}

impl Drop for MemoryLock {
    fn drop(&mut self) {
        if let Some((map, range)) = self.bytes.place() {
            map.unlock(range);
        }
    }
}

/// The pages completely inside a range, including the partial last page of a file.
fn whole_pages(range: Range<usize>, length: usize) -> Range<usize> {
    let page = rustix::param::page_size();
    let start = range.start.next_multiple_of(page);
    let end = if range.end == length { length } else { range.end - range.end % page };
    start..end.max(start)
}

fn touch(bytes: &[u8]) {
    for byte in bytes.iter().step_by(rustix::param::page_size()).chain(bytes.last()) {
        black_box(*byte);
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Write as _;
    use std::os::fd::AsFd as _;
    use std::sync::Arc;

    use super::*;

    const PAGE: u64 = 4096;

    fn slice_of(length: usize) -> (File, BlobSlice) {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&vec![7; length]).unwrap();
        let map = Arc::new(BlobMap::new(file.as_fd()).unwrap());
        (file, BlobSlice::new(map, 0, length as u64).unwrap())
    }

    #[test]
    fn advice_of_any_range_changes_no_byte() {
        let (_file, all) = slice_of(10 * 4096 + 100);
        for (offset, length) in [(0, 41060), (1, 2), (4095, 2), (4096, 4096), (40960, 100), (100, 0)] {
            let part = all.part(offset, length).unwrap();
            for how in [Prefetch::ReadAhead, Prefetch::Populate] {
                part.prefetch(how).unwrap();
            }
            for how in [Release::Cold, Release::Unmap] {
                part.release(how).unwrap();
            }
            drop(part.lock().unwrap());
            assert!(part.iter().all(|byte| *byte == 7) && part.len() as u64 == length);
        }
        assert!(all.part(1, 41060).is_none() && all.part(u64::MAX, 2).is_none());
        let nothing = BlobSlice::default();
        nothing.prefetch(Prefetch::Populate).unwrap();
        nothing.release(Release::Unmap).unwrap();
        assert_eq!(nothing.residency().unwrap(), Residency::default());
        assert!(nothing.part(0, 0).is_some() && nothing.part(0, 1).is_none());
    }

    #[test]
    fn residency_counts_bytes_not_pages() {
        let (_file, all) = slice_of(3 * 4096 + 100);
        let resident = |offset, length| all.part(offset, length).unwrap().residency().unwrap();
        // Just written, so all of it is in memory.
        for (offset, length) in [(0, 3 * PAGE + 100), (10, 20), (4090, 10), (3 * PAGE, 100)] {
            assert_eq!(resident(offset, length), Residency { bytes: length, resident_bytes: length });
        }
    }

    #[test]
    fn residency_of_a_file_is_that_of_its_map() {
        let (file, _map) = slice_of(5 * 4096 + 1);
        let all = Residency { bytes: 5 * 4096 + 1, resident_bytes: 5 * 4096 + 1 };
        assert_eq!(Residency::of_file(file.as_fd()).unwrap(), all);
        let empty = tempfile::tempfile().unwrap();
        assert_eq!(Residency::of_file(empty.as_fd()).unwrap(), Residency::default());
    }

    #[test]
    fn residency_of_a_sparse_file_is_what_was_read_of_it() {
        let file = tempfile::tempfile().unwrap();
        // More pages than one call to the kernel covers.
        let length = 70_000 * PAGE + 5;
        file.set_len(length).unwrap();
        let all = BlobSlice::new(Arc::new(BlobMap::new(file.as_fd()).unwrap()), 0, length).unwrap();
        let before = all.residency().unwrap().resident_bytes;
        all.part(length - 5, 5).unwrap().prefetch(Prefetch::Populate).unwrap();
        let after = all.residency().unwrap();
        assert_eq!(after.bytes, length);
        assert!(after.resident_bytes >= before + 5 && after.resident_bytes < length, "{after:?}");
        assert_eq!(all.part(length - 5, 5).unwrap().residency().unwrap().resident_bytes, 5);
    }

    #[test]
    fn pages_shared_with_a_neighbour_are_not_released() {
        assert_eq!(whole_pages(1..8192, 9000), 4096..8192);
        assert_eq!(whole_pages(0..8191, 9000), 0..4096);
        assert_eq!(whole_pages(4097..8191, 9000), 8192..8192);
        assert_eq!(whole_pages(8192..9000, 9000), 8192..9000);
    }

    #[test]
    fn touching_reads_to_the_last_byte() {
        let (_file, all) = slice_of(2 * 4096 + 1);
        touch(&all);
        touch(&[]);
    }
}
