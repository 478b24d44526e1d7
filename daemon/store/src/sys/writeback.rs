//! `sync_file_range(2)`: safe crates omit it because, despite its name, it makes nothing durable.
#![allow(unsafe_code)]

use std::os::fd::{AsFd, AsRawFd};

/// Asks the kernel to start writing a file's dirty pages from `offset` on, and does not wait.
///
/// Only a hint: it bounds dirty memory and makes the later sync cheap, but makes nothing durable
/// (`docs/STORE-FORMAT.md`, commit order). Failure is therefore ignored.
pub(crate) fn start_writeback(file: impl AsFd, offset: u64, length: u64) {
    let (Ok(offset), Ok(length)) = (i64::try_from(offset), i64::try_from(length)) else { return };
    let fd = file.as_fd().as_raw_fd();
    // SAFETY: needed because neither std nor rustix has this call. It is sound because it takes
    // no pointers and `fd` stays open while `file` is borrowed.
    unsafe { libc::sync_file_range(fd, offset, length, libc::SYNC_FILE_RANGE_WRITE) };
}
