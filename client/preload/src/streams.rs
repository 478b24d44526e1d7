//! C's `FILE` over a model: its reads go to the image, for the C library's own would go to the
//! kernel.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::os::fd::{FromRawFd, OwnedFd};
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::files::{self, Opened};
use crate::sys::{CookieFunctions, EBADF, EROFS, fopencookie, set_errno};

/// The streams that are open, with the descriptor that `fileno` is to give.
static STREAMS: Mutex<Vec<Stream>> = Mutex::new(Vec::new());

/// A stream's address and its descriptor.
pub(crate) type Stream = (usize, c_int);

pub(crate) fn all() -> MutexGuard<'static, Vec<Stream>> {
    STREAMS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a stream reads from.
struct Cookie {
    file: Arc<Opened>,
    fd: c_int,
}

/// A stream over a descriptor of a model that is opened for it; null on failure.
///
/// # Safety
/// `mode` must be a C string.
pub(crate) unsafe fn open_with(mode: *const c_char, open_fd: impl FnOnce() -> c_int) -> *mut c_void {
    // SAFETY: The caller's promise.
    if !unsafe { reads_only(mode) } {
        set_errno(EROFS);
        return ptr::null_mut();
    }
    let fd = open_fd();
    if fd < 0 {
        return ptr::null_mut();
    }
    // SAFETY: The caller's promise.
    let stream = unsafe { open(fd, mode) };
    if stream.is_null() {
        // SAFETY: Needed to leave nothing behind: no stream has taken it.
        drop(unsafe { OwnedFd::from_raw_fd(fd) });
    }
    stream
}

/// A stream over a descriptor of a model, which it then owns; null on failure, which leaves the
/// descriptor.
///
/// # Safety
/// `mode` must be a C string.
pub(crate) unsafe fn open(fd: c_int, mode: *const c_char) -> *mut c_void {
    // SAFETY: The caller's promise.
    if !unsafe { reads_only(mode) } {
        set_errno(EROFS);
        return ptr::null_mut();
    }
    let Some(file) = files::find(fd) else {
        set_errno(EBADF);
        return ptr::null_mut();
    };
    let cookie = Box::into_raw(Box::new(Cookie { file, fd }));
    let functions = CookieFunctions { read: Some(read), write: None, seek: Some(seek), close: Some(close) };
    // SAFETY: Needed to make a stream. The cookie lives until `close` takes it back.
    let stream = unsafe { fopencookie(cookie.cast(), c"r".as_ptr(), functions) };
    if stream.is_null() {
        // SAFETY: Needed to leave nothing behind: the stream has not taken it.
        drop(unsafe { Box::from_raw(cookie) });
        return stream;
    }
    all().push((stream.addr(), fd));
    stream
}

/// Whether a stream of this mode only reads.
///
/// # Safety
/// `mode` must be a C string.
unsafe fn reads_only(mode: *const c_char) -> bool {
    // SAFETY: Needed to read the caller's string: its promise.
    let mode = unsafe { CStr::from_ptr(mode) }.to_bytes();
    mode.first() == Some(&b'r') && !mode.contains(&b'+')
}

/// The descriptor under a stream, if it is one of these.
pub(crate) fn fileno(stream: *mut c_void) -> Option<c_int> {
    all().iter().find(|(known, _)| *known == stream.addr()).map(|(_, fd)| *fd)
}

unsafe extern "C" fn read(cookie: *mut c_void, out: *mut c_char, length: usize) -> isize {
    // SAFETY: Needed to find the file: C gives back what `open` gave it. The buffer is C's promise.
    unsafe { (*cookie.cast::<Cookie>()).file.read(out.cast(), length) }
}

unsafe extern "C" fn seek(cookie: *mut c_void, offset: *mut i64, whence: c_int) -> c_int {
    // SAFETY: As for `read`; the offset is C's own variable.
    let position = unsafe { (*cookie.cast::<Cookie>()).file.seek(*offset, whence) };
    if position < 0 {
        return -1;
    }
    // SAFETY: As above.
    unsafe { *offset = position };
    0
}

unsafe extern "C" fn close(cookie: *mut c_void) -> c_int {
    // SAFETY: Needed to free it: C calls this once, at the end.
    let cookie = unsafe { Box::from_raw(cookie.cast::<Cookie>()) };
    all().retain(|(_, fd)| *fd != cookie.fd);
    // SAFETY: Needed to close it: the stream owned the descriptor.
    drop(unsafe { OwnedFd::from_raw_fd(cookie.fd) });
    0
}
