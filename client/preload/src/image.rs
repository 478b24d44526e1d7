//! The image of a model or of a file in its folder: requested once per path in a process, and mapped until the process
//! ends.

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::id;
use std::ptr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use crate::memory::{SparePlaceholder, memory_file, seal_and_reopen};
use crate::next;
use crate::request::{ImageHead, OpenError, Part, Request, invalid};
use crate::sys::{
    EACCES, EINVAL, ENOMEM, MADV_POPULATE_READ, MAP_ANONYMOUS, MAP_FAILED, MAP_FIXED, MAP_FIXED_NOREPLACE,
    MAP_NORESERVE, MAP_POPULATE, MAP_PRIVATE, MAP_SHARED, MAP_TYPE, MREMAP_FIXED, MREMAP_MAYMOVE, PROT_READ,
    PROT_WRITE, errno, madvise, mprotect, mremap, munmap, page_size,
};

pub(crate) struct Image {
    address: usize,
    length: usize,
    /// Page-aligned ranges, sorted, each mapped from one file. Together they are the whole image.
    segments: Vec<Range<usize>>,
    /// How it was requested, for private mappings, which need the descriptors again.
    request: Request,
    digest: [u8; 32],
    /// The placeholder that `stat` has reported. The next `open` uses it, because a program may compare the
    /// inodes of both.
    pub(crate) spare: SparePlaceholder,
    /// The connection to `blobd exec`; the model is in use while it is open.
    _lease: UnixStream,
}

/// The image of the file with this path. It is requested unless this process has it already.
pub(crate) fn find(path: &[u8], request: impl FnOnce() -> Request) -> Result<Arc<Image>, OpenError> {
    static REQUEST_ENDED: Condvar = Condvar::new();
    let mut images = images();
    loop {
        match images.get_or_insert_default().get(path) {
            Some(Slot::Mapped(image)) => return Ok(Arc::clone(image)),
            // Another thread requests it: one image serves both.
            Some(Slot::Requested { process }) if *process == id() => {
                images = REQUEST_ENDED.wait(images).unwrap_or_else(PoisonError::into_inner);
            }
            Some(Slot::Requested { .. }) | None => break,
        }
    }
    images.get_or_insert_default().insert(path.to_vec(), Slot::Requested { process: id() });
    // If the process forks during the request, the lock must not be held: nothing would release it in the
    // child.
    drop(images);
    let image = Image::request(request()).map(Arc::new);
    let mut images = self::images();
    let images = images.get_or_insert_default();
    match &image {
        Ok(image) => images.insert(path.to_vec(), Slot::Mapped(Arc::clone(image))),
        Err(_) => images.remove(path),
    };
    REQUEST_ENDED.notify_all();
    image
}

pub(crate) enum Slot {
    Mapped(Arc<Image>),
    /// A thread of this process requests the image, and wakes the threads that wait for it. A process that
    /// was forked meanwhile has no such thread and sends its own request.
    Requested {
        process: u32,
    },
}

pub(crate) fn images() -> MutexGuard<'static, Option<HashMap<Vec<u8>, Slot>>> {
    static IMAGES: Mutex<Option<HashMap<Vec<u8>, Slot>>> = Mutex::new(None);
    IMAGES.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Image {
    pub(crate) const fn length(&self) -> usize {
        self.length
    }

    /// Copies bytes from `offset` on, up to the end of the image; returns how many. `out` must be writable for
    /// `length` bytes.
    pub(crate) unsafe fn read(&self, offset: u64, out: *mut c_void, length: usize) -> usize {
        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
        let count = self.length.saturating_sub(offset).min(length);
        if count > 0 {
            let source = self.at(offset);
            // SAFETY: Needed to fill the caller's buffer, which the caller guarantees to be writable. The
            // source is inside the image, which stays readable.
            unsafe { ptr::copy(source.cast_const().cast::<u8>(), out.cast(), count) };
        }
        count
    }

    /// `mmap` of the image's pages; an error is a value for `errno`. As for `mmap`: with `MAP_FIXED`, nothing else
    /// may use the range.
    pub(crate) unsafe fn map(
        &self,
        hint: *mut c_void,
        length: usize,
        protection: c_int,
        flags: c_int,
        offset: i64,
    ) -> Result<*mut c_void, c_int> {
        let page = page_size();
        let is_writable = protection & PROT_WRITE != 0;
        if is_writable && flags & MAP_TYPE != MAP_PRIVATE {
            return Err(EACCES);
        }
        let offset = usize::try_from(offset).map_err(|_negative| EINVAL)?;
        let length = length.checked_next_multiple_of(page).filter(|length| *length > 0).ok_or(EINVAL)?;
        if !offset.is_multiple_of(page) {
            return Err(EINVAL);
        }
        let end = offset.checked_add(length).ok_or(EINVAL)?.min(self.length.next_multiple_of(page));
        let fixed = flags & (MAP_FIXED | MAP_FIXED_NOREPLACE);
        // A writable mapping is a private copy. Otherwise the range is reserved, and the image is mapped
        // over it.
        let (initial, kind) = if is_writable { (PROT_READ | PROT_WRITE, 0) } else { (0, MAP_NORESERVE) };
        let kind = kind | MAP_PRIVATE | MAP_ANONYMOUS | fixed;
        // SAFETY: Needed to own the range. The caller observes the contract of `mmap`.
        let target = unsafe { next::mmap64(hint, length, initial, kind, -1, 0) };
        if target == MAP_FAILED {
            return Err(errno());
        }
        let mapped = match is_writable {
            true => self.map_privately(target, offset..end).map_err(|_not_available| EINVAL),
            false => self.map_again(target, offset..end),
        };
        if mapped == Err(EINVAL) {
            // A copy, also where the system cannot map a page twice, such as in some sandboxes.
            // SAFETY: Needed to fill the range, which the program has not received yet.
            unsafe {
                mprotect(target, length, PROT_READ | PROT_WRITE);
                self.read(offset as u64, target, length);
                mprotect(target, length, protection);
            }
        } else if let Err(error) = mapped {
            // SAFETY: Needed to release the range, which the program has not received.
            unsafe { munmap(target, length) };
            return Err(error);
        } else if flags & MAP_POPULATE != 0 {
            // SAFETY: Needed for `MAP_POPULATE`. It only reads pages of this readable range; old kernels
            // refuse it.
            unsafe { madvise(target, end.saturating_sub(offset), MADV_POPULATE_READ) };
        }
        Ok(target)
    }

    /// Maps a range of the image a second time, over the reserved pages at `target`.
    fn map_again(&self, target: *mut c_void, range: Range<usize>) -> Result<(), c_int> {
        let first = self.segments.partition_point(|segment| segment.end <= range.start);
        for segment in self.segments.iter().skip(first).take_while(|segment| segment.start < range.end) {
            let (start, end) = (segment.start.max(range.start), segment.end.min(range.end));
            let address = target.wrapping_byte_add(start - range.start);
            let flags = MREMAP_MAYMOVE | MREMAP_FIXED;
            // SAFETY: Needed to map the same pages again. With an old length of zero the source stays mapped;
            // it is within one shared mapping. `map` has reserved the target.
            let mapped = unsafe { mremap(self.at(start), 0, end - start, flags, address) };
            if mapped == MAP_FAILED {
                return Err(errno());
            }
        }
        Ok(())
    }

    /// Maps a range of the image privately and writable, over the pages at `target`. The pages are the blobs' until they are
    /// written. A shared mapping cannot become private, so the descriptors are requested again.
    fn map_privately(&self, target: *mut c_void, range: Range<usize>) -> Result<(), OpenError> {
        let mut stream = self.request.send()?;
        let head = ImageHead::read(&mut stream)?;
        // The name may have come to mean another model.
        if head.digest != self.digest {
            return Err(invalid().into());
        }
        io::copy(&mut stream.by_ref().take(head.header_length), &mut io::sink())?;
        io::copy(&mut stream.by_ref().take(head.copied_length), &mut io::sink())?;
        let mut mapped = Vec::new();
        head.receive_parts(&mut stream, |part, fd| {
            if !part.fd_offset.is_multiple_of(page_size() as u64) {
                return Ok(());
            }
            let pages = self.pages(part.offset, part.length)?;
            let (start, end) = (pages.start.max(range.start), pages.end.min(range.end));
            if start < end {
                let at = part.fd_offset.saturating_add((start - pages.start) as u64);
                let address = target.wrapping_byte_add(start - range.start);
                map_file(address, end - start, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, at)?;
                mapped.push(start..end);
            }
            Ok(())
        })?;
        mapped.sort_by_key(|mapped| mapped.start);
        mapped.push(range.end..range.end);
        let mut done = range.start;
        for pages in mapped {
            let address = target.wrapping_byte_add(done - range.start);
            // SAFETY: Needed to copy what is not in a blob's page. The pages up to the next mapped one are writable.
            unsafe { self.read(done as u64, address, pages.start.saturating_sub(done)) };
            done = done.max(pages.end);
        }
        Ok(())
    }

    const fn at(&self, offset: usize) -> *mut c_void {
        (self.address as *mut c_void).wrapping_byte_add(offset)
    }

    fn request(request: Request) -> Result<Self, OpenError> {
        let mut stream = request.send()?;
        let head = ImageHead::read(&mut stream)?;
        let mut image = Self::reserve(head.length, request, head.digest, stream.try_clone()?)?;
        image.map_copy(0, head.header_length, |header| stream.read_exact(header))?;
        image.map_copy(head.copied_offset, head.copied_length, |copied| stream.read_exact(copied))?;
        head.receive_parts(&mut stream, |part, fd| image.map_part(part, fd))?;
        image.segments.sort_by_key(|segment| segment.start);
        Ok(image)
    }

    fn reserve(length: u64, request: Request, digest: [u8; 32], lease: UnixStream) -> io::Result<Self> {
        let length = usize::try_from(length).map_err(|_long| io::Error::from_raw_os_error(ENOMEM))?;
        let flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        // SAFETY: Needed to own a range. Without MAP_FIXED the kernel chooses an unused one.
        let address = unsafe { next::mmap64(ptr::null_mut(), length.max(1), PROT_READ, flags, -1, 0) };
        if address == MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self {
            address: address.addr(),
            length,
            segments: Vec::new(),
            request,
            digest,
            spare: SparePlaceholder::default(),
            _lease: lease,
        })
    }

    /// Maps a part, or copies it if its offset in its file is not page-aligned.
    fn map_part(&mut self, part: &Part, fd: &OwnedFd) -> io::Result<()> {
        if !part.fd_offset.is_multiple_of(page_size() as u64) {
            return self.map_copy(part.offset, part.length, |bytes| read_at(fd, part.fd_offset, bytes));
        }
        let pages = self.pages(part.offset, part.length)?;
        self.map_pages(pages, fd, part.fd_offset)
    }

    /// Maps pages of a file. It is open only for reading, so the pages cannot be made writable.
    fn map_pages(&mut self, pages: Range<usize>, fd: &OwnedFd, offset: u64) -> io::Result<()> {
        map_file(self.at(pages.start), pages.len(), PROT_READ, MAP_SHARED, fd, offset)?;
        self.segments.push(pages);
        Ok(())
    }

    /// Maps a copy that `fill` writes. The pages belong to a sealed file, because the program may map them
    /// again, and `mprotect` must not make them writable, as for a blob.
    fn map_copy(
        &mut self,
        offset: u64,
        length: u64,
        fill: impl FnOnce(&mut [u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        if length == 0 {
            return Ok(());
        }
        let pages = self.pages(offset, length)?;
        let file = memory_file(c"blobd-copied").ok_or_else(io::Error::last_os_error)?;
        file.set_len(pages.len() as u64)?;
        fill_file(&file, usize::try_from(length).map_err(|_long| invalid())?, fill)?;
        self.map_pages(pages, &seal_and_reopen(&file)?, 0)
    }

    /// The pages of a part of the image, which must start at a page boundary.
    fn pages(&self, offset: u64, length: u64) -> io::Result<Range<usize>> {
        let page = page_size();
        let end = offset.checked_add(length).filter(|end| *end <= self.length as u64).ok_or_else(invalid)?;
        let bound = |offset: u64| usize::try_from(offset).map_err(|_long| invalid());
        let start = bound(offset)?;
        if start.is_multiple_of(page) {
            Ok(start..bound(end)?.next_multiple_of(page))
        } else {
            Err(invalid())
        }
    }
}

/// Maps a file over pages that were reserved for it and that the program has not received yet.
fn map_file(
    address: *mut c_void,
    length: usize,
    protection: c_int,
    kind: c_int,
    fd: &OwnedFd,
    offset: u64,
) -> io::Result<()> {
    let offset = i64::try_from(offset).map_err(|_long| invalid())?;
    // SAFETY: Needed to map the file at this address. MAP_FIXED replaces only reserved pages.
    let mapped =
        unsafe { next::mmap64(address, length, protection, kind | MAP_FIXED, fd.as_raw_fd(), offset) };
    if mapped == MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Maps the first `length` bytes of a file and lets `fill` write them.
fn fill_file(file: &File, length: usize, fill: impl FnOnce(&mut [u8]) -> io::Result<()>) -> io::Result<()> {
    let (protection, fd) = (PROT_READ | PROT_WRITE, file.as_raw_fd());
    // SAFETY: Needed to fill the file without a second buffer. Without MAP_FIXED the kernel chooses an unused
    // range. The slice is within it and is not used after `munmap`.
    unsafe {
        let start = next::mmap64(ptr::null_mut(), length, protection, MAP_SHARED, fd, 0);
        if start == MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let filled = fill(std::slice::from_raw_parts_mut(start.cast(), length));
        munmap(start, length);
        filled
    }
}

/// Fills a buffer with the bytes of a file from `offset` on.
fn read_at(fd: &OwnedFd, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
    let mut done = 0;
    while let Some(rest) = bytes.get_mut(done..).filter(|rest| !rest.is_empty()) {
        let at = i64::try_from(offset).map_err(|_long| invalid())?.saturating_add_unsigned(done as u64);
        // SAFETY: Needed because std would call the hook of `pread`. The pointer and the length are those
        // of a slice.
        let count = unsafe { next::pread64(fd.as_raw_fd(), rest.as_mut_ptr().cast(), rest.len(), at) };
        match usize::try_from(count) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => done += count,
            Err(_negative) => return Err(io::Error::last_os_error()),
        }
    }
    Ok(())
}
