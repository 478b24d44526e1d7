//! Maps of blobs; the only `unsafe` code of the crate.
//!
//! A blob is mapped once, read-only and shared, so its pages are the page cache's: one copy for all
//! processes and models. Blobs of 2 MiB and more are aligned to 2 MiB and request huge pages, so that
//! one page-table entry covers 2 MiB, which makes their first touch about ten times cheaper.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::io;
use std::ops::{Deref, Range};
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use rustix::fs::fstat;
use rustix::io::Errno;
use rustix::mm::{
    Advice, MapFlags, MprotectFlags, MremapFlags, ProtFlags, madvise, mlock, mmap, mmap_anonymous, mprotect,
    mremap_fixed, munlock, munmap,
};

/// A whole blob in memory, until it is dropped.
///
/// # Safety argument
///
/// A `&[u8]` must not change and must stay readable. That holds because the file behind the
/// descriptor neither changes nor shrinks: blobd gives a blob its name only when it is complete,
/// makes it read-only (mode 0444, owned by the daemon's user), and from then on only ever
/// unlinks it, which leaves existing maps alone. The descriptor is `O_RDONLY`, so neither this
/// process nor another client can write through it. The length is the kernel's own (`fstat`),
/// so no byte of the slice is after the end of the file, where touching it would raise
/// `SIGBUS`.
///
/// The store's owner is trusted: root or the daemon's user can overwrite a blob in place, as with any
/// mapped file. An I/O error of the disk on first touch raises `SIGBUS`.
#[derive(Debug)]
pub(crate) struct BlobMap {
    address: NonNull<u8>,
    length: usize,
    owner: u32,
}

// SAFETY: The map is memory that is only ever read, from any thread; nothing about it belongs to
// the thread that made it.
unsafe impl Send for BlobMap {}
// SAFETY: As above: all access through a shared reference is reading.
unsafe impl Sync for BlobMap {}

impl BlobMap {
    /// Maps all of `blob`. The descriptor is not needed afterwards.
    pub(crate) fn new(blob: BorrowedFd<'_>) -> io::Result<Self> {
        let stat = fstat(blob)?;
        let length = usize::try_from(stat.st_size).unwrap_or(usize::MAX);
        let address = match length {
            0 => Some(NonNull::dangling()),
            1..HUGE_PAGE_BYTES => NonNull::new(map_anywhere(blob, length)?.cast()),
            _ => NonNull::new(map_huge(blob, length)?.cast()),
        };
        let address = address.ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { address, length, owner: stat.st_uid })
    }

    pub(crate) const fn length(&self) -> usize {
        self.length
    }

    pub(crate) fn advise(&self, bytes: Range<usize>, advice: PageAdvice) -> io::Result<()> {
        let Some((address, length)) = self.pages(bytes) else { return Ok(()) };
        let advice = match advice {
            PageAdvice::WillNeed => Advice::WillNeed,
            PageAdvice::Populate => Advice::LinuxPopulateRead,
            PageAdvice::Cold => Advice::LinuxCold,
            PageAdvice::Unmap => Advice::LinuxDontNeed,
        };
        // SAFETY: Needed for prefetch and release. `pages` returns only pages of this map. They are a
        // shared, read-only map of a file that does not change, so no advice changes their content,
        // not even DONTNEED.
        unsafe { madvise(address, length, advice)? };
        Ok(())
    }

    /// How many of these bytes are in the page cache.
    pub(crate) fn resident_bytes(&self, bytes: Range<usize>) -> io::Result<u64> {
        const PAGES_PER_CALL: usize = 64 << 10;
        if !may_see_residency(self.owner) {
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, NOT_TOLD));
        }
        let (page, end) = (rustix::param::page_size(), bytes.end.min(self.length));
        let (mut position, mut resident) = (bytes.start, 0);
        let mut states = [0_u8; PAGES_PER_CALL];
        while position < end {
            let first = position - position % page;
            let last = end.min(first.saturating_add(PAGES_PER_CALL * page));
            let Some((address, length)) = self.pages(position..last) else { break };
            // SAFETY: Needed because no crate wraps it. The pages are this map's; `states` has a
            // byte for each, for `length` is at most PAGES_PER_CALL pages.
            if unsafe { libc::mincore(address, length, states.as_mut_ptr()) } != 0 {
                return Err(io::Error::last_os_error());
            }
            for state in &states {
                let next = last.min(position - position % page + page);
                resident += if state & 1 == 1 { next - position } else { 0 };
                position = next;
                if position == last {
                    break;
                }
            }
        }
        Ok(resident as u64)
    }

    /// Keeps these pages in memory, reading them if they are not there.
    pub(crate) fn lock(&self, bytes: Range<usize>) -> io::Result<()> {
        let Some((address, length)) = self.pages(bytes) else { return Ok(()) };
        // SAFETY: Needed to keep weights from being dropped. The pages are this map's.
        unsafe { mlock(address, length)? };
        Ok(())
    }

    pub(crate) fn unlock(&self, bytes: Range<usize>) {
        if let Some((address, length)) = self.pages(bytes) {
            // SAFETY: Needed to unlock memory. The pages are this map's.
            let _was_not_locked = unsafe { munlock(address, length) };
        }
    }

    /// Address and length of the pages that contain these bytes; `None` if the range is empty or outside
    /// the blob.
    fn pages(&self, bytes: Range<usize>) -> Option<(*mut c_void, usize)> {
        if bytes.is_empty() || bytes.end > self.length {
            return None;
        }
        // The map starts at a page boundary, so it contains the whole first page.
        let start = bytes.start - bytes.start % rustix::param::page_size();
        Some((self.address.as_ptr().wrapping_add(start).cast(), bytes.end - start))
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: Needed because the memory comes from the kernel, not from Rust. It is mapped
        // readable for `length` bytes from `address` on until `self` is dropped (`new` maps it
        // and only `drop` unmaps it; `length` 0 goes with a dangling, aligned pointer), a
        // mapping is at most isize::MAX bytes long, and it does not change: see the type.
        unsafe { std::slice::from_raw_parts(self.address.as_ptr(), self.length) }
    }
}

impl Drop for BlobMap {
    fn drop(&mut self) {
        if self.length > 0 {
            // SAFETY: Needed to release the address space. The range is one that `new` mapped
            // and nothing else unmaps; every slice of it borrows from `self` or holds an `Arc`.
            let _cannot_fail = unsafe { munmap(self.address.as_ptr().cast(), self.length) };
        }
    }
}

/// Mapped bytes of a blob. Cheap to clone; they stay mapped while a clone exists, also after the model
/// is dropped and the daemon has stopped.
#[derive(Clone, Debug, Default)]
pub struct BlobSlice {
    /// Absent if empty.
    map: Option<Arc<BlobMap>>,
    offset: usize,
    length: usize,
}

impl BlobSlice {
    /// `length` bytes of a mapped blob, from `offset` on; `None` if it does not have them.
    pub(crate) fn new(map: Arc<BlobMap>, offset: u64, length: u64) -> Option<Self> {
        let (offset, length) = (usize::try_from(offset).ok()?, usize::try_from(length).ok()?);
        let end = offset.checked_add(length)?;
        (end <= map.length()).then_some(Self { map: Some(map), offset, length })
    }

    /// A sub-slice of `length` bytes at `offset`, in the same map; `None` if out of range.
    pub fn part(&self, offset: u64, length: u64) -> Option<Self> {
        let end = offset.checked_add(length)?;
        let from = offset.checked_add(u64::try_from(self.offset).ok()?)?;
        match &self.map {
            _ if end > self.length as u64 => None,
            Some(map) => Self::new(Arc::clone(map), from, length),
            None => Some(Self::default()),
        }
    }

    /// The map and the range in it; `None` if empty.
    pub(crate) fn place(&self) -> Option<(&Arc<BlobMap>, Range<usize>)> {
        let range = self.offset..self.offset + self.length;
        self.map.as_ref().filter(|_| !range.is_empty()).map(|map| (map, range))
    }
}

impl Deref for BlobSlice {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let bytes = self.map.as_ref().map(|map| map.bytes()).unwrap_or_default();
        bytes.get(self.offset..self.offset + self.length).unwrap_or_default()
    }
}

impl AsRef<[u8]> for BlobSlice {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum PageAdvice {
    /// Read ahead, without waiting.
    WillNeed,
    /// Read and enter into the page table. Since Linux 5.14.
    Populate,
    /// Reclaim first when memory is short. Since Linux 5.4.
    Cold,
    Unmap,
}

/// Since Linux 5.2, `mincore` reports every page as resident unless the caller owns the file or may
/// write to it, to hide what other processes read.
fn may_see_residency(owner: u32) -> bool {
    let user = rustix::process::geteuid();
    user.is_root() || user.as_raw() == owner
}

const NOT_TOLD: &str = "the kernel tells only the owner of a file and root what of it is in memory";

/// A range of address space in which blobs are mapped side by side.
///
/// # Safety argument
///
/// All of it is always readable: it starts as zero pages, and each change replaces whole pages by
/// readable ones in one call. Maps of blobs duplicate the maps of [`BlobMap`], so its argument holds for
/// them; the rest is private memory, read-only after it is written. Changes take `&mut self`, so no
/// `&[u8]` can observe them.
#[derive(Debug)]
pub(crate) struct Region {
    address: NonNull<u8>,
    length: usize,
}

// SAFETY: Memory that is only ever read through `&self`, from any thread; nothing about it belongs
// to the thread that made it.
unsafe impl Send for Region {}
// SAFETY: As above.
unsafe impl Sync for Region {}

impl Region {
    /// Reserves zero pages for `length` bytes, without using memory.
    pub(crate) fn reserve(length: usize) -> io::Result<Self> {
        let length = whole_pages(length.max(1)).ok_or(io::ErrorKind::OutOfMemory)?;
        // SAFETY: Needed to own a range. Without MAP_FIXED the kernel chooses addresses that nobody
        // uses.
        let address = unsafe {
            let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
            mmap_anonymous(ptr::null_mut(), length, ProtFlags::READ, flags)?
        };
        let address = NonNull::new(address.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { address, length })
    }

    /// Maps a part of a blob a second time, at an offset. Returns false if an offset is not page-aligned
    /// or the system cannot map pages twice (valgrind). The last page may contain the blob's next bytes.
    pub(crate) fn place(&mut self, offset: usize, part: &BlobSlice) -> io::Result<bool> {
        let Some(map) = part.map.as_ref().filter(|_| part.length > 0) else { return Ok(true) };
        let page = rustix::param::page_size();
        if !offset.is_multiple_of(page) || !part.offset.is_multiple_of(page) {
            return Ok(false);
        }
        let (target, length) = self.pages(offset, part.length)?;
        let source = map.address.as_ptr().wrapping_byte_add(part.offset).cast();
        // SAFETY: Needed to put the part there. An old length of zero leaves the source as it is and
        // maps the same file a second time. The source is inside a living map: `part` has been
        // compared with the blob's length. The target is inside `self`, and no slice of it exists:
        // `&mut self`.
        match unsafe { mremap_fixed(source, 0, length, MremapFlags::MAYMOVE, target) } {
            Err(Errno::INVAL) => Ok(false),
            placed => Ok(placed.map(|_target| true)?),
        }
    }

    /// Copies `bytes` to a page-aligned offset and pads the last page with zeros. The memory is shared
    /// with forked processes.
    pub(crate) fn copy(&mut self, offset: usize, bytes: &[u8]) -> io::Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        let (target, length) = self.pages(offset, bytes.len())?;
        // SAFETY: Needed for memory that can be written until it is filled. MAP_FIXED replaces pages
        // of `self` alone, of which nobody has a slice; `length` is at least that of `bytes`, which
        // is not part of the new pages. Shared, so that it can be mapped again.
        unsafe {
            let flags = MapFlags::SHARED | MapFlags::FIXED | MapFlags::NORESERVE;
            mmap_anonymous(target, length, ProtFlags::READ | ProtFlags::WRITE, flags)?;
            ptr::copy_nonoverlapping(bytes.as_ptr(), target.cast(), bytes.len());
            mprotect(target, length, MprotectFlags::READ)?;
        }
        Ok(())
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: Needed because the memory comes from the kernel. It is readable until `self` is
        // dropped and does not change while it is borrowed: see the type.
        unsafe { std::slice::from_raw_parts(self.address.as_ptr(), self.length) }
    }

    /// Address and length of the whole pages for `length` bytes at `offset`.
    fn pages(&self, offset: usize, length: usize) -> io::Result<(*mut c_void, usize)> {
        let length = whole_pages(length);
        let end = length.and_then(|length| offset.checked_add(length));
        match (length, end) {
            (Some(length), Some(end))
                if end <= self.length && offset.is_multiple_of(rustix::param::page_size()) =>
            {
                Ok((self.address.as_ptr().wrapping_byte_add(offset).cast(), length))
            }
            _ => Err(io::ErrorKind::InvalidInput.into()),
        }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: Needed to release the address space. `reserve` made the range, nothing else
        // unmaps it, and every slice of it borrows from `self`.
        let _cannot_fail = unsafe { munmap(self.address.as_ptr().cast(), self.length) };
    }
}

fn whole_pages(length: usize) -> Option<usize> {
    length.checked_next_multiple_of(rustix::param::page_size())
}

/// Maps a large blob at a 2 MiB boundary. Recent kernels do so on the usual file systems; otherwise
/// the blob is placed into a larger reservation.
fn map_huge(blob: BorrowedFd<'_>, length: usize) -> io::Result<*mut c_void> {
    let mut address = map_anywhere(blob, length)?;
    if !address.addr().is_multiple_of(HUGE_PAGE_BYTES) {
        // SAFETY: Needed to move the map. It was made just now and nobody has seen it.
        unsafe { munmap(address, length)? };
        address = map_into_reservation(blob, length)?;
    }
    // SAFETY: Needed for page-table entries of 2 MiB. Advice about memory that was mapped just
    // now; it changes no bytes, and a kernel without huge pages refuses it without harm.
    let _unsupported = unsafe { madvise(address, length, Advice::LinuxHugepage) };
    Ok(address)
}

fn map_anywhere(blob: BorrowedFd<'_>, length: usize) -> io::Result<*mut c_void> {
    // SAFETY: Needed to map at all. Without MAP_FIXED the kernel chooses addresses that nobody
    // uses.
    Ok(unsafe { mmap(ptr::null_mut(), length, ProtFlags::READ, MapFlags::SHARED, blob, 0)? })
}

/// Reserves 2 MiB more than needed, maps the blob at the boundary inside, and unmaps the rest.
fn map_into_reservation(blob: BorrowedFd<'_>, length: usize) -> io::Result<*mut c_void> {
    let whole_pages = whole_pages(length);
    let reserved = whole_pages.and_then(|pages| pages.checked_add(HUGE_PAGE_BYTES));
    let (Some(whole_pages), Some(reserved)) = (whole_pages, reserved) else {
        return Err(io::ErrorKind::OutOfMemory.into());
    };
    // SAFETY: Needed to own a range that is large enough. Without MAP_FIXED the kernel chooses
    // addresses that nobody uses; PROT_NONE and NORESERVE make it cost nothing.
    let base = unsafe {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        mmap_anonymous(ptr::null_mut(), reserved, ProtFlags::empty(), flags)?
    };
    let front = base.addr().next_multiple_of(HUGE_PAGE_BYTES) - base.addr();
    let address = base.wrapping_byte_add(front);
    // SAFETY: Needed to place the map. MAP_FIXED replaces only pages of the reservation, which
    // is ours and unseen: `front` is below 2 MiB and `reserved` is `whole_pages` and 2 MiB.
    let mapped =
        unsafe { mmap(address, length, ProtFlags::READ, MapFlags::SHARED | MapFlags::FIXED, blob, 0) };
    if mapped.is_err() {
        release(base, reserved);
    } else {
        release(base, front);
        release(address.wrapping_byte_add(whole_pages), reserved - front - whole_pages);
    }
    Ok(mapped?)
}

fn release(address: *mut c_void, length: usize) {
    if length > 0 {
        // SAFETY: Needed to release address space. Called by `map_into_reservation` alone, with
        // whole pages of its own reservation that hold no map.
        let _cannot_fail = unsafe { munmap(address, length) };
    }
}

/// What one entry of the second page-table level covers on x86-64 and, with pages of 4 KiB, on
/// AArch64.
const HUGE_PAGE_BYTES: usize = 2 << 20;

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Write as _;
    use std::os::fd::AsFd as _;

    use super::*;

    fn file_of(length: usize) -> (File, Vec<u8>) {
        let bytes: Vec<u8> = (0..=250).cycle().take(length).collect();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&bytes).unwrap();
        (file, bytes)
    }

    #[test]
    fn blobs_of_any_size_read_as_their_file() {
        for length in [0, 1, 4095, 4096, 4097, HUGE_PAGE_BYTES - 1, HUGE_PAGE_BYTES, 5_000_001] {
            let (file, bytes) = file_of(length);
            let map = BlobMap::new(file.as_fd()).unwrap();
            drop(file);
            assert!(map.bytes() == bytes, "{length} bytes");
        }
    }

    #[test]
    fn large_blobs_start_at_a_huge_page() {
        let (file, bytes) = file_of(3 * HUGE_PAGE_BYTES + 1);
        let map = BlobMap::new(file.as_fd()).unwrap();
        assert_eq!(map.bytes().as_ptr().addr() % HUGE_PAGE_BYTES, 0);
        assert!(map.bytes() == bytes);
    }

    #[test]
    fn reservation_releases_its_slack() {
        let (file, bytes) = file_of(HUGE_PAGE_BYTES + 5);
        let before = address_space_bytes();
        for _ in 0..1000 {
            let address = map_into_reservation(file.as_fd(), bytes.len()).unwrap();
            assert_eq!(address.addr() % HUGE_PAGE_BYTES, 0);
            let address = NonNull::new(address.cast()).unwrap();
            let map = BlobMap { address, length: bytes.len(), owner: 0 };
            assert_eq!(map.bytes()[HUGE_PAGE_BYTES..], bytes[HUGE_PAGE_BYTES..]);
        }
        // If the slack were lost, this would be 2 GiB; threads of other tests may use some addresses meanwhile.
        let grown = address_space_bytes().saturating_sub(before);
        assert!(grown < 1 << 30, "{grown} bytes more");
    }

    fn address_space_bytes() -> usize {
        let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
        let pages: usize = statm.split(' ').next().unwrap().parse().unwrap();
        pages * rustix::param::page_size()
    }

    #[test]
    fn slices_stay_inside_their_blob_and_outlive_it() {
        let (file, bytes) = file_of(100);
        let map = Arc::new(BlobMap::new(file.as_fd()).unwrap());
        let slice = BlobSlice::new(Arc::clone(&map), 10, 20).unwrap();
        for (offset, length) in [(0, 101), (100, 1), (101, 0), (u64::MAX, 1), (1, u64::MAX)] {
            assert!(BlobSlice::new(Arc::clone(&map), offset, length).is_none(), "{offset}+{length}");
        }
        assert!(BlobSlice::new(map, 100, 0).unwrap().is_empty());
        assert_eq!(slice[..], bytes[10..30]);
        assert!(BlobSlice::default().is_empty());
    }

    #[test]
    fn region_contains_parts_of_blobs_and_copies() {
        let page = rustix::param::page_size();
        let (file, bytes) = file_of(3 * page + 10);
        let map = Arc::new(BlobMap::new(file.as_fd()).unwrap());
        let part = |offset, length| BlobSlice::new(Arc::clone(&map), offset, length).unwrap();
        let mut region = Region::reserve(5 * page).unwrap();
        region.copy(0, b"head").unwrap();
        let page_u64 = page as u64;
        assert!(region.place(page, &part(page_u64, 2 * page_u64 + 10)).unwrap());
        assert!(!region.place(4 * page, &part(1, 10)).unwrap(), "off a page's start");
        assert!(!region.place(4 * page + 1, &part(0, 10)).unwrap(), "to off a page's start");
        drop((map, file));
        assert_eq!(region.bytes()[..8], *b"head\0\0\0\0");
        assert_eq!(region.bytes()[page..3 * page + 10], bytes[page..]);
        assert!(region.bytes()[3 * page + 10..].iter().all(|byte| *byte == 0));
    }

    #[test]
    fn placing_outside_a_region_fails() {
        let page = rustix::param::page_size();
        let (file, _) = file_of(2 * page);
        let map = Arc::new(BlobMap::new(file.as_fd()).unwrap());
        let two_pages = BlobSlice::new(map, 0, 2 * page as u64).unwrap();
        let mut region = Region::reserve(2 * page).unwrap();
        for offset in [page, 2 * page, usize::MAX - page + 1] {
            assert!(region.place(offset, &two_pages).is_err(), "{offset}");
            assert!(region.copy(offset, &two_pages).is_err(), "{offset}");
        }
        assert!(region.bytes().iter().all(|byte| *byte == 0));
    }

    #[test]
    fn descriptor_that_cannot_be_mapped_is_an_error() {
        let folder = File::open("/").unwrap();
        assert!(BlobMap::new(folder.as_fd()).is_err());
    }
}
