//! A second process that unmounts if the mount's process dies.
//!
//! When a FUSE process dies, the kernel closes its connection but leaves the mount, in which every access
//! fails with "transport endpoint is not connected" until it is unmounted.

use std::io::{self, Read as _};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount};

/// The hidden command that the guard runs.
pub(crate) const COMMAND: &str = "mount-guard";

/// The other process. It unmounts a stale mount when this is dropped or this process dies.
#[derive(Debug)]
#[must_use]
pub(super) struct Guard {
    _process: Child,
}

impl Guard {
    /// Starts it in its own process group, where Ctrl-C does not reach it.
    pub(super) fn start(directory: &Path) -> io::Result<Self> {
        let mut command = Command::new("/proc/self/exe");
        command.arg(COMMAND).arg(directory).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        Ok(Self { _process: command.process_group(0).spawn()? })
    }
}

/// Waits until the other end of standard input is closed, and unmounts `directory` if its mount is stale.
pub(crate) fn watch(directory: &Path) {
    // The mount's process writes nothing; an error has the same meaning as its end.
    let _ = io::stdin().read_to_end(&mut Vec::new());
    for _ in 0..MAX_CHECKS {
        match rustix::fs::statfs(directory) {
            Err(Errno::NOTCONN | Errno::CONNABORTED) => return detach(directory),
            Ok(file_system) if u32::try_from(file_system.f_type) == Ok(FUSE_MAGIC) => sleep(CHECK_INTERVAL),
            // Unmounted.
            _ => return,
        }
    }
}

/// Unmounts lazily: the mount disappears now, and the kernel frees it when the last file is closed.
pub(super) fn detach(directory: &Path) {
    if unmount(directory, UnmountFlags::DETACH).is_err() {
        // Only root may unmount directly. If the helper fails too, there is no other way.
        let _ = Command::new("fusermount3").args(["-u", "-q", "-z", "--"]).arg(directory).output();
    }
}

const FUSE_MAGIC: u32 = 0x6573_5546;
/// A dying process closes its files one after the other, so its connection may stay open for some time.
const MAX_CHECKS: u32 = 100;
const CHECK_INTERVAL: Duration = Duration::from_millis(50);
