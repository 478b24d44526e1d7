//! The image of a model: requested once per path, and mapped until the process ends.

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

use crate::memory::{Spare, memory_file, sealed};
use crate::next;
use crate::sys::{
    EACCES, EINVAL, EIO, ENOMEM, Iovec, MADV_POPULATE_READ, MAP_ANONYMOUS, MAP_FAILED, MAP_FIXED,
    MAP_FIXED_NOREPLACE, MAP_NORESERVE, MAP_POPULATE, MAP_PRIVATE, MAP_SHARED, MAP_TYPE, MREMAP_FIXED,
    MREMAP_MAYMOVE, MSG_CMSG_CLOEXEC, Message, PROT_READ, PROT_WRITE, SCM_RIGHTS, SOL_SOCKET, errno, madvise,
    mprotect, mremap, munmap, page_size, recvmsg,
};

/// The environment variable that names the socket of `blobd exec`.
const SOCKET_VARIABLE: &str = "BLOBD_EXEC_SOCKET";

/// The longest reason that is read for a refusal.
const MAX_REASON_BYTES: usize = 4096;

/// As many descriptors as come at a time.
const BATCH: usize = 64;
const BATCH_COUNT: u32 = 64;

/// A model's file in this process's memory.
pub(crate) struct Image {
    address: usize,
    length: usize,
    /// Whole pages that come from one place each, in order; together all of the image.
    segments: Vec<Range<usize>>,
    /// What the next `open` will stand for, once `stat` has shown it: a program that compares the two
    /// finds one file.
    pub(crate) spare: Spare,
    /// The model is in use while this is open.
    _lease: UnixStream,
}

/// Why there is no image: C's number, and the words to say once.
pub(crate) struct Refusal {
    pub(crate) errno: c_int,
    pub(crate) reason: String,
}

impl From<io::Error> for Refusal {
    fn from(error: io::Error) -> Self {
        let reason = format!("blobd exec cannot be asked: {error}");
        Self { errno: error.raw_os_error().unwrap_or(EIO), reason }
    }
}

/// The image behind a path, from memory if it was asked for before.
pub(crate) fn find(path: &[u8]) -> Result<Arc<Image>, Refusal> {
    static ANSWERED: Condvar = Condvar::new();
    let mut images = images();
    loop {
        match images.get_or_insert_default().get(path) {
            Some(Slot::Known(image)) => return Ok(Arc::clone(image)),
            // Threads that open one path map it once.
            Some(Slot::Asked { process }) if *process == id() => {
                images = ANSWERED.wait(images).unwrap_or_else(PoisonError::into_inner);
            }
            Some(Slot::Asked { .. }) | None => break,
        }
    }
    images.get_or_insert_default().insert(path.to_vec(), Slot::Asked { process: id() });
    // A fork while this thread asks must not leave a lock behind that nobody opens in the child.
    drop(images);
    let answer = Image::ask(path).map(Arc::new);
    let mut images = self::images();
    let images = images.get_or_insert_default();
    match &answer {
        Ok(image) => images.insert(path.to_vec(), Slot::Known(Arc::clone(image))),
        Err(_refusal) => images.remove(path),
    };
    ANSWERED.notify_all();
    answer
}

/// What is known of a path.
pub(crate) enum Slot {
    Known(Arc<Image>),
    /// A thread of this process asks, and wakes those that wait. A process that was forked meanwhile has
    /// no such thread, and asks for itself.
    Asked {
        process: u32,
    },
}

pub(crate) fn images() -> MutexGuard<'static, Option<HashMap<Vec<u8>, Slot>>> {
    static IMAGES: Mutex<Option<HashMap<Vec<u8>, Slot>>> = Mutex::new(None);
    IMAGES.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Image {
    /// How long the file is, in bytes.
    pub(crate) const fn length(&self) -> usize {
        self.length
    }

    /// Copies bytes from an offset on, up to the image's end; returns how many.
    ///
    /// # Safety
    /// `out` must be writable for `length` bytes.
    pub(crate) unsafe fn read(&self, offset: u64, out: *mut c_void, length: usize) -> usize {
        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
        let count = self.length.saturating_sub(offset).min(length);
        if count > 0 {
            let source = self.at(offset);
            // SAFETY: Needed to fill the caller's buffer. The source is inside the image, which is
            // readable for ever; the target is the caller's promise.
            unsafe { ptr::copy(source.cast_const().cast::<u8>(), out.cast(), count) };
        }
        count
    }

    /// What `mmap` does, with the pages of the image; an error is C's number.
    ///
    /// # Safety
    /// As for `mmap`: with `MAP_FIXED` the range must be the caller's to give.
    pub(crate) unsafe fn map(
        &self,
        hint: *mut c_void,
        length: usize,
        protection: c_int,
        flags: c_int,
        offset: i64,
    ) -> Result<*mut c_void, c_int> {
        let page = page_size();
        let writes = protection & PROT_WRITE != 0;
        if writes && flags & MAP_TYPE != MAP_PRIVATE {
            return Err(EACCES);
        }
        let offset = usize::try_from(offset).map_err(|_negative| EINVAL)?;
        let length = length.checked_next_multiple_of(page).filter(|length| *length > 0).ok_or(EINVAL)?;
        if !offset.is_multiple_of(page) {
            return Err(EINVAL);
        }
        let end = offset.checked_add(length).ok_or(EINVAL)?.min(self.length.next_multiple_of(page));
        let kept = flags & (MAP_FIXED | MAP_FIXED_NOREPLACE);
        // What is private and may be written is a copy of its own; else pages to be covered.
        let (initial, kind) = if writes { (PROT_READ | PROT_WRITE, 0) } else { (0, MAP_NORESERVE) };
        let kind = kind | MAP_PRIVATE | MAP_ANONYMOUS | kept;
        // SAFETY: Needed to own the range; the caller's promise is `mmap`'s.
        let target = unsafe { next::mmap64(hint, length, initial, kind, -1, 0) };
        if target == MAP_FAILED {
            return Err(errno());
        }
        let covered = if writes { Err(EINVAL) } else { self.cover(target, offset..end) };
        if covered == Err(EINVAL) {
            // A copy; also under a system that does not map a page twice, such as some sandboxes.
            // SAFETY: Needed to fill the range, which nobody has seen yet.
            unsafe {
                mprotect(target, length, PROT_READ | PROT_WRITE);
                self.read(offset as u64, target, length);
                mprotect(target, length, protection);
            }
        } else if let Err(error) = covered {
            // SAFETY: Needed to leave nothing behind. Nobody has seen the range.
            unsafe { munmap(target, length) };
            return Err(error);
        } else if flags & MAP_POPULATE != 0 {
            // SAFETY: Needed to do as told. Advice about readable maps; an old kernel refuses it.
            unsafe { madvise(target, end.saturating_sub(offset), MADV_POPULATE_READ) };
        }
        Ok(target)
    }

    /// Maps a range of the image a second time, over pages of ours at `target`.
    fn cover(&self, target: *mut c_void, range: Range<usize>) -> Result<(), c_int> {
        let first = self.segments.partition_point(|segment| segment.end <= range.start);
        for segment in self.segments.iter().skip(first).take_while(|segment| segment.start < range.end) {
            let (start, end) = (segment.start.max(range.start), segment.end.min(range.end));
            let place = target.wrapping_byte_add(start - range.start);
            let flags = MREMAP_MAYMOVE | MREMAP_FIXED;
            // SAFETY: Needed to show the same pages again. An old length of zero leaves the source as
            // it is: it lies in one shared map of the image. The target was reserved by `map`.
            let mapped = unsafe { mremap(self.at(start), 0, end - start, flags, place) };
            if mapped == MAP_FAILED {
                return Err(errno());
            }
        }
        Ok(())
    }

    /// An address in the image.
    const fn at(&self, offset: usize) -> *mut c_void {
        (self.address as *mut c_void).wrapping_byte_add(offset)
    }

    /// Asks `blobd exec` for the image and maps it.
    fn ask(path: &[u8]) -> Result<Self, Refusal> {
        let socket = std::env::var_os(SOCKET_VARIABLE);
        let socket = socket.ok_or_else(|| io::Error::other(format!("{SOCKET_VARIABLE} is not set")))?;
        let mut stream = UnixStream::connect(socket)?;
        stream.write_all(&u32::try_from(path.len()).unwrap_or(u32::MAX).to_le_bytes())?;
        stream.write_all(path)?;
        let (status, reason_length) = (number_32(&mut stream)?, number_32(&mut stream)?);
        if status != 0 {
            let mut reason = vec![0; (reason_length as usize).min(MAX_REASON_BYTES)];
            stream.read_exact(&mut reason)?;
            let reason = String::from_utf8_lossy(&reason).into_owned();
            return Err(Refusal { errno: status.cast_signed(), reason });
        }
        let mut image = Self::reserve(number_64(&mut stream)?, stream.try_clone()?)?;
        let header_length = number_64(&mut stream)?;
        let part_count = number_32(&mut stream)?;
        let fd_count = number_32(&mut stream)?;
        image.receive_header(&mut stream, header_length)?;
        let parts: io::Result<Vec<_>> = (0..part_count).map(|_| Part::read(&mut stream)).collect();
        image.receive_parts(&mut stream, &parts?, fd_count)?;
        image.segments.sort_by_key(|segment| segment.start);
        Ok(image)
    }

    fn reserve(length: u64, lease: UnixStream) -> io::Result<Self> {
        let length = usize::try_from(length).map_err(|_long| io::Error::from_raw_os_error(ENOMEM))?;
        let flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        // SAFETY: Needed to own a range. Without MAP_FIXED the kernel chooses one that nobody uses.
        let address = unsafe { next::mmap64(ptr::null_mut(), length.max(1), PROT_READ, flags, -1, 0) };
        if address == MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self {
            address: address.addr(),
            length,
            segments: Vec::new(),
            spare: Spare::default(),
            _lease: lease,
        })
    }

    fn receive_header(&mut self, stream: &mut UnixStream, length: u64) -> io::Result<()> {
        self.fill(0, length, |header| stream.read_exact(header))
    }

    /// Receives descriptors and maps the parts that each is for. Parts come in the order of their
    /// descriptors.
    fn receive_parts(&mut self, stream: &mut UnixStream, parts: &[Part], fd_count: u32) -> io::Result<()> {
        let mut left = parts;
        let mut first = 0;
        while first < fd_count {
            let fds = receive_fds(stream)?;
            let count = (fd_count - first).min(BATCH_COUNT);
            if fds.len() != count as usize {
                return Err(io::Error::other("descriptors were lost on the way; raise `ulimit -n`"));
            }
            let ours = left.partition_point(|part| part.fd < first.saturating_add(count));
            let (now, later) = left.split_at(ours);
            for part in now {
                let fd = fds.get(part.fd.saturating_sub(first) as usize).ok_or_else(invalid)?;
                self.place(part, fd)?;
            }
            (left, first) = (later, first + count);
            stream.write_all(&[0])?;
        }
        if left.is_empty() { Ok(()) } else { Err(invalid()) }
    }

    /// Maps a part, or copies it if it does not start at a page's start.
    fn place(&mut self, part: &Part, fd: &OwnedFd) -> io::Result<()> {
        if !part.fd_offset.is_multiple_of(page_size() as u64) {
            return self.fill(part.offset, part.length, |bytes| read_at(fd, part.fd_offset, bytes));
        }
        let pages = self.pages(part.offset, part.length)?;
        let offset = i64::try_from(part.fd_offset).map_err(|_long| invalid())?;
        self.map_pages(pages, fd, offset)
    }

    /// Maps pages of a file that is open for reading alone, so that nobody can make them writable.
    fn map_pages(&mut self, pages: Range<usize>, fd: &OwnedFd, offset: i64) -> io::Result<()> {
        let (address, flags) = (self.at(pages.start), MAP_SHARED | MAP_FIXED);
        // SAFETY: Needed to put the file there. MAP_FIXED replaces pages of the image alone, which
        // nobody has seen yet.
        let mapped = unsafe { next::mmap64(address, pages.len(), PROT_READ, flags, fd.as_raw_fd(), offset) };
        if mapped == MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        self.segments.push(pages);
        Ok(())
    }

    /// Makes pages of our own and has them filled. They are a file's that nobody can write any more: the
    /// program may map them again, and `mprotect` must refuse it what it refuses for a blob.
    fn fill(
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
        write_mapped(&file, usize::try_from(length).map_err(|_long| invalid())?, fill)?;
        self.map_pages(pages, &sealed(&file)?, 0)
    }

    /// The whole pages of a part of the image.
    fn pages(&self, offset: u64, length: u64) -> io::Result<Range<usize>> {
        let page = page_size();
        let end = offset.checked_add(length).filter(|end| *end <= self.length as u64).ok_or_else(invalid)?;
        let bound = |place: u64| usize::try_from(place).map_err(|_long| invalid());
        let start = bound(offset)?;
        if start.is_multiple_of(page) {
            Ok(start..bound(end)?.next_multiple_of(page))
        } else {
            Err(invalid())
        }
    }
}

/// A part of a blob: where in the image, how long, where in which descriptor.
struct Part {
    offset: u64,
    length: u64,
    fd_offset: u64,
    fd: u32,
}

impl Part {
    fn read(stream: &mut UnixStream) -> io::Result<Self> {
        let mut next = || number_64(stream);
        let (offset, length, fd_offset) = (next()?, next()?, next()?);
        Ok(Self { offset, length, fd_offset, fd: number_32(stream)? })
    }
}

fn number_32(stream: &mut UnixStream) -> io::Result<u32> {
    let mut bytes = [0; 4];
    stream.read_exact(&mut bytes)?;
    Ok(u32::from_le_bytes(bytes))
}

fn number_64(stream: &mut UnixStream) -> io::Result<u64> {
    let mut bytes = [0; 8];
    stream.read_exact(&mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}

fn invalid() -> io::Error {
    io::ErrorKind::InvalidData.into()
}

/// Has the first bytes of a file filled in memory.
fn write_mapped(
    file: &File,
    length: usize,
    fill: impl FnOnce(&mut [u8]) -> io::Result<()>,
) -> io::Result<()> {
    let (protection, fd) = (PROT_READ | PROT_WRITE, file.as_raw_fd());
    // SAFETY: Needed to fill the file without a second buffer. Without MAP_FIXED the kernel chooses a range
    // that nobody uses. The slice is inside it, and gone before it is.
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

/// Fills a buffer from an offset of a file on.
fn read_at(fd: &OwnedFd, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
    let mut done = 0;
    while let Some(rest) = bytes.get_mut(done..).filter(|rest| !rest.is_empty()) {
        let at = i64::try_from(offset).map_err(|_long| invalid())?.saturating_add_unsigned(done as u64);
        // SAFETY: Needed because `pread` of this library would be std's. `rest` is a slice.
        let count = unsafe { next::pread64(fd.as_raw_fd(), rest.as_mut_ptr().cast(), rest.len(), at) };
        match usize::try_from(count) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => done += count,
            Err(_negative) => return Err(io::Error::last_os_error()),
        }
    }
    Ok(())
}

/// What comes beside a byte: `size_t` in two words, two `int`s, then the descriptors.
#[repr(C, align(8))]
struct Control([c_uint; 4 + BATCH]);

/// One byte and the descriptors that come with it.
fn receive_fds(stream: &UnixStream) -> io::Result<Vec<OwnedFd>> {
    let mut byte = 0_u8;
    let mut part = Iovec { base: (&raw mut byte).cast(), length: 1 };
    let mut control = Control([0; 4 + BATCH]);
    // SAFETY: Needed to receive descriptors. All pointers are to locals that outlive the call, with
    // their true lengths; all zero is a valid `Message`.
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
    // SAFETY: Needed to own them. The kernel made these numbers for this process just now.
    Ok(fds.into_iter().take(count).map(|fd| unsafe { OwnedFd::from_raw_fd(fd.cast_signed()) }).collect())
}
