//! Descriptors that are opened a second time, by a name that the kernel has for them:
//! `/proc/self/fd/N`, `/dev/fd/N`, `/dev/stdin`.
//!
//! For a model of this process that is another `open` of it. For one that another program left open it
//! is refused: `ENXIO` by the kernel where it has files that cannot be opened, else `EBADF` from here.

use std::ffi::{c_char, c_int, c_void};
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::Arc;

use crate::files::{self, NULL, Opened};
use crate::sys::{AT_FDCWD, EBADF, ENXIO, O_CLOEXEC, O_PATH, errno, fclose, set_errno};
use crate::{next, streams};

/// What `open` gives, after what the kernel gave.
///
/// # Safety
/// `path` must be what the kernel was given, relative to `dir`.
pub(crate) unsafe fn checked(fd: c_int, dir: c_int, path: *const c_char, flags: c_int) -> c_int {
    if fd < 0 {
        // SAFETY: The caller's promise.
        return unsafe { refused(dir, path) }.map_or(fd, |file| again(Some(&file), flags));
    }
    if flags & O_PATH != 0 || !files::is_stand_in(fd) {
        return fd;
    }
    let file = files::find(fd);
    // SAFETY: Needed to close it: the caller has not seen it.
    drop(unsafe { OwnedFd::from_raw_fd(fd) });
    again(file.as_ref(), flags)
}

/// What `fopen` gives, after what the C library gave.
///
/// # Safety
/// `path` and `mode` must be what it was given, and `stream` what it returned.
pub(crate) unsafe fn checked_stream(
    stream: *mut c_void,
    path: *const c_char,
    mode: *const c_char,
) -> *mut c_void {
    let file = if stream.is_null() {
        // SAFETY: The caller's promise.
        let Some(file) = (unsafe { refused(AT_FDCWD, path) }) else { return stream };
        Some(file)
    } else {
        // SAFETY: Needed to look at its descriptor: it is open.
        let fd = unsafe { next::fileno(stream) };
        if fd < 0 || !files::is_stand_in(fd) {
            return stream;
        }
        let file = files::find(fd);
        // SAFETY: Needed to close it: the caller has not seen it, or is told that it is gone.
        unsafe { fclose(stream) };
        file
    };
    // SAFETY: The caller's promise.
    unsafe { streams::open_with(mode, || again(file.as_ref(), O_CLOEXEC)) }
}

/// What `freopen` gives: the stream that the caller has cannot become one of ours.
///
/// # Safety
/// `stream` must be what the C library's `freopen` returned.
pub(crate) unsafe fn checked_again(stream: *mut c_void) -> *mut c_void {
    // SAFETY: Needed to look at its descriptor: it is open.
    if stream.is_null() || !files::is_stand_in(unsafe { next::fileno(stream) }) {
        return stream;
    }
    // SAFETY: Needed because a `freopen` that fails closes the stream.
    unsafe { fclose(stream) };
    set_errno(EBADF);
    NULL
}

/// The model behind a path that the kernel refused to open; `errno` stays.
///
/// # Safety
/// As for `checked`.
unsafe fn refused(dir: c_int, path: *const c_char) -> Option<Arc<Opened>> {
    if errno() != ENXIO || !files::any() {
        return None;
    }
    // SAFETY: Needed to look at what is there: the caller's promise.
    let fd = unsafe { next::openat64(dir, path, O_PATH | O_CLOEXEC, 0) };
    // SAFETY: Needed to close it: it was made just now.
    let fd = (fd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(fd) });
    let file = fd.and_then(|fd| files::find(std::os::fd::AsRawFd::as_raw_fd(&fd)));
    set_errno(ENXIO);
    file
}

/// Another `open` of a model.
fn again(file: Option<&Arc<Opened>>, flags: c_int) -> c_int {
    if let Some(file) = file {
        return files::open_image(Arc::clone(file.image()), flags);
    }
    set_errno(EBADF);
    -1
}
