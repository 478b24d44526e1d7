//! Takes ownership of the standard descriptors.
#![allow(unsafe_code)]

use std::os::fd::{FromRawFd as _, OwnedFd};

/// Standard input, output and error as owned descriptors, for a process whose parent passed other files in
/// their place. To be called once, by a process that prints nothing.
pub(crate) fn take_standard_descriptors() -> [OwnedFd; 3] {
    // SAFETY: the standard library ensures that the three are open from the start of the process on, and
    // the caller is their only user.
    [0, 1, 2].map(|fd| unsafe { OwnedFd::from_raw_fd(fd) })
}
