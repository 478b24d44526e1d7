//! The image of a model: requested once per path in a process, and mapped until the process ends.

use std::collections::HashMap;
use std::ffi::{c_int, c_uint, c_void};
use std::fs::File;
use std::io::{self, Read, Write};
use std::mem::{size_of, zeroed};
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::id;
use std::ptr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use crate::memory::{SparePlaceholder, memory_file, seal_and_reopen};
use crate::next;
use crate::sys::{
    EACCES, EINVAL, EIO, ENOMEM, Iovec, MADV_POPULATE_READ, MAP_ANONYMOUS, MAP_FAILED, MAP_FIXED,
    MAP_FIXED_NOREPLACE, MAP_NORESERVE, MAP_POPULATE, MAP_PRIVATE, MAP_SHARED, MAP_TYPE, MREMAP_FIXED,
    MREMAP_MAYMOVE, MSG_CMSG_CLOEXEC, Message, PROT_READ, PROT_WRITE, SCM_RIGHTS, SOL_SOCKET, errno, madvise,
    mprotect, mremap, munmap, page_size, recvmsg,
};

/// The environment variable that names the socket of `blobd exec`.
const SOCKET_VARIABLE: &str = "BLOBD_EXEC_SOCKET";

/// The longest error message read from `blobd exec`.
const MAX_REASON_BYTES: usize = 4096;

/// The most descriptors in one message.
const BATCH: usize = 64;
const BATCH_U32: u32 = 64;

/// A model's file in this process's memory.
pub(crate) struct Image {
    address: usize,
    length: usize,
    /// Page-aligned ranges, sorted, each mapped from one file. Together they are the whole image.
    segments: Vec<Range<usize>>,
    /// The placeholder that `stat` has reported. The next `open` uses it, because a program may compare the
    /// inodes of both.
    pub(crate) spare: SparePlaceholder,
    /// The connection to `blobd exec`; the model is in use while it is open.
    _lease: UnixStream,
}

/// Why a model cannot be opened: the value for `errno`, and a message, which may be empty.
pub(crate) struct OpenError {
    pub(crate) errno: c_int,
    pub(crate) reason: String,
}

impl From<io::Error> for OpenError {
    fn from(error: io::Error) -> Self {
        let reason = format!("request to blobd exec failed: {error}");
        Self { errno: error.raw_os_error().unwrap_or(EIO), reason }
    }
}

/// The image of the model with this path. It is requested unless this process has it already.
pub(crate) fn find(path: &[u8]) -> Result<Arc<Image>, OpenError> {
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
    let image = Image::request(path).map(Arc::new);
    let mut images = self::images();
    let images = images.get_or_insert_default();
    match &image {
        Ok(image) => images.insert(path.to_vec(), Slot::Mapped(Arc::clone(image))),
        Err(_) => images.remove(path),
    };
    REQUEST_ENDED.notify_all();
    image
}

/// The state of a path.
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
    /// The length of the file in bytes.
    pub(crate) const fn length(&self) -> usize {
        self.length
    }

    /// Copies bytes from `offset` on, up to the end of the image; returns how many.
    ///
    /// # Safety
    /// `out` must be writable for `length` bytes.
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

    /// `mmap` of the image's pages; an error is a value for `errno`.
    ///
    /// # Safety
    /// As for `mmap`: with `MAP_FIXED`, nothing else may use the range.
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
        let mapped = if is_writable { Err(EINVAL) } else { self.map_again(target, offset..end) };
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

    /// The address of an offset in the image.
    const fn at(&self, offset: usize) -> *mut c_void {
        (self.address as *mut c_void).wrapping_byte_add(offset)
    }

    /// Requests the image from `blobd exec` and maps it.
    fn request(path: &[u8]) -> Result<Self, OpenError> {
        let socket = std::env::var_os(SOCKET_VARIABLE);
        let socket = socket.ok_or_else(|| io::Error::other(format!("{SOCKET_VARIABLE} is not set")))?;
        let mut stream = UnixStream::connect(socket)?;
        stream.write_all(&u32::try_from(path.len()).unwrap_or(u32::MAX).to_le_bytes())?;
        stream.write_all(path)?;
        let (status, reason_length) = (read_u32(&mut stream)?, read_u32(&mut stream)?);
        if status != 0 {
            let mut reason = vec![0; (reason_length as usize).min(MAX_REASON_BYTES)];
            stream.read_exact(&mut reason)?;
            let reason = String::from_utf8_lossy(&reason).into_owned();
            return Err(OpenError { errno: status.cast_signed(), reason });
        }
        let mut image = Self::reserve(read_u64(&mut stream)?, stream.try_clone()?)?;
        let header_length = read_u64(&mut stream)?;
        let part_count = read_u32(&mut stream)?;
        let fd_count = read_u32(&mut stream)?;
        image.receive_header(&mut stream, header_length)?;
        let parts: io::Result<Vec<_>> = (0..part_count).map(|_| Part::read(&mut stream)).collect();
        image.receive_parts(&mut stream, &parts?, fd_count)?;
        image.segments.sort_by_key(|segment| segment.start);
        Ok(image)
    }

    fn reserve(length: u64, lease: UnixStream) -> io::Result<Self> {
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
            spare: SparePlaceholder::default(),
            _lease: lease,
        })
    }

    fn receive_header(&mut self, stream: &mut UnixStream, length: u64) -> io::Result<()> {
        self.map_copy(0, length, |header| stream.read_exact(header))
    }

    /// Receives the descriptors in batches and maps the parts of each batch. The parts are sorted by
    /// descriptor.
    fn receive_parts(&mut self, stream: &mut UnixStream, parts: &[Part], fd_count: u32) -> io::Result<()> {
        let mut remaining = parts;
        let mut first = 0;
        while first < fd_count {
            let fds = receive_fds(stream)?;
            let count = (fd_count - first).min(BATCH_U32);
            if fds.len() != count as usize {
                return Err(io::Error::other("descriptors lost: too many open files; raise `ulimit -n`"));
            }
            let batch_end = remaining.partition_point(|part| part.fd < first.saturating_add(count));
            let (batch, later) = remaining.split_at(batch_end);
            for part in batch {
                let fd = fds.get(part.fd.saturating_sub(first) as usize).ok_or_else(invalid)?;
                self.map_part(part, fd)?;
            }
            (remaining, first) = (later, first + count);
            stream.write_all(&[0])?;
        }
        if remaining.is_empty() { Ok(()) } else { Err(invalid()) }
    }

    /// Maps a part, or copies it if its offset in its file is not page-aligned.
    fn map_part(&mut self, part: &Part, fd: &OwnedFd) -> io::Result<()> {
        if !part.fd_offset.is_multiple_of(page_size() as u64) {
            return self.map_copy(part.offset, part.length, |bytes| read_at(fd, part.fd_offset, bytes));
        }
        let pages = self.pages(part.offset, part.length)?;
        let offset = i64::try_from(part.fd_offset).map_err(|_long| invalid())?;
        self.map_pages(pages, fd, offset)
    }

    /// Maps pages of a file. It is open only for reading, so the pages cannot be made writable.
    fn map_pages(&mut self, pages: Range<usize>, fd: &OwnedFd, offset: i64) -> io::Result<()> {
        let (address, flags) = (self.at(pages.start), MAP_SHARED | MAP_FIXED);
        // SAFETY: Needed to map the file at this address. MAP_FIXED replaces only reserved pages of the
        // image, which the program has not received yet.
        let mapped = unsafe { next::mmap64(address, pages.len(), PROT_READ, flags, fd.as_raw_fd(), offset) };
        if mapped == MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
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

/// A part of the image that is a range of a blob.
struct Part {
    /// The offset in the image.
    offset: u64,
    length: u64,
    /// The offset in the file of `fd`.
    fd_offset: u64,
    /// The number of the descriptor.
    fd: u32,
}

impl Part {
    fn read(stream: &mut UnixStream) -> io::Result<Self> {
        let mut next = || read_u64(stream);
        let (offset, length, fd_offset) = (next()?, next()?, next()?);
        Ok(Self { offset, length, fd_offset, fd: read_u32(stream)? })
    }
}

fn read_u32(stream: &mut UnixStream) -> io::Result<u32> {
    let mut bytes = [0; 4];
    stream.read_exact(&mut bytes)?;
    Ok(u32::from_le_bytes(bytes))
}

fn read_u64(stream: &mut UnixStream) -> io::Result<u64> {
    let mut bytes = [0; 8];
    stream.read_exact(&mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}

fn invalid() -> io::Error {
    io::ErrorKind::InvalidData.into()
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

/// The control data of a message: a `size_t` in two words, two `int`s, then the descriptors.
#[repr(C, align(8))]
struct Control([c_uint; 4 + BATCH]);

/// Receives one byte and the descriptors attached to it.
fn receive_fds(stream: &UnixStream) -> io::Result<Vec<OwnedFd>> {
    let mut byte = 0_u8;
    let mut part = Iovec { base: (&raw mut byte).cast(), length: 1 };
    let mut control = Control([0; 4 + BATCH]);
    // SAFETY: Needed to receive descriptors. All pointers are to locals that outlive the call, with the
    // correct lengths. All zeros is a valid `Message`.
    let received = unsafe {
        let mut message: Message = zeroed();
        (message.parts, message.part_count) = (&raw mut part, 1);
        (message.control, message.control_length) = ((&raw mut control).cast(), size_of::<Control>());
        recvmsg(stream.as_raw_fd(), &raw mut message, MSG_CMSG_CLOEXEC)
    };
    if received < 1 {
        return Err(if received == 0 { invalid() } else { io::Error::last_os_error() });
    }
    let [length, _, level, kind, fds @ ..] = control.0;
    if (level.cast_signed(), kind.cast_signed()) != (SOL_SOCKET, SCM_RIGHTS) {
        return Err(invalid());
    }
    let count = (length as usize / size_of::<c_int>()).saturating_sub(4);
    // SAFETY: Needed to own the descriptors, which the kernel has just created in this process.
    Ok(fds.into_iter().take(count).map(|fd| unsafe { OwnedFd::from_raw_fd(fd.cast_signed()) }).collect())
}
