//! Declarations of the C library, as they are on 64-bit Linux: x86-64 and AArch64 agree on these.

use std::ffi::{c_char, c_int, c_long, c_uint, c_void};

pub(crate) const EIO: c_int = 5;
pub(crate) const ENXIO: c_int = 6;
pub(crate) const EBADF: c_int = 9;
pub(crate) const ENOENT: c_int = 2;
pub(crate) const ENOMEM: c_int = 12;
pub(crate) const EACCES: c_int = 13;
pub(crate) const ENOTDIR: c_int = 20;
pub(crate) const EINVAL: c_int = 22;
pub(crate) const EROFS: c_int = 30;
pub(crate) const ENOSYS: c_int = 38;
pub(crate) const ENOTSUP: c_int = 95;

pub(crate) const O_ACCMODE: c_int = 3;
pub(crate) const O_TRUNC: c_int = 0o1000;
pub(crate) const O_CLOEXEC: c_int = 0o2_000_000;
pub(crate) const O_PATH: c_int = 0o10_000_000;
#[cfg(target_arch = "x86_64")]
pub(crate) const O_DIRECTORY: c_int = 0o200_000;
#[cfg(not(target_arch = "x86_64"))]
pub(crate) const O_DIRECTORY: c_int = 0o40_000;
pub(crate) const AT_FDCWD: c_int = -100;
pub(crate) const W_OK: c_int = 2;
pub(crate) const X_OK: c_int = 1;

pub(crate) const PROT_READ: c_int = 1;
pub(crate) const PROT_WRITE: c_int = 2;
pub(crate) const MAP_SHARED: c_int = 1;
pub(crate) const MAP_PRIVATE: c_int = 2;
pub(crate) const MAP_TYPE: c_int = 0xf;
pub(crate) const MAP_FIXED: c_int = 0x10;
pub(crate) const MAP_ANONYMOUS: c_int = 0x20;
pub(crate) const MAP_NORESERVE: c_int = 0x4000;
pub(crate) const MAP_POPULATE: c_int = 0x8000;
pub(crate) const MAP_FIXED_NOREPLACE: c_int = 0x10_0000;
pub(crate) const MREMAP_MAYMOVE: c_int = 1;
pub(crate) const MREMAP_FIXED: c_int = 2;
pub(crate) const MADV_POPULATE_READ: c_int = 22;
pub(crate) const MFD_CLOEXEC: c_uint = 1;
pub(crate) const MFD_ALLOW_SEALING: c_uint = 2;
pub(crate) const MFD_NOEXEC_SEAL: c_uint = 8;
pub(crate) const F_ADD_SEALS: c_int = 1033;
/// `F_SEAL_SEAL`, `F_SEAL_SHRINK` and `F_SEAL_GROW`: length and seals cannot change any more.
pub(crate) const F_SEAL_LENGTH_AND_SEALS: c_int = 1 | 2 | 4;
pub(crate) const F_SEAL_WRITE: c_int = 8;
pub(crate) const F_SEAL_FUTURE_WRITE: c_int = 16;

pub(crate) const SEEK_SET: c_int = 0;
pub(crate) const SEEK_CUR: c_int = 1;
pub(crate) const SEEK_END: c_int = 2;
pub(crate) const SEEK_DATA: c_int = 3;
pub(crate) const SEEK_HOLE: c_int = 4;

#[cfg(target_arch = "x86_64")]
pub(crate) const SYS_STATX: c_long = 332;
#[cfg(not(target_arch = "x86_64"))]
pub(crate) const SYS_STATX: c_long = 291;

/// The same on every architecture.
pub(crate) const SYS_MEMFD_SECRET: c_long = 447;

pub(crate) const SOL_SOCKET: c_int = 1;
pub(crate) const SCM_RIGHTS: c_int = 1;
pub(crate) const MSG_CMSG_CLOEXEC: c_int = 0x4000_0000;

/// What `mmap` returns on failure.
pub(crate) const MAP_FAILED: *mut c_void = usize::MAX as *mut c_void;

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Iovec {
    pub(crate) base: *mut c_void,
    pub(crate) length: usize,
}

#[repr(C)]
pub(crate) struct Message {
    pub(crate) name: *mut c_void,
    pub(crate) name_length: c_uint,
    pub(crate) parts: *mut Iovec,
    pub(crate) part_count: usize,
    pub(crate) control: *mut c_void,
    pub(crate) control_length: usize,
    pub(crate) flags: c_int,
}

#[repr(C)]
pub(crate) struct CookieFunctions {
    pub(crate) read: Option<unsafe extern "C" fn(*mut c_void, *mut c_char, usize) -> isize>,
    pub(crate) write: Option<unsafe extern "C" fn(*mut c_void, *const c_char, usize) -> isize>,
    pub(crate) seek: Option<unsafe extern "C" fn(*mut c_void, *mut i64, c_int) -> c_int>,
    pub(crate) close: Option<unsafe extern "C" fn(*mut c_void) -> c_int>,
}

unsafe extern "C" {
    pub(crate) fn __errno_location() -> *mut c_int;
    pub(crate) fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
    pub(crate) fn pthread_atfork(
        before: Option<extern "C" fn()>,
        in_parent: Option<extern "C" fn()>,
        in_child: Option<extern "C" fn()>,
    ) -> c_int;
    pub(crate) fn memfd_create(name: *const c_char, flags: c_uint) -> c_int;
    pub(crate) fn fcntl(fd: c_int, command: c_int, ...) -> c_int;
    pub(crate) fn fclose(stream: *mut c_void) -> c_int;
    pub(crate) fn recvmsg(socket: c_int, message: *mut Message, flags: c_int) -> isize;
    pub(crate) fn mremap(
        old: *mut c_void,
        old_length: usize,
        length: usize,
        flags: c_int,
        ...
    ) -> *mut c_void;
    pub(crate) fn mprotect(address: *mut c_void, length: usize, protection: c_int) -> c_int;
    pub(crate) fn munmap(address: *mut c_void, length: usize) -> c_int;
    pub(crate) fn madvise(address: *mut c_void, length: usize, advice: c_int) -> c_int;
    pub(crate) fn strdup(text: *const c_char) -> *mut c_char;
    pub(crate) fn getpagesize() -> c_int;
    pub(crate) fn fopencookie(cookie: *mut c_void, mode: *const c_char, io: CookieFunctions) -> *mut c_void;
}

pub(crate) fn errno() -> c_int {
    // SAFETY: Needed because std has no function for it that does not allocate. The pointer is valid as long
    // as the thread runs.
    unsafe { *__errno_location() }
}

pub(crate) fn set_errno(error: c_int) {
    // SAFETY: As above.
    unsafe { *__errno_location() = error }
}

pub(crate) fn page_size() -> usize {
    // SAFETY: Needed because std has no function for it. The call takes no arguments.
    usize::try_from(unsafe { getpagesize() }).unwrap_or(4096)
}
