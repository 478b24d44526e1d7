//! Opening a descriptor again by a path that the kernel has for it: `/proc/self/fd/N`, `/dev/fd/N`,
//! `/dev/stdin`.
//!
//! For a model that this process has opened, this is another `open` of it. For a placeholder inherited
//! from another program it fails: with `ENXIO` from the kernel if it supports `memfd_secret`, otherwise
//! with `EBADF` from here.

use std::ffi::{c_char, c_int, c_void};
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::Arc;

use crate::files::{self, NULL, OpenFile};
use crate::sys::{AT_FDCWD, EBADF, ENXIO, O_CLOEXEC, O_PATH, errno, fclose, set_errno};
use crate::{next, streams};

/// The result of `open`, after the kernel has returned `fd`.
///
/// # Safety
/// `fd` must be the result of that call, and `dir` and `path` its arguments.
pub(crate) unsafe fn after_open(fd: c_int, dir: c_int, path: *const c_char, flags: c_int) -> c_int {
    if fd < 0 {
        // SAFETY: The caller guarantees the same.
        return unsafe { refused_model(dir, path) }.map_or(fd, |file| open_again(Some(&file), flags));
    }
    if flags & O_PATH != 0 || !files::is_placeholder(fd) {
        return fd;
    }
    let file = files::find(fd);
    // SAFETY: Needed to close the descriptor, which the program has not received.
    drop(unsafe { OwnedFd::from_raw_fd(fd) });
    open_again(file.as_ref(), flags)
}

/// The result of `fopen`, after the C library has returned `stream`.
///
/// # Safety
/// `stream` must be the result of that call, and `path` and `mode` its arguments.
pub(crate) unsafe fn after_fopen(
    stream: *mut c_void,
    path: *const c_char,
    mode: *const c_char,
) -> *mut c_void {
    let file = if stream.is_null() {
        // SAFETY: The caller guarantees the same.
        let Some(file) = (unsafe { refused_model(AT_FDCWD, path) }) else { return stream };
        Some(file)
    } else {
        // SAFETY: Needed to get its descriptor. The stream is open.
        let fd = unsafe { next::fileno(stream) };
        if fd < 0 || !files::is_placeholder(fd) {
            return stream;
        }
        let file = files::find(fd);
        // SAFETY: Needed to close the stream, which the program has not received.
        unsafe { fclose(stream) };
        file
    };
    // SAFETY: The caller guarantees a valid `mode`.
    unsafe { streams::open_with(mode, || open_again(file.as_ref(), O_CLOEXEC)) }
}

/// The result of `freopen`, after the C library has returned `stream`. For a model it is an error, because
/// an existing stream cannot be made to read an image.
///
/// # Safety
/// `stream` must be what the C library's `freopen` returned.
pub(crate) unsafe fn after_freopen(stream: *mut c_void) -> *mut c_void {
    // SAFETY: Needed to get its descriptor. The stream is open.
    if stream.is_null() || !files::is_placeholder(unsafe { next::fileno(stream) }) {
        return stream;
    }
    // SAFETY: Needed because a `freopen` that fails closes the stream, which the program then no longer uses.
    unsafe { fclose(stream) };
    set_errno(EBADF);
    NULL
}

/// The model of this process whose descriptor a path names, if the kernel has refused to open the path;
/// `errno` is unchanged.
///
/// # Safety
/// As for `after_open`.
unsafe fn refused_model(dir: c_int, path: *const c_char) -> Option<Arc<OpenFile>> {
    if errno() != ENXIO || !files::any_opened() {
        return None;
    }
    // SAFETY: Needed to find the file. The caller guarantees valid arguments.
    let fd = unsafe { next::openat64(dir, path, O_PATH | O_CLOEXEC, 0) };
    // SAFETY: Needed to close the descriptor, which was just created.
    let fd = (fd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(fd) });
    let file = fd.and_then(|fd| files::find(std::os::fd::AsRawFd::as_raw_fd(&fd)));
    set_errno(ENXIO);
    file
}

/// Opens a model again; without one returns -1 and sets `errno`.
fn open_again(file: Option<&Arc<OpenFile>>, flags: c_int) -> c_int {
    if let Some(file) = file {
        return files::open_image(Arc::clone(file.image()), flags);
    }
    set_errno(EBADF);
    -1
}
