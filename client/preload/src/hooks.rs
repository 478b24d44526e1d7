//! The functions that a program calls instead of the C library's, with the same contracts.
//!
//! A path is checked before the C library's function is called; a descriptor only after the kernel has
//! refused it.
//!
//! A path such as `/proc/self/fd/N`, `/dev/fd/N` or `/dev/stdin` opens a descriptor again. For a model that this process
//! has opened, that is another `open` of it. For a placeholder inherited from another program it fails: with `ENXIO`
//! from the kernel if it supports `memfd_secret`, otherwise with `EBADF` from here.

use std::ffi::{CStr, c_char, c_int, c_long, c_uint, c_void};
use std::os::fd::{FromRawFd, OwnedFd};
use std::ptr;
use std::sync::Arc;

use crate::files::{self, NULL, Opened, SubstitutePath};
use crate::image::Image;
use crate::paths::{self, Path};
use crate::sys::{
    AT_FDCWD, EACCES, EBADF, EINVAL, ENOTSUP, ENXIO, EROFS, Iovec, MAP_FAILED, O_CLOEXEC, O_PATH, SYS_STATX,
    W_OK, X_OK, errno, fclose, set_errno, strdup,
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
        with_path!(AT_FDCWD, $path, $call, $instead)
    };
    ($dir:expr, $path:ident, $call:expr, $instead:expr) => {
        match SubstitutePath::of(classify($dir, $path)) {
            None => $call,
            Some(None) => -1,
            Some(Some(substitute)) => {
                let $path = substitute.pointer();
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

/// Makes `$call`; if one of the paths is a model's, fails instead with `EROFS`.
macro_rules! unless_model {
    ($($dir:expr, $path:expr),+; $call:expr) => {
        if $(matches!(classify($dir, $path), Path::Other))&&+ {
            $call
        } else {
            set_errno(EROFS);
            -1
        }
    };
}

// `open` has the argument `mode` only when it creates a file. In both ABIs it can be declared always.
hooks! {
    open | open64 (path: *const c_char, flags: c_int, mode: c_uint) -> c_int {
        open_model(AT_FDCWD, path, flags)
            .unwrap_or_else(|| after_open(next::open64(path, flags, mode), AT_FDCWD, path, flags))
    }
    __open_2 | __open64_2 (path: *const c_char, flags: c_int) -> c_int {
        open64(path, flags, SubstitutePath::UNUSED_MODE)
    }
    openat | openat64 (dir: c_int, path: *const c_char, flags: c_int, mode: c_uint) -> c_int {
        open_model(dir, path, flags)
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
        with_path!(dir, path, next::fstatat(dir, path, out, flags), next::fstatat(dir, path, out, 0))
    }
    __fxstatat | __fxstatat64 (
        version: c_int, dir: c_int, path: *const c_char, out: *mut c_void, flags: c_int
    ) -> c_int {
        with_path!(
            dir,
            path,
            next::__fxstatat(version, dir, path, out, flags),
            next::__fxstatat(version, dir, path, out, 0)
        )
    }
    statx (dir: c_int, path: *const c_char, flags: c_int, mask: c_uint, out: *mut c_void) -> c_int {
        with_path!(dir, path, next::statx(dir, path, flags, mask, out), next::statx(dir, path, 0, mask, out))
    }
    access (path: *const c_char, mode: c_int) -> c_int {
        with_path!(path, next::access(path, mode), access_model(path, mode))
    }
    euidaccess | eaccess (path: *const c_char, mode: c_int) -> c_int {
        with_path!(path, next::euidaccess(path, mode), access_model(path, mode))
    }
    faccessat (dir: c_int, path: *const c_char, mode: c_int, flags: c_int) -> c_int {
        with_path!(dir, path, next::faccessat(dir, path, mode, flags), access_model(path, mode))
    }
    realpath (path: *const c_char, out: *mut c_char) -> *mut c_char {
        let model = match classify(AT_FDCWD, path) {
            Path::Other => return next::realpath(path, out),
            Path::ModelsDirectory => c"/blobd".to_bytes_with_nul().to_vec(),
            Path::Model(ref model) => [b"/blobd/", model.as_slice(), b"\0"].concat(),
        };
        match SubstitutePath::of(classify(AT_FDCWD, path)) {
            Some(Some(_substitute)) => copy_path(model.as_ptr().cast(), out),
            _ => ptr::null_mut(),
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
        with_path!(dir, path, next::readlinkat(dir, path, out, length), readlink_model(path))
    }
    __readlinkat_chk (
        dir: c_int, path: *const c_char, out: *mut c_char, length: usize, _out_length: usize
    ) -> isize {
        readlinkat(dir, path, out, length)
    }
    opendir (path: *const c_char) -> *mut c_void {
        match SubstitutePath::of(classify(AT_FDCWD, path)) {
            None => next::opendir(path),
            Some(None) => NULL,
            Some(Some(substitute)) => next::opendir(substitute.pointer()),
        }
    }
    readdir (stream: *mut c_void) -> *mut c_void {
        let entry = next::readdir(stream);
        paths::correct_entry(stream, entry);
        entry
    }
    readdir64 (stream: *mut c_void) -> *mut c_void {
        let entry = next::readdir64(stream);
        paths::correct_entry(stream, entry);
        entry
    }
    scandir | scandir64 (
        path: *const c_char, list: *mut c_void, filter: *mut c_void, compare: *mut c_void
    ) -> c_int {
        with_path!(
            path,
            next::scandir(path, list, filter, compare),
            next::scandir(path, list, filter, compare)
        )
    }
    chdir (path: *const c_char) -> c_int {
        with_path!(path, next::chdir(path), next::chdir(path))
    }
    getcwd (out: *mut c_char, length: usize) -> *mut c_char {
        let path = next::getcwd(out, length);
        if let Path::Model(model) = classify(AT_FDCWD, path) {
            let shown = [b"/blobd/", model.as_slice(), b"\0"].concat();
            // The path of the directory that stands for the folder is longer.
            ptr::copy_nonoverlapping(shown.as_ptr().cast(), path, shown.len());
        }
        path
    }
    __getcwd_chk (out: *mut c_char, length: usize, _out_length: usize) -> *mut c_char {
        getcwd(out, length)
    }
    unlink (path: *const c_char) -> c_int { unless_model!(AT_FDCWD, path; next::unlink(path)) }
    rmdir (path: *const c_char) -> c_int { unless_model!(AT_FDCWD, path; next::rmdir(path)) }
    remove (path: *const c_char) -> c_int { unless_model!(AT_FDCWD, path; next::remove(path)) }
    unlinkat (dir: c_int, path: *const c_char, flags: c_int) -> c_int {
        unless_model!(dir, path; next::unlinkat(dir, path, flags))
    }
    mkdir (path: *const c_char, mode: c_uint) -> c_int {
        unless_model!(AT_FDCWD, path; next::mkdir(path, mode))
    }
    mkdirat (dir: c_int, path: *const c_char, mode: c_uint) -> c_int {
        unless_model!(dir, path; next::mkdirat(dir, path, mode))
    }
    rename (old: *const c_char, new: *const c_char) -> c_int {
        unless_model!(AT_FDCWD, old, AT_FDCWD, new; next::rename(old, new))
    }
    renameat (old_dir: c_int, old: *const c_char, dir: c_int, new: *const c_char) -> c_int {
        unless_model!(old_dir, old, dir, new; next::renameat(old_dir, old, dir, new))
    }
    renameat2 (
        old_dir: c_int, old: *const c_char, dir: c_int, new: *const c_char, flags: c_uint
    ) -> c_int {
        unless_model!(old_dir, old, dir, new; next::renameat2(old_dir, old, dir, new, flags))
    }
    link (old: *const c_char, new: *const c_char) -> c_int {
        unless_model!(AT_FDCWD, old, AT_FDCWD, new; next::link(old, new))
    }
    linkat (
        old_dir: c_int, old: *const c_char, dir: c_int, new: *const c_char, flags: c_int
    ) -> c_int {
        unless_model!(old_dir, old, dir, new; next::linkat(old_dir, old, dir, new, flags))
    }
    symlink (target: *const c_char, path: *const c_char) -> c_int {
        unless_model!(AT_FDCWD, path; next::symlink(target, path))
    }
    symlinkat (target: *const c_char, dir: c_int, path: *const c_char) -> c_int {
        unless_model!(dir, path; next::symlinkat(target, dir, path))
    }
    chmod (path: *const c_char, mode: c_uint) -> c_int {
        unless_model!(AT_FDCWD, path; next::chmod(path, mode))
    }
    fchmodat (dir: c_int, path: *const c_char, mode: c_uint, flags: c_int) -> c_int {
        unless_model!(dir, path; next::fchmodat(dir, path, mode, flags))
    }
    truncate | truncate64 (path: *const c_char, length: i64) -> c_int {
        unless_model!(AT_FDCWD, path; next::truncate64(path, length))
    }
    utimensat (dir: c_int, path: *const c_char, times: *const c_void, flags: c_int) -> c_int {
        unless_model!(dir, path; next::utimensat(dir, path, times, flags))
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
        let dir = c_int::try_from(a).unwrap_or(AT_FDCWD);
        match SubstitutePath::of(classify(dir, path)) {
            None => next::syscall(number, a, b, c, d, e, f),
            Some(None) => -1,
            Some(Some(substitute)) => next::syscall(number, a, substitute.pointer() as c_long, 0, d, e, f),
        }
    }
}

/// Classifies a path that is relative to `dir`. Before the first model is opened, installs the handlers for forks. `path`
/// must be null or a C string.
unsafe fn classify(dir: c_int, path: *const c_char) -> Path {
    // SAFETY: The caller guarantees the same.
    let path = unsafe { paths::classify(dir, path) };
    if matches!(path, Path::Model(_)) {
        fork::install_handlers();
    }
    path
}

/// `open` of a path in the directory of the models; `None` for any other path. `path` must be null or a C string.
unsafe fn open_model(dir: c_int, path: *const c_char, flags: c_int) -> Option<c_int> {
    // SAFETY: The caller guarantees the same.
    match unsafe { classify(dir, path) } {
        Path::Other => None,
        Path::ModelsDirectory => {
            set_errno(EACCES);
            Some(-1)
        }
        Path::Model(model) => Some(files::open(&model, flags)),
    }
}

/// `fopen` of a path in the directory of the models; `None` for any other path. `path` and `mode` must be C strings.
unsafe fn fopen_model(path: *const c_char, mode: *const c_char) -> Option<*mut c_void> {
    // SAFETY: The caller guarantees the same.
    let path = unsafe { classify(AT_FDCWD, path) };
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

/// `access` of a model: it can only be read. `path` is its substitute, which is a link unless it is a directory.
fn access_model(path: *const c_char, mode: c_int) -> c_int {
    // SAFETY: Needed to tell a file from a directory. The path is a C string.
    let is_file = || unsafe { next::readlink(path, [0_u8; 1].as_mut_ptr().cast(), 1) } >= 0;
    let error = match mode {
        _ if mode & W_OK != 0 => EROFS,
        _ if mode & X_OK != 0 && is_file() => EACCES,
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

/// `realpath` of a model's path, which has no links to resolve. `path` must be a C string; `out` must be null or have
/// space for the longest path.
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

/// The result of `open`, after the kernel has returned `fd`. `fd` must be the result of that call, and `dir` and
/// `path` its arguments.
unsafe fn after_open(fd: c_int, dir: c_int, path: *const c_char, flags: c_int) -> c_int {
    if fd < 0 {
        // SAFETY: The caller guarantees the same.
        return unsafe { refused_model(dir, path) }.map_or(fd, |image| open_again(Some(image), flags));
    }
    if flags & O_PATH != 0 {
        return fd;
    }
    let image = match files::opened(fd) {
        Opened::Other => return fd,
        Opened::Placeholder(image) => image,
        Opened::Mounted(image) => Some(image),
    };
    // SAFETY: Needed to close the descriptor, which the program has not received.
    drop(unsafe { OwnedFd::from_raw_fd(fd) });
    open_again(image, flags)
}

/// The result of `fopen`, after the C library has returned `stream`. `stream` must be the result of that call, and
/// `path` and `mode` its arguments.
unsafe fn after_fopen(stream: *mut c_void, path: *const c_char, mode: *const c_char) -> *mut c_void {
    let image = if stream.is_null() {
        // SAFETY: The caller guarantees the same.
        let Some(image) = (unsafe { refused_model(AT_FDCWD, path) }) else { return stream };
        Some(image)
    } else {
        // SAFETY: Needed to get its descriptor. The stream is open.
        let image = match files::opened(unsafe { next::fileno(stream) }) {
            Opened::Other => return stream,
            Opened::Placeholder(image) => image,
            Opened::Mounted(image) => Some(image),
        };
        // SAFETY: Needed to close the stream, which the program has not received.
        unsafe { fclose(stream) };
        image
    };
    // SAFETY: The caller guarantees a valid `mode`.
    unsafe { streams::open_with(mode, || open_again(image, O_CLOEXEC)) }
}

/// The result of `freopen`, after the C library has returned `stream`. For a model it is an error, because an
/// existing stream cannot be made to read an image. `stream` must be what the C library's `freopen` returned.
unsafe fn after_freopen(stream: *mut c_void) -> *mut c_void {
    // SAFETY: Needed to get its descriptor. The stream is open.
    if stream.is_null() || !files::is_placeholder(unsafe { next::fileno(stream) }) {
        return stream;
    }
    // SAFETY: Needed because a `freopen` that fails closes the stream, which the program then no longer uses.
    unsafe { fclose(stream) };
    set_errno(EBADF);
    NULL
}

/// The model of this process whose descriptor a path names, if the kernel has refused to open the path; `errno` is
/// unchanged. `path` must be a C string.
unsafe fn refused_model(dir: c_int, path: *const c_char) -> Option<Arc<Image>> {
    if errno() != ENXIO || !files::any_opened() {
        return None;
    }
    // SAFETY: Needed to find the file. The caller guarantees valid arguments.
    let fd = unsafe { next::openat64(dir, path, O_PATH | O_CLOEXEC, 0) };
    // SAFETY: Needed to close the descriptor, which was just created.
    let fd = (fd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(fd) });
    let file = fd.and_then(|fd| files::find(std::os::fd::AsRawFd::as_raw_fd(&fd)));
    set_errno(ENXIO);
    file.map(|file| Arc::clone(file.image()))
}

/// Opens a model again; without one returns -1 and sets `errno`.
fn open_again(image: Option<Arc<Image>>, flags: c_int) -> c_int {
    if let Some(image) = image {
        return files::open_image(image, flags);
    }
    set_errno(EBADF);
    -1
}
