//! Takes ownership of descriptors that this process was started with.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{FromRawFd as _, OwnedFd, RawFd};

/// Standard input, output and error as owned descriptors, for a process whose parent passed other files in
/// their place. To be called once, by a process that prints nothing.
pub(crate) fn take_standard_descriptors() -> [OwnedFd; 3] {
    // SAFETY: the standard library ensures that the three are open from the start of the process on, and
    // the caller is their only user.
    [0, 1, 2].map(|fd| unsafe { OwnedFd::from_raw_fd(fd) })
}

/// The number of the first descriptor after the standard ones.
const FIRST_PASSED: RawFd = 3;

/// The first descriptor that a service manager has passed. To be called at most once, by a process that was told of
/// such a descriptor and has opened none itself. Fails if there is none.
pub(crate) fn take_first_passed_descriptor() -> io::Result<OwnedFd> {
    // SAFETY: needed because no safe call asks about a number; sound because it takes no pointer and reads a flag.
    if unsafe { libc::fcntl(FIRST_PASSED, libc::F_GETFD) } == -1 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is open, and the caller is its only user: the process was started with it.
    Ok(unsafe { OwnedFd::from_raw_fd(FIRST_PASSED) })
}
