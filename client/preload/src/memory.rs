//! Files in memory, and places for their descriptors.

use std::ffi::{CStr, c_int};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd};
use std::sync::atomic::{AtomicI32, Ordering};

use crate::next;
use crate::sys::{
    F_ADD_SEALS, F_SEAL_FORM, F_SEAL_FUTURE_WRITE, F_SEAL_WRITE, MFD_ALLOW_SEALING, MFD_CLOEXEC, O_CLOEXEC,
    fcntl, memfd_create,
};

/// An empty file in memory; `None` is a failure, with `errno` set.
pub(crate) fn memory_file(name: &CStr) -> Option<File> {
    // SAFETY: Needed to make a file without a place. The name is a C string.
    let fd = unsafe { memfd_create(name.as_ptr(), MFD_CLOEXEC | MFD_ALLOW_SEALING) };
    // SAFETY: Needed to own it: it was made just now.
    (fd >= 0).then(|| File::from(unsafe { OwnedFd::from_raw_fd(fd) }))
}

/// Ends all writing to a memory file that is mapped nowhere, and gives a descriptor to read it.
pub(crate) fn sealed(file: &File) -> io::Result<OwnedFd> {
    let sealed = seal(file).then(|| reopened(file, O_CLOEXEC)).flatten();
    sealed.ok_or_else(io::Error::last_os_error)
}

pub(crate) fn seal(file: &File) -> bool {
    // The second is for Linux before 5.1. It asks more, and waits some milliseconds for pages to settle.
    [F_SEAL_FUTURE_WRITE, F_SEAL_WRITE].into_iter().any(|write| {
        // SAFETY: Needed because std has no name for it. Takes numbers.
        unsafe { fcntl(file.as_raw_fd(), F_ADD_SEALS, F_SEAL_FORM | write) == 0 }
    })
}

/// Another descriptor of a file, with flags of its own; `None` is a failure, with `errno` set.
pub(crate) fn reopened(file: &File, flags: c_int) -> Option<OwnedFd> {
    // SAFETY: Needed because std would come back to our own `open`. The path is a C string.
    let fd = unsafe { next::open64(place_of(file.as_raw_fd()).as_ptr().cast(), flags, 0) };
    // SAFETY: Needed to own it: it was made just now.
    (fd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(fd) })
}

/// A place for a stand-in. Without a lock: a child that is forked meanwhile must not find it locked.
pub(crate) struct Spare(AtomicI32);

impl Default for Spare {
    fn default() -> Self {
        Self(AtomicI32::new(-1))
    }
}

impl Spare {
    pub(crate) fn take(&self) -> Option<File> {
        let fd = self.0.swap(-1, Ordering::AcqRel);
        // SAFETY: Needed to own it again: `put` gave it up, and it is taken once.
        (fd >= 0).then(|| File::from(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// The one that was put last stays.
    pub(crate) fn put(&self, file: File) {
        let before = self.0.swap(file.into_raw_fd(), Ordering::AcqRel);
        // SAFETY: As in `take`.
        drop((before >= 0).then(|| unsafe { OwnedFd::from_raw_fd(before) }));
    }
}

/// The path of a descriptor, as a C string.
pub(crate) fn place_of(fd: c_int) -> Vec<u8> {
    format!("/proc/self/fd/{fd}\0").into_bytes()
}
