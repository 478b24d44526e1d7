//! C streams (`FILE`) of models: they read from the image, while the C library's streams would read the
//! descriptor through the kernel.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::os::fd::{FromRawFd, OwnedFd};
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::files::{self, OpenFile};
use crate::sys::{CookieFunctions, EBADF, EROFS, fopencookie, set_errno};

/// The open streams, with the descriptor that `fileno` returns.
static OPEN_STREAMS: Mutex<Vec<Stream>> = Mutex::new(Vec::new());

pub(crate) type Stream = (usize, c_int);

pub(crate) fn open_streams() -> MutexGuard<'static, Vec<Stream>> {
    OPEN_STREAMS.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Cookie {
    file: Arc<OpenFile>,
    fd: c_int,
}

/// A stream of the model that `open_fd` opens; null on failure. `mode` must be a C string.
pub(crate) unsafe fn open_with(mode: *const c_char, open_fd: impl FnOnce() -> c_int) -> *mut c_void {
    // SAFETY: The caller guarantees the same.
    if !unsafe { is_read_only(mode) } {
        set_errno(EROFS);
        return ptr::null_mut();
    }
    let fd = open_fd();
    if fd < 0 {
        return ptr::null_mut();
    }
    // SAFETY: The caller guarantees the same.
    let stream = unsafe { open(fd, mode) };
    if stream.is_null() {
        // SAFETY: Needed to close the descriptor, which no stream owns.
        drop(unsafe { OwnedFd::from_raw_fd(fd) });
    }
    stream
}

/// A stream of a model's descriptor, which it then owns. Null on failure; the descriptor then stays open. `mode` must
/// be a C string.
pub(crate) unsafe fn open(fd: c_int, mode: *const c_char) -> *mut c_void {
    // SAFETY: The caller guarantees the same.
    if !unsafe { is_read_only(mode) } {
        set_errno(EROFS);
        return ptr::null_mut();
    }
    let Some(file) = files::find(fd) else {
        set_errno(EBADF);
        return ptr::null_mut();
    };
    let cookie = Box::into_raw(Box::new(Cookie { file, fd }));
    let functions = CookieFunctions { read: Some(read), write: None, seek: Some(seek), close: Some(close) };
    // SAFETY: Needed to create a stream. The cookie is valid until `close` frees it.
    let stream = unsafe { fopencookie(cookie.cast(), c"r".as_ptr(), functions) };
    if stream.is_null() {
        // SAFETY: Needed to free the cookie, which no stream owns.
        drop(unsafe { Box::from_raw(cookie) });
        return stream;
    }
    open_streams().push((stream.addr(), fd));
    stream
}

/// Whether a stream with this mode can only be read. `mode` must be a C string.
unsafe fn is_read_only(mode: *const c_char) -> bool {
    // SAFETY: Needed to read the mode. The caller guarantees a C string.
    let mode = unsafe { CStr::from_ptr(mode) }.to_bytes();
    mode.first() == Some(&b'r') && !mode.contains(&b'+')
}

pub(crate) fn fileno(stream: *mut c_void) -> Option<c_int> {
    open_streams().iter().find(|(known, _)| *known == stream.addr()).map(|(_, fd)| *fd)
}

unsafe extern "C" fn read(cookie: *mut c_void, out: *mut c_char, length: usize) -> isize {
    // SAFETY: Needed to get the file. C passes the cookie that `open` set, and a buffer of this length.
    unsafe { (*cookie.cast::<Cookie>()).file.read(out.cast(), length) }
}

unsafe extern "C" fn seek(cookie: *mut c_void, offset: *mut i64, whence: c_int) -> c_int {
    // SAFETY: As for `read`; `offset` points to a variable of C.
    let position = unsafe { (*cookie.cast::<Cookie>()).file.seek(*offset, whence) };
    if position < 0 {
        return -1;
    }
    // SAFETY: As above.
    unsafe { *offset = position };
    0
}

unsafe extern "C" fn close(cookie: *mut c_void) -> c_int {
    // SAFETY: Needed to free the cookie. C calls this function once, last.
    let cookie = unsafe { Box::from_raw(cookie.cast::<Cookie>()) };
    open_streams().retain(|(_, fd)| *fd != cookie.fd);
    // SAFETY: Needed to close the descriptor, which the stream owned.
    drop(unsafe { OwnedFd::from_raw_fd(cookie.fd) });
    0
}
