//! The power cut of a mounted file system, which ext4 and XFS offer for tests: the only `unsafe`
//! code of this program.
#![allow(unsafe_code)]

use std::fs::File;
use std::path::Path;

use rustix::ioctl::{Opcode, Setter, ioctl, opcode};

use crate::Outcome;

/// `FS_IOC_SHUTDOWN`, which takes a pointer to a `u32` although its direction says otherwise.
const SHUTDOWN: Opcode = opcode::read::<u32>(b'X', 125);
/// What is in memory alone is lost, the journal's latest transaction included.
const NO_LOG_FLUSH: u32 = 2;

/// Cuts the file system on which `directory` is off from its disk. What it has not written is lost.
///
/// # Errors
/// When the file system cannot do this.
pub(crate) fn go_down(directory: &Path) -> Outcome<()> {
    let file = File::open(directory)?;
    // SAFETY: needed because no safe crate has this call; sound because the kernel reads the one
    // `u32` that `Setter` points to, as `opcode::read::<u32>` says, and writes nowhere.
    unsafe { ioctl(&file, Setter::<SHUTDOWN, u32>::new(NO_LOG_FLUSH)) }
        .map_err(|error| format!("{}: cannot be shut down: {error}", directory.display()).into())
}
