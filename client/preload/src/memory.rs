//! Memory files (`memfd_create`) and their descriptors.

use std::ffi::{CStr, c_int};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd};
use std::sync::atomic::{AtomicI32, Ordering};

use crate::next;
use crate::sys::{
    F_ADD_SEALS, F_SEAL_FUTURE_WRITE, F_SEAL_LENGTH_AND_SEALS, F_SEAL_WRITE, MFD_ALLOW_SEALING, MFD_CLOEXEC,
    MFD_NOEXEC_SEAL, O_CLOEXEC, fcntl, memfd_create,
};

/// An empty memory file; `None` on failure, with `errno` set.
pub(crate) fn memory_file(name: &CStr) -> Option<File> {
    // Some systems require the first flag (`vm.memfd_noexec`); Linux before 6.3 does not know it.
    [MFD_NOEXEC_SEAL, MFD_ALLOW_SEALING].into_iter().find_map(|flag| {
        // SAFETY: Needed to create a file outside any file system. The name is a C string.
        let fd = unsafe { memfd_create(name.as_ptr(), MFD_CLOEXEC | flag) };
        // SAFETY: Needed to own the descriptor, which was just created.
        (fd >= 0).then(|| File::from(unsafe { OwnedFd::from_raw_fd(fd) }))
    })
}

/// Seals a memory file that is not mapped, and returns a read-only descriptor of it.
pub(crate) fn seal_and_reopen(file: &File) -> io::Result<OwnedFd> {
    let fd = seal(file).then(|| reopen(file, O_CLOEXEC)).flatten();
    fd.ok_or_else(io::Error::last_os_error)
}

/// Prevents any further writing to the file and changes of its length or seals; false on failure.
pub(crate) fn seal(file: &File) -> bool {
    // `F_SEAL_WRITE` is for Linux before 5.1. It has more preconditions, and may wait some milliseconds for
    // references to the file's pages.
    [F_SEAL_FUTURE_WRITE, F_SEAL_WRITE].into_iter().any(|write| {
        // SAFETY: Needed because std has no function for it. The call takes only integers.
        unsafe { fcntl(file.as_raw_fd(), F_ADD_SEALS, F_SEAL_LENGTH_AND_SEALS | write) == 0 }
    })
}

/// Opens a file again with other flags; `None` on failure, with `errno` set.
pub(crate) fn reopen(file: &File, flags: c_int) -> Option<OwnedFd> {
    // SAFETY: Needed because std would call the hook of `open`. The path is a C string.
    let fd = unsafe { next::open64(proc_path(file.as_raw_fd()).as_ptr().cast(), flags, 0) };
    // SAFETY: Needed to own the descriptor, which was just created.
    (fd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Holds one placeholder or none. It uses no lock, because a child forked meanwhile could find it locked.
pub(crate) struct SparePlaceholder(AtomicI32);

impl Default for SparePlaceholder {
    fn default() -> Self {
        Self(AtomicI32::new(-1))
    }
}

impl SparePlaceholder {
    pub(crate) fn take(&self) -> Option<File> {
        let fd = self.0.swap(-1, Ordering::AcqRel);
        // SAFETY: Needed to own the descriptor, which `put` released. The swap returns it only once.
        (fd >= 0).then(|| File::from(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    pub(crate) fn put(&self, file: File) {
        let before = self.0.swap(file.into_raw_fd(), Ordering::AcqRel);
        // SAFETY: As in `take`.
        drop((before >= 0).then(|| unsafe { OwnedFd::from_raw_fd(before) }));
    }
}

/// The path of a descriptor under `/proc`, as a C string.
pub(crate) fn proc_path(fd: c_int) -> Vec<u8> {
    format!("/proc/self/fd/{fd}\0").into_bytes()
}
