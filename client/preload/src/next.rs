//! The functions that the hooks replace: those of the next library in the linker's order, usually libc.

use std::ffi::{CStr, c_char, c_int, c_long, c_uint, c_void};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::sys::{ENOSYS, Iovec, MAP_FAILED, dlsym, set_errno};

/// Declares functions of the next library, and what they return if it has no such function.
macro_rules! next {
    ($(fn $name:ident($($argument:ident: $type:ty),*) -> $result:ty, else $absent:expr;)*) => {$(
        /// The next library's function with this name, with the contract of that function.
        pub(crate) unsafe fn $name($($argument: $type),*) -> $result {
            static FOUND: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
            const NAME: &CStr = match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                Ok(name) => name,
                Err(_) => c"",
            };
            let Some(found) = find(&FOUND, NAME) else {
                set_errno(ENOSYS);
                return $absent;
            };
            // SAFETY: Needed to call a function that was found by name. The C library's function with this
            // name has this type on 64-bit Linux; the caller observes its contract.
            unsafe {
                let function: unsafe extern "C" fn($($type),*) -> $result = std::mem::transmute(found);
                function($($argument),*)
            }
        }
    )*};
}

next! {
    fn open64(path: *const c_char, flags: c_int, mode: c_uint) -> c_int, else -1;
    fn openat64(dir: c_int, path: *const c_char, flags: c_int, mode: c_uint) -> c_int, else -1;
    fn fopen(path: *const c_char, mode: *const c_char) -> *mut c_void, else ptr::null_mut();
    fn fopen64(path: *const c_char, mode: *const c_char) -> *mut c_void, else ptr::null_mut();
    fn freopen(path: *const c_char, mode: *const c_char, stream: *mut c_void) -> *mut c_void,
        else ptr::null_mut();
    fn freopen64(path: *const c_char, mode: *const c_char, stream: *mut c_void) -> *mut c_void,
        else ptr::null_mut();
    fn fdopen(fd: c_int, mode: *const c_char) -> *mut c_void, else ptr::null_mut();
    fn fileno(stream: *mut c_void) -> c_int, else -1;
    fn stat(path: *const c_char, out: *mut c_void) -> c_int, else -1;
    fn lstat(path: *const c_char, out: *mut c_void) -> c_int, else -1;
    fn __xstat(version: c_int, path: *const c_char, out: *mut c_void) -> c_int, else -1;
    fn __lxstat(version: c_int, path: *const c_char, out: *mut c_void) -> c_int, else -1;
    fn fstatat(dir: c_int, path: *const c_char, out: *mut c_void, flags: c_int) -> c_int, else -1;
    fn __fxstatat(version: c_int, dir: c_int, path: *const c_char, out: *mut c_void, flags: c_int)
        -> c_int, else -1;
    fn statx(dir: c_int, path: *const c_char, flags: c_int, mask: c_uint, out: *mut c_void) -> c_int, else -1;
    fn access(path: *const c_char, mode: c_int) -> c_int, else -1;
    fn euidaccess(path: *const c_char, mode: c_int) -> c_int, else -1;
    fn faccessat(dir: c_int, path: *const c_char, mode: c_int, flags: c_int) -> c_int, else -1;
    fn realpath(path: *const c_char, out: *mut c_char) -> *mut c_char, else ptr::null_mut();
    fn readlink(path: *const c_char, out: *mut c_char, length: usize) -> isize, else -1;
    fn readlinkat(dir: c_int, path: *const c_char, out: *mut c_char, length: usize) -> isize, else -1;
    fn opendir(path: *const c_char) -> *mut c_void, else ptr::null_mut();
    fn readdir(stream: *mut c_void) -> *mut c_void, else ptr::null_mut();
    fn readdir64(stream: *mut c_void) -> *mut c_void, else ptr::null_mut();
    fn dirfd(stream: *mut c_void) -> c_int, else -1;
    fn scandir(path: *const c_char, list: *mut c_void, filter: *mut c_void, compare: *mut c_void)
        -> c_int, else -1;
    fn chdir(path: *const c_char) -> c_int, else -1;
    fn getcwd(out: *mut c_char, length: usize) -> *mut c_char, else ptr::null_mut();
    fn unlink(path: *const c_char) -> c_int, else -1;
    fn rmdir(path: *const c_char) -> c_int, else -1;
    fn remove(path: *const c_char) -> c_int, else -1;
    fn unlinkat(dir: c_int, path: *const c_char, flags: c_int) -> c_int, else -1;
    fn mkdir(path: *const c_char, mode: c_uint) -> c_int, else -1;
    fn mkdirat(dir: c_int, path: *const c_char, mode: c_uint) -> c_int, else -1;
    fn rename(old: *const c_char, new: *const c_char) -> c_int, else -1;
    fn renameat(old_dir: c_int, old: *const c_char, dir: c_int, new: *const c_char) -> c_int, else -1;
    fn renameat2(old_dir: c_int, old: *const c_char, dir: c_int, new: *const c_char, flags: c_uint)
        -> c_int, else -1;
    fn link(old: *const c_char, new: *const c_char) -> c_int, else -1;
    fn linkat(old_dir: c_int, old: *const c_char, dir: c_int, new: *const c_char, flags: c_int)
        -> c_int, else -1;
    fn symlink(target: *const c_char, path: *const c_char) -> c_int, else -1;
    fn symlinkat(target: *const c_char, dir: c_int, path: *const c_char) -> c_int, else -1;
    fn chmod(path: *const c_char, mode: c_uint) -> c_int, else -1;
    fn fchmodat(dir: c_int, path: *const c_char, mode: c_uint, flags: c_int) -> c_int, else -1;
    fn truncate64(path: *const c_char, length: i64) -> c_int, else -1;
    fn utimensat(dir: c_int, path: *const c_char, times: *const c_void, flags: c_int) -> c_int, else -1;
    fn read(fd: c_int, out: *mut c_void, length: usize) -> isize, else -1;
    fn pread64(fd: c_int, out: *mut c_void, length: usize, offset: i64) -> isize, else -1;
    fn readv(fd: c_int, parts: *const Iovec, count: c_int) -> isize, else -1;
    fn preadv64(fd: c_int, parts: *const Iovec, count: c_int, offset: i64) -> isize, else -1;
    fn preadv64v2(fd: c_int, parts: *const Iovec, count: c_int, offset: i64, flags: c_int)
        -> isize, else -1;
    fn lseek64(fd: c_int, offset: i64, whence: c_int) -> i64, else -1;
    fn mmap64(at: *mut c_void, length: usize, protection: c_int, flags: c_int, fd: c_int, offset: i64)
        -> *mut c_void, else MAP_FAILED;
    fn copy_file_range(from: c_int, at: *mut i64, to: c_int, to_at: *mut i64, length: usize, flags: c_uint)
        -> isize, else -1;
    fn sendfile64(to: c_int, from: c_int, at: *mut i64, length: usize) -> isize, else -1;
    fn getxattr(path: *const c_char, name: *const c_char, out: *mut c_void, length: usize) -> isize, else -1;
    fn lgetxattr(path: *const c_char, name: *const c_char, out: *mut c_void, length: usize) -> isize, else -1;
    fn listxattr(path: *const c_char, out: *mut c_char, length: usize) -> isize, else -1;
    fn llistxattr(path: *const c_char, out: *mut c_char, length: usize) -> isize, else -1;
    fn posix_fadvise64(fd: c_int, offset: i64, length: i64, advice: c_int) -> c_int, else ENOSYS;
    fn syscall(number: c_long, a: c_long, b: c_long, c: c_long, d: c_long, e: c_long, f: c_long)
        -> c_long, else -1;
}

/// The function with this name in the libraries after this one, found once.
fn find(found: &AtomicPtr<c_void>, name: &CStr) -> Option<*mut c_void> {
    /// `RTLD_NEXT`.
    const NEXT: *mut c_void = usize::MAX as *mut c_void;
    let mut function = found.load(Ordering::Relaxed);
    if function.is_null() {
        // SAFETY: Needed because the linker has bound the name to the hook. `name` is a C string.
        function = unsafe { dlsym(NEXT, name.as_ptr()) };
        found.store(function, Ordering::Relaxed);
    }
    (!function.is_null()).then_some(function)
}
