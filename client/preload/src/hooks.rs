//! The functions that a program calls instead of the C library's, with the same contracts.
//!
//! A path is checked before the C library's function is called; a descriptor only after the kernel has
//! refused it.

use std::ffi::{CStr, c_char, c_int, c_long, c_uint, c_void};
use std::ptr;

use crate::files::{self, NULL, Path, SubstitutePath};
use crate::reopen::{after_fopen, after_freopen, after_open};
use crate::sys::{
    AT_FDCWD, EACCES, EBADF, EINVAL, ENOTSUP, EROFS, Iovec, MAP_FAILED, O_CLOEXEC, SYS_STATX, W_OK, X_OK,
    errno, set_errno, strdup,
};
use crate::{fork, next, streams};

/// Defines hooks: exported functions, one for each name, with the same body.
macro_rules! hooks {
    ($($($name:ident)|+ ($($argument:ident: $type:ty),*) -> $result:ty $body:block)*) => {$(
        hooks!(@each [$($name)+] ($($argument: $type),*) -> $result, $body);
    )*};
    (@each [$($name:ident)+] $arguments:tt -> $result:ty, $body:block) => {
        $(hooks!(@one $name $arguments -> $result, $body);)+
    };
    (@one $name:ident ($($argument:ident: $type:ty),*) -> $result:ty, $body:block) => {
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name($($argument: $type),*) -> $result {
            // SAFETY: Needed to pass the arguments on. The caller observes the contract of the C function
            // with this name, which implies that of every call in the body.
            unsafe { $body }
        }
    };
}

/// Makes `$call`; if the path is a model's, makes `$instead` with the substitute path.
macro_rules! with_path {
    ($path:ident, $call:expr, $instead:expr) => {
        match SubstitutePath::of(classify($path)) {
            None => $call,
            Some(None) => -1,
            Some(Some(substitute)) => {
                let $path = substitute.as_ptr();
                $instead
            }
        }
    };
}

/// Makes `$call`; if it fails with `EBADF` and the descriptor is a model's, evaluates `$instead`.
macro_rules! or_for_model {
    ($fd:expr, $call:expr, $failed:expr, |$file:ident| $instead:expr) => {{
        let result = $call;
        match (result == $failed && errno() == EBADF).then(|| files::find($fd)).flatten() {
            Some($file) => $instead,
            None => result,
        }
    }};
}

// `open` has the argument `mode` only when it creates a file. In both ABIs it can be declared always.
hooks! {
    open | open64 (path: *const c_char, flags: c_int, mode: c_uint) -> c_int {
        open_model(path, flags)
            .unwrap_or_else(|| after_open(next::open64(path, flags, mode), AT_FDCWD, path, flags))
    }
    __open_2 | __open64_2 (path: *const c_char, flags: c_int) -> c_int {
        open64(path, flags, SubstitutePath::UNUSED_MODE)
    }
    openat | openat64 (dir: c_int, path: *const c_char, flags: c_int, mode: c_uint) -> c_int {
        open_model(path, flags)
            .unwrap_or_else(|| after_open(next::openat64(dir, path, flags, mode), dir, path, flags))
    }
    __openat_2 | __openat64_2 (dir: c_int, path: *const c_char, flags: c_int) -> c_int {
        openat64(dir, path, flags, SubstitutePath::UNUSED_MODE)
    }
    fopen (path: *const c_char, mode: *const c_char) -> *mut c_void {
        fopen_model(path, mode).unwrap_or_else(|| after_fopen(next::fopen(path, mode), path, mode))
    }
    fopen64 (path: *const c_char, mode: *const c_char) -> *mut c_void {
        fopen_model(path, mode).unwrap_or_else(|| after_fopen(next::fopen64(path, mode), path, mode))
    }
    freopen (path: *const c_char, mode: *const c_char, stream: *mut c_void) -> *mut c_void {
        after_freopen(next::freopen(path, mode, stream))
    }
    freopen64 (path: *const c_char, mode: *const c_char, stream: *mut c_void) -> *mut c_void {
        after_freopen(next::freopen64(path, mode, stream))
    }
    fdopen (fd: c_int, mode: *const c_char) -> *mut c_void {
        if files::find(fd).is_some() { streams::open(fd, mode) } else { next::fdopen(fd, mode) }
    }
    fileno | fileno_unlocked (stream: *mut c_void) -> c_int {
        let fd = next::fileno(stream);
        if fd >= 0 { fd } else { streams::fileno(stream).unwrap_or(fd) }
    }
    stat | stat64 (path: *const c_char, out: *mut c_void) -> c_int {
        with_path!(path, next::stat(path, out), next::stat(path, out))
    }
    lstat | lstat64 (path: *const c_char, out: *mut c_void) -> c_int {
        with_path!(path, next::lstat(path, out), next::stat(path, out))
    }
    __xstat | __xstat64 (version: c_int, path: *const c_char, out: *mut c_void) -> c_int {
        with_path!(path, next::__xstat(version, path, out), next::__xstat(version, path, out))
    }
    __lxstat | __lxstat64 (version: c_int, path: *const c_char, out: *mut c_void) -> c_int {
        with_path!(path, next::__lxstat(version, path, out), next::__xstat(version, path, out))
    }
    fstatat | fstatat64 (dir: c_int, path: *const c_char, out: *mut c_void, flags: c_int) -> c_int {
        with_path!(path, next::fstatat(dir, path, out, flags), next::fstatat(dir, path, out, 0))
    }
    __fxstatat | __fxstatat64 (
        version: c_int, dir: c_int, path: *const c_char, out: *mut c_void, flags: c_int
    ) -> c_int {
        with_path!(
            path,
            next::__fxstatat(version, dir, path, out, flags),
            next::__fxstatat(version, dir, path, out, 0)
        )
    }
    statx (dir: c_int, path: *const c_char, flags: c_int, mask: c_uint, out: *mut c_void) -> c_int {
        with_path!(path, next::statx(dir, path, flags, mask, out), next::statx(dir, path, 0, mask, out))
    }
    access (path: *const c_char, mode: c_int) -> c_int {
        with_path!(path, next::access(path, mode), access_model(path, mode))
    }
    euidaccess | eaccess (path: *const c_char, mode: c_int) -> c_int {
        with_path!(path, next::euidaccess(path, mode), access_model(path, mode))
    }
    faccessat (dir: c_int, path: *const c_char, mode: c_int, flags: c_int) -> c_int {
        with_path!(path, next::faccessat(dir, path, mode, flags), access_model(path, mode))
    }
    realpath (path: *const c_char, out: *mut c_char) -> *mut c_char {
        match SubstitutePath::of(classify(path)) {
            None => next::realpath(path, out),
            Some(None) => ptr::null_mut(),
            Some(Some(_substitute)) => copy_path(path, out),
        }
    }
    __realpath_chk (path: *const c_char, out: *mut c_char, _out_length: usize) -> *mut c_char {
        realpath(path, out)
    }
    readlink (path: *const c_char, out: *mut c_char, length: usize) -> isize {
        with_path!(path, next::readlink(path, out, length), readlink_model(path))
    }
    __readlink_chk (path: *const c_char, out: *mut c_char, length: usize, _out_length: usize) -> isize {
        readlink(path, out, length)
    }
    readlinkat (dir: c_int, path: *const c_char, out: *mut c_char, length: usize) -> isize {
        with_path!(path, next::readlinkat(dir, path, out, length), readlink_model(path))
    }
    __readlinkat_chk (
        dir: c_int, path: *const c_char, out: *mut c_char, length: usize, _out_length: usize
    ) -> isize {
        readlinkat(dir, path, out, length)
    }
    read (fd: c_int, out: *mut c_void, length: usize) -> isize {
        or_for_model!(fd, next::read(fd, out, length), -1, |file| file.read(out, length))
    }
    __read_chk (fd: c_int, out: *mut c_void, length: usize, _out_length: usize) -> isize {
        read(fd, out, length)
    }
    pread | pread64 (fd: c_int, out: *mut c_void, length: usize, offset: i64) -> isize {
        let result = || next::pread64(fd, out, length, offset);
        or_for_model!(fd, result(), -1, |file| file.read_at(out, length, offset))
    }
    __pread_chk | __pread64_chk (
        fd: c_int, out: *mut c_void, length: usize, offset: i64, _out_length: usize
    ) -> isize {
        pread64(fd, out, length, offset)
    }
    readv (fd: c_int, parts: *const Iovec, count: c_int) -> isize {
        or_for_model!(fd, next::readv(fd, parts, count), -1, |file| file.read_parts(parts, count, None))
    }
    preadv | preadv64 (fd: c_int, parts: *const Iovec, count: c_int, offset: i64) -> isize {
        let result = || next::preadv64(fd, parts, count, offset);
        or_for_model!(fd, result(), -1, |file| file.read_parts(parts, count, Some(offset)))
    }
    // The flags are ignored for a model: a read from a mapping cannot avoid waiting for the disk.
    preadv2 | preadv64v2 (
        fd: c_int, parts: *const Iovec, count: c_int, offset: i64, flags: c_int
    ) -> isize {
        let result = || next::preadv64v2(fd, parts, count, offset, flags);
        let offset = (offset != -1).then_some(offset);
        or_for_model!(fd, result(), -1, |file| file.read_parts(parts, count, offset))
    }
    lseek | lseek64 (fd: c_int, offset: i64, whence: c_int) -> i64 {
        or_for_model!(fd, next::lseek64(fd, offset, whence), -1, |file| file.seek(offset, whence))
    }
    mmap | mmap64 (
        hint: *mut c_void, length: usize, protection: c_int, flags: c_int, fd: c_int, offset: i64
    ) -> *mut c_void {
        let result = || next::mmap64(hint, length, protection, flags, fd, offset);
        or_for_model!(fd, result(), MAP_FAILED, |file| {
            file.image().map(hint, length, protection, flags, offset).unwrap_or_else(|error| {
                set_errno(error);
                MAP_FAILED
            })
        })
    }
    // A program that gets `EINVAL` here uses `read` and `write` instead.
    copy_file_range (
        from: c_int, at: *mut i64, to: c_int, to_at: *mut i64, length: usize, flags: c_uint
    ) -> isize {
        let result = || next::copy_file_range(from, at, to, to_at, length, flags);
        or_for_model!(from, result(), -1, |_file| failed(EINVAL))
    }
    sendfile | sendfile64 (to: c_int, from: c_int, at: *mut i64, length: usize) -> isize {
        or_for_model!(from, next::sendfile64(to, from, at, length), -1, |_file| failed(EINVAL))
    }
    getxattr (path: *const c_char, name: *const c_char, out: *mut c_void, length: usize) -> isize {
        with_path!(path, next::getxattr(path, name, out, length), xattr_model(path))
    }
    lgetxattr (path: *const c_char, name: *const c_char, out: *mut c_void, length: usize) -> isize {
        with_path!(path, next::lgetxattr(path, name, out, length), xattr_model(path))
    }
    listxattr (path: *const c_char, out: *mut c_char, length: usize) -> isize {
        with_path!(path, next::listxattr(path, out, length), xattr_model(path))
    }
    llistxattr (path: *const c_char, out: *mut c_char, length: usize) -> isize {
        with_path!(path, next::llistxattr(path, out, length), xattr_model(path))
    }
    posix_fadvise | posix_fadvise64 (fd: c_int, offset: i64, length: i64, advice: c_int) -> c_int {
        // This function returns the error instead of setting `errno`. Advice for a model is ignored.
        let result = next::posix_fadvise64(fd, offset, length, advice);
        if result == EBADF && files::find(fd).is_some() { 0 } else { result }
    }
    syscall (
        number: c_long, a: c_long, b: c_long, c: c_long, d: c_long, e: c_long, f: c_long
    ) -> c_long {
        // libuv calls `statx` by its number.
        let path = if number == SYS_STATX { b as *const c_char } else { ptr::null() };
        match SubstitutePath::of(classify(path)) {
            None => next::syscall(number, a, b, c, d, e, f),
            Some(None) => -1,
            Some(Some(substitute)) => next::syscall(number, a, substitute.as_ptr() as c_long, 0, d, e, f),
        }
    }
}

/// Classifies a path. Before the first model is opened, installs the handlers for forks.
///
/// # Safety
/// `path` must be null or a C string.
unsafe fn classify(path: *const c_char) -> Path {
    // SAFETY: The caller guarantees the same.
    let path = unsafe { files::classify(path) };
    if matches!(path, Path::Model(_)) {
        fork::install_handlers();
    }
    path
}

/// `open` of a path in the directory of the models; `None` for any other path.
///
/// # Safety
/// `path` must be null or a C string.
unsafe fn open_model(path: *const c_char, flags: c_int) -> Option<c_int> {
    // SAFETY: The caller guarantees the same.
    match unsafe { classify(path) } {
        Path::Other => None,
        Path::ModelsDirectory => {
            set_errno(EACCES);
            Some(-1)
        }
        Path::Model(model) => Some(files::open(&model, flags)),
    }
}

/// `fopen` of a path in the directory of the models; `None` for any other path.
///
/// # Safety
/// `path` and `mode` must be C strings.
unsafe fn fopen_model(path: *const c_char, mode: *const c_char) -> Option<*mut c_void> {
    // SAFETY: The caller guarantees the same.
    let path = unsafe { classify(path) };
    match path {
        Path::Other => None,
        Path::ModelsDirectory => {
            set_errno(EACCES);
            Some(NULL)
        }
        // SAFETY: The caller guarantees a valid `mode`.
        Path::Model(model) => Some(unsafe { streams::open_with(mode, || files::open(&model, O_CLOEXEC)) }),
    }
}

/// `access` of a model: it can only be read.
fn access_model(_path: *const c_char, mode: c_int) -> c_int {
    let error = match mode {
        _ if mode & W_OK != 0 => EROFS,
        _ if mode & X_OK != 0 => EACCES,
        _ if mode & !7 != 0 => EINVAL,
        _ => return 0,
    };
    set_errno(error);
    -1
}

/// `readlink` of a model, which is not a link.
fn readlink_model(_path: *const c_char) -> isize {
    failed(EINVAL)
}

/// `getxattr` and `listxattr` of a model, which has no extended attributes.
fn xattr_model(_path: *const c_char) -> isize {
    failed(ENOTSUP)
}

/// Sets `errno` and returns -1.
fn failed(error: c_int) -> isize {
    set_errno(error);
    -1
}

/// `realpath` of a model's path, which has no links to resolve.
///
/// # Safety
/// `path` must be a C string; `out` must be null or have space for the longest path.
unsafe fn copy_path(path: *const c_char, out: *mut c_char) -> *mut c_char {
    if out.is_null() {
        // SAFETY: Needed because the program releases the result with `free`. `path` is a C string.
        return unsafe { strdup(path) };
    }
    // SAFETY: Needed to write to `out`. The caller guarantees a C string and enough space.
    unsafe {
        let text = CStr::from_ptr(path).to_bytes_with_nul();
        ptr::copy_nonoverlapping(text.as_ptr().cast(), out, text.len());
    }
    out
}
