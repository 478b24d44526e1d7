//! Simulates a power cut of a mounted file system by an ioctl that ext4 and XFS offer for tests. This is the
//! only `unsafe` code of this program.
#![allow(unsafe_code)]

use std::fs::File;
use std::path::Path;

use rustix::ioctl::{Opcode, Setter, ioctl, opcode};

use crate::Outcome;

/// `FS_IOC_SHUTDOWN`, which takes a pointer to a `u32` although its direction says otherwise.
const SHUTDOWN: Opcode = opcode::read::<u32>(b'X', 125);
/// Unwritten data is lost, including the journal's latest transaction.
const NO_LOG_FLUSH: u32 = 2;

/// Shuts down the file system of `directory`. Data that it has not written yet is lost.
///
/// # Errors
/// When the file system does not support it.
pub(crate) fn cut_power(directory: &Path) -> Outcome<()> {
    let file = File::open(directory)?;
    // SAFETY: needed because no safe crate has this call; sound because the kernel reads the one
    // `u32` that `Setter` points to, as `opcode::read::<u32>` says, and writes nowhere.
    unsafe { ioctl(&file, Setter::<SHUTDOWN, u32>::new(NO_LOG_FLUSH)) }
        .map_err(|error| format!("{}: cannot be shut down: {error}", directory.display()).into())
}
