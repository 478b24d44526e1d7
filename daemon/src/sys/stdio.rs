//! The standard descriptors as things of their own.
#![allow(unsafe_code)]

use std::os::fd::{FromRawFd as _, OwnedFd};

/// Standard input, output and error, for a process whose parent gave it something else in their place,
/// so that each can be closed. To be called once, and by who prints nothing.
pub(crate) fn take_standard_descriptors() -> [OwnedFd; 3] {
    // SAFETY: the three are open from the start of the process on (the standard library sees to that), and
    // the caller is the only one who uses them.
    [0, 1, 2].map(|fd| unsafe { OwnedFd::from_raw_fd(fd) })
}
